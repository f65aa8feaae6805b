"""Triton's interpreter without what it does for nothing (quick_interpreter) is still Triton's interpreter."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(os.environ["TREEATTN_TEST_DEVICE"] != "cpu", reason="compiled there")


@triton.jit
def doubled(numbers):
    return numbers + numbers


@triton.jit
def kernel(
    out_ptr,  # int32 [BLOCK]
    n,
    BLOCK: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, doubled(doubled(at)) + tl.cdiv(n, 2), mask=at < n)


def run(n: int) -> list[int]:
    out = torch.full((8,), -1, dtype=torch.int32)
    kernel[(1,)](out, n, BLOCK=8)
    return out.tolist()


def test_language_is_replaced_for_the_launch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    replaced: list[Any] = []
    tensor_methods = interpreter._patch_lang_tensor
    monkeypatch.setattr(
        interpreter, "_patch_lang_tensor", lambda *given: (replaced.append(given), tensor_methods(*given))
    )
    run(5)  # Triton leaves triton.language.core, which its own functions see, replaced from the first launch on
    replaced.clear()
    assert run(5) == [3, 7, 11, 15, 19, -1, -1, -1]
    assert len(replaced) == 1
    assert tl.core.is_builtin(tl.load)
    assert tl.core.is_builtin(tl.tensor.__add__)


def test_overflow_is_checked_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import interpreter_builder

    assert run(2**31 - 1)[0] == -(2**30)
    monkeypatch.setattr(interpreter_builder, "options", dataclasses.replace(interpreter_builder.options, debug=True))
    with pytest.raises(Exception, match="overflow detected"):
        run(2**31 - 1)
