// A consumer warpgroup: 64 packed query rows against the tiles in the ring, online softmax, rows out.
//
// Q stays in registers, where the products take it from: that halves the reads of shared memory of Q K^T, which with
// 64-key tiles and three warpgroups would otherwise be its limit. The weights P stay in registers too.
//
// Scores of tile i are issued ahead of P V of tile i - 1, so that the matrix unit has work while this warpgroup computes
// the exponentials of tile i. Scores are kept in base 2; maxima are taken before the scale, which is positive.

#pragma once

#include "ring.cuh"

namespace treeattn {

template <class T, int HEAD_DIM, int CONSUMERS, int KEYS, int SLOTS, int Q_STEPS>
struct Consumer {
  using Memory = typename Shared<HEAD_DIM, CONSUMERS, KEYS, SLOTS, Q_STEPS>::Layout;
  static constexpr u32 PANEL_BYTES = KEYS * PANEL_COLUMNS * 2;
  static constexpr int TILE_ROWS = 64 * CONSUMERS;
  static constexpr int WORDS = KEYS / EDGE_KEYS;
  static constexpr u32 Q_PANELS = Shared<HEAD_DIM, CONSUMERS, KEYS, SLOTS, Q_STEPS>::Q_PANELS;
  static_assert(Q_STEPS % 4 == 0, "a panel of Q is in registers or in shared memory");
  static constexpr float LN2 = 0.6931471805599453f;

  const AttentionParams& p;
  Memory& memory;
  const int group, warp, lane;  // warpgroup of the block, warp of the warpgroup
  u32 q_address;
  Place<SLOTS> place, v_place;  // of the next half tile, of the V that is being multiplied
  i32 local[2];   // this thread's two rows in the row tile
  float top[2];   // maximum of the scores so far, before the scale
  float sum[2];   // of the weights, this thread's columns only
  float decay[2];  // what the last tile's maximum does to earlier sums

  __device__ __forceinline__ Consumer(const AttentionParams& params, Memory& shared, int warpgroup, int warp_index,
                                      int lane_index)
      : p(params), memory(shared), group(warpgroup), warp(warp_index), lane(lane_index) {
    local[0] = group * 64 + warp * 16 + lane / 4;
    local[1] = local[0] + 8;
    q_address = shared_address(memory.q) + group * (Q_PANELS * 64 * 128);
  }

  __device__ __forceinline__ void wait_full(const Place<SLOTS>& at) {
    barrier_wait(shared_address(&memory.full[at.slot()]), at.phase());
    if (TREEATTN_CONSUMER_FENCE == 1) fence_async_proxy();
  }

  __device__ __forceinline__ void release(const Place<SLOTS>& at) {
    if (lane == 0) barrier_arrive(shared_address(&memory.empty[at.slot()]));
  }

  __device__ __forceinline__ u32 slot_address(const Place<SLOTS>& at) const {
    return shared_address(memory.slots[at.slot()]);
  }

  // Where a packed row of Q begins.
  __device__ __forceinline__ const unsigned short* q_row(const Cursor& at, i32 row) const {
    const u32 node = static_cast<u32>(row) / p.group, head = static_cast<u32>(row) % p.group;
    return static_cast<const unsigned short*>(p.q) + (at.first_row + static_cast<i64>(node)) * p.stride_q_row +
           (static_cast<i64>(at.kv_head) * p.group + head) * p.stride_q_head;
  }

  // Q of the item, the first dims as fragments in registers, the others to shared memory; rows that are not there are 0.
  __device__ __forceinline__ void load_q(u32 (&q)[4 * Q_STEPS], const Cursor& at) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 row = at.row0 + local[half];
      const bool valid = row < at.row_end;
      const u32* from = reinterpret_cast<const u32*>(q_row(at, row)) + lane % 4;
#pragma unroll
      for (int step = 0; step < Q_STEPS; ++step) {
        q[4 * step + half] = valid ? __ldg(from + 8 * step) ^ p.q_sign : 0;
        q[4 * step + 2 + half] = valid ? __ldg(from + 8 * step + 4) ^ p.q_sign : 0;
      }
    }
    if constexpr (Q_PANELS > 0) {
      warpgroup_sync(2 + group);  // every warp is through with the Q before
      const u32 thread = warp * 32 + lane, chunk = thread % 8;
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const u32 row = thread / 8 + 16 * i;
        const bool valid = at.row0 + group * 64 + static_cast<i32>(row) < at.row_end;
        const u32* from = reinterpret_cast<const u32*>(q_row(at, at.row0 + group * 64 + row) + Q_STEPS * 16) + chunk * 4;
#pragma unroll
        for (u32 panel = 0; panel < Q_PANELS; ++panel) {
          u32 part[4];
#pragma unroll
          for (u32 j = 0; j < 4; ++j) part[j] = valid ? __ldg(from + panel * 32 + j) ^ p.q_sign : 0;
          const u32 to = q_address + panel * (64 * 128) + row * 128 + ((chunk ^ row % 8) << 4);
          store_shared_16(to, part[0], part[1], part[2], part[3]);
        }
      }
      fence_async_proxy();
      warpgroup_sync(2 + group);
    }
  }

  // scores[64, KEYS] = Q K^T
  __device__ __forceinline__ void multiply_k(float (&scores)[KEYS / 2], const u32 (&q)[4 * Q_STEPS], u32 slot) const {
    const u64 k = operand(slot, 16, ATOM_BYTES);
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
      const u64 k_step = k + ((step / 4 * PANEL_BYTES + step % 4 * 32) >> 4);
      if constexpr (Q_PANELS > 0) {
        if (step >= Q_STEPS) {
          const u64 a = operand(q_address, 16, ATOM_BYTES) + (((step - Q_STEPS) / 4 * 64 * 128 + step % 4 * 32) >> 4);
          Product<T, KEYS, 0>::run_shared(scores, a, k_step, step > 0);
          continue;
        }
      }
      Product<T, KEYS, 0>::run(scores, q + 4 * step, k_step, step > 0);
    }
  }

  // out[64, HEAD_DIM] += P V
  static __device__ __forceinline__ void multiply_v(float (&out)[HEAD_DIM / 2], const u32 (&weights)[KEYS / 4],
                                                    u32 slot) {
    const u64 v = operand(slot, PANEL_BYTES, ATOM_BYTES);
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step)
      Product<T, HEAD_DIM, 1>::run(out, weights + 4 * step, v + ((step * 2 * ATOM_BYTES) >> 4), 1);
  }

  // Mask words of this thread's rows for the edge tile whose first unit is `unit`.
  __device__ __forceinline__ void load_words(u32 (&words)[2][WORDS], const Cursor& at, i32 unit) const {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const i32 word = unit + i - at.tail_units;
      // keys of the prefix are seen by every row; behind the prefix or the nodes there is nothing
      const i32 keys = word < 0 ? at.prefix - at.full_units * KEYS - (unit + i) * EDGE_KEYS
                                : at.present - word * EDGE_KEYS;
      const u32 bound = unit + i >= at.edge_end || keys <= 0 ? 0 : keys >= 32 ? ~0u : (1u << keys) - 1;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i32 row = at.row0 + local[half];
        words[half][i] = bound;
        if (word >= 0 && bound != 0) {
          const i64 node = at.first_row + row / p.group;
          words[half][i] &= row < at.row_end ? __ldg(p.mask_words + node * p.num_words + word) : 0;
        }
      }
    }
  }

  __device__ __forceinline__ void mask(float (&scores)[KEYS / 2], const u32 (&words)[2][WORDS]) const {
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

  // Scores to weights, in place; `decay` is what earlier sums are to be multiplied by.
  __device__ __forceinline__ void softmax(float (&scores)[KEYS / 2]) {
    const float scale = p.scale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float best = top[half];
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j)
        best = fmaxf(best, fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
      best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
      best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
      // a row that has seen nothing yet keeps -inf as its maximum; -inf - -inf would be NaN
      const float finite = best == -infinity() ? 0.f : best;
      const float base = finite * scale;
      // 1 if the maximum stays, to the bit: top * scale - base would be fused, and leave the rounding of base behind
      decay[half] = exp2_approx((top[half] - finite) * scale);
      top[half] = best;
      float part = 0.f;
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float& score = scores[4 * j + 2 * half + odd];
          score = exp2_approx(score * scale - base);
          part += score;
        }
      sum[half] = sum[half] * decay[half] + part;
    }
  }

  static __device__ __forceinline__ void weights_of(u32 (&weights)[KEYS / 4], const float (&scores)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) weights[i] = pack<T>(scores[2 * i], scores[2 * i + 1]);
  }

  // Maxima seldom change behind the first tiles, and the products are half of this thread's registers.
  __device__ __forceinline__ void rescale(float (&out)[HEAD_DIM / 2]) const {
    if (!__any_sync(~0u, decay[0] != 1.f || decay[1] != 1.f)) return;
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; ++j) {
      out[4 * j] *= decay[0];
      out[4 * j + 1] *= decay[0];
      out[4 * j + 2] *= decay[1];
      out[4 * j + 3] *= decay[1];
    }
  }

  // Behind the softmax of a tile: the sums of the tiles before are done, and are scaled to the new maximum.
  __device__ __forceinline__ void turn(float (&out)[HEAD_DIM / 2], u32 (&weights)[KEYS / 4],
                                       const float (&scores)[KEYS / 2], bool multiplied) {
    if (multiplied) {
      wgmma_wait<0>();
      pin(out);
      release(v_place);
      rescale(out);
    }
    weights_of(weights, scores);
  }

  // Rows of a whole item to `out`, of a part to its partial slot.
  __device__ __forceinline__ void store(float (&out)[HEAD_DIM / 2], const Cursor& at) {
    // the first part of a cut item goes to slot 2p + 1, any later part to slot 2p: a block has one of each at most
    const i64 part_row = static_cast<i64>(2 * blockIdx.x + (at.unit == 0)) * TILE_ROWS;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[half];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const float inverse = total > 0.f ? 1.f / total : 0.f;
      const float lse = total > 0.f ? top[half] * p.scale + log2_approx(total) : -infinity();
      const i32 row = at.row0 + local[half];
      if (row >= at.row_end) continue;
      if (at.whole) {
        const i64 node = at.first_row + row / p.group, head = at.kv_head * p.group + row % p.group;
        u32* to = reinterpret_cast<u32*>(static_cast<unsigned short*>(p.out) + node * p.stride_out_row +
                                         head * p.stride_out_head) + lane % 4;
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; ++j)
          to[4 * j] = pack<T>(out[4 * j + 2 * half] * inverse, out[4 * j + 2 * half + 1] * inverse);
        if (p.lse != nullptr && lane % 4 == 0) p.lse[node * p.stride_lse_row + head * p.stride_lse_head] = lse * LN2;
      } else {
        float* to = p.partial_out + (part_row + local[half]) * HEAD_DIM + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; ++j)
          store_pair(to + 8 * j, out[4 * j + 2 * half] * inverse, out[4 * j + 2 * half + 1] * inverse);
        if (lane % 4 == 0) p.partial_lse[part_row + local[half]] = lse;
      }
    }
  }

  __device__ __forceinline__ void item(const Cursor& at) {
    if (at.row0 + group * 64 >= at.row_end) {
      // none of this warpgroup's rows is there
      for (i32 halves = 2 * at.tiles; halves > 0; --halves) {
        wait_full(place);
        __syncwarp();  // no lane may still look at a phase that the release lets end (elsewhere wgmma brings them together)
        release(place);
        place.step();
      }
      return;
    }
    u32 q[4 * Q_STEPS], weights[KEYS / 4], words[2][WORDS];
    float scores[KEYS / 2], out[HEAD_DIM / 2];
    load_q(q, at);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) out[i] = 0.f;
    top[0] = top[1] = -infinity();
    sum[0] = sum[1] = 0.f;

    if (at.full_tiles == 0) load_words(words, at, at.edge_begin);
    wait_full(place);
    wgmma_fence();
    multiply_k(scores, q, slot_address(place));
    wgmma_commit();
    wgmma_wait<0>();
    pin(scores);
    release(place);
    place.step();
    if (at.full_tiles == 0) mask(scores, words);
    softmax(scores);

    // `place` is V of the tile whose weights are in `scores`; K of the next tile is behind it
#pragma unroll 1
    for (i32 tile = 1; tile < at.tiles; ++tile) {
      const bool masked = tile >= at.full_tiles;
      if (masked) load_words(words, at, at.edge_begin + (tile - at.full_tiles) * (KEYS / EDGE_KEYS));
      turn(out, weights, scores, tile > 1);
      Place<SLOTS> k_place = place;
      k_place.step();
      wait_full(k_place);
      pin(scores);
      pin(out);
      wgmma_fence();
      multiply_k(scores, q, slot_address(k_place));
      wgmma_commit();
      wait_full(place);
      wgmma_fence();
      multiply_v(out, weights, slot_address(place));
      wgmma_commit();
      wgmma_wait<1>();
      pin(scores);
      release(k_place);
      v_place = place;
      place = k_place;
      place.step();
      if (masked) mask(scores, words);
      softmax(scores);
      // The end of the loop: were the wait for P V in the same straight line of code, ptxas would move it up ahead of the
      // exponentials that are to run under the product.
    }
    turn(out, weights, scores, at.tiles > 1);
    wait_full(place);
    pin(out);
    wgmma_fence();
    multiply_v(out, weights, slot_address(place));
    wgmma_commit();
    wgmma_wait<0>();
    pin(out);
    release(place);
    place.step();
    store(out, at);
  }

  __device__ __forceinline__ void run(Cursor& at) {
    while (at.left > 0) {
      if (lane == 0) cursor_place<KEYS>(at, p);
      __syncwarp();
      if (at.nodes > 0) item(at);
      __syncwarp();
      if (lane == 0) cursor_advance<TILE_ROWS>(at, p);
      __syncwarp();
    }
  }
};

}  // namespace treeattn
