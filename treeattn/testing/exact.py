"""See every mask bit exactly: with q = 0 each visible key weighs the same, with one-hot V each key has its own column.

An output row is then its mask row divided by its count of visible keys, in any dtype. Where a request has more keys
than the head has dims, several calls take a window of keys each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .cases import Case

__all__ = ["expected_weights", "probe", "seen_by", "wrong_weight"]


def probe(case: Case, run: Callable[[Case], Tensor]) -> list[Tensor]:
    """Weights that each row gives to each key.

    Parameters
    ----------
    case : Case
        Trees and placement; its numbers are replaced.
    run : callable
        Gets a case, returns its out `[total_q, num_qo_heads, head_dim]`.

    Returns
    -------
    list of Tensor
        Per request, float64 `[num_qo_heads, q_len, prefix_len + nodes]`.
    """
    dim, heads = case.head_dim, case.num_qo_heads
    keys = [content.shape[0] for content in case.content_v]
    weights = [torch.zeros(heads, q_len, n, dtype=torch.float64) for q_len, n in zip(case.q_lens, keys, strict=True)]
    for start in range(0, max((*keys, 1)), dim):
        values = []
        for content in case.content_v:
            hot = torch.zeros_like(content)
            window = torch.arange(start, max(start, min(start + dim, content.shape[0])))
            hot[window, :, window - start] = 1
            values.append(hot)
        blind = case.q.clone()
        for first, nodes in zip(case.starts, case.nodes, strict=False):
            blind[first : first + nodes] = 0
        out = run(case.with_content(q=blind, v=tuple(values))).cpu().double()
        for b, n in enumerate(keys):
            stop = min(start + dim, n)
            if stop > start:
                rows = out[case.starts[b] : case.starts[b + 1], :, : stop - start]
                weights[b][:, :, start:stop] = rows.transpose(0, 1)
    return weights


def expected_weights(case: Case, request: int) -> Tensor:
    """`[q_len, prefix_len + nodes]`: 1 / count at each visible key."""
    seen = case.visible(request).double()
    return seen / seen.sum(1, keepdim=True).clamp(min=1)


def seen_by(weights: Tensor) -> Tensor:
    """Bool `[q_len, keys]`: the mask that an attention call really used, from one request's weights."""
    return (weights != 0).any(0)


def wrong_weight(case: Case, run: Callable[[Case], Tensor]) -> str | None:
    """The first row whose weights are not its mask row / count, or None."""
    eps = torch.finfo(case.dtype).eps
    for request, weights in enumerate(probe(case, run)):
        want = expected_weights(case, request)
        # parts of a row are weighed by their log-sum-exp, log2 of their count, whose rounding grows with it;
        # a wrong bit changes a weight by 1 / count
        count = (want > 0).sum(1, keepdim=True).clamp(min=1)
        slack = 2 * eps * (1 + torch.log2(count.double()))
        wrong = ~((weights - want).abs() <= slack * want)
        if bool(wrong.any()):
            head, row, key = torch.nonzero(wrong)[0].tolist()
            got = float(weights[head, row, key])
            prefix = case.prefixes[request]
            which = f"prefix token {key}" if key < prefix else f"node {key - prefix}"
            return (
                f"request {request} row {row} head {head} gives {which} the weight {got:.6g}, must be "
                f"{float(want[row, key]):.6g} (row sees {int((want[row] > 0).sum())} keys)"
            )
    return None
