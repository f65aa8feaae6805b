// A consumer warpgroup: 64 packed query rows against the tiles in the ring, online softmax, rows out.
//
// Q stays in registers (of three warpgroups, half of it), where the products take it from: that halves the reads of
// shared memory of Q K^T, which with 64-key tiles would otherwise be its limit. The weights P stay in registers too.
//
// Scores of tile i are issued ahead of P V of tile i - 1, so that the matrix unit has work while this warpgroup computes
// the exponentials of tile i. The loop is bound by instructions (measured: docs/performance.md), hence
// - no work for masks in full tiles, and everything that does not differ in a warp known to the compiler as uniform;
// - weights are 2^(score - base), and the base of a row moves only when a score exceeds it by GROWTH: the products seldom
//   have to be scaled, nor the lanes to agree on a maximum. A weight is 2^GROWTH at most, sums are float32: nothing is lost.

#pragma once

#include "fp8_tiles.cuh"
#include "keys.cuh"
#include "merge.cuh"

namespace treeattn {

// FP8: of the caches. The ring has their numbers as T, each worth the item's scale of it, and fresh rows as they are. Sums of
// V count in numbers of the cache until the first tile with fresh rows.
// Io: of Q and out. Where it is bf16 and T float16, Q is multiplied as float16 times a power of two, which the greatest number
// of a warp's rows gives: as exact as float16 is, but for rows 2^20 smaller than others. There are no fresh rows then.
template <class T, int HEAD_DIM, int CONSUMERS, int KEYS, int STAGES, int Q_STEPS, int OPTIONS,
          class Memories = Shared<HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS>, bool FP8 = false, class Io = T>
struct Consumer {
  using Memory = typename Memories::Layout;
  static constexpr u32 GROUP_BYTES = Memories::GROUP_BYTES;
  static constexpr int TILE_ROWS = 64 * CONSUMERS;
  static constexpr int WORDS = KEYS / EDGE_KEYS;  // mask words of a row and tile
  static constexpr bool ALL_Q = Q_STEPS == HEAD_DIM / 16;  // is in registers
  static constexpr bool WINDOW = (OPTIONS & OPTION_WINDOW) != 0, CAP = (OPTIONS & OPTION_CAP) != 0;
  static constexpr bool CONVERTS = IS_HALF<T> != IS_HALF<Io>, FRESH = FP8 && !CONVERTS;
  static constexpr float GROWTH = 8.f;      // in powers of two; float16 weights reach 2^16
  static constexpr float LOWEST = -1.7e38f;  // half of the least number: the base of a row that has seen nothing

  const AttentionParams& p;
  Memory& memory;
  const int lane;
  u32 q_address;
  Place<STAGES> place;  // of the tile whose weights are to be multiplied with V
  Place<STAGES> v_place;  // of the tile whose V is being multiplied
  bool idle = false;    // none of this warp's 16 rows is there: it only takes part in the products
  float base[2];  // of the weights of these rows, base 2
  float sum[2];   // of the weights, this thread's columns only
  float fp8_scale;  // of this tile's scores, or of what their soft cap takes; positive

  __device__ __forceinline__ Consumer(const AttentionParams& params, Memory& shared, int group, int lane_index)
      : p(params), memory(shared), lane(lane_index) {
    q_address = shared_address(memory.q[group]);
  }

  // Of the block. Not kept, as the rows are not: registers are few, and these seldom wanted.
  static __device__ __forceinline__ i32 warpgroup() { return uniform(thread_in_block() / 128); }

  // The upper one of its two rows in the row tile.
  static __device__ __forceinline__ i32 upper_row() { return thread_in_block() / 32 * 16 + thread_in_block() % 32 / 4; }

  // K (half 0) or V (half 1) of the stage at `at` is there. What threads copied has to be made visible to wgmma; what
  // tensor copies wrote is.
  __device__ __forceinline__ void wait_full(const Place<STAGES>& at, int half, bool threads_copied) {
    barrier_wait(shared_address(&memory.full[at.stage()][half]), at.phase());
    if (threads_copied) fence_async_proxy();
  }

  __device__ __forceinline__ void release(const Place<STAGES>& at, int half) {
    if (lane == 0) barrier_arrive(shared_address(&memory.empty[at.stage()][half]));
  }

  __device__ __forceinline__ u32 half_address(const Place<STAGES>& at, int half) const {
    return shared_address(memory.stages[at.stage()][half]);
  }

  // This warpgroup is through with the item's Q.
  __device__ __forceinline__ void release_q() {
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&memory.q_empty));
  }

  // What scores are multiplied by, soft cap or not.
  __device__ __forceinline__ float scale() const {
    if constexpr (CAP) return 1.f;
    if constexpr (FP8) return fp8_scale;
    return p.scale;
  }

  __device__ __forceinline__ float cap_in() const {
    if constexpr (FP8) return fp8_scale;
    return p.cap_in;
  }

  // This warp's rows of Q as float16 times a power of two with that sign, in place. Returns the inverse of the power.
  __device__ __forceinline__ float convert_q(u32 sign) const {
    static_assert(HEAD_DIM == 128, "a lane for each 64 dims of a row");
    const u32 row = thread_in_group() / 32 * 16 + lane % 16, numbers = q_address + lane / 16 * (64 * 128) + row * 128;
    u32 greatest = 0, part[4];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
      load_shared_16(part, numbers + ((i ^ row % 8) << 4));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 low = part[j] & 0x7FFF, high = part[j] >> 16 & 0x7FFF;
        if (low < 0x7F80 && low > greatest) greatest = low;  // inf and NaN are their row's own business
        if (high < 0x7F80 && high > greatest) greatest = high;
      }
    }
    const u32 exponent = most(__reduce_max_sync(~0u, greatest) >> 7, 15);
    const float factor = __int_as_float((268 - exponent) << 23 | (sign & 0x80000000));  // 2^14 to 2^15
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
      const u32 at = numbers + ((i ^ row % 8) << 4);
      load_shared_16(part, at);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        part[j] = pack<T>(__int_as_float(part[j] << 16) * factor, __int_as_float(part[j] & 0xFFFF0000) * factor);
      store_shared_16(at, part[0], part[1], part[2], part[3]);
    }
    __syncwarp();
    return __int_as_float((exponent - 14) << 23);
  }

  // Wait for the item's Q, or copy this warp's rows of the first item's, and bring the first dims to registers. FP8:
  // `fp8_sign` is that of both scales, as q_sign. Returns what scores are to be multiplied by for that.
  __device__ __forceinline__ float load_q(u32 (&q)[4 * Q_STEPS], const Cursor& at, u32 fp8_sign) {
    const u32& sign = FP8 ? fp8_sign : p.q_sign;
    if (place.item() == 0) {
      const u32 thread = thread_in_block();
      copy_rows<HEAD_DIM, 16>(copy_place<HEAD_DIM>(q_address, 64 * 128, thread % 128 / 32 * 16, thread % 32),
                              q_row(p, at, thread / 32 * 16 + thread % 16), thread % 32);
      copy_async_wait_all();
      __syncwarp();
      if (!ALL_Q) {
        fence_async_proxy();
        threads_sync<128>(5 + warpgroup());
      }
    } else {
      barrier_wait(shared_address(&memory.q_full), place.q_phase());
    }
    float inverse = 1.f;
    if constexpr (CONVERTS) inverse = convert_q(sign);
    const u32 row = q_address + (thread_in_group() / 32 * 16 + lane % 16) * 128;
#pragma unroll
    for (int step = 0; step < Q_STEPS; ++step) {
      load_blocks(q + 4 * step, row + step / 4 * (64 * 128) + ((step % 4 * 2 + lane / 16 ^ lane % 8) << 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!CONVERTS) q[4 * step + i] ^= sign;
      }
    }
    if (ALL_Q) {
      if (CONVERTS) fence_async_proxy();  // an arrival does not wait for loads
      release_q();
    } else {
      if (!CONVERTS && sign != 0) {
        if (Q_STEPS % 4 != 0) threads_sync<128>(5 + warpgroup());  // the panel that is changed has been read by all warps
        for (u32 at = Q_STEPS / 4 * (64 * 128) + thread_in_group() * 16; at < 64 * HEAD_DIM * 2; at += 128 * 16) {
          u32 part[4];
          load_shared_16(part, q_address + at);
          store_shared_16(q_address + at, part[0] ^ sign, part[1] ^ sign, part[2] ^ sign, part[3] ^ sign);
        }
      }
      fence_async_proxy();  // for what was copied, too
      if (CONVERTS || sign != 0) threads_sync<128>(5 + warpgroup());
    }
    return inverse;
  }

  // scores[64, KEYS] = Q K^T
  __device__ __forceinline__ void multiply_k(float (&scores)[KEYS / 2], const u32 (&q)[4 * Q_STEPS], u32 slot) const {
    const u64 k = operand(slot, 16, GROUP_BYTES);
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
      const u64 k_step = k + ((step / 4 * ATOM_BYTES + step % 4 * 32) >> 4);
      if constexpr (!ALL_Q) {
        if (step >= Q_STEPS) {
          const u64 a = operand(q_address, 16, ATOM_BYTES) + ((step / 4 * 64 * 128 + step % 4 * 32) >> 4);
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
    const u64 v = operand(slot, ATOM_BYTES, GROUP_BYTES);
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step)
      Product<T, HEAD_DIM, 1>::run(out, weights + 4 * step, v + ((step * 2 * GROUP_BYTES) >> 4), 1);
  }

  // Mask words of this thread's rows for the edge tile whose first unit is `unit`. FP8: units from `edge_units` on are not its.
  __device__ __forceinline__ void load_words(u32 (&words)[2][WORDS], const Cursor& at, i32 unit, i32 edge_units) const {
    const i32 upper = at.row0 + upper_row();
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const i32 word = unit + i - at.prefix_units;
      // keys of the prefix are seen by every row; behind the prefix or the nodes there is nothing
      i32 begin = at.tail_key + (unit + i) * EDGE_KEYS, end = at.prefix;
      if constexpr (WINDOW) {
        const bool front = unit + i < at.front_units;
        begin += (front ? at.first : at.tail_key - at.front_units * EDGE_KEYS) - at.tail_key;
        end = front ? at.full : end;
      }
      const i32 keys = word < 0 ? end - begin : at.present - word * EDGE_KEYS;
      const u32 bound = unit + i >= (FP8 ? edge_units : at.edge_end) || keys <= 0 ? 0 : keys >= 32 ? ~0u : (1u << keys) - 1;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i32 row = upper + 8 * half;
        words[half][i] = bound;
        if (word >= 0 && bound != 0) {
          const i64 node = at.first_row + static_cast<i64>(row_node(p, row));
          words[half][i] &= row < at.row_end ? __ldg(p.mask_words + node * p.num_words + word) : 0;
        }
        if constexpr (WINDOW) {
          if (p.positions != nullptr && row < at.row_end) {
            const i32 since = key_of_node(p, at, row_node(p, row)) - p.window_left;
            words[half][i] &= word < 0 ? from_bit(since - begin) : nodes_since(at, word, words[half][i], since);
          }
        }
      }
    }
    if constexpr (WINDOW) __syncwarp();  // lanes have looked at more nodes or fewer, and products want all of a warp
  }

  // Bits from number `first` on.
  static __device__ __forceinline__ u32 from_bit(i32 first) { return first <= 0 ? ~0u : first >= 32 ? 0 : ~0u << first; }

  // Of the nodes of a mask word, those that `mask` will ask this thread for, without what is before the key `since`.
  __device__ __forceinline__ u32 nodes_since(const Cursor& at, i32 word, u32 nodes, i32 since) const {
#pragma unroll 1
    for (u32 left = nodes & 0x03030303u << lane % 4 * 2; left != 0; left &= left - 1) {
      const i32 bit = __ffs(left) - 1;
      if (key_of_node(p, at, word * EDGE_KEYS + bit) < since) nodes &= ~(1u << bit);
    }
    return nodes;
  }

  // Scores to capped ones, in base 2.
  __device__ __forceinline__ void cap(float (&scores)[KEYS / 2]) const {
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) scores[i] = soft_capped(scores[i] * cap_in()) * p.cap_out;
  }

  // A score exceeds its row's base by far: move the bases of this warp's rows to their maxima, and scale what there is.
  __device__ __forceinline__ void raise(float (&out)[HEAD_DIM / 2], const float (&best)[2], bool multiplying) {
    if (multiplying) {
      wgmma_wait<0>();
      pin(out);
    }
    float decay[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = best[half];
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float raised = fmaxf(base[half], CAP ? most : most * scale());
      decay[half] = exp2_approx(base[half] - raised);
      base[half] = raised;
      sum[half] *= decay[half];
    }
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; ++j) {
      out[4 * j] *= decay[0];
      out[4 * j + 1] *= decay[0];
      out[4 * j + 2] *= decay[1];
      out[4 * j + 3] *= decay[1];
    }
  }

  // Scores to weights, in place. `multiplying`: a product that adds to `out` is on its way.
  __device__ __forceinline__ void softmax(float (&scores)[KEYS / 2], float (&out)[HEAD_DIM / 2], bool multiplying) {
    const float scale = this->scale();
    float best[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      best[half] = fmaxf(scores[2 * half], scores[2 * half + 1]);
#pragma unroll
      for (int j = 1; j < KEYS / 8; ++j)
        best[half] = fmaxf(best[half], fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
    }
    const bool exceeds = fmaxf(best[0] * scale - base[0], best[1] * scale - base[1]) > GROWTH;
    if (__any_sync(~0u, exceeds)) raise(out, best, multiplying);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float part[2] = {0.f, 0.f};  // two chains of sums
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float& score = scores[4 * j + 2 * half + odd];
          score = exp2_approx(score * scale - base[half]);
          part[odd] += score;
        }
      sum[half] += part[0] + part[1];
    }
  }

  static __device__ __forceinline__ void weights_of(u32 (&weights)[KEYS / 4], const float (&scores)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) weights[i] = pack<T>(scores[2 * i], scores[2 * i + 1]);
  }

  // The product with V of the tile before is done, and its place is given back.
  __device__ __forceinline__ void finish_v(float (&out)[HEAD_DIM / 2], const Place<STAGES>& at) {
    wgmma_wait<0>();
    pin(out);
    release(at, 1);
  }

  // Rows of a whole item to `out`, of a part to its partial slot. FP8: `worth` of V's numbers.
  __device__ __forceinline__ void store(float (&out)[HEAD_DIM / 2], const Cursor& at, float worth) {
    const i64 part_row = part_slot(at, p) * TILE_ROWS;
    const u32 tag = memory.tag;
    const i32 upper = upper_row();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[half];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      float inverse = total > 0.f ? 1.f / total : 0.f;
      float lse = total > 0.f ? base[half] + log2_approx(total) : -infinity();
      if constexpr (FP8) inverse *= worth;
      const i32 local = upper + 8 * half, row = at.row0 + local;
      if (row >= at.row_end) continue;
      if (at.whole) {
        const u32 of_tree = row_node(p, row);
        const i64 node = at.first_row + static_cast<i64>(of_tree), head = at.kv_head * p.group + (row - of_tree * p.group);
        if (p.sinks != nullptr) add_sink(p, inverse, lse, head);
        u32* to = reinterpret_cast<u32*>(static_cast<unsigned short*>(p.out) + node * p.stride_out_row +
                                         head * p.stride_out_head) + lane % 4;
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; ++j)
          to[4 * j] = pack<Io>(out[4 * j + 2 * half] * inverse, out[4 * j + 2 * half + 1] * inverse);
        if (p.lse != nullptr && lane % 4 == 0) p.lse[node * p.stride_lse_row + head * p.stride_lse_head] = lse * LN2;
        continue;
      }
      // in the order of the fragments, 16 bytes a thread (the merge knows)
      float* to = p.partial_out + (part_row + local) * HEAD_DIM + lane % 4 * 4;
      if (p.split == 0) {
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; j += 2)
          store_part(to + 8 * j, out[4 * j + 2 * half] * inverse, out[4 * j + 2 * half + 1] * inverse,
                     out[4 * j + 4 + 2 * half] * inverse, out[4 * j + 5 + 2 * half] * inverse, tag);
        if (lane % 4 == 0) store_lse(p, part_row + local, lse, tag);
      } else {
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; j += 2)
          store_four(to + 8 * j, out[4 * j + 2 * half] * inverse, out[4 * j + 2 * half + 1] * inverse,
                     out[4 * j + 4 + 2 * half] * inverse, out[4 * j + 5 + 2 * half] * inverse);
        if (lane % 4 == 0) p.partial_lse[part_row + local] = lse;
      }
    }
  }

  // A tile with fresh rows, whose numbers are worth what they are: Q has the sign of the cache's.
  __device__ __forceinline__ void begin_fresh(float (&scores)[KEYS / 2], const Cursor& at) {
    fp8_scale = CAP ? p.cap_in : p.scale;
    if (k_worth(p, at) < 0.f) {
#pragma unroll
      for (int i = 0; i < KEYS / 2; ++i) scores[i] = -scores[i];
    }
  }

  // Ahead of V of the first such tile: sums of what is worth `v_worth` so far.
  __device__ __forceinline__ void rescale(float (&out)[HEAD_DIM / 2], const Cursor& at) const {
    const float worth = v_worth(p, at);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) out[i] *= worth;
  }

  // Whether threads have copied a tile to the ring, and no fence behind it.
  __device__ __forceinline__ bool threads_copied(i32 tile, bool edge, i32 cached) const {
    return (FP8 ? tile >= cached : edge) || p.page_rows == 0;
  }

  // Scores of the first tile of an item. FP8: `cached` tiles are of the cache.
  __device__ __forceinline__ void first_tile(float (&scores)[KEYS / 2], float (&out)[HEAD_DIM / 2],
                                             const u32 (&q)[4 * Q_STEPS], const Cursor& at, bool edge, i32 cached) {
    u32 words[2][WORDS];
    if (edge) load_words(words, at, at.edge_begin, FP8 && cached > 0 ? cached_end(p, at) : at.edge_end);
    wait_full(place, 0, threads_copied(0, edge, cached));
    wgmma_fence();
    multiply_k(scores, q, half_address(place, 0));
    wgmma_commit();
    wgmma_wait<0>();
    pin(scores);
    release(place, 0);
    if (FRESH && seldom(cached == 0)) begin_fresh(scores, at);
    if (!idle) {
      if constexpr (CAP) cap(scores);
      if (edge) mask(scores, words, lane);
      softmax(scores, out, false);
    }
  }

  // Scores of the tile behind `place` to weights, while those of the tile at `place` are multiplied with V.
  __device__ __forceinline__ void next_tile(float (&scores)[KEYS / 2], float (&out)[HEAD_DIM / 2], u32 (&weights)[KEYS / 4],
                                            const u32 (&q)[4 * Q_STEPS], const Cursor& at, i32 tile, i32 full,
                                            i32 cached) {
    const bool edge = tile >= full;
    u32 words[2][WORDS];
    if (edge) {
      if constexpr (FP8)
        load_words(words, at, fp8_unit<KEYS>(p, at, tile, cached), tile < cached ? cached_end(p, at) : at.edge_end);
      else
        load_words(words, at, at.edge_begin + (tile - full) * (KEYS / EDGE_KEYS), at.edge_end);
    }
    // Not at the end of the tile before: were the wait for P V in one straight line with the exponentials that are to run
    // under the product, ptxas would move it up ahead of them.
    if (tile > 1) {
      finish_v(out, v_place);
      if (FRESH && seldom(tile == cached + 1)) rescale(out, at);
    }
    weights_of(weights, scores);
    const Place<STAGES> next = place.next();
    wait_full(next, 0, threads_copied(tile, edge, cached));
    pin(scores);
    pin(out);
    wgmma_fence();
    multiply_k(scores, q, half_address(next, 0));
    wgmma_commit();
    wait_full(place, 1, threads_copied(tile, edge, cached));
    wgmma_fence();
    multiply_v(out, weights, half_address(place, 1));
    wgmma_commit();
    wgmma_wait<1>();
    pin(scores);
    release(next, 0);
    v_place = place;
    place = next;
    if (FRESH && seldom(tile >= cached)) begin_fresh(scores, at);
    if (!idle) {
      if constexpr (CAP) cap(scores);
      if (edge) mask(scores, words, lane);
      softmax(scores, out, true);
    }
  }

  __device__ __forceinline__ void item(const Cursor& at) {
    const i32 full = uniform(at.full_tiles);
    i32 tiles = uniform(at.tiles), cached = tiles;
    if constexpr (FP8) {
      const Fp8Tiles counted = fp8_tiles<KEYS>(p, at);
      tiles = uniform(counted.all);
      cached = uniform(counted.cached);
    }
    if (uniform(at.row0) + warpgroup() * 64 >= uniform(at.row_end)) {
      // none of this warpgroup's rows is there
      if (place.item() > 0) barrier_wait(shared_address(&memory.q_full), place.q_phase());
      release_q();
      for (i32 tile = 0; tile < tiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          wait_full(place, half, false);
          __syncwarp();  // no lane may still look at a phase that the release lets end (elsewhere wgmma brings them together)
          release(place, half);
        }
        place = place.next();
      }
      return;
    }
    u32 q[4 * Q_STEPS], weights[KEYS / 4];
    float scores[KEYS / 2], out[HEAD_DIM / 2];
    idle = uniform(at.row0) + uniform(upper_row()) >= uniform(at.row_end);
    if constexpr (FP8) {
      const float worth = k_worth(p, at);
      const float inverse = load_q(q, at, p.q_sign ^ (worth < 0.f ? 0x80008000 : 0));
      fp8_scale = bounded(fabsf(worth) * (CAP ? p.cap_in : p.scale) * inverse);
    } else {
      load_q(q, at, 0);
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) out[i] = 0.f;
    base[0] = base[1] = LOWEST;
    sum[0] = sum[1] = 0.f;

    first_tile(scores, out, q, at, full == 0, cached);
#pragma unroll 1
    for (i32 tile = 1; tile < tiles; ++tile) next_tile(scores, out, weights, q, at, tile, full, cached);
    if (!ALL_Q) release_q();
    if (tiles > 1) {
      finish_v(out, v_place);
      if (FRESH && seldom(tiles == cached + 1)) rescale(out, at);
    }
    const float worth = FP8 && cached == tiles ? v_worth(p, at) : 1.f;
    weights_of(weights, scores);
    wait_full(place, 1, true);
    pin(out);
    wgmma_fence();
    multiply_v(out, weights, half_address(place, 1));
    wgmma_commit();
    finish_v(out, place);
    place = place.next();
    store(out, at, worth);
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      barrier_wait(shared_address(&memory.item_full[place.item_slot()]), place.item_phase());
      const Cursor& at = memory.items[place.item_slot()];
      if (uniform(at.tiles) == 0) break;
      item(at);
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&memory.item_empty[place.item_slot()]));
      place.next_item();
    }
    constexpr int IN_FLIGHT = FP8 ? 18 : HEAD_DIM == 64 ? 16 : 22;  // a sixth of one item's parts; else that many spill
    if (p.split == 0) Merge<Io, HEAD_DIM, CONSUMERS, Memory, 64, IN_FLIGHT>(p, memory).run();
  }
};

}  // namespace treeattn
