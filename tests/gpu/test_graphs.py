"""Real CUDA graphs: captured once at capacity, replayed over 50 random steps.

Each replay equals, bit by bit, the same kind of buffers without a graph, and a plain call within the budget.
Neither memory nor any address changes.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from settings_of_tests import same_bits

import treeattn
from treeattn.buffers import tensors_of
from treeattn.graphs import capture
from treeattn.testing import Case, Guarded, Options, StaticRun, judge, random_case, run_plain
from treeattn.testing.run import call_of

pytestmark = pytest.mark.gpu
STEPS = 50
MAX_BATCH, MAX_WIDTH, MAX_PREFIX, PAGES = 5, 33, 300, 2500


def step_case(seed: int, dtype: torch.dtype, geometry: dict[str, Any]) -> Case:
    """A random step whose caches have one shape, whatever its batch and lengths."""
    return random_case(
        seed, device="cuda", dtype=dtype, batch=seed % (MAX_BATCH + 1), max_width=(1, 9, 17, MAX_WIDTH)[seed % 4],
        max_prefix=(5, 60, MAX_PREFIX)[seed % 3], num_pages=PAGES // geometry["page_size"] + 40, poison="nan",
        **geometry,
    )  # fmt: skip


class Looped:
    """A StaticRun with its own cache, out and lse, whose step is `update_` and attention, captured or not."""

    def __init__(self, like: Case, captured: bool, backend: str = "triton") -> None:
        width = MAX_BATCH * (-(-(MAX_PREFIX + MAX_WIDTH) // like.placement.page_size) + 6)
        total = MAX_BATCH * MAX_WIDTH
        self.static = StaticRun(like, MAX_BATCH, MAX_WIDTH, total, width, backend)
        self.k, self.v = like.k_cache.clone(), None if like.v_cache is None else like.v_cache.clone()
        shape = (total, like.num_qo_heads, like.head_dim_v)
        self.out = Guarded(shape, like.dtype, "cuda", gap=like.head_dim_v)
        # what a graph holds the address of, or the value
        self.call = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in call_of(like).items()
        }
        self.call["sm_scale"] = like.head_dim**-0.5
        self.lse = Guarded(shape[:2], torch.float32, "cuda", transposed=True)
        self.args: dict[str, torch.Tensor] = {
            "parents": torch.zeros(total, dtype=torch.int32, device="cuda"),
            "qo_indptr": torch.zeros(MAX_BATCH + 1, dtype=torch.int32, device="cuda"),
            "prefix_lens": torch.zeros(MAX_BATCH, dtype=torch.int32, device="cuda"),
            "num_nodes": torch.zeros(MAX_BATCH, dtype=torch.int32, device="cuda"),
        }
        self.graph = capture(self.step)[0] if captured else None

    def step(self) -> None:
        self.static.bufs.update_(**self.args)
        k_tree, v_tree = self.static.fresh or (None, None)
        treeattn.tree_attention(
            self.static.q, self.k, self.v, self.static.step, k_tree=k_tree, v_tree=v_tree,
            out=self.out.tensor, lse=self.lse.tensor, **self.call,
        )  # fmt: skip

    def run(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """Load a step into the static tensors and run it; out and lse of its own rows, the rest untouched."""
        self.static.load_(case)
        self.k.copy_(case.k_cache)
        if self.v is not None and case.v_cache is not None:
            self.v.copy_(case.v_cache)
        for name, value in call_of(case).items():
            if isinstance(value, torch.Tensor):
                self.call[name].copy_(value)
        flat = [parent for tree, width in zip(case.parents, case.q_lens, strict=True)
                for parent in (*tree, *[77] * (width - len(tree)))]  # fmt: skip
        starts = [*case.starts, *[case.starts[-1]] * (MAX_BATCH - case.batch)]
        self.args["parents"][: len(flat)] = torch.tensor(flat, dtype=torch.int32, device="cuda")
        self.args["qo_indptr"].copy_(torch.tensor(starts, dtype=torch.int32))
        for name, values in (("prefix_lens", case.prefixes), ("num_nodes", case.nodes)):
            self.args[name].copy_(torch.tensor([*values, *[0] * (MAX_BATCH - case.batch)], dtype=torch.int32))
        for guard in (self.out, self.lse):
            guard.tensor.fill_(-3.0)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.step()
        rows = case.starts[-1]
        assert (self.out.tensor[rows:] == -3.0).all(), "rows of no request were written"
        assert (self.lse.tensor[rows:] == -3.0).all(), "lse of rows of no request was written"
        assert self.out.touched() is None
        assert self.lse.touched() is None
        return self.out.tensor[:rows].cpu().clone(), self.lse.tensor[:rows].cpu().clone()

    def addresses(self) -> list[int]:
        owners = [self.static.bufs.layout, *(g.buffers for g in self.static.bufs.groups if g.buffers is not None)]
        tensors = [tensor for owner in owners for tensor in tensors_of(owner).values()]
        return [tensor.data_ptr() for tensor in tensors]


GEOMETRIES: list[dict[str, Any]] = [
    {"group": 4, "num_kv_heads": 2, "head_dim": 128, "page_size": 16, "table": "block", "tree_kv": "logical"},
    {"group": 8, "num_kv_heads": 1, "head_dim": 64, "page_size": 1, "table": "csr", "tree_kv": "slots"},
    {"group": 3, "num_kv_heads": 3, "head_dim": 80, "page_size": 64, "table": "csr", "tree_kv": "fresh"},
    {"group": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "table": "block", "tree_kv": "logical",
     "options": Options(window_left=20, sinks=True, logits_soft_cap=20.0)},
    {"group": 4, "num_kv_heads": 2, "head_dim": 128, "page_size": 16, "table": "csr", "tree_kv": "fresh",
     "options": Options(kv_dtype=torch.float8_e4m3fn, scales="heads")},
    {"group": 8, "num_kv_heads": 1, "head_dim": 576, "page_size": 64, "table": "block", "tree_kv": "logical",
     "options": Options(head_dim_v=512, shared_kv=True)},
    {"group": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "table": "block", "tree_kv": "slots",
     "options": Options(batch_invariant=True)},
]  # fmt: skip
COVERED = [*GEOMETRIES[:2], GEOMETRIES[2] | {"head_dim": 128}]
"""What the cuda backend does, as the first three."""
NO_CUDA = treeattn.available_backends("cuda")["cuda"]
NAMES = ["page16-logical", "page1-slots", "page64-fresh", "window-sinks-cap", "fp8-fresh", "mla", "batch-invariant"]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_replays_are_right(geometry: dict[str, Any], dtype: torch.dtype) -> None:
    replays_are_right(geometry, dtype, "triton")


@pytest.mark.csrc
@pytest.mark.skipif(torch.cuda.is_available() and NO_CUDA is not None, reason=f"backend 'cuda': {NO_CUDA}")
@pytest.mark.parametrize("geometry", COVERED, ids=["page16-logical", "page1-slots", "page64-fresh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_replays_of_cuda_are_right(geometry: dict[str, Any], dtype: torch.dtype) -> None:
    replays_are_right(geometry, dtype, "cuda")


AUTO = [
    GEOMETRIES[0] | {"head_dim": 256},
    GEOMETRIES[0] | {"options": Options(logits_soft_cap=20.0, sinks=True)},
    GEOMETRIES[5] | {"options": Options(head_dim_v=512, shared_kv=True, logits_soft_cap=20.0)},  # Triton's, at the call
    GEOMETRIES[4],
]


@pytest.mark.csrc
@pytest.mark.parametrize("geometry", AUTO, ids=["d256", "cap-sinks", "mla-cap", "fp8-fresh"])
def test_replays_of_auto_are_right(geometry: dict[str, Any]) -> None:
    replays_are_right(geometry, torch.bfloat16, "auto")


def replays_are_right(geometry: dict[str, Any], dtype: torch.dtype, backend: str) -> None:
    pins = {
        **geometry, "source": "parents", "index_dtype": torch.int32, "kv_layout": "NHD", "cache": "paged",
        "uniform": False, "strided_q": False, "extra_pages": 0, "tail": 0,
    }  # fmt: skip
    like = step_case(MAX_BATCH, dtype, pins)
    graph, eager = (Looped(like, captured, backend) for captured in (True, False))
    seeds = random.Random(0).sample(range(10_000), STEPS)
    graph.run(like)
    before = graph.addresses()
    for index, seed in enumerate(seeds):
        case = step_case(seed, dtype, pins)
        out, lse = graph.run(case)
        plain_out, plain_lse = eager.run(case)
        assert same_bits(out, plain_out), f"step {index}: {case.describe()}"
        assert same_bits(lse, plain_lse), f"step {index}: {case.describe()}"
        if case.sm_scale is None:
            whole = torch.zeros(case.total_q, *out.shape[1:], dtype=out.dtype)
            whole_lse = torch.full((case.total_q, out.shape[1]), float("-inf"))
            whole[: len(out)], whole_lse[: len(lse)] = out, lse
            verdict = judge(case, whole, whole_lse)
            assert verdict.ok, f"step {index}: {verdict.message}\n{case.describe()}"
            called = run_plain(case, backend)
            verdict = judge(case, called.out, called.lse)
            assert verdict.ok, f"plain call, step {index}: {verdict.message}"
    assert graph.addresses() == before
    graph.static.bufs.check()


def test_replays_take_no_memory() -> None:
    pins = {**GEOMETRIES[0], "source": "parents", "index_dtype": torch.int32, "kv_layout": "NHD", "cache": "paged",
            "uniform": False, "strided_q": False, "extra_pages": 0, "tail": 0}  # fmt: skip
    like = step_case(MAX_BATCH, torch.bfloat16, pins)
    captured, eager = Looped(like, captured=True), Looped(like, captured=False)
    captured.run(like)
    eager.step()
    torch.cuda.synchronize()
    assert captured.graph is not None
    memory = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        captured.graph.replay()
        eager.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    assert torch.cuda.memory_allocated() == memory
    assert peak == memory, "an eager step with the caller's out allocated device memory"


def test_a_step_reads_nothing_on_the_host() -> None:
    pins = {**GEOMETRIES[1], "source": "parents", "index_dtype": torch.int32, "kv_layout": "NHD", "cache": "paged",
            "uniform": False, "strided_q": False, "extra_pages": 0, "tail": 0}  # fmt: skip
    like = step_case(MAX_BATCH, torch.bfloat16, pins)
    loop = Looped(like, captured=False)
    loop.run(like)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loop.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_buffers_take_what_nbytes_says(backend: str) -> None:
    import treeattn

    pins = {**GEOMETRIES[0], "source": "parents"}
    like = step_case(MAX_BATCH, torch.bfloat16, pins)
    loop = Looped(like, captured=False, backend=backend)
    properties = torch.cuda.get_device_properties(0)
    geometry = {"num_qo_heads": like.num_qo_heads, "num_kv_heads": like.num_kv_heads, "head_dim": like.head_dim}
    said = treeattn.StaticBuffers.nbytes(
        MAX_BATCH, MAX_WIDTH, MAX_BATCH * MAX_WIDTH, groups=[{**geometry, "dtype": torch.bfloat16, "backend": backend}],
        arch=properties.major * 10 + properties.minor, num_sms=properties.multi_processor_count,
    )  # fmt: skip
    assert said == loop.static.bufs.allocated_bytes
