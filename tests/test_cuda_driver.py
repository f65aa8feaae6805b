"""A launch of the CUDA backend in a thread that has no context yet: torch and Triton give it one, so must we."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from treeattn.cuda import launch
from treeattn.cuda.params import AttentionParams
from treeattn.driver import INVALID_CONTEXT, DriverError, LaunchConfig


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A launch whose driver answers `codes` in turn, and the devices whose context was made current."""
    made = object.__new__(launch.AttentionLaunch)
    made.device_index, made.function = 0, SimpleNamespace(handle=None, name="kernel")  # type: ignore[assignment]
    made.maps = SimpleNamespace(of=lambda *rest: b"")  # type: ignore[assignment]
    block = object.__new__(launch.Block)
    block.params, block.config = memoryview(AttentionParams()).cast("B"), LaunchConfig()
    made.free = [block]
    codes: list[int] = []
    current: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    block.launch = lambda: codes.pop(0)
    monkeypatch.setattr(launch, "make_current", current.append)
    return made, codes, current


def test_a_thread_without_context_gets_one(prepared: Any) -> None:
    made, codes, current = prepared
    codes += [INVALID_CONTEXT, 0]
    made(4, 16, 16, 16, 0, 0, 16, 0, 0, 1.0, 0.0)
    assert current == [0]
    assert codes == []


def test_other_errors_are_raised(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, codes, current = prepared

    def check(name: str, code: int) -> None:
        raise DriverError(f"{name} ({code})")

    monkeypatch.setattr(launch, "check", check)
    codes += [719]
    with pytest.raises(DriverError, match=r"launch of kernel \(719\)"):
        made(4, 16, 16, 16, 0, 0, 16, 0, 0, 1.0, 0.0)
    assert current == []
