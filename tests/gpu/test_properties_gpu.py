"""Properties of every backend on a GPU, with all dtypes; see property_bodies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from property_bodies import PROPERTIES, Recipe, compiled_recipes
from settings_of_tests import Setting, examples

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("name", PROPERTIES)
@settings(max_examples=examples(0.6))
@given(recipe=compiled_recipes())
def test_triton(name: str, recipe: Recipe) -> None:
    PROPERTIES[name](Setting("triton", torch.device("cuda"), DTYPES), recipe)


@pytest.mark.parametrize("name", PROPERTIES)
@settings(max_examples=examples(0.2))
@given(recipe=compiled_recipes())
def test_torch(name: str, recipe: Recipe) -> None:
    PROPERTIES[name](Setting("torch", torch.device("cuda"), DTYPES), recipe)
