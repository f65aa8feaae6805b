"""What "auto" takes on a GPU: loaded when a step is prepared, and Triton's kernels for what is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import treeattn
from treeattn.backends import arch
from treeattn.capabilities import missing
from treeattn.cuda import launch
from treeattn.plan import TWIN
from treeattn.testing import Options, judge, random_case
from treeattn.testing.run import StaticRun, asked_of, call_of, group_of, run_plain

GPU = torch.device("cuda")
REASON = treeattn.available_backends("cuda")["cuda"]
pytestmark = [pytest.mark.gpu, pytest.mark.csrc]
needs_code = pytest.mark.skipif(torch.cuda.is_available() and REASON is not None, reason=f"backend 'cuda': {REASON}")
MLA = Options(head_dim_v=512, shared_kv=True)


def test_the_backend_is_the_one_that_the_chip_and_the_geometry_tell() -> None:
    for seed in range(40):
        case = random_case(seed, device=GPU, dtype=(torch.bfloat16, torch.float16, torch.float32)[seed % 3], batch=2)
        step = treeattn.plan(case.layout(), case.kv(), **group_of(case))
        covered = missing("cuda", "cuda", asked_of(case)) is None
        assert step.backend == ("cuda" if covered and REASON is None else "triton")


@needs_code
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_soft_cap_in_a_capture_needs_no_call_before(head_dim: int) -> None:
    """Its kernel is loaded with the plain one."""
    case = random_case(3, device=GPU, dtype=torch.bfloat16, head_dim=head_dim, num_kv_heads=2, batch=2, cache="paged",
                       strided_q=False, options=Options(logits_soft_cap=20.0))  # fmt: skip
    launch.load.cache_clear()
    step = treeattn.plan(case.layout(), case.kv(), **group_of(case))
    assert step.backend == "cuda"
    assert launch.load.cache_info().currsize == 2
    out = torch.full((case.total_q, case.num_qo_heads, case.head_dim_v), float("nan"), dtype=case.dtype, device=GPU)
    lse = torch.full(out.shape[:2], float("nan"), device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        treeattn.tree_attention(case.q, case.k_cache, case.v_cache, step, k_tree=case.k_tree, v_tree=case.v_tree,
                                out=out, lse=lse, **call_of(case))  # fmt: skip
    graph.replay()
    verdict = judge(case, out, lse)
    assert verdict.ok, verdict.message
    assert launch.load.cache_info().currsize == 2


@needs_code
def test_a_plan_in_a_capture_takes_what_is_loaded() -> None:
    case = random_case(3, device=GPU, dtype=torch.bfloat16, head_dim=128, num_kv_heads=2, batch=2)
    layout, kv = case.layout(), case.kv()
    treeattn.plan(layout, kv, backend="triton", **group_of(case))  # compiles the plan's kernel
    backends = []
    for forget in (True, False):
        if forget:
            launch.load.cache_clear()
        else:
            treeattn.plan(layout, kv, **group_of(case))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            backends.append(treeattn.plan(layout, kv, **group_of(case)).backend)
    assert backends == ["triton", "cuda"]


@needs_code
@pytest.mark.parametrize("odd", ["q", "soft-cap"])
def test_a_call_that_falls_back_is_captured_and_replayed(odd: str) -> None:
    """The plan for Triton's tiles is in the graph: it is right for the trees of later updates."""
    options: dict[str, Any] = {"num_kv_heads": 2, "group": 4, "head_dim": 128}
    if odd == "soft-cap":
        options = {"num_kv_heads": 1, "group": 8, "head_dim": 576}
        options["options"] = Options(head_dim_v=512, shared_kv=True, logits_soft_cap=20.0)
    cases = [
        random_case(seed, device=GPU, dtype=torch.bfloat16, batch=3, source="parents", uniform=True, page_size=16,
                    table="block", tree_kv="logical", cache="paged", kv_layout="NHD", index_dtype=torch.int32,
                    num_pages=200, extra_pages=0, max_prefix=300, max_width=17, sm_scale=0.1, strided_q=False,
                    **options)
        for seed in (1, 2, 3)
    ]  # fmt: skip
    static = StaticRun.for_cases(cases)
    assert static.step.backend == "cuda"
    if odd == "q":
        static.q = torch.empty(static.q.numel() + 1, dtype=static.q.dtype, device=GPU)[1:].view_as(static.q)
    k, v = cases[0].k_cache.clone(), None if cases[0].v_cache is None else cases[0].v_cache.clone()
    out = torch.empty(static.max_total_q, cases[0].num_qo_heads, cases[0].head_dim_v, dtype=torch.bfloat16, device=GPU)
    lse = torch.empty(out.shape[:2], device=GPU)

    def attend() -> None:
        treeattn.tree_attention(static.q, k, v, static.step, out=out, lse=lse, **call_of(cases[0]))

    static.load_(cases[0])
    static.update_(cases[0])
    attend()
    assert TWIN in static.step.launches
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for case in (*cases, cases[0]):
        static.load_(case)
        k.copy_(case.k_cache)
        if v is not None:
            v.copy_(case.v_cache)
        static.update_(case)
        out.fill_(float("nan"))
        graph.replay()
        verdict = judge(case, out[: case.total_q], lse[: case.total_q])
        assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@needs_code
def test_mla_is_the_cuda_backends_and_a_window_in_it_is_tritons() -> None:
    windowed = Options(head_dim_v=512, shared_kv=True, window_left=9)
    for options, wanted in ((MLA, "cuda"), (windowed, "triton")):
        case = random_case(5, device=GPU, dtype=torch.bfloat16, head_dim=576, num_kv_heads=1, batch=2, options=options)
        assert treeattn.plan(case.layout(), case.kv(), **group_of(case)).backend == wanted
        result = run_plain(case)
        verdict = judge(case, result.out, result.lse)
        assert verdict.ok, verdict.message


def test_another_chip_takes_triton() -> None:
    if arch(torch.device("cuda", 0)) == 90:
        pytest.skip("this chip is the one")
    case = random_case(5, device=GPU, dtype=torch.bfloat16, head_dim=128)
    assert treeattn.plan(case.layout(), case.kv(), **group_of(case)).backend == "triton"
