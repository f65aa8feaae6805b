// Padding rows of out become 0, and their lse -inf: by one warp of each block, in the launch of the attention.

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

template <int OUT_DIMS>
__device__ __forceinline__ void zero_row(const AttentionParams& p, i64 row, u32 lane) {
  u64 out = reinterpret_cast<u64>(p.out) + 2 * row * p.stride_out_row + 4 * lane;
  u64 lse = reinterpret_cast<u64>(p.lse) + 4 * row * p.stride_lse_row;
#pragma unroll 1
  for (i32 head = p.group * p.kv_heads; head > 0; --head) {
#pragma unroll
    for (u32 pair = 0; pair < OUT_DIMS / 2; pair += 32) reinterpret_cast<u32*>(out)[pair] = 0;
    if (p.lse != nullptr && lane == 0) *reinterpret_cast<float*>(lse) = -infinity();
    out += 2 * p.stride_out_head;
    lse += 4 * p.stride_lse_head;
  }
}

// Rows 32 b to 32 b + 31 of block b, and so on.
template <int OUT_DIMS>
__device__ __forceinline__ void zero_padding(const AttentionParams& p, u32 lane) {
#pragma unroll 1
  for (u32 begin = blockIdx.x * 32; begin < static_cast<u32>(p.total_q); begin += gridDim.x * 32) {
    u32 left = __ballot_sync(~0u, is_padding(p, begin + lane));
#pragma unroll 1
    for (; left != 0; left &= left - 1) zero_row<OUT_DIMS>(p, begin + __ffs(left) - 1, lane);
  }
}

}  // namespace treeattn
