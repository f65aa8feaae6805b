"""What a provider hands over to be timed, and the pieces of treeattn's own calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..geometry import Geometry
from .inputs import Inputs, Paged
from .workloads import Workload

__all__ = ["Calls", "empty_out", "geometry_of", "group_args", "kv_of", "layer_call"]


@dataclass(frozen=True)
class Calls:
    """What a provider offers for a workload.

    Attributes
    ----------
    calls : list of callable
        One per copy of K and V; each returns its out `[total_q, heads, head_dim_v]`.
    mask : {"tree", "causal"}
        What the gate has to compare with.
    paged : Paged or None
        Addresses that the calls use; None where K and V lie densely, request after request.
    page_size : int
        0 where there are no pages.
    out : Tensor or None
        The caller's out, if the provider writes into one.
    """

    calls: list[Callable[[], Tensor]]
    mask: str
    paged: Paged | None
    page_size: int
    out: Tensor | None = None


def kv_of(paged: Paged, lengths: list[int]) -> Any:
    """The `PagedKV` of a paged input: CSR for page size 1, else a block table."""
    import treeattn

    if paged.page_size > 1:
        return treeattn.PagedKV(block_table=paged.table, page_size=paged.page_size)
    indptr = [0]
    for length in lengths:
        indptr.append(indptr[-1] + length)
    indices = torch.cat([paged.table[request, :length] for request, length in enumerate(lengths)])
    starts = torch.tensor(indptr, dtype=torch.int32, device=paged.table.device)
    return treeattn.PagedKV(kv_indptr=starts, kv_indices=indices, page_size=1)


def group_args(inputs: Inputs) -> dict[str, Any]:
    """Geometry of a workload for `plan` and `add_group`."""
    work = inputs.workload
    return {
        "num_qo_heads": work.qo_heads,
        "num_kv_heads": work.kv_heads,
        "head_dim": work.head_dim,
        "head_dim_v": work.dim_v,
        "dtype": inputs.dtype,
        "kv_dtype": inputs.kv_dtype,
        "kv_layout": work.kv_layout,
        "shared_kv": work.shared_kv,
        "window_left": work.window_left,
    }


def geometry_of(work: Workload) -> Geometry:
    """The same as a :class:`~treeattn.geometry.Geometry`."""
    return Geometry.of(
        work.qo_heads, work.kv_heads, work.head_dim, head_dim_v=work.dim_v, dtype=getattr(torch, work.dtype),
        kv_dtype=getattr(torch, work.cache_dtype), kv_layout=work.kv_layout, shared_kv=work.shared_kv,
        window_left=work.window_left,
    )  # fmt: skip


def empty_out(inputs: Inputs) -> Tensor:
    """An out for `tree_attention`, `[total_q, heads, head_dim_v]`."""
    return inputs.q.new_empty(inputs.workload.total_q, inputs.workload.qo_heads, inputs.workload.dim_v)


def layer_call(inputs: Inputs, step: Any, k: Tensor, v: Tensor, out: Tensor) -> Callable[[], Tensor]:
    """What a layer does with a step: `tree_attention` with the options of the workload."""
    import treeattn

    work = inputs.workload
    options: dict[str, Any] = {}
    if work.fp8:
        options["k_scale"] = inputs.k_scale
    if work.shared_kv:
        return lambda: treeattn.tree_attention(inputs.q, k, None, step, out=out, sm_scale=inputs.sm_scale, **options)
    if work.fp8:
        options["v_scale"] = inputs.v_scale
    return lambda: treeattn.tree_attention(inputs.q, k, v, step, out=out, **options)
