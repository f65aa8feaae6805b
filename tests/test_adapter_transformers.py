"""The transformers adapter against the model's own attention: a tree is as many chains as it has paths."""

from __future__ import annotations

import pytest
import torch

import treeattn
from treeattn.adapters import transformers as adapter
from treeattn.demo.model import random_llama

NAN = float("nan")
PARENTS = [[-1, 0, 0, 1, 2, 2, 3, 3], [-1, 0, 1, 1, 0, 4, -1, -1]]
NUM_NODES = [8, 6]
PROMPT_LENGTHS = [21, 5]


def path_to(parents: list[int], row: int) -> list[int]:
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@pytest.fixture(scope="module")
def model(device: torch.device):
    return random_llama(
        device,
        num_layers=2,
        hidden_size=64,
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=97,
        initializer_range=0.2,
        embedding_scale=1.0,
    ).model


@pytest.fixture(scope="module")
def prompts(device: torch.device):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 97, (n,), generator=generator).to(device) for n in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def tokens(device: torch.device):
    return torch.randint(0, 97, (16,), generator=torch.Generator().manual_seed(2)).to(device)


def step_for(model, cache: adapter.PagedCache, device: torch.device, num_nodes: list[int] = NUM_NODES):
    layout = treeattn.TreeLayout.from_parents(
        torch.tensor(PARENTS, dtype=torch.int32, device=device),
        torch.tensor(PROMPT_LENGTHS, dtype=torch.int32, device=device),
        num_nodes=torch.tensor(num_nodes, dtype=torch.int32, device=device),
    )
    return layout, treeattn.plan(layout, cache.kv(), 4, 2, 16, dtype=torch.float32)


def filled_cache(model, prompts) -> adapter.PagedCache:
    cache = adapter.PagedCache.for_model(model, max_batch=2, max_tokens=32, page_size=4, seed=3, fill=NAN)
    for request, prompt in enumerate(prompts):
        cache.reserve(request, len(prompt) + 8)
        adapter.prefill(model, prompt, cache, request)
    return cache


@pytest.mark.parametrize("shape", ["flat", "batched"])
@torch.inference_mode()
def test_every_path_of_a_tree_has_the_logits_of_its_chain(model, prompts, tokens, device, shape):
    cache = filled_cache(model, prompts)
    layout, step = step_for(model, cache, device)
    context = adapter.TreeContext(step, cache, cache.node_slots(layout))
    with adapter.attention_implementation(model, adapter.register()):
        if shape == "flat":
            logits = adapter.verify(model, tokens, layout, context)
        else:
            output = model(
                input_ids=tokens.view(2, 8),
                position_ids=layout.positions.view(2, 8),
                use_cache=False,
                tree_context=context,
            )
            logits = output.logits.flatten(0, 1)
    assert model.config._attn_implementation == "sdpa"
    for request, prompt in enumerate(prompts):
        for row in range(NUM_NODES[request]):
            rows = [request * 8 + i for i in path_to(PARENTS[request], row)]
            plain = model(input_ids=torch.cat([prompt, tokens[rows]])[None]).logits[0]
            torch.testing.assert_close(logits[rows], plain[len(prompt) :], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_kv_of_nodes_and_only_of_nodes_reaches_the_pages(model, prompts, tokens, device):
    cache = filled_cache(model, prompts)
    layout, step = step_for(model, cache, device)
    slots = cache.node_slots(layout)
    flat = cache.keys[0].flatten(0, 1)
    before = flat.clone()
    with adapter.attention_implementation(model, adapter.register()):
        adapter.verify(model, tokens, layout, adapter.TreeContext(step, cache, slots))
    spare = cache.num_pages * cache.page_size
    nodes = torch.tensor([row < count for count in NUM_NODES for row in range(8)], device=device)
    assert (slots[nodes] < spare).all()
    assert (slots[~nodes] >= spare).all()
    assert slots[nodes].unique().numel() == sum(NUM_NODES)
    unchanged = torch.ones(flat.shape[0], dtype=torch.bool, device=device)
    unchanged[slots] = False
    torch.testing.assert_close(flat[unchanged], before[unchanged], rtol=0, atol=0, equal_nan=True)
    assert flat[slots[nodes]].isfinite().all()
    logical = PROMPT_LENGTHS[1] + 2
    page = int(cache.block_table[1, logical // 4])
    assert int(slots[8 + 2]) == page * 4 + logical % 4


@torch.inference_mode()
def test_prefill_copies_the_models_own_keys_and_values(model, prompts):
    cache = filled_cache(model, prompts)
    output = model(input_ids=prompts[0][None], use_cache=True)
    own = (output["cache"] if "cache" in output else output["past_key_values"]).layers[1]
    position = torch.arange(PROMPT_LENGTHS[0])
    page = cache.block_table[0].cpu().long()[position // 4]
    for pages, kept in ((cache.keys[1], own.keys), (cache.values[1], own.values)):
        torch.testing.assert_close(pages[page, position % 4], kept[0].transpose(0, 1))


def test_pages_are_shuffled_given_back_and_accounted_for():
    cache = adapter.PagedCache(1, 1, 4, num_pages=8, max_batch=2, max_pages=6, page_size=4, seed=0)
    cache.reserve(0, 24)
    assert sorted(cache.block_table[0].tolist()) != cache.block_table[0].tolist()
    with pytest.raises(ValueError, match="request 1 needs 3 more pages, 2 are free"):
        cache.reserve(1, 9)
    with pytest.raises(ValueError, match="request 1 needs 7 pages, its table row holds 6"):
        cache.reserve(1, 25)
    cache.release(0)
    assert cache.block_table[0].tolist() == [8] * 6
    cache.reserve(1, 24)
    with pytest.raises(ValueError, match="pages for 24 tokens, the prompt has 25"):
        cache.write_prompt(1, 0, torch.zeros(25, 1, 4), torch.zeros(25, 1, 4))


@torch.inference_mode()
def test_misuse_is_named(model, prompts, tokens, device):
    cache = filled_cache(model, prompts)
    layout, step = step_for(model, cache, device)
    context = adapter.TreeContext(step, cache, cache.node_slots(layout))
    with adapter.attention_implementation(model, adapter.register()):
        with pytest.raises(ValueError, match="tree_context=TreeContext"):
            model(input_ids=tokens[None])
        with pytest.raises(ValueError, match=r"has 8 rows, tree_context\.slots has 16"):
            model(input_ids=tokens[None, :8], tree_context=context)
        with pytest.raises(NotImplementedError, match="layer 0 asks for sliding_window"):
            model(input_ids=tokens[None], tree_context=context, sliding_window=4)
        mask = torch.ones(1, 1, 16, 16, dtype=torch.bool, device=device)
        with pytest.raises(ValueError, match="attention_mask must be None"):
            model(input_ids=tokens[None], attention_mask=mask, tree_context=context)
