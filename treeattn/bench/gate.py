"""No number without a right answer: compare a provider's output with float64 on the very inputs that are timed.

An FP8 cache counts as what its bytes stand for: their rounding is not the provider's. Sampled requests and KV heads
keep it under a second on a GPU; the whole output has to be written and finite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .calls import Calls
from .inputs import Inputs, Paged

__all__ = ["LIMITS", "GateError", "gate"]

LIMITS = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest ``||out - ref|| / ||ref||``; what each dtype costs stays under a half of it."""


class GateError(RuntimeError):
    """A provider's output is wrong; the message says where."""


def _keys(
    inputs: Inputs, paged: Paged | None, pool: Tensor, caches: list[Tensor] | None, request: int, head: int
) -> Tensor:
    """float64 `[prefix + q_len, head_dim]` of the first copy, an FP8 cache's scale not yet applied."""
    # FP8 has no indexing: its bytes have
    held = torch.uint8 if inputs.workload.fp8 else inputs.kv_dtype
    length = inputs.lengths[request]
    if paged is None or caches is None:
        start = sum(inputs.blocks[:request]) * 128
        return pool[0, start : start + length, head].double()
    positions = torch.arange(length, device=inputs.device)
    pages = paged.table[request, positions // paged.page_size].long()
    offsets = positions % paged.page_size
    cache = caches[0].view(held)
    found = cache[pages, head, offsets] if paged.kv_layout == "HND" else cache[pages, offsets, head]
    return found.view(inputs.kv_dtype).double()


def _reference(inputs: Inputs, calls: Calls, request: int, head: int) -> Tensor:
    """float64 `[q_len, group, head_dim_v]` of one request and KV head."""
    work = inputs.workload
    rows = slice(inputs.starts[request], inputs.starts[request + 1])
    group = work.group
    q = inputs.q[rows, head * group : (head + 1) * group].double()
    paged = calls.paged
    k = _keys(inputs, paged, inputs.pool_k, paged.k if paged else None, request, head)
    v = _keys(inputs, paged, inputs.pool_v, paged.v if paged else None, request, head)
    if inputs.k_scale is not None and inputs.v_scale is not None:
        k, v = k * inputs.k_scale.double(), v * inputs.v_scale.double()
    seen = inputs.visible(request, calls.mask)
    scores = torch.einsum("ihd,kd->ihk", q, k) * inputs.sm_scale
    out = torch.softmax(scores.masked_fill(~seen[:, None], float("-inf")), dim=2) @ v
    out[work.all_nodes[request] :] = 0
    return out


def gate(name: str, inputs: Inputs, calls: Calls) -> float:
    """Run the first call and judge it.

    Returns
    -------
    float
        ``||out - ref|| / ||ref||`` over the sampled requests and heads.

    Raises
    ------
    GateError
        If a value is missing or not finite, or the error is above `LIMITS`.
    """
    work = inputs.workload
    if calls.out is not None:
        calls.out.fill_(float("nan"))
    out = calls.calls[0]()
    if not bool(torch.isfinite(out).all()):
        row, head, dim = torch.nonzero(~torch.isfinite(out))[0].tolist()
        raise GateError(f"{name} on {work.name()}: out[{row}, {head}, {dim}] is {float(out[row, head, dim])}")
    requests = sorted({0, work.batch // 2, work.batch - 1})
    heads = sorted({0, work.kv_heads - 1})
    group = work.group
    error = norm = 0.0
    worst = (0.0, "")
    for request in requests:
        rows = slice(inputs.starts[request], inputs.starts[request + 1])
        for head in heads:
            want = _reference(inputs, calls, request, head)
            got = out[rows, head * group : (head + 1) * group].double()
            off, size = float((got - want).square().sum()), float(want.square().sum())
            error, norm = error + off, norm + size
            if off / max(size, 1e-300) >= worst[0]:
                row = int((got - want).abs().amax(dim=(1, 2)).argmax())
                worst = (off / max(size, 1e-300), f"request {request} KV head {head}, worst row {row}")
    rel = math.sqrt(error / max(norm, 1e-300))
    limit = LIMITS[inputs.dtype]
    if not (rel <= limit and worst[0] ** 0.5 <= 2 * limit):
        raise GateError(
            f"{name} on {work.name()} ({calls.mask} mask): relative error {rel:.2e}, limit {limit:.0e}; {worst[1]}: "
            f"{worst[0] ** 0.5:.2e}. No time is reported for a wrong result"
        )
    return rel
