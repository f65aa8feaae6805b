"""The bug that treeattn was founded on, re-enacted: a verifier whose backend knows only the drafter's block of 8.

A small backend of the old kind lays out and reads a flat mask by one width that it was made with. Budget 7 (8 rows)
works in it, 16 (17 rows) does not, and in a batch of one only the row stride is wrong. In treeattn the same steps are
either an error that names both widths, or right.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import treeattn
from treeattn import PagedKV, StaticBuffers, TreeLayout
from treeattn.graphs import capture

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 4
BLOCK = 8  # what the drafter drafts, root included


@dataclass
class Scene:
    """A batch of equal-width trees over a paged cache, and what each row must see."""

    parents: Tensor
    prefix_lens: list[int]
    table: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    masks: list[Tensor]  # bool [width, prefix + width] for each request

    @property
    def width(self) -> int:
        return self.parents.shape[1]

    @property
    def kv(self) -> PagedKV:
        return PagedKV(page_size=PAGE, block_table=self.table)


def scene(batch: int, width: int, device: torch.device, seed: int = 0) -> Scene:
    generator = torch.Generator().manual_seed(seed)
    parents = torch.full((batch, width), -1, dtype=torch.int32)
    for row in range(1, width):
        parents[:, row] = torch.randint(max(0, row - 4), row, (batch,), generator=generator)
    prefixes = [5 + 6 * request for request in range(batch)]
    pages = -(-(max(prefixes) + width) // PAGE)
    table = torch.randperm(batch * pages, generator=generator).view(batch, pages).to(torch.int32)
    masks = []
    for request, prefix in enumerate(prefixes):
        mask = torch.zeros(width, prefix + width, dtype=torch.bool)
        mask[:, :prefix] = True
        for row in range(width):
            if row:
                mask[row, prefix:] = mask[int(parents[request, row]), prefix:]
            mask[row, prefix + row] = True
        masks.append(mask)
    q = torch.randn(batch * width, HEADS, DIM, generator=generator)
    k, v = (torch.randn(batch * pages, PAGE, KV_HEADS, DIM, generator=generator) for _ in range(2))
    moved = (tensor.to(device) for tensor in (parents, table, q, k, v))
    parents, table, q, k, v = moved
    return Scene(parents, prefixes, table, q, k, v, masks)


def dense(scene: Scene, masks: list[Tensor]) -> Tensor:
    """Attention of every request under the given masks, on the CPU in float64."""
    outs = []
    for request, (prefix, mask) in enumerate(zip(scene.prefix_lens, masks, strict=True)):
        q = scene.q[request * scene.width : (request + 1) * scene.width].double().cpu()
        pages = scene.table[request].long().cpu()
        keys, values = (c.cpu()[pages].flatten(0, 1)[: prefix + scene.width].double() for c in (scene.k, scene.v))
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (keys, values))
        scores = torch.einsum("ihd,khd->hik", q, keys) / DIM**0.5
        weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
        outs.append(torch.einsum("hik,khd->ihd", torch.nan_to_num(weights), values))
    return torch.cat(outs)


class BakedBackend:
    """A backend of the old kind: one width, taken from the drafter, in every offset and stride."""

    def __init__(self, width: int) -> None:
        self.width = width

    def read_masks(self, scene: Scene) -> list[Tensor]:
        """The masks that its kernel would see in the flat full-form mask that the tree's builder wrote."""
        flat = torch.cat([mask.flatten() for mask in scene.masks])
        seen, start = [], 0
        for prefix in scene.prefix_lens:
            stride = prefix + self.width
            rows = torch.arange(scene.width)[:, None]
            columns = torch.arange(prefix + scene.width)[None, :]
            seen.append(flat[(start + rows * stride + columns).clamp(max=flat.numel() - 1)])
            start += self.width * stride
        return seen


def attend(scene: Scene, layout: TreeLayout) -> Tensor:
    step = treeattn.plan(layout, scene.kv, HEADS, KV_HEADS, DIM, dtype=torch.float32)
    return treeattn.tree_attention(scene.q, scene.k, scene.v, step).double().cpu()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("budget", [6, 7, 8, 16])
def test_a_baked_width_reads_someone_elses_bits(batch: int, budget: int, device: torch.device) -> None:
    """Right at budget 7 only, which hid the bug; treeattn is right at every width."""
    case = scene(batch, budget + 1, device)
    truth = dense(case, case.masks)
    baked = dense(case, BakedBackend(BLOCK).read_masks(case))
    assert torch.allclose(baked, truth, atol=1e-6) == (budget + 1 == BLOCK)
    layout = TreeLayout.from_parents(case.parents, torch.tensor(case.prefix_lens, device=device))
    assert torch.allclose(attend(case, layout), truth, atol=1e-4)


@pytest.mark.parametrize("width", [7, 8, 9, 17])
@pytest.mark.parametrize("batch", [1, 3])
def test_buffers_refuse_a_wider_tree_by_name(batch: int, width: int, device: torch.device) -> None:
    case = scene(batch, width, device)
    buffers = StaticBuffers(4, BLOCK, device=device)
    group = buffers.add_group(HEADS, KV_HEADS, DIM, kv=PagedKV(page_size=PAGE, block_table=torch.zeros(
        4, case.table.shape[1], dtype=torch.int32, device=device)), dtype=torch.float32)  # fmt: skip
    step = {"parents": case.parents, "prefix_lens": torch.tensor(case.prefix_lens, device=device), "kv": case.kv}
    if width > BLOCK:
        before = buffers.layout.mask_words.clone()
        with pytest.raises(ValueError, match=rf"\b{width}\b.*\b{BLOCK}\b"):
            buffers.update_(**step)
        assert torch.equal(buffers.layout.mask_words, before)
        return
    buffers.update_(**step)
    out = treeattn.tree_attention(case.q, case.k, case.v, group)
    assert torch.allclose(out.double().cpu(), dense(case, case.masks), atol=1e-4)


def test_rows_of_another_width_are_named(device: torch.device) -> None:
    """The buffers were updated for the drafter's width, and the model hands in the tree's rows."""
    narrow, wide = scene(8, BLOCK, device), scene(8, 17, device)
    layout = TreeLayout.from_parents(narrow.parents, torch.tensor(narrow.prefix_lens, device=device))
    step = treeattn.plan(layout, narrow.kv, HEADS, KV_HEADS, DIM, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"(?s)\b17\b"):
        treeattn.tree_attention(wide.q, wide.k, wide.v, step)


def test_offsets_of_the_wrong_width_are_named_in_validation(device: torch.device) -> None:
    case = scene(3, 17, device)
    flat = torch.cat([mask.flatten() for mask in case.masks]).to(device)
    starts = [0]
    for prefix in case.prefix_lens:
        starts.append(starts[-1] + BLOCK * (prefix + BLOCK))
    right = 17 * (case.prefix_lens[0] + 17)
    with pytest.raises(ValueError, match=f"request 1 starts at {starts[1]}, must be {right}"):
        TreeLayout.from_mask(
            flat, "full", torch.tensor(case.prefix_lens, device=device), q_len=17,
            mask_indptr=torch.tensor(starts, device=device), validate=True,
        )  # fmt: skip
    layout = TreeLayout.from_mask(flat, "full", torch.tensor(case.prefix_lens, device=device), q_len=17)
    assert torch.allclose(attend(case, layout), dense(case, case.masks), atol=1e-4)


def test_the_width_comes_from_the_tree_not_from_the_block(device: torch.device) -> None:
    verify = treeattn.resolve_verify_width(method="ddtree", block_size=BLOCK, tree_budget=16).width
    draft = treeattn.resolve_verify_width(role="draft", method="ddtree", block_size=BLOCK, tree_budget=16).width
    assert (verify, draft) == (17, BLOCK)
    with pytest.raises(ValueError, match="ddtree"):
        treeattn.resolve_verify_width(method="ddtree", block_size=BLOCK, topk=4)
    assert treeattn.resolve_verify_width(method="ddtree", block_size=BLOCK, tree_budget=0).width == 1


def test_a_budget_of_zero_is_the_root_alone(device: torch.device) -> None:
    case = scene(3, 1, device)
    layout = TreeLayout.from_parents(case.parents, torch.tensor(case.prefix_lens, device=device))
    assert torch.allclose(attend(case, layout), dense(case, case.masks), atol=1e-4)


def both_roles(device: torch.device, steps: int = 3) -> tuple[StaticBuffers, StaticBuffers]:
    """A drafter of 8 rows and a verifier of 17 in one process, each with its own buffers, steps interleaved."""
    pair = []
    for width in (BLOCK, 17):
        table = torch.zeros(3, 12, dtype=torch.int32, device=device)
        buffers = StaticBuffers(3, width, device=device)
        buffers.add_group(
            HEADS, KV_HEADS, DIM, kv=PagedKV(page_size=PAGE, block_table=table), dtype=torch.float32
        )
        pair.append(buffers)
    for seed in range(steps):
        cases = [scene(1 + seed, width, device, seed) for width in (BLOCK, 17)]
        for buffers, case in zip(pair, cases, strict=True):
            buffers.update_(
                parents=case.parents, prefix_lens=torch.tensor(case.prefix_lens, device=device), kv=case.kv
            )
        for buffers, case in zip(pair, cases, strict=True):
            out = treeattn.tree_attention(case.q, case.k, case.v, buffers.groups[0])
            assert torch.allclose(out.double().cpu(), dense(case, case.masks), atol=1e-4)
    return pair[0], pair[1]


def test_both_roles_in_one_process(device: torch.device) -> None:
    drafter, verifier = both_roles(device)
    assert (drafter.layout.max_q_len, verifier.layout.max_q_len) == (BLOCK, 17)


@pytest.mark.gpu
def test_the_graph_is_right_where_the_old_one_hid_it(device: torch.device) -> None:
    """One captured graph at width 17, replayed over trees that fill 8, 9 and 17 of its rows, in one batch and alone."""
    buffers = StaticBuffers(3, 17, device=device)
    table = torch.zeros(3, 12, dtype=torch.int32, device=device)
    group = buffers.add_group(
        HEADS, KV_HEADS, DIM, kv=PagedKV(page_size=PAGE, block_table=table), dtype=torch.float32
    )
    q = torch.zeros(3 * 17, HEADS, DIM, device=device)
    k, v = (torch.zeros(36, PAGE, KV_HEADS, DIM, device=device) for _ in range(2))
    out = torch.zeros_like(q)
    buffers.update_(parents=torch.full((3, 17), -1, dtype=torch.int32, device=device),
                    prefix_lens=torch.zeros(3, dtype=torch.int32, device=device),
                    num_nodes=torch.ones(3, dtype=torch.int32, device=device))  # fmt: skip
    graph, _ = capture(lambda: treeattn.tree_attention(q, k, v, group, out=out))
    for batch in (1, 3):
        case = scene(batch, 17, device, seed=batch)
        q[: batch * 17].copy_(case.q)
        k[: len(case.k)].copy_(case.k)
        v[: len(case.v)].copy_(case.v)
        buffers.update_(parents=case.parents, prefix_lens=torch.tensor(case.prefix_lens, device=device), kv=case.kv)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.allclose(out[: batch * 17].double().cpu(), dense(case, case.masks), atol=1e-4)
