"""The verify kernels do exactly what the torch path does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treeattn.graphs import capture
from treeattn.kernels.verify import _pointer_tables
from treeattn.kv import PagedKV
from treeattn.layout import TreeLayout, write_layout_
from treeattn.verify import Accepted, accept, compact_kv_, global_rows

EXAMPLES = settings(max_examples=25)
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def pair(device: torch.device, step: dict[str, Any], capacity: tuple[int, int, int]) -> tuple[TreeLayout, TreeLayout]:
    """The same layout on the test device and on the CPU."""
    layouts = []
    for where in (device, torch.device("cpu")):
        layout = TreeLayout.allocate(*capacity, device=where)
        write_layout_(layout, **{k: v.to(where) if isinstance(v, torch.Tensor) else v for k, v in step.items()})
        layouts.append(layout)
    return layouts[0], layouts[1]


@st.composite
def steps(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[int, int, int], int]:
    widths, nodes, flat = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        n = draw(st.integers(0, 12))
        pad = draw(st.integers(0, 2))
        flat += [draw(st.integers(0, i - 1)) if i else -1 for i in range(n)] + [0] * pad
        widths.append(n + pad)
        nodes.append(n)
    batch = len(widths)
    step = {
        "batch": batch, "parents": torch.tensor(flat, dtype=torch.int64),
        "qo_indptr": torch.tensor([0, *itertools.accumulate(widths)]), "num_nodes": torch.tensor(nodes),
        "prefix_lens": torch.tensor([draw(st.integers(0, 6)) for _ in range(batch)]),
    }  # fmt: skip
    capacity = (batch + draw(st.integers(0, 2)), max([*widths, 1]) + draw(st.integers(0, 9)), sum(widths) + 3)
    return step, capacity, draw(st.integers(0, 2**31))


@EXAMPLES
@given(case=steps(), dtype=st.sampled_from([torch.int32, torch.int64]))
def test_accept_and_global_rows(
    device: torch.device, case: tuple[dict[str, Any], tuple[int, int, int], int], dtype: torch.dtype
) -> None:
    step, capacity, seed = case
    there, here = pair(device, step, capacity)
    generator = torch.Generator().manual_seed(seed)
    draft, target = (torch.randint(0, 2, (capacity[2],), generator=generator, dtype=dtype) for _ in range(2))
    out = Accepted.allocate(capacity[0], capacity[1], device)
    for tensor in out:
        tensor.fill_(77)
    got = accept(there, draft.to(device), target.to(device), out=out, backend="triton")
    want = accept(here, draft, target, backend="torch")
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.cpu(), b)
    for lens in (None, want.lens, torch.clamp(want.lens, max=1)):
        a = global_rows(there, got.rows, None if lens is None else lens.to(device), backend="triton")
        assert torch.equal(a.cpu(), global_rows(here, want.rows, lens, backend="torch"))


def test_accept_of_1025_rows(device: torch.device) -> None:
    for parents in (
        torch.arange(1025) - 1,
        torch.cat([torch.tensor([-1]), torch.zeros(1024, dtype=torch.int64)]),
    ):
        here = TreeLayout.from_parents(parents[None], [0])
        there = TreeLayout.from_parents(parents[None].to(device), [0])
        draft = torch.arange(1025)
        target = torch.minimum(draft + 1, torch.tensor(40))
        target[0] = 1 if parents[2] == 1 else 1000
        want = accept(here, draft, target)
        got = accept(there, draft.to(device), target.to(device), backend="triton")
        assert int(want.lens) == (41 if parents[2] == 1 else 2)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.cpu(), b)


@EXAMPLES
@given(
    case=steps(),
    page_size=st.sampled_from([1, 3, 4]),
    addresses=st.sampled_from(["table", "csr", "slots"]),
    shape=st.sampled_from(["NHD", "HND", "3-D", "interleaved"]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]),
    index=st.sampled_from([torch.int32, torch.int64]),
    head_dim=st.sampled_from([3, 4, 8]),
)
def test_compact(
    device: torch.device, case: tuple[dict[str, Any], tuple[int, int, int], int], page_size: int, addresses:
    str, shape: str, dtype: torch.dtype, index: torch.dtype, head_dim: int,
) -> None:  # fmt: skip
    step, capacity, seed = case
    there, here = pair(device, step, capacity)
    generator = torch.Generator().manual_seed(seed)
    draft, target = (torch.randint(0, 2, (capacity[2],), generator=generator) for _ in range(2))
    rows, lens, _ = accept(here, draft, target, backend="torch")
    batch, each = capacity[0], -(-20 // page_size)
    n = batch * each
    pages = torch.randperm(n, generator=generator).view(batch, each).to(index)
    slots = torch.randperm(n * page_size, generator=generator)[: capacity[2]].to(index)

    def kv(where: torch.device) -> PagedKV:
        if addresses == "csr":
            indptr = torch.arange(batch + 1, dtype=index) * each
            return PagedKV(page_size=page_size, kv_indptr=indptr.to(where), kv_indices=pages.flatten().to(where))
        tree_slots = slots.to(where) if addresses == "slots" else None
        return PagedKV(page_size=page_size, block_table=pages.to(where), tree_slots=tree_slots)

    sizes = {"NHD": (n, page_size, 2, head_dim), "HND": (n, 2, page_size, head_dim),
             "3-D": (n * page_size, 2, head_dim), "interleaved": (n, page_size, 2, 2 * head_dim)}[shape]  # fmt: skip
    kv_layout: Any = "HND" if shape == "HND" else "NHD"
    size = dtype.itemsize
    memory = torch.randint(0, 255, (3, *sizes[:-1], sizes[-1] * size), dtype=torch.uint8, generator=generator)

    def split(stack: torch.Tensor) -> list[torch.Tensor]:
        caches = list(stack.view(dtype).unbind())
        if shape != "interleaved":
            return caches
        return [half for cache in caches for half in (cache[..., :head_dim], cache[..., head_dim:])]

    moved = memory.to(device)
    compact_kv_(split(moved), kv(device), there, rows.to(device), lens.to(device), kv_layout, backend="triton")
    compact_kv_(split(memory), kv(torch.device("cpu")), here, rows, lens, kv_layout, backend="torch")
    assert torch.equal(moved.cpu(), memory)
    there.check()


def test_a_long_path_in_place(device: torch.device) -> None:
    """Every source is another move's target, over more than one tile of rows."""
    layout = TreeLayout.chain([3], 40, device=device)
    kv = PagedKV(block_table=torch.arange(50, device=device).view(1, 50))
    cache = torch.arange(50.0, device=device).view(50, 1, 1).repeat(1, 2, 3)
    rows = torch.tensor([[0, *range(2, 40), -1]], dtype=torch.int32, device=device)
    compact_kv_(cache, kv, layout, rows, torch.tensor([39], dtype=torch.int32, device=device), backend="triton")
    assert cache[:, 0, 0].tolist() == [0, 1, 2, 3, *range(5, 43), *range(42, 50)]


def test_a_place_outside_the_table_is_reported_and_not_moved(device: torch.device) -> None:
    layout = TreeLayout.chain([3], 6, device=device)
    kv = PagedKV(page_size=2, block_table=torch.tensor([[0, 1, 2]], dtype=torch.int32, device=device))
    cache = torch.arange(8.0, device=device).view(4, 2, 1, 1).clone()
    rows = torch.tensor([[0, 2, 5]], dtype=torch.int32, device=device)
    compact_kv_(cache, kv, layout, rows, torch.tensor([3], dtype=torch.int32, device=device), backend="triton")
    assert cache.flatten().tolist() == [0, 1, 2, 3, 5, 5, 6, 7]
    with pytest.raises(ValueError, match=r"KV_CAPACITY: request 0: needs 9 cache entries, .* has 6"):
        layout.check()


def test_a_narrower_table_that_was_copied_in_has_no_page_behind_it(device: torch.device) -> None:
    """Not page 0, where another request's tokens may lie."""
    own = PagedKV.allocate(2, page_size=2, max_pages_per_request=4, device=device)
    own.copy_(PagedKV(page_size=2, block_table=torch.tensor([[3, 5], [0, 1]], dtype=torch.int32, device=device)))
    layout = TreeLayout.from_parents(
        torch.tensor([[-1, 0, 0, 0], [-1, 0, 0, 0]], device=device), torch.tensor([3, 0], device=device)
    )
    cache = torch.arange(16.0, device=device).view(8, 2, 1, 1).repeat(1, 1, 1, 16)
    before = cache.clone()
    rows, lens = torch.tensor([[0, 3], [0, 2]], device=device), torch.tensor([2, 2], device=device)
    compact_kv_([cache], own, layout, rows, lens, backend="triton")
    before[0, 1] = before[1, 0]  # of the second request, whose rows are in the table
    assert torch.equal(cache, before)
    with pytest.raises(ValueError, match=r"KV_CAPACITY: request 0: needs 7 cache entries, its part .* has 4"):
        layout.check()


def test_a_csr_range_outside_the_page_ids_is_not_read(device: torch.device) -> None:
    layout = TreeLayout.chain([3], 6, device=device)
    memory = torch.tensor([0, 1, 2, 3, 3], device=device)
    kv = PagedKV(page_size=2, kv_indptr=torch.tensor([0, 5], device=device), kv_indices=memory[:3])
    cache = torch.arange(8.0, device=device).view(4, 2, 1, 1).clone()
    rows = torch.tensor([[0, 2, 3]], dtype=torch.int32, device=device)
    compact_kv_(cache, kv, layout, rows, torch.tensor([3], dtype=torch.int32, device=device), backend="triton")
    assert cache.flatten().tolist() == list(range(8))
    with pytest.raises(ValueError, match=r"KV_CAPACITY: request 0: needs 7 cache entries, .* has 0"):
        layout.check()


def test_caches_of_one_shape_share_a_pointer_table(device: torch.device) -> None:
    layout = TreeLayout.chain([0], 4, device=device)
    kv = PagedKV(block_table=torch.arange(4, device=device).view(1, 4))
    caches = [torch.arange(4.0, device=device).view(4, 1, 1).clone() + 10 * k for k in range(5)]
    rows = torch.tensor([[0, 3]], dtype=torch.int32, device=device)
    lens = torch.tensor([2], dtype=torch.int32, device=device)
    before = len(_pointer_tables)
    compact_kv_(caches, kv, layout, rows, lens, backend="triton")
    compact_kv_(caches, kv, layout, rows, lens, backend="triton")
    assert len(_pointer_tables) == before + 1
    assert [cache.flatten().tolist()[1] for cache in caches] == [3, 13, 23, 33, 43]


@pytest.mark.gpu
def test_one_capture_serves_other_trees(device: torch.device) -> None:
    layout = TreeLayout.allocate(1, 4, device=device)
    parents = torch.tensor([[-1, 0, 0, 1]], device=device)
    prefix = torch.tensor([0], device=device)
    draft, target = (torch.zeros(4, dtype=torch.int64, device=device) for _ in range(2))
    out = Accepted.allocate(1, 4, device)
    flat = torch.empty(1, 4, dtype=torch.int64, device=device)
    kv = PagedKV(block_table=torch.arange(4, device=device).view(1, 4))
    cache = torch.arange(4.0, device=device).view(4, 1, 1).clone()

    def step() -> None:
        write_layout_(layout, batch=1, parents=parents, prefix_lens=prefix)
        accept(layout, draft, target, out=out)
        global_rows(layout, out.rows, out.lens, out=flat)
        compact_kv_(cache, kv, layout, out.rows, out.lens)

    graph, _ = capture(step)
    parents.copy_(torch.tensor([[-1, 0, 0, 2]]))
    draft.copy_(torch.tensor([0, 1, 2, 3]))
    target.copy_(torch.tensor([2, 9, 3, 4]))
    cache.copy_(torch.arange(4.0, device=device).view(4, 1, 1))
    graph.replay()
    assert out.rows.tolist() == [[0, 2, 3, -1]]
    assert flat.tolist() == [[0, 2, 3, -1]]
    assert out.bonus.tolist() == [4]
    assert cache.flatten().tolist() == [0, 2, 3, 3]
