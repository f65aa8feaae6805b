"""Where the CUDA kernels put numbers, against how PTX reads them: swizzle, operand descriptors, fragments.

The formulas of `csrc` against those of the PTX manual (canonical layouts of wgmma operands in the 128-byte swizzle,
layouts of fragments), over one tile, by index.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

PANEL_COLUMNS, ATOM_BYTES = 64, 1024


def ring_address(row: int, chunk: int, keys: int) -> int:
    """Producer: byte address in its slot of the 16-byte chunk of a row (ring.cuh)."""
    return chunk // 8 * keys * 128 + row * 128 + ((chunk % 8 ^ row % 8) << 4)


def copied(row_in_warp: int, chunk: int, warp: int, keys: int, head_dim: int) -> int:
    """The same as `Producer::copy` computes it, from a base and an exclusive or."""
    rows = 32 // (head_dim // 8)
    part, copy = row_in_warp % rows, row_in_warp // rows
    base = chunk // 8 * keys * 128 + (warp * (keys // 4) + part) * 128 + ((chunk % 8 ^ part) << 4)
    return (base ^ (copy * rows % 8 << 4)) + copy * rows * 128


def swizzled(address: int) -> int:
    """Where the tensor core looks: address bits 4 to 6 exclusive-or bits 7 to 9."""
    return address ^ (address >> 7 & 7) << 4


def stored(tile: Tensor) -> Tensor:
    """A slot of 2-byte numbers that holds a tile `[keys, head_dim]`."""
    keys, head_dim = tile.shape
    slot = torch.full((keys * head_dim,), float("nan"), dtype=tile.dtype)
    for row in range(keys):
        for chunk in range(head_dim // 8):
            at = ring_address(row, chunk, keys) // 2
            slot[at : at + 8] = tile[row, chunk * 8 : chunk * 8 + 8]
    return slot


def k_operand(slot: Tensor, step: int, keys: int) -> Tensor:
    """B `[16, keys]` of a K-major descriptor: rows of 128 bytes, 8 of them an atom, atoms `ATOM_BYTES` apart."""
    start = step // 4 * keys * 128 + step % 4 * 32
    found = torch.empty(16, keys, dtype=slot.dtype)
    for k in range(16):
        for n in range(keys):
            found[k, n] = slot[swizzled(start + n // 8 * ATOM_BYTES + n % 8 * 128 + 2 * k) // 2]
    return found


def v_operand(slot: Tensor, step: int, keys: int, head_dim: int) -> Tensor:
    """B `[16, head_dim]` of an MN-major descriptor: 64 columns a row, `leading` to the next 64, 8 k a `stride`."""
    start, leading, stride = step * 2 * ATOM_BYTES, keys * 128, ATOM_BYTES
    found = torch.empty(16, head_dim, dtype=slot.dtype)
    for k in range(16):
        for n in range(head_dim):
            at = start + n // 64 * leading + n % 64 * 2 + k // 8 * stride + k % 8 * 128
            found[k, n] = slot[swizzled(at) // 2]
    return found


def accumulator_place(thread: int, register: int) -> tuple[int, int]:
    """Row and column of an accumulator register (PTX, m64nN)."""
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register // 2 % 2)
    return row, register // 4 * 8 + thread % 4 * 2 + register % 2


def a_place(thread: int, register: int, half: int) -> tuple[int, int]:
    """Row and k of one half of an A register (PTX, m64k16)."""
    return thread // 32 * 16 + thread % 32 // 4 + 8 * (register % 2), register // 2 * 8 + thread % 4 * 2 + half


@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_copies_go_where_the_ring_says(keys: int, head_dim: int) -> None:
    for warp in range(4):
        for row in range(keys // 4):
            for chunk in range(head_dim // 8):
                want = ring_address(warp * (keys // 4) + row, chunk, keys)
                assert copied(row, chunk, warp, keys, head_dim) == want


@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_operands_read_what_was_copied(keys: int, head_dim: int) -> None:
    tile = torch.arange(keys * head_dim, dtype=torch.float64).view(keys, head_dim)
    slot = stored(tile)
    for step in range(head_dim // 16):
        assert torch.equal(k_operand(slot, step, keys), tile[:, 16 * step : 16 * step + 16].T)
    for step in range(keys // 16):
        assert torch.equal(v_operand(slot, step, keys, head_dim), tile[16 * step : 16 * step + 16])


def test_fragments_of_q_and_of_weights() -> None:
    head_dim, keys = 128, 64
    for thread in range(128):
        lane, warp = thread % 32, thread // 32
        local = warp * 16 + lane // 4
        for step in range(head_dim // 16):
            # load_q: register 4 step + half, and 4 step + 2 + half eight columns on; two numbers a register
            for half in range(2):
                for later in range(2):
                    row, column = local + 8 * half, 2 * (lane % 4 + 8 * step + 4 * later)
                    register = 2 * later + half
                    assert a_place(thread, register, 0) == (row, column - 16 * step)
        for register in range(keys // 4):
            # weights_of: register i holds scores 2 i and 2 i + 1; product step i / 4
            for half in range(2):
                row, column = accumulator_place(thread, 2 * register + half)
                assert a_place(thread, register % 4, half) == (row, column - 16 * (register // 4))


def test_mask_bits_are_of_the_score_they_hide() -> None:
    keys = 64
    for thread in range(128):
        lane = thread % 32
        for half in range(2):
            for word in range(keys // 32):
                for j in range(4):
                    for odd in range(2):
                        _, column = accumulator_place(thread, 4 * (4 * word + j) + 2 * half + odd)
                        assert column == 32 * word + 8 * j + odd + lane % 4 * 2
