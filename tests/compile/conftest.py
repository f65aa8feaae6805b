"""Compile tests; `pytest tests/compile` runs them alone, with a stand-in driver in place of Triton's own."""

from __future__ import annotations

import os
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    raise pytest.UsageError("tests/compile needs Triton's compiler: unset TRITON_INTERPRET")

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker("compile")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests recorded of kernels (registers, shared memory), in the log although they passed."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    lines = sorted({str(said) for report in reports for name, said in report.user_properties if name == "kernel"})
    if lines:
        terminalreporter.section("kernels")
        for line in lines:
            terminalreporter.write_line(line)
