"""The benchmark: schema, floors, the gate, summaries. Times mean nothing here."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from bench_rows import fake_row

from treeattn.bench import providers
from treeattn.bench.compare import load_result
from treeattn.bench.gate import gate
from treeattn.bench.inputs import Inputs
from treeattn.bench.report import geomean, shape_key, table
from treeattn.bench.run import run_workloads, save
from treeattn.bench.targets import GQA_TARGETS, MLA_TARGETS
from treeattn.bench.timing import Timing, measure_ceilings
from treeattn.bench.workloads import SETS, Workload, fp8_pays, load_workloads
from treeattn.config import KernelConfig

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
LATENT: dict[str, Any] = {"kv_heads": 1, "head_dim": 80, "head_dim_v": 64, "shared_kv": True}
ASKED_FOR = {
    "kind", "batch", "q_len", "prefix", "qo_heads", "kv_heads", "page_size", "kv_dtype", "provider", "us", "p20", "p80",
    "floor_us", "rel_err",
}  # fmt: skip


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return run_workloads(load_workloads(["small"]), ["treeattn_torch", "sdpa", "fa3_causal"], CPU)


def test_schema(result: dict[str, Any], tmp_path: Path) -> None:
    save(result, tmp_path / "deep" / "r.json")
    read = json.loads((tmp_path / "deep" / "r.json").read_text())
    assert {"gpu", "driver", "torch", "triton", "git_rev", "date"} <= set(read["env"])
    assert read == load_result(tmp_path / "deep" / "r.json")
    for row in read["rows"]:
        assert set(row) >= ASKED_FOR
        assert 0 < row["p20"] <= row["us"] <= row["p80"]
        assert 0 <= row["rel_err"] < 1e-5
    assert [row["provider"] for row in read["rows"]].count("treeattn_torch") == 3
    assert "needs a Hopper GPU" in read["left_out"]["fa3_causal"]


def test_floors_are_those_of_the_targets() -> None:
    work = {(w.batch, w.q_len, w.prefix, w.qo_heads, w.kv_heads): w for w in SETS["gqa"]()}
    assert len(work) == len(GQA_TARGETS) == 27
    for shape, floor in (
        ((1, 17, 2048, 32, 8), 2.0), ((1, 17, 131072, 64, 8), 125.6), ((64, 8, 2048, 8, 1), 16.2),
        ((8, 65, 8192, 8, 1), 22.5), ((1, 257, 8192, 64, 8), 91.2),
    ):  # fmt: skip
        assert round(work[shape].floor_us, 1) == floor
    for target in GQA_TARGETS:
        assert target.must >= target.goal


MLA_FLOORS = (6.2, 12.4, 99.6, 12.5, 25.0, 199.7, 49.7, 99.5, 795.8, 49.9, 99.9, 799.0, 95.8, 191.7, 1533.2)
"""floor_us of the 15 MLA rows of targets.json, in its order."""


def test_mla_floors_are_those_of_the_targets() -> None:
    works = SETS["mla"]()
    assert len(works) == len(MLA_TARGETS) == len(MLA_FLOORS)
    for work, target, floor in zip(works, MLA_TARGETS, MLA_FLOORS, strict=True):
        assert (work.batch, work.q_len, work.prefix, work.qo_heads, work.kv_heads) == target[:5]
        assert work.floor_us == pytest.approx(floor, rel=0.02)
        assert target.chain >= target.goal
    work = works[0]
    assert work.kv_bytes == (16384 + 17) * 576 * 2
    assert work.bytes - work.kv_bytes == 17 * 8 * (576 + 512) * 2


def test_fp8_rows_stand_beside_their_bf16_rows() -> None:
    works = SETS["fp8"]()
    for plain, fp8 in zip(works[::2], works[1::2], strict=True):
        assert dataclasses.replace(fp8, kv_dtype=None) == plain
        assert fp8.kv_dtype == "float8_e4m3fn"
        assert 2 * fp8.kv_bytes == plain.kv_bytes
        assert fp8.bytes - fp8.kv_bytes == plain.bytes - plain.kv_bytes
        assert fp8.flop == plain.flop
    must = [work for work in SETS["gqa"]() if fp8_pays(work.group * work.q_len, work.floor_us)]
    assert len(must) == 7
    assert {work.name().split(" ", 1)[1] for work in must} <= {work.name().split(" ", 1)[1] for work in works}


def test_a_window_bounds_what_a_call_reads() -> None:
    base = Workload("x", 2, 4, 100, 4, 2, 16)
    windowed = dataclasses.replace(base, window_left=10)
    assert base.seen_keys == (104, 104)
    assert windowed.seen_keys == (14, 14)
    assert dataclasses.replace(base, window_left=200) == dataclasses.replace(windowed, window_left=200)
    assert dataclasses.replace(base, window_left=200).kv_bytes == base.kv_bytes
    assert windowed.flop * 104 == base.flop * 14


def test_rows_of_a_window_see_by_depth() -> None:
    inputs = Inputs(Workload("x", 1, 3, 4, 4, 2, 16, dtype="float32", window_left=1), CPU, cold_bytes=0)
    inputs.parents.copy_(torch.tensor([-1, 0, 0]))
    # both children of the root are at position 5: they see the root at 4 and themselves, no key of the prefix
    assert inputs.visible(0).int().tolist() == [[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 0, 1]]
    assert inputs.visible(0, "causal").int().tolist()[2] == [0, 0, 0, 0, 0, 1, 1]


def test_fp8_and_latent_caches_of_the_inputs() -> None:
    inputs = Inputs(Workload("x", 2, 9, 300, 4, 2, 16, kv_dtype="float8_e5m2"), CPU, cold_bytes=2e5)
    assert inputs.pool_k.dtype == inputs.pool_v.dtype == torch.float8_e5m2
    held = inputs.pool_k.float()
    assert bool(torch.isfinite(held).all())
    assert 3.9 < float(held.std()) < 4.1
    assert inputs.k_scale is not None
    assert inputs.k_scale.dtype == torch.float32
    assert inputs.copies * inputs.workload.kv_bytes >= 2e5
    latent = Inputs(Workload("x", 2, 9, 30, 4, 1, 80, head_dim_v=64, shared_kv=True), CPU, cold_bytes=2e5)
    assert latent.copies > 1
    paged = latent.paged(16)
    for k, v in zip(paged.k, paged.v, strict=True):
        assert k.shape[2:] == (1, 80)
        assert v.shape[2:] == (1, 64)
        assert k.data_ptr() == v.data_ptr()
    assert len({k.data_ptr() for k in paged.k}) == latent.copies


def test_trees_and_pages_of_the_inputs() -> None:
    inputs = Inputs(Workload("x", 3, 17, 40, 4, 2, 16, dtype="float32"), CPU, cold_bytes=4e5)
    parents = inputs.parents.reshape(3, 17).tolist()
    for tree in parents:
        assert tree[0] == -1
        assert all(max(0, node - 8) <= parent < node for node, parent in enumerate(tree) if node)
    assert inputs.copies * inputs.workload.kv_bytes >= 4e5
    for page in (1, 16, 128):
        paged = inputs.paged(page)
        used = [paged.table[b, : -(-57 // page)].tolist() for b in range(3)]
        assert len({entry for row in used for entry in row}) == sum(map(len, used))
        assert len(paged.k) == inputs.copies


def _off(inputs: Inputs) -> list[providers.Calls]:
    (calls,) = providers.PROVIDERS["sdpa"](inputs)
    return [providers.Calls([lambda: calls.calls[0]() * 1.01], "tree", None, 0)]


def _blind(inputs: Inputs) -> list[providers.Calls]:
    """A causal chain that claims to take the tree."""
    (calls,) = providers.PROVIDERS["treeattn_torch"](inputs)
    inputs.parents.copy_(torch.arange(-1, inputs.workload.q_len - 1).repeat(inputs.workload.batch))
    (causal,) = providers.PROVIDERS["treeattn_torch"](inputs)
    inputs.parents.zero_()
    inputs.parents[:: inputs.workload.q_len] = -1
    return [providers.Calls(causal.calls, "tree", causal.paged, calls.page_size)]


def _unwritten(inputs: Inputs) -> list[providers.Calls]:
    out = torch.zeros_like(inputs.q)
    return [providers.Calls([lambda: out], "tree", None, 0, out)]


def _broken(inputs: Inputs) -> list[providers.Calls]:
    raise TypeError("run() got an unexpected keyword argument 'mask'")


def _empty(inputs: Inputs) -> list[providers.Calls]:
    return []


def _half(inputs: Inputs) -> list[providers.Calls]:
    """The scale of V applied as if it were twice as large, or of a latent row, of which V is a part."""
    (calls,) = providers.PROVIDERS["treeattn_torch"](inputs)
    scale = inputs.v_scale
    assert scale is not None

    def call() -> torch.Tensor:
        scale.mul_(2)
        out = calls.calls[0]()
        scale.div_(2)
        return out

    return [providers.Calls([call], "tree", calls.paged, calls.page_size)]


@pytest.mark.parametrize("latent", [{}, {"kv_heads": 1, "head_dim_v": 8, "shared_kv": True}])
def test_the_gate_refuses_a_wrong_scale(latent: dict[str, Any]) -> None:
    shape = {"kv_heads": 2, "head_dim": 16, "page_size": 16, "dtype": "float32", "kv_dtype": "float8_e4m3fn"}
    work = [Workload("x", 2, 9, 3, 4, **{**shape, **latent})]
    with mock.patch.dict(providers.PROVIDERS, {"wrong": _half}):
        (failed,) = run_workloads(work, ["wrong"], CPU)["failed"]
    assert "relative error" in failed["error"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (_off, "relative error"), (_blind, "request"), (_unwritten, "out[0, 0, 0] is nan"),
        (_broken, "TypeError: run() got an unexpected keyword argument 'mask'"), (_empty, "does not say why"),
    ],
)  # fmt: skip
def test_a_wrong_provider_costs_nobody_else_a_number(wrong: Any, words: str, tmp_path: Path) -> None:
    small = Workload("x", 2, 9, 3, 4, 2, 16, dtype="float32", page_size=16)
    work = [small, dataclasses.replace(small, prefix=40)]
    with mock.patch.dict(providers.PROVIDERS, {"wrong": wrong}):
        result = run_workloads(work, ["wrong", "treeattn_reference", "sdpa"], CPU)
    assert [(row["provider"], row["prefix"]) for row in result["failed"]] == [("wrong", 3), ("wrong", 40)]
    assert all(words in row["error"] and "us" not in row for row in result["failed"])
    assert [row["provider"] for row in result["rows"]] == ["treeattn_reference", "sdpa"] * 2
    lines = [line for line in table(result["rows"], result["failed"]).splitlines() if "FAILED" in line]
    assert len(lines) == 2
    assert all("wrong" in line and words in line for line in lines)
    save(result, tmp_path / "r.json")
    assert load_result(tmp_path / "r.json") == json.loads(json.dumps(result))


def test_a_run_that_is_cut_short_keeps_its_rows() -> None:
    """What is there after each workload, the last time all of it."""
    seen: list[int] = []
    work = load_workloads(["small"])[:2]
    result = run_workloads(work, ["treeattn_torch"], CPU, keep=lambda result: seen.append(len(result["rows"])))
    assert seen == [1, len(result["rows"])] == [1, 2]


def test_a_lost_device_is_blamed_on_who_lost_it() -> None:
    small = Workload("x", 2, 9, 3, 4, 2, 16, dtype="float32", page_size=16)
    with (
        mock.patch.dict(providers.PROVIDERS, {"wrong": _broken}),
        mock.patch("treeattn.bench.run._device_lost", return_value=True),
    ):
        result = run_workloads([small], ["sdpa", "wrong", "treeattn_torch"], CPU)
    assert [row["provider"] for row in result["rows"]] == ["sdpa"]
    assert [row["provider"] for row in result["failed"]] == ["wrong", "treeattn_torch"]
    assert "wrong on x b2 q9 p3 4/2 d16 left the device unusable" in result["failed"][1]["error"]


def test_what_is_not_for_a_provider_is_said() -> None:
    small = Workload("x", 2, 9, 3, 4, 2, 16, dtype="float32", page_size=16)
    work = [small, dataclasses.replace(small, q_lens=(9, 3)), dataclasses.replace(small, kind="step")]
    result = run_workloads(work, ["sdpa"], CPU)
    assert [row["kind"] for row in result["rows"]] == ["x"]
    reasons = [(row["kind"], row["reason"]) for row in result["skipped"]]
    assert reasons == [
        ("x", "it takes no requests of different lengths"),
        ("step", "the cost of a step is measured for treeattn alone"),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1}, {"kv_layout": "HND"}, {"nodes": 4}, {"q_lens": (9, 1), "prefixes": (0, 30)},
        {"window_left": 3}, {"window_left": 0, "nodes": 4, "kv_layout": "HND"}, {"head_dim_v": 32, "page_size": 1},
        LATENT, {**LATENT, "kv_layout": "HND", "window_left": 12}, {**LATENT, "kv_dtype": "float8_e4m3fn"},
        {"kv_dtype": "float8_e4m3fn"}, {"kv_dtype": "float8_e5m2", "kv_layout": "HND"},
    ],
)
def test_the_gate_reads_every_kind_of_input(options: dict[str, Any]) -> None:
    shape = {"qo_heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "page_size": 16}
    work = Workload("x", 2, 9, 20, **{**shape, **options})
    rows = run_workloads([work], ["treeattn_torch", "treeattn_reference"], CPU)["rows"]
    assert len(rows) == 2
    assert all(row["rel_err"] < 1e-5 for row in rows)


def test_providers_say_what_they_cannot_do() -> None:
    base = Workload("x", 2, 9, 20, 8, dtype="bfloat16")
    latent = dataclasses.replace(base, kv_heads=1, head_dim=576, head_dim_v=512, shared_kv=True)
    fp8 = dataclasses.replace(base, kv_dtype="float8_e4m3fn")
    suits = {
        name: [providers.unsuited(name, work) is None for work in (base, latent, fp8)]
        for name in ("treeattn_triton", "sdpa", "fa3_causal", "flashmla_causal")
    }
    assert suits == {
        "treeattn_triton": [True, True, True],
        "sdpa": [True, False, False],
        "fa3_causal": [True, False, False],
        "flashmla_causal": [False, True, False],
    }
    for odd in ({"nodes": 4}, {"window_left": 8}, {"dtype": "float32"}, {"q_lens": (9, 3)}, {"head_dim_v": 256}):
        assert providers.unsuited("flashmla_causal", dataclasses.replace(latent, **odd))
    small = [dataclasses.replace(work, dtype="float32") for work in (latent, fp8)]
    assert providers.unavailable("sdpa", CPU, small) == providers.unsuited("sdpa", small[0])
    assert providers.unavailable("sdpa", CPU, [base, *small]) is None
    assert "needs a Hopper GPU" in str(providers.unavailable("flashmla_causal", CPU))
    result = run_workloads([Workload("x", 2, 5, 9, 4, dtype="float32", **LATENT)], ["treeattn_torch", "sdpa"], CPU)
    (row,) = result["rows"]
    assert (row["head_dim_v"], row["shared_kv"], row["kv_dtype"]) == (64, True, "float32")
    assert "latent" in result["left_out"]["sdpa"]


def test_a_peer_that_does_not_import_is_named() -> None:
    latent = SETS["mla"]()
    with mock.patch.dict("sys.modules", {"flash_mla": None}):
        reason = providers.unavailable("flashmla_causal", torch.device("cuda"), latent)
    assert "flash_mla does not import" in str(reason)
    modern = mock.Mock(has_legacy=lambda: False)
    with mock.patch.dict("sys.modules", {"flash_mla": modern}):
        assert "no legacy kernels" in str(providers.unavailable("flashmla_causal", torch.device("cuda"), latent))


class FakeFlashMLA:
    """Dense attention behind the call that `flashmla_causal` makes: shapes and keywords as the package has them."""

    @staticmethod
    def get_mla_metadata() -> tuple[str, None]:
        return "meta", None

    @staticmethod
    def flash_mla_with_kvcache(
        q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor, cache_seqlens: torch.Tensor, head_dim_v: int,
        tile_scheduler_metadata: str, num_splits: None = None, softmax_scale: float | None = None,
        causal: bool = False, use_legacy: bool = False,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        assert causal
        assert use_legacy
        assert tile_scheduler_metadata == "meta"
        assert k_cache.shape[1:] == (64, 1, 576)
        assert block_table.dtype == cache_seqlens.dtype == torch.int32
        batch, q_len, heads, _ = q.shape
        out = torch.empty(batch, q_len, heads, head_dim_v, dtype=q.dtype)
        for request, length in enumerate(cache_seqlens.tolist()):
            pages = block_table[request, : -(-length // 64)].long()
            k = k_cache[pages].reshape(-1, 576)[:length].float()
            scores = torch.einsum("ihd,kd->hik", q[request].float(), k) * softmax_scale
            hidden = torch.ones(q_len, length, dtype=torch.bool).triu(length - q_len + 1)
            weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=2)
            out[request] = (weights @ k[:, :head_dim_v]).transpose(0, 1).to(q.dtype)
        return out, None


def test_flashmla_is_called_as_it_wants_and_gated_as_a_chain() -> None:
    work = dataclasses.replace(SETS["mla"]()[0], batch=2, q_len=5, prefix=90)
    with mock.patch.dict("sys.modules", {"flash_mla": FakeFlashMLA}):
        inputs = Inputs(work, CPU, cold_bytes=0)
        (calls,) = providers.PROVIDERS["flashmla_causal"](inputs)
        assert calls.page_size == 64
        assert gate("flashmla_causal", inputs, calls) < 1e-2


@pytest.mark.parametrize("options", [{}, LATENT, {"kv_dtype": "float8_e4m3fn"}])
def test_step_rows(options: dict[str, Any]) -> None:
    work = Workload("step", 2, 5, 9, **{"qo_heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32", **options})
    kinds = [row["kind"] for row in run_workloads([work], ["treeattn_torch"], CPU)["rows"]]
    assert kinds == ["step-update", "step-update-host", "step-call-host"]


def test_ceilings_are_rates() -> None:
    with mock.patch("treeattn.bench.timing.time_calls", return_value=Timing(1000.0, 900.0, 1100.0)):
        found = measure_ceilings(CPU, copy_bytes=10**7, size=64)
    # 2e7 bytes and 2 * 64**3 operations, each in a millisecond
    assert found == {"copy_tb_s": 0.02, "bf16_tflop_s": 0.0005243}
    assert measure_ceilings(CPU, copy_bytes=10**6, size=64)["copy_tb_s"] > 0


def test_summaries() -> None:
    assert geomean([2.0, 8.0]) == pytest.approx(4.0)
    text = table([fake_row("treeattn_triton", 10.6), fake_row("fa3_causal", 6.4)])
    assert "1.656 x fa3_causal in geomean over 1 rows" in text
    assert "1.000 x the best tree peer of each row" in text
    assert "fi_xqa_mask_p64" in text


def test_summaries_of_mla_fp8_and_layers() -> None:
    shape = {"prefix": 16384, "qo_heads": 8, "kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "shared_kv": True}
    latent = {**shape, "kind": "mla", "dtype": "bfloat16"}
    text = table([fake_row("treeattn_triton", 14.4, **latent), fake_row("flashmla_causal", 28.8, **latent)])
    assert "mla treeattn_triton: 0.500 x flashmla_causal in geomean over 1 rows" in text
    assert "17.2   15.3" in text
    assert "d576/512" in text
    rows = []
    for q_len, plain, fp8, floor in ((17, 20.0, 12.0, 16.0), (65, 50.0, 60.0, 90.0), (16, 4.0, 4.0, 2.0)):
        both = {"kind": "fp8", "dtype": "bfloat16", "q_len": q_len}
        rows.append(fake_row("treeattn_triton", plain, floor_us=floor, **both))
        rows.append(fake_row("treeattn_triton", fp8, floor_us=floor / 2, **{**both, "kv_dtype": "float8_e4m3fn"}))
    text = table(rows)
    few = "fp8 treeattn_triton: e4m3 0.600 x bfloat16 in geomean over 1 rows with R <= 72 and a floor above 15 us"
    assert few in text
    assert "x bfloat16 in geomean over 3 rows in all, worst 1.200" in text
    text = table([fake_row("treeattn_triton", 100.0, **{**latent, "kind": "kimi", "layers": 61})])
    assert "ms a step of 61 layers at (batch, q_len, prefix): (1, 17, 16384) 6.10" in text


def test_rows_of_earlier_results_compare_with_rows_of_now() -> None:
    before = fake_row("p", 10.0)
    assert shape_key(before) == shape_key({**before, "dtype": "bfloat16"})
    for more in ({"head_dim_v": 64}, {"window_left": 8}, {"shared_kv": True}, {"kv_dtype": "float8_e4m3fn"}):
        assert shape_key(before) != shape_key({**before, "dtype": "bfloat16", **more})


def test_tuning_configurations_fit_the_geometry() -> None:
    spec = importlib.util.spec_from_file_location("tune", ROOT / "benchmarks/tune.py")
    assert spec is not None
    assert spec.loader is not None
    tune = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tune)
    for work, block_d in (
        (SETS["gqa"]()[0], 128),
        (SETS["mla"]()[0], 512 + 64),
        (dataclasses.replace(SETS["mla"]()[0], kv_dtype="float8_e4m3fn"), 512 + 64),
        (Workload("x", 1, 9, 9, head_dim=80, head_dim_v=112), 128),
    ):
        config = tune.parse_config("64n32w8s2p1m4x168", work)
        wanted = KernelConfig(64, 32, block_d, 8, 2, 1, 4, "tuning", 168)
        assert config == wanted
        assert tune.parse_config("64n32w8s2p1", work) == dataclasses.replace(wanted, min_share=2, max_registers=0)
        assert tune.backend_of("64n32w8s2p1") == "triton"
    for name, consumers in (("c1", 1), ("c2", 2), ("c3", 3)):
        config = tune.parse_config(name, SETS["ragged"]()[0])
        assert (config.block_m, tune.backend_of(name)) == (64 * consumers, "cuda")
    for name, works in ((name, SETS[name]()) for name in SETS):
        for work in works:
            small = tune.small(work)
            assert (small.group, small.dim_v, small.cache_dtype) == (work.group, work.dim_v, work.cache_dtype), name
            assert len(small.all_q_lens) == len(small.all_prefixes) == 1
            assert hash(small) == hash(tune.small(dataclasses.replace(work, kind="other")))
