"""The decoding loops: draft trees verified by treeattn, and transformers' plain greedy to compare with.

One pass of the tree loop serves all requests, each with its own tree, prefix and length:
draft (host) → layout → plan → model → accept → compaction of the cache → accepted tokens back to the host.
Everything between the drafts and the accepted tokens is :func:`verify_pass`; on a GPU it is captured once
into a CUDA graph and replayed (:class:`StaticVerifier`), otherwise it runs as it is on the requests still
alive (:class:`EagerVerifier`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

import treeattn
from treeattn import TreeLayout
from treeattn.adapters import transformers as adapter
from treeattn.demo.drafts import DraftTree, NextTokens, best_first_tree, ngram_tree

Drafter = Literal["ngram", "best-first"]
DRAFTERS: tuple[Drafter, ...] = ("ngram", "best-first")
TOP_K = 8
Mode = Literal["eager", "static", "graph"]
Progress = Callable[[str], None]


class PassOutput(NamedTuple):
    """What one pass leaves, on the model's device.

    Attributes
    ----------
    rows, lens, bonus : Tensor
        As :func:`treeattn.accept` gives them.
    top_tokens, top_log_probs : Tensor
        ``[total_q, TOP_K]``: the model's best next tokens after each row.
    """

    rows: Tensor
    lens: Tensor
    bonus: Tensor
    top_tokens: Tensor
    top_log_probs: Tensor


@dataclass(frozen=True)
class RequestResult:
    """Host copy of one request's part of a pass."""

    rows: list[int]
    bonus: int
    top_tokens: list[list[int]]
    top_log_probs: list[list[float]]


def verify_pass(
    model: Any, tokens: Tensor, layout: TreeLayout, step: Any, cache: adapter.PagedCache, block_table: Tensor
) -> PassOutput:
    """Run the model over every tree, accept, move accepted K and V into place; no host reads.

    Parameters
    ----------
    model
        Set to the adapter's attention.
    tokens : Tensor
        int64 ``[total_q]``.
    layout : TreeLayout
    step
        A plan or group for this layout.
    cache : PagedCache
    block_table : Tensor
        Table rows of the layout's requests.
    """
    context = adapter.TreeContext(step, cache, cache.node_slots(layout, block_table))
    logits = adapter.verify(model, tokens, layout, context).float()
    accepted = treeattn.accept(layout, tokens, logits.argmax(dim=-1))
    treeattn.compact_kv_(cache.tensors, cache.kv(block_table), layout, accepted.rows, accepted.lens)
    top = logits.topk(min(TOP_K, logits.shape[-1]), dim=-1)
    return PassOutput(
        accepted.rows,
        accepted.lens,
        accepted.bonus,
        top.indices,
        top.values - logits.logsumexp(dim=-1, keepdim=True),
    )


class Verifier(Protocol):
    """One verify pass over the trees of some requests, from host values to host values."""

    def __call__(
        self, trees: Sequence[DraftTree], requests: Sequence[int], prefix_lens: Sequence[int]
    ) -> list[RequestResult]:
        """Verify one tree for each request; `prefix_lens` are the tokens it has in the cache."""
        ...


def _padded(trees: Sequence[DraftTree], q_len: int) -> tuple[list[list[int]], list[list[int]]]:
    tokens = [tree.tokens + [0] * (q_len - tree.num_nodes) for tree in trees]
    parents = [tree.parents + [-1] * (q_len - tree.num_nodes) for tree in trees]
    return tokens, parents


def _to_host(output: PassOutput, counts: Sequence[tuple[int, int, int]]) -> list[RequestResult]:
    rows, lens, bonus = output.rows.tolist(), output.lens.tolist(), output.bonus.tolist()
    top_tokens, top_log_probs = output.top_tokens.tolist(), output.top_log_probs.tolist()
    return [
        RequestResult(
            rows=rows[slot][: lens[slot]],
            bonus=bonus[slot],
            top_tokens=top_tokens[start : start + nodes],
            top_log_probs=top_log_probs[start : start + nodes],
        )
        for slot, start, nodes in counts
    ]


class EagerVerifier:
    """Builds layout and plan afresh for each pass, over the live requests and the widest tree among them.

    Parameters
    ----------
    model, cache
        A transformers model and the cache that holds its requests.
    backend : str
        Backend of :func:`treeattn.plan`.
    """

    def __init__(self, model: Any, cache: adapter.PagedCache, backend: str = "auto") -> None:
        self.model, self.cache, self.backend = model, cache, backend

    def __call__(
        self, trees: Sequence[DraftTree], requests: Sequence[int], prefix_lens: Sequence[int]
    ) -> list[RequestResult]:
        """Verify one tree for each request (:class:`Verifier`)."""
        config, cache = self.model.config, self.cache
        device = cache.block_table.device
        q_len = max(tree.num_nodes for tree in trees)
        tokens, parents = _padded(trees, q_len)
        layout = TreeLayout.from_parents(
            torch.tensor(parents, dtype=torch.int32, device=device),
            torch.tensor(prefix_lens, dtype=torch.int32, device=device),
            num_nodes=torch.tensor([tree.num_nodes for tree in trees], dtype=torch.int32, device=device),
        )
        table = cache.block_table[torch.tensor(requests, device=device)]
        step = treeattn.plan(
            layout,
            cache.kv(table),
            config.num_attention_heads,
            config.num_key_value_heads,
            cache.keys[0].shape[-1],
            dtype=cache.keys[0].dtype,
            backend=self.backend,
        )
        flat = torch.tensor(tokens, dtype=torch.int64, device=device).flatten()
        output = verify_pass(self.model, flat, layout, step, cache, table)
        layout.check()
        return _to_host(output, [(i, i * q_len, tree.num_nodes) for i, tree in enumerate(trees)])


class StaticVerifier:
    """Passes over static buffers, on CUDA as one captured graph; a finished request is an empty slot.

    Parameters
    ----------
    model, cache
        As for :class:`EagerVerifier`; request r of the cache is slot r of the buffers.
    q_len : int
        Rows a request, the root included; smaller trees are padded.
    backend : str
    capture : bool
        Capture layout, plan, model, accept and compaction into one CUDA graph and replay it.
    """

    def __init__(
        self, model: Any, cache: adapter.PagedCache, q_len: int, backend: str = "auto", capture: bool = True
    ) -> None:
        config = model.config
        device = cache.block_table.device
        batch = cache.block_table.shape[0]
        self.q_len = q_len
        self._tokens = torch.zeros(batch * q_len, dtype=torch.int64, device=device)
        self._parents = torch.full((batch, q_len), -1, dtype=torch.int32, device=device)
        self._lens = torch.zeros(2, batch, dtype=torch.int32, device=device)
        buffers = treeattn.StaticBuffers(batch, q_len, device=device)
        group = buffers.add_group(
            config.num_attention_heads,
            config.num_key_value_heads,
            cache.keys[0].shape[-1],
            dtype=cache.keys[0].dtype,
            kv=cache.kv(),
            backend=backend,
        )
        self._buffers = buffers

        def step() -> PassOutput:
            buffers.update_(parents=self._parents, prefix_lens=self._lens[0], num_nodes=self._lens[1])
            return verify_pass(model, self._tokens, buffers.layout, group, cache, cache.block_table)

        self._step = step
        self._graph: torch.cuda.CUDAGraph | None = None
        if not capture:
            return
        # Every slot is empty while warming up and capturing, so the cache keeps what prefill wrote.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._output = step()
        self._graph = graph

    def __call__(
        self, trees: Sequence[DraftTree], requests: Sequence[int], prefix_lens: Sequence[int]
    ) -> list[RequestResult]:
        """Verify one tree for each request (:class:`Verifier`)."""
        batch = self._parents.shape[0]
        tokens, parents = _padded(trees, self.q_len)
        all_tokens = [[0] * self.q_len for _ in range(batch)]
        all_parents = [[-1] * self.q_len for _ in range(batch)]
        lens = [[0] * batch, [0] * batch]
        for i, request in enumerate(requests):
            all_tokens[request], all_parents[request] = tokens[i], parents[i]
            lens[0][request], lens[1][request] = prefix_lens[i], trees[i].num_nodes
        self._tokens.copy_(torch.tensor(all_tokens).flatten())
        self._parents.copy_(torch.tensor(all_parents, dtype=torch.int32))
        self._lens.copy_(torch.tensor(lens, dtype=torch.int32))
        if self._graph is None:
            self._output = self._step()
        else:
            self._graph.replay()
        results = _to_host(
            self._output, [(r, r * self.q_len, t.num_nodes) for r, t in zip(requests, trees, strict=True)]
        )
        self._buffers.check()
        return results


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


@dataclass(frozen=True)
class Greedy:
    """Plain greedy output of one prompt.

    Attributes
    ----------
    tokens : list of int
    margins : list of float
        Logit of each token minus the next best logit.
    """

    tokens: list[int]
    margins: list[float]


@torch.inference_mode()
def greedy_decode(model: Any, prompt: Sequence[int], max_new_tokens: int, eos: int | None = None) -> Greedy:
    """Decode one prompt with transformers' ``generate``, its own attention and its own cache."""
    from transformers import GenerationConfig

    ids = torch.tensor([list(prompt)], dtype=torch.int64, device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            eos_token_id=eos,
            pad_token_id=0 if eos is None else eos,
            return_dict_in_generate=True,
            output_logits=True,
        ),
    )
    top = torch.stack([logits[0].float().topk(2).values for logits in output.logits])
    return Greedy(output.sequences[0, len(prompt) :].tolist(), (top[:, 0] - top[:, 1]).tolist())


@dataclass(frozen=True)
class Divergence:
    """First place where a tree run's output is not plain greedy's.

    Attributes
    ----------
    prompt, index : int
        Which output, and which of its new tokens.
    expected, got : int or None
        The two tokens; None where an output had ended.
    margin : float or None
        Plain greedy's top-2 logit margin there. A margin near the rounding of the dtype is a tie that any
        change of shape can turn; it counts as a divergence all the same.
    """

    prompt: int
    index: int
    expected: int | None
    got: int | None
    margin: float | None


def first_divergence(greedy: Sequence[Greedy], outputs: Sequence[Sequence[int]]) -> Divergence | None:
    """Compare token for token, lengths included; None when all are equal."""
    found = []
    for prompt, (plain, output) in enumerate(zip(greedy, outputs, strict=True)):
        for index in range(max(len(plain.tokens), len(output))):
            expected = plain.tokens[index] if index < len(plain.tokens) else None
            got = output[index] if index < len(output) else None
            if expected != got:
                margin = plain.margins[index] if expected is not None else None
                found.append(Divergence(prompt, index, expected, got, margin))
                break
    return min(found, key=lambda d: d.index, default=None)
