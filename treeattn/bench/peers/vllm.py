"""vLLM's Triton attention with `qq_bias`: under the causal mask, one bias among the nodes for a whole launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..calls import Calls, empty_out
from ..inputs import Inputs
from ..workloads import Workload
from .common import import_first, import_problem, unsuited_16_bit

__all__ = ["missing", "unsuited", "variants"]

MODULES = "vllm.v1.attention.ops.triton_unified_attention", "vllm.attention.ops.triton_unified_attention"
"""Where it is since 0.20, and where it was before."""
SMALLEST_PAGE = 16


def missing() -> str | None:
    """Why vLLM's kernel cannot be used, or None."""
    return import_problem(*MODULES)


def unsuited(work: Workload) -> str | None:
    """Why a workload is not for it, or None."""
    if work.batch > 1:
        return "it takes one tree for all requests, and those of a workload differ"
    if work.kv_layout != "NHD" or work.page_size < SMALLEST_PAGE:
        return f"it takes pages of {SMALLEST_PAGE} tokens or more in NHD"
    return unsuited_16_bit(work)


def variants(inputs: Inputs) -> list[Calls]:
    """The page size of the workload."""
    unified_attention = import_first(*MODULES).unified_attention
    work, device = inputs.workload, inputs.device
    paged = inputs.paged(work.page_size)
    # contiguous: the kernel takes stride(0) for the number of columns
    bias = torch.zeros(work.q_len, work.q_len, dtype=torch.float32, device=device)
    bias.masked_fill_(~inputs.tree_rows(0), float("-inf"))
    lengths = torch.tensor(inputs.lengths, dtype=torch.int32, device=device)
    scale = torch.ones(work.batch, work.kv_heads, dtype=torch.float32, device=device)
    out = empty_out(inputs)

    def call(k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        def attend() -> Tensor:
            unified_attention(
                q=inputs.q, k=k, v=v, out=out, cu_seqlens_q=inputs.qo_indptr, max_seqlen_q=work.q_len,
                seqused_k=lengths, max_seqlen_k=inputs.lengths[0], softmax_scale=inputs.sm_scale, causal=True,
                window_size=(-1, -1), block_table=paged.table, softcap=0.0, q_descale=None, k_descale=scale,
                v_descale=scale, qq_bias=bias,
            )  # fmt: skip
            return out

        return attend

    return [Calls([call(k, v) for k, v in zip(paged.k, paged.v, strict=True)], "tree", paged, work.page_size, out)]
