"""Other projects' libraries as the benchmark's peers see them: signatures as documented, dense attention behind them.

Each fake refuses what its original would misread, so that a peer which passes the gate over it calls it rightly.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@contextmanager
def modules(entries: Mapping[str, Any]) -> Iterator[None]:
    """Put entries into `sys.modules` (None: it does not import), and take these alone out again.

    What is imported meanwhile stays: libraries such as Triton abort when they are loaded a second time.
    """
    before = {name: sys.modules[name] for name in entries if name in sys.modules}
    sys.modules.update(entries)
    try:
        yield
    finally:
        for name in entries:
            del sys.modules[name]
        sys.modules.update(before)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Out `[rows, heads, dim]` and natural-log lse `[rows, heads]` over keys `[keys, kv_heads, dim]`, in float32."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,khd->ihk", q.float(), keys) * scale
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=2)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    return torch.einsum("ihk,khd->ihd", weights, values).to(q.dtype), lse


def flash_attn_interface() -> Any:
    """FlashAttention-3: passes without a mask, causal or not, and their lse."""
    calls: list[str] = []

    def get_scheduler_metadata(
        batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int,
        cache_seqlens: Tensor, qkv_dtype: torch.dtype = torch.bfloat16, headdim_v: int | None = None,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: None = None, cache_leftpad: None = None,
        page_size: int | None = None, max_seqlen_k_new: int = 0, causal: bool = False,
    ) -> Any:  # fmt: skip
        assert cache_seqlens.dtype == torch.int32
        assert len(cache_seqlens) == batch_size
        assert not causal
        return SimpleNamespace(
            lengths=cache_seqlens, q_len=max_seqlen_q, keys=max_seqlen_k, packed=cu_seqlens_q is not None,
            page_size=page_size, heads=(num_heads_q, num_heads_kv, headdim), dtype=qkv_dtype,
        )  # fmt: skip

    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor,
        cu_seqlens_q: Tensor | None = None, max_seqlen_q: int | None = None, softmax_scale: float,
        causal: bool, scheduler_metadata: Any, num_splits: int = 0, return_softmax_lse: bool = False,
    ) -> Any:  # fmt: skip
        packed = cu_seqlens_q is not None
        assert q.ndim == (3 if packed else 4)
        page_size, heads, dim = k_cache.shape[1:]
        assert v_cache.shape == k_cache.shape
        assert page_table.dtype == cache_seqlens.dtype == torch.int32
        meta = scheduler_metadata
        assert (meta.lengths is cache_seqlens, meta.packed, meta.page_size) == (True, packed, page_size)
        assert meta.heads == (q.shape[-2], heads, dim)
        assert meta.dtype == q.dtype
        # as the library counts its splits: metadata for fewer keys would name splits that the call has no room for
        assert meta.keys == page_table.shape[1] * page_size
        assert meta.q_len == (max_seqlen_q if packed else q.shape[1])
        assert not causal
        assert return_softmax_lse
        calls.append(f"page {page_size}, {len(cache_seqlens)} requests")
        starts = cu_seqlens_q.tolist() if packed else [n * q.shape[1] for n in range(len(q) + 1)]
        flat = q if packed else q.flatten(0, 1)
        outs, lses = [], []
        for request, length in enumerate(cache_seqlens.tolist()):
            pages = page_table[request, : -(-length // page_size)].long()
            rows = flat[starts[request] : starts[request + 1]]
            k, v = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            out, lse = dense(rows, k, v, softmax_scale, torch.ones(len(rows), length, dtype=torch.bool))
            outs.append(out)
            lses.append(lse)
        out, lse = torch.cat(outs), torch.cat(lses)
        if packed:
            return out, lse.T.contiguous()
        return out.view(q.shape), lse.view(*q.shape[:3]).transpose(1, 2).contiguous(), "rest"

    return SimpleNamespace(
        calls=calls, get_scheduler_metadata=get_scheduler_metadata, flash_attn_with_kvcache=flash_attn_with_kvcache
    )


def flashinfer() -> Any:
    """FlashInfer's paged prefill: mask bits of request after request, each over its own keys."""

    class Wrapper:
        def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
            assert float_workspace_buffer.dtype == torch.uint8
            assert float_workspace_buffer.numel() >= 128 * 2**20
            self.kv_layout = kv_layout

        def plan(
            self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
            num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, custom_mask: Tensor,
            sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
        ) -> None:  # fmt: skip
            for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
                assert tensor.dtype == torch.int32
                assert tensor.ndim == 1
            assert custom_mask.dtype == torch.bool
            assert custom_mask.ndim == 1
            assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
            assert bool(((paged_kv_last_page_len > 0) & (paged_kv_last_page_len <= page_size)).all())
            counts = paged_kv_indptr.diff()
            self.lengths = ((counts - 1) * page_size + paged_kv_last_page_len).tolist()
            sizes = [q * k for q, k in zip(qo_indptr.diff().tolist(), self.lengths, strict=True)]
            assert sum(sizes) == len(custom_mask)
            self.masks = custom_mask.split(sizes)
            self.starts, self.indptr = qo_indptr.tolist(), paged_kv_indptr.tolist()
            self.indices, self.page_size, self.scale = paged_kv_indices.long(), page_size, sm_scale
            self.geometry, self.dtypes = (num_qo_heads, num_kv_heads, head_dim_qk), (q_data_type, kv_data_type)

        def run(
            self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor, k_scale: float = 1.0,
            v_scale: float = 1.0,
        ) -> Tensor:  # fmt: skip
            assert self.dtypes == (q.dtype, paged_kv_cache[0].dtype)
            held = []
            for cache in paged_kv_cache:
                wide = cache.float()
                held.append(wide.transpose(1, 2) if self.kv_layout == "HND" else wide)
                assert (q.shape[1], *held[-1].shape[2:]) == self.geometry
                assert held[-1].shape[1] == self.page_size
            for request, length in enumerate(self.lengths):
                rows = slice(self.starts[request], self.starts[request + 1])
                pages = self.indices[self.indptr[request] : self.indptr[request + 1]]
                k, v = (cache[pages].flatten(0, 1)[:length] for cache in held)
                seen = self.masks[request].view(-1, length)
                out[rows] = dense(q[rows], k * k_scale, v * v_scale, self.scale, seen)[0]
            return out

    return SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)


def sglang_extend() -> Any:
    """SGLang's extend kernel: the prefix is seen by every row, the mask is read among the nodes alone."""

    def extend_attention_fwd(
        q_extend: Tensor, k_extend: Tensor, v_extend: Tensor, o_extend: Tensor, k_buffer: Tensor, v_buffer: Tensor,
        qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, custom_mask: Tensor, is_causal: bool,
        mask_indptr: Tensor, max_len_extend: int, k_scale: float, v_scale: float, sm_scale: float | None = None,
    ) -> None:  # fmt: skip
        assert is_causal
        assert (k_scale, v_scale) == (1.0, 1.0)
        assert k_buffer.ndim == v_buffer.ndim == 3
        assert k_extend.is_contiguous()
        assert v_extend.is_contiguous()
        assert custom_mask.dtype == torch.uint8
        assert (kv_indices.dtype, mask_indptr.dtype) == (torch.int64, torch.int64)
        assert (qo_indptr.dtype, kv_indptr.dtype) == (torch.int32, torch.int32)
        assert max_len_extend == int(qo_indptr.diff().max())
        assert sm_scale is not None
        for request in range(len(qo_indptr) - 1):
            rows = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
            slots = kv_indices[int(kv_indptr[request]) : int(kv_indptr[request + 1])]
            count, prefix = rows.stop - rows.start, len(slots)
            start, width = int(mask_indptr[request]), prefix + count
            assert int(mask_indptr[request + 1]) - start == count * width
            mask = custom_mask[start : start + count * width].view(count, width).bool().clone()
            mask[:, :prefix] = True
            k, v = torch.cat([k_buffer[slots], k_extend[rows]]), torch.cat([v_buffer[slots], v_extend[rows]])
            o_extend[rows] = dense(q_extend[rows], k, v, sm_scale, mask)[0]

    return SimpleNamespace(extend_attention_fwd=extend_attention_fwd)


def vllm_unified() -> Any:
    """vLLM's unified attention: causal by row, and one bias among the last rows of every request."""

    def unified_attention(
        *, q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, seqused_k: Tensor,
        max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: tuple[int, int], block_table: Tensor,
        softcap: float, q_descale: None, k_descale: Tensor, v_descale: Tensor, qq_bias: Tensor,
    ) -> None:  # fmt: skip
        assert causal
        assert window_size == (-1, -1)
        assert softcap == 0.0
        assert q_descale is None
        assert bool((k_descale == 1).all() and (v_descale == 1).all())
        assert block_table.dtype == seqused_k.dtype == cu_seqlens_q.dtype == torch.int32
        assert qq_bias.is_contiguous()
        assert qq_bias.shape == (max_seqlen_q, max_seqlen_q)
        page_size = k.shape[1]
        for request, length in enumerate(seqused_k.tolist()):
            rows = slice(int(cu_seqlens_q[request]), int(cu_seqlens_q[request + 1]))
            count = rows.stop - rows.start
            seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            seen[:, length - count :] &= qq_bias[:count, :count] == 0
            pages = block_table[request, : -(-length // page_size)].long()
            keys, values = (cache[pages].flatten(0, 1)[:length] for cache in (k, v))
            out[rows] = dense(q[rows], keys, values, softmax_scale, seen)[0]
        assert max_seqlen_k == int(seqused_k.max())

    return SimpleNamespace(unified_attention=unified_attention)


def flashinfer_xqa() -> Any:
    """FlashInfer's XQA: the prefix is seen by every row, mask bits in words of 16, rows of 32 bits."""

    def xqa(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor, output: Tensor,
        workspace_buffer: Tensor, semaphores: Tensor, num_kv_heads: int, page_size: int, *, kv_layout: str = "NHD",
        q_seq_len: int = 1, mask: Tensor | None = None, q_cu_seq_lens: Tensor | None = None,
    ) -> None:  # fmt: skip
        assert (page_table.dtype, seq_lens.dtype, semaphores.dtype) == (torch.int32, torch.uint32, torch.uint32)
        assert workspace_buffer.dtype == torch.uint8
        assert not semaphores.view(torch.int32).any()
        assert page_size in (16, 32, 64, 128)
        assert output.shape == q.shape
        held = [cache.transpose(1, 2) if kv_layout == "HND" else cache for cache in (k_cache, v_cache)]
        assert held[0].shape[1:3] == (page_size, num_kv_heads)
        batch = len(seq_lens)
        assert seq_lens.shape == (batch, 1)
        words = (q_seq_len + 31) // 32 * 2
        if q_cu_seq_lens is None:
            assert q.shape[:-2] == ((batch, 1, q_seq_len) if q_seq_len > 1 else (batch, 1))
            assert (mask is None) == (q_seq_len == 1)
            assert mask is None or mask.shape == (batch, q_seq_len, words)
            starts = [request * q_seq_len for request in range(batch + 1)]
        else:
            starts = q_cu_seq_lens.tolist()
            assert mask is not None
            assert mask.shape == (starts[-1], words)
            assert q_seq_len == int(q_cu_seq_lens.diff().max())
        flat, target = q.flatten(0, -3), output.view(-1, *q.shape[-2:])
        for request, length in enumerate(seq_lens[:, 0].tolist()):
            rows = slice(starts[request], starts[request + 1])
            count = rows.stop - rows.start
            seen = torch.ones(count, length, dtype=torch.bool)
            if mask is not None:
                assert mask.dtype == torch.uint16
                for row, line in enumerate(mask.view(-1, words)[rows].tolist()):
                    for node in range(count):
                        seen[row, length - count + node] = bool(line[node // 16] >> node % 16 & 1)
            pages = page_table[request, : -(-length // page_size)].long()
            k, v = (cache[pages].flatten(0, 1)[:length] for cache in held)
            target[rows] = dense(flat[rows], k, v, q.shape[-1] ** -0.5, seen)[0]

    return SimpleNamespace(xqa=xqa)
