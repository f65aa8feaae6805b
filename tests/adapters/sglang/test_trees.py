"""Larger trees through SGLang's real metadata path: eager steps, and static ones as its CUDA graphs use them.

Every unused slot of the pool is NaN. The server was told a draft block of 8 while the trees have 17 nodes: the founding
bug, which no backend may repeat.
"""

from __future__ import annotations

import pytest
import torch
from sglang_bodies import Graph, Step, World, random_tree

PREFIXES = [5, 30, 0]


def trees(width: int, count: int = 3, seed: int = 0) -> list[list[int]]:
    return [random_tree(width, seed + index) for index in range(count)]


@pytest.mark.parametrize("form", ["full bool", "full uint8", "tree bool", "chain"])
@pytest.mark.parametrize("width", [7, 8, 9, 17])
def test_eager(served: list, width: int, form: str, device: str) -> None:
    world = World(device=device)
    chain = [list(range(-1, width - 1))] * 3
    step = Step(world, chain if form == "chain" else trees(width), PREFIXES, chain=form == "chain")
    mask = {"chain": None, "tree bool": step.tree_mask()}.get(form, step.full_mask())
    step.check(step.eager(mask.to(torch.uint8) if form.endswith("uint8") else mask))
    assert world.backend.treeattn_calls == 1


@pytest.mark.parametrize("told", [7, 8, 16, 34])
def test_wrong_width_is_refused(served: list, told: int, device: str) -> None:
    step = Step(World(device=device), trees(17), PREFIXES)
    with pytest.raises(ValueError, match=rf"verify width of {told} .* but the step has .* 17 each"):
        step.eager(width=told)


@pytest.mark.parametrize("page_size", [1, 16])
def test_replays(served: list, page_size: int, device: str) -> None:
    """Batches that shrink, grow, change their trees and lengths: nothing of an earlier step is left."""
    world = World(page_size=page_size, device=device)
    graph = Graph(world, 17)
    metadata = world.backend.forward_metadata
    assert metadata.qo_indptr.dtype == torch.int64
    assert world.backend.verify_mask.buffer.numel() == 3 * 17 * 17
    steps = [
        (Step(world, trees(17), PREFIXES), "own"),
        (Step(world, trees(17, 1, 7), [44], padding=2, seed=1), "own"),
        (Step(world, trees(17, 2, 9), [0, 17], padding=1, seed=2), "full"),
        (Step(world, [list(range(-1, 16))] * 3, [3, 1, 62], seed=3, chain=True), "chain"),
        (Step(world, trees(17, 3, 20), [31, 2, 9], seed=4), "tree"),
        (Step(world, trees(17), PREFIXES), "own"),
    ]
    outs = []
    for step, form in steps:
        mask = {"own": step.tree_mask(), "tree": step.tree_mask(), "full": step.full_mask(), "chain": None}[form]
        outs.append(graph.replay(step, mask, own=form == "own").clone())
        step.check(outs[-1])
        assert not bool(outs[-1][step.rows :].any())
        world.backend._steps.check()
        assert world.backend.forward_metadata is metadata
    assert torch.equal(outs[0], outs[-1])


def test_a_mask_that_the_draft_fills_after_the_plan(served: list, device: str) -> None:
    """SGLang may prepare a replay on another stream, and says when the draft's values are there."""
    world = World(device=device)
    graph = Graph(world, 17)
    step = Step(world, trees(17), PREFIXES)
    late = step.tree_mask()
    wrong = graph.replay(step, torch.roll(late, 1), own=True).clone()
    with pytest.raises(AssertionError, match="off by"):
        step.check(wrong)
    world.backend.verify_mask.buffer[: late.numel()] = late
    world.backend.update_verify_buffers_to_fill_after_draft(None, 3)
    graph.run()
    step.check(graph.out)


def test_narrower_steps_than_captured(served: list, device: str) -> None:
    """A server with adaptive widths makes buffers for the widest, and a graph for each."""
    world = World(draft_tokens=17, device=device)
    graph = Graph(world, 9)
    step = Step(world, trees(9), PREFIXES)
    assert world.backend._steps.buffers.layout.max_q_len == 17
    step.check(graph.replay(step, step.tree_mask(), own=True))


def test_graphs_made_for_the_draft_block(served: list, device: str) -> None:
    world = World(device=device)
    graph = Graph(world, 8)
    step = Step(world, trees(17), PREFIXES)
    with pytest.raises(ValueError, match=r"width of 17 exceeds these buffers' max_q_len 8 \(3 requests x 17 rows\)"):
        world.backend.init_forward_metadata_out_graph(step.forward_batch(step.spec_info(step.full_mask())))
    narrow = Step(world, trees(8), PREFIXES)
    narrow.check(graph.replay(narrow, narrow.tree_mask(), own=True))


def test_padding_that_another_width_explains(served: list, device: str) -> None:
    """Two trees of 16 in a batch of four rows of 8: the counts agree, the tree's own shape does not."""
    world = World(max_batch=4, device=device)
    Graph(world, 8)
    step = Step(world, trees(16, 2), [5, 6], padding=2)
    batch = step.forward_batch(step.spec_info(step.full_mask(), width=8))
    batch.positions = batch.positions[:32]
    with pytest.raises(ValueError, match=r"verify width of 8 .* 16 each"):
        world.backend.init_forward_metadata_out_graph(batch)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize(
    "options",
    [
        {"heads": 8, "kv_heads": 1},
        {"logit_cap": 3.0},
        {"mla": True, "dim": 40},
        {"dtype": torch.float16},
        {"layers_known": True},
        {"layers_known": True, "mla": True, "dim": 40},
        {"deterministic": True},
        {"deterministic": True, "mla": True, "dim": 40},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()),
)
def test_options(served: list, options: dict, graph: bool, device: str) -> None:
    world = World(**options, device=device)
    assert len(world.backend._steps.keys) == int(world.layers_known)
    step = Step(world, trees(17), PREFIXES)
    budget = 2e-3 if world.dtype == torch.float16 else 1e-5
    out = Graph(world, 17).replay(step, step.tree_mask(), own=True) if graph else step.eager()
    step.check(out, budget)
    assert len(world.backend._steps.keys) == 1


def test_sinks(served: list, device: str) -> None:
    world = World(device=device)
    sinks = torch.tensor([0.5, -2.0, 3.0, 0.0], device=device)
    step = Step(world, trees(17), PREFIXES)
    step.check(step.eager(sinks=sinks), sinks=sinks)


def test_fp8_latent_cache(served: list, device: str) -> None:
    """The prefix counts as what its FP8 bytes stand for; the nodes come fresh."""
    world = World(mla=True, dim=40, fp8=True, device=device)
    step = Step(world, trees(17), PREFIXES)
    step.prefix_k = [k.to(torch.float8_e4m3fn).to(k.dtype) for k in step.prefix_k]
    step.check(step.eager())
    step.check(Graph(world, 17).replay(step, step.tree_mask(), own=True))


def test_deterministic_bits_do_not_depend_on_the_batch(served: list, device: str) -> None:
    world = World(deterministic=True, device=device)
    batch = Step(world, trees(17), PREFIXES)
    alone = Step(world, batch.trees[1:2], PREFIXES[1:2])
    rows = slice(17, 34)
    for name in ("q", "k", "v"):
        setattr(alone, name, getattr(batch, name)[rows])
    alone.prefix_k, alone.prefix_v = batch.prefix_k[1:2], batch.prefix_v[1:2]
    together = batch.eager()[rows].clone()
    world.poison()
    assert torch.equal(alone.eager(), together)
    assert world.backend.treeattn_calls == 2


def test_rows_that_data_parallelism_adds(served: list, device: str) -> None:
    """A padded request, and rows that are nobody's: zero, whatever they held."""
    world = World(device=device)
    step = Step(world, trees(17, 2), [5, 30], padding=1)
    for padded_requests in (2, 3):
        batch = step.forward_batch(step.spec_info(step.full_mask()))
        for name in ("req_pool_indices", "seq_lens"):
            setattr(batch, name, getattr(batch, name)[:padded_requests])
        batch.batch_size = padded_requests
        world.runner.kv_index_translator.bind_own_plan(batch)
        world.backend.init_forward_metadata(batch)
        out = step.call(batch)
        step.check(out)
        assert not bool(out[step.rows :].any())


def test_group_first_met_in_a_capture(served: list, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(device=device)
    step = Step(world, trees(17), PREFIXES)
    step.eager()
    key = world.backend._steps.keys[0]._replace(head_dim=24)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="first met inside a graph capture"):
        world.backend._steps.step_for(key)
