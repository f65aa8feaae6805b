"""The whole path, layout to compaction, inside a model with the Triton backend."""

from __future__ import annotations

import random

import pytest

from treeattn.demo.decode import draft_function, tree_decode
from treeattn.demo.greedy import greedy_decode
from treeattn.demo.model import random_llama


@pytest.mark.interpreter
def test_triton_backend_writes_what_plain_greedy_writes():
    model = random_llama(
        num_layers=2,
        hidden_size=64,
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=61,
        initializer_range=0.2,
        embedding_scale=1.0,
    ).model
    rng = random.Random(0)
    prompts = [[rng.randrange(61) for _ in range(n)] for n in (3, 17)]
    plain = [greedy_decode(model, prompt, 5).tokens for prompt in prompts]
    result = tree_decode(
        model,
        prompts,
        draft_function("best-first"),
        8,
        5,
        mode="static",
        backend="triton",
        page_size=4,
        fill=float("nan"),
    )
    assert result.outputs == plain
    assert result.verifies < 4 * len(prompts), "no draft was accepted, so no path was compacted"
