"""Faults from the field on the Triton backend in its interpreter; see fault_bodies."""

from __future__ import annotations

import pytest
import torch
from fault_bodies import ADVERSARIAL_NAMES, FAULTS, adversarial
from settings_of_tests import Setting

SETTING = Setting("triton", torch.device("cpu"), (torch.float32, torch.float16), small=True)
# One dtype each: the value of these cases is in their masks and addresses.
ONE_DTYPE = Setting("triton", torch.device("cpu"), (torch.float16,), small=True)


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str) -> None:
    FAULTS[name](SETTING)


@pytest.mark.parametrize("name", ADVERSARIAL_NAMES)
def test_adversarial(name: str) -> None:
    adversarial(ONE_DTYPE, name)
