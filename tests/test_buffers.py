"""StaticBuffers: a step that is refused has written nothing, and nothing of an earlier step is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import treeattn
from treeattn import PagedKV, StaticBuffers
from treeattn.config import group_config
from treeattn.cuda.config import cuda_config
from treeattn.geometry import Geometry


def made(*widths: int) -> tuple[StaticBuffers, list[PagedKV]]:
    """Buffers of 3 requests x 8 rows with a group for each block table of such a width, zeros in it."""
    buffers, own = StaticBuffers(3, 8, device="cpu"), []
    for width in widths:
        own.append(PagedKV.allocate(3, page_size=4, max_pages_per_request=width, max_total_q=24, device="cpu"))
        buffers.add_group(2, 1, 16, kv=own[-1], dtype=torch.float32)
    return buffers, own


def table(batch: int, width: int) -> PagedKV:
    pages = torch.arange(50, 50 + batch * width, dtype=torch.int32)
    return PagedKV(
        page_size=4, block_table=pages.view(batch, width), tree_slots=torch.full((batch * 4,), 9, dtype=torch.int32)
    )


def step(batch: int = 3, q_len: int = 4, **rest: Any) -> dict[str, Any]:
    parents = torch.tensor([[-1] + [0] * (q_len - 1)] * batch, dtype=torch.int32)
    return {"parents": parents, "prefix_lens": torch.tensor([1, 2, 3][:batch])} | rest


REFUSED = {
    "too wide": (step(q_len=17), table(3, 4), "a verify width of 17 exceeds these buffers' max_q_len 8"),
    "num_nodes": (step(num_nodes=torch.tensor([1])), table(3, 4), "num_nodes has 1 entries, this batch needs 3"),
    "mask size": (
        {"mask": torch.ones(77, dtype=torch.bool), "form": "tree", "q_len": 4, "prefix_lens": torch.tensor([1, 2, 3])},
        table(3, 4), "48 elements, got 77",
    ),
    "few requests": (step(), table(2, 4), "kv covers 2 requests, the step has 3"),
    "few slots": (step(q_len=5), table(3, 4), "kv has 12 tree_slots, the step has 15 query rows"),
    "second group": (step(), table(3, 4), r"block_table of shape \(3, 4\) exceeds the capacity \(3, 2\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_has_written_nothing(name: str) -> None:
    arguments, kv, message = REFUSED[name]
    buffers, own = made(4, 2) if name == "second group" else made(4)
    with pytest.raises(ValueError, match=message):
        buffers.update_(kv=kv, **arguments)
    tensors: list[Tensor] = [t for one in own for t in (one.block_table, one.tree_slots) if t is not None]
    assert not any(bool(t.any()) for t in tensors)
    assert not bool(buffers.layout.qo_indptr.any())


def test_a_narrower_table_leaves_no_page_of_the_step_before() -> None:
    buffers, (own,) = made(4)
    buffers.update_(kv=table(3, 4), **step())
    buffers.update_(kv=table(2, 1), **step(batch=2))
    assert own.block_table is not None
    assert own.block_table[:2].tolist() == [[50, 0, 0, 0], [51, 0, 0, 0]]


def pages(form: str, count: int) -> PagedKV:
    """Page 7 for 3 requests: `count` times for the last one (CSR offsets claim 4), and at least once for others."""
    if form == "table":
        return PagedKV(page_size=4, block_table=torch.full((3, count), 7))
    return PagedKV(page_size=4, kv_indptr=torch.tensor([0, 1, 2, 6]), kv_indices=torch.full((2 + count,), 7))


@pytest.mark.parametrize("form", ["table", "csr"])
def test_room_that_the_steps_own_addresses_do_not_fill_is_no_page(form: str) -> None:
    """A prefix beyond a narrower table must not read what fills the rest of the static one (page 0, or stale pages)."""
    buffers = StaticBuffers(3, 8, device="cpu")
    room: dict[str, int] = {"max_pages_per_request": 4} if form == "table" else {"max_pages": 12}
    own = PagedKV.allocate(3, page_size=4, dtype=torch.int64, device="cpu", **room)  # type: ignore[arg-type]
    group = buffers.add_group(2, 1, 16, kv=own, dtype=torch.float32, fresh_tree=True)
    prefix_lens = torch.tensor([3, 3, 13])
    parents = torch.tensor([[-1, 0, 0, 1]] * 3, dtype=torch.int32)
    q, fresh = torch.ones(12, 2, 16), torch.ones(12, 1, 16)
    cache = torch.full((8, 4, 1, 16), torch.nan)
    cache[7] = 1
    for count in (4, 2, 3, 4):
        buffers.update_(parents=parents, prefix_lens=prefix_lens, kv=pages(form, count))
        assert own.width == (count if form == "table" else 2 + count)
        out = treeattn.tree_attention(q, cache, cache, group, k_tree=fresh, v_tree=fresh)
        enough = count == 4
        assert torch.allclose(out[:8], torch.ones(()))
        assert torch.allclose(out[8:], torch.tensor(1.0 if enough else 0.0))
        if enough:
            buffers.check()
        else:
            has = 4 * count if form == "table" else 0  # its offsets are not inside
            with pytest.raises(ValueError, match=f"request 2: needs 13 cache entries, .* has {has}"):
                buffers.check()


def test_addresses_borrowed_from_the_same_memory_have_their_own_width() -> None:
    own = PagedKV.allocate(3, page_size=4, max_pages_per_request=4, device="cpu")
    assert own.block_table is not None
    own.copy_(PagedKV(page_size=4, block_table=own.block_table[:, :2]))
    assert own.width == 2
    wide = PagedKV.allocate(3, page_size=4, max_pages_per_request=6, device="cpu")
    wide.copy_(own)
    assert wide.width == 2


@pytest.mark.parametrize(("batch", "q_len", "rows"), [(1, 1, None), (4, 17, None), (64, 65, 1000), (512, 257, None)])
def test_nbytes_follows_the_written_formula(batch: int, q_len: int, rows: int | None) -> None:
    groups: list[dict[str, Any]] = [
        {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128},
        {"num_qo_heads": 9, "num_kv_heads": 3, "head_dim": 64, "dtype": torch.float32},
    ]
    words, total = -(-q_len // 64), rows or batch * q_len
    expected = total * (8 * words + 20) + 20 * batch + 28
    for group in groups:
        geometry = Geometry.of(**group)
        # "auto" on sm_90: the CUDA kernels, which have no float32
        config = group_config(90, geometry, q_len) if "dtype" in group else cuda_config(geometry, q_len)
        programs = 132 * config.programs_per_sm
        numbers = group["head_dim"] + (1 if "dtype" in group else 2)  # the CUDA kernels' lse have tags
        expected += 8 * programs * config.block_m * numbers + 80 * programs + 64 * batch
    assert StaticBuffers.nbytes(batch, q_len, rows, groups=groups) == expected


def test_nbytes_of_a_group_whose_backend_hangs_on_its_pages_is_the_larger_sum() -> None:
    group: dict[str, Any] = {"num_qo_heads": 8, "num_kv_heads": 1, "head_dim": 128}

    def said(backend: str, batch: int, q_len: int, arch: int = 90) -> int:
        return StaticBuffers.nbytes(batch, q_len, groups=[{**group, "backend": backend}], arch=arch)

    for q_len in (16, 17):
        assert said("auto", 1, q_len) == max(said("cuda", 1, q_len), said("triton", 1, q_len))
        assert said("cuda", 1, q_len) != said("triton", 1, q_len)
    assert said("auto", 2, 16) == said("cuda", 2, 16) != said("triton", 2, 16)
    assert said("auto", 2, 17, arch=80) == said("triton", 2, 17, arch=80) != said("cuda", 2, 17)


def test_nbytes_of_a_cuda_group_counts_its_own_tiles() -> None:
    group: dict[str, Any] = {"num_qo_heads": 64, "num_kv_heads": 8, "head_dim": 128}
    layout = StaticBuffers.nbytes(4, 17)
    # 17 nodes of 8 heads are one tile of 192 rows, of which an H200 has a program an SM; a row's lse has a tag
    expected = 8 * 132 * 192 * (128 + 2) + 80 * 132 + 64 * 4
    assert StaticBuffers.nbytes(4, 17, groups=[{**group, "backend": "cuda"}]) - layout == expected


def test_a_ragged_step_wants_a_slot_for_each_row_of_its_trees() -> None:
    own = PagedKV.allocate(2, page_size=1, max_pages_per_request=4, max_total_q=8, device="cpu")
    buffers = StaticBuffers(2, 4, device="cpu")
    buffers.add_group(1, 1, 16, kv=own, dtype=torch.float32, backend="torch")
    table, slots = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.arange(20, 24, dtype=torch.int32)
    step = {
        "parents": torch.tensor([-1, 0, 0, -1, 0, 0]), "qo_indptr": torch.tensor([0, 3, 6]),
        "prefix_lens": torch.tensor([2, 2]),
    }  # fmt: skip
    before = own.tree_slots.clone()
    with pytest.raises(ValueError, match="kv has 4 tree_slots, the step has 6 query rows"):
        buffers.update_(**step, kv=PagedKV(page_size=1, block_table=table, tree_slots=slots))
    assert torch.equal(own.tree_slots, before)
    buffers.update_(**step, kv=PagedKV(page_size=1, block_table=table, tree_slots=slots.repeat(2)[:6]))


def test_what_an_update_refuses_by_its_shapes() -> None:
    buffers = StaticBuffers(2, 4, device="cpu")
    with pytest.raises(ValueError, match=r"prefix_lens is \[batch\], got \(\)"):
        buffers.update_(chain=True, q_len=2, prefix_lens=torch.tensor(3))
    with pytest.raises(ValueError, match=r"either q_len .* or qo_indptr"):
        buffers.update_(chain=True, q_len=2, qo_indptr=torch.tensor([0, 3]), prefix_lens=torch.tensor([3]))


def test_groups_without_a_plan_take_no_memory() -> None:
    group: dict[str, Any] = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    for backend in ("torch", "reference"):
        assert StaticBuffers.nbytes(4, 17, groups=[{**group, "backend": backend}]) == StaticBuffers.nbytes(4, 17)
