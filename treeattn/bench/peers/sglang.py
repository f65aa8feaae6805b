"""SGLang's Triton extend kernel, its path for every tree: prefix from token slots, nodes from fresh K and V.

The mask is the full form with a byte for each row and key. A serving step has the nodes' K and V at hand, so copying
them out of the cache is not timed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..calls import Calls, empty_out
from ..inputs import Inputs
from ..workloads import Workload
from .common import import_first, import_problem

__all__ = ["missing", "unsuited", "variants"]

MODULES = "sglang.kernels.ops.attention.extend_attention", "sglang.srt.layers.attention.triton_ops.extend_attention"
"""Where it is since 0.5.20, and where it was up to 0.5.15."""


def missing() -> str | None:
    """Why SGLang's kernel cannot be used, or None."""
    return import_problem(*MODULES)


def unsuited(work: Workload) -> str | None:
    """Why a workload is not for it, or None."""
    if work.fp8:
        return "it rounds q and the weights to FP8 too"
    if work.nodes is not None:
        return "its padding rows see the prefix"
    return "its window counts rows, not depth" if work.window_left >= 0 else None


def variants(inputs: Inputs) -> list[Calls]:
    """Token slots, whatever the page size: the kernel reads one index a token either way."""
    extend_attention_fwd = import_first(*MODULES).extend_attention_fwd
    work, device = inputs.workload, inputs.device
    paged = inputs.paged(1)
    kv_indptr = torch.tensor([0, *work.all_prefixes], dtype=torch.int32).cumsum(0).int().to(device)
    kv_indices = torch.cat([paged.table[request, :prefix] for request, prefix in enumerate(work.all_prefixes)]).long()
    tree_slots = torch.cat(
        [
            paged.slots(request, torch.arange(prefix, length, device=device))
            for request, (prefix, length) in enumerate(zip(work.all_prefixes, inputs.lengths, strict=True))
        ]
    )
    masks = [inputs.visible(request).flatten() for request in range(work.batch)]
    mask = torch.cat(masks).to(torch.uint8)
    mask_indptr = torch.tensor([0, *map(len, masks)], dtype=torch.int64).cumsum(0).to(device)
    q_len = max(work.all_q_lens)
    out = empty_out(inputs)

    def call(k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        k_pool, v_pool = k[:, 0], v[:, 0]
        k_tree, v_tree = k_pool[tree_slots].contiguous(), v_pool[tree_slots].contiguous()

        def attend() -> Tensor:
            extend_attention_fwd(
                inputs.q, k_tree, v_tree, out, k_pool, v_pool, inputs.qo_indptr, kv_indptr, kv_indices, mask, True,
                mask_indptr, q_len, 1.0, 1.0, sm_scale=inputs.sm_scale,
            )  # fmt: skip
            return out

        return attend

    return [Calls([call(k, v) for k, v in zip(paged.k, paged.v, strict=True)], "tree", paged, 1, out)]
