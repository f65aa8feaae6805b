// An output warpgroup of an MLA block: weights times 256 of the 512 dims of V, and rows out.
//
// Sums are 64 rows of 256 dims, 128 registers a thread, multiplied as two halves of 128 dims: when the first is done, its
// quarter of the tile is given back while the second runs. Weights are read from shared memory: 16 registers more than
// the sums and the 24 below them, where ptxas begins accumulators, would be more than the scores leave.

#pragma once

#include "merge.cuh"
#include "mla_ring.cuh"

namespace treeattn {

template <class T, int Q_STEPS, int LATENTS, int ROPES>
struct MlaOutput {
  using Memory = typename MlaShared<Q_STEPS, LATENTS, ROPES>::Layout;
  static constexpr int STEPS = MLA_KEYS / 16, COUNT = QUARTER_DIMS / 2;

  const AttentionParams& p;
  Memory& memory;
  const int group, warp, lane;  // output warpgroup, and half of the dims; warp of the warpgroup
  Place<LATENTS> latent;  // of the next tile's first quarter, in the ring of this half
  u32 turn = 0;           // tiles so far: the phase of the weights' barriers

  __device__ __forceinline__ MlaOutput(const AttentionParams& params, Memory& shared, int warpgroup, int warp_index,
                                       int lane_index)
      : p(params), memory(shared), group(warpgroup), warp(warp_index), lane(lane_index) {}

  // A thread's rows in the row tile.
  __device__ __forceinline__ i32 local(int half) const { return warp * 16 + lane / 4 + 8 * half; }

  static __device__ __forceinline__ void scale(float (&sums)[COUNT], const float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < COUNT; ++j) sums[j] *= factor[j / 2 % 2];
  }

  // sums[64, 128] (+)= weights V, of the quarter at a place.
  __device__ __forceinline__ void multiply_v(float (&sums)[COUNT], const Place<LATENTS>& at, bool threads_copied,
                                             bool first) const {
    barrier_wait(shared_address(&memory.latent_full[group][at.stage()]), at.phase());
    if (seldom(threads_copied)) fence_async_proxy();
    const u64 v = operand(shared_address(memory.latents[group][at.stage()]), MLA_PANEL_BYTES, ATOM_BYTES);
    const u64 weights = operand(shared_address(memory.weights[turn % 2]), 16, ATOM_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
      Product<T, QUARTER_DIMS, 1>::run_shared(sums, weights + 2 * step, v + ((step * 2 * ATOM_BYTES) >> 4),
                                              !first || step > 0);
    wgmma_commit();
  }

  __device__ __forceinline__ void release(u64& empty) const { warp_arrive(empty, lane); }

  // Rows of a whole item to `out`, of a part to its partial slot: the dims of one half.
  __device__ __forceinline__ void store(const float (&sums)[COUNT], const float (&inverse)[2], const Cursor& at,
                                        u32 dim) const {
    const i64 part_row = mla_part(p, at);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 row = at.row0 + local(half);
      if (row >= at.row_end) continue;
      if (at.whole) {
        const i64 node = at.first_row + row / p.group, head = at.kv_head * p.group + row % p.group;
        u32* to = reinterpret_cast<u32*>(static_cast<unsigned short*>(p.out) + node * p.stride_out_row +
                                         head * p.stride_out_head + dim) + lane % 4;
#pragma unroll
        for (int j = 0; j < COUNT / 4; ++j)
          to[4 * j] = pack<T>(sums[4 * j + 2 * half] * inverse[half], sums[4 * j + 2 * half + 1] * inverse[half]);
      } else {
        // in the order of the fragments, 16 bytes a thread (the merges know: mla_merge.cuh, treeattn/kernels/finish.py)
        float* to = p.partial_out + (part_row + local(half)) * LATENT_DIMS + dim + lane % 4 * 4;
        if (p.split == 0) {
          const u32 tag = memory.tag;
#pragma unroll
          for (int j = 0; j < COUNT / 4; j += 2)
            store_part(to + 8 * j, sums[4 * j + 2 * half] * inverse[half], sums[4 * j + 2 * half + 1] * inverse[half],
                       sums[4 * j + 4 + 2 * half] * inverse[half], sums[4 * j + 5 + 2 * half] * inverse[half], tag);
          continue;
        }
#pragma unroll
        for (int j = 0; j < COUNT / 4; j += 2)
          store_four(to + 8 * j, sums[4 * j + 2 * half] * inverse[half], sums[4 * j + 2 * half + 1] * inverse[half],
                     sums[4 * j + 4 + 2 * half] * inverse[half], sums[4 * j + 5 + 2 * half] * inverse[half]);
      }
    }
  }

  __device__ __forceinline__ void item(const Cursor& at) {
    const i32 full = uniform(at.full_tiles), tiles = uniform(at.tiles);
    float low[COUNT], high[COUNT];
    latent.skip(2);  // Q
#pragma unroll 1
    for (i32 tile = 0; tile < tiles; ++tile) {
      const bool threads_copied = tile >= full || p.page_rows == 0;
      const u32 slot = turn % 2;
      barrier_wait(shared_address(&memory.weights_full[slot]), turn / 2 % 2);
      if (seldom(tile > 0 && memory.raised[slot][warp] != 0)) {
        const float decay[2] = {memory.decay[slot][local(0)], memory.decay[slot][local(1)]};
        scale(low, decay);
        scale(high, decay);
      }
      const Place<LATENTS> second = latent.next();
      pin(low);
      pin(high);
      multiply_v(low, latent, threads_copied, tile == 0);
      multiply_v(high, second, threads_copied, tile == 0);
      wgmma_wait<1>();
      release(memory.latent_empty[group][latent.stage()]);
      wgmma_wait<0>();
      pin(low);
      pin(high);
      release(memory.latent_empty[group][second.stage()]);
      if (tile < tiles - 1) release(memory.weights_empty[slot]);
      latent = second.next();
      turn += 1;
    }
    const u32 slot = turn % 2 ^ 1;
    const float inverse[2] = {memory.inverse[slot][local(0)], memory.inverse[slot][local(1)]};
    __syncwarp();
    release(memory.weights_empty[slot]);
    store(low, inverse, at, quarter_dim(group));
    store(high, inverse, at, quarter_dim(group + 2));
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      barrier_wait(shared_address(&memory.item_full[latent.item_slot()]), latent.item_phase());
      const Cursor& at = memory.items[latent.item_slot()];
      if (uniform(at.tiles) == 0) break;
      item(at);
      __syncwarp();
      warp_arrive(memory.item_empty[latent.item_slot()], lane);
      latent.next_item();
    }
  }
};

}  // namespace treeattn
