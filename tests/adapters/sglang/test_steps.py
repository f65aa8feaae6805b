"""Random steps one after another through one backend: on one graph, and eager, in any order.

Each step has other trees, lengths and requests, padded to the captured batch; every slot that it does not fill is NaN.
SGLang's own kernel is out of order meanwhile, so that whatever has an output was served by treeattn.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from sglang_bodies import Graph, Step, World, random_tree

WIDTH = 17  # of the trees; the server was told a draft block of 8
ON_GPU = os.environ.get("TREEATTN_TEST_DEVICE") == "cuda"
STEPS = 60 if ON_GPU else 4
BUDGET = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

WORLDS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "gqa pages window": {"page_size": 16, "window": 20},
    "mla": {"mla": True, "dim": 40},
    "fp16 mqa": {"dtype": torch.float16, "kv_heads": 1},
}
# bf16 dots are wrong in Triton's interpreter, which is also too slow for these shapes
GPU_WORLDS: dict[str, dict[str, Any]] = {
    "bf16 gqa": {"heads": 32, "kv_heads": 8, "dim": 128},
    "bf16 gqa pages": {"heads": 64, "kv_heads": 8, "dim": 128, "page_size": 64},
    "bf16 gqa window": {"heads": 8, "kv_heads": 1, "dim": 128, "window": 300},
    "bf16 mla": {"heads": 16, "mla": True, "dim": 576, "rope": 64},
    "bf16 mla deterministic": {"heads": 16, "mla": True, "dim": 576, "rope": 64, "deterministic": True},
}
if ON_GPU:
    large = {"dtype": torch.bfloat16, "context": 2048, "max_batch": 6}
    WORLDS |= {name: {**large, **options} for name, options in GPU_WORLDS.items()}


def random_step(world: World, seed: int, padded: bool) -> tuple[Step, str]:
    """A step of some requests, padded to the graph's batch or not, and how its mask comes."""
    draw = random.Random(seed)
    requests = draw.randint(1, world.max_batch)
    chain = draw.random() < 0.2
    seeds = [draw.randrange(10**6) for _ in range(requests)]
    trees = [list(range(-1, WIDTH - 1)) if chain else random_tree(WIDTH, tree_seed) for tree_seed in seeds]
    lengths = (0, 1, world.context - WIDTH, *(draw.randrange(world.context - WIDTH) for _ in range(3)))
    prefixes = [draw.choice(lengths) for _ in range(requests)]
    padding = world.max_batch - requests if padded else 0
    form = "none" if chain and draw.random() < 0.5 else draw.choice(("own", "tree", "full", "full uint8"))
    return Step(world, trees, prefixes, padding, seed, chain=form == "none"), form


def mask_of(step: Step, form: str) -> torch.Tensor | None:
    if form == "none":
        return None
    mask = step.full_mask() if form.startswith("full") else step.tree_mask()
    return mask.to(torch.uint8) if form.endswith("uint8") else mask


@pytest.mark.parametrize("name", WORLDS)
def test_steps(served: list, name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(**WORLDS[name], device=device)
    backend, budget = world.backend, BUDGET[world.dtype]
    assert backend.num_draft_tokens == 8

    def out_of_order(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a verify layer went to SGLang's kernel")

    for kernel in ("extend_attention_fwd", "extend_attention_fwd_unified"):
        assert hasattr(backend, kernel)
        monkeypatch.setattr(backend, kernel, out_of_order)
    graph = Graph(world, WIDTH)
    assert graph.metadata.qo_indptr.dtype == torch.int64
    calls = 2 if ON_GPU else 1  # of the capture: one before it, which compiles
    assert backend.treeattn_calls == calls
    for seed in range(STEPS):
        step, form = random_step(world, seed, padded=True)
        world.poison()
        graph.out.fill_(float("nan"))
        out = graph.replay(step, mask_of(step, form), own=form == "own")
        step.check(out, budget)
        assert not bool(out[step.rows :].any())
        backend._steps.check()
        if seed % 4 == 0:
            eager, form = random_step(world, seed + 1000, padded=False)
            world.poison()
            eager.check(eager.eager(mask_of(eager, form)), budget)
            backend._steps.check()
        calls += (not ON_GPU) + (seed % 4 == 0)
        assert backend.treeattn_calls == calls
    assert served == [backend]
    assert len(backend._steps.keys) == 1
