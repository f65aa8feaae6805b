"""Tree attention as its definition reads: the truth that every other backend is compared with.

For each request ``b``, node ``i`` and query head ``h``, over the keys ``j`` that node ``i`` sees (every prefix token
and the nodes whose bit is set in its mask row)::

    score_j = sm_scale * <q_i, k_j>      lse_i = log sum_j exp(score_j)      out_i = sum_j exp(score_j - lse_i) * v_j

A row without a visible key has ``out = 0`` and ``lse = -inf``. Invisible keys are never read, so their content cannot
matter. Arithmetic is float64 for float64 tensors, else float32. One Python iteration per node: not fast, and on a GPU
it reads lengths on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .kv import gather_cache

if TYPE_CHECKING:
    from .plan import Step


def visible_nodes(mask_words: Tensor, num_nodes: int) -> Tensor:
    """Unpack mask rows ``[rows, words]`` int64 into bool ``[rows, num_nodes]``."""
    node = torch.arange(num_nodes, device=mask_words.device)
    return (mask_words[:, node // 64] >> (node % 64)) & 1 == 1


def request_kv(
    step: Step, cache: Tensor, fresh: Tensor | None, request: int, first_row: int, prefix_len: int, num_nodes: int
) -> Tensor:
    """K or V of a request, prefix then nodes: ``[prefix_len + num_nodes, kv_heads, head_dim]``."""
    kv, layout = step.kv, step.kv_layout
    slots = kv.slots_of(request, torch.arange(prefix_len, device=kv.device))
    if fresh is not None:
        nodes = fresh[first_row : first_row + num_nodes]
    else:
        nodes = gather_cache(cache, kv.node_slots(request, first_row, prefix_len, num_nodes), kv.page_size, layout)
    return torch.cat([gather_cache(cache, slots, kv.page_size, layout), nodes])


def tree_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: Step,
    *,
    k_tree: Tensor | None,
    v_tree: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    sm_scale: float,
) -> None:
    """Write ``out`` and ``lse``; arguments as in :func:`treeattn.tree_attention`, already checked."""
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = step.num_qo_heads // step.num_kv_heads
    for request, first_row, q_len, prefix_len, num_nodes in step.request_lengths(q.shape[0]):
        rows = slice(first_row, first_row + q_len)
        out[rows] = 0
        if lse is not None:
            lse[rows] = -torch.inf
        if num_nodes == 0:
            continue
        k = request_kv(step, k_cache, k_tree, request, first_row, prefix_len, num_nodes)
        v = request_kv(step, v_cache, v_tree, request, first_row, prefix_len, num_nodes)
        sees = visible_nodes(step.layout.mask_words[first_row : first_row + num_nodes], num_nodes)
        sees = torch.cat([sees.new_ones(num_nodes, prefix_len), sees], dim=1)
        for node in range(num_nodes):
            if not sees[node].any():
                continue
            keys = k[sees[node]].to(compute).repeat_interleave(group, dim=1)
            values = v[sees[node]].to(compute).repeat_interleave(group, dim=1)
            scores = sm_scale * torch.einsum("hd,khd->hk", q[first_row + node].to(compute), keys)
            total = torch.logsumexp(scores, dim=1)
            weights = torch.exp(scores - total[:, None])
            out[first_row + node] = torch.einsum("hk,khd->hd", weights, values).to(out.dtype)
            if lse is not None:
                lse[first_row + node] = total.to(lse.dtype)
