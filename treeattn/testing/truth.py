"""Attention in float64 from a case's content alone, and the same maths in plain PyTorch in the case's own dtype.

The truth never reads an address, a table, a mask word or a kernel: it gets each request's keys in logical order and a
dense boolean mask. `plain` is the yardstick of `tolerance`: it says how much error the dtype itself costs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .cases import Case

__all__ = ["Truth", "attend", "plain", "truth"]


class Truth(NamedTuple):
    """`out [total_q, num_qo_heads, head_dim]` and `lse [total_q, num_qo_heads]`, on the CPU."""

    out: Tensor
    lse: Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    sm_scale: float,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    sinks_in_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Masked attention of one request.

    Parameters
    ----------
    q : Tensor
        `[rows, num_qo_heads, head_dim]`; the maths is done in its dtype.
    k, v : Tensor
        `[keys, num_kv_heads, head_dim]` in the same dtype.
    mask : Tensor
        Bool `[rows, keys]`.
    sm_scale : float
    soft_cap : float
        0 for none.
    sinks : Tensor, optional
        `[num_qo_heads]`.
    sinks_in_lse : bool

    Returns
    -------
    out, lse
        0 and -inf where a row sees nothing; rows and keys that nobody uses are never touched.
    """
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype)
    lse = torch.full(q.shape[:2], -math.inf, dtype=q.dtype)
    rows, keys = mask.any(1), mask.any(0)
    if not bool(rows.any()):
        return out, lse
    # the rows of all query heads of a KV head meet its keys at once: a million keys are not copied for each head
    heads_q = q[rows].transpose(0, 1).reshape(k.shape[1], -1, q.shape[2])
    heads_k, heads_v = k[keys].transpose(0, 1), v[keys].transpose(0, 1)
    scores = (heads_q @ heads_k.transpose(1, 2)).reshape(q.shape[1], -1, heads_k.shape[1]) * sm_scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~mask[rows][:, keys], -math.inf)
    if sinks is not None:
        # a key of its own whose value is 0
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        with_sink = torch.cat([scores, column], dim=2)
        weights = torch.softmax(with_sink, dim=2)[..., :-1]
    else:
        with_sink = scores
        weights = torch.softmax(scores, dim=2)
    heads_out = weights.reshape(k.shape[1], -1, weights.shape[2]) @ heads_v
    out[rows] = heads_out.reshape(q.shape[1], -1, v.shape[2]).transpose(0, 1)
    lse[rows] = torch.logsumexp(with_sink if sinks_in_lse else scores, dim=2).transpose(0, 1)
    return out, lse


def _per_request(case: Case, dtype: torch.dtype) -> Truth:
    out = torch.zeros(case.total_q, case.num_qo_heads, case.head_dim_v, dtype=dtype)
    lse = torch.full((case.total_q, case.num_qo_heads), -math.inf, dtype=dtype)
    scale = case.head_dim**-0.5 if case.sm_scale is None else case.sm_scale
    q = case.q.cpu().to(dtype)
    for request, q_len in enumerate(case.q_lens):
        rows = slice(case.starts[request], case.starts[request] + q_len)
        k, v = case.content_k[request].to(dtype), case.content_v[request].to(dtype)
        out[rows], lse[rows] = attend(
            q[rows], k, v, case.visible(request), scale, case.options.logits_soft_cap,
            None if case.sinks is None else case.sinks.cpu(), case.options.sinks_in_lse,
        )  # fmt: skip
    return Truth(out, lse)


def truth(case: Case) -> Truth:
    """Out and lse of a case in float64; rows past the last request hold 0 and -inf."""
    return _per_request(case, torch.float64)


def plain(case: Case) -> Truth:
    """The same maths in plain PyTorch: out in the case's dtype throughout, lse in float32."""
    out = _per_request(case, case.dtype).out
    lse = _per_request(case, torch.float32).lse
    return Truth(out.double(), lse.double())
