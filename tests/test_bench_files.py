"""Workloads from files, comparisons of results, and the further targets in a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_fakes
import pytest
from bench_rows import fake_row

from treeattn.bench.compare import Comparison, compare_results, load_result
from treeattn.bench.own import read_workloads
from treeattn.bench.report import page_asked, table
from treeattn.bench.workloads import SETS, Workload, load_workloads
from treeattn.cli import main

LEAST = {"batch": 2, "q_len": 9, "prefix": 5}
ENV = {"gpu": "a", "driver": "1", "torch": "1", "triton": "1", "git_rev": "x"}


def test_own_workloads(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text('[{"batch": 2, "q_len": 9, "prefix": 5, "q_lens": [9, 3]}]')
    (work,) = load_workloads([], path, dtype="float16")
    assert (work.kind, work.q_lens, work.total_q, work.dtype) == ("own", (9, 3), 12, "float16")
    path.write_text('[{"batch": 2, "kv_dtype": "float8_e4m3fn", "shared_kv": true, "q_len": 9, "prefix": 5}]')
    (work,) = load_workloads([], path)
    assert (work.cache_dtype, work.shared_kv) == ("float8_e4m3fn", True)
    assert [one.kind for one in load_workloads(["step"], path)] == ["step", "step", "step", "own"]
    with pytest.raises(ValueError, match="no workload set 'big'"):
        load_workloads(["big"])
    with pytest.raises(ValueError, match="page_size must divide 128, got 48"):
        load_workloads(["gqa"], page_size=48)


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        '[[workload]]\nkind = "mine"\nprefixes = [10, 31]\nq_lens = [9, 4]\n\n'
        "[[workload]]\nbatch = 1\nq_len = 3\nprefix = 7\n"
    )
    entries = [{"kind": "mine", "prefixes": [10, 31], "q_lens": [9, 4]}, {"batch": 1, "q_len": 3, "prefix": 7}]
    (tmp_path / "own.json").write_text(json.dumps({"workload": entries}))
    works = read_workloads(tmp_path / "own.toml")
    assert works == read_workloads(tmp_path / "own.json")
    assert works[0] == Workload("mine", 2, 9, 20, prefixes=(10, 31), q_lens=(9, 4))
    with (
        bench_fakes.modules({"tomllib": None, "tomli": None}),
        pytest.raises(NotImplementedError, match=r"Python 3\.11 or the package tomli"),
    ):
        read_workloads(tmp_path / "own.toml")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 9}, "entry 1: no field width; there are kind, batch"),
        ({"qo_head": 9}, "entry 1: no field qo_head; did you mean qo_heads?"),
        ({"batch": 0}, "entry 1: batch is 0, must be an int of 1 or more"),
        ({"batch": True}, "entry 1: batch is true, must be an int"),
        ({"batch": [1, 2]}, r"entry 1: batch is \[1, 2\], must be an int"),
        ({"prefix": -1}, "entry 1: prefix is -1, must be an int of 0 or more"),
        ({"prefix": 4.5}, "entry 1: prefix is 4.5, must be an int"),
        ({"q_lens": [9]}, "entry 1: batch is 2, but q_lens says 1"),
        ({"q_lens": [9, 0]}, "entry 1: q_lens is .*, must be a list of ints of 1 or more"),
        ({"q_lens": []}, "entry 1: q_lens is .*, must be a list"),
        ({"q_lens": [3, 4]}, "entry 1: q_len is 9, but q_lens says 4"),
        ({"prefixes": [3, 4]}, "entry 1: prefix is 5, but prefixes says 3"),
        ({"qo_heads": 9}, "entry 1: qo_heads is 9, must be a multiple of kv_heads, 8"),
        ({"page_size": 48}, "entry 1: page_size is 48, must divide 128"),
        ({"nodes": 10}, "entry 1: nodes is 10, more than q_len, 9"),
        ({"shared_kv": True, "head_dim_v": 256}, "entry 1: head_dim_v is 256, more than head_dim, 128"),
        ({"shared_kv": 1}, "entry 1: shared_kv is 1, must be one of true, false"),
        ({"dtype": "float8_e4m3fn"}, "entry 1: dtype is .*, must be one of \"bfloat16\""),
        ({"kv_dtype": "fp8"}, "entry 1: kv_dtype is \"fp8\", must be one of"),
        ({"kv_layout": "NDH"}, "entry 1: kv_layout is \"NDH\", must be one of"),
        ({"window_left": True}, "entry 1: window_left is true"),
        ({"window_left": -2}, "entry 1: window_left is -2, must be an int of -1 or more"),
        ({"kind": ""}, "entry 1: kind is \"\", must be a word"),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps([LEAST, {**LEAST, **fields}]))
    with pytest.raises(ValueError, match=message):
        read_workloads(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[{", "a.json is not JSON: .* line 1"),
        ("a.toml", "= 3", "a.toml is not TOML: .* line 1"),
        ("a.json", "[]", r"expected a list of workloads with at least one, got \[\]"),
        ("a.json", "3", "expected a list of workloads with at least one, got 3"),
        ("a.json", '{"rows": []}', "expected one key, workload, got rows"),
        ("a.toml", "batch = 3", "expected one key, workload, got batch"),
        ("a.json", "[3]", "entry 0: expected an object of fields, got 3"),
        ("a.json", '[{"q_len": 3}]', "entry 0: no batch, no prefix"),
    ],
)
def test_a_wrong_file_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_workloads(tmp_path / name)
    assert main(["bench", "--file", str(tmp_path / name)]) == 2


def test_the_further_sets_are_those_of_the_targets() -> None:
    ragged = {work.kind: work for work in SETS["ragged"]() if work.qo_heads == 32}
    assert set(ragged) == {"ragged", "ragged-uniform", "mixed", "mixed-uniform"}
    for kind in ("ragged", "mixed"):
        work, uniform = ragged[kind], ragged[f"{kind}-uniform"]
        assert work.batch == uniform.batch == len(work.all_prefixes) == 32
        assert min(work.all_prefixes) >= 512
        assert max(work.all_prefixes) <= 65536
        assert uniform.prefixes is uniform.q_lens is None
        assert work.kv_bytes == pytest.approx(uniform.kv_bytes, rel=1e-3)
        assert work.flop == pytest.approx(uniform.flop, rel=0.15)
    assert set(ragged["ragged"].all_q_lens) == {17}
    assert len(set(ragged["mixed"].all_q_lens)) > 10
    assert 1 <= min(ragged["mixed"].all_q_lens) < max(ragged["mixed"].all_q_lens) <= 65
    pages = {(work.page_size, work.kv_layout) for work in SETS["pages"]()}
    assert pages >= {(1, "NHD"), (16, "NHD"), (64, "NHD"), (128, "NHD"), (64, "HND")}
    shapes = [work for work in SETS["shapes"]() if work.kind == "shapes"]
    assert {work.q_len for work in shapes} >= {1, 4, 33, 129}
    assert {work.group for work in shapes} >= {5, 6, 12}
    assert {work.head_dim for work in shapes} >= {64, 256}
    padded, real = (next(w for w in SETS["shapes"]() if w.kind == kind) for kind in ("padded", "padded-real"))
    assert (padded.q_len, padded.nodes) == (2 * real.q_len, real.q_len)
    assert (padded.bytes, padded.flop) == (real.bytes, real.flop)


def test_the_report_has_the_further_targets() -> None:
    rows = [
        fake_row("treeattn_triton", us, kind="pages", page_size=page, page_size_asked=page, kv_layout=layout)
        for page, layout, us in ((64, "NHD", 10.0), (1, "NHD", 11.0), (128, "NHD", 9.0), (64, "HND", 10.4))
    ]
    text = table(rows)
    assert "page 1 NHD 1.100 x page 64 NHD in geomean over 1 rows, worst 1.100 (target 1.12)" in text
    assert "page 128 NHD 0.900 x page 64 NHD" in text
    assert "page 64 HND 1.040 x page 64 NHD in geomean over 1 rows, worst 1.040 (target 1.05)" in text
    ragged = fake_row("p", 12.0, kind="ragged", prefixes=[1, 2], floor_us=2.2)
    text = table([ragged, fake_row("p", 10.0, kind="ragged-uniform")])
    assert "ragged p: (1, 17, 2048, 32/8) 1.091 x ragged-uniform (target 1.15)" in text
    padded = fake_row("p", 11.0, kind="padded", q_len=34, nodes=17)
    assert "1.100 x padded-real" in table([padded, fake_row("p", 10.0, kind="padded-real")])
    text = table([fake_row("treeattn_triton", 10.0), fake_row("fa3_cascade", 20.0), fake_row("sglang_extend", 90.0)])
    assert "0.500 x the best tree peer of this run in geomean over 1 rows, worst 0.50 against fa3_cascade" in text


def _result(*rows: dict[str, Any], failed: tuple[dict[str, Any], ...] = (), **env: str) -> dict[str, Any]:
    return {"env": {**ENV, **env}, "rows": list(rows), "failed": list(failed)}


def test_comparison() -> None:
    a = _result(fake_row("p", 10.0), fake_row("p", 5.0, q_len=9), fake_row("r", 8.0))
    b = _result(fake_row("p", 12.0), fake_row("p", 5.05, q_len=9), fake_row("r", 4.0), git_rev="y")
    found = compare_results(a, b)
    assert "git_rev: x -> y" in found.text
    assert "torch" not in found.text
    assert "10.00 ->     12.00  x1.200  SLOWER" in found.text
    assert "x1.010  within the spread" in found.text
    assert "x0.500  faster" in found.text
    assert "geomean of 2 rows of p: x1.101" in found.text
    assert "geomean of 1 rows of r: x0.500" in found.text
    assert "geomean of 3 rows: x0.846" in found.text
    assert (found.matched, found.worst, found.broken) == (3, pytest.approx(1.2), 0)
    assert compare_results(b, b) == Comparison(compare_results(b, b).text, 3, 1.0, 0)


@pytest.mark.parametrize(
    ("spread_a", "spread_b", "changed"),
    [
        ((9.9, 10.1), (10.9, 11.1), True),
        # ranges that overlap, each median outside the other's
        ((9.5, 10.6), (10.4, 11.5), True),
        # the median of B inside A's range, or that of A inside B's
        ((9.0, 11.0), (10.9, 11.1), False),
        ((9.9, 10.1), (9.9, 12.0), False),
    ],
)
def test_a_change_is_outside_of_both_spreads(
    spread_a: tuple[float, float], spread_b: tuple[float, float], changed: bool
) -> None:
    a = fake_row("p", 10.0, p20=spread_a[0], p80=spread_a[1])
    b = fake_row("p", 11.0, p20=spread_b[0], p80=spread_b[1])
    assert compare_results(_result(a), _result(b)).worst == (pytest.approx(1.1) if changed else 1.0)
    assert ("faster" in compare_results(_result(b), _result(a)).text) == changed


def test_rows_match_by_what_the_workload_asked() -> None:
    ours, theirs = fake_row("treeattn_triton", 10.0), fake_row("fa3_causal", 10.0, page_size_asked=64)
    assert page_asked(ours) == page_asked(theirs) == (64, "NHD")
    # the peer took another page this time: the workload is the same
    assert compare_results(_result(theirs), _result({**theirs, "page_size": 128})).matched == 1
    assert compare_results(_result(fake_row("fa3_causal", 9.0, page_size=128)), _result(theirs)).matched == 1
    for other in ({"page_size": 16}, {"kv_layout": "HND"}, {"nodes": 3}, {"kind": "x"}, {"dtype": "float16"}):
        found = compare_results(_result(ours), _result({**ours, **other}))
        assert found.matched == 0, other
        assert found.text.count("only in A") == found.text.count("only in B") == 1
    found = compare_results(_result(ours, {**ours, "us": 7.0, "p20": 7.0, "p80": 7.0}), _result(ours))
    assert "twice in A, the faster counts" in found.text
    assert found.worst == pytest.approx(10 / 7)


def test_what_failed_is_compared_too() -> None:
    row = fake_row("p", 10.0)
    bad = {key: value for key, value in row.items() if key not in ("us", "p20", "p80", "floor_us")}
    bad["error"] = "relative error 0.3"
    found = compare_results(_result(row), _result(failed=(bad,)))
    assert found.broken == 1
    assert "FAILED in B" in found.text
    assert "relative error 0.3" in found.text
    assert "only in A" not in found.text
    found = compare_results(_result(failed=(bad,)), _result(row))
    assert found.broken == 0
    assert "failed in A, in B 10.00" in found.text


def test_compare_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(name: str, result: dict[str, Any]) -> str:
        (tmp_path / name).write_text(json.dumps(result))
        return str(tmp_path / name)

    row = fake_row("p", 10.0)
    bad = {key: value for key, value in row.items() if key not in ("us", "p20", "p80", "floor_us")}
    a, slow = write("a.json", _result(row)), write("b.json", _result(fake_row("p", 10.8)))
    broken = write("c.json", _result(failed=({**bad, "error": "nan"},)))
    other = write("d.json", _result(fake_row("q", 10.0)))

    def status(*words: str) -> int:
        return main(["bench", "compare", *words])

    assert status(a, slow) == 0
    assert status(a, slow, "--tolerance", "0.1") == 0
    assert status(a, slow, "--tolerance", "0.05") == 1
    assert "the worst row is x1.080, more than x1.050" in capsys.readouterr().out
    assert status(slow, a, "--tolerance", "0") == 0
    assert status(a, broken) == 0
    assert status(a, broken, "--tolerance", "9") == 1
    assert "1 row(s) failed in" in capsys.readouterr().out
    assert status(a, other) == 2
    assert "no row of the same workload and provider" in capsys.readouterr().err
    for words in ((a,), (a, slow, "--tolerance", "-1"), (a, slow, "--tolerance", "nan")):
        with pytest.raises(SystemExit) as stop:
            status(*words)
        assert stop.value.code == 2
    assert status(a, str(tmp_path / "none.json")) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1", "is not JSON"),
        ("[]", "it has no env and rows"),
        ('{"env": {}, "rows": [{"kind": "gqa"}]}', r"rows\[0\] has no batch, q_len"),
        ('{"env": {}, "rows": [3]}', r"rows\[0\] has no kind"),
        (json.dumps(_result(fake_row("p", 0.0))), r"rows\[0\] took 0.0 us"),
        (json.dumps(_result({**fake_row("p", 1.0), "p20": None})), r"rows\[0\] has a time that is no number"),
        (json.dumps(_result(failed=({"kind": "gqa"},))), r"failed\[0\] has no batch"),
    ],
)
def test_what_is_no_result_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_result(tmp_path / "r.json")


def test_committed_results_are_results() -> None:
    root = Path(__file__).resolve().parent.parent
    files = sorted((root / "benchmarks/results").glob("h200-*.json"))
    assert files
    for file in files:
        result = load_result(file)
        found = compare_results(result, result)
        assert found.matched == len(result["rows"])
        assert "only in" not in found.text
