"""Combinations of options, and what must hold for each, as functions of a `Setting`; the test modules give it."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
from settings_of_tests import Setting, same_bits

import treeattn
from treeattn.testing import Case, Options, check_case, judge, rebuild, run_plain, truth
from treeattn.testing.run import call_of, group_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WINDOWS = (0, 3, 17, 40)


def _combinations() -> dict[str, tuple[Options, dict[str, Any]]]:
    """Options by name, with what else the case must have. Every legal pair of options occurs."""
    found: dict[str, tuple[Options, dict[str, Any]]] = {
        "soft-cap": (Options(logits_soft_cap=5.0), {"sharpness": 4.0}),
        "sinks": (Options(sinks=True), {}),
        "sinks-in-lse": (Options(sinks=True, sinks_in_lse=True), {}),
        "prefix": (Options(part="prefix"), {}),
        "tree": (Options(part="tree"), {}),
        "unlike-dims": (Options(head_dim_v=32), {"head_dim": 48}),
        "wide-v": (Options(head_dim_v=64), {"head_dim": 40}),
        "mla": (Options(head_dim_v=64, shared_kv=True), {"head_dim": 80, "num_kv_heads": 1}),
        "gpt-oss": (Options(window_left=16, sinks=True), {"group": 8, "head_dim": 64}),
        "gemma": (Options(window_left=33, logits_soft_cap=50.0), {"group": 2, "head_dim": 64}),
    }
    for window in WINDOWS:
        found[f"window-{window}"] = (Options(window_left=window), {})
        found[f"windowed-cache-{window}"] = (Options(window_left=window, windowed=True), {})
    for kind, dtype in (("e4m3", E4M3), ("e5m2", E5M2)):
        for scales in ("none", "float", "tensor", "heads"):
            found[f"{kind}-{scales}"] = (Options(kv_dtype=dtype, scales=scales), {})
    single = {
        "fp8": {"kv_dtype": E4M3, "scales": "heads"},
        "window": {"window_left": 17},
        "windowed": {"window_left": 9, "windowed": True},
        "cap": {"logits_soft_cap": 3.0},
        "sinks": {"sinks": True},
        "prefix": {"part": "prefix"},
        "tree": {"part": "tree"},
        "mla": {"head_dim_v": 64, "shared_kv": True},
        "dims": {"head_dim_v": 24},
    }
    names = list(single)
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            if {first, second} in ({"prefix", "tree"}, {"mla", "dims"}, {"window", "windowed"}):
                continue  # one or the other
            mla = "mla" in (first, second)
            pins = {"head_dim": 80, "num_kv_heads": 1} if mla else {"head_dim": 40}
            found[f"{first}+{second}"] = (Options(**single[first], **single[second]), pins)
    every = {**single["fp8"], **single["windowed"], **single["cap"], **single["sinks"]}
    found["batch-invariant"] = (Options(batch_invariant=True), {})
    found["batch-invariant+window+sinks"] = (Options(batch_invariant=True, window_left=17, sinks=True), {})
    found["batch-invariant+mla"] = (Options(batch_invariant=True, **single["mla"]), {"head_dim": 80, "num_kv_heads": 1})
    found["batch-invariant+prefix"] = (Options(batch_invariant=True, part="prefix"), {})
    found["all"] = (Options(**every, **single["dims"]), {"head_dim": 40})
    found["all-mla"] = (Options(**every, **single["mla"]), {"head_dim": 80, "num_kv_heads": 1})
    return found


COMBINATIONS = _combinations()
TREE_KV = ("logical", "slots", "fresh")
PAGES = (1, 16, 64, 128)


def case_of(setting: Setting, name: str, seed: int) -> Case:
    """A random case with the options; seeds walk through dtypes, page sizes and places of the nodes."""
    options, pins = COMBINATIONS[name]
    dtype = setting.dtypes[seed % len(setting.dtypes)]
    placed = {"tree_kv": TREE_KV[seed % 3], "page_size": PAGES[seed % 4]}
    return setting.case(seed, dtype, **{**placed, "batch": 1 + seed % 3, **pins, "options": options})


def run_options(setting: Setting, name: str, seeds: int = 4) -> None:
    """Plainly and through static buffers as the float64 truth says."""
    first = sum(map(ord, name)) % 1000
    for seed in range(first, first + seeds):
        case = case_of(setting, name, seed)
        for path in ("plain", "static"):
            verdict = check_case(case, setting.backend, path)
            assert verdict.ok, f"{path}: {verdict.message}\n{case.describe()}"


def merged_parts_are_the_whole(setting: Setting, seed: int) -> None:
    """Prefix and tree, run apart and merged, are one run over both; a sink is applied once."""
    dtype = setting.dtypes[seed % len(setting.dtypes)]
    options = Options(window_left=(-1, 12)[seed % 2], logits_soft_cap=(0.0, 4.0)[seed // 2 % 2])
    case = setting.case(seed, dtype, batch=3, options=options)
    states = []
    for part in ("prefix", "tree"):
        alone = dataclasses.replace(case, options=dataclasses.replace(case.options, part=part))
        result = run_plain(alone, setting.backend)
        states += [result.out, result.lse]
    out, lse = treeattn.merge(*states)
    verdict = judge(case, out, lse)
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"
    sinks = torch.randn(case.num_qo_heads, generator=torch.Generator().manual_seed(seed))
    for in_lse in (False, True):
        wanted = dataclasses.replace(
            case, sinks=sinks, options=dataclasses.replace(case.options, sinks=True, sinks_in_lse=in_lse)
        )
        out, lse = treeattn.merge(*states, sinks=sinks, sinks_in_lse=in_lse)
        verdict = judge(wanted, out, lse, truth(wanted))
        assert verdict.ok, f"{verdict.message}\n{case.describe()}"


def general_masks_take_the_callers_positions(setting: Setting, seed: int) -> None:
    """Any bits, above the diagonal too, with windows by positions that no depth explains."""
    dtype = setting.dtypes[seed % len(setting.dtypes)]
    options = Options(window_left=(0, 2, 9, 30)[seed % 4])
    case = setting.case(seed, dtype, batch=2, source="general", padding=False, empties=False, options=options)
    for path in ("plain", "static"):
        verdict = check_case(case, setting.backend, path)
        assert verdict.ok, f"{path}: {verdict.message}\n{case.describe()}"
    moved = rebuild(case, order=[1, 0], seed=seed + 1)
    verdict = check_case(moved, setting.backend)
    assert verdict.ok, f"{verdict.message}\n{moved.describe()}"


def hybrid_groups_share_one_layout(setting: Setting) -> None:
    """Windowed layers with sinks, full layers and latent ones in the same static buffers, over changing steps."""
    dtype = setting.dtypes[0]
    kinds = (
        (Options(window_left=9, sinks=True), {"group": 4, "num_kv_heads": 2, "head_dim": 32}),
        (Options(), {"group": 2, "num_kv_heads": 4, "head_dim": 64}),
        (Options(head_dim_v=32, shared_kv=True), {"group": 8, "num_kv_heads": 1, "head_dim": 48}),
    )
    common: dict[str, Any] = {
        "page_size": 16, "table": "block", "tree_kv": "logical", "source": "parents", "tail": 0, "kv_layout": "NHD",
        "index_dtype": torch.int32, "cache": "paged", "strided_q": False,
    }  # fmt: skip

    def step(seed: int) -> list[Case]:
        drawn = {"batch": 1 + seed % 3, "max_width": 9, "max_prefix": 40, "uniform": True, "num_pages": 40}
        first = setting.case(seed, dtype, **common, **drawn, options=kinds[0][0], **kinds[0][1])
        shape = {"q_lens": first.q_lens, "placement": first.placement, "dtype": dtype, "seed": seed}
        others = [
            setting.build(first.parents, first.prefixes, heads=(pins["group"] * pins["num_kv_heads"],
                          pins["num_kv_heads"]), head_dim=pins["head_dim"], options=options, **shape)
            for options, pins in kinds[1:]
        ]  # fmt: skip
        return [first, *others]

    steps = [step(seed) for seed in range(5)]
    buffers = treeattn.StaticBuffers(3, 9, device=setting.device)
    groups = [
        buffers.add_group(
            kv=treeattn.PagedKV.allocate(3, page_size=16, max_pages_per_request=8, device=setting.device),
            backend=setting.backend, **group_of(case),
        )
        for case in steps[0]
    ]  # fmt: skip
    for cases in steps:
        for group, case in zip(groups, cases, strict=True):
            group.kv.copy_(case.kv())
        arguments = {key: value for key, value in cases[0].layout_args.items() if key != "max_q_len"}
        buffers.update_(**arguments)
        for group, case in zip(groups, cases, strict=True):
            lse = torch.empty(case.total_q, case.num_qo_heads, device=setting.device)
            out = treeattn.tree_attention(case.q, case.k_cache, case.v_cache, group, lse=lse, **call_of(case))
            verdict = judge(case, out, lse)
            assert verdict.ok, f"{verdict.message}\n{case.describe()}"


def rows_do_not_depend_on_the_batch(setting: Setting, seed: int, options: Options | None = None) -> None:
    """Batch-invariant mode: the same bits alone, among others, in another order, and in buffers of any capacity."""
    dtype = setting.dtypes[seed % len(setting.dtypes)]
    options = dataclasses.replace(options or Options(), batch_invariant=True)
    with mock.patch("treeattn.config.INVARIANT_KEYS", 48):
        case = setting.case(seed, dtype, batch=3, tail=0, empties=False, options=options)
        whole = setting.plain(case)
        verdict = judge(case, whole.out, whole.lse)
        assert verdict.ok, f"{verdict.message}\n{case.describe()}"
        for order in ([2, 0, 1], [1], [0, 2]):
            other = rebuild(case, order=order, seed=seed + 7)
            for result in (setting.plain(other), setting.static(other)):
                for index, request in enumerate(order):
                    rows = slice(case.starts[request], case.starts[request + 1])
                    own = slice(other.starts[index], other.starts[index + 1])
                    assert same_bits(whole.out[rows], result.out[own]), case.describe()
                    assert same_bits(whole.lse[rows], result.lse[own]), case.describe()


def attend(setting: Setting, layout: Any, kv: Any, dim: int = 16, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of two heads over K = 0 and V = 1, q = 0: `exp(lse)` counts the visible keys."""
    rows, call = layout.total_q, {key: options.pop(key) for key in ("sinks", "sinks_in_lse") if key in options}
    step = treeattn.plan(layout, kv, 2, 2, dim, dtype=torch.float32, backend=setting.backend, **options)
    zeros = torch.zeros(kv.table.max() + 1, 2, dim, device=setting.device)
    q, lse = torch.zeros(rows, 2, dim, device=setting.device), torch.empty(rows, 2, device=setting.device)
    out = treeattn.tree_attention(q, zeros, torch.ones_like(zeros), step, lse=lse, **call)
    return out.cpu(), lse.cpu()


def slots(setting: Setting, count: int) -> Any:
    return treeattn.PagedKV(block_table=torch.arange(count, dtype=torch.int32, device=setting.device)[None])


def extreme_sinks(setting: Setting) -> None:
    """No sink makes NaN, in a row that sees nothing neither."""
    blind = torch.tensor([1, 0, 0, 0], dtype=torch.uint8, device=setting.device)
    prefix = torch.tensor([0], device=setting.device)
    layout = treeattn.TreeLayout.from_mask(blind, "tree", prefix, q_len=2)
    largest = torch.finfo(torch.float32).max
    for value in (float("-inf"), -largest, -1e30, 1e30, largest, float("inf")):
        sinks = torch.tensor([value, 0.0], device=setting.device)
        out, lse = attend(setting, layout, slots(setting, 8), sinks=sinks)
        assert (out[1] == 0).all()
        assert (lse[1] == float("-inf")).all()
        assert (out[0, 0] == (1.0 if value < 0 else 0.0)).all()
        assert torch.allclose(out[0, 1], torch.full((16,), 0.5))


def far_positions(setting: Setting) -> None:
    """Positions past 32 bits from the prefix keep their order: a row always sees itself."""
    bits = torch.tensor([1, 0, 1, 1], dtype=torch.uint8, device=setting.device)
    prefix = torch.tensor([5], device=setting.device)
    for off, seen in ((0, 5), (2**31 - 3, 1), (2**31, 1), (2**32, 1), (-(2**32), 7)):
        positions = torch.tensor([5, 5 + off], device=setting.device)
        layout = treeattn.TreeLayout.from_mask(bits, "tree", prefix, q_len=2, positions=positions)
        _, lse = attend(setting, layout, slots(setting, 8), window_left=3)
        assert torch.allclose(lse[1].exp(), torch.tensor(float(seen))), off


def parts_need_only_what_they_read(setting: Setting) -> None:
    """The prefix alone needs no room for nodes, nodes at slots of their own none for the prefix."""
    parents = torch.tensor([[-1, 0, 0, 1]], device=setting.device)
    layout = treeattn.TreeLayout.from_parents(parents, torch.tensor([5], device=setting.device))
    _, lse = attend(setting, layout, slots(setting, 5), part="prefix")
    assert torch.allclose(lse.exp(), torch.tensor(5.0))
    own = torch.arange(4, dtype=torch.int32, device=setting.device)
    narrow = treeattn.PagedKV(
        block_table=torch.full((1, 1), 7, dtype=torch.int32, device=setting.device), tree_slots=own
    )
    _, lse = attend(setting, layout, narrow, part="tree")
    assert torch.allclose(lse.exp(), torch.tensor([1.0, 2.0, 2.0, 3.0])[:, None].expand(4, 2))
    layout.check()


def small_value_scales(setting: Setting) -> None:
    """A small v_scale costs no precision: it is not on 16-bit weights. One key takes nearly all weight and has V 0."""
    keys, dim, scale = 60, 16, 1e-4
    layout = treeattn.TreeLayout.chain(torch.tensor([keys - 1], device=setting.device), 1)
    step = treeattn.plan(layout, slots(setting, keys), 1, 1, dim, dtype=torch.float16, kv_dtype=E4M3,
                         backend=setting.backend)  # fmt: skip
    k, v = torch.zeros(keys, 1, dim), torch.linspace(40, 440, keys).view(-1, 1, 1).expand(keys, 1, dim).clone()
    k[0, 0, 0], v[0] = 8, 0
    k, v = k.to(E4M3), v.to(E4M3)
    q = torch.zeros(1, 1, dim, dtype=torch.float16)
    q[0, 0, 0] = 1
    weights = torch.softmax(k.double()[:, 0, 0], 0)
    want = scale * (weights @ v.double()[:, 0])
    got = treeattn.tree_attention(
        q.to(setting.device), k.to(setting.device), v.to(setting.device), step, sm_scale=1.0, v_scale=scale
    )
    assert float((got[0, 0].cpu().double() - want).abs().max() / want.abs().max()) < 2e-3


EDGES = (extreme_sinks, far_positions, parts_need_only_what_they_read, small_value_scales)
