"""Faults from the field on a GPU, every backend and dtype; see fault_bodies."""

from __future__ import annotations

import pytest
import torch
from fault_bodies import ADVERSARIAL_NAMES, FAULTS, adversarial
from settings_of_tests import Setting

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="module", params=("triton", "torch"))
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(request.param, torch.device("cuda"), DTYPES)


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str, setting: Setting) -> None:
    FAULTS[name](setting)


@pytest.mark.parametrize("name", ADVERSARIAL_NAMES)
def test_adversarial(name: str, setting: Setting) -> None:
    adversarial(setting, name)
