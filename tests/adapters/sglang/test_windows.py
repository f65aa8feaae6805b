"""Sliding windows: by depth, with the exact edge, over SGLang's own list of the tokens inside the window."""

from __future__ import annotations

import pytest
import torch
from sglang_bodies import Graph, Step, World, random_tree


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("window", [1, 4, 20, 200])
def test_by_depth(served: list, window: int, graph: bool, device: str) -> None:
    world = World(window=window, device=device)
    step = Step(world, [random_tree(17, seed) for seed in range(3)], [5, 30, 0])
    out = Graph(world, 17).replay(step, step.tree_mask(), own=True) if graph else step.eager()
    step.check(out)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "static"])
def test_exact_edge(served: list, graph: bool, device: str) -> None:
    """Window 4 at prefix 6: a row at position p sees p - 4 .. p, siblings alike, and of the nodes only ancestors.

    q is 0, so every visible key weighs the same, and V is one-hot per key.
    """
    world = World(window=4, kv_heads=4, device=device)
    star = [-1, 0, 0, 0, 1]  # positions 6, 7, 7, 7, 8; a window by row would put them at 6 .. 10
    step = Step(world, [star], [6], padding=2 if graph else 0)
    step.q.zero_()
    step.v.zero_()
    step.prefix_v[0].zero_()
    for token in range(6):
        step.prefix_v[0][token, :, token] = 1
    for node in range(5):
        step.v[node, :, 6 + node] = 1
    out = Graph(world, 5).replay(step, step.tree_mask(), own=True) if graph else step.eager()
    seen = [[2, 3, 4, 5, 6], [3, 4, 5, 6, 7], [3, 4, 5, 6, 8], [3, 4, 5, 6, 9], [4, 5, 6, 7, 10]]
    for row, keys in enumerate(seen):
        expected = torch.zeros(16, device=device)
        expected[keys] = 1 / 5
        torch.testing.assert_close(out[row], expected.expand(4, 16), atol=1e-6, rtol=0)


def test_a_layer_without_window_beside_one_with(served: list, device: str) -> None:
    """Two groups in one step: each layer reads its own addresses."""
    world = World(window=4, device=device)
    step = Step(world, [random_tree(9, seed) for seed in range(2)], [12, 30])
    step.check(step.eager())
    world.layer.sliding_window_size = -1
    batch = step.forward_batch(step.spec_info(step.full_mask()))
    world.backend.init_forward_metadata(batch)
    step.check(step.call(batch), window=10**6)
    assert [key.window_left for key in world.backend._steps.keys] == [4, -1]
