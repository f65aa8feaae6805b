"""Options of attention on a GPU, every backend and dtype; see option_bodies."""

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

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="module", params=("triton", "torch", "auto"))
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(request.param, torch.device("cuda"), DTYPES)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combination(name: str, setting: Setting) -> None:
    run_options(setting, name, seeds=2)


@pytest.mark.parametrize("seed", range(6))
def test_parts_merge(seed: int, setting: Setting) -> None:
    merged_parts_are_the_whole(setting, seed)


@pytest.mark.parametrize("seed", range(6))
def test_general_masks(seed: int, setting: Setting) -> None:
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
