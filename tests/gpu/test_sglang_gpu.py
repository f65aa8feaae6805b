"""The SGLang adapter's steps and drop-in on a GPU, in real CUDA graphs; SGLang itself is not needed.

Static steps are written outside the graph and read inside it, as SGLang replays its verify graphs; the drop-in makes
its layout and plan inside. Every slot that holds no prefix is NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from treeattn import PagedKV
from treeattn.adapters.sglang import drop_in
from treeattn.adapters.sglang.extend_call import ExtendCall, attend, group_key
from treeattn.adapters.sglang.verify import VerifyStep, VerifySteps

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
BATCH, WIDTH, CONTEXT, SLOTS = 3, 17, 400, 1300
BUDGET = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4}


class Batch:
    """Tensors of fixed addresses that hold one verify step after another, and the step's float64 answer."""

    def __init__(self, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, dim_v: int, mla: bool) -> None:
        self.dim, self.mla = dim, mla
        rows = BATCH * WIDTH

        def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=of, device=DEVICE)

        k_pool = empty(SLOTS, kv_heads, dim)
        v_pool = k_pool[..., :dim_v] if mla else empty(SLOTS, kv_heads, dim_v)
        self.call = ExtendCall(
            empty(rows, heads, dim), empty(rows, kv_heads, dim), empty(rows, kv_heads, dim_v),
            empty(rows, heads, dim_v), k_pool, v_pool,
            torch.arange(0, rows + 1, WIDTH, dtype=torch.int64, device=DEVICE),  # int64, as in SGLang's graphs
            empty(BATCH + 1, of=torch.int32), empty(BATCH * CONTEXT, of=torch.int64),
            empty(rows * (CONTEXT + WIDTH), of=torch.uint8), True, empty(BATCH + 1, of=torch.int64), WIDTH, 1.0, 1.0,
            dim**-0.5,
        )  # fmt: skip
        self.tree = empty(rows * WIDTH, of=torch.uint8)
        self.prefix_lens = empty(BATCH, of=torch.int32)

    def fill(self, seed: int, requests: int = BATCH) -> Tensor:
        """Write a random step of `requests` real requests; returns float64 ``[rows, heads, dim_v]`` of those."""
        draw, call = random.Random(seed), self.call
        generator = torch.Generator(DEVICE).manual_seed(seed)
        for name in ("q_extend", "k_extend", "v_extend"):
            getattr(call, name).normal_(generator=generator)
        if self.mla:
            call.v_extend.copy_(call.k_extend[..., : call.v_extend.shape[-1]])
        call.k_buffer.fill_(float("nan"))
        call.v_buffer.fill_(float("nan"))
        prefixes = [draw.randrange(CONTEXT) for _ in range(requests)]
        slots = torch.randperm(SLOTS, generator=generator, device=DEVICE)
        starts = [0]
        for prefix in prefixes:
            starts.append(starts[-1] + prefix)
        held = slots[: starts[-1]]
        call.kv_indices[: len(held)].copy_(held)
        call.kv_indptr.copy_(torch.tensor(starts + [starts[-1]] * (BATCH - requests), dtype=torch.int32))
        self.prefix_lens.copy_(torch.tensor(prefixes + [1] * (BATCH - requests), dtype=torch.int32))
        fresh_k = torch.randn(len(held), *call.k_buffer.shape[1:], generator=generator, device=DEVICE)
        call.k_buffer[held] = fresh_k.to(call.k_buffer.dtype)
        if not self.mla:
            fresh_v = torch.randn(len(held), *call.v_buffer.shape[1:], generator=generator, device=DEVICE)
            call.v_buffer[held] = fresh_v.to(call.v_buffer.dtype)
        none = torch.zeros(0, dtype=torch.bool)
        answers, full, tree, at = [call.o_extend[:0].double()], [none], [none], [0]
        group = call.q_extend.shape[1] // call.k_extend.shape[1]
        for request, prefix in enumerate(prefixes):
            seen = torch.eye(WIDTH, dtype=torch.bool)
            for row in range(1, WIDTH):
                seen[row] |= seen[draw.randrange(row)]
            rows, own = slice(request * WIDTH, (request + 1) * WIDTH), held[starts[request] : starts[request + 1]]
            tree.append(seen.flatten())
            visible = torch.cat([torch.ones(WIDTH, prefix, dtype=torch.bool), seen], dim=1)
            full.append(visible.flatten())
            at.append(at[-1] + visible.numel())
            k = torch.cat([call.k_buffer[own], call.k_extend[rows]]).double().repeat_interleave(group, 1)
            v = torch.cat([call.v_buffer[own], call.v_extend[rows]]).double().repeat_interleave(group, 1)
            scores = torch.einsum("ihd,khd->hik", call.q_extend[rows].double(), k) * self.dim**-0.5
            scores = scores.masked_fill(~visible.to(DEVICE), float("-inf"))
            answers.append(torch.einsum("hik,khd->ihd", torch.softmax(scores, dim=2), v))
        call.custom_mask[: at[-1]].copy_(torch.cat(full))
        call.mask_indptr[: requests + 1].copy_(torch.tensor(at))
        self.tree.fill_(1)[: requests * WIDTH**2].copy_(torch.cat(tree))
        return torch.cat(answers)

    def close(self, expected: Tensor) -> None:
        out = self.call.o_extend
        assert bool(torch.isfinite(out).all())
        torch.testing.assert_close(out[: len(expected)].double(), expected, atol=BUDGET[out.dtype], rtol=0)


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """Run once to compile, then capture; returns the replay."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@pytest.fixture(
    params=[
        (torch.bfloat16, 8, 2, 128, 128, False),
        (torch.float16, 8, 1, 64, 64, False),
        (torch.float32, 4, 4, 80, 80, False),
        (torch.bfloat16, 16, 1, 576, 512, True),
    ],
    ids=["bf16 gqa", "fp16 mqa", "fp32 mha", "bf16 mla"],
)
def batch(request: pytest.FixtureRequest) -> Batch:
    return Batch(*request.param)


def test_static_steps(batch: Batch) -> None:
    steps = VerifySteps([group_key(batch.call)])
    kv = PagedKV(kv_indptr=batch.call.kv_indptr, kv_indices=batch.call.kv_indices)
    steps.allocate(BATCH, WIDTH, CONTEXT, kv)

    def write(requests: int, form: str) -> None:
        mask = {"tree": batch.tree, "full": batch.call.custom_mask, "chain": None}[form]
        steps.write_static(VerifyStep(requests, WIDTH, batch.prefix_lens[:requests], mask, form))

    batch.fill(0)
    write(BATCH, "tree")
    group = steps.step_for(group_key(batch.call))
    replay = captured(lambda: attend(batch.call, group, zero_tail=True))
    for seed in range(1, 12):
        requests = seed % (BATCH + 1)
        expected = batch.fill(seed, requests)
        batch.call.o_extend.fill_(float("nan"))
        write(requests, "full" if seed % 2 else "tree")
        replay()
        batch.close(expected)
        assert not bool(batch.call.o_extend[len(expected) :].any())
        steps.check()


def test_drop_in(batch: Batch) -> None:
    batch.fill(0)
    replay = captured(lambda: drop_in.extend_attention_fwd(**vars(batch.call)))
    tree = replace(batch.call, custom_mask=batch.tree, mask_indptr=None)
    replay_tree = captured(lambda: drop_in.extend_attention_fwd(**vars(tree), mask_form="tree"))
    for seed in range(1, 9):
        expected = batch.fill(seed)
        for run in (replay, replay_tree):
            batch.call.o_extend.fill_(float("nan"))
            run()
            batch.close(expected)
        drop_in.check(batch.call.o_extend.device)


def test_holes_empty_their_request_and_are_told(batch: Batch) -> None:
    expected = batch.fill(3)
    call = batch.call
    second = int(call.mask_indptr[1])
    call.custom_mask[second] = 0  # row 0 of request 1 does not see the first token of its prefix
    assert int(batch.prefix_lens[1]) > 0
    drop_in.extend_attention_fwd(**vars(call))
    rows = slice(WIDTH, 2 * WIDTH)
    assert not bool(call.o_extend[rows].any())
    expected[rows] = 0
    batch.close(expected)
    with pytest.raises(ValueError, match="request 1"):
        drop_in.check(call.o_extend.device)
    drop_in.check(call.o_extend.device)
