"""Tree attention in vectorised PyTorch: the default on a CPU, where it is fast enough to decode a small model.

One pass per request: K and V are gathered once, the query heads of a KV head are packed into rows, and two matrix
products do the work. Float16 and bfloat16 are computed in float32. Lengths are read on the host, so on a GPU it can be
compared with but not captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .reference import request_kv, visible_keys
from .scoring import Scoring

if TYPE_CHECKING:
    from .plan import Step


def tree_attention_torch(
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
    heads, kv_heads, group = step.num_qo_heads, step.num_kv_heads, step.group
    for request, first_row, q_len, prefix_len, nodes in step.request_lengths(q.shape[0]):
        padding = slice(first_row + nodes, first_row + q_len)
        out[padding] = 0
        if lse is not None:
            lse[padding] = -torch.inf
        if nodes == 0:
            continue
        rows = slice(first_row, first_row + nodes)
        sees = visible_keys(step, request, first_row, prefix_len, nodes)
        read = sees.any(dim=0).nonzero()[:, 0]
        # all keys from the first one that is seen: a row's bits must not depend on what only other rows see
        first = min(int(read[0]) if len(read) else prefix_len, prefix_len)
        sees = sees[:, first:]
        where = (request, first_row, prefix_len, read)
        k = _spread(request_kv(step, k_cache, k_tree, *where, scoring.k_scale, compute), read - first, sees.shape[1])
        if v_cache is None:
            v = k[..., : step.head_dim_v]
        else:
            v = request_kv(step, v_cache, v_tree, *where, scoring.v_scale, compute)
            v = _spread(v, read - first, sees.shape[1])
        # [kv_heads, nodes, group, head_dim], rows of a KV head together
        packed = q[rows].to(compute).view(nodes, kv_heads, group, step.head_dim).transpose(0, 1).contiguous()
        scores = packed.view(kv_heads, nodes * group, step.head_dim) @ k.transpose(1, 2)
        scores = scores.mul_(scoring.sm_scale).view(kv_heads, nodes, group, sees.shape[1])
        if scoring.logits_soft_cap > 0:
            scores = scores.div_(scoring.logits_soft_cap).tanh_().mul_(scoring.logits_soft_cap)
        scores = scores.masked_fill_(~sees[None, :, None, :], -torch.inf)
        visible = torch.logsumexp(scores, dim=-1, keepdim=True)
        total = visible
        if scoring.sinks is not None:
            total = torch.logaddexp(visible, scoring.sinks.to(compute).view(kv_heads, 1, group, 1))
            total = total.masked_fill(visible == -torch.inf, -torch.inf)
        weights = torch.exp(scores - total.masked_fill(total == -torch.inf, 0))
        mixed = weights.view(kv_heads, nodes * group, sees.shape[1]) @ v
        mixed = mixed.view(kv_heads, nodes, group, step.head_dim_v).transpose(0, 1)
        out[rows] = mixed.reshape(nodes, heads, step.head_dim_v).to(out.dtype)
        if lse is not None:
            said = total if scoring.sinks_in_lse else visible
            lse[rows] = said.view(kv_heads, nodes, group).transpose(0, 1).reshape(nodes, heads).to(lse.dtype)


def _spread(dense: Tensor, places: Tensor, keys: int) -> Tensor:
    """Keys at their places among all, by head: ``[kv_heads, keys, dim]``; 0 where no row sees a key."""
    if len(dense) == keys:
        return dense.transpose(0, 1)
    whole = dense.new_zeros(keys, *dense.shape[1:])
    whole[places] = dense
    return whole.transpose(0, 1)
