"""Faults from the field (../shared/faults.md), each a function of a `Setting`; the number in a name is its entry there.

Entry 11 needs FP8 caches. Mask faults are read bit by bit with `treeattn.testing.exact`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from settings_of_tests import Setting, same_bits

import treeattn
from treeattn import verify
from treeattn.testing import (
    T4,
    Case,
    Guarded,
    Placement,
    Result,
    StaticRun,
    check_case,
    judge,
    rebuild,
    truth,
    wrong_weight,
)
from treeattn.testing.faults import ADVERSARIAL, adversarial_case
from treeattn.testing.trees import chain, star

# A probe of these takes dozens of runs: too many for the interpreter.
LONG = {"blind-split", "wide-tree", "many-requests"}


def assert_right(setting: Setting, case: Case) -> None:
    expected = truth(case)
    for path in ("plain", "static"):
        verdict = check_case(case, setting.backend, path, expected)
        assert verdict.ok, f"{path}: {verdict.message}\n{case.describe()}"


def assert_exact(setting: Setting, case: Case) -> None:
    wrong = wrong_weight(case, lambda probe: setting.plain(probe).out)
    assert wrong is None, f"plain: {wrong}\n{case.describe()}"
    wrong = wrong_weight(case, lambda probe: setting.static(probe).out)
    assert wrong is None, f"static: {wrong}\n{case.describe()}"


def adversarial(setting: Setting, name: str) -> None:
    """One adversarial case in every dtype by value, and in the last by mask bit."""
    for dtype in setting.dtypes:
        case = adversarial_case(name, dtype=dtype, device=setting.device)
        assert_right(setting, case)
    if name != "very-negative-score" and not (setting.small and name in LONG):
        assert_exact(setting, case)


def f01_padded_batch(setting: Setting) -> None:
    """Empty slots have no elements in the flat mask: (0, 36, 64, 64, 64), and nothing is written for them."""
    case = setting.build([T4, T4], [5, 3])
    static = setting.buffers(case, spare=2)
    result = static.run(case)
    assert static.bufs.layout.mask_indptr.tolist() == [0, 36, 64, 64, 64]
    assert static.bufs.layout.qo_indptr.tolist() == [0, 4, 8, 8, 8]
    assert result.touched is None
    assert judge(case, result.out, result.lse).ok
    assert case.layout().mask_indptr.tolist() == [0, 36, 64]


def f02_word_stride(setting: Setting) -> None:
    """The word stride follows max_q_len, not a request's own rows."""
    six = (-1, 0, 0, 1, 1, 2)
    for widest in (40, 70):
        case = setting.build([six, star(widest)], [3, 2], heads=(2, 1))
        layout = case.layout()
        assert layout.mask_words.shape[1] == -(-widest // 64)
        assert layout.mask_words[1:4, 0].tolist() == [0b000011, 0b000101, 0b001011]
        assert not layout.mask_words[:6, 1:].any()
        assert_right(setting, case)


def f03_star_below_the_diagonal(setting: Setting) -> None:
    """Row 39 of a star of 40 after 7 prefix tokens gives 1/9 to each of its keys, and nothing to the others."""
    case = setting.build([star(40)], [7], heads=(2, 1), head_dim=64)
    assert int(case.visible(0)[39].sum()) == 9
    assert_exact(setting, case)


def f04_capacity_is_checked_before_the_write(setting: Setting) -> None:
    """A mask buffer of tokens x context is too small; the error names both sizes and nothing is written."""
    case = setting.build([T4, T4], [16, 16])
    layout = case.layout()
    short = torch.full((128,), 7, dtype=torch.uint8, device=setting.device)
    with pytest.raises(ValueError, match=r"160.*128|128.*160"):
        layout.full_mask(out=short, dtype=torch.uint8, total=160)
    assert (short == 7).all()
    with pytest.raises(ValueError, match="160"):
        treeattn.TreeLayout.from_mask(
            torch.ones(128, dtype=torch.bool, device=setting.device), form="full", q_len=4, validate=True,
            prefix_lens=torch.tensor([16, 16], device=setting.device),
        )  # fmt: skip


def f05_stale_tails(setting: Setting) -> None:
    """Persistent indptrs of a larger step before: the tails are ours to rewrite, or not to read."""
    before = setting.build([T4] * 4, [6, 6, 6, 6])
    case = setting.build([T4, T4], [46, 56])
    static = setting.buffers(before, case, spare=0)
    static.run(before)
    result = static.run(case)
    layout = static.bufs.layout
    assert layout.qo_indptr.tolist() == [0, 4, 8, 8, 8]
    assert layout.num_nodes.tolist() == [4, 4, 0, 0]
    assert layout.prefix_lens.tolist() == [46, 56, 0, 0]
    assert layout.mask_indptr.tolist() == [0, 200, 440, 440, 440]
    assert result.touched is None
    assert judge(case, result.out, result.lse).ok
    addresses = treeattn.PagedKV(
        kv_indptr=torch.tensor([0, 10, 20, 30, 40], dtype=torch.int32, device=setting.device),
        kv_indices=torch.zeros(200, dtype=torch.int32, device=setting.device),
    )
    fresh = treeattn.PagedKV(
        kv_indptr=torch.tensor([0, 50, 110], dtype=torch.int32, device=setting.device),
        kv_indices=torch.arange(110, dtype=torch.int32, device=setting.device),
    )
    addresses.copy_(fresh)
    assert addresses.kv_indptr is not None
    assert addresses.kv_indptr.tolist() == [0, 50, 110, 110, 110]


def f06_empty_and_extreme_rows(setting: Setting) -> None:
    """A row that sees nothing is 0 and -inf and changes no other; a score of -524288 is a visible key."""
    for dtype in setting.dtypes:
        blind = torch.eye(4, dtype=torch.bool)
        blind[2, 2] = False
        whole = torch.eye(4, dtype=torch.bool)
        case = setting.build([T4], [0], masks=[blind], source="tree", dtype=dtype)
        other = setting.build([T4], [0], masks=[whole], source="tree", dtype=dtype)
        for path in (setting.plain, setting.static):
            one, two = path(case), path(other)
            assert (one.out[2] == 0).all()
            assert (one.lse[2] == float("-inf")).all()
            rows = torch.tensor([0, 1, 3])
            assert same_bits(one.out[rows], two.out[rows])
            assert same_bits(one.lse[rows], two.lse[rows])
        lone = adversarial_case("very-negative-score", dtype=dtype, device=setting.device)
        for path in (setting.plain, setting.static):
            result = path(lone)
            assert torch.equal(result.out[0], lone.content_v[0][0])
            assert (result.lse == -524288).all()


def f07_unseen_nan(setting: Setting) -> None:
    """NaN and Inf in slot 0, in padded nodes, in unused pages and in the rest of the last page change no bit."""
    for dtype in setting.dtypes:
        place = Placement(page_size=16, table="block", stale="zero", poison="noise", extra_pages=4)
        case = setting.build([T4, star(3)], [5, 20], q_lens=[6, 6], placement=place, dtype=dtype)
        for path in (setting.plain, setting.static):
            clean = path(case)
            assert judge(case, clean.out, clean.lse).ok
            for poison in ("nan", "inf", "mixed"):
                spoiled = path(rebuild(case, placement=dataclasses.replace(place, poison=poison)))
                assert same_bits(clean.out, spoiled.out)
                assert same_bits(clean.lse, spoiled.lse)


def f08_scratch_per_row(setting: Setting) -> None:
    """33 requests of 2 rows, with prefixes long enough to be split: no partial outside its memory."""
    count, prefix = (9, 3) if setting.small else (33, 90)
    case = setting.build([chain(2)] * count, [prefix + b for b in range(count)], heads=(3, 1), head_dim=16)
    assert_right(setting, case)


def f09_position_is_depth(setting: Setting) -> None:
    """Positions follow depth, not rows (the rotary path property has the attention side)."""
    case = setting.build([T4], [5], q_lens=[6])
    assert case.layout().positions.tolist() == [5, 6, 6, 7, 5, 5]


def f10_compaction(setting: Setting) -> None:
    """Accepted nodes 0, 2, 3 move to slots 100, 101, 102; a source that is also a target survives; the rest stays."""
    device = setting.device
    slots = torch.arange(100, 116, dtype=torch.int32, device=device)
    for page in (1, 4):
        before = torch.arange(200 * 2 * 8, dtype=torch.float32).reshape(200 // page, page, 2, 8).to(device)
        kv = treeattn.PagedKV(
            page_size=page, block_table=torch.zeros(2, 60, dtype=torch.int32, device=device), tree_slots=slots
        )
        layout = treeattn.TreeLayout.from_parents(
            torch.tensor([star(8), star(8)], device=device), torch.tensor([5, 7], device=device)
        )
        rows = torch.tensor([[0, 2, 3] + [-1] * 5, [0] + [-1] * 7], dtype=torch.int32, device=device)
        for lens, rows_of in (([3, 1], rows), ([8, 8], torch.arange(8, dtype=torch.int32, device=device).repeat(2, 1))):
            cache, other = before.clone(), before.clone() * -1
            verify.compact_kv_(
                [cache, other], kv, layout, rows_of, torch.tensor(lens, dtype=torch.int32, device=device)
            )
            flat, want = cache.reshape(200, 2, 8), before.reshape(200, 2, 8).clone()
            if lens == [3, 1]:
                want[101], want[102] = before.reshape(200, 2, 8)[102], before.reshape(200, 2, 8)[103]
            assert torch.equal(flat, want)
            assert torch.equal(other.reshape(200, 2, 8), -want)


def f12_a_mask_that_outlives_its_step(setting: Setting) -> None:
    """One object with a tree, then a chain, then another tree: each equals a fresh object."""
    steps = [
        setting.build([T4, star(5)], [9, 4], q_lens=[5, 5]),
        setting.build([chain(5), chain(5)], [9, 4], source="chain"),
        setting.build([star(5), chain(2)], [3, 12], q_lens=[5, 5]),
        setting.build([T4, T4], [3, 12], source="full"),
    ]
    static = setting.buffers(*steps)
    for case in steps:
        result = static.run(case)
        assert result.touched is None
        assert judge(case, result.out, result.lse).ok
        fresh = setting.buffers(*steps).run(case)
        assert same_bits(result.out, fresh.out)
        assert same_bits(result.lse, fresh.lse)


def f13_two_flat_layouts(setting: Setting) -> None:
    """The mask as 4 x 7 and as 4 x 4: the same output; a length that fits neither is an error."""
    cases = [setting.build([T4], [3], source=source) for source in ("full", "tree")]
    for path in (setting.plain, setting.static):
        one, two = (path(case) for case in cases)
        assert same_bits(one.out, two.out)
        assert same_bits(one.lse, two.lse)
    assert_exact(setting, cases[0])
    prefix = torch.tensor([3], device=setting.device)
    for form, size in (("full", 16), ("tree", 28), ("full", 27), ("tree", 17)):
        mask = torch.ones(size, dtype=torch.bool, device=setting.device)
        with pytest.raises(ValueError, match=str(size)):
            treeattn.TreeLayout.from_mask(mask, form=form, prefix_lens=prefix, q_len=4, validate=True)  # type: ignore[arg-type]


BROKEN = {
    "absent parent": ((-1, 0, 9, 1), 4, r"row 2.*\b9\b|\b9\b.*row 2"),
    "cycle": ((-1, 2, 1, 0), 4, "row 1"),
    "root in the middle": ((-1, 0, -1, 1), 4, "row 2"),
    "no nodes": (T4, 0, "request 1.*0"),
    "more nodes than rows": (T4, 5, "request 1.*5"),
}


def f14_malformed_trees(setting: Setting) -> None:
    """With validation an error that names request and node; without it bounded work, and the neighbour is right."""
    device = setting.device
    for name, (tree, nodes, words) in BROKEN.items():
        parents = torch.tensor([T4, tree, T4], dtype=torch.int32, device=device)
        counts = torch.tensor([4, nodes, 4], dtype=torch.int32, device=device)
        case = setting.build([T4, T4, T4], [5, 6, 7], heads=(2, 1))
        args: dict[str, Any] = {"parents": parents, "num_nodes": counts, "prefix_lens": case.layout_args["prefix_lens"]}
        with pytest.raises(ValueError, match="request 1") as caught:
            treeattn.TreeLayout.from_parents(**args, validate=True)
        assert re.search(words, str(caught.value)), f"{name}: {caught.value}"
        layout = treeattn.TreeLayout.from_parents(**args, validate=False)
        result = setting.plain(case, layout=layout)
        _assert_neighbours(case, result, broken=1)
        static = setting.buffers(case)
        static.load_(case)
        static.bufs.update_(**args)
        result = _run_loaded(static, case)
        _assert_neighbours(case, result, broken=1)
        with pytest.raises(ValueError, match="request 1") if nodes != 0 else contextlib.nullcontext():
            static.bufs.check()


def _run_loaded(static: StaticRun, case: Case) -> Result:
    """Attend with what the buffers hold now."""
    out = Guarded(
        (static.max_total_q, case.num_qo_heads, case.head_dim), case.dtype, case.device, own_rows=case.total_q
    )
    lse = Guarded((static.max_total_q, case.num_qo_heads), torch.float32, case.device, own_rows=case.total_q)
    static.attend(case, out.tensor, lse.tensor)
    return Result(out.result()[: case.total_q], lse.result()[: case.total_q], out.touched() or lse.touched())


def _assert_neighbours(case: Case, result: Result, broken: int) -> None:
    """The broken request is empty, the others are right."""
    rows = slice(case.starts[broken], case.starts[broken + 1])
    assert result.touched is None
    assert (result.out[rows] == 0).all()
    assert (result.lse[rows] == float("-inf")).all()
    want = truth(case)
    out, lse = result.out.clone(), result.lse.clone()
    out[rows], lse[rows] = want.out[rows].to(out.dtype), want.lse[rows].to(lse.dtype)
    verdict = judge(case, out, lse, want)
    assert verdict.ok, verdict.message


def f15_a_drafter_that_falls_short(setting: Setting) -> None:
    """Budget 16 with 8 and with 17 real rows in one batch; buffers of width 8 refuse 17 and name both."""
    case = setting.build([chain(8), star(17)], [30, 11], q_lens=[17, 17])
    assert_right(setting, case)
    assert_exact(setting, setting.build([chain(8), star(17)], [3, 1], q_lens=[17, 17], heads=(2, 1)))
    small = setting.buffers(setting.build([chain(8)] * 2, [30, 11]), spare=0)
    with pytest.raises(ValueError, match=r"17.*\b8\b|\b8\b.*17"):
        small.update_(case)
    _assert_too_wide(setting, small)


def _assert_too_wide(setting: Setting, static: Any) -> None:
    """The founding bug at the call: q rows of another width than the step's."""
    held = setting.build([chain(8)] * 2, [30, 11])
    static.load_(held)
    static.update_(held)
    wide = torch.zeros(2 * 17, held.num_qo_heads, held.head_dim, device=setting.device)
    with pytest.raises(ValueError, match="34"):
        treeattn.tree_attention(wide, held.k_cache, held.v_cache, static.step)


def f16_around_the_block_size(setting: Setting) -> None:
    """Widths 7, 8 and 9 against buffers of 8, one request and three."""
    for batch in (1, 3):
        eight = setting.build([chain(8)] * batch, [6 + 13 * b for b in range(batch)], heads=(2, 1))
        for width in (7, 8):
            tree = [-1, *((i * 5) % (i + 1) for i in range(width - 1))]
            case = setting.build([tree] * batch, eight.prefixes, heads=(2, 1))
            static = setting.buffers(eight, case, spare=0)
            assert static.bufs.layout.max_q_len == 8
            wrong = wrong_weight(case, lambda probe, static=static: static.run(probe).out)  # type: ignore[misc]
            assert wrong is None, wrong
        static = setting.buffers(eight, spare=0)
        nine = setting.build([star(9)] * batch, eight.prefixes, heads=(2, 1))
        with pytest.raises(ValueError, match=r"\b9\b.*\b8\b|\b8\b.*\b9\b"):
            static.update_(nine)
        assert_exact(setting, nine)


FAULTS: dict[str, Callable[[Setting], None]] = {
    name: body for name, body in list(globals().items()) if name[:1] == "f" and name[1:3].isdigit()
}
ADVERSARIAL_NAMES = tuple(ADVERSARIAL)
