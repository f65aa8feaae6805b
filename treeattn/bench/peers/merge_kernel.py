"""The kernel of `merge_states`: a row and some heads a program, all dims of a head."""

import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    out_ptr,  # [rows, heads, HEAD_DIM], the merged state
    out_a_ptr,  # [rows, heads, HEAD_DIM]
    out_b_ptr,  # [rows, heads, HEAD_DIM]
    lse_a_ptr,  # float32 [rows, heads]
    lse_b_ptr,  # float32 [rows, heads]
    stride_out_row,
    stride_out_head,
    stride_out_a_row,
    stride_out_a_head,
    stride_out_b_row,
    stride_out_b_head,
    stride_lse_a_row,
    stride_lse_a_head,
    stride_lse_b_row,
    stride_lse_b_head,
    heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Two states of a row into one; a state whose lse is -inf has no keys and counts for nothing, NaN included."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    known = head < heads
    inside = known[:, None] & (dim < HEAD_DIM)[None, :]
    lse_a = tl.load(lse_a_ptr + row * stride_lse_a_row + head * stride_lse_a_head, mask=known, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + row * stride_lse_b_row + head * stride_lse_b_head, mask=known, other=float("-inf"))
    largest = tl.maximum(lse_a, lse_b)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weight_a, weight_b = tl.exp(lse_a - largest), tl.exp(lse_b - largest)
    total = weight_a + weight_b
    total = tl.where(total == 0.0, 1.0, total)
    place_a = row * stride_out_a_row + head[:, None] * stride_out_a_head + dim[None, :]
    place_b = row * stride_out_b_row + head[:, None] * stride_out_b_head + dim[None, :]
    out_a = tl.load(out_a_ptr + place_a, mask=inside & (weight_a > 0)[:, None], other=0.0).to(tl.float32)
    out_b = tl.load(out_b_ptr + place_b, mask=inside & (weight_b > 0)[:, None], other=0.0).to(tl.float32)
    mixed = (weight_a[:, None] * out_a + weight_b[:, None] * out_b) / total[:, None]
    place = row * stride_out_row + head[:, None] * stride_out_head + dim[None, :]
    tl.store(out_ptr + place, mixed.to(out_ptr.dtype.element_ty), mask=inside)
