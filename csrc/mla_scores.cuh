// The warpgroup of an MLA block that computes scores and weights: 64 packed query rows against the keys in the rings.
//
// Q of the item is in its registers, but for the last panels, which it reads from shared memory. Bases of weights are as in
// consumer.cuh. The next tile's scores are on their way while this one's become weights: so the matrix unit always has
// something to do, and weights are handed to the two output warpgroups as soon as they are there.

#pragma once

#include "merge.cuh"
#include "mla_ring.cuh"

namespace treeattn {

constexpr int SCORES_BARRIER = 2;  // named barrier of this warpgroup

template <class T, int Q_STEPS, int LATENTS, int ROPES>
struct MlaScores {
  using Memory = typename MlaShared<Q_STEPS, LATENTS, ROPES>::Layout;
  static constexpr u32 IN_REGISTERS = Q_STEPS / 4;  // panels of Q
  static constexpr int COUNT = MLA_KEYS / 2;  // scores of a thread
  static constexpr float GROWTH = 8.f;      // in powers of two; float16 weights reach 2^16
  static constexpr float LOWEST = -1.7e38f;  // half of the least number: the base of a row that has seen nothing

  const AttentionParams& p;
  Memory& memory;
  const int warp, lane;
  Place<LATENTS> latent;  // of the next tile to be multiplied, in both rings
  Place<ROPES> rope, scored;  // and of the one whose scores are next
  u32 turn = 0;        // tiles so far: the phase of the weights' barriers
  bool idle = false;   // none of this warp's 16 rows is there: it only takes part in the products
  float base[2];  // of the weights of this thread's two rows, base 2
  float sum[2];   // of the weights, this thread's columns only
  float decay[2];  // by this tile

  __device__ __forceinline__ MlaScores(const AttentionParams& params, Memory& shared, int warp_index, int lane_index)
      : p(params), memory(shared), warp(warp_index), lane(lane_index) {}

  // A thread's rows in the row tile.
  __device__ __forceinline__ i32 local(int half) const { return warp * 16 + lane / 4 + 8 * half; }

  __device__ __forceinline__ void release(u64& empty) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&empty));
  }

  // 2 x 2 blocks of a panel's step of 16 columns, rows from `row` on: the row that this lane names (`load_blocks`).
  __device__ __forceinline__ u32 block_row(u32 panel, u32 row, u32 step) const {
    return panel + (row + lane % 16) * 128 + ((step * 2 + lane / 16 ^ lane % 8) << 4);
  }

  // This warp's rows of a panel of Q, which begin at `row`, to registers.
  __device__ __forceinline__ void take(u32* q, u32 panel, u32 row) const {
#pragma unroll
    for (u32 step = 0; step < 4; ++step) {
      load_blocks(q + 4 * step, block_row(panel, row, step));
#pragma unroll
      for (int i = 0; i < 4; ++i) q[4 * step + i] ^= p.q_sign;
    }
  }

  // The same to where they are kept.
  __device__ __forceinline__ void keep(u32 to, u32 panel, u32 row) const {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 at = (i * 32 + lane) * 16;
      u32 part[4];
      load_shared_16(part, panel + row * 128 + at);
      store_shared_16(to + warp * 16 * 128 + at, part[0] ^ p.q_sign, part[1] ^ p.q_sign, part[2] ^ p.q_sign,
                      part[3] ^ p.q_sign);
    }
  }

  __device__ __forceinline__ u32 kept(u32 panel) const { return shared_address(memory.q[panel - IN_REGISTERS]); }

  __device__ __forceinline__ void wait_latent(u32 half, const Place<LATENTS>& at) const {
    barrier_wait(shared_address(&memory.latent_full[half][at.stage()]), at.phase());
  }
  __device__ __forceinline__ void wait_rope(const Place<ROPES>& at) const {
    barrier_wait(shared_address(&memory.rope_full[at.stage()]), at.phase());
  }

  // Q of the item, which comes through the rings as two tiles do: 32 rows each.
  __device__ __forceinline__ void load_q(u32 (&q)[4 * Q_STEPS]) {
    const Place<LATENTS> second = latent.next(), mine = warp < 2 ? latent : second;
    const Place<ROPES> rope_second = rope.next(), rope_mine = warp < 2 ? rope : rope_second;
    const u32 row = warp % 2 * 16;
    threads_sync<128>(SCORES_BARRIER);  // products of the item before are done in all warps: what is kept may go
    wait_rope(rope);
    wait_rope(rope_second);
    keep(kept(MLA_PANELS - 1), shared_address(memory.ropes[rope_mine.stage()]), row);
#pragma unroll
    for (u32 half = 0; half < HALVES; ++half) {
      wait_latent(half, latent);
      wait_latent(half, second);
      const u32 from = shared_address(memory.latents[half][mine.stage()]);
#pragma unroll
      for (u32 i = 0; i < HALF_PANELS; ++i) {
        const u32 panel = half * HALF_PANELS + i;
        if (panel < IN_REGISTERS)
          take(q + 16 * panel, from + i * TILE_PANEL_BYTES, row);
        else
          keep(kept(panel), from + i * TILE_PANEL_BYTES, row);
      }
      release(memory.latent_empty[half][latent.stage()]);
      release(memory.latent_empty[half][second.stage()]);
    }
    release(memory.rope_empty[rope.stage()]);
    release(memory.rope_empty[rope_second.stage()]);
    latent = second.next();
    rope = scored = rope_second.next();
    fence_async_proxy();
    threads_sync<128>(SCORES_BARRIER);
  }

  // scores (+)= 64 dims of Q K^T: panel number `panel` of Q, the rope part being the last, which comes first.
  __device__ __forceinline__ void multiply_panel(float (&scores)[COUNT], const u32 (&q)[4 * Q_STEPS], u32 panel,
                                                 u32 keys) const {
    const u64 k = operand(keys, 16, ATOM_BYTES);
#pragma unroll
    for (u32 step = 0; step < 4; ++step) {
      if (panel < IN_REGISTERS)
        Product<T, MLA_KEYS, 0>::run(scores, q + 16 * panel + 4 * step, k + 2 * step, 1);
      else
        Product<T, MLA_KEYS, 0>::run_shared(scores, operand(kept(panel), 16, ATOM_BYTES) + 2 * step, k + 2 * step,
                                            panel < MLA_PANELS - 1 || step > 0);
    }
  }

  // Set out to compute the next tile's scores.
  __device__ __forceinline__ void multiply_k(float (&scores)[COUNT], const u32 (&q)[4 * Q_STEPS], bool threads_copied) {
    wait_rope(rope);
    if (threads_copied) fence_async_proxy();
    pin(scores);
    wgmma_fence();
    multiply_panel(scores, q, MLA_PANELS - 1, shared_address(memory.ropes[rope.stage()]));
#pragma unroll
    for (u32 half = 0; half < HALVES; ++half) {
      wait_latent(half, latent);
      if (threads_copied) fence_async_proxy();
      wgmma_fence();
      const u32 keys = shared_address(memory.latents[half][latent.stage()]);
#pragma unroll
      for (u32 i = 0; i < HALF_PANELS; ++i) multiply_panel(scores, q, half * HALF_PANELS + i, keys + i * TILE_PANEL_BYTES);
    }
    wgmma_commit();
    latent = latent.next();
    rope = rope.next();
  }

  // Mask words of this thread's rows for an edge unit.
  __device__ __forceinline__ void load_words(u32 (&words)[2], const Cursor& at, i32 unit) const {
    const i32 word = unit - at.prefix_units;
    // keys of the prefix are seen by every row; behind the prefix or the nodes there is nothing
    const i32 keys = word < 0 ? at.prefix - at.tail_key - unit * EDGE_KEYS : at.present - word * EDGE_KEYS;
    const u32 bound = keys <= 0 ? 0 : keys >= 32 ? ~0u : (1u << keys) - 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 row = at.row0 + local(half);
      words[half] = bound;
      if (word >= 0 && bound != 0) {
        const i64 node = at.first_row + row_node(p, row);
        words[half] &= row < at.row_end ? __ldg(p.mask_words + node * p.num_words + word) : 0;
      }
    }
  }

  __device__ __forceinline__ void mask(float (&scores)[COUNT], const u32 (&words)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 mine = words[half] >> (lane % 4 * 2);
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float& score = scores[4 * j + 2 * half + odd];
          score = mine >> (8 * j + odd) & 1 ? score : -infinity();
        }
    }
  }

  // Scores to weights, in place; true if bases have moved, by what is in `decay`.
  __device__ __forceinline__ bool softmax(float (&scores)[COUNT]) {
    float best[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      best[half] = fmaxf(scores[2 * half], scores[2 * half + 1]);
#pragma unroll
      for (int j = 1; j < MLA_KEYS / 8; ++j)
        best[half] = fmaxf(best[half], fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
    }
    const bool exceeds = fmaxf(best[0] * p.scale - base[0], best[1] * p.scale - base[1]) > GROWTH;
    const bool raised = __any_sync(~0u, exceeds);
    if (raised) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = best[half];
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float higher = fmaxf(base[half], most * p.scale);
        decay[half] = exp2_approx(base[half] - higher);
        base[half] = higher;
        sum[half] *= decay[half];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float part[2] = {0.f, 0.f};  // two chains of sums
#pragma unroll
      for (int j = 0; j < MLA_KEYS / 8; ++j)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float& score = scores[4 * j + 2 * half + odd];
          score = exp2_approx(score * p.scale - base[half]);
          part[odd] += score;
        }
      sum[half] += part[0] + part[1];
    }
    return raised;
  }

  // With an item's last tile: what sums of rows are multiplied by, for the output warpgroups, and lse.
  __device__ __forceinline__ void finish(const Cursor& at) const {
    const i64 part_row = mla_part(p, at);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[half];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      float inverse = total > 0.f ? 1.f / total : 0.f;
      float lse = total > 0.f ? base[half] + log2_approx(total) : -infinity();
      const i32 row = at.row0 + local(half);
      if (lane % 4 == 0 && row < at.row_end) {
        if (at.whole) {
          const u32 within = row_node(p, row);
          const i64 node = at.first_row + static_cast<i64>(within), head = at.kv_head * p.group + (row - within * p.group);
          if (p.sinks != nullptr) add_sink(p, inverse, lse, head);
          if (p.lse != nullptr) p.lse[node * p.stride_lse_row + head * p.stride_lse_head] = lse * LN2;
        } else {
          p.partial_lse[part_row + local(half)] = lse;
        }
        memory.inverse[turn % WEIGHTS][local(half)] = inverse;
      }
    }
  }

  // Weights to shared memory, once those that were there are with the output warpgroups.
  __device__ __forceinline__ void store_weights(const float (&scores)[COUNT], bool raised) {
    const u32 slot = turn % WEIGHTS;
    u32 parts[2][4];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) parts[i / 4][i % 4] = pack<T>(scores[2 * i], scores[2 * i + 1]);
    barrier_wait(shared_address(&memory.weights_empty[slot]), turn / WEIGHTS % 2 ^ 1);
#pragma unroll
    for (u32 step = 0; step < 2; ++step)
      store_blocks(block_row(shared_address(memory.weights[slot / 2]), warp * 16, slot % 2 * 2 + step), parts[step]);
    if (raised && lane % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) memory.decay[slot][local(half)] = decay[half];
    }
    if (lane == 0) memory.raised[slot][warp] = raised;
  }

  // A tile's scores become weights, and are handed on.
  __device__ __forceinline__ void weigh(float (&scores)[COUNT], const Cursor& at, const u32 (&words)[2], i32 tile) {
    pin(scores);
    release(memory.rope_empty[scored.stage()]);
    scored = scored.next();
    bool raised = false;
    if (!idle) {
      if (tile >= uniform(at.full_tiles)) mask(scores, words);
      raised = softmax(scores);
    }
    store_weights(scores, raised);
    if (tile == uniform(at.tiles) - 1) finish(at);
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&memory.weights_full[turn % WEIGHTS]));
    turn += 1;
  }

  __device__ __forceinline__ void item(const Cursor& at) {
    const i32 full = uniform(at.full_tiles), tiles = uniform(at.tiles), edge = uniform(at.edge_begin) - full;
    const bool rows = p.page_rows == 0;
    u32 q[4 * Q_STEPS], words[2];
    float even[COUNT], odd[COUNT];
    idle = uniform(at.row0) + warp * 16 >= uniform(at.row_end);
    load_q(q);
    base[0] = base[1] = LOWEST;
    sum[0] = sum[1] = 0.f;
    multiply_k(even, q, full == 0 || rows);
    i32 tile = 0;
#pragma unroll 1
    for (; tile + 2 < tiles; tile += 2) {
      multiply_k(odd, q, tile + 1 >= full || rows);
      if (tile >= full) load_words(words, at, edge + tile);
      wgmma_wait<1>();
      weigh(even, at, words, tile);
      multiply_k(even, q, tile + 2 >= full || rows);
      if (tile + 1 >= full) load_words(words, at, edge + tile + 1);
      wgmma_wait<1>();
      weigh(odd, at, words, tile + 1);
    }
    if (tile + 1 < tiles) {
      multiply_k(odd, q, tile + 1 >= full || rows);
      if (tile >= full) load_words(words, at, edge + tile);
      wgmma_wait<1>();
      weigh(even, at, words, tile);
      if (tile + 1 >= full) load_words(words, at, edge + tile + 1);
      wgmma_wait<0>();
      weigh(odd, at, words, tile + 1);
    } else {
      if (tile >= full) load_words(words, at, edge + tile);
      wgmma_wait<0>();
      weigh(even, at, words, tile);
    }
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      barrier_wait(shared_address(&memory.item_full[latent.item_slot()]), latent.item_phase());
      const Cursor& at = memory.items[latent.item_slot()];
      if (uniform(at.tiles) == 0) break;
      item(at);
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&memory.item_empty[latent.item_slot()]));
      latent.next_item();
    }
  }
};

}  // namespace treeattn
