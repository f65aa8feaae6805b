"""Properties of tree attention, each a function of a `Setting` and a recipe for a case.

The test modules give the setting: reference and torch on a CPU, Triton in its interpreter, everything on a GPU.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from settings_of_tests import Setting, same_bits

import treeattn
from treeattn.testing import Case, Placement, check_case, judge, rebuild, relabel, truth
from treeattn.testing.run import call_of, group_of

Recipe = dict[str, Any]
PLACEMENTS = {
    "page_size": (1, 16, 2, 5, 64),
    "table": ("csr", "block"),
    "index_dtype": (torch.int32, torch.int64),
    "tree_kv": ("logical", "slots", "fresh"),
    "kv_layout": ("NHD", "HND"),
    "cache": ("paged", "unlike", "flat", "interleaved", "packed", "strided"),
    "stale": ("valid", "zero", "negative", "huge"),
    "poison": ("nan", "inf", "mixed", "noise"),
    "strided_q": (False, True),
}

GEOMETRY = {
    "group": (1, 2, 4, 3, 5, 6, 8, 12),
    "num_kv_heads": (1, 2, 3, 4),
    "head_dim": (16, 64, 128, 80, 96, 256, 72),
}


def _compiled(count: int) -> list[Recipe]:
    """Geometries and placements, each of which is another compiled kernel; every option of every list occurs."""
    options = GEOMETRY | {name: PLACEMENTS[name] for name in PLACEMENTS if name not in ("stale", "poison")}
    rng = random.Random(0)
    columns = [rng.sample([values[i % len(values)] for i in range(count)], count) for values in options.values()]
    return [dict(zip(options, row, strict=True)) for row in zip(*columns, strict=True)]


COMPILED = _compiled(24)
"""What the examples of all properties share on a GPU, where a kernel of its own for each would take seconds each."""


@st.composite
def compiled_recipes(draw: st.DrawFn) -> Recipe:
    """:func:`recipes` over few geometries."""
    return draw(recipes()) | draw(st.sampled_from(COMPILED))


@st.composite
def recipes(draw: st.DrawFn, small: bool = False) -> Recipe:
    """A seed and pins, the simplest first, so that a failure shrinks to a small case."""
    recipe: Recipe = {
        "seed": draw(st.integers(0, 9999)),
        "batch": draw(st.integers(0, 3 if small else 5)),
        "group": draw(st.sampled_from(GEOMETRY["group"])),
        "num_kv_heads": draw(st.integers(1, 2 if small else 4)),
        "head_dim": draw(st.sampled_from((16, 64, 32, 40) if small else GEOMETRY["head_dim"])),
        "max_width": draw(st.sampled_from((1, 4, 9, 17) if small else (1, 4, 8, 9, 17, 33, 65, 129))),
        "max_prefix": draw(st.sampled_from((0, 7, 33) if small else (0, 7, 33, 130, 300))),
        "uniform": draw(st.booleans()),
        "padding": draw(st.booleans()),
        "empties": draw(st.booleans()),
        **{name: draw(st.sampled_from(options)) for name, options in PLACEMENTS.items()},
    }
    return recipe


def make(setting: Setting, recipe: Recipe, dtype: torch.dtype, **pins: Any) -> Case:
    """The recipe's case with some pins replaced; a chain or mask source drawn from the seed unless pinned."""
    merged = {**recipe, **pins}
    return setting.case(merged.pop("seed"), dtype, **merged)


def dtype_of(setting: Setting, recipe: Recipe) -> torch.dtype:
    return setting.dtypes[recipe["seed"] % len(setting.dtypes)]


def assert_right(case: Case, result: Any, what: str = "") -> None:
    assert result.touched is None, f"{case.describe()}: {result.touched}"
    verdict = judge(case, result.out, result.lse)
    assert verdict.ok, f"{what} {verdict.message}\n{case.describe()}"


def matches_float64(setting: Setting, recipe: Recipe) -> None:
    """Plain calls and StaticBuffers stay inside the error budget and inside their rows."""
    case = make(setting, recipe, dtype_of(setting, recipe))
    expected = truth(case)
    for path in ("plain", "static"):
        verdict = check_case(case, setting.backend, path, expected)
        assert verdict.ok, f"{path}: {verdict.message}\n{case.describe()}"


def relabelling_permutes_output(setting: Setting, recipe: Recipe) -> None:
    """Nodes in another topological order: the same rows in that order."""
    case = make(setting, recipe, dtype_of(setting, recipe), source="parents", empties=False)
    rng = random.Random(recipe["seed"])
    renamed = [relabel(tree, rng) for tree in case.parents]
    q, k, v = case.q.clone(), [], []
    for b, (_, order) in enumerate(renamed):
        start, prefix = case.starts[b], case.prefixes[b]
        q[start : start + len(order)] = case.q[[start + old for old in order]]
        rows = [*range(prefix), *(prefix + old for old in order)]
        k.append(case.content_k[b][rows])
        v.append(case.content_v[b][rows])
    other = setting.build(
        [tree for tree, _ in renamed], case.prefixes, q_lens=case.q_lens, tail=case.tail, max_q_len=case.max_q_len,
        heads=(case.num_qo_heads, case.num_kv_heads), head_dim=case.head_dim, dtype=case.dtype,
        placement=case.placement, sm_scale=case.sm_scale,
    ).with_content(q=q, k=tuple(k), v=tuple(v))  # fmt: skip
    first, second = setting.plain(case), setting.plain(other)
    assert_right(other, second, "relabelled")
    back = torch.zeros_like(second.out)
    lse = torch.full_like(second.lse, float("-inf"))
    for b, (_, order) in enumerate(renamed):
        for new, old in enumerate(order):
            back[case.starts[b] + old] = second.out[case.starts[b] + new]
            lse[case.starts[b] + old] = second.lse[case.starts[b] + new]
    verdict = judge(case, back, lse)
    assert verdict.ok, verdict.message
    assert first.out.shape == back.shape


def chain_is_causal(setting: Setting, recipe: Recipe) -> None:
    """A chain equals causal attention, made in three ways: from parents, as a chain, as a triangular mask."""
    case = make(setting, recipe, dtype_of(setting, recipe), source="chain", uniform=True, padding=False, empties=False)
    for b, nodes in enumerate(case.nodes):
        assert torch.equal(case.visible(b)[:, case.prefixes[b] :], torch.ones(nodes, nodes, dtype=torch.bool).tril())
    results = [setting.plain(case)]
    for source in ("parents", "full", "tree"):
        results.append(setting.plain(rebuild(case, source=source, seed=1)))
    assert_right(case, results[0])
    for other in results[1:]:
        assert same_bits(results[0].out, other.out)
        assert same_bits(results[0].lse, other.lse)


def unseen_keys_change_nothing(setting: Setting, recipe: Recipe) -> None:
    """What no row may see has no effect on any bit: unused memory, padding, nodes outside every row."""
    source = ("general", "parents")[recipe["seed"] % 2]
    case = make(setting, recipe, dtype_of(setting, recipe), poison="noise", source=source)
    clean = setting.plain(case)
    for poison in ("nan", "inf"):
        place = dataclasses.replace(case.placement, poison=poison)
        spoiled = rebuild(case, placement=place, seed=recipe["seed"] + 1)
        k, v = [], []
        for b in range(case.batch):
            unseen = ~case.visible(b).any(0)[:, None, None]
            bad = float("nan") if poison == "nan" else float("inf")
            k.append(case.content_k[b].masked_fill(unseen, bad))
            v.append(case.content_v[b].masked_fill(unseen, -bad))
        result = setting.plain(spoiled.with_content(k=tuple(k), v=tuple(v)))
        assert result.touched is None
        assert same_bits(clean.out, result.out), f"{poison}: {case.describe()}"
        assert same_bits(clean.lse, result.lse), f"{poison}: {case.describe()}"
    assert_right(case, clean)


def neighbours_change_nothing(setting: Setting, recipe: Recipe) -> None:
    """In reverse order, and each request alone: the same within the budget."""
    case = make(setting, recipe, dtype_of(setting, recipe), tail=0)
    assert_right(case, setting.plain(case))
    orders = [list(reversed(range(case.batch))), *([b] for b in range(min(case.batch, 2)))]
    for order in orders:
        other = rebuild(case, order, seed=3)
        assert_right(other, setting.plain(other), f"order {order}")


def pages_change_nothing(setting: Setting, recipe: Recipe) -> None:
    """Other pages, the same bits; other page sizes, tables and layouts, the same within the budget."""
    case = make(setting, recipe, dtype_of(setting, recipe))
    first = setting.plain(case)
    second = setting.plain(rebuild(case, seed=recipe["seed"] + 7))
    assert same_bits(first.out, second.out)
    assert same_bits(first.lse, second.lse)
    assert_right(case, first)
    place = case.placement
    elsewhere = Placement(
        page_size=8 if place.page_size != 8 else 3, table="block" if place.table == "csr" else "csr",
        index_dtype=torch.int64, kv_layout="NHD", cache="flat", tree_kv="slots",
    )  # fmt: skip
    assert_right(case, setting.plain(rebuild(case, placement=elsewhere)), "elsewhere")


def splits_change_nothing(setting: Setting, recipe: Recipe) -> None:
    """One program or many: the same within the budget."""
    case = make(setting, recipe, dtype_of(setting, recipe), max_prefix=60 if setting.small else 500)
    for programs in (1, 2, 7, 90):
        with mock.patch("treeattn.backends.num_programs", lambda device, config, count=programs: count):
            assert_right(case, setting.plain(case), f"{programs} programs")


def update_is_eager(setting: Setting, recipe: Recipe) -> None:
    """Buffers that have seen other steps equal a plain call, and equal themselves bit by bit."""
    case = make(setting, recipe, dtype_of(setting, recipe), tree_kv=recipe["tree_kv"])
    others = [
        make(setting, {**recipe, "seed": recipe["seed"] + shift}, case.dtype, source=source, batch=batch,
             head_dim=case.head_dim, max_prefix=10)
        for shift, source, batch in ((1, "parents", 3), (2, "full", 1))
    ]  # fmt: skip
    static = setting.buffers(case, *others)
    results = []
    for step in (case, others[0], case, others[1], case):
        result = static.run(step)
        assert_right(step, result, "static")
        if step is case:
            results.append(result)
    for other in results[1:]:
        assert same_bits(results[0].out, other.out)
        assert same_bits(results[0].lse, other.lse)


def rotate(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `rows [n, heads, dim]` at `positions [n]`, in float64."""
    half = rows.shape[-1] // 2
    angle = positions.double()[:, None] * (10000.0 ** (-torch.arange(half, dtype=torch.float64) / half))
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    one, two = rows[..., :half].double(), rows[..., half:].double()
    return torch.cat([one * cos - two * sin, one * sin + two * cos], dim=-1).to(rows.dtype)


def paths_are_chains(setting: Setting, recipe: Recipe) -> None:
    """With rotary embedding at `layout.positions`, a root-to-node path equals the same tokens run as a chain."""
    dtype = dtype_of(setting, recipe)
    case = make(setting, recipe, dtype, source="parents", batch=1, padding=False, empties=False, uniform=True, tail=0)
    (tree,), (prefix,) = case.parents, case.prefixes
    plain_q, plain_k, values = case.q.cpu().contiguous(), case.content_k[0], case.content_v[0]

    def run(base: Case, rows: list[int]) -> tuple[Case, Any]:
        positions = base.layout().positions.cpu()
        keys = torch.cat([plain_k[:prefix], plain_k[[prefix + r for r in rows]]])
        at = torch.cat([torch.arange(prefix), positions])
        vals = torch.cat([values[:prefix], values[[prefix + r for r in rows]]])
        q = rotate(plain_q[rows], positions).to(base.device)
        full = base.with_content(q=q, k=(rotate(keys, at),), v=(vals,))
        return full, setting.plain(full)

    whole, result = run(case, list(range(len(tree))))
    assert_right(whole, result)
    leaf = random.Random(recipe["seed"]).randrange(len(tree))
    path = []
    while leaf >= 0:
        path.insert(0, leaf)
        leaf = tree[leaf]
    chain = setting.build(
        [list(range(-1, len(path) - 1))], [prefix], heads=(case.num_qo_heads, case.num_kv_heads),
        head_dim=case.head_dim, dtype=dtype, placement=case.placement, sm_scale=case.sm_scale,
    )  # fmt: skip
    alone, straight = run(chain, path)
    assert_right(alone, straight, "as a chain")
    verdict = judge(alone, result.out[path], result.lse[path])
    assert verdict.ok, f"path {path}: {verdict.message}"


def mask_forms_agree(setting: Setting, recipe: Recipe) -> None:
    """Full, tree-only, packed, bias and word forms of a mask give one layout and one output."""
    case = make(setting, recipe, dtype_of(setting, recipe), source="parents", empties=False, tail=0)
    layout = case.layout()
    full = torch.zeros(int(layout.mask_indptr[-1]), dtype=torch.bool, device=setting.device)
    layout.full_mask(out=full)
    packed_total = sum(-(-q * (p + q) // 8) for q, p in zip(case.q_lens, case.prefixes, strict=True))
    forms = {
        "full": full,
        "tree": layout.tree_mask(total=sum(q * q for q in case.q_lens)),
        "packed": layout.packed_mask(total=packed_total)[0],
        "bias": layout.bias(total=full.numel()),
        "words": layout.mask_words,
    }
    common = {"prefix_lens": layout.prefix_lens, "num_nodes": layout.num_nodes, "max_q_len": layout.max_q_len}
    widths: dict[str, Any] = {"qo_indptr": layout.qo_indptr, "total_q": layout.total_q}
    if layout.q_len is not None:
        widths = {"q_len": layout.q_len}
    first = setting.plain(case, layout=layout)
    assert_right(case, first)
    for form, mask in forms.items():
        other = treeattn.TreeLayout.from_mask(mask, form=form, **common, **widths)  # type: ignore[arg-type]
        assert torch.equal(other.mask_words, layout.mask_words), form
        assert torch.equal(other.positions, layout.positions), form
        if form in ("full", "words"):
            result = setting.plain(case, layout=other)
            assert same_bits(first.out, result.out), form
            assert same_bits(first.lse, result.lse), form


def fresh_equals_cached(setting: Setting, recipe: Recipe) -> None:
    """The nodes' K and V as arguments, at slots, or behind the prefix: the same within the budget."""
    case = make(setting, recipe, dtype_of(setting, recipe))
    for tree_kv in ("logical", "slots", "fresh"):
        place = dataclasses.replace(case.placement, tree_kv=tree_kv)
        assert_right(case, setting.plain(rebuild(case, placement=place)), tree_kv)


def words_describe_the_tree(setting: Setting, recipe: Recipe) -> None:
    """Bits round-trip; depth = popcount - 1; a row = its parent's row + itself; padding is zero."""
    case = make(setting, recipe, dtype_of(setting, recipe), source="parents")
    layout = case.layout()
    words = layout.mask_words.cpu()
    depths, positions = layout.depths.cpu().tolist(), layout.positions.cpu().tolist()
    columns = torch.arange(words.shape[1] * 64)
    bits = (words[:, columns // 64] >> (columns % 64)) & 1 == 1
    for b, tree in enumerate(case.parents):
        start, prefix = case.starts[b], case.prefixes[b] if case.nodes[b] else max(case.prefixes[b], 0)
        width, nodes = case.q_lens[b], case.nodes[b]
        block = bits[start : start + width]
        assert torch.equal(block[:, :width], case.tree_masks[b])
        assert not block[:, width:].any()
        for row in range(width):
            depth = int(block[row].sum()) - 1 if row < nodes else 0
            assert depths[start + row] == depth
            assert positions[start + row] == prefix + depth
            if row < nodes and tree[row] >= 0:
                own = block[tree[row]].clone()
                own[row] = True
                assert torch.equal(block[row], own)
    assert not bits[case.starts[-1] :].any()


PROPERTIES: dict[str, Callable[[Setting, Recipe], None]] = {
    body.__name__: body
    for body in (
        matches_float64, relabelling_permutes_output, chain_is_causal, unseen_keys_change_nothing,
        neighbours_change_nothing, pages_change_nothing, splits_change_nothing, update_is_eager, paths_are_chains,
        mask_forms_agree, fresh_equals_cached, words_describe_the_tree,
    )
}  # fmt: skip


def inf_and_nan_of_v_come_through(case: Case, backend: str) -> None:
    """In the dims where they are, and no others: one request with a prefix of 300, an FP8 cache of head dim 128."""
    (content,) = case.content_v
    has_inf = case.options.kv_dtype == torch.float8_e5m2
    odd = content.clone()
    odd[5, :, 3] = odd[70, :, 77] = odd[299, :, 127] = float("nan")
    if has_inf:
        odd[130, :, 5], odd[9, :, 64] = float("inf"), float("-inf")
    outs = []
    for one in (case, case.with_content(v=(odd,))):
        step = treeattn.plan(one.layout(), one.kv(), **group_of(one), backend=backend)
        out = treeattn.tree_attention(one.q, one.k_cache, one.v_cache, step, **call_of(one))
        assert isinstance(out, torch.Tensor)
        outs.append(out)
    plain, out = outs
    others = torch.ones(128, dtype=torch.bool, device=out.device)
    others[[3, 5, 64, 77, 127]] = False
    assert out[..., [3, 77, 127]].isnan().all()
    assert torch.equal(out[..., others], plain[..., others])
    if has_inf:
        assert (out[..., 5] == float("inf")).all()
        assert (out[..., 64] == float("-inf")).all()
