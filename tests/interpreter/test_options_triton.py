"""Options of attention on the Triton backend in its interpreter (float32 and float16); see option_bodies."""

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

from treeattn.testing import Options

SETTING = Setting("triton", torch.device("cpu"), (torch.float32, torch.float16), small=True)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combination(name: str) -> None:
    run_options(SETTING, name, seeds=1)


@pytest.mark.parametrize("seed", range(4))
def test_parts_merge(seed: int) -> None:
    merged_parts_are_the_whole(SETTING, seed)


@pytest.mark.parametrize("seed", range(4))
def test_general_masks(seed: int) -> None:
    general_masks_take_the_callers_positions(SETTING, seed)


def test_hybrid_groups() -> None:
    hybrid_groups_share_one_layout(SETTING)


@pytest.mark.parametrize("seed", range(4))
def test_batch_invariance(seed: int) -> None:
    rows_do_not_depend_on_the_batch(SETTING, seed)
    rows_do_not_depend_on_the_batch(SETTING, seed, Options(window_left=20, sinks=True))


@pytest.mark.parametrize("body", EDGES, ids=lambda body: body.__name__)
def test_edge(body: Callable[[Setting], None]) -> None:
    body(SETTING)
