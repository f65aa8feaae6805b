"""Who computes: each provider turns the inputs of a workload into calls over rotating copies of K and V.

A provider makes everything that a serving step makes once (layout, plan, scheduler metadata) before the calls; a call
is what a layer does. `fa3_causal` and `flashmla_causal` take no tree: they are what a causal chain of the same size
costs. Peers that take one are in :mod:`treeattn.bench.peers`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor

from ..capabilities import CAPABILITIES, Asked, missing
from ..config import KernelConfig
from .calls import Calls, empty_out, geometry_of, group_args, kv_of, layer_call
from .inputs import Inputs, Paged
from .peers import PEERS
from .peers.common import import_problem
from .workloads import Workload

__all__ = ["CHAINS", "PROVIDERS", "Calls", "tree_calls", "unavailable", "unsuited", "usual_providers"]

CHAINS = ("fa3_causal", "flashmla_causal")
"""Providers that compute a causal chain of the same size, of GQA and of MLA."""


def tree_calls(inputs: Inputs, backend: str, config: KernelConfig | None = None) -> Calls:
    """Calls of a treeattn backend; `config` in place of what ``select_config`` returns, for tuning."""
    import treeattn

    work = inputs.workload
    paged = inputs.paged(work.page_size, work.kv_layout)
    args = inputs.layout_args()
    if not inputs.uniform:
        args["max_q_len"] = max(work.all_q_lens)
    layout = treeattn.TreeLayout.from_parents(**args)
    step = treeattn.plan(layout, kv_of(paged, inputs.lengths), backend=backend, config=config, **group_args(inputs))
    out = empty_out(inputs)
    calls = [layer_call(inputs, step, k, v, out) for k, v in zip(paged.k, paged.v, strict=True)]
    return Calls(calls, "tree", paged, work.page_size, out)


def _treeattn(backend: str) -> Callable[[Inputs], list[Calls]]:
    return lambda inputs: [tree_calls(inputs, backend)]


def _sdpa(inputs: Inputs) -> list[Calls]:
    work = inputs.workload
    if unsuited("sdpa", work):
        return []
    length, q_len = inputs.lengths[0], work.q_len
    stride = inputs.blocks[0] * 128
    group = work.group
    mask = torch.ones(work.batch, 1, group, q_len, length, dtype=torch.bool, device=inputs.device)
    for request in range(work.batch):
        mask[request, 0] = inputs.visible(request)
    mask = mask.view(work.batch, 1, group * q_len, length)
    # the query heads of a KV head as rows
    by_head = (work.batch, q_len, work.kv_heads, group, work.head_dim)
    q = inputs.q.view(by_head).permute(0, 2, 3, 1, 4).reshape(work.batch, work.kv_heads, group * q_len, work.head_dim)

    def dense(pool: Tensor) -> Tensor:
        return pool.view(work.batch, stride, work.kv_heads, pool.shape[-1])[:, :length].transpose(1, 2)

    def call(k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        def attend() -> Tensor:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            rows = out.view(work.batch, work.kv_heads, group, q_len, work.dim_v)
            return rows.permute(0, 3, 1, 2, 4).reshape(work.total_q, work.qo_heads, work.dim_v)

        return attend

    calls = [call(dense(k), dense(v)) for k, v in zip(inputs.pool_k, inputs.pool_v, strict=True)]
    return [Calls(calls, "tree", None, 0)]


def _fa3_causal(inputs: Inputs) -> list[Calls]:
    """Page 64 and page 128, both with their scheduler metadata made ahead."""
    work = inputs.workload
    if unsuited("fa3_causal", work):
        return []
    import flash_attn_interface

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
    def call() -> Tensor:
        out: Tensor = torch.ops.flash_attn_3.fwd(
            inputs.q, k, v, cu_seqlens_q=inputs.qo_indptr, seqused_k=lengths, max_seqlen_q=q_len,
            page_table=paged.table, softmax_scale=inputs.sm_scale, is_causal=True, num_splits=0,
            scheduler_metadata=meta,
        )[0]  # fmt: skip
        return out

    return call


def _flashmla_causal(inputs: Inputs) -> list[Calls]:
    """Page 64, the only one it takes; its first call makes the scheduler's metadata, which the others reuse."""
    work = inputs.workload
    if unsuited("flashmla_causal", work):
        return []
    import flash_mla

    paged = inputs.paged(64)
    q = inputs.q.view(work.batch, work.q_len, work.qo_heads, work.head_dim)
    lengths = torch.tensor(inputs.lengths, dtype=torch.int32, device=inputs.device)
    meta, _ = flash_mla.get_mla_metadata()

    def call(k: Tensor) -> Callable[[], Tensor]:
        def attend() -> Tensor:
            out: Tensor = flash_mla.flash_mla_with_kvcache(
                q, k, paged.table, lengths, work.dim_v, meta, softmax_scale=inputs.sm_scale, causal=True,
                use_legacy=True,
            )[0]  # fmt: skip
            return out.view(work.total_q, work.qo_heads, work.dim_v)

        return attend

    return [Calls([call(k) for k in paged.k], "causal", paged, 64)]


PROVIDERS: dict[str, Callable[[Inputs], list[Calls]]] = {
    "treeattn_triton": _treeattn("triton"),
    "treeattn_cuda": _treeattn("cuda"),
    "treeattn_torch": _treeattn("torch"),
    "treeattn_reference": _treeattn("reference"),
    "sdpa": _sdpa,
    "fa3_causal": _fa3_causal,
    "flashmla_causal": _flashmla_causal,
    **{name: peer.variants for name, peer in PEERS.items()},
}
"""Name to a function from inputs to variants (the best of which counts); no variant: the workload is not for it."""


def unsuited(provider: str, work: Workload) -> str | None:
    """Why a workload is not for a provider, or None."""
    if work.kind == "step" and not provider.startswith("treeattn_"):
        return "the cost of a step is measured for treeattn alone"
    if provider in PEERS:
        return PEERS[provider].unsuited(work)
    backend = provider.removeprefix("treeattn_")
    if backend in CAPABILITIES:
        # the device is what unavailable() looks at
        return missing(backend, next(iter(CAPABILITIES[backend].devices)), Asked(geometry_of(work)))
    if provider not in ("sdpa", *CHAINS):
        return None
    if work.fp8:
        return "it takes no FP8 cache beside a q of 16 bits"
    if provider == "sdpa":
        if work.shared_kv:
            return "it takes no latent rows (MLA)"
        if work.nodes is not None:
            return "what it gives for rows that see nothing depends on the kernel it takes"
        uniform = work.q_lens is None and work.prefixes is None
        return None if uniform else "it takes no requests of different lengths"
    if work.nodes is not None:
        return "a causal chain has no padding rows"
    if work.window_left >= 0:
        return "its window is not set here"
    if provider == "fa3_causal":
        if work.shared_kv or work.dim_v != work.head_dim:
            return "it is given K and V of one head dim here"
        return "it takes 16 bits only" if work.dtype == "float32" else None
    latent = (work.kv_heads, work.head_dim, work.dim_v, work.shared_kv) == (1, 576, 512, True)
    if not latent or work.dtype != "bfloat16":
        return "it takes latent rows of 576 with V in 512 of them, bfloat16, one KV head (MLA)"
    return None if work.q_lens is None else "its requests have equal numbers of rows"


def unavailable(provider: str, device: torch.device, workloads: Sequence[Workload] = ()) -> str | None:
    """Why a provider cannot run here, or none of the workloads is for it; else None."""
    if provider not in PROVIDERS:
        return f"no such provider; there are {', '.join(PROVIDERS)}"
    if provider.startswith("treeattn_"):
        import treeattn

        reason = treeattn.available_backends(device).get(provider.removeprefix("treeattn_"), "no such backend")
        if reason is not None:
            return reason
    peer = PEERS.get(provider)
    if provider in CHAINS and device.type != "cuda":
        return f"{'FlashAttention-3' if provider == 'fa3_causal' else 'FlashMLA'} needs a Hopper GPU"
    if peer is not None and peer.needs_gpu and device.type != "cuda":
        return peer.needs_gpu
    reasons = [unsuited(provider, work) for work in workloads]
    if reasons and all(reasons):
        return reasons[0]
    if provider in CHAINS:
        return _chain_problem("flash_attn_interface" if provider == "fa3_causal" else "flash_mla")
    return None if peer is None else peer.missing()


def _chain_problem(module: str) -> str | None:
    """Why the module of a causal chain cannot be used, or None."""
    if (problem := import_problem(module)) is not None:
        return f"{problem} (`make peers` brings it, PYTHONPATH must hold it)"
    if module == "flash_mla" and not getattr(importlib.import_module(module), "has_legacy", bool)():
        return "this flash_mla has no legacy kernels, and so no dense decoding for sm_90"
    return None


def usual_providers(device: torch.device) -> list[str]:
    """Who runs where no provider is named: all that may be worth a row on a GPU, two quick ones on a CPU."""
    if device.type != "cuda":
        return ["treeattn_torch", "sdpa"]
    wanted = [name for name, peer in PEERS.items() if not peer.on_request]
    return ["treeattn_triton", "treeattn_cuda", *CHAINS, *wanted, "sdpa"]
