"""Large shapes on a GPU: wide trees, a million tokens, 512 requests, memory past 2^31 elements in every tensor."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from torch import Tensor

import treeattn
from treeattn.testing import Case, Options, Placement, build_case, check_case, draw_tree, judge
from treeattn.testing.run import call_of, group_of

pytestmark = pytest.mark.gpu
BORDER = 2**31
PAGE = 64


def checked(case: Case) -> None:
    for path in ("plain", "static"):
        verdict = check_case(case, "triton", path)
        assert verdict.ok, f"{path}: {verdict.message}\n{case.describe()}"


@pytest.mark.parametrize("nodes", [1025, 2049])
@pytest.mark.parametrize("options", [Options(), Options(window_left=300, sinks=True)], ids=["plain", "window"])
def test_wide_trees(nodes: int, options: Options) -> None:
    trees = [draw_tree("recent", nodes, random.Random(1)), draw_tree("any", 3, random.Random(2))]
    checked(build_case(trees, [1000, 70], q_lens=[nodes, 5], heads=(4, 2), head_dim=64, dtype=torch.bfloat16,
                       device="cuda", placement=Placement(page_size=PAGE), options=options))  # fmt: skip


@pytest.mark.parametrize("options", [Options(), Options(batch_invariant=True)], ids=["plain", "invariant"])
def test_a_million_tokens(options: Options) -> None:
    checked(build_case([draw_tree("recent", 17, random.Random(3)), [-1]], [1_000_003, 5], q_lens=[17, 2], heads=(4, 1),
                       head_dim=64, dtype=torch.bfloat16, device="cuda",
                       placement=Placement(page_size=PAGE, table="block"), options=options))  # fmt: skip


def test_sums_of_a_long_prefix_do_not_drift() -> None:
    """Equal scores, thousands of tiles in a program: what a tile's maximum leaves as it is must stay as it is."""
    batch, tokens, dim = 512, 2**18, 64
    generator = torch.Generator("cuda").manual_seed(5)
    q, row = (torch.randn(rows, 4, dim, device="cuda", generator=generator).bfloat16() for rows in (batch, 1))
    cache = row[:, :1].expand(1, PAGE, 1, dim).contiguous()
    table = torch.zeros(batch, tokens // PAGE + 1, dtype=torch.int32, device="cuda")
    prefixes = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
    layout = treeattn.TreeLayout.chain(prefixes, 1)
    step = treeattn.plan(layout, treeattn.PagedKV(block_table=table, page_size=PAGE), 4, 1, dim, dtype=q.dtype)
    lse = torch.empty(batch, 4, device="cuda")
    treeattn.tree_attention(q, cache, cache, step, lse=lse, sm_scale=1.7)
    expected = 1.7 * (q.double() @ row[0, 0].double()) + math.log(tokens + 1)
    assert float((lse.double() - expected).abs().max()) < 1e-4


def test_512_requests_of_mixed_widths() -> None:
    rng = random.Random(4)
    widths = [rng.randint(1, 65) for _ in range(512)]
    trees = [draw_tree("any", rng.randint(1, width), rng) for width in widths]
    prefixes = [rng.choice((0, 1, 63, 64, 65, 200)) for _ in widths]
    checked(build_case(trees, prefixes, q_lens=widths, heads=(8, 2), head_dim=64, dtype=torch.bfloat16, device="cuda",
                       placement=Placement(page_size=16)))  # fmt: skip


def spread(rows: Tensor, stride: int) -> Tensor:
    """The same rows, `stride` elements apart."""
    held = torch.empty((rows.shape[0] - 1) * stride + rows[0].numel(), dtype=rows.dtype, device=rows.device)
    view = held.as_strided(rows.shape, (stride, *rows.stride()[1:]))
    return view.copy_(rows)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_memory_on_both_sides_of_2_to_31_elements(kv_dtype: torch.dtype | None) -> None:
    heads, dim = (16, 8), 128
    trees = [draw_tree("recent", 17, random.Random(seed)) for seed in range(4)]
    options = Options(kv_dtype=kv_dtype, scales="none" if kv_dtype is None else "heads")
    case = build_case(trees, [300, 1000, 64, 0], heads=heads, head_dim=dim, dtype=torch.bfloat16, device="cuda",
                      placement=Placement(page_size=PAGE, table="block", index_dtype=torch.int32),
                      options=options)  # fmt: skip
    assert case.v_cache is not None
    held = case.k_cache.shape[0]
    first = BORDER // (PAGE * heads[1] * dim) - held // 2
    caches = []
    for cache in (case.k_cache, case.v_cache):
        large = torch.empty(first + held, *cache.shape[1:], dtype=cache.dtype, device="cuda")
        assert large.numel() > BORDER > first * large[0].numel()
        large[first:] = cache
        caches.append(large)
    table = case.kv_args["block_table"]
    kv = case.kv(block_table=torch.where((table >= 0) & (table < held), table + first, table))
    # two of the four requests begin behind the border, and rows of one request are further apart than int32 counts
    stride = BORDER // (case.total_q // 2)
    q = spread(case.q, stride)
    out = spread(torch.zeros_like(q), stride)
    assert q.stride(0) * case.total_q > BORDER
    step = treeattn.plan(case.layout(), kv, backend="triton", **group_of(case))
    lse = torch.empty(case.total_q, heads[0], device="cuda")
    treeattn.tree_attention(q, *caches, step, out=out, lse=lse, **call_of(case))
    verdict = judge(case, out, lse)
    assert verdict.ok, verdict.message
    del q, out
    wide = spread(case.q[:17], BORDER // 8)
    one = dataclasses.replace(case, q=wide)
    layout = treeattn.TreeLayout.from_parents(case.layout_args["parents"][:1], torch.tensor([300], device="cuda"))
    alone = treeattn.plan(layout, kv, backend="triton", **group_of(case))
    got = treeattn.tree_attention(one.q, *caches, alone, **call_of(case))
    want = treeattn.tree_attention(case.q[:17], *caches, alone, **call_of(case))
    assert torch.equal(got, want)
