"""Triton kernels on CPU tensors, in Triton's interpreter; `pytest tests/interpreter` runs them alone."""

from __future__ import annotations

import os
import sys

import pytest

if os.environ.get("TRITON_INTERPRET") != "1" and "triton" in sys.modules:
    raise pytest.UsageError(
        "triton was imported before TRITON_INTERPRET=1 could be set; run tests/interpreter in its own process"
    )
os.environ["TRITON_INTERPRET"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker("interpreter")
