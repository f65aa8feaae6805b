"""The sweep of `treeattn check`: every option and legal pair occurs, a seed says all, and cases are what was drawn."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from treeattn import api, backends
from treeattn.capabilities import CAPABILITIES, OPTIONS
from treeattn.check import run_check
from treeattn.testing import Case, Options, Placement, build_case, sweep_case
from treeattn.testing.counts import Counts
from treeattn.testing.covering import Axis, covering_rows, legal_pairs
from treeattn.testing.sweep import AXES, DIMS, ILLEGAL, KERNELS, draw, kernels, pairs
from treeattn.testing.trees import T4


@pytest.mark.parametrize("first", [0, 1, 4711, -1000])
@pytest.mark.parametrize("float64", [True, False])
def test_2000_seeds_hold_each_option_100_times_and_each_legal_pair_10_times(first: int, float64: bool) -> None:
    """With and without the cases of a dtype that not every backend has."""
    counts = Counts()
    for seed in range(first, first + 2000):
        drawn = draw(seed)
        if float64 or drawn.dtype != torch.float64:
            counts.add(drawn)
    wanted = [value for axis in AXES for value in axis.values if float64 or value != ("dtype", "float64")]
    assert min(counts.options[value] for value in wanted) >= 100
    legal = [pair for pair in pairs() if float64 or ("dtype", "float64") not in pair]
    assert min(counts.pairs[pair] for pair in legal) >= 10
    assert set(counts.pairs) == set(legal)


def test_legal_pairs_are_all_but_those_with_a_reason() -> None:
    every = [axis.values for axis in AXES]
    count = sum(len(one) * len(other) for one, other in itertools.combinations(every, 2))
    assert len(pairs()) == len(set(pairs())) == count - len(ILLEGAL)
    known = {value for axis in AXES for value in axis.values}
    assert all(pair <= known and len(pair) == 2 and why for pair, why in ILLEGAL.items())


def test_a_seed_says_all() -> None:
    for seed in (0, 17, 100_000, -3):
        assert draw(seed) == draw(seed)
        one, other = sweep_case(seed), sweep_case(draw(seed))
        assert one.describe() == other.describe()
        assert torch.equal(one.q.isnan(), other.q.isnan())
        assert torch.equal(one.q.nan_to_num(), other.q.nan_to_num())
    assert len({draw(seed).kernel for seed in range(5 * KERNELS, 6 * KERNELS)}) == KERNELS
    assert draw(9, torch.float16).dtype == torch.float16
    assert {**draw(9).chosen, "dtype": "float16"} == draw(9, torch.float16).chosen


def geometry_of(case: Case) -> tuple[Any, ...]:
    """What a compiled kernel depends on."""
    fixed = dataclasses.replace(case.placement, stale="zero", poison="nan", extra_pages=0)
    return case.num_qo_heads, case.num_kv_heads, case.head_dim, case.dtype, case.options, case.sm_scale, fixed


def test_cases_of_a_kernel_share_its_geometry_and_no_more() -> None:
    for kernel in (3, 40, 79):
        seeds = [seed for seed in range(6 * KERNELS) if draw(seed).kernel == kernel]
        cases = [sweep_case(seed) for seed in seeds]
        assert len({geometry_of(case) for case in cases}) == 1
        assert len({(case.q_lens, case.prefixes) for case in cases}) > 3


def observed(case: Case) -> dict[str, str]:
    """The options of a case, read from what was built."""
    place, options, args = case.placement, case.options, case.layout_args
    yes = {True: "yes", False: "no"}
    mask = "parents" if case.source == "parents" else case.source
    if case.source in ("full", "tree") and "positions" in args:
        mask = "general"
    return {
        "dtype": str(case.q.dtype)[6:],
        "kv_dtype": {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}.get(case.k_cache.dtype, "same"),
        "scales": "none" if case.k_scale is None else "float" if isinstance(case.k_scale, float)
        else "tensor" if case.k_scale.dim() == 0 else "heads",
        "values": "shared_kv" if case.v_cache is None else "alike" if case.head_dim_v == case.head_dim
        else "head_dim_v",
        "window": "windowed cache" if "kv_start" in case.kv_args else "window" if options.window_left >= 0 else "none",
        "bits": "batch invariant" if options.batch_invariant else "any",
        "soft_cap": "cap" if options.logits_soft_cap else "none",
        "sinks": "none" if case.sinks is None else "sinks in lse" if options.sinks_in_lse else "sinks",
        "part": options.part,
        "nodes": "fresh" if case.k_tree is not None else "tree_slots" if "tree_slots" in case.kv_args else "logical",
        "page": str(case.kv_args["page_size"]),
        "table": "block" if "block_table" in case.kv_args else "csr",
        "index": str(case.kv_args.get("block_table", case.kv_args.get("kv_indices")).dtype)[6:],
        "layout": place.kv_layout,
        "cache": "flat" if case.k_cache.dim() == 3 else place.cache,
        "q": "dense" if case.q.stride(0) == case.q.shape[1] * case.q.shape[2] else "strided",
        "out": place.out,
        "sm_scale": "default" if case.sm_scale is None else "negative" if case.sm_scale < 0 else "given",
        "mask": mask,
        "widths": "uniform" if len(set(case.q_lens)) == 1 else "ragged",
        "padding": yes[any(0 < nodes < width for nodes, width in zip(case.nodes, case.q_lens, strict=True))],
        "empties": yes[any(nodes == 0 < width for nodes, width in zip(case.nodes, case.q_lens, strict=True))],
        "tail": yes[case.total_q > case.starts[-1]],
        "stale": place.stale,
        "poison": place.poison,
    }  # fmt: skip


@pytest.mark.parametrize("scale", ["normal", "small"])
def test_cases_are_what_was_drawn(scale: str) -> None:
    for seed in range(3 * KERNELS):
        case, drawn = sweep_case(seed, scale=scale), draw(seed)
        assert observed(case) == drawn.chosen, f"{case.describe()}"
        assert max(case.nodes) > 0
        assert case.max_q_len >= max(case.q_lens)


def test_every_field_of_options_and_placement_is_swept() -> None:
    """A new option of the test kit is to be entered in the table of the sweep too."""
    cases = [sweep_case(seed, scale="small") for seed in range(2 * KERNELS)]
    for kind, name in ((Options, "options"), (Placement, "placement")):
        for entry in dataclasses.fields(kind):
            values = {getattr(getattr(case, name), entry.name) for case in cases}
            if entry.name != "num_pages":
                assert len(values) > 1, f"{entry.name} is always {values}"
    assert {case.options.kv_dtype for case in cases} == {None, torch.float8_e4m3fn, torch.float8_e5m2}


def test_every_geometry_in_the_lists_occurs() -> None:
    found = Counter((case.head_dim, case.head_dim_v) for case in map(sweep_case, range(KERNELS)))
    for dims in DIMS.values():
        for one in dims:
            assert (one if isinstance(one, tuple) else (one, one)) in found


def test_some_kernels_have_no_option() -> None:
    bare = [row for row in kernels() if row["cache"] and all(
        row[name] in ("same", "none", "alike", "all")
        for name in ("kv_dtype", "scales", "values", "window", "soft_cap", "sinks", "part"))]  # fmt: skip
    assert len(bare) >= 12


def test_covering_rows_hold_every_legal_pair() -> None:
    axes = [Axis(name, dict.fromkeys("abc"[: 2 + place % 2], 1.0)) for place, name in enumerate("pqrs")]
    illegal = {frozenset({("p", "a"), ("q", "b")}): "no"}
    rows = covering_rows(axes, illegal, 14, seed=1, fewest=3)
    found = {frozenset(pair) for row in rows for pair in itertools.combinations(row.items(), 2)}
    assert found == {frozenset(pair) for pair in legal_pairs(axes, illegal)}
    assert all(sum(row[axis.name] == value for row in rows) >= 3 for axis in axes for value in axis.shares)
    with pytest.raises(ValueError, match=r"5 rows leave out \d+ pairs"):
        covering_rows(axes, illegal, 5, seed=1)
    every = {frozenset({("p", one), ("q", other)}): "no" for one in "ab" for other in "abc"}
    with pytest.raises(ValueError, match="no legal row"):
        covering_rows(axes, every, 9, seed=1)


@pytest.mark.parametrize(("backend", "cases"), [("torch", 80), ("reference", 32)])
def test_draws_run(backend: str, cases: int) -> None:
    report = run_check("cpu", [backend], cases=cases, seed=2000, jobs=1)
    assert report.ok, report.failures
    assert report.ran[backend].cases == cases
    assert not report.refused[backend]
    assert report.paths["plain"] == report.paths["static"] > cases


def lacking(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    covers = dataclasses.replace(CAPABILITIES["torch"], options=frozenset(OPTIONS) - set(options))
    monkeypatch.setitem(CAPABILITIES, "torch", covers)


def test_what_a_backend_lacks_is_counted_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, "sinks", "shared_kv")
    report = run_check("cpu", ["torch"], cases=60, dtype=torch.float32)
    assert report.ok, report.failures
    assert set(report.refused["torch"]) == {"it lacks attention sinks", "it lacks V as a part of K: MLA"}
    drawn, ran = report.drawn, report.ran["torch"]
    assert drawn is not None
    assert drawn.cases == 60 == ran.cases + report.refused["torch"].total()
    assert ran.options["sinks", "none"] == ran.cases > 0 == ran.options["values", "shared_kv"]
    assert drawn.options["sinks", "sinks"] > 0


def test_a_backend_and_its_table_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(backends, "refusal", lambda *asked: "backend 'torch' cannot do this: it is tired")
        report = run_check("cpu", ["torch"], case="3")
        assert "refused, though its capability table has all of it: backend 'torch' cannot" in report.failures[0]
    lacking(monkeypatch, *OPTIONS)
    for module in (backends, api):
        monkeypatch.setattr(module, "refusal", lambda *asked: None)
    report = run_check("cpu", ["torch"], cases=20)
    assert not report.ok
    assert all("it ran, though by its capability table it lacks" in line for line in report.failures)


def test_sizes_at_which_a_flipped_bit_is_the_sign() -> None:
    from treeattn.check import flip_mask_bit

    for nodes in (1, 4, 63, 64, 65):
        layout = build_case([[-1, *range(nodes - 1)], T4], [3, 2]).layout()
        before = layout.mask_words.clone()
        flip_mask_bit(layout)
        changed = (layout.mask_words != before).nonzero().tolist()
        assert changed == [[nodes - 1, (nodes - 1) // 64]]
        assert not (layout.mask_words[nodes - 1, -1 if nodes > 64 else 0] >> ((nodes - 1) % 64)) & 1
