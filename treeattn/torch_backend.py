"""Tree attention in vectorised PyTorch: the default on a CPU, where it is fast enough to decode a small model.

One pass per request: K and V are gathered once, the query heads of a KV head are packed into rows, and two matrix
products do the work. Float16 and bfloat16 are computed in float32. Lengths are read on the host, so on a GPU it can be
compared with but not captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .reference import request_kv, visible_nodes

if TYPE_CHECKING:
    from .plan import Step


def tree_attention_torch(
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
    heads, kv_heads, head_dim = step.num_qo_heads, step.num_kv_heads, step.head_dim
    group = heads // kv_heads
    for request, first_row, q_len, prefix_len, nodes in step.request_lengths(q.shape[0]):
        padding = slice(first_row + nodes, first_row + q_len)
        out[padding] = 0
        if lse is not None:
            lse[padding] = -torch.inf
        if nodes == 0:
            continue
        rows = slice(first_row, first_row + nodes)
        sees = visible_nodes(step.layout.mask_words[rows], nodes)
        # [kv_heads, keys, head_dim]
        k = request_kv(step, k_cache, k_tree, request, first_row, prefix_len, nodes).transpose(0, 1).to(compute)
        v = request_kv(step, v_cache, v_tree, request, first_row, prefix_len, nodes).transpose(0, 1).to(compute)
        # 0 * NaN is NaN: the value of a node that no row sees must not reach the product
        v[:, prefix_len:] = v[:, prefix_len:].masked_fill(~sees.any(dim=0)[:, None], 0)
        # [kv_heads, nodes, group, head_dim], rows of a KV head together
        packed = q[rows].to(compute).view(nodes, kv_heads, group, head_dim).transpose(0, 1).contiguous()
        scores = packed.view(kv_heads, nodes * group, head_dim) @ k.transpose(1, 2)
        scores = scores.mul_(sm_scale).view(kv_heads, nodes, group, prefix_len + nodes)
        scores[..., prefix_len:].masked_fill_(~sees[None, :, None, :], -torch.inf)
        total = torch.logsumexp(scores, dim=-1, keepdim=True)
        weights = torch.exp(scores - total.masked_fill(total == -torch.inf, 0))
        mixed = weights.view(kv_heads, nodes * group, prefix_len + nodes) @ v
        mixed = mixed.view(kv_heads, nodes, group, head_dim).transpose(0, 1)
        out[rows] = mixed.reshape(nodes, heads, head_dim).to(out.dtype)
        if lse is not None:
            lse[rows] = total.view(kv_heads, nodes, group).transpose(0, 1).reshape(nodes, heads).to(lse.dtype)
