// Where keys are, and who sees them: entries of the page table, and words of the mask.

#pragma once

#include "ptx.cuh"
#include "schedule.cuh"

namespace treeattn {

// An entry of an index tensor; of an int64 the low half.
__device__ __forceinline__ u32 index_at(const void* list, u64 index, i32 wide) {
  return __ldg(static_cast<const u32*>(list) + (index << wide));
}

// Where the pages of the item's request begin in the table.
__device__ __forceinline__ i64 first_page(const AttentionParams& p, const Cursor& at) {
  return p.kv_indptr != nullptr ? index_at(p.kv_indptr, at.request, p.wide_indptr) : at.request * p.stride_table_request;
}

__device__ __forceinline__ u32 page_of(const AttentionParams& p, u32 position) {
  return static_cast<u32>((static_cast<u64>(position) * p.page_magic) >> p.page_shift);
}

__device__ __forceinline__ u32 mask_word(const AttentionParams& p, const Cursor& at, i32 node, i32 word) {
  return __ldg(p.mask_words + static_cast<i64>(at.first_row + node) * p.num_words + word);
}

// Scores of keys that a row does not see become -inf: of a thread's two rows, in the places of a product (ptx.cuh).
template <int COUNT, int WORDS>
__device__ __forceinline__ void mask(float (&scores)[COUNT], const u32 (&words)[2][WORDS], int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const u32 mine = words[half][i] >> (lane % 4 * 2);
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float& score = scores[4 * (4 * i + j) + 2 * half + odd];
          score = mine >> (8 * j + odd) & 1 ? score : -infinity();
        }
    }
}

}  // namespace treeattn
