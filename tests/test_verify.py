"""accept, global_rows and compact_kv_ against plain Python."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from treeattn.kv import PagedKV
from treeattn.layout import TreeLayout, write_layout_
from treeattn.verify import Accepted, accept, compact_kv_, global_rows


def walk(parents: list[int], draft: list[int], target: list[int]) -> tuple[list[int], int]:
    """The accepted rows and the bonus token of one request, as the contract words it."""
    row, rows = 0, [0]
    while True:
        children = [j for j, p in enumerate(parents) if p == row and draft[j] == target[row]]
        if not children:
            return rows, target[row]
        row = children[0]
        rows.append(row)


def test_a_walk_by_hand(device: torch.device) -> None:
    layout = TreeLayout.from_parents(torch.tensor([[-1, 0, 0, 1]], device=device), [5])
    draft = torch.tensor([9, 5, 7, 6], device=device)
    rows, lens, bonus = accept(layout, draft, torch.tensor([5, 6, 1, 8], device=device))
    assert rows.tolist() == [[0, 1, 3, -1]]
    assert (lens.tolist(), bonus.tolist()) == ([3], [8])
    assert (rows.dtype, lens.dtype, bonus.dtype) == (torch.int32, torch.int32, torch.int64)
    rows, lens, bonus = accept(layout, draft, torch.tensor([7, 6, 1, 8], device=device))
    assert (rows.tolist(), lens.tolist(), bonus.tolist()) == ([[0, 2, -1, -1]], [2], [1])
    rows, lens, bonus = accept(layout, draft, torch.tensor([4, 6, 1, 8], device=device))
    assert (rows.tolist(), lens.tolist(), bonus.tolist()) == ([[0, -1, -1, -1]], [1], [4])


def test_the_lowest_of_equal_siblings_wins_and_ends_there(device: torch.device) -> None:
    layout = TreeLayout.from_parents(torch.tensor([[-1, 0, 0, 2]], device=device), [0])
    draft = torch.tensor([0, 5, 5, 6], dtype=torch.int32, device=device)
    rows, _, bonus = accept(layout, draft, torch.tensor([5, 6, 6, 6], dtype=torch.int32, device=device))
    assert rows.tolist() == [[0, 1, -1, -1]]
    assert bonus.tolist() == [6]


def test_padding_never_matches_and_empty_requests_say_so(device: torch.device) -> None:
    parents = torch.tensor([[-1, 0, 0, 0], [-1, 0, 0, 0]], device=device)
    layout = TreeLayout.from_parents(parents, [0, 0], num_nodes=[2, 0])
    draft = torch.tensor([0, 1, 5, 5] * 2, device=device)
    out = Accepted.allocate(2, 4, device)
    for tensor in out:
        tensor.fill_(77)
    result = accept(layout, draft, torch.full((8,), 5, device=device), out=out)
    assert result is out
    assert out.rows.tolist() == [[0, -1, -1, -1], [-1] * 4]
    assert (out.lens.tolist(), out.bonus.tolist()) == ([1, 0], [5, -1])
    assert global_rows(layout, out.rows).tolist() == [[0, -1, -1, -1], [-1] * 4]


def test_capacity_beyond_the_batch(device: torch.device) -> None:
    layout = TreeLayout.allocate(3, 5, 12, device)
    write_layout_(layout, batch=1, parents=torch.tensor([[-1, 0, 1]], device=device), prefix_lens=[2])
    tokens = torch.tensor([7, 7, 7, *[0] * 9], device=device)
    rows, lens, bonus = accept(layout, tokens, tokens)
    assert rows[0].tolist() == [0, 1, 2, -1, -1]
    assert (lens.tolist(), bonus.tolist()) == ([3, 0, 0], [7, -1, -1])
    assert int((rows[1:] != -1).sum()) == 0


@st.composite
def walks(draw: st.DrawFn) -> dict[str, Any]:
    forest = draw(
        st.lists(
            st.integers(1, 12).flatmap(
                lambda n: st.tuples(*[st.integers(0, max(i - 1, 0)) for i in range(n)]).map(lambda t: [-1, *t[1:]])
            ),
            min_size=1,
            max_size=4,
        )
    )
    pads = [draw(st.integers(0, 2)) for _ in forest]
    widths = [len(tree) + pad for tree, pad in zip(forest, pads, strict=True)]
    total = sum(widths)
    tokens = st.lists(st.integers(0, 2), min_size=total, max_size=total)
    return {"forest": forest, "widths": widths, "draft": draw(tokens), "target": draw(tokens)}


def build(case: dict[str, Any]) -> tuple[TreeLayout, list[int]]:
    starts = [0, *itertools.accumulate(case["widths"])]
    flat = [
        p for tree, width in zip(case["forest"], case["widths"], strict=True)
        for p in tree + [0] * (width - len(tree))
    ]  # fmt: skip
    prefixes = [3 * b for b in range(len(case["forest"]))]
    layout = TreeLayout.from_parents(
        torch.tensor(flat), prefixes, num_nodes=[len(tree) for tree in case["forest"]],
        qo_indptr=torch.tensor(starts),
    )  # fmt: skip
    return layout, starts


@given(walks())
def test_accept_is_the_plain_walk(case: dict[str, Any]) -> None:
    layout, starts = build(case)
    rows, lens, bonus = accept(layout, torch.tensor(case["draft"]), torch.tensor(case["target"]))
    flat = global_rows(layout, rows, lens)
    for b, tree in enumerate(case["forest"]):
        part = slice(starts[b], starts[b] + len(tree))
        path, token = walk(tree, case["draft"][part], case["target"][part])
        assert rows[b].tolist() == path + [-1] * (layout.max_q_len - len(path))
        assert int(lens[b]) == len(path)
        assert int(bonus[b]) == token
        assert flat[b, : len(path)].tolist() == [starts[b] + row for row in path]
        assert path == sorted(set(path))


def test_global_rows_stops_at_lens(device: torch.device) -> None:
    layout = TreeLayout.chain([0, 0], 4, device=device)
    rows = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]], dtype=torch.int32, device=device)
    lens = torch.tensor([2, 3], dtype=torch.int32, device=device)
    assert global_rows(layout, rows, lens).tolist() == [[0, 1, -1, -1], [4, 5, 6, -1]]


def test_fault_10_by_hand(device: torch.device) -> None:
    layout = TreeLayout.chain([0], 8, device=device)
    kv = PagedKV(
        block_table=torch.zeros(1, 8, dtype=torch.int32, device=device),
        tree_slots=torch.arange(100, 108, device=device),
    )
    cache = torch.arange(200.0, device=device).view(200, 1, 1).clone()
    rows = torch.tensor([[0, 2, 3, -1, -1, -1, -1, -1]], dtype=torch.int32, device=device)
    compact_kv_(cache, kv, layout, rows, torch.tensor([3], dtype=torch.int32, device=device))
    expected = torch.arange(200.0)
    expected[101], expected[102] = 102, 103
    assert cache.flatten().tolist() == expected.tolist()


@pytest.mark.parametrize("count", [0, 1, 8])
def test_fault_10_length_1_and_full_length_move_nothing(device: torch.device, count: int) -> None:
    layout = TreeLayout.chain([5], 8, device=device)
    kv = PagedKV(page_size=4, block_table=torch.tensor([[3, 0, 2, 1]], device=device))
    cache = torch.randn(4, 4, 2, 3, device=device)
    before = cache.clone()
    rows = torch.arange(8, dtype=torch.int32, device=device)[None]
    compact_kv_([cache], kv, layout, rows, torch.tensor([count], dtype=torch.int32, device=device))
    assert torch.equal(cache, before)


def naive_compact(
    caches: list[Tensor], kv: PagedKV, layout: TreeLayout, rows: Tensor, lens: Tensor, kv_layout: str
) -> list[Tensor]:
    """Copies with every accepted row read before any is written, one head vector at a time."""
    results = [cache.clone() for cache in caches]
    for old, new in zip(caches, results, strict=True):
        for b in range(rows.shape[0]):
            for i in range(int(lens[b])):
                read, write = (_slot(kv, layout, b, r) for r in (int(rows[b, i]), i))
                if old.ndim == 3:
                    new[write] = old[read]
                    continue
                (p, o), (q, u) = divmod(read, kv.page_size), divmod(write, kv.page_size)
                if kv_layout == "NHD":
                    new[q, u] = old[p, o]
                else:
                    new[q, :, u] = old[p, :, o]
    return results


def _slot(kv: PagedKV, layout: TreeLayout, b: int, row: int) -> int:
    if kv.tree_slots is not None:
        return int(kv.tree_slots[int(layout.qo_indptr[b]) + row])
    return int(kv.slots_of(b, torch.tensor([int(layout.prefix_lens[b]) + row])))


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]


@given(
    case=walks(),
    page_size=st.sampled_from([1, 3, 4]),
    addresses=st.sampled_from(["table", "csr", "slots"]),
    shape=st.sampled_from(["NHD", "HND", "3-D", "interleaved"]),
    dtype=st.sampled_from(DTYPES),
    index=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 999),
)
def test_compact_is_the_plain_copy(
    case: dict[str, Any],
    page_size: int,
    addresses: str,
    shape: str,
    dtype: torch.dtype,
    index: torch.dtype,
    seed: int,
) -> None:
    layout, _ = build(case)
    generator = torch.Generator().manual_seed(seed)
    rows, lens, _ = accept(layout, torch.tensor(case["draft"]), torch.tensor(case["target"]))
    batch, pages_each = layout.batch, -(-24 // page_size)
    pages = torch.randperm(batch * pages_each, generator=generator).view(batch, pages_each).to(index)
    n = batch * pages_each
    if addresses == "table":
        kv = PagedKV(page_size=page_size, block_table=pages)
    elif addresses == "csr":
        kv = PagedKV(
            page_size=page_size,
            kv_indptr=torch.arange(batch + 1, dtype=index) * pages_each,
            kv_indices=pages.flatten(),
        )
    else:
        slots = torch.randperm(n * page_size, generator=generator)[: layout.total_q].to(index)
        kv = PagedKV(page_size=page_size, block_table=pages, tree_slots=slots)
    sizes = {"NHD": (n, page_size, 2, 3), "HND": (n, 2, page_size, 3), "3-D": (n * page_size, 2, 3),
             "interleaved": (n, page_size, 2, 6)}[shape]  # fmt: skip
    kv_layout = "HND" if shape == "HND" else "NHD"
    memory = [torch.randint(0, 255, (*sizes, dtype.itemsize), dtype=torch.uint8, generator=generator) for _ in range(2)]
    caches = [m.view(dtype)[..., 0] if dtype.itemsize == 1 else m.view(dtype).squeeze(-1) for m in memory]
    if shape == "interleaved":
        caches = [half for cache in caches for half in (cache[..., :3], cache[..., 3:])]
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    expected = naive_compact([c.view(raw) for c in caches], kv, layout, rows, lens, kv_layout)
    compact_kv_(caches, kv, layout, rows, lens, kv_layout)
    for got, want in zip(caches, expected, strict=True):
        assert torch.equal(got.view(raw), want)


def test_errors() -> None:
    layout = TreeLayout.chain([1, 1], 4)
    tokens = torch.zeros(8, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"draft_tokens is torch\.float32"):
        accept(layout, tokens.float(), tokens)
    with pytest.raises(ValueError, match="target_tokens has 7 tokens, the layout has 8 rows"):
        accept(layout, tokens, tokens[:7])
    with pytest.raises(ValueError, match=r"out\.rows is \(2, 3\), must be \(2, 4\)"):
        accept(layout, tokens, tokens, out=Accepted.allocate(2, 3))
    kv = PagedKV(page_size=2, block_table=torch.zeros(2, 4, dtype=torch.int32))
    rows = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)
    lens = torch.tensor([2, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="page_size 2 slots, got 3"):
        compact_kv_(torch.zeros(4, 3, 1, 2), kv, layout, rows, lens)
    with pytest.raises(ValueError, match=r"lens has shape \(1,\), must be \(2,\)"):
        compact_kv_(torch.zeros(4, 2, 1, 2), kv, layout, rows, lens[:1])
    rows[1, 1] = 0
    with pytest.raises(ValueError, match="request 1: accepted row 1 is 0; rows ascend"):
        compact_kv_(torch.zeros(4, 2, 1, 2), kv, layout, rows, lens)
    rows[1, 1] = 4
    with pytest.raises(ValueError, match="accepted row 1 is 4"):
        compact_kv_(torch.zeros(4, 2, 1, 2), kv, layout, rows, lens)


def test_compact_names_what_the_addresses_lack() -> None:
    layout = TreeLayout.from_parents(torch.tensor([[-1, 0, 0, 1]] * 2), [5, 3])
    cache = torch.arange(24.0).view(6, 4, 1, 1)
    before = cache.clone()
    table = torch.tensor([[0, 1], [3, 4]])
    whole = PagedKV(page_size=4, block_table=torch.tensor([[0, 1, 2], [3, 4, 5]]))
    rows, lens = torch.tensor([[0, 3], [0, 3]]), torch.tensor([2, 2])

    def refused(message: str, kv: PagedKV, lens: Tensor = lens, **rest: Any) -> None:
        with pytest.raises(ValueError, match=message):
            compact_kv_(cache, kv, layout, rows, lens, **rest)
        assert torch.equal(cache, before)

    refused("request 0: needs 9 cache entries, .* has 8", PagedKV(page_size=4, block_table=table))
    refused("request 0: lens is 4, but rows has 2 columns", whole, torch.tensor([4, 2]))
    refused("kv_layout must be 'NHD' or 'HND', got 'nhd'", whole, kv_layout="nhd")
    refused("backend must be None, 'torch' or 'triton', got 'cuda'", whole, backend="cuda")
    refused("KV addresses are on meta, the layout on cpu", PagedKV(page_size=4, block_table=table.to("meta")))
    slots = torch.tensor([8, 9, 10, 11, 12, -3, 14, 15])
    refused("tree_slots has 5 entries, the layout has 8", PagedKV(page_size=4, block_table=table, tree_slots=slots[:5]))
    refused("request 1: row 1 is at token slot -3", PagedKV(page_size=4, block_table=table, tree_slots=slots))


@pytest.mark.parametrize("indptr", [[0, 3, 7], [0, 3, 2], [0, -3, 6], [-3, 3, 6]])
def test_a_csr_range_outside_the_table_holds_no_pages(indptr: list[int]) -> None:
    kv = PagedKV(page_size=2, kv_indptr=torch.tensor(indptr), kv_indices=torch.arange(6))
    sound = [0 <= a <= b <= 6 for a, b in itertools.pairwise(indptr)]
    assert [kv.pages_of(b).numel() > 0 for b in range(2)] == sound


def test_addresses_are_on_one_device() -> None:
    indices = torch.arange(6)
    with pytest.raises(ValueError, match="kv_indptr is on meta, the page ids are on cpu"):
        PagedKV(kv_indptr=torch.zeros(2, dtype=torch.int32, device="meta"), kv_indices=indices)
    with pytest.raises(ValueError, match=r"batch \+ 1 entries, got 0"):
        PagedKV(kv_indptr=indices[:0], kv_indices=indices)
