"""`treeattn check`: it passes on what is right, fails on what is wrong, and names where a dump is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from treeattn.capabilities import CAPABILITIES, missing
from treeattn.check import Item, run_check, run_item
from treeattn.dump import DUMP_KEYS, judge_dump, load_dump
from treeattn.testing import Case, Placement, build_case, truth
from treeattn.testing.faults import ADVERSARIAL
from treeattn.testing.run import asked_of
from treeattn.testing.sweep import sweep_case
from treeattn.testing.trees import star

WIDTH, BLOCK = 17, 8


def test_backends_are_right() -> None:
    report = run_check("cpu", ["torch"], cases=3, seed=5, dtype=torch.float16)
    assert report.ok
    assert report.runs > 2 * len(ADVERSARIAL)
    assert 0 < report.worst_ratio <= 1
    assert "--case " in report.repeat


def test_one_case_repeats() -> None:
    whole = run_check("cpu", ["torch"], cases=4, dtype=torch.float32)
    name = whole.repeat.split()[-1]
    alone = run_check("cpu", ["torch"], case=name, dtype=torch.float32)
    assert alone.worst_ratio == whole.worst_ratio


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("case", ["word-stride", "short-drafter", "width-17-batch-3", "7"])
def test_an_injected_fault_is_caught(backend: str, case: str) -> None:
    report = run_check("cpu", [backend], case=case, dtype=torch.float32, inject_fault=True)
    assert not report.ok


def test_what_cannot_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="neither a seed nor"):
        run_check("cpu", ["torch"], case="no-such-case")
    with pytest.raises(ValueError, match="no backend 'fast'"):
        run_check("cpu", ["fast"])


def dump_of(case: Case, **changes: Any) -> dict[str, Any]:
    """A right dump in the full form, with entries replaced or (None) left out."""
    blocks, indptr = [], [0]
    for b, width in enumerate(case.q_lens):
        seen = torch.zeros(width, case.prefixes[b] + width, dtype=torch.bool)
        seen[:, : case.visible(b).shape[1]] = case.visible(b)
        blocks.append(seen.reshape(-1))
        indptr.append(indptr[-1] + seen.numel())
    dump = {
        "q": case.q,
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "prefix_lens": torch.tensor(case.prefixes),
        "qo_indptr": torch.tensor(case.starts),
        "mask": torch.cat(blocks),
        "mask_indptr": torch.tensor(indptr),
        "out": truth(case).out.to(case.dtype),
        "lse": truth(case).lse.float(),
        **case.kv_args,
        **changes,
    }
    return {key: value for key, value in dump.items() if value is not None}


def two_requests(dtype: torch.dtype = torch.float16, **place: Any) -> Case:
    trees = [[-1, *((i * 3) % (i + 1) for i in range(WIDTH - 1))], star(WIDTH)]
    return build_case(
        trees, [5, 9], heads=(4, 2), dtype=dtype, placement=Placement(page_size=4, table="block", **place)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tree_kv", ["logical", "slots", "fresh"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_a_right_dump_has_no_findings(dtype: torch.dtype, tree_kv: str, kv_layout: str) -> None:
    case = two_requests(dtype, tree_kv=tree_kv, kv_layout=kv_layout)
    report = judge_dump(dump_of(case, k_tree=case.k_tree, v_tree=case.v_tree, kv_layout=kv_layout))
    assert report.ok, report.findings
    parents = torch.tensor([parent for tree in case.parents for parent in tree])
    assert judge_dump(dump_of(case, k_tree=case.k_tree, v_tree=case.v_tree, kv_layout=kv_layout, parents=parents)).ok


def test_mask_offsets_of_another_width_are_named() -> None:
    case = two_requests()
    wrong = torch.tensor([0, BLOCK * (5 + BLOCK), BLOCK * (5 + BLOCK) + BLOCK * (9 + BLOCK)])
    report = judge_dump(dump_of(case, mask_indptr=wrong))
    assert report.findings[0].startswith("mask_indptr[1] = 104, must be 17*(5+17) = 374; it is what width 8 gives")
    assert report.findings[1].startswith("mask_indptr[2] = 240, must be 17*(5+17) + 17*(9+17) = 816")


def test_a_mask_laid_out_for_another_width_is_recognised() -> None:
    case = two_requests()
    blocks = []
    for b, width in enumerate(case.q_lens):
        wide = torch.zeros(BLOCK, case.prefixes[b] + BLOCK, dtype=torch.bool)
        wide[:, :] = case.visible(b)[:BLOCK, : case.prefixes[b] + BLOCK]
        blocks.append(wide.reshape(-1))
        assert width == WIDTH
    report = judge_dump(dump_of(case, mask=torch.cat(blocks), mask_indptr=None))
    assert "the mask has 240 elements, the full form needs 816; it was laid out for width 8" in report.findings[0]
    assert any("request 1 holds a tree at offset 104 with rows of 17" in note for note in report.notes)
    stretched = torch.cat([*blocks, torch.zeros(816 - 240, dtype=torch.bool)])
    report = judge_dump(dump_of(case, mask=stretched, mask_indptr=None))
    assert not report.ok
    assert any("laid out for width 8, the batch is 17 wide" in note for note in report.notes)


def test_a_wrong_bit_is_named_by_request_row_and_column() -> None:
    case = two_requests()
    right = dump_of(case)
    start, stride = 17 * 22, 9 + 17
    for row, flipped, node, words in (
        (3, (1, 2), 1, "1, but its nearest ancestor 2 does not see node 1: two branches"),
        (4, (4,), 4, "0, but a node sees itself"),
        (2, (9,), 9, "1, but node 9 is a later node"),
        (5, (0,), 0, "0, but every node sees the root"),
    ):
        mask = right["mask"].clone()
        for bit in flipped:
            mask[start + row * stride + 9 + bit] ^= True
        findings = judge_dump({**right, "mask": mask}).findings
        named = f"request 1 row {row} column {9 + node} (offset {start + row * stride + 9 + node}): {words}"
        assert findings[0].startswith(named), findings
    hole = right["mask"].clone()
    hole[start + 6 * stride + 4] = False
    findings = judge_dump({**right, "mask": hole}).findings
    assert f"request 1 row 6 column 4 (offset {start + 6 * stride + 4}): 0 in the prefix part" in findings[0]


def test_mask_and_parents_that_disagree_are_named() -> None:
    case = two_requests()
    parents = [parent for tree in case.parents for parent in tree]
    parents[WIDTH + 3] = 1
    report = judge_dump(dump_of(case, parents=torch.tensor(parents)))
    assert "request 1 row 3 column 10 (node 1): the mask has 0, the parents say 1" in report.findings[0]
    parents[WIDTH + 3] = 12
    report = judge_dump(dump_of(case, parents=torch.tensor(parents)))
    assert "request 1 row 3: parent 12, must be -1 or a node before it (0 to 2)" in report.findings[0]


def test_a_wrong_output_is_named_and_explained() -> None:
    case = two_requests(torch.float32)
    out = truth(case).out.float()
    out[WIDTH + 6, 1, 2] += 0.01
    report = judge_dump(dump_of(case, out=out))
    assert "out of request 1 row 6 head 1 dim 2" in report.findings[0]
    assert not report.notes
    causal = build_case(
        case.parents, case.prefixes, heads=(4, 2), source="tree", dtype=torch.float32,
        masks=[torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril()] * 2,
    ).with_content(q=case.q, k=case.content_k, v=case.content_v)  # fmt: skip
    report = judge_dump(dump_of(case, out=truth(causal).out.float(), lse=None))
    assert len(report.findings) == 2
    assert any("a causal chain: the tree was not applied" in note for note in report.notes)
    report = judge_dump(dump_of(case, lse=truth(case).lse.float() / 0.6931471805599453))
    assert any("base 2" in note for note in report.notes)


def test_the_founding_bug_is_named_from_its_output() -> None:
    """Mask rows read with the stride of width 8 where the batch is 17 wide."""
    case = two_requests(torch.float32)
    flat = torch.cat([case.visible(0).reshape(-1), torch.zeros(4096, dtype=torch.bool)])
    read = torch.stack([flat[row * (5 + BLOCK) : row * (5 + BLOCK) + 5 + WIDTH] for row in range(WIDTH)])
    from treeattn.testing.truth import attend

    out = truth(case).out.float()
    garbage, _ = attend(case.q[:WIDTH], case.content_k[0], case.content_v[0], read, 32**-0.5)
    out[:WIDTH] = garbage
    report = judge_dump(dump_of(case, out=out, lse=None))
    assert "out of request 0" in report.findings[0]
    assert any("a stride for width 8, not 17" in note for note in report.notes), report.notes


def test_addresses_are_judged() -> None:
    case = two_requests()
    table = case.kv_args["block_table"].clone()
    table[1, 2] = 10_000
    report = judge_dump(dump_of(case, block_table=table))
    assert "request 1 position 8: token slot 40000 (page 10000), the cache has" in report.findings[0]
    report = judge_dump(dump_of(case, block_table=table[:, :4]))
    assert "request 0: 22 tokens need 6 pages of 4, its table has 4" in report.findings[0]
    report = judge_dump(dump_of(case, qo_indptr=torch.tensor([0, 17, 35])))
    assert "qo_indptr runs from 0 to 35, must run from 0 to at most 34" in report.findings[0]


def test_dumps_that_cannot_be_read(tmp_path: Path) -> None:
    case = two_requests()
    path = tmp_path / "mine.pt"
    torch.save(dump_of(case), path)
    assert judge_dump(load_dump(path)).ok
    torch.save({"q": case.q, "kv": case.q}, path)
    with pytest.raises(ValueError, match="unknown keys kv; known are"):
        load_dump(path)
    with pytest.raises(ValueError, match="neither mask nor parents"):
        judge_dump({"q": case.q, "prefix_lens": torch.tensor([5, 9])})
    with pytest.raises(ValueError, match="has no prefix_lens"):
        judge_dump({"q": case.q})
    assert all(text for text in DUMP_KEYS.values())


def test_two_processes_find_what_one_finds() -> None:
    """Counts and verdicts; a case that raises is a failure and the others go on."""
    one = run_check("cpu", ["torch"], cases=24, dtype=torch.float16, jobs=1)
    two = run_check("cpu", ["torch"], cases=24, dtype=torch.float16, jobs=2)
    assert one.ok
    assert two.ok, two.failures
    assert (two.runs, two.worst_ratio, two.paths) == (one.runs, one.worst_ratio, one.paths)
    assert two.ran == one.ran
    assert two.drawn == one.drawn


def test_a_case_that_raises_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **more: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("treeattn.torch_backend.tree_attention_torch", broken)
    report = run_check("cpu", ["torch"], cases=3, dtype=torch.float32)
    assert len(report.failures) >= 3
    assert "RuntimeError: out of luck (" in report.failures[-1]
    assert report.failures[-1].endswith("--backend torch --dtype float32 --case 2")
    report = run_check("cpu", ["torch"], cases=100, dtype=torch.float32)
    assert f"gave up after 50 crashes, {50 + len(ADVERSARIAL)} cases were not run" in report.failures[-1]


def test_an_injected_fault_is_caught_in_nearly_every_case() -> None:
    report = run_check("cpu", ["torch"], cases=80, dtype=torch.float32, inject_fault=True)
    assert report.caught > 0.9 * (80 + len(ADVERSARIAL))


def test_a_step_is_refused_for_what_it_lacks_before_a_call_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case with a soft cap and dims that the backend has not: both are reasons, and the plan says the second."""
    covers = CAPABILITIES["cuda"]
    monkeypatch.setitem(CAPABILITIES, "cuda", replace(covers, devices={**covers.devices, "cpu": "a CPU"}))
    found = ((seed, asked_of(sweep_case(seed))) for seed in range(200))
    seed, asked = next((seed, asked) for seed, asked in found if asked.geometry.shared_kv and asked.logits_soft_cap)
    at_call = missing("cuda", "cpu", asked)
    at_plan = missing("cuda", "cpu", replace(asked, logits_soft_cap=0.0, sinks=False))
    assert at_plan is not None
    assert at_plan != at_call

    def refuse(reason: str | None) -> None:
        def run(*case: Any) -> None:
            raise NotImplementedError(reason)

        monkeypatch.setattr("treeattn.testing.run_plain", run)

    item = Item(0, "cuda", "cpu", str(seed), False, None, False)
    refuse(f"backend 'cuda' cannot do this: {at_plan}")
    assert run_item(item).runs == []
    refuse("it is Monday")
    assert not run_item(item).runs[0][1]
