# mypy: disable-error-code="import-not-found, misc"
"""One attention layer: its verified rows by treeattn, its prefill rows by vLLM's Triton kernel.

Reads no device value and makes no allocation, so that it may be captured. Every row of the output is written: rows
behind the last request are 0, since a NaN there would spread where the output is quantised per tensor.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from treeattn import tree_attention

from .builder import TreeAttentionMetadata


class TreeAttentionImpl(TritonAttentionImpl):
    """vLLM's Triton impl, which keeps writing K and V, with verify steps by treeattn."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refused = {
            "ALiBi": self.alibi_slopes is not None or self.use_alibi_sqrt,
            f"attention type {self.attn_type}": self.attn_type != AttentionType.DECODER,
            f"KV cache dtype {self.kv_cache_dtype}": self._is_per_token_head_quant,
            "chunked attention with lookback": self.chunk_lookback > -1,
        }
        if asked := [name for name, given in refused.items() if given]:
            raise NotImplementedError(
                f"treeattn's backend has no {' and no '.join(asked)}; vLLM's TRITON_ATTN has "
                "(--attention-backend TRITON_ATTN)"
            )
        self.fp8_cache = self.kv_cache_dtype.startswith("fp8")
        # q keeps 16 bits
        self.supports_quant_query_input = False

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No: the output keeps the query's dtype."""
        return False

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write `output`, ``[tokens, heads, head_size]``; arguments as vLLM's attention layer gives them.

        `key` and `value` are in the cache already.
        """
        if not isinstance(attn_metadata, TreeAttentionMetadata):
            # profiling, a draft model, or attention that is not causal
            whole: Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
            return whole
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("treeattn's backend writes no quantised output: it got an output scale")
        verify, prefill, done = attn_metadata.verify, attn_metadata.prefill, 0
        if verify is not None:
            done = query.shape[0] if prefill is None else verify.rows
            done = min(done, verify.layout.total_q)
            every = done == query.shape[0]
            if self.fp8_cache:
                kv_cache = kv_cache.view(self.fp8_dtype)
            tree_attention(
                query if every else query[:done], kv_cache[..., : self.head_size], kv_cache[..., self.head_size :],
                verify.steps[layer.layer_name],
                out=output if every else output[:done], sm_scale=self.scale, logits_soft_cap=self.logits_soft_cap,
                sinks=self.sinks, k_scale=layer._k_scale if self.fp8_cache else None,
                v_scale=layer._v_scale if self.fp8_cache else None, zero_tail=True,
            )  # fmt: skip
        if prefill is not None:
            rows = slice(done, attn_metadata.num_actual_tokens)
            super().forward(layer, query[rows], key, value, kv_cache, prefill, output[rows])
            done = attn_metadata.num_actual_tokens
        if done < output.shape[0]:
            output[done:].zero_()
        return output
