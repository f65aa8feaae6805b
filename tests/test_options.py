"""Options of attention, each alone and with others, on the reference and torch backends; see option_bodies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from option_bodies import (
    COMBINATIONS,
    EDGES,
    general_masks_take_the_callers_positions,
    hybrid_groups_share_one_layout,
    merged_parts_are_the_whole,
    rows_do_not_depend_on_the_batch,
    run_options,
)
from settings_of_tests import Setting

import treeattn
from treeattn.testing import Options

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="module", params=("torch", "reference"))
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(request.param, torch.device("cpu"), DTYPES, small=request.param == "reference")


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combination(setting: Setting, name: str) -> None:
    run_options(setting, name)


@pytest.mark.parametrize("seed", range(4))
def test_parts_merge(setting: Setting, seed: int) -> None:
    merged_parts_are_the_whole(setting, seed)


@pytest.mark.parametrize("seed", range(6))
def test_general_masks(setting: Setting, seed: int) -> None:
    general_masks_take_the_callers_positions(setting, seed)


def test_hybrid_groups(setting: Setting) -> None:
    hybrid_groups_share_one_layout(setting)


@pytest.mark.parametrize("seed", range(4))
def test_batch_invariance(setting: Setting, seed: int) -> None:
    rows_do_not_depend_on_the_batch(setting, seed)
    rows_do_not_depend_on_the_batch(setting, seed, Options(window_left=20, sinks=True))


@pytest.mark.parametrize("body", EDGES, ids=lambda body: body.__name__)
def test_edge(body: Callable[[Setting], None], setting: Setting) -> None:
    body(setting)


def test_scattered_sinks_and_scales_are_refused() -> None:
    layout = treeattn.TreeLayout.chain(torch.tensor([3]), 1)
    kv = treeattn.PagedKV(block_table=torch.arange(4, dtype=torch.int32)[None])
    step = treeattn.plan(layout, kv, 2, 2, 16, dtype=torch.float32, kv_dtype=torch.float8_e4m3fn)
    q, cache = torch.zeros(1, 2, 16), torch.zeros(4, 2, 16).to(torch.float8_e4m3fn)
    column = torch.ones(2, 2)[:, 0]
    for name in ("sinks", "k_scale", "v_scale"):
        with pytest.raises(ValueError, match=f"{name} must be contiguous, its stride is 2"):
            treeattn.tree_attention(q, cache, cache, step, **{name: column})
    nan = float("nan")
    refused = {"logits_soft_cap": (float("inf"), nan), "sm_scale": (nan, 1e39, -1e39), "k_scale": (nan, 1e39)}
    for name, value in [(name, value) for name, values in refused.items() for value in values]:
        with pytest.raises(ValueError, match=name):
            treeattn.tree_attention(q, cache, cache, step, **{name: value})
    with pytest.raises(TypeError, match="k_scale must be a float or a float32 tensor, got list"):
        treeattn.tree_attention(q, cache, cache, step, k_scale=[2.0])
    with pytest.raises(TypeError, match="window_left must be an int"):
        treeattn.plan(layout, kv, 2, 2, 16, window_left=None)
    for name in ("sm_scale", "logits_soft_cap"):
        with pytest.raises(TypeError, match=f"{name} must be a float, got a tensor"):
            treeattn.tree_attention(q, cache, cache, step, **{name: torch.tensor(0.5)})
    with pytest.raises(TypeError, match=r"num_kv_heads must be an int, got 2\.0"):
        treeattn.plan(layout, kv, 2, 2.0, 16)
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype, got 'float32'"):
        treeattn.plan(layout, kv, 2, 2, 16, dtype="float32")
    with pytest.raises(TypeError, match=r"page_size must be an int, got 1\.5"):
        treeattn.PagedKV(block_table=kv.block_table, page_size=1.5)


def test_merge_checks_before_it_writes() -> None:
    out, lse = torch.zeros(3, 2, 8), torch.zeros(3, 2)
    kept = torch.full_like(out, 7.0)
    with pytest.raises(ValueError, match=r"lse: expected \[3, 2\], got \[3, 1\]"):
        treeattn.merge(out, lse, out, lse, out=kept, lse=torch.zeros(3, 1))
    assert (kept == 7).all()
    with pytest.raises(TypeError, match=r"out must be torch\.float32, got torch\.int32"):
        treeattn.merge(out, lse, out, lse, out=torch.zeros(3, 2, 8, dtype=torch.int32))
