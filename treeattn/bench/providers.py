"""Who computes: each provider turns the inputs of a workload into calls over rotating copies of K and V.

A provider makes everything that a serving step makes once (layout, plan, scheduler metadata) before the calls; a call
is what a layer does. `fa3_causal` takes no tree: it is what a causal chain of the same size costs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor

from ..config import KernelConfig
from .inputs import Inputs, Paged

__all__ = ["PROVIDERS", "Calls", "tree_calls", "unavailable"]


@dataclass(frozen=True)
class Calls:
    """What a provider offers for a workload.

    Attributes
    ----------
    calls : list of callable
        One per copy of K and V; each returns its out `[total_q, heads, head_dim]`.
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
        "dtype": inputs.dtype,
        "kv_layout": work.kv_layout,
    }


def tree_calls(inputs: Inputs, backend: str, config: KernelConfig | None = None) -> Calls:
    """Calls of a treeattn backend; `config` in place of what ``select_config`` returns, for tuning."""
    import treeattn

    work = inputs.workload
    paged = inputs.paged(work.page_size, work.kv_layout)
    args = inputs.layout_args()
    if not inputs.uniform:
        args["max_q_len"] = max(work.all_q_lens)
    layout = treeattn.TreeLayout.from_parents(**args)
    step = treeattn.plan(
        layout, kv_of(paged, inputs.lengths), backend=backend, config=config, **group_args(inputs)
    )
    out = torch.empty_like(inputs.q)

    def call(k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        return lambda: treeattn.tree_attention(inputs.q, k, v, step, out=out)

    calls = [call(k, v) for k, v in zip(paged.k, paged.v, strict=True)]
    return Calls(calls, "tree", paged, work.page_size, out)


def _treeattn(backend: str) -> Callable[[Inputs], list[Calls]]:
    return lambda inputs: [tree_calls(inputs, backend)]


def _sdpa(inputs: Inputs) -> list[Calls]:
    work = inputs.workload
    if not inputs.uniform or work.prefixes is not None:
        return []
    length, q_len = inputs.lengths[0], work.q_len
    stride = inputs.blocks[0] * 128
    group = work.qo_heads // work.kv_heads
    mask = torch.ones(work.batch, 1, group, q_len, length, dtype=torch.bool, device=inputs.device)
    for request in range(work.batch):
        mask[request, 0, :, :, work.prefix :] = inputs.tree_rows(request)
    mask = mask.view(work.batch, 1, group * q_len, length)
    # the query heads of a KV head as rows; what torch 2.11 picks by itself for a mask on Hopper was wrong either way
    backends = [torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION, torch.nn.attention.SDPBackend.MATH]
    by_head = (work.batch, q_len, work.kv_heads, group, work.head_dim)
    q = inputs.q.view(by_head).permute(0, 2, 3, 1, 4).reshape(work.batch, work.kv_heads, group * q_len, work.head_dim)

    def dense(pool: Tensor) -> Tensor:
        return pool.view(work.batch, stride, work.kv_heads, work.head_dim)[:, :length].transpose(1, 2)

    def call(k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        def attend() -> Tensor:
            with torch.nn.attention.sdpa_kernel(backends):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            rows = out.view(work.batch, work.kv_heads, group, q_len, work.head_dim)
            return rows.permute(0, 3, 1, 2, 4).reshape(inputs.q.shape)

        return attend

    calls = [call(dense(k), dense(v)) for k, v in zip(inputs.pool_k, inputs.pool_v, strict=True)]
    return [Calls(calls, "tree", None, 0)]


def _fa3_causal(inputs: Inputs) -> list[Calls]:
    """Page 64 and page 128, both with their scheduler metadata made ahead."""
    import flash_attn_interface

    work = inputs.workload
    if inputs.dtype == torch.float32 or work.nodes is not None:
        return []
    lengths = torch.tensor(inputs.lengths, dtype=torch.int32, device=inputs.device)
    q_len = max(work.all_q_lens)
    variants = []
    for page_size in (64, 128):
        paged = inputs.paged(page_size)
        meta = flash_attn_interface.get_scheduler_metadata(
            work.batch, q_len, max(inputs.lengths), work.qo_heads, work.kv_heads, work.head_dim, lengths, inputs.dtype,
            cu_seqlens_q=inputs.qo_indptr, page_size=page_size, causal=True,
        )  # fmt: skip
        calls = [_fa3_call(inputs, paged, k, v, lengths, q_len, meta) for k, v in zip(paged.k, paged.v, strict=True)]
        variants.append(Calls(calls, "causal", paged, page_size))
    return variants


def _fa3_call(
    inputs: Inputs, paged: Paged, k: Tensor, v: Tensor, lengths: Tensor, q_len: int, meta: Any
) -> Callable[[], Tensor]:
    scale = inputs.workload.head_dim**-0.5

    def call() -> Tensor:
        out: Tensor = torch.ops.flash_attn_3.fwd(
            inputs.q, k, v, cu_seqlens_q=inputs.qo_indptr, seqused_k=lengths, max_seqlen_q=q_len,
            page_table=paged.table, softmax_scale=scale, is_causal=True, num_splits=0, scheduler_metadata=meta,
        )[0]  # fmt: skip
        return out

    return call


PROVIDERS: dict[str, Callable[[Inputs], list[Calls]]] = {
    "treeattn_triton": _treeattn("triton"),
    "treeattn_torch": _treeattn("torch"),
    "treeattn_reference": _treeattn("reference"),
    "sdpa": _sdpa,
    "fa3_causal": _fa3_causal,
}
"""Name to a function from inputs to variants (the best of which counts); no variant: the workload is not for it."""


def unavailable(provider: str, device: torch.device) -> str | None:
    """Why a provider cannot run here, or None."""
    if provider not in PROVIDERS:
        return f"no such provider; there are {', '.join(PROVIDERS)}"
    if provider.startswith("treeattn_"):
        import treeattn

        return treeattn.available_backends(device).get(provider.removeprefix("treeattn_"), "no such backend")
    if provider == "fa3_causal":
        if device.type != "cuda":
            return "FlashAttention-3 needs a Hopper GPU"
        if importlib.util.find_spec("flash_attn_interface") is None:
            return "flash_attn_interface does not import (docs: peers.sh puts it on PYTHONPATH)"
    return None
