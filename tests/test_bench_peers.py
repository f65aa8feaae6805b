"""The benchmark's peers: how each library is called, what each is not for, and what its absence says."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import bench_fakes
import pytest
import torch

from treeattn.bench import providers
from treeattn.bench.gate import GateError, gate
from treeattn.bench.inputs import Inputs
from treeattn.bench.peers import PEERS, fa3, flashinfer_xqa, sglang, vllm
from treeattn.bench.peers.merge import merge_states
from treeattn.bench.run import run_workloads
from treeattn.bench.workloads import SETS, Workload

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BASE = Workload("x", 2, 9, 70, 4, 2, 16, page_size=16)
RAGGED = dataclasses.replace(BASE, batch=3, prefixes=(70, 3, 130), q_lens=(9, 1, 5))
LATENT = dataclasses.replace(BASE, qo_heads=4, kv_heads=1, head_dim=80, head_dim_v=64, shared_kv=True)
FP8 = dataclasses.replace(BASE, kv_dtype="float8_e4m3fn")
WINDOW = dataclasses.replace(BASE, window_left=5)
PADDED = dataclasses.replace(BASE, nodes=4)
ONE = dataclasses.replace(BASE, batch=1)

MODULES: dict[str, tuple[str, Any]] = {
    "fa3_cascade": ("flash_attn_interface", bench_fakes.flash_attn_interface),
    "flashinfer_custom_mask": ("flashinfer", bench_fakes.flashinfer),
    "flashinfer_xqa": ("flashinfer.xqa", bench_fakes.flashinfer_xqa),
    "sglang_extend": (sglang.MODULES[0], bench_fakes.sglang_extend),
    "vllm_qq_bias": (vllm.MODULES[0], bench_fakes.vllm_unified),
}


def _fake(name: str) -> dict[str, Any]:
    """Entries of `sys.modules` for a peer's library, its parent packages included."""
    path, build = MODULES[name]
    parts = path.split(".")
    parents = {".".join(parts[:count]): mock.MagicMock() for count in range(1, len(parts))}
    return {**parents, path: build()}


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("fa3_cascade", BASE), ("fa3_cascade", RAGGED), ("fa3_cascade", dataclasses.replace(BASE, dtype="float16")),
        ("flashinfer_custom_mask", BASE), ("flashinfer_custom_mask", RAGGED), ("flashinfer_custom_mask", FP8),
        ("flashinfer_custom_mask", WINDOW),
        ("flashinfer_custom_mask", dataclasses.replace(RAGGED, kv_layout="HND", page_size=1)),
        ("flashinfer_xqa", BASE), ("flashinfer_xqa", RAGGED),
        ("flashinfer_xqa", dataclasses.replace(BASE, q_len=37, kv_layout="HND", page_size=64)),
        ("flashinfer_xqa", dataclasses.replace(BASE, q_len=1, dtype="float16")),
        ("sglang_extend", BASE), ("sglang_extend", RAGGED), ("sglang_extend", LATENT),
        ("sglang_extend", dataclasses.replace(BASE, prefix=0, dtype="float32")),
        ("vllm_qq_bias", ONE), ("vllm_qq_bias", dataclasses.replace(ONE, q_len=1, page_size=64)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name().replace(" ", "-"),
)  # fmt: skip
def test_a_peer_calls_its_library_rightly(name: str, work: Workload) -> None:
    assert providers.unsuited(name, work) is None
    with bench_fakes.modules(_fake(name)):
        assert PEERS[name].missing() is None
        inputs = Inputs(work, CPU, cold_bytes=2 * work.kv_bytes)
        assert inputs.copies == 2
        variants = PEERS[name].variants(inputs)
        for calls in variants:
            assert gate(name, inputs, calls) < 1e-2
            # the second copy has other K and V: a call that read the first again would give the same
            first, second = (call().clone() for call in calls.calls)
            assert not torch.equal(first, second)
    pages = {"fa3_cascade": [64, 128], "sglang_extend": [1]}.get(name, [work.page_size])
    assert [calls.page_size for calls in variants] == pages


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_on_a_cpu() -> None:
    for work in (dataclasses.replace(BASE, dtype="float32"), dataclasses.replace(WINDOW, dtype="float32")):
        inputs = Inputs(work, CPU, cold_bytes=0)
        (calls,) = PEERS["flex_attention"].variants(inputs)
        assert gate("flex_attention", inputs, calls) < 1e-5


def test_the_cascade_makes_two_passes() -> None:
    fake = bench_fakes.flash_attn_interface()
    with bench_fakes.modules({"flash_attn_interface": fake}):
        PEERS["fa3_cascade"].variants(Inputs(BASE, CPU, cold_bytes=0))[0].calls[0]()
    assert fake.calls == ["page 64, 2 requests", "page 1, 18 requests"]


def test_a_cascade_without_its_tree_fails_the_gate() -> None:
    inputs = Inputs(BASE, CPU, cold_bytes=0)
    with (
        bench_fakes.modules(_fake("fa3_cascade")),
        mock.patch.object(fa3, "merge_states", lambda out_a, lse_a, out_b, lse_b, out: out.copy_(out_a)),
    ):
        calls = PEERS["fa3_cascade"].variants(inputs)[0]
        with pytest.raises(GateError, match="relative error"):
            gate("fa3_cascade", inputs, calls)


def test_slots_of_the_ancestors() -> None:
    inputs = Inputs(Workload("x", 2, 4, 62, 4, 2, 16), CPU, cold_bytes=0)
    inputs.parents.copy_(torch.tensor([-1, 0, 0, 2, -1, 0, 1, 1]))
    paged = inputs.paged(64)
    slots, counts = fa3.ancestor_slots(inputs, paged)
    assert counts.tolist() == [1, 2, 2, 3, 1, 2, 3, 3]
    # nodes 0 and 1 end the first page of their request, 2 and 3 begin the second
    (a, b), (c, d) = (paged.table[request, :2].tolist() for request in range(2))
    assert slots.tolist() == [
        [a * 64 + 62, 0, 0], [a * 64 + 62, a * 64 + 63, 0], [a * 64 + 62, b * 64, 0],
        [a * 64 + 62, b * 64, b * 64 + 1], [c * 64 + 62, 0, 0], [c * 64 + 62, c * 64 + 63, 0],
        [c * 64 + 62, c * 64 + 63, d * 64], [c * 64 + 62, c * 64 + 63, d * 64 + 1],
    ]  # fmt: skip


def test_rows_of_a_draft_mask() -> None:
    inputs = Inputs(Workload("x", 1, 4, 5, 4, 2, 16), CPU, cold_bytes=0)
    inputs.parents.copy_(torch.tensor([-1, 0, 0, 2]))
    assert flashinfer_xqa.packed_rows(inputs.tree_rows(0), 4).tolist() == [[1, 0], [3, 0], [5, 0], [13, 0]]
    last = torch.zeros(1, 33, dtype=torch.bool)
    last[0, [15, 32]] = True
    assert flashinfer_xqa.packed_rows(last, 33).tolist() == [[2**15, 0, 1, 0]]


def test_merging_takes_states_without_keys() -> None:
    out_a, out_b = torch.full((2, 3, 4), 2.0), torch.full((2, 3, 4), torch.nan)
    lse_a, lse_b = torch.zeros(3, 2).T, torch.full((2, 3), -torch.inf)
    out = merge_states(out_a, lse_a, out_b, lse_b, torch.empty(2, 3, 4))
    assert bool((out == 2).all())


def test_what_peers_are_not_for() -> None:
    reasons = {
        name: [peer.unsuited(work) is None for work in (BASE, RAGGED, LATENT, FP8, WINDOW, PADDED, ONE)]
        for name, peer in PEERS.items()
    }
    assert reasons == {
        "fa3_cascade": [True, True, False, False, False, False, True],
        "flashinfer_custom_mask": [True, True, False, True, True, False, True],
        "flashinfer_xqa": [True, True, False, False, False, False, True],
        "sglang_extend": [True, True, True, False, False, False, True],
        "flex_attention": [True, False, False, False, True, False, True],
        "vllm_qq_bias": [False, False, False, False, False, False, True],
    }
    for odd in ({"kv_layout": "HND"}, {"page_size": 1}, {"dtype": "float32"}):
        assert PEERS["vllm_qq_bias"].unsuited(dataclasses.replace(ONE, **odd))
    assert PEERS["flashinfer_xqa"].unsuited(dataclasses.replace(BASE, page_size=1))
    for name in ("fa3_cascade", "flashinfer_custom_mask", "flashinfer_xqa"):
        assert PEERS[name].unsuited(dataclasses.replace(BASE, dtype="float32"))
    assert "measured for treeattn alone" in str(providers.unsuited("fa3_cascade", SETS["step"]()[0]))


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_peer_that_is_not_there_says_so(name: str) -> None:
    path = "flashinfer" if name == "flashinfer_xqa" else MODULES[name][0]
    assert "GPU" in str(providers.unavailable(name, CPU))
    nothing = dict.fromkeys((path, *sglang.MODULES, *vllm.MODULES, path.split(".")[0]))
    with bench_fakes.modules(nothing):
        assert f"{path} does not import" in str(providers.unavailable(name, CUDA, [ONE]))
    broken = mock.MagicMock(side_effect=OSError("libcudart.so.13: cannot open shared object file"))
    with mock.patch("importlib.import_module", broken):
        assert "libcudart.so.13" in str(providers.unavailable(name, CUDA, [ONE]))


def test_older_places_of_a_library_are_found() -> None:
    fake = bench_fakes.sglang_extend()
    parts = sglang.MODULES[1].split(".")
    parents = {".".join(parts[:count]): mock.MagicMock() for count in range(1, len(parts))}
    with bench_fakes.modules({**parents, sglang.MODULES[0]: None, sglang.MODULES[1]: fake}):
        assert sglang.missing() is None
        inputs = Inputs(BASE, CPU, cold_bytes=0)
        assert gate("sglang_extend", inputs, sglang.variants(inputs)[0]) < 1e-2


def test_who_runs_unasked() -> None:
    assert providers.usual_providers(CPU) == ["treeattn_torch", "sdpa"]
    assert providers.usual_providers(CUDA) == [
        "treeattn_triton", "treeattn_cuda", "fa3_causal", "flashmla_causal", "fa3_cascade", "flashinfer_custom_mask",
        "flashinfer_xqa", "sglang_extend", "sdpa",
    ]  # fmt: skip


def test_a_backend_that_is_not_there_is_left_out() -> None:
    result = run_workloads([dataclasses.replace(BASE, dtype="float32")], ["treeattn_torch", "treeattn_cuda"], CPU)
    assert [row["provider"] for row in result["rows"]] == ["treeattn_torch"]
    assert result["left_out"]["treeattn_cuda"]
