"""FlashInfer's XQA kernel with a draft mask: bits among the nodes, the prefix seen by all, 16-bit words of 32-bit rows.

A row of a request's mask is ``ceil(q_len / 32) * 2`` words; bit ``j % 16`` of word ``j // 16`` says that it sees node
j. For `parents` = [-1, 0, 0, 2] the rows are 0b0001, 0b0011, 0b0101, 0b1101, each with a word 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..calls import Calls, empty_out
from ..inputs import Inputs
from ..workloads import Workload
from .common import import_problem, unsuited_16_bit

__all__ = ["missing", "packed_rows", "unsuited", "variants"]

PAGE_SIZES = 16, 32, 64, 128
WORKSPACE_BYTES = 512 * 2**20
SEMAPHORES = 2 * 2**20
"""More than requests times KV heads; all zero before the first call, and again behind each."""


def missing() -> str | None:
    """Why `flashinfer` cannot be used, or None."""
    return import_problem("flashinfer")


def unsuited(work: Workload) -> str | None:
    """Why a workload is not for it, or None."""
    if work.page_size not in PAGE_SIZES:
        return f"it takes pages of {', '.join(map(str, PAGE_SIZES))} tokens"
    if work.fp8:
        return "it multiplies in FP8 then, and has one scale for K and V"
    return unsuited_16_bit(work)


def packed_rows(seen: Tensor, q_len: int) -> Tensor:
    """uint16 ``[rows, ceil(q_len / 32) * 2]`` from bool ``[rows, nodes]``."""
    words = (q_len + 31) // 32 * 2
    bits = torch.zeros(len(seen), words * 16, dtype=torch.int32, device=seen.device)
    bits[:, : seen.shape[1]] = seen.int()
    weights = 2 ** torch.arange(16, dtype=torch.int32, device=seen.device)
    return (bits.view(len(seen), words, 16) * weights).sum(dim=2).to(torch.int16).view(torch.uint16)


def variants(inputs: Inputs) -> list[Calls]:
    """The page size and order of the workload; it scales scores by ``head_dim ** -0.5``, as the inputs want."""
    from flashinfer.xqa import xqa

    work, device = inputs.workload, inputs.device
    paged = inputs.paged(work.page_size, work.kv_layout)
    q_len = max(work.all_q_lens)
    lengths = torch.tensor(inputs.lengths, dtype=torch.int32, device=device).view(torch.uint32)[:, None]
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    semaphores = torch.zeros(SEMAPHORES, dtype=torch.int32, device=device).view(torch.uint32)
    mask = torch.cat([packed_rows(inputs.tree_rows(request), q_len) for request in range(work.batch)])
    out = empty_out(inputs)
    options: dict[str, Any] = {"kv_layout": work.kv_layout, "q_seq_len": q_len}
    q, target = inputs.q, out
    if not inputs.uniform:
        options |= {"q_cu_seq_lens": inputs.qo_indptr, "mask": mask}
    else:
        # beams of one; the axis of rows only where there are several
        rows = (work.batch, 1, q_len) if q_len > 1 else (work.batch, 1)
        q, target = (tensor.view(*rows, work.qo_heads, work.head_dim) for tensor in (q, out))
        if q_len > 1:
            options["mask"] = mask.view(work.batch, q_len, -1)

    def call(k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        def attend() -> Tensor:
            xqa(q, k, v, paged.table, lengths, target, workspace, semaphores, work.kv_heads, work.page_size, **options)
            return out

        return attend

    return [Calls([call(k, v) for k, v in zip(paged.k, paged.v, strict=True)], "tree", paged, work.page_size, out)]
