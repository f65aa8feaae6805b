"""Properties of the reference and torch backends on the CPU; see property_bodies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from property_bodies import PROPERTIES, Recipe, recipes
from settings_of_tests import Setting, examples

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The reference backend loops over rows and heads in Python: fewer examples.
SETTINGS = {
    "torch": Setting("torch", torch.device("cpu"), DTYPES),
    "reference": Setting("reference", torch.device("cpu"), DTYPES, small=True),
}


@pytest.mark.parametrize("name", PROPERTIES)
@settings(max_examples=examples(0.8))
@given(recipe=recipes())
def test_torch(name: str, recipe: Recipe) -> None:
    PROPERTIES[name](SETTINGS["torch"], recipe)


@pytest.mark.parametrize("name", PROPERTIES)
@settings(max_examples=examples(0.5))
@given(recipe=recipes(small=True))
def test_reference(name: str, recipe: Recipe) -> None:
    PROPERTIES[name](SETTINGS["reference"], recipe)
