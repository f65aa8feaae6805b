"""The benchmark: schema, floors, the gate, summaries. Times mean nothing here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from treeattn.bench import providers
from treeattn.bench.compare import compare_results, load_result
from treeattn.bench.gate import GateError
from treeattn.bench.inputs import Inputs
from treeattn.bench.report import geomean, table
from treeattn.bench.run import run_workloads, save
from treeattn.bench.targets import GQA_TARGETS
from treeattn.bench.workloads import SETS, Workload, load_workloads

CPU = torch.device("cpu")
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


@pytest.mark.parametrize(
    ("wrong", "words"), [(_off, "relative error"), (_blind, "request"), (_unwritten, r"out\[0, 0, 0\] is nan")]
)
def test_the_gate_refuses_a_wrong_provider(wrong: Any, words: str) -> None:
    work = [Workload("x", 2, 9, 3, 4, 2, 16, dtype="float32", page_size=16)]
    with mock.patch.dict(providers.PROVIDERS, {"wrong": wrong}), pytest.raises(GateError, match=words):
        run_workloads(work, ["wrong"], CPU)


@pytest.mark.parametrize(
    "options", [{"page_size": 1}, {"kv_layout": "HND"}, {"nodes": 4}, {"q_lens": (9, 1), "prefixes": (0, 30)}]
)
def test_the_gate_reads_every_kind_of_input(options: dict[str, Any]) -> None:
    work = Workload("x", 2, 9, 20, 4, 2, 16, dtype="float32", **{"page_size": 16, **options})
    rows = run_workloads([work], ["treeattn_torch", "treeattn_reference"], CPU)["rows"]
    assert len(rows) == 2
    assert all(row["rel_err"] < 1e-5 for row in rows)


def test_step_rows() -> None:
    work = Workload("step", 2, 5, 9, 4, 2, 16, dtype="float32")
    kinds = [row["kind"] for row in run_workloads([work], ["treeattn_torch"], CPU)["rows"]]
    assert kinds == ["step-update", "step-update-host", "step-call-host"]


def test_own_workloads(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text('[{"batch": 2, "q_len": 9, "prefix": 5, "q_lens": [9, 3]}]')
    (work,) = load_workloads([], path, dtype="float16")
    assert (work.kind, work.q_lens, work.total_q, work.dtype) == ("own", (9, 3), 12, "float16")
    path.write_text('[{"batch": 2, "width": 9}]')
    with pytest.raises(ValueError, match="entry 0: no field width"):
        load_workloads([], path)
    with pytest.raises(ValueError, match="no workload set 'big'"):
        load_workloads(["big"])


def fake_row(provider: str, us: float, **changes: Any) -> dict[str, Any]:
    row = {
        "kind": "gqa", "batch": 1, "q_len": 17, "prefix": 2048, "qo_heads": 32, "kv_heads": 8, "head_dim": 128,
        "page_size": 64, "kv_layout": "NHD", "kv_dtype": "bfloat16", "provider": provider, "us": us, "p20": us - 0.1,
        "p80": us + 0.1, "floor_us": 2.0, "rel_err": 1e-3, "bytes": 8560000, "flop": 1,
    }  # fmt: skip
    return {**row, **changes}


def test_summaries() -> None:
    assert geomean([2.0, 8.0]) == pytest.approx(4.0)
    text = table([fake_row("treeattn_triton", 10.6), fake_row("fa3_causal", 6.4)])
    assert "1.656 x fa3_causal in geomean over 1 rows" in text
    assert "1.000 x the best tree peer of each row" in text
    assert "fi_xqa_mask_p64" in text


def test_comparison() -> None:
    env = {"gpu": "a", "torch": "1", "triton": "1", "git_rev": "x"}
    old = {"env": env, "rows": [fake_row("p", 10.0), fake_row("p", 5.0, q_len=9)]}
    new = {"env": {**env, "git_rev": "y"}, "rows": [fake_row("p", 12.0), fake_row("p", 5.05, q_len=9)]}
    text, worst = compare_results(old, new)
    assert "git_rev: x -> y" in text
    assert "x1.200  slower" in text
    assert "x1.010  within the spread" in text
    assert worst == pytest.approx(1.2)
