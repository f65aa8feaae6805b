// Padding rows of out become 0, their lse -inf.

#pragma once

#include "ptx.cuh"
#include "schedule.cuh"

namespace treeattn {

__device__ __forceinline__ bool is_padding(const AttentionParams& p, u32 row) {
  if (row >= static_cast<u32>(p.total_q)) return false;
  const i32 request = __ldg(p.row_request + row);
  if (request < 0) return p.zero_tail != 0;
  return static_cast<i32>(row) - __ldg(p.qo_indptr + request) >= p.spans[request * SPAN_FIELDS + SPAN_NODES];
}

// By a warp, all heads of a row.
template <int HEAD_DIM>
__device__ __forceinline__ void zero_row(const AttentionParams& p, i64 row) {
  const u32 lane = thread_in_block() % 32;
  u64 out = reinterpret_cast<u64>(p.out) + 2 * row * p.stride_out_row + 4 * lane;
  u64 lse = reinterpret_cast<u64>(p.lse) + 4 * row * p.stride_lse_row;
#pragma unroll 1
  for (i32 head = p.group * p.kv_heads; head > 0; --head) {
#pragma unroll
    for (u32 pair = 0; pair < HEAD_DIM / 2; pair += 32) reinterpret_cast<u32*>(out)[pair] = 0;
    if (p.lse != nullptr && lane == 0) *reinterpret_cast<float*>(lse) = -infinity();
    out += 2 * p.stride_out_head;
    lse += 4 * p.stride_lse_head;
  }
}

// By a warp, of 32 rows from `first` on, then of those `step` further on, and so on.
template <int HEAD_DIM>
__device__ __forceinline__ void zero_padding(const AttentionParams& p, u32 first, u32 step) {
#pragma unroll 1
  for (u32 begin = first; begin < static_cast<u32>(p.total_q); begin += step) {
    u32 left = __ballot_sync(~0u, is_padding(p, begin + thread_in_block() % 32));
#pragma unroll 1
    for (; left != 0; left &= left - 1) zero_row<HEAD_DIM>(p, begin + __ffs(left) - 1);
  }
}

}  // namespace treeattn
