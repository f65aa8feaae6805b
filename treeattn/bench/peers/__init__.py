"""Other projects' tree attention behind one shape: each file calls one library through its public API.

They never import each other, and import their library on use. A `Peer` says beforehand what it cannot run and why; what
it computes goes through the gate like everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..calls import Calls
from ..inputs import Inputs
from ..workloads import Workload
from . import fa3, flashinfer, flashinfer_xqa, flex, sglang, vllm

__all__ = ["PEERS", "Peer"]


@dataclass(frozen=True)
class Peer:
    """A provider from elsewhere.

    Attributes
    ----------
    variants : callable
        From inputs to the variants of which the best counts.
    unsuited : callable
        Why a workload is not for it, or None.
    missing : callable
        Why its library cannot be used here, or None.
    needs_gpu : str or None
        Said on a CPU; None if it runs there too.
    on_request : bool
        Left out unless it is named: slow, or for few workloads.
    """

    variants: Callable[[Inputs], list[Calls]]
    unsuited: Callable[[Workload], str | None]
    missing: Callable[[], str | None]
    needs_gpu: str | None
    on_request: bool = False


PEERS = {
    "fa3_cascade": Peer(fa3.variants, fa3.unsuited, fa3.missing, "FlashAttention-3 needs a Hopper GPU"),
    "flashinfer_custom_mask": Peer(
        flashinfer.variants, flashinfer.unsuited, flashinfer.missing, "FlashInfer's kernels need a GPU"
    ),
    "flashinfer_xqa": Peer(
        flashinfer_xqa.variants, flashinfer_xqa.unsuited, flashinfer_xqa.missing, "FlashInfer's kernels need a GPU"
    ),
    "sglang_extend": Peer(sglang.variants, sglang.unsuited, sglang.missing, "SGLang's Triton kernel needs a GPU"),
    "flex_attention": Peer(flex.variants, flex.unsuited, lambda: None, None, on_request=True),
    "vllm_qq_bias": Peer(vllm.variants, vllm.unsuited, vllm.missing, "vLLM's Triton kernel needs a GPU", True),
}
