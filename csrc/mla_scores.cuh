// The warpgroup of an MLA block that computes scores and weights: 64 packed query rows against the keys in the rings.
//
// Q of the item is in its registers, but for the last panels: a product that takes both operands from shared memory reads
// 4 KB in 32 clocks, which is all that there is. Bases of weights are as in consumer.cuh.
//
// Weights of a tile go to shared memory. They are announced to the two output warpgroups when most of the next tile's
// products are done: so the next softmax runs under products with V, not the other way round.

#pragma once

#include "keys.cuh"
#include "merge.cuh"
#include "mla_ring.cuh"

namespace treeattn {

constexpr int SCORES_BARRIER = 2;  // named barrier of this warpgroup

// FP8: of the cache. The rings have its numbers as T, each worth `k_scale` of it, and fresh rows as they are. Sums of V count
// in numbers of the cache until the first tile with fresh rows.
template <class T, int Q_STEPS, int LATENTS, int ROPES, bool FP8 = false>
struct MlaScores {
  using Memory = typename MlaShared<Q_STEPS, LATENTS, ROPES>::Layout;
  static constexpr u32 IN_REGISTERS = Q_STEPS / 4;  // panels of Q
  static constexpr int WORDS = MLA_KEYS / EDGE_KEYS;  // mask words of a row and tile
  static constexpr float GROWTH = 8.f;      // in powers of two; float16 weights reach 2^16
  static constexpr float LOWEST = -1.7e38f;  // half of the least number: the base of a row that has seen nothing

  const AttentionParams& p;
  Memory& memory;
  const int warp, lane;
  Place<LATENTS> latent;  // of the next tile's first quarters, in both rings
  Place<ROPES> rope;
  u32 turn = 0;        // tiles so far: the phase of the weights' barriers
  bool idle = false;   // none of this warp's 16 rows is there: it only takes part in the products
  float base[2];  // of the weights of this thread's two rows, base 2
  float sum[2];   // of the weights, this thread's columns only
  float decay[2];  // by this tile
  float fp8_scale;  // of this tile's scores, positive

  __device__ __forceinline__ MlaScores(const AttentionParams& params, Memory& shared, int warp_index, int lane_index)
      : p(params), memory(shared), warp(warp_index), lane(lane_index) {}

  // A thread's rows in the row tile.
  __device__ __forceinline__ i32 local(int half) const { return warp * 16 + lane / 4 + 8 * half; }

  __device__ __forceinline__ void release(u64& empty) const {
    __syncwarp();
    warp_arrive(empty, lane);
  }

  // 4 x 4 blocks of a panel's step of 16 columns: the row that this lane names of 8 x 8 blocks (`load_blocks`).
  __device__ __forceinline__ u32 block_row(u32 panel, u32 step) const {
    return panel + (warp * 16 + lane % 16) * 128 + ((step * 2 + lane / 16 ^ lane % 8) << 4);
  }

  __device__ __forceinline__ float scale() const {
    if constexpr (FP8) return fp8_scale;
    return p.scale;
  }

  // A panel of Q to registers.
  __device__ __forceinline__ void take(u32* q, u32 panel, u32 sign) const {
#pragma unroll
    for (u32 step = 0; step < 4; ++step) {
      load_blocks(q + 4 * step, block_row(panel, step));
#pragma unroll
      for (int i = 0; i < 4; ++i) q[4 * step + i] ^= sign;
    }
  }

  // A panel of Q to where it is kept: this warp's rows.
  __device__ __forceinline__ void keep(u32 to, u32 panel, u32 sign) const {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 at = warp * 16 * 128 + (i * 32 + lane) * 16;
      u32 part[4];
      load_shared_16(part, panel + at);
      store_shared_16(to + at, part[0] ^ sign, part[1] ^ sign, part[2] ^ sign, part[3] ^ sign);
    }
  }

  __device__ __forceinline__ u32 kept(u32 panel) const { return shared_address(memory.q[panel - IN_REGISTERS]); }

  // Wait for a quarter of the next tile, and say where it is in its ring.
  __device__ __forceinline__ Place<LATENTS> wait_quarter(u32 quarter) const {
    const Place<LATENTS> at = quarter < HALVES ? latent : latent.next();
    barrier_wait(shared_address(&memory.latent_full[quarter % HALVES][at.stage()]), at.phase());
    return at;
  }

  // Q of the item, which comes through the rings as a tile does; `sign`: of scales, as q_sign. Its parts are given back
  // together, behind the fence: an arrival does not wait for loads from shared memory, and tensor copies to where they read
  // from are not queued behind them.
  __device__ __forceinline__ void load_q(u32 (&q)[4 * Q_STEPS], u32 sign) {
    threads_sync<128>(SCORES_BARRIER);  // products of the item before are done in all warps: what is kept may go
    barrier_wait(shared_address(&memory.rope_full[rope.stage()]), rope.phase());
    keep(kept(MLA_PANELS - 1), shared_address(memory.ropes[rope.stage()]), sign);
#pragma unroll
    for (u32 quarter = 0; quarter < QUARTERS; ++quarter) {
      const u32 from = shared_address(memory.latents[quarter % HALVES][wait_quarter(quarter).stage()]);
#pragma unroll
      for (u32 panel = 2 * quarter; panel < 2 * quarter + 2; ++panel) {
        if (panel < IN_REGISTERS)
          take(q + 16 * panel, from + panel % 2 * MLA_PANEL_BYTES, sign);
        else
          keep(kept(panel), from + panel % 2 * MLA_PANEL_BYTES, sign);
      }
    }
    pin(q);
    fence_async_proxy();
    threads_sync<128>(SCORES_BARRIER);
    release(memory.rope_empty[rope.stage()]);
#pragma unroll
    for (u32 quarter = 0; quarter < QUARTERS; ++quarter)
      release(memory.latent_empty[quarter % HALVES][(quarter < HALVES ? latent : latent.next()).stage()]);
    rope = rope.next();
    latent = latent.next().next();
  }

  // scores (+)= 64 dims of Q K^T: panel number `panel` of Q, of which the rope part is the last and the first comes first.
  __device__ __forceinline__ void multiply_panel(float (&scores)[MLA_KEYS / 2], const u32 (&q)[4 * Q_STEPS], u32 panel,
                                                 u32 keys) const {
    const u64 k = operand(keys, 16, ATOM_BYTES);
#pragma unroll
    for (u32 step = 0; step < 4; ++step) {
      if (panel < IN_REGISTERS)
        Product<T, MLA_KEYS, 0>::run(scores, q + 16 * panel + 4 * step, k + 2 * step, panel > 0 || step > 0);
      else
        Product<T, MLA_KEYS, 0>::run_shared(scores, operand(kept(panel), 16, ATOM_BYTES) + 2 * step, k + 2 * step, 1);
    }
  }

  // The same of a quarter of the latent part.
  __device__ __forceinline__ void multiply_quarter(float (&scores)[MLA_KEYS / 2], const u32 (&q)[4 * Q_STEPS], u32 quarter,
                                                   bool threads_copied) const {
    const Place<LATENTS> at = wait_quarter(quarter);
    if (seldom(threads_copied)) fence_async_proxy();
    wgmma_fence();
    const u32 keys = shared_address(memory.latents[quarter % HALVES][at.stage()]);
    multiply_panel(scores, q, 2 * quarter, keys);
    multiply_panel(scores, q, 2 * quarter + 1, keys + MLA_PANEL_BYTES);
  }

  // Scores of the next tile. `held`: there are weights that wait to be announced. Panels of Q in shared memory come in the
  // middle: such products take longer to begin and to end.
  __device__ __forceinline__ void multiply_k(float (&scores)[MLA_KEYS / 2], const u32 (&q)[4 * Q_STEPS], bool threads_copied,
                                             bool held) {
    pin(scores);
    multiply_quarter(scores, q, 0, threads_copied);
    multiply_quarter(scores, q, 1, threads_copied);
    barrier_wait(shared_address(&memory.rope_full[rope.stage()]), rope.phase());
    if (seldom(threads_copied)) fence_async_proxy();
    wgmma_fence();
    multiply_panel(scores, q, MLA_PANELS - 1, shared_address(memory.ropes[rope.stage()]));
    multiply_quarter(scores, q, 3, threads_copied);
    wgmma_commit();
    multiply_quarter(scores, q, 2, threads_copied);
    wgmma_commit();
    latent = latent.next().next();
    if (held) fence_async_proxy();  // waits for stores, which costs nothing here
    wgmma_wait<1>();
    if (held) announce();
    wgmma_wait<0>();
    pin(scores);
    release(memory.rope_empty[rope.stage()]);
    rope = rope.next();
  }

  // The weights of the tile before may be read; behind a fence.
  __device__ __forceinline__ void announce() const {
    __syncwarp();
    warp_arrive(memory.weights_full[turn % 2 ^ 1], lane);
  }

  // Mask words of this thread's rows for the edge tile whose first unit is `unit`. FP8: `end` is behind its last.
  __device__ __forceinline__ void load_words(u32 (&words)[2][WORDS], const Cursor& at, i32 unit, i32 end) const {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const i32 word = unit + i - at.prefix_units;
      // keys of the prefix are seen by every row; behind the prefix or the nodes there is nothing
      const i32 keys = word < 0 ? at.prefix - at.tail_key - (unit + i) * EDGE_KEYS : at.present - word * EDGE_KEYS;
      const u32 bound = unit + i >= (FP8 ? end : at.edge_end) || keys <= 0 ? 0 : keys >= 32 ? ~0u : (1u << keys) - 1;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i32 row = at.row0 + local(half);
        words[half][i] = bound;
        if (word >= 0 && bound != 0) {
          const i64 node = at.first_row + static_cast<i64>(row_node(p, row));
          words[half][i] &= row < at.row_end ? __ldg(p.mask_words + node * p.num_words + word) : 0;
        }
      }
    }
  }

  // Scores to weights, in place; true if bases have moved, by what is in `decay`.
  __device__ __forceinline__ bool softmax(float (&scores)[MLA_KEYS / 2]) {
    float best[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      best[half] = fmaxf(scores[2 * half], scores[2 * half + 1]);
#pragma unroll
      for (int j = 1; j < MLA_KEYS / 8; ++j)
        best[half] = fmaxf(best[half], fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
    }
    const bool exceeds = fmaxf(best[0] * scale() - base[0], best[1] * scale() - base[1]) > GROWTH;
    const bool raised = __any_sync(~0u, exceeds);
    if (seldom(raised)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = best[half];
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float higher = fmaxf(base[half], most * scale());
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
          score = exp2_approx(score * scale() - base[half]);
          part[odd] += score;
        }
      sum[half] += part[0] + part[1];
    }
    return raised;
  }

  // With an item's last tile: what sums of rows are multiplied by, for the output warpgroups, and lse. `worth`: of V's numbers.
  __device__ __forceinline__ void finish(const Cursor& at, float worth) const {
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
          if (p.split == 0)
            store_lse(p, part_row + local(half), lse, memory.tag);
          else
            p.partial_lse[part_row + local(half)] = lse;
        }
        memory.inverse[turn % 2][local(half)] = inverse * worth;
      }
    }
  }

  // Weights to shared memory, once those of the tile before are with the output warpgroups.
  __device__ __forceinline__ void store_weights(const float (&scores)[MLA_KEYS / 2], bool raised) {
    const u32 slot = turn % 2;
    barrier_wait(shared_address(&memory.weights_empty[slot]), turn / 2 % 2 ^ 1);
#pragma unroll
    for (u32 step = 0; step < MLA_KEYS / 16; ++step) {
      u32 part[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) part[i] = pack<T>(scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1]);
      store_blocks(block_row(shared_address(memory.weights[slot]), step), part);
    }
    if (raised && lane % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) memory.decay[slot][local(half)] = decay[half];
    }
    if (lane == 0) memory.raised[slot][warp] = raised;
  }

  // A tile with fresh rows, whose numbers are worth what they are: Q has the sign of the cache's.
  __device__ __forceinline__ void begin_fresh(float (&scores)[MLA_KEYS / 2], const Cursor& at) {
    fp8_scale = p.scale;
    if (k_worth(p, at) < 0.f) {
#pragma unroll
      for (int i = 0; i < MLA_KEYS / 2; ++i) scores[i] = -scores[i];
    }
  }

  // With the first such tile: sums so far count in numbers of the cache.
  __device__ __forceinline__ bool rescale(bool raised, const Cursor& at) {
    const float k_scale = k_worth(p, at);
#pragma unroll
    for (int half = 0; half < 2; ++half) decay[half] = raised ? decay[half] * k_scale : k_scale;
    return true;
  }

  __device__ __forceinline__ void item(const Cursor& at) {
    const i32 full = uniform(at.full_tiles), tiles = uniform(at.tiles);
    i32 cached = tiles;  // tiles of the cache alone
    u32 q[4 * Q_STEPS];
    float scores[MLA_KEYS / 2];
    idle = uniform(at.row0) + warp * 16 >= uniform(at.row_end);
    if constexpr (FP8) {
      cached = uniform(fp8_tiles<MLA_KEYS>(p, at).cached);
      const float k_scale = k_worth(p, at);
      fp8_scale = bounded(fabsf(k_scale) * p.scale);
      load_q(q, p.q_sign ^ (k_scale < 0.f ? 0x80008000 : 0));
    } else {
      load_q(q, p.q_sign);
    }
    base[0] = base[1] = LOWEST;
    sum[0] = sum[1] = 0.f;
#pragma unroll 1
    for (i32 tile = 0; tile < tiles; ++tile) {
      const bool edge = tile >= full;
      u32 words[2][WORDS];
      if (seldom(edge)) {
        if constexpr (FP8)
          load_words(words, at, fp8_unit<MLA_KEYS>(p, at, tile, cached), tile < cached && cached < tiles ? at.prefix_units : at.edge_end);
        else
          load_words(words, at, at.edge_begin + (tile - full) * WORDS, 0);
      }
      multiply_k(scores, q, edge || p.page_rows == 0, tile > 0);
      bool raised = false;
      if (FP8 && seldom(tile >= cached)) begin_fresh(scores, at);
      if (!idle) {
        if (seldom(edge)) mask(scores, words, lane);
        raised = softmax(scores);
      }
      if (FP8 && seldom(tile == cached && tile > 0)) raised = rescale(raised, at);
      store_weights(scores, raised);
      if (seldom(tile == tiles - 1)) finish(at, FP8 && cached == tiles ? k_worth(p, at) : 1.f);
      __syncwarp();
      turn += 1;
    }
    fence_async_proxy();
    announce();
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
