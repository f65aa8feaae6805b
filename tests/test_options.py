"""Options of attention, each alone and with others, on the reference and torch backends; see option_bodies."""

from __future__ import annotations

import pytest
import torch
from option_bodies import (
    COMBINATIONS,
    general_masks_take_the_callers_positions,
    hybrid_groups_share_one_layout,
    merged_parts_are_the_whole,
    rows_do_not_depend_on_the_batch,
    run_options,
)
from settings_of_tests import Setting

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
