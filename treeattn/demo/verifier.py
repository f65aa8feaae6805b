"""One verify pass over a batch of draft trees, from host values to host values.

Everything between the drafts and the accepted tokens is :func:`verify_pass`. :class:`EagerVerifier` runs it as it is on
the requests still alive, :class:`StaticVerifier` over static buffers, on a GPU captured once into a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import treeattn
from treeattn import TreeLayout, graphs
from treeattn.adapters import transformers as adapter
from treeattn.demo.drafts import DraftTree

TOP_K = 8


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
        self._graph, self._output = graphs.capture(step, device=device)

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
