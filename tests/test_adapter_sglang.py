"""The parts of the SGLang adapter that need no SGLang: widths, forms, steps, the report, and that it is never imported.

What needs the real package is in tests/adapters/sglang.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import treeattn
from treeattn import PagedKV
from treeattn.adapters.sglang import hooks, plugin
from treeattn.adapters.sglang.extend_call import ExtendCall, GroupKey, attend, geometry_refusal, group_key
from treeattn.adapters.sglang.verify import VerifyStep, VerifySteps, count_requests, mask_form, verify_width

KEY = GroupKey(4, 2, 16, 16, torch.float32, torch.float32, False, -1)


def spec(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


@pytest.mark.parametrize(
    ("spec_info", "resolved", "fork", "width"),
    [
        (spec(num_tokens_per_req=17, draft_token_num=8), 8, None, 17),
        (spec(num_tokens_per_req=-1, draft_token_num=17), 8, None, 17),
        (spec(num_tokens_per_req=0), 8, spec(ddtree_budget=16), 8),
        (None, 8, None, 8),
        (spec(), None, spec(speculative_ddtree_budget=16), 17),
        (spec(tree_budget=0), 0, spec(speculative_ddtree_budget=16), 1),
    ],
)
def test_width_by_rank(spec_info: Any, resolved: int | None, fork: Any, width: int) -> None:
    assert verify_width(spec_info, lambda: resolved, fork).width == width


def test_width_that_nobody_tells() -> None:
    with pytest.raises(ValueError, match="nothing tells the verify width"):
        verify_width(spec(num_tokens_per_req=-1), lambda: None)


def tree_spec(requests: int, width: int) -> SimpleNamespace:
    return spec(
        num_tokens_per_req=width, draft_token=torch.zeros(requests * width), retrieve_index=torch.zeros(requests, width)
    )


def test_requests_are_counted() -> None:
    told = verify_width(tree_spec(2, 17), lambda: None)
    assert count_requests(tree_spec(2, 17), told, 2, None, exact=False) == 2
    assert count_requests(tree_spec(2, 17), told, 4, 68, exact=True) == 2
    assert count_requests(tree_spec(2, 17), told, 4, 70, exact=False) == 2
    assert count_requests(tree_spec(0, 17), told, 4, 68, exact=True) == 0
    assert count_requests(spec(), told, 4, 68, exact=True) == 4
    assert count_requests(spec(), told, 4, 68, exact=True, padding=3) == 1


@pytest.mark.parametrize(
    ("spec_info", "batch", "rows", "exact", "words"),
    [
        (tree_spec(3, 17), 3, None, False, r"width of 8 .* 51 tree nodes for 3 requests, 17 each"),
        (spec(draft_token=torch.zeros(51)), 3, None, False, r"width of 8 .* 51 draft tokens for 3 requests, 17 each"),
        (spec(draft_token=torch.zeros(32)), 2, None, True, r"width of 8 .* 32 draft tokens for 2 requests, 16 each"),
        (spec(draft_token=torch.zeros(16)), 4, 16, False, r"width of 8 .* 16 query rows for 4 requests, 4 each"),
        (spec(), 3, 25, True, r"width of 8 .* 25 query rows for 3 requests:"),
        (spec(), 3, 51, True, r"width of 8 .* 51 query rows for 3 requests, 17 each"),
    ],
)
def test_rows_of_another_width(spec_info: Any, batch: int, rows: int | None, exact: bool, words: str) -> None:
    told = verify_width(spec(num_tokens_per_req=8), lambda: None)
    with pytest.raises(ValueError, match=words):
        count_requests(spec_info, told, batch, rows, exact)


def test_forms_of_masks() -> None:
    own = torch.zeros(2 * 17 * 17, dtype=torch.uint8)
    assert mask_form(own, 1, 17, own) == "tree"
    assert mask_form(own[: 17 * 17], 1, 17, None) == "tree"
    # the full mask of one request of 17 rows at prefix 17 has the size of two trees: the real requests tell
    assert mask_form(torch.ones(17 * 34, dtype=torch.bool), 1, 17, own) == "full"
    assert mask_form(torch.ones(2 * 17 * 17, dtype=torch.bool), 2, 17, own) == "tree"


def call_of(rows: int, seed: int) -> ExtendCall:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    return ExtendCall(
        normal(rows, 4, 16), normal(rows, 2, 16), normal(rows, 2, 16), torch.full((rows, 4, 16), float("nan")),
        normal(64, 2, 16), normal(64, 2, 16), torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32),
        torch.zeros(0), None, True, None, 5, 1.0, 1.0,
    )  # fmt: skip


def steps_and_inputs() -> tuple[VerifyStep, PagedKV]:
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool).flatten().repeat(2)
    kv = PagedKV(kv_indptr=torch.tensor([0, 5, 12]), kv_indices=torch.randperm(64)[:12])
    return VerifyStep(2, 3, torch.tensor([5, 7]), mask, "tree"), kv


def test_static_steps_equal_eager_ones_and_full_masks_are_made_on_demand() -> None:
    step, kv = steps_and_inputs()
    eager, static = VerifySteps(backend="torch"), VerifySteps([KEY], backend="torch")
    eager.make_eager(step, kv)
    persistent = PagedKV(kv_indptr=torch.tensor([0, 5, 12, 99, 7]), kv_indices=kv.kv_indices)  # a stale tail
    static.allocate(4, 5, 64, persistent)
    static.write_static(step)
    calls = [call_of(6, 1), call_of(12, 1)]
    attend(calls[0], eager.step_for(group_key(calls[0])))
    for name in ("q_extend", "k_extend", "v_extend", "k_buffer", "v_buffer"):
        mine, theirs = getattr(calls[0], name), getattr(calls[1], name)
        theirs[: mine.shape[0]] = mine
    attend(calls[1], static.step_for(KEY), zero_tail=True)
    assert torch.equal(calls[0].o_extend, calls[1].o_extend[:6])
    assert not bool(calls[1].o_extend[6:].any())
    assert eager.keys == [KEY]
    expected = torch.cat([torch.cat([torch.ones(3, p), step.mask[:9].view(3, 3)], 1).flatten() for p in (5, 7)])
    for steps in (eager, static):
        mask, starts = steps.full_mask()
        assert starts[:3].tolist() == [0, 24, 54]
        assert torch.equal(mask[:54].float(), expected)
    # and is kept up to date
    static.write_static(VerifyStep(1, 5, torch.tensor([2]), None, "full"))
    mask, starts = static.full_mask()
    assert mask[:35].view(5, 7)[:, 2:].equal(torch.ones(5, 5, dtype=torch.uint8).tril())
    assert int(starts[1]) == 35


def test_what_static_steps_refuse() -> None:
    step, kv = steps_and_inputs()
    steps = VerifySteps(backend="torch")
    with pytest.raises(RuntimeError, match="before init_cuda_graph_state"):
        steps.write_static(step)
    with pytest.raises(RuntimeError, match="no verify step has been made yet"):
        steps.rows()
    steps.make_eager(step, kv)
    with pytest.raises(ValueError, match="a layer has a window of 4, SGLang has no addresses for windows"):
        steps.step_for(KEY._replace(window_left=4))


def test_masks_of_another_size_are_refused() -> None:
    _, kv = steps_and_inputs()
    wrong = VerifyStep(2, 3, torch.tensor([5, 7]), torch.ones(40, dtype=torch.bool), "full")
    with pytest.raises(ValueError, match="has 54 elements, got 40"):
        VerifySteps().make_eager(wrong, kv)


def test_geometries_that_no_backend_has() -> None:
    device = torch.device("cpu")
    assert geometry_refusal(KEY, device) is None
    assert "must be a multiple" in (geometry_refusal(KEY._replace(num_kv_heads=3), device) or "")
    assert "got 'nothing'" in (geometry_refusal(KEY, device, "nothing") or "")
    assert "TRITON_INTERPRET=1" in (geometry_refusal(KEY, device, "triton") or "")


def test_report_without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "sglang_root", lambda: None)
    monkeypatch.setattr(plugin, "sglang_version", lambda: None)
    text, fits = plugin.report()
    assert not fits
    assert "SGLang is not installed" in text
    monkeypatch.setenv(plugin.ENABLE, "1")
    assert not plugin.register()


def test_nothing_imports_sglang_or_triton() -> None:
    code = (
        "import sys, treeattn.adapters.sglang.plugin, treeattn.adapters.sglang.drop_in\n"
        "treeattn.adapters.sglang.plugin.register()\n"
        "print([name for name in ('sglang', 'triton', 'vllm') if name in sys.modules])"
    )
    root = Path(treeattn.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "[]"


def load_benchmark() -> Any:
    path = Path(treeattn.__file__).parent.parent / "benchmarks" / "sglang_rows.py"
    found = importlib.util.spec_from_file_location("sglang_rows", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("latent", [False, True])
def test_benchmark_has_no_number_for_a_wrong_answer(latent: bool) -> None:
    rows = load_benchmark()
    (work,) = rows.load_workloads(["small"], dtype="float32")[:1]
    if latent:
        work = dataclasses.replace(work, kv_heads=1, head_dim=48, head_dim_v=32, shared_kv=True)
        assert rows.group_key(rows.calls_of(rows.Inputs(work, torch.device("cpu"), 0))[0][0]).shared_kv
    measured = rows.measure(work, rows.drop_in.extend_attention_fwd, torch.device("cpu"))
    assert [row["provider"] for row in measured] == [
        "sglang_extend", "treeattn_dropin", "treeattn_plugin", "treeattn_plugin",
    ]  # fmt: skip
    assert [row["kind"] for row in measured] == ["small"] * 3 + ["step-update"]
    assert all(row["us"] > 0 and row["rel_err"] < 1e-5 for row in measured)

    def wrong(*args: Any, **kwargs: Any) -> None:
        rows.drop_in.extend_attention_fwd(*args, **kwargs)
        kwargs["o_extend"][0] += 1

    with pytest.raises(rows.GateError, match="sglang_extend on small"):
        rows.measure(work, wrong, torch.device("cpu"))


@pytest.mark.parametrize(("times", "enough"), [([10.0, 10.0], True), ([70.0, 0.5], False), ([15.0, 15.0], False)])
def test_benchmark_verdict(times: list[float], enough: bool) -> None:
    """1.5x on every row, 10x in geomean: 100 over 10 and 10, 70 and 0.5, 15 and 15 microseconds."""
    rows = load_benchmark()
    measured = [
        {"kind": "gqa", "batch": batch, "provider": provider, "us": us}
        for batch, ours in enumerate(times)
        for provider, us in (("sglang_extend", 100.0), ("treeattn_dropin", ours), ("treeattn_plugin", ours))
    ]
    assert rows.verdict(measured)[1] is enough
    assert rows.verdict([])[1] is False
