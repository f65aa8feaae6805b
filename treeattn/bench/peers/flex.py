"""FlexAttention over dense K and V: the mask as a table that `mask_mod` reads, its block mask made once a step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..calls import Calls
from ..inputs import Inputs
from ..workloads import Workload

__all__ = ["unsuited", "variants"]


def unsuited(work: Workload) -> str | None:
    """Why a workload is not for it, or None."""
    if work.fp8:
        return "it takes no FP8 cache beside a q of 16 bits"
    if work.shared_kv or work.dim_v != work.head_dim:
        return "it is given K and V of one head dim here"
    if work.nodes is not None:
        return "what it gives for rows that see nothing is not documented"
    uniform = work.q_lens is None and work.prefixes is None
    return None if uniform else "it takes no requests of different lengths here"


def variants(inputs: Inputs) -> list[Calls]:
    """Compiled on a GPU; on a CPU its plain form, to check the mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    work = inputs.workload
    length, q_len, stride = inputs.lengths[0], work.q_len, inputs.blocks[0] * 128
    seen = torch.stack([inputs.visible(request) for request in range(work.batch)])

    def visible(request: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return seen[request, row, key]

    if inputs.device.type == "cuda":
        # a kernel a shape: after eight of them the compiler would give up and run the plain form without a word
        torch.compiler.reset()
    block_mask = create_block_mask(visible, work.batch, None, q_len, length, device=str(inputs.device))
    attention = torch.compile(flex_attention, dynamic=False) if inputs.device.type == "cuda" else flex_attention
    q = inputs.q.view(work.batch, q_len, work.qo_heads, work.head_dim).transpose(1, 2)

    def call(k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        def attend() -> Tensor:
            out = attention(q, k, v, block_mask=block_mask, scale=inputs.sm_scale, enable_gqa=work.group > 1)
            rows: Tensor = out.transpose(1, 2).reshape(work.total_q, work.qo_heads, work.dim_v)
            return rows

        return attend

    def dense(pool: Tensor) -> Tensor:
        return pool.view(work.batch, stride, work.kv_heads, pool.shape[-1])[:, :length].transpose(1, 2)

    calls = [call(dense(k), dense(v)) for k, v in zip(inputs.pool_k, inputs.pool_v, strict=True)]
    return [Calls(calls, "tree", None, 0)]
