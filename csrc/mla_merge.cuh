// The merge of MLA on Hopper: parts of rows that mla_sm90.cuh has left become rows of out, in a launch of its own.
//
// Rows have 512 dims, and the blocks of the attention kernel are few and large: their threads would merge in rounds what many
// small blocks do at once. These are launched while those run (programmatic dependent launch), begin where one has ended, and
// know by the tag which parts are there (merge.cuh); none waits for the whole attention kernel before it begins. All blocks of that
// run by then, so no part is waited for in vain.
//
// Each program of the plan that begins inside of an item has MERGE_BLOCKS blocks for its share of the item's rows: 128 threads,
// four numbers each, up to four rows of two parts or one of 22 at a time, in 128 registers.

#pragma once

#include "merge.cuh"
#include "mla_ring.cuh"
#include "padding.cuh"

namespace treeattn {

constexpr int MERGE_THREADS = LATENT_DIMS / 4, MERGE_BLOCKS = 16;

template <class T>
struct MlaMerge : PartRows<T, LATENT_DIMS, MERGE_THREADS, MLA_ROWS, 22> {
  using Rows = PartRows<T, LATENT_DIMS, MERGE_THREADS, MLA_ROWS, 22>;
  using Rows::p;

  __device__ __forceinline__ MlaMerge(const AttentionParams& params, u32 tag) : Rows(params, tag) {}

  // Block number `nth` of those of a program.
  __device__ __forceinline__ void run(i32 program, i32 nth) {
    Cursor at;
#pragma unroll
    for (i32 field = 0; field < PLANNED_FIELDS; ++field) reinterpret_cast<i32*>(&at)[field] = planned(p, program, field);
    if (at.unit == 0 || at.left <= 0) return;
    cursor_place<MLA_KEYS>(at, p);
    const Part part = part_of(at);
    const i32 shares = (part.blocks - 1) * MERGE_BLOCKS, share = (part.own - 1) * MERGE_BLOCKS + nth;
    const i32 begin = part.rows * share / shares, end = part.rows * (share + 1) / shares;
    if (part.blocks <= 2)
      this->template few_parts<4, 2>(part, begin, end, false);
    else if (part.blocks <= 8)
      this->template few_parts<2, 8>(part, begin, end, false);
    else
      for (i32 row = begin; row < end; ++row) {
        typename Rows::Row made[1];
        this->template gather<1, 22, false>(made, part, row, end, 0, part.blocks, false);
        this->write(made[0], part, row);
      }
  }
};

template <class T>
__device__ __forceinline__ void mla_merge(const AttentionParams& p) {
  launch_dependents();
  const u32 launches = load_relaxed(p.arrivals + ARRIVAL_LAUNCHES), blocks = blocks_of_grid();
  // Behind the barrier, which takes what was read, all of this block have read it. The last block to come here counts the launch.
  const bool none = threads_any<MERGE_THREADS>(MERGE_BARRIER, launches == ~0u);
  if (thread_in_block() == 0 && count_relaxed(p.arrivals + ARRIVAL_READERS, blocks - 1) == blocks - 1)
    store_relaxed(p.arrivals + ARRIVAL_LAUNCHES, none ? 0 : launches + 1);
  MlaMerge<T>(p, tag_of(launches)).run(blockIdx.x / MERGE_BLOCKS, blockIdx.x % MERGE_BLOCKS);
  zero_padding<LATENT_DIMS>(p, MERGE_THREADS * blockIdx.x + thread_in_block() / 32 * 32, MERGE_THREADS * blocks);
  wait_prerequisites();  // what follows in the stream must find attention done
}

}  // namespace treeattn

// One kernel: its name tells the 16-bit type. The host reads these lines (treeattn/cuda/build.py).
#define TREEATTN_MLA_MERGE(NAME, T)                                              \
  extern "C" __global__ void __launch_bounds__(treeattn::MERGE_THREADS, 4)       \
      NAME(const __grid_constant__ treeattn::AttentionParams params) {           \
    treeattn::mla_merge<treeattn::T>(params);                                    \
  }
