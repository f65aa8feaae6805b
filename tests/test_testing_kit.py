"""The kit itself: its cases repeat, its truth is right by hand, its budget and guards see what is wrong."""

from __future__ import annotations

import math
import random

import pytest
import torch
from settings_of_tests import same_bits

from treeattn.testing import (
    T4,
    Case,
    Guarded,
    Placement,
    build_case,
    check_case,
    judge,
    plain,
    random_case,
    rebuild,
    relabel,
    run_plain,
    truth,
    wrong_weight,
)
from treeattn.testing.trees import KINDS, ancestors_or_self, depth_of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [0, 1, 2, 17, 130])
def test_trees_have_parents_before_children(kind: str, nodes: int) -> None:
    for seed in range(5):
        tree = KINDS[kind](nodes, random.Random(seed))
        assert len(tree) == nodes
        assert all(parent == -1 if node == 0 else 0 <= parent < node for node, parent in enumerate(tree))


def test_t4_by_hand() -> None:
    assert [sorted(ancestors_or_self(T4, node)) for node in range(4)] == [[0], [0, 1], [0, 2], [0, 1, 3]]
    assert [depth_of(T4, node) for node in range(4)] == [0, 1, 1, 2]


def test_relabelled_trees_are_the_same_tree() -> None:
    rng = random.Random(3)
    tree = KINDS["recent"](30, rng)
    renamed, order = relabel(tree, rng)
    assert order != list(range(30))
    for new, old in enumerate(order):
        assert [order[a] for a in ancestors_or_self(renamed, new)] == ancestors_or_self(tree, old)


def test_a_case_repeats_from_its_seed() -> None:
    for seed in range(30):
        one, two = random_case(seed, dtype=torch.float16), random_case(seed, dtype=torch.float16)
        assert one.describe() == two.describe()
        assert "\n" not in one.describe()
        for name in ("q", "k_cache", "v_cache"):
            assert same_bits(getattr(one, name), getattr(two, name))
            assert getattr(one, name).stride() == getattr(two, name).stride()


def test_pins_replace_one_draw_and_leave_the_others() -> None:
    free, pinned = random_case(3), random_case(3, page_size=7)
    assert pinned.placement.page_size == 7
    assert (free.num_qo_heads, free.head_dim, free.batch) == (pinned.num_qo_heads, pinned.head_dim, pinned.batch)
    with pytest.raises(TypeError, match="page"):
        random_case(3, page=7)


def test_seeds_cover_what_they_promise() -> None:
    cases = [random_case(seed) for seed in range(300)]
    assert {0, 1, 6} <= {case.batch for case in cases}
    assert {1, 3, 5, 6, 8, 12} <= {case.num_qo_heads // case.num_kv_heads for case in cases}
    assert any(case.head_dim & (case.head_dim - 1) for case in cases)
    assert any(width > 64 for case in cases for width in case.q_lens)
    assert any(len(set(case.q_lens)) > 1 for case in cases)
    assert any(0 < n < q for case in cases for n, q in zip(case.nodes, case.q_lens, strict=True))
    for name in ("table", "tree_kv", "kv_layout", "cache", "stale", "poison", "index_dtype"):
        assert len({getattr(case.placement, name) for case in cases}) >= 2, name
    assert {case.source for case in cases} == {"parents", "chain", "full", "tree"}


def test_unused_memory_is_poisoned() -> None:
    place = Placement(page_size=4, poison="nan", extra_pages=3)
    case = build_case([T4, (-1, 0)], [3, 0], q_lens=[6, 6], placement=place)
    used = sum(content.shape[0] for content in case.content_k)
    finite = torch.isfinite(case.k_cache).all(-1).all(-1)
    assert int(finite.sum()) == used
    assert torch.isfinite(case.q).all(-1).all(-1).tolist() == [True] * 4 + [False] * 2 + [True] * 2 + [False] * 4


@pytest.mark.parametrize("cache", ["paged", "flat", "interleaved", "packed", "strided", "unlike"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("tree_kv", ["logical", "slots", "fresh"])
def test_content_lies_at_its_slots(cache: str, kv_layout: str, tree_kv: str) -> None:
    if cache == "flat" and kv_layout == "HND":
        kv_layout = "NHD"
    place = Placement(page_size=4, cache=cache, kv_layout=kv_layout, tree_kv=tree_kv)
    case = build_case([T4, (-1,)], [5, 9], placement=place)
    for b in range(2):
        for key, slot in enumerate(case.key_slots[b].tolist()):
            page, offset = divmod(slot, 4)
            if slot < 0:
                assert case.k_tree is not None
                got = case.k_tree[case.starts[b] + key - case.prefixes[b]]
            elif cache == "flat":
                got = case.k_cache[slot]
            else:
                got = case.k_cache[page, offset] if kv_layout == "NHD" else case.k_cache[page, :, offset]
            assert torch.equal(got, case.content_k[b][key])


def test_a_rebuilt_case_has_the_same_content() -> None:
    case = random_case(11, batch=3, source="parents", uniform=False)
    other = rebuild(case, [2, 0], seed=5)
    assert other.prefixes == (case.prefixes[2], case.prefixes[0])
    one, two = truth(case), truth(other)
    width = case.q_lens[2]
    assert torch.equal(two.out[:width], one.out[case.starts[2] : case.starts[3]])
    assert torch.equal(two.out[width : width + case.q_lens[0]], one.out[: case.q_lens[0]])


def by_hand() -> Case:
    """One head of dim 2, a root with one child, one prefix token; scores 0, 0, log 2."""
    case = build_case([(-1, 0)], [1], heads=(1, 1), head_dim=2, sm_scale=1.0)
    k = torch.tensor([[[0.0, 0.0]], [[0.0, 0.0]], [[math.log(2), 0.0]]])
    v = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[4.0, 8.0]]])
    return case.with_content(q=torch.tensor([[[1.0, 5.0]], [[1.0, -5.0]]]), k=(k,), v=(v,))


def test_truth_by_hand() -> None:
    out, lse = truth(by_hand())
    assert out.dtype == torch.float64
    torch.testing.assert_close(out[:, 0], torch.tensor([[0.5, 0.5], [9 / 4, 17 / 4]], dtype=torch.float64))
    torch.testing.assert_close(lse[:, 0], torch.tensor([math.log(2), math.log(4)], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_budget_takes_pytorch_and_refuses_more(dtype: torch.dtype) -> None:
    case = build_case([(-1, 0, 1, 1, 0), T4], [30, 7], dtype=dtype)
    want, usual = truth(case), plain(case)
    assert judge(case, usual.out, usual.lse).ok
    wrong = usual.out.clone()
    wrong[3, 0, 1] += 40 * torch.finfo(dtype).eps * float(want.out.abs().max())
    verdict = judge(case, wrong, usual.lse)
    assert not verdict.ok
    assert verdict.ratio > 1
    assert "row 3 head 0 dim 1" in verdict.message
    lse = usual.lse.clone()
    lse[2, 0] += 1e-3
    assert not judge(case, usual.out, lse).ok
    assert "lse of request 0 row 2" in judge(case, usual.out, lse).message


def test_inf_and_nan_come_first() -> None:
    case = build_case([T4], [3], q_lens=[6])
    want = truth(case)
    out, lse = want.out.clone(), want.lse.clone()
    out[1, 2, 3] = float("nan")
    verdict = judge(case, out, lse)
    assert verdict.ratio == math.inf
    assert "row 1 head 2 dim 3 is nan" in verdict.message
    lse[5, 0] = 0.0
    assert "row 5 head 0 is 0.0, must be -inf" in judge(case, want.out, lse).message


def test_guards_see_writes_outside() -> None:
    guard = Guarded((4, 3), torch.float32, "cpu", own_rows=2, gap=1)
    assert guard.touched() is None
    guard.tensor[:2] = 1
    assert guard.touched() is None
    guard.tensor[3, 1] = float("nan")
    assert "the first at offset 13" in str(guard.touched())
    guard = Guarded((4, 3), torch.float32, "cpu", transposed=True)
    guard.memory[10] = 0
    assert "outside" in str(guard.touched())


@pytest.mark.parametrize("row", [1, 3, 6])
def test_the_probe_names_a_flipped_bit(row: int) -> None:
    case = build_case([T4, T4], [20, 3], heads=(2, 1), head_dim=16)

    def flip(layout: object) -> None:
        layout.mask_words[row, 0] ^= 4  # type: ignore[attr-defined]

    assert wrong_weight(case, lambda probe: run_plain(probe, "torch").out) is None
    message = wrong_weight(case, lambda probe: run_plain(probe, "torch", spoil=flip).out)
    assert message is not None
    assert f"request {row // 4} row {row % 4} head 0" in message


def test_a_wrong_backend_is_caught() -> None:
    case = random_case(1, batch=2, padding=True, max_width=9)
    assert check_case(case, "torch").ok
    other = case.with_content(v=tuple(v * 1.001 for v in case.content_v))
    assert not judge(other, run_plain(case, "torch").out).ok
