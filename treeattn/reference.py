"""Tree attention as its definition reads: the truth that every other backend is compared with.

For each request ``b``, node ``i`` and query head ``h``, over the keys ``j`` that node ``i`` sees (the tokens of the
prefix and the nodes whose bit is set in its mask row, inside its window)::

    score_j = cap(sm_scale * <q_i, k_j>)        cap(x) = x, or c * tanh(x / c) with a soft cap c
    lse_i   = log sum_j exp(score_j)
    total_i = log(exp(lse_i) + exp(sink_h))     with sinks, else lse_i
    out_i   = sum_j exp(score_j - total_i) * v_j

A row without a visible key has ``out = 0`` and ``lse = -inf``. Invisible keys are never read, so their content cannot
matter. Arithmetic is float64 for float64 tensors, else float32. One Python iteration per node: not fast, and on a GPU
it reads lengths on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .kv import gather_cache
from .scoring import Scale, Scoring

if TYPE_CHECKING:
    from .plan import Step


def visible_nodes(mask_words: Tensor, num_nodes: int) -> Tensor:
    """Unpack mask rows ``[rows, words]`` int64 into bool ``[rows, num_nodes]``."""
    node = torch.arange(num_nodes, device=mask_words.device)
    return (mask_words[:, node // 64] >> (node % 64)) & 1 == 1


def visible_keys(step: Step, request: int, first_row: int, prefix_len: int, num_nodes: int) -> Tensor:
    """What each node of a request sees: bool ``[num_nodes, prefix_len + num_nodes]``."""
    rows = slice(first_row, first_row + num_nodes)
    sees = visible_nodes(step.layout.mask_words[rows], num_nodes)
    prefix = torch.arange(prefix_len, device=sees.device)
    in_cache = prefix >= step.kv.start_of(request, prefix_len)
    sees = torch.cat([in_cache.expand(num_nodes, prefix_len), sees], dim=1)
    if step.window_left >= 0:
        at = step.layout.positions[rows]
        sees &= torch.cat([prefix, at]) >= (at - step.window_left)[:, None]
    if step.part == "prefix":
        sees[:, prefix_len:] = False
    elif step.part == "tree":
        sees[:, :prefix_len] = False
    return sees


def request_kv(
    step: Step, cache: Tensor, fresh: Tensor | None, request: int, first_row: int, prefix_len: int, keys: Tensor,
    scale: Scale, compute: torch.dtype,
) -> Tensor:  # fmt: skip
    """K or V of some keys of a request, in the dtype `compute`: ``[len(keys), kv_heads, dim]``.

    Parameters
    ----------
    keys : Tensor
        Ascending; below `prefix_len` tokens of the prefix, from there on nodes. No other key is read.
    scale : float or Tensor
        On what comes from the cache.
    """
    kv = step.kv
    prefix, nodes = keys[keys < prefix_len], keys[keys >= prefix_len] - prefix_len
    slots = kv.slots_of(request, prefix - kv.start_of(request, prefix_len))
    if fresh is None:
        own = kv.node_slots(request, first_row, prefix_len, int(nodes[-1]) + 1)[nodes] if len(nodes) else nodes
        slots = torch.cat([slots, own])
    # FP8 has no indexing: its bytes have
    held = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    cached = gather_cache(held, slots, kv.page_size, step.kv_layout).view(cache.dtype).to(compute)
    if isinstance(scale, Tensor):
        cached = cached * scale.to(compute).reshape(-1, 1)
    elif scale != 1.0:
        cached = cached * scale
    return cached if fresh is None else torch.cat([cached, fresh[first_row + nodes].to(compute)])


def tree_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    step: Step,
    scoring: Scoring,
    *,
    k_tree: Tensor | None,
    v_tree: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Write ``out`` and ``lse``; arguments as in :func:`treeattn.tree_attention`, already checked."""
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    for request, first_row, q_len, prefix_len, num_nodes in step.request_lengths(q.shape[0]):
        rows = slice(first_row, first_row + q_len)
        out[rows] = 0
        if lse is not None:
            lse[rows] = -torch.inf
        if num_nodes == 0:
            continue
        sees = visible_keys(step, request, first_row, prefix_len, num_nodes)
        read = sees.any(dim=0).nonzero()[:, 0]
        where = (request, first_row, prefix_len, read)
        k = request_kv(step, k_cache, k_tree, *where, scoring.k_scale, compute)
        if v_cache is None:
            v = k[..., : step.head_dim_v]
        else:
            v = request_kv(step, v_cache, v_tree, *where, scoring.v_scale, compute)
        for node in range(num_nodes):
            mine = sees[node, read]
            if not mine.any():
                continue
            keys, values = (t[mine].repeat_interleave(step.group, dim=1) for t in (k, v))
            scores = scoring.sm_scale * torch.einsum("hd,khd->hk", q[first_row + node].to(compute), keys)
            if scoring.logits_soft_cap > 0:
                scores = scoring.logits_soft_cap * torch.tanh(scores / scoring.logits_soft_cap)
            visible = torch.logsumexp(scores, dim=1)
            total = visible if scoring.sinks is None else torch.logaddexp(visible, scoring.sinks.to(compute))
            weights = torch.exp(scores - total[:, None])
            out[first_row + node] = torch.einsum("hk,khd->hd", weights, values).to(out.dtype)
            if lse is not None:
                lse[first_row + node] = (total if scoring.sinks_in_lse else visible).to(lse.dtype)
