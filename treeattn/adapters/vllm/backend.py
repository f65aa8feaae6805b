# mypy: disable-error-code="import-not-found, misc"
"""The attention backend that vLLM loads for ``--attention-backend CUSTOM``: what it covers, and what it refuses.

vLLM selects a backend by its capability flags and raises where a model needs more, so a refusal here is an error at
start-up that names the reason. K and V are written by vLLM's own Triton kernel, in its layout.
"""

from __future__ import annotations

from typing import Any, ClassVar

from . import hooks

hooks.require()

from vllm.v1.attention.backend import AttentionType  # noqa: E402
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend  # noqa: E402

from .builder import TreeAttentionMetadataBuilder  # noqa: E402
from .impl import TreeAttentionImpl  # noqa: E402

MAX_HEAD_SIZE = 256
NO_MLA = (
    "treeattn verifies MLA models outside vLLM only (treeattn.tree_attention with shared_kv): leave "
    "--attention-backend CUSTOM out for them"
)


class TreeAttentionBackend(TritonAttentionBackend):
    """vLLM's Triton backend with verify steps by treeattn."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's registry under which it is registered."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TreeAttentionImpl]:
        """What runs in each attention layer."""
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeAttentionMetadataBuilder]:
        """What prepares each step."""
        return TreeAttentionMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Head sizes of both kernels."""
        return bool(super().supports_head_size(head_size)) and head_size <= MAX_HEAD_SIZE

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Ampere and newer."""
        return bool(capability >= (8, 0))

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoder self-attention: encoders and cross-attention have nothing to verify."""
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """No ALiBi of any form."""
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """No: a short prefill goes to treeattn as a chain, and must not look ahead."""
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        """No: its window moves for generated tokens only."""
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """No: how a prompt is cut into chunks decides which of two kernels runs."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: Any,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Why a combination is refused, in words; None if it is not."""
        if use_mla:
            return NO_MLA
        reason: str | None = super().supports_combination(
            head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix,
            device_capability,
        )  # fmt: skip
        return reason
