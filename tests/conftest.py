"""Shared fixtures: one test body serves CPU and GPU, and `device` decides which.

On a machine with CUDA every test that takes `device` runs there, with all dtypes; elsewhere it runs on the
CPU. Tests that mean nothing without a GPU carry the marker `gpu`; without CUDA they are deselected, which
pytest's closing line counts, and never skipped one by one. TREEATTN_TEST_DEVICE=cpu|cuda overrides. Worker
processes take turns at the GPUs that TREEATTN_TEST_GPUS names (0,1).

Exhaustiveness follows HYPOTHESIS_PROFILE: `default` while working, `ci` (chosen where CI is set:
repeatable), or `thorough` for a long run.
"""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("default", deadline=None, max_examples=50)
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=100, derandomize=True, print_blob=True, database=None
)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default")
)


if os.environ.get("TREEATTN_TEST_GPUS"):  # before anything asks for a device
    test_gpus = os.environ["TREEATTN_TEST_GPUS"].split(",")
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = test_gpus[worker % len(test_gpus)]


def chosen_device() -> torch.device:
    name = os.environ.get("TREEATTN_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise pytest.UsageError(f"TREEATTN_TEST_DEVICE must be cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("TREEATTN_TEST_DEVICE=cuda, but torch sees no CUDA device")
    return torch.device(name)


# Set for good, so that nested conftests and the processes that a test starts decide alike.
os.environ["TREEATTN_TEST_DEVICE"] = chosen_device().type


def pytest_report_header(config: pytest.Config) -> str:
    return f"treeattn: device {chosen_device().type}, torch {torch.__version__}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if chosen_device().type == "cuda":
        return
    dropped = [item for item in items if item.get_closest_marker("gpu")]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device that test bodies shared between CPU and GPU run on."""
    return chosen_device()


@pytest.fixture(scope="session")
def backends(device: torch.device) -> tuple[str, ...]:
    """Backends to compare on `device`; Triton takes CPU tensors only in its interpreter."""
    takes_triton = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return ("reference", "torch", "triton") if takes_triton else ("reference", "torch")


@pytest.fixture(scope="session")
def dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Input dtypes to test on `device`; bf16 dots are silently wrong in Triton's CPU interpreter."""
    if device.type == "cpu":
        return (torch.float32, torch.float16)
    return (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    """A generator on `device`, seeded alike in every test."""
    return torch.Generator(device).manual_seed(0)
