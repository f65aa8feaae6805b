"""Packing of bits and the flat wire forms."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeattn import masks
from treeattn.layout import TreeLayout

T4 = [-1, 0, 0, 1]
T4_ROWS = ["1000", "1100", "1010", "1101"]


def bits(rows: list[str]) -> torch.Tensor:
    return torch.tensor([[c == "1" for c in row] for row in rows])


def test_words_of_t4_by_hand() -> None:
    words = masks.pack_words(bits(T4_ROWS))
    assert words.dtype == torch.int64
    assert words.tolist() == [[1], [3], [5], [11]]
    assert torch.equal(masks.unpack_words(words, 4), bits(T4_ROWS))


@given(st.integers(0, 200), st.integers(0, 2**32 - 1))
def test_pack_and_unpack_round_trip(n: int, seed: int) -> None:
    matrix = torch.rand(5, n, generator=torch.Generator().manual_seed(seed)) < 0.5
    words = masks.pack_words(matrix)
    assert words.shape == (5, (n + 63) // 64)
    assert torch.equal(masks.unpack_words(words, n), matrix)
    as_bytes = words.view(torch.uint8).reshape(5, -1)
    for row, packed in zip(matrix, as_bytes, strict=True):
        assert torch.equal(masks.unpack_bytes(packed, n), row)


def test_bit_63_and_bit_64() -> None:
    row = torch.zeros(1, 65, dtype=torch.bool)
    row[0, 63] = row[0, 64] = True
    assert masks.pack_words(row).tolist() == [[-(2**63), 1]]


def test_every_export_of_t4_by_hand(device: torch.device) -> None:
    layout = TreeLayout.from_parents(torch.tensor([T4], dtype=torch.int32, device=device), [2])
    full = [[1, 1, *map(int, row)] for row in T4_ROWS]
    flat = list(itertools.chain(*full))
    assert layout.full_mask(total=24).tolist() == [bool(x) for x in flat]
    assert layout.full_mask(dtype=torch.uint8, total=24).tolist() == flat
    assert layout.tree_mask(dtype=torch.uint8).tolist() == [int(c) for row in T4_ROWS for c in row]
    packed, indptr = layout.packed_mask(total=3)
    assert packed.tolist() == [0xC7, 0x73, 0xBD]
    assert indptr.tolist() == [0, 3]
    bias = layout.bias(total=24)
    assert (bias == 0).tolist() == [bool(x) for x in flat]
    assert torch.isneginf(bias[bias != 0]).all()


def test_packed_requests_start_at_a_byte(device: torch.device) -> None:
    parents = torch.tensor([[-1, 0, 0], [-1, 0, 1]], device=device)
    layout = TreeLayout.from_parents(parents, [0, 1])
    packed, indptr = layout.packed_mask(total=4)
    # 100 110 101, then 7 bits of padding; 1100 1110 1111, then 4.
    assert packed.tolist() == [0b01011001, 0b1, 0b01110011, 0b1111]
    assert indptr.tolist() == [0, 2, 4]


def test_padding_is_zero_and_the_tail_of_out_too(device: torch.device) -> None:
    parents = torch.tensor([[-1, 0, 9, 9]], device=device)
    layout = TreeLayout.from_parents(parents, [1], num_nodes=[2])
    out = torch.full((23,), 7, dtype=torch.uint8, device=device)
    assert layout.full_mask(out=out) is out
    assert out.tolist() == [1, 1, 0, 0, 0, 1, 1, 1, 0, 0] + [0] * 13
    bias = layout.bias(out=torch.empty(23, device=device))
    assert torch.equal(bias == 0, out != 0)
    packed, _ = layout.packed_mask(out=torch.full((5,), 255, dtype=torch.uint8, device=device))
    assert packed.tolist() == [0b11100011, 0, 0, 0, 0]


def test_fault_4_out_too_small_names_both() -> None:
    layout = TreeLayout.chain([16, 16], 4)
    with pytest.raises(ValueError, match="out has 128 elements, this mask needs 160"):
        layout.full_mask(out=torch.empty(128, dtype=torch.bool))


def test_wrong_dtypes_are_refused() -> None:
    layout = TreeLayout.chain([1], 2)
    with pytest.raises(TypeError, match="bool or uint8"):
        layout.full_mask(dtype=torch.int64)
    with pytest.raises(TypeError, match="floating point"):
        layout.bias(dtype=torch.int32)
    with pytest.raises(TypeError, match="uint8"):
        layout.packed_mask(out=torch.empty(9, dtype=torch.int32))


def test_an_empty_batch_exports_nothing() -> None:
    layout = TreeLayout.chain([], 4)
    assert layout.full_mask().numel() == layout.tree_mask().numel() == layout.bias().numel() == 0
    packed, indptr = layout.packed_mask()
    assert packed.numel() == 0
    assert indptr.tolist() == [0]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 70)), min_size=1, max_size=4), st.integers(0, 999))
def test_exports_agree_with_each_other(shapes: list[tuple[int, int]], seed: int) -> None:
    prefix, widths = zip(*shapes, strict=True)
    indptr = torch.tensor([0, *itertools.accumulate(widths)])
    generator = torch.Generator().manual_seed(seed)
    parents = torch.cat(
        [torch.tensor([int(torch.randint(0, i, (), generator=generator)) if i else -1 for i in range(w)],
                      dtype=torch.int64) for w in widths]
    )  # fmt: skip
    layout = TreeLayout.from_parents(parents, list(prefix), qo_indptr=indptr)
    full, tree = layout.full_mask(), layout.tree_mask()
    packed, byte_indptr = layout.packed_mask()
    assert torch.equal(layout.bias() == 0, full)
    at = 0
    for b, (p, w) in enumerate(shapes):
        block = full[layout.mask_indptr[b] : layout.mask_indptr[b + 1]].view(w, p + w)
        assert bool(block[:, :p].all())
        assert torch.equal(block[:, p:].reshape(-1), tree[at : at + w * w])
        at += w * w
        held = packed[byte_indptr[b] : byte_indptr[b + 1]]
        assert torch.equal(masks.unpack_bytes(held, block.numel()), block.reshape(-1))
