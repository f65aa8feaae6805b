"""SGLang's own tree builders write the backend's tree-only mask, and its layers read it."""

from __future__ import annotations

import random

import pytest
import torch
from sglang.kernels.ops.speculative.eagle import build_chain_tree
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang_bodies import Graph, Step, World, ancestors

try:
    from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton
except ImportError:  # 0.5.22
    from sglang.srt.speculative.eagle_utils import sgl_build_tree_kernel_triton

TOPK, DEPTH, WIDTH = 4, 4, 17


def draft(seed: int) -> tuple[list[int], list[int], list[int]]:
    """A random EAGLE draft: the beams' candidates by step, the selected candidates, and the tree's parents.

    A step has TOPK candidates for each of TOPK beams (the first one for the root alone), numbered through all steps;
    candidate c hangs on beam c // TOPK, the 0th of which is the root.
    """
    draw = random.Random(seed)
    beams, first = [-1, *range(TOPK)], TOPK
    for _ in range(DEPTH - 2):
        beams += sorted(draw.sample(range(first, first + TOPK * TOPK), TOPK))
        first += TOPK * TOPK
    chosen: set[int] = set()
    while len(chosen) < WIDTH - 1:
        candidate = draw.randrange(first + TOPK * TOPK)
        parent = beams[candidate // TOPK]
        if parent < 0 or parent in chosen:
            chosen.add(candidate)
    nodes = sorted(chosen)
    parents = [-1] + [0 if (above := beams[c // TOPK]) < 0 else nodes.index(above) + 1 for c in nodes]
    return beams, nodes, parents


def build(drafts: list, prefixes: list[int], mask: torch.Tensor, mode: TreeMaskMode, device: str) -> torch.Tensor:
    """Run SGLang's builder into `mask`; returns the positions."""
    batch = len(drafts)

    def ints(*shape: int, fill: int = -1) -> torch.Tensor:
        return torch.full(shape, fill, dtype=torch.int64, device=device)

    positions = ints(batch * WIDTH)
    sgl_build_tree_kernel_triton(
        torch.tensor([beams for beams, _, _ in drafts], device=device),
        torch.tensor([nodes for _, nodes, _ in drafts], device=device),
        torch.tensor(prefixes, device=device), mask, positions,
        ints(batch, WIDTH), ints(batch, WIDTH), ints(batch, WIDTH), TOPK, DEPTH, WIDTH, mode,
    )  # fmt: skip
    return positions


@pytest.mark.parametrize("mode", ["QLEN_ONLY", "FULL_MASK"])
def test_trees(served: list, mode: str, device: str) -> None:
    world = World(device=device)
    graph = Graph(world, WIDTH)
    for seed, prefixes in enumerate(([5, 30, 0], [44, 2])):
        drafts = [draft(10 * seed + request) for request in range(len(prefixes))]
        step = Step(world, [parents for _, _, parents in drafts], prefixes, padding=3 - len(prefixes), seed=seed)
        own = world.backend.verify_mask
        assert own.mode == TreeMaskMode.QLEN_ONLY
        mask = own.buffer if mode == "QLEN_ONLY" else torch.ones_like(step.full_mask())
        mask.fill_(1)
        positions = build(drafts, prefixes, mask, TreeMaskMode[mode], device)
        depths = torch.cat([ancestors(parents).sum(1) - 1 for parents in step.trees])
        assert torch.equal(positions.cpu() - torch.tensor(prefixes).repeat_interleave(WIDTH), depths)
        step.check(graph.replay(step, mask))
        world.poison()
        step.check(step.eager(mask))
        world.backend._steps.check()


def test_chains(served: list, device: str) -> None:
    """The fused builder that SGLang runs for topk 1 where the mask is tree-only."""
    world = World(device=device)
    graph = Graph(world, 8)
    chain = [list(range(-1, 7))] * 2
    step = Step(world, chain, [5, 30], padding=1)
    mask = world.backend.verify_mask.buffer
    mask.fill_(77)
    tokens = torch.zeros(2, 7, dtype=torch.int64, device=device)
    outputs = build_chain_tree(tokens[:, 0].contiguous(), tokens, torch.tensor([5, 30], device=device), mask)
    assert outputs[0].data_ptr() == mask.data_ptr()
    step.check(graph.replay(step, outputs[0]))
