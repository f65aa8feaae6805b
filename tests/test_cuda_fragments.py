"""Where the CUDA kernels put numbers, against how PTX reads them: swizzle, operand descriptors, fragments.

The formulas of `csrc` against those of the PTX manual (canonical layouts of wgmma operands in the 128-byte swizzle,
layouts of fragments), over one tile, by index; and boxes of tensor maps against the ring.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from treeattn.cuda.launch import CacheMaps

PANEL_COLUMNS, ATOM_BYTES = 64, 1024


def group_bytes(head_dim: int) -> int:
    """Of 8 rows of a slot."""
    return head_dim // PANEL_COLUMNS * ATOM_BYTES


def ring_address(row: int, chunk: int, head_dim: int) -> int:
    """Producer: byte address in its slot of the 16-byte chunk of a row (ring.cuh)."""
    panel = row // 8 * group_bytes(head_dim) + chunk // 8 * ATOM_BYTES
    return panel + row % 8 * 128 + ((chunk % 8 ^ row % 8) << 4)


def copied(row_in_warp: int, chunk: int, warp: int, keys: int, head_dim: int) -> int:
    """The same as `Producer::copy` computes it, from a base and an exclusive or."""
    rows = 32 // (head_dim // 8)
    part, copy = row_in_warp % rows, row_in_warp // rows
    stride, row = group_bytes(head_dim), warp * (keys // 4)
    base = chunk // 8 * ATOM_BYTES + row * (stride // 8) + part * 128 + ((chunk % 8 ^ part) << 4)
    later = copy * rows
    return (base + later // 8 * stride ^ (later % 8 << 4)) + later % 8 * 128


def swizzled(address: int) -> int:
    """Where the tensor core looks: address bits 4 to 6 exclusive-or bits 7 to 9."""
    return address ^ (address >> 7 & 7) << 4


def stored(tile: Tensor) -> Tensor:
    """A slot of 2-byte numbers that holds a tile `[keys, head_dim]`."""
    keys, head_dim = tile.shape
    slot = torch.full((keys * head_dim,), float("nan"), dtype=tile.dtype)
    for row in range(keys):
        for chunk in range(head_dim // 8):
            at = ring_address(row, chunk, head_dim) // 2
            slot[at : at + 8] = tile[row, chunk * 8 : chunk * 8 + 8]
    return slot


def k_operand(slot: Tensor, step: int, keys: int, head_dim: int) -> Tensor:
    """B `[16, keys]` of a K-major descriptor: rows of 128 bytes, 8 of them an atom, atoms a `stride` apart."""
    start, stride = step // 4 * ATOM_BYTES + step % 4 * 32, group_bytes(head_dim)
    found = torch.empty(16, keys, dtype=slot.dtype)
    for k in range(16):
        for n in range(keys):
            found[k, n] = slot[swizzled(start + n // 8 * stride + n % 8 * 128 + 2 * k) // 2]
    return found


def v_operand(slot: Tensor, step: int, head_dim: int) -> Tensor:
    """B `[16, head_dim]` of an MN-major descriptor: 64 columns a row, `leading` to the next 64, 8 k a `stride`."""
    stride = group_bytes(head_dim)
    start, leading = step * 2 * stride, ATOM_BYTES
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
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_copies_go_where_the_ring_says(keys: int, head_dim: int) -> None:
    for warp in range(4):
        for row in range(keys // 4):
            for chunk in range(head_dim // 8):
                want = ring_address(warp * (keys // 4) + row, chunk, head_dim)
                assert copied(row, chunk, warp, keys, head_dim) == want


@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_operands_read_what_was_copied(keys: int, head_dim: int) -> None:
    tile = torch.arange(keys * head_dim, dtype=torch.float64).view(keys, head_dim)
    slot = stored(tile)
    for step in range(head_dim // 16):
        assert torch.equal(k_operand(slot, step, keys, head_dim), tile[:, 16 * step : 16 * step + 16].T)
    for step in range(keys // 16):
        assert torch.equal(v_operand(slot, step, head_dim), tile[16 * step : 16 * step + 16])


def strides_of(axes: tuple[int, ...], order: tuple[int, ...], gaps: tuple[int, ...]) -> list[int]:
    """Of axes whose innermost is the first of `order`, with gaps of so many numbers behind each."""
    strides, step = [0] * len(axes), 1
    for axis, gap in zip(order, gaps, strict=True):
        strides[axis] = step
        step = step * axes[axis] + gap
    return strides


KINDS = ((64, torch.float16), (128, torch.bfloat16), (256, torch.float16), (128, torch.float8_e4m3fn))


@given(
    kind=st.sampled_from(KINDS),
    eights=st.integers(1, 16), heads=st.integers(1, 3), pages=st.integers(1, 3), hnd=st.booleans(), data=st.data(),
)  # fmt: skip
def test_boxes_are_rows_of_the_ring(
    kind: tuple[int, torch.dtype], eights: int, heads: int, pages: int, hnd: bool, data: st.DataObject
) -> None:
    """Addresses of the numbers of a box, as it puts them one behind the other, are those of the rows that the ring has
    there, of a cache `[pages, heads, page_size, head_dim]` of any strides; and the map ends where the cache does."""
    head_dim, dtype = kind
    size, page_size = dtype.itemsize, 8 * eights
    least = 16 // size
    gaps = tuple(least * gap for gap in data.draw(st.tuples(*[st.sampled_from([0, 0, 1, 8, 11])] * 4)))
    order = (3, 2, 1, 0) if hnd else (3, 1, 2, 0)
    page, head, slot, _ = strides_of((pages, heads, page_size, head_dim), order, gaps)
    step: Any = SimpleNamespace(
        kv=SimpleNamespace(page_size=page_size), num_kv_heads=heads, head_dim=head_dim, kv_dtype=dtype, shared_kv=False
    )
    maps = CacheMaps(step, (page, slot, head) * 2)
    if heads > 1 and head * size % 128 != 0:
        assert maps.rows == 0
        assert maps.of(4096, 8192, pages) == b""
        return
    assert maps.rows in (8, 16, 32, 64)
    assert page_size % maps.rows == 0
    with patch("treeattn.cuda.launch.encode_tensor_map") as encode:
        maps.of(4096, 8192, pages)
    for call, address in zip(encode.call_args_list, (4096, 8192), strict=True):
        _, _, at, shape, byte_strides, box = call.args
        strides = (size, *byte_strides)
        assert at == address
        end = (pages - 1) * page + (heads - 1) * head + (page_size - 1) * slot + head_dim
        assert sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + size == end * size
        in_page, of_head, of_page = (
            data.draw(st.integers(0, count - 1)) for count in (page_size // maps.rows, heads, pages)
        )
        within = in_page * maps.rows
        first = (0, 0, of_head * (head // (128 // size)), within // 8, of_page)  # as `Producer::full_boxes` has it
        assert all(0 <= begin <= extent - count for begin, extent, count in zip(first, shape, box, strict=True))
        found = torch.zeros(1, dtype=torch.int64)
        for begin, count, stride in reversed(list(zip(first, box, strides, strict=True))):
            found = (found[:, None] + (begin + torch.arange(count)) * stride).flatten()
        rows, dims = torch.arange(maps.rows)[:, None], torch.arange(head_dim)
        chunks = dims * size // 16
        unswizzled = rows // 8 * (head_dim * size // 128 * ATOM_BYTES) + chunks // 8 * ATOM_BYTES + rows % 8 * 128
        places = (unswizzled + chunks % 8 * 16) // size + dims % least
        want = torch.full((maps.rows * head_dim,), -1)
        want[places] = (of_page * page + of_head * head + (within + rows) * slot + dims) * size
        assert torch.equal(found, want)


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
