"""The real vLLM on a CPU, kernels in Triton's interpreter: needs a process and an environment of its own.

`python tests/adapters/run.py vllm` makes the environment from requirements.txt. Where vLLM is not installed nothing
here is collected.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["*.py"]

if importlib.util.find_spec("vllm"):
    if os.environ.get("TRITON_INTERPRET") != "1" and "triton" in sys.modules:
        raise pytest.UsageError("tests/adapters/vllm needs its own process: triton is imported already")
    # without a device list vLLM finds no Triton; with its CPU platform, Triton kernels are chosen by name
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_TARGET_DEVICE": "cpu"}
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}
    sys.path[:0] = [str(HERE), str(HERE / "stubs"), str(ROOT)]


@pytest.fixture(scope="session", autouse=True)
def process() -> None:
    """What a worker process has: placeholders for CUDA, process groups, the plugin."""
    import cuda_on_cpu  # noqa: F401
    import kit

    from treeattn.adapters.vllm.plugin import register

    register()
    kit.make_process_groups()


@pytest.fixture(autouse=True)
def no_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of one test are not there in the next."""
    from treeattn.adapters.vllm import trees

    monkeypatch.setattr(trees, "_current", None)
