"""Properties of the Triton backend in its interpreter (float32 and float16); see property_bodies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from property_bodies import PROPERTIES, Recipe, recipes
from settings_of_tests import Setting, examples

# Shrinking takes hundreds of runs, which here are minutes; the recipe that failed is printed and repeats.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
SETTING = Setting("triton", torch.device("cpu"), (torch.float32, torch.float16), small=True)


@pytest.mark.parametrize("name", PROPERTIES)
@settings(max_examples=examples(0.12), phases=PHASES)
@given(recipe=recipes(small=True))
def test_triton(name: str, recipe: Recipe) -> None:
    PROPERTIES[name](SETTING, recipe)
