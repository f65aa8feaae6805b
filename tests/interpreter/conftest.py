"""Triton kernels on the test device: in Triton's interpreter on a CPU, compiled on a GPU, by the same tests.

Needs a process of its own on a CPU (`pytest tests/interpreter`), since the interpreter is chosen when
Triton is first imported.
"""

from __future__ import annotations

import os
import sys

import pytest
from quick_interpreter import make_quick

if os.environ["TREEATTN_TEST_DEVICE"] == "cpu":
    if os.environ.get("TRITON_INTERPRET") != "1" and "triton" in sys.modules:
        raise pytest.UsageError("tests/interpreter needs its own process: triton is imported already")
    os.environ["TRITON_INTERPRET"] = "1"
    # A program of the interpreter is many small numpy calls, which more threads only slow down.
    os.environ["OMP_NUM_THREADS"] = "1"
    make_quick()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker("interpreter")
