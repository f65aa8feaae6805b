"""FlashInfer's prefill over a paged cache with a custom mask: a bit for every row and key, the prefix included.

`plan` packs the mask, once a step. It is handed over unpacked: with a mask that is packed already, version 0.7.4 takes
the offsets of requests in elements, which is right for a batch of one only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..calls import Calls, empty_out
from ..inputs import Inputs
from ..workloads import Workload
from .common import import_problem

__all__ = ["missing", "unsuited", "variants"]

WORKSPACE_BYTES = 512 * 2**20
"""FlashInfer recommends 128 MB; its split parts of (64, 65) with 64 heads need more."""


def missing() -> str | None:
    """Why `flashinfer` cannot be used, or None."""
    return import_problem("flashinfer")


def unsuited(work: Workload) -> str | None:
    """Why a workload is not for it, or None. A window is a part of the mask."""
    if work.shared_kv or work.dim_v != work.head_dim:
        return "it is given K and V of one head dim here"
    if work.dtype == "float32":
        return "it takes 16 bits only"
    return "what it gives for rows that see nothing is not documented" if work.nodes is not None else None


def variants(inputs: Inputs) -> list[Calls]:
    """The page size and order of the workload."""
    import flashinfer as library

    work = inputs.workload
    paged = inputs.paged(work.page_size, work.kv_layout)
    pages = [-(-length // work.page_size) for length in inputs.lengths]
    indptr = torch.tensor([0, *pages], dtype=torch.int32).cumsum(0).int().to(inputs.device)
    indices = torch.cat([paged.table[request, :count] for request, count in enumerate(pages)])
    last = [length - (count - 1) * work.page_size for length, count in zip(inputs.lengths, pages, strict=True)]
    mask = torch.cat([inputs.visible(request).flatten() for request in range(work.batch)])
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.device)
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout=work.kv_layout)
    wrapper.plan(
        inputs.qo_indptr, indptr, indices, torch.tensor(last, dtype=torch.int32, device=inputs.device),
        work.qo_heads, work.kv_heads, work.head_dim, work.page_size,
        custom_mask=mask, sm_scale=inputs.sm_scale, q_data_type=inputs.dtype, kv_data_type=inputs.kv_dtype,
    )  # fmt: skip
    scales: dict[str, Any] = {}
    if inputs.k_scale is not None and inputs.v_scale is not None:
        scales = {"k_scale": float(inputs.k_scale), "v_scale": float(inputs.v_scale)}
    out = empty_out(inputs)

    def call(k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        def attend() -> Tensor:
            wrapper.run(inputs.q, (k, v), out=out, **scales)
            return out

        return attend

    return [Calls([call(k, v) for k, v in zip(paged.k, paged.v, strict=True)], "tree", paged, work.page_size, out)]
