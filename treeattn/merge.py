"""Combine attention states: what two runs over disjoint keys found, as one run over all of them would have."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    sinks: Tensor | None = None,
    sinks_in_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, from attention over each.

    For each row and head, with ``total = log(exp(lse_a) + exp(lse_b))``::

        out = exp(lse_a - total) * out_a + exp(lse_b - total) * out_b

    A state without keys has lse -inf and changes nothing, whatever its out holds; two of them give 0 and -inf.

    Parameters
    ----------
    out_a, out_b : Tensor
        ``[rows, heads, head_dim]``, from runs without sinks.
    lse_a, lse_b : Tensor
        float32 ``[rows, heads]``, natural log.
    sinks : Tensor, optional
        ``[heads]``: sinks to apply now, once; the runs must have been made without.
    sinks_in_lse : bool
        The merged lse counts the sinks; by default it does not, so that it can be merged again.
    out, lse : Tensor, optional
        Where to write; may be one of the inputs.

    Returns
    -------
    out, lse : Tensor
        `out` in the dtype of `out_a`.
    """
    for name, state, state_lse in (("a", out_a, lse_a), ("b", out_b, lse_b)):
        if state.ndim != 3 or state.shape != out_a.shape:
            raise ValueError(f"out_{name}: expected [rows, heads, head_dim] as out_a {list(out_a.shape)}, "
                             f"got {list(state.shape)}")  # fmt: skip
        if state_lse.shape != state.shape[:2]:
            raise ValueError(f"lse_{name}: expected [rows, heads] {list(state.shape[:2])}, got {list(state_lse.shape)}")
        if state_lse.dtype != torch.float32:
            raise TypeError(f"lse_{name} must be float32, got {state_lse.dtype}")
    if not out_a.dtype.is_floating_point:
        raise TypeError(f"out_a must be floating point, got {out_a.dtype}")
    for name, tensor, like in (("out", out, out_a), ("lse", lse, lse_a)):
        if tensor is not None and tensor.shape != like.shape:
            raise ValueError(f"{name}: expected {list(like.shape)}, got {list(tensor.shape)}")
        if tensor is not None and tensor.dtype != like.dtype:
            raise TypeError(f"{name} must be {like.dtype}, got {tensor.dtype}")
    if sinks is not None and not sinks.dtype.is_floating_point:
        raise TypeError(f"sinks must be floating point, got {sinks.dtype}")
    if sinks is not None and sinks.shape != (out_a.shape[1],):
        raise ValueError(f"sinks: expected [heads] = [{out_a.shape[1]}], got {list(sinks.shape)}")
    if sinks_in_lse and sinks is None:
        raise ValueError("sinks_in_lse needs sinks")
    visible = torch.logaddexp(lse_a, lse_b)
    total = visible
    if sinks is not None:
        total = torch.logaddexp(visible, sinks.to(torch.float32)).masked_fill(visible == -torch.inf, -torch.inf)
    base = total.masked_fill(total == -torch.inf, 0)
    compute = torch.promote_types(out_a.dtype, torch.float32)

    def share(state: Tensor, state_lse: Tensor) -> Tensor:
        weight = torch.exp(state_lse - base)[..., None].to(compute)
        return torch.where(weight > 0, state.to(compute) * weight, torch.zeros((), dtype=compute, device=state.device))

    mixed = (share(out_a, lse_a) + share(out_b, lse_b)).to(out_a.dtype)
    said = total if sinks_in_lse else visible
    out = mixed if out is None else out.copy_(mixed)
    lse = said if lse is None else lse.copy_(said)
    return out, lse
