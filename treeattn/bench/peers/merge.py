"""The merge of a cascade in one launch, so that a peer of two passes is not timed with a slow third one.

``out = (exp(lse_a - m) out_a + exp(lse_b - m) out_b) / (exp(lse_a - m) + exp(lse_b - m))``, ``m`` the larger lse. On a
CPU outside the interpreter it is `treeattn.merge`, the same maths in PyTorch.
"""

from __future__ import annotations

from torch import Tensor

from treeattn.backends import interpreted
from treeattn.merge import merge

__all__ = ["merge_states"]

BLOCK_H = 8
"""Heads of a program: 2 KB of each state at 128 dims, a vector load a thread."""


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor) -> Tensor:
    """Write the merged out into `out` and return it.

    Parameters
    ----------
    out_a, out_b, out : Tensor
        ``[rows, heads, head_dim]``, the last axis contiguous.
    lse_a, lse_b : Tensor
        float32 ``[rows, heads]``, natural log, any strides; -inf for a state without keys.
    """
    if out.device.type == "cpu" and not interpreted():
        return merge(out_a, lse_a, out_b, lse_b, out=out)[0]
    import triton

    from .merge_kernel import merge_kernel

    rows, heads, head_dim = out.shape
    merge_kernel[(rows, triton.cdiv(heads, BLOCK_H))](
        out, out_a, out_b, lse_a, lse_b,
        out.stride(0), out.stride(1), out_a.stride(0), out_a.stride(1), out_b.stride(0), out_b.stride(1),
        lse_a.stride(0), lse_a.stride(1), lse_b.stride(0), lse_b.stride(1),
        heads, HEAD_DIM=head_dim, BLOCK_H=BLOCK_H, BLOCK_D=triton.next_power_of_2(head_dim), num_warps=2,
    )  # fmt: skip
    return out
