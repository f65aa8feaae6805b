"""The harness itself, on a small dot kernel: it must see shared memory, registers and spills."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl

from treeattn.testing.compile_matrix import SHARED_LIMIT_BYTES, CompileReport, compile_for, parse_ptxas_log

ARCHS = tuple(SHARED_LIMIT_BYTES)


@triton.jit
def dot_kernel(
    a_ptr,  # [M, k_len], row stride stride_a
    b_ptr,  # [k_len, N], contiguous
    out_ptr,  # [M, N], contiguous
    k_len,
    stride_a,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    rows, cols, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.zeros([M, N], tl.float32)
    for start in tl.range(0, k_len, K):
        a = tl.load(a_ptr + rows[:, None] * stride_a + start + inner[None, :])
        b = tl.load(b_ptr + (start + inner[:, None]) * N + cols[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], acc.to(out_ptr.dtype.element_ty))


def compile_dot(arch: int, dtype: torch.dtype, tile: tuple[int, int, int], **options: int) -> CompileReport:
    m, n, k = tile
    return compile_for(arch, dot_kernel, [dtype, dtype, dtype, 1024, 1024, m, n, k], **options)


def test_installed_triton_is_the_one_asked_for() -> None:
    expected = os.environ.get("TREEATTN_TEST_TRITON")
    assert expected is None or triton.__version__ == expected


@pytest.mark.parametrize("arch", ARCHS)
def test_small_dot_fits_every_chip(arch: int) -> None:
    report = compile_dot(arch, torch.float16, (64, 64, 64), num_warps=4, num_stages=3)
    # Triton keeps num_stages - 1 or num_stages of the two 8 KiB operand tiles in flight.
    assert 2 * 2 * 8192 <= report.shared_bytes <= 3 * 2 * 8192 + 1024
    assert report.fits
    assert report.spill_bytes == 0
    assert 0 < report.registers <= 255
    assert report.cubin_bytes > 0
    assert (report.tensor_memory_columns > 0) == (arch in (100, 103))


def test_too_much_shared_memory_is_seen() -> None:
    report = compile_dot(89, torch.bfloat16, (128, 128, 128), num_warps=4, num_stages=4)
    assert report.shared_bytes > report.shared_limit_bytes
    assert not report.fits
    assert compile_dot(90, torch.bfloat16, (128, 128, 128), num_warps=4, num_stages=3).fits


def test_spills_are_seen() -> None:
    # A 256 x 128 float32 accumulator is 256 registers for each of 128 threads; a thread has 255.
    report = compile_dot(90, torch.float32, (256, 128, 32), num_warps=4, num_stages=1)
    assert report.registers == 255
    assert report.spill_bytes > 0


def test_arguments_by_name_give_the_same_binary() -> None:
    pointers = dict.fromkeys(("a_ptr", "b_ptr", "out_ptr"), torch.float16)
    named = {**pointers, "k_len": 1024, "stride_a": 1024, "M": 64, "N": 64, "K": 64}
    assert compile_for(90, dot_kernel, named, num_warps=4) == compile_dot(
        90, torch.float16, (64, 64, 64), num_warps=4
    )


def test_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/nowhere")
    monkeypatch.delenv("TRITON_ALWAYS_COMPILE", raising=False)
    compile_dot(90, torch.float16, (64, 64, 64))
    assert os.environ["TRITON_CACHE_DIR"] == "/nowhere"
    assert "TRITON_ALWAYS_COMPILE" not in os.environ


def test_unknown_chip_is_refused() -> None:
    with pytest.raises(ValueError, match="got 75"):
        compile_dot(75, torch.float16, (64, 64, 64))


def test_plain_function_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"triton\.jit"):
        compile_for(90, dot_kernel.fn, [])


def test_ptxas_log_of_several_functions() -> None:
    log = """
ptxas info    : Compiling entry function 'f' for 'sm_90a'
ptxas info    : Function properties for f
    32 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
ptxas info    : Function properties for g
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers
"""
    assert parse_ptxas_log(log) == (168, 40)
    with pytest.raises(ValueError, match="0 register counts"):
        parse_ptxas_log("")
