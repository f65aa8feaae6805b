"""The decoding loop: draft trees for a batch of requests, verified in one pass of the model.

Each request has its own tree, prefix and length:
draft (host) → layout → plan → model → accept → compaction of the cache → accepted tokens back to the host.
What lies between the drafts and the accepted tokens is :mod:`treeattn.demo.verifier`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from treeattn.adapters import transformers as adapter
from treeattn.demo.drafts import DraftTree, NextTokens, best_first_tree, ngram_tree
from treeattn.demo.verifier import TOP_K, EagerVerifier, RequestResult, StaticVerifier, Verifier

Drafter = Literal["ngram", "best-first"]
DRAFTERS: tuple[Drafter, ...] = ("ngram", "best-first")
Mode = Literal["eager", "static", "graph"]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Sample:
    """One verified tree, kept to be shown."""

    request: int
    tree: DraftTree
    accepted: list[int]
    bonus: int

    @property
    def worth(self) -> int:
        """How much there is to see: a long accepted path in a tree with many leaves."""
        return min(len(self.accepted), self.tree.num_nodes - len(set(self.tree.parents)) + 1)


@dataclass
class TreeRun:
    """Outcome of one run of the tree loop.

    Attributes
    ----------
    outputs : list of list of int
        New tokens of each request.
    passes : int
        Forward passes of the model, prefill not counted.
    verifies : int
        Trees verified: a pass counts once for each request still alive.
    verified_tokens : int
        Tokens those trees brought, bonus tokens included, cut at the end of an output.
    seconds, draft_seconds : float
        Time in the loop, and the part of it spent drafting; prefill and capture not counted.
    best : Sample or None
        The verified tree that shows most.
    short_trees : int
        Trees that came short of the budget and were padded.
    """

    outputs: list[list[int]]
    passes: int = 0
    verifies: int = 0
    verified_tokens: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    best: Sample | None = None
    short_trees: int = 0

    @property
    def tokens_per_verify(self) -> float:
        """Mean tokens a verified tree brings; plain decoding has 1."""
        return self.verified_tokens / max(self.verifies, 1)


@dataclass
class _Request:
    index: int
    text: list[int]
    prefix_len: int
    next_tokens: NextTokens
    new: list[int] = field(default_factory=list)
    done: bool = False

    def append(self, tokens: Sequence[int], limit: int, eos: int | None) -> int:
        """Append until `limit` new tokens or `eos`; return how many were kept."""
        kept = 0
        for token in tokens:
            self.text.append(token)
            self.new.append(token)
            kept += 1
            if len(self.new) == limit or token == eos:
                self.done = True
                break
        return kept


DraftFunction = Callable[[Sequence[int], NextTokens, int], DraftTree]


def draft_function(drafter: Drafter) -> DraftFunction:
    """Return ``draft(text, next_tokens, budget)`` of a drafter by name."""
    if drafter == "ngram":
        return lambda text, next_tokens, budget: ngram_tree(text, budget)
    return best_first_tree


def _top(logits: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    logits = logits.float()
    top = logits.topk(min(TOP_K, logits.shape[-1]), dim=-1)
    return top.indices.tolist(), (top.values - logits.logsumexp(dim=-1, keepdim=True)).tolist()


@torch.inference_mode()
def tree_decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    draft: DraftFunction,
    budget: int,
    max_new_tokens: int,
    *,
    eos: int | None = None,
    backend: str = "auto",
    page_size: int = 16,
    seed: int = 0,
    mode: Mode | None = None,
    fill: float = 0.0,
    progress: Progress | None = None,
) -> TreeRun:
    """Decode greedily with draft trees, all prompts in one batch.

    Parameters
    ----------
    model
        Causal language model set to one of transformers' own attentions, which prefills the prompts.
    prompts : sequence of sequences of int
        Token ids, at least one each.
    draft : callable
        ``draft(text, next_tokens, budget)`` (:func:`draft_function`).
    budget : int
        Most draft nodes beside the root; a pass verifies up to ``budget + 1`` rows a request.
    max_new_tokens : int
    eos : int, optional
        Token that ends an output; it is kept.
    backend : str
        treeattn backend.
    page_size, seed, fill
        Of the paged cache; `seed` shuffles its pages.
    mode : str, optional
        ``eager``: layout and plan made for each pass; ``static``: the same buffers for all passes; ``graph``:
        those captured into a CUDA graph. Default: ``graph`` on a CUDA device, else ``eager``.
    progress : callable, optional
        Given a line of text now and then.
    """
    if budget < 0 or max_new_tokens < 1:
        raise ValueError(f"budget must be at least 0 and max_new_tokens at least 1, got {budget} and {max_new_tokens}")
    if not prompts or not all(prompts):
        raise ValueError("every prompt needs at least one token")
    q_len = budget + 1
    capacity = max(len(prompt) for prompt in prompts) + max_new_tokens + q_len
    cache = adapter.PagedCache.for_model(
        model, max_batch=len(prompts), max_tokens=capacity, page_size=page_size, seed=seed, fill=fill
    )
    requests = []
    for index, prompt in enumerate(prompts):
        cache.reserve(index, capacity)
        ids = torch.tensor(prompt, dtype=torch.int64, device=model.device)
        logits = adapter.prefill(model, ids, cache, index)
        request = _Request(index, list(prompt), len(prompt), NextTokens())
        request.next_tokens.update(DraftTree.chain(prompt), *_top(logits), range(len(prompt)))
        request.append([int(logits[-1].argmax())], max_new_tokens, eos)
        requests.append(request)
    run = TreeRun([request.new for request in requests])
    with adapter.attention_implementation(model, adapter.register()):
        mode = mode or ("graph" if model.device.type == "cuda" else "eager")
        verifier: Verifier = (
            EagerVerifier(model, cache, backend)
            if mode == "eager"
            else StaticVerifier(model, cache, q_len, backend, capture=mode == "graph")
        )
        start = time.perf_counter()
        while live := [request for request in requests if not request.done]:
            drafting = time.perf_counter()
            trees = [draft(request.text, request.next_tokens, budget) for request in live]
            run.draft_seconds += time.perf_counter() - drafting
            results = verifier(trees, [r.index for r in live], [r.prefix_len for r in live])
            run.passes += 1
            for request, tree, result in zip(live, trees, results, strict=True):
                _commit(run, request, tree, result, max_new_tokens, eos)
                run.short_trees += tree.num_nodes < q_len
            if progress is not None:
                done = sum(len(request.new) for request in requests)
                progress(f"pass {run.passes}: {done} of at most {len(requests) * max_new_tokens} tokens")
        run.seconds = time.perf_counter() - start
    return run


def _commit(
    run: TreeRun,
    request: _Request,
    tree: DraftTree,
    result: RequestResult,
    max_new_tokens: int,
    eos: int | None,
) -> None:
    path = [tree.tokens[row] for row in result.rows[1:]] + [result.bonus]
    request.prefix_len += len(result.rows)
    request.next_tokens.update(tree, result.top_tokens, result.top_log_probs, result.rows)
    run.verified_tokens += request.append(path, max_new_tokens, eos)
    run.verifies += 1
    sample = Sample(request.index, tree, result.rows, result.bonus)
    if run.best is None or sample.worth > run.best.worth:
        run.best = sample
