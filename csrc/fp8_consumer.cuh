// The consumer warpgroup of an FP8 kernel: up to ROWS packed query rows against the tiles in the ring.
//
// Operands are swapped: keys are the 64 rows of a product and query rows its columns, so that what the caches hold is the
// operand that comes from registers, where it is made float16 on the way. S^T = K Q^T has 64 keys and ROWS columns;
// out^T += V^T P^T has 64 dims, twice, and the same columns. Q and the weights P are in shared memory.
// - K by ldmatrix: a thread gets four dims of a key side by side. So that they are places 2 t, 2 t + 1, 2 t + 8 and 2 t + 9
//   of 16 summed over, Q's pairs of dims are dealt out anew when it is loaded (order_q).
// - V by ldmatrix.trans on pairs of dims: a thread gets two keys of two dims, rows l / 4 and l / 4 + 8 of a product, of
//   which row r + 8 i is dim 2 r + i.
// - scores leave the products with a key a row; stmatrix.trans writes the weights with a query row a row.
//
// K and V are given back together, when both are in registers. The weights of a tile are seen by all four warps, which meet
// once a tile for that, and say there whether some row's base has to move (as in consumer.cuh; a thread looks at the sum
// of a row's two weights). Then the four warps agree on maxima through shared memory and make the weights again.
//
// bf16 queries are multiplied as float16 times a power of two, which the greatest number of the row tile gives: exact
// down to 2^-29 of it. Fresh K and V of nodes keep their type: a tile with such keys, read from global memory straight to
// registers, is multiplied in it.

#pragma once

#include "fp8_ring.cuh"
#include "fp8_tiles.cuh"
#include "merge.cuh"

namespace treeattn {

constexpr int FP8_BARRIER = 5;  // named barrier of the warpgroup

template <class T, class Format, int HEAD_DIM, int ROWS, int KEYS, int STAGES>
struct Fp8Consumer {
  using Memories = Fp8Shared<HEAD_DIM, ROWS, KEYS, STAGES>;
  using Memory = typename Memories::Layout;
  static_assert(KEYS == 64, "the rows of a product");
  static constexpr int COLUMNS = ROWS / 4;       // of a thread: 8 j + 2 (l % 4) + i at 2 j + i
  static constexpr int SLABS = HEAD_DIM / 64;    // of out^T
  static constexpr int K_STEPS = HEAD_DIM / 16, V_STEPS = KEYS / 16;
  static constexpr u32 Q_PANEL = ROWS * 128;
  static constexpr int WORDS = Memories::WORDS;
  static constexpr float GROWTH = 256.f;     // of a row's weights over 1 before its base moves
  static constexpr float LOWEST = -1.7e38f;  // half of the least number: the base of a row that has seen nothing

  using Scores = float[ROWS / 2];
  using Out = float[SLABS][ROWS / 2];
  using Each = float[COLUMNS];

  const AttentionParams& p;
  Memory& memory;
  Exchange<ROWS, WORDS>& exchange;
  const int warp, lane;
  const u32 q_address;
  Place<STAGES> place;

  __device__ __forceinline__ Fp8Consumer(const AttentionParams& params, Memory& shared, int, int lane_index)
      : p(params), memory(shared), exchange(shared.exchange), warp(uniform(threadIdx.x / 32)), lane(lane_index),
        q_address(shared_address(shared.q)) {}

  __device__ __forceinline__ void sync() const { threads_sync<128>(FP8_BARRIER); }

  __device__ __forceinline__ u32 wait_full(int half) const {
    barrier_wait(shared_address(&memory.full[place.stage()][half]), place.phase());
    return shared_address(memory.stages[place.stage()][half]);
  }

  __device__ __forceinline__ void release(int half) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&memory.empty[place.stage()][half]));
  }

  __device__ __forceinline__ void release_q() const {
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&memory.q_empty));
  }

  // --- Q --------------------------------------------------------------------------------------------------------------

  static constexpr u32 Q_PARTS = ROWS * K_STEPS, Q_TURNS = (Q_PARTS + 127) / 128;  // of 16 dims of a row; a thread's

  // Where a part of Q is: its first 8 dims; the others are at this ^ 16.
  __device__ __forceinline__ u32 q_part(u32 part) const {
    const u32 row = part / K_STEPS, step = part % K_STEPS;
    return q_address + step / 4 * Q_PANEL + row * 128 + ((step % 4 * 2 ^ row % 8) << 4);
  }

  // Exponent (as bits of a float32 or bf16) of Q's greatest number.
  __device__ __forceinline__ u32 greatest_exponent(const u32 (&q)[Q_TURNS][2][4]) const {
    u32 greatest = 0;
#pragma unroll
    for (u32 turn = 0; turn < Q_TURNS; ++turn)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const u32 both = q[turn][i / 4][i % 4], low = both & 0x7FFF, high = both >> 16 & 0x7FFF;
        if (low < 0x7F80 && low > greatest) greatest = low;  // inf and NaN are their row's own business
        if (high < 0x7F80 && high > greatest) greatest = high;
      }
    greatest = __reduce_max_sync(~0u, greatest);
    u32* const of_warps = exchange.words[0][0];
    if (lane == 0) of_warps[warp] = greatest;
    sync();
#pragma unroll
    for (int i = 0; i < 4; ++i) greatest = of_warps[i] > greatest ? of_warps[i] : greatest;
    return greatest >> 7;
  }

  // Two numbers of Q as float16, times `factor` if they are bf16.
  static __device__ __forceinline__ u32 halves(u32 both, float factor) {
    if constexpr (IS_HALF<T>) return both;
    return pack<Fp16>(__int_as_float(both << 16) * factor, __int_as_float(both & 0xFFFF0000) * factor);
  }

  // Q in shared memory as float16, with each 16 dims in the order of K's fragments: pairs 0 2 4 6 1 3 5 7. Returns what
  // scores are to be multiplied by for that.
  __device__ __forceinline__ float order_q() const {
    u32 q[Q_TURNS][2][4] = {};
#pragma unroll
    for (u32 turn = 0; turn < Q_TURNS; ++turn) {
      const u32 part = turn * 128 + thread_in_group();
      if (part < Q_PARTS) {
        load_shared_16(q[turn][0], q_part(part));
        load_shared_16(q[turn][1], q_part(part) ^ 16);
      }
    }
    float factor = 1.f, inverse = 1.f;
    if constexpr (!IS_HALF<T>) {
      const u32 exponent = most(greatest_exponent(q), 15);
      factor = __int_as_float((268 - exponent) << 23);  // 2^14 to 2^15
      inverse = __int_as_float((exponent - 14) << 23);
    }
#pragma unroll
    for (u32 turn = 0; turn < Q_TURNS; ++turn) {
      const u32 part = turn * 128 + thread_in_group();
      u32(&two)[2][4] = q[turn];
#pragma unroll
      for (int i = 0; i < 8; ++i) two[i / 4][i % 4] = halves(two[i / 4][i % 4], factor);
      if (part < Q_PARTS) {
        store_shared_16(q_part(part), two[0][0], two[0][2], two[1][0], two[1][2]);
        store_shared_16(q_part(part) ^ 16, two[0][1], two[0][3], two[1][1], two[1][3]);
      }
    }
    fence_async_proxy();
    sync();
    return inverse;
  }

  // Wait for the item's Q, or copy the first item's, and make it what the products take. Returns what scores are to be
  // multiplied by for that.
  __device__ __forceinline__ float load_q(const Cursor& at) const {
    if (place.item() == 0) {
#pragma unroll 1
      for (u32 begin = warp * 8; begin < ROWS; begin += 4 * 8)
        copy_rows<HEAD_DIM, 8>(copy_place<HEAD_DIM>(q_address, Q_PANEL, begin, lane),
                               q_row(p, at, begin + lane % 8), lane);
      copy_async_wait_all();
      __syncwarp();
      sync();
    } else {
      barrier_wait(shared_address(&memory.q_full), place.q_phase());
    }
    return order_q();
  }

  // Q, which the products took as float16, as T: for tiles with fresh keys, of which Q's products are not done before.
  __device__ __forceinline__ void restore_q() const {
    if constexpr (!IS_HALF<T>) {
      sync();
#pragma unroll 1
      for (u32 at = thread_in_group() * 16; at < ROWS * HEAD_DIM * 2; at += 128 * 16) {
        u32 part[4];
        load_shared_16(part, q_address + at);
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] = narrow_halves<T>(part[i]);
        store_shared_16(q_address + at, part[0], part[1], part[2], part[3]);
      }
      fence_async_proxy();
      sync();
    }
  }

  // --- K and scores ---------------------------------------------------------------------------------------------------

  // This warp's 16 keys of the tile: fragments of all dims.
  __device__ __forceinline__ void take_k(u32 (&k)[4 * K_STEPS], u32 slot) const {
    const u32 row = slot + (warp * 16 + lane % 16) * 128;
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      u32 four[4];
      load_blocks(four, row + ((quarter * 2 + lane / 16 ^ lane % 8) << 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32* const to = k + 4 * (2 * quarter + i / 2) + i % 2;
        widen<Format>(four[i], to[0], to[2]);
      }
    }
  }

  // scores[64, ROWS] = K Q^T
  template <class Number>
  __device__ __forceinline__ void multiply_k(Scores& scores, u32 (&k)[4 * K_STEPS]) const {
    pin(k);
    const u64 q = operand(q_address, 16, ATOM_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step)
      Product<Number, ROWS, 0>::run(scores, k + 4 * step, q + ((step / 4 * Q_PANEL + step % 4 * 32) >> 4), step > 0);
    wgmma_commit();
  }

  // Which word of the nodes' masks the keys of half a tile belong to, given the tile's first unit; negative for the prefix.
  static __device__ __forceinline__ i32 word_of(const Cursor& at, i32 unit, i32 half) {
    return unit + half - at.prefix_units;
  }

  // The same fragments where nodes bring their own K.
  __device__ __forceinline__ void take_fresh_k(u32 (&k)[4 * K_STEPS], u32 slot, const Cursor& at, i32 unit) const {
    const i32 word = word_of(at, unit, warp / 2);
    if (word < 0) {
      take_k(k, slot);
#pragma unroll
      for (int i = 0; i < 4 * K_STEPS; ++i) k[i] = narrow_halves<T>(k[i]);
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 node = word * EDGE_KEYS + warp % 2 * 16 + lane / 4 + 8 * half;
      const i64 row = (at.first_row + static_cast<i64>(node)) * p.stride_k_tree_row + at.kv_head * p.stride_k_tree_head;
      const u64* from = reinterpret_cast<const u64*>(static_cast<const unsigned short*>(p.k_tree) + row) + lane % 4;
#pragma unroll
      for (int step = 0; step < K_STEPS; ++step) {
        const u64 four = node < at.present ? __ldg(from + 4 * step) : 0;
        k[4 * step + half] = static_cast<u32>(four);
        k[4 * step + 2 + half] = static_cast<u32>(four >> 32);
      }
    }
  }

  // --- masks ----------------------------------------------------------------------------------------------------------

  // What the rows see of the edge tile whose first unit is `unit`, to shared memory; a thread for each row. By turns: a
  // warp that multiplies weights may still look at those of the tile before.
  __device__ __forceinline__ void share_words(const Cursor& at, i32 unit, i32 tile) const {
    const u32 thread = thread_in_group();
    if (thread < ROWS) {
      const i32 row = at.row0 + thread;
      const bool there = row < at.row_end;
      const i32 node = there ? row_node(p, row) : 0;
      const i32 since = there && p.positions != nullptr ? key_of_node(p, at, node) - p.window_left : -0x7FFFFFFF;
#pragma unroll 1
      for (i32 half = 0; half < WORDS; ++half) {
        const i32 word = word_of(at, unit, half);
        // keys of the prefix are seen by every row; behind the prefix or the nodes there is nothing
        const bool front = unit + half < at.front_units;
        const i32 begin = (unit + half) * EDGE_KEYS + (front ? at.first : at.tail_key - at.front_units * EDGE_KEYS);
        const i32 keys = word < 0 ? (front ? at.full : at.prefix) - begin : at.present - word * EDGE_KEYS;
        u32 seen = unit + half >= at.edge_end || keys <= 0 || !there ? 0 : keys >= 32 ? ~0u : (1u << keys) - 1;
        if (word >= 0 && seen != 0)
          seen &= __ldg(p.mask_words + (at.first_row + static_cast<i64>(node)) * p.num_words + word);
        if (p.positions != nullptr && there) seen &= word < 0 ? from_bit(since - begin) : nodes_since(at, word, seen, since);
        exchange.words[tile % 2][half][thread] = seen;
      }
    }
    __syncwarp();
    sync();
  }

  // Bits from number `first` on.
  static __device__ __forceinline__ u32 from_bit(i32 first) { return first <= 0 ? ~0u : first >= 32 ? 0 : ~0u << first; }

  // Of the nodes of a mask word, those that are not before the key `since`.
  __device__ __forceinline__ u32 nodes_since(const Cursor& at, i32 word, u32 nodes, i32 since) const {
#pragma unroll 1
    for (u32 left = nodes; left != 0; left &= left - 1) {
      const i32 bit = __ffs(left) - 1;
      if (key_of_node(p, at, word * EDGE_KEYS + bit) < since) nodes &= ~(1u << bit);
    }
    return nodes;
  }

  // Nodes of half a tile that some row sees.
  __device__ __forceinline__ u32 seen_by_some(i32 half, i32 tile) const {
    u32 seen = 0;
#pragma unroll 1
    for (u32 row = lane; row < ROWS; row += 32) seen |= exchange.words[tile % 2][half][row];
    return __reduce_or_sync(~0u, seen);
  }

  __device__ __forceinline__ void mask(Scores& scores, i32 tile) const {
    const u32 first = warp % 2 * 16 + lane / 4;
    const u32* const words = exchange.words[tile % 2][warp / 2] + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const u32 mine = words[8 * j + odd] >> first;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& score = scores[4 * j + 2 * half + odd];
          score = mine >> 8 * half & 1 ? score : -infinity();
        }
      }
  }

  // --- weights --------------------------------------------------------------------------------------------------------

  // Weights to shared memory as numbers of `Number`, their sums by row to `part`; true if a base is far too low.
  template <class Number>
  __device__ __forceinline__ bool weigh(const Scores& scores, float scale, Each& part, u32 to) const {
    float greatest[4] = {0.f, 0.f, 0.f, 0.f};  // four chains
    scale = made_anew(scale);  // products kept for `raise`, or for another turn, would cost one instruction more a score
    const u32 row = to + (lane / 16 * 8 + lane % 8) * 128 + ((warp * 2 + lane / 8 % 2 ^ lane % 8) << 4);
    Each base;  // on their way together
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) base[i] = exchange.base[warp][i / 2 * 8 + lane % 4 * 2 + i % 2];
    u32 held[2];
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
      float weight[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) weight[i] = exp2_approx(scores[4 * j + i] * scale - base[2 * j + i % 2]);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        part[2 * j + odd] = weight[odd] + weight[2 + odd];
        float& chain = greatest[(2 * j + odd) % 4];
        chain = fmaxf(chain, part[2 * j + odd]);
      }
      const u32 upper = pack<Number>(weight[0], weight[1]), lower = pack<Number>(weight[2], weight[3]);
      if (j % 2 == 1) {
        store_blocks_across(row + (j - 1) * 8 * 128, held[0], held[1], upper, lower);
      } else if (j == ROWS / 8 - 1) {
        store_blocks_across(row + j * 8 * 128, upper, lower);
      } else {
        held[0] = upper;
        held[1] = lower;
      }
    }
    return fmaxf(fmaxf(greatest[0], greatest[1]), fmaxf(greatest[2], greatest[3])) > GROWTH;
  }

  // Of each of this thread's rows the greatest score, or the sum of what `number` gives, over the warp's keys.
  template <class Function>
  __device__ __forceinline__ void tell(Function&& number, bool add) const {
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        float all = number(j, odd);
#pragma unroll
        for (int other = 4; other < 32; other *= 2) {
          const float its = __shfl_xor_sync(~0u, all, other);
          all = add ? all + its : fmaxf(all, its);
        }
        if (lane < 4) exchange.of_warp[warp][8 * j + 2 * lane + odd] = all;
      }
  }

  // Move the bases to the greatest scores, and scale what there is; no product with `out` is on its way.
  __device__ __forceinline__ void raise(const Scores& scores, float scale, Out& out, Each& sum) const {
    scale = made_anew(scale);  // as in weigh
    tell([&](int j, int odd) { return fmaxf(scores[4 * j + odd] * scale, scores[4 * j + 2 + odd] * scale); }, false);
    __syncwarp();
    sync();
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int row = 8 * j + lane % 4 * 2 + odd;
        const float mine = exchange.base[warp][row];
        float raised = mine;
#pragma unroll
        for (int i = 0; i < 4; ++i) raised = fmaxf(raised, exchange.of_warp[i][row]);
        const float decay = exp2_approx(mine - raised);
        __syncwarp();  // all lanes have read it
        if (lane < 4) exchange.base[warp][row] = raised;
        sum[2 * j + odd] *= decay;
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
          out[slab][4 * j + odd] *= decay;
          out[slab][4 * j + 2 + odd] *= decay;
        }
      }
    __syncwarp();
  }

  // Scores to weights in shared memory that all warps may read, whose sums are to be added to `sum`. `first`: there is no
  // base yet.
  template <class Number>
  __device__ __forceinline__ void softmax(const Scores& scores, float scale, Out& out, Each& sum, Each& part, u32 to,
                                          bool first) const {
    bool raised = false;
#pragma unroll 1
    for (bool too_low = first;;) {
      if (too_low) {
        raise(scores, scale, out, sum);
        raised = true;
      }
      const bool exceeds = weigh<Number>(scores, scale, part, to);
      fence_async_proxy();
      __syncwarp();
      too_low = threads_any<128>(FP8_BARRIER, exceeds && !raised);
      if (!too_low) break;
    }
  }

  static __device__ __forceinline__ void add(Each& sum, const Each& part) {
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) sum[i] += part[i];
  }

  // --- V and sums -----------------------------------------------------------------------------------------------------

  // This warp's 32 dims of the tile, 16 a slab: fragments of half a tile's keys.
  __device__ __forceinline__ void take_v(u32* v, u32 slot, int slab, int half) const {
    u32 four[4];
    load_blocks_across(four, slot + (half * 32 + lane) * 128 + ((warp * 2 + slab ^ lane % 8) << 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) widen_across<Format>(four[i], v[2 * i], v[2 * i + 1]);
  }

  // out[64 dims, ROWS] += V^T P^T over half a tile's keys
  template <class Number>
  static __device__ __forceinline__ void multiply_v(float (&out)[ROWS / 2], const u32* v, u32 weights, int half) {
    const u64 w = operand(weights, 16, ATOM_BYTES);
#pragma unroll
    for (int step = 0; step < V_STEPS / 2; ++step)
      Product<Number, ROWS, 0>::run(out, v + 4 * step, w + 2 * (half * V_STEPS / 2 + step), 1);
  }

  // The fragments of half a tile whose nodes bring their own V. One that nobody sees may be anything, and 0 * NaN is NaN.
  __device__ __forceinline__ void take_fresh_v(u32* v, int slab, const Cursor& at, i32 word, u32 seen) const {
    const i64 column = at.kv_head * p.stride_v_tree_head + (warp * 2 + slab) * 16 + lane / 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 two[2];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const u32 bit = 8 * i + lane % 4 * 2 + odd;
        const i64 row = at.first_row + static_cast<i64>(word * EDGE_KEYS + bit);
        const unsigned short* from = static_cast<const unsigned short*>(p.v_tree) + row * p.stride_v_tree_row + column;
        two[odd] = seen >> bit & 1 ? __ldg(reinterpret_cast<const u32*>(from)) : 0;
      }
      v[2 * i] = __byte_perm(two[0], two[1], 0x5410);
      v[2 * i + 1] = __byte_perm(two[0], two[1], 0x7632);
    }
  }

  // A tile with fresh keys: out of the caches is multiplied by their scale, `v_factor`, before the first of those.
  __device__ __forceinline__ void multiply_fresh(Out& out, u32 slot, u32 weights, const Cursor& at, i32 unit, i32 tile,
                                                 float& v_factor) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 word = word_of(at, unit, half);
      const u32 seen = seen_by_some(half, tile);
      u32 v[SLABS][8];
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) {
        if (word >= 0) {
          take_fresh_v(v[slab], slab, at, word, seen);
        } else {
          take_v(v[slab], slot, slab, half);
#pragma unroll
          for (int i = 0; i < 8; ++i) v[slab][i] = narrow_halves<T>(v[slab][i]);
        }
      }
      if (word >= 0 && v_factor != 1.f) {
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
          for (int i = 0; i < ROWS / 2; ++i) out[slab][i] *= v_factor;
        v_factor = 1.f;
      }
      __syncwarp();
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) {
        pin(v[slab]);
        pin(out[slab]);
      }
      wgmma_fence();
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) multiply_v<T>(out[slab], v[slab], weights, half);
      wgmma_commit();
      finish_v(out);
    }
  }

  static __device__ __forceinline__ void finish_v(Out& out) {
    wgmma_wait<0>();
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) pin(out[slab]);
  }

  // --- rows out -------------------------------------------------------------------------------------------------------

  // A thread for each row: its lse, where it goes, and what it is multiplied by (in place of the sums of the first warp).
  __device__ __forceinline__ void finish_rows(const Cursor& at, float v_factor, u32 tag) const {
    const u32 thread = thread_in_group();
    if (thread < ROWS) {
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < 4; ++i) total += exchange.of_warp[i][thread];
      float inverse = total > 0.f ? 1.f / total : 0.f;
      float lse = total > 0.f ? exchange.base[warp][thread] + log2_approx(total) : -infinity();
      const i32 row = at.row0 + thread;
      u64 to = 0;
      if (row < at.row_end) {
        if (at.whole) {
          const u32 of_tree = row_node(p, row);
          const i64 node = at.first_row + static_cast<i64>(of_tree), head = at.kv_head * p.group + (row - of_tree * p.group);
          if (p.sinks != nullptr) add_sink(p, inverse, lse, head);
          to = reinterpret_cast<u64>(p.out) + 2 * (node * p.stride_out_row + head * p.stride_out_head);
          if (p.lse != nullptr) p.lse[node * p.stride_lse_row + head * p.stride_lse_head] = lse * LN2;
        } else {
          const i64 part_row = part_slot(at, p) * ROWS + thread;
          to = reinterpret_cast<u64>(p.partial_out + part_row * HEAD_DIM);
          if (p.split == 0)
            store_lse(p, part_row, lse, tag);
          else
            p.partial_lse[part_row] = lse;
        }
      }
      exchange.place[thread] = to;
      exchange.of_warp[0][thread] = inverse * v_factor;
    }
    __syncwarp();
    sync();
  }

  // Rows of a whole item to `out`, of a part to its partial slot. A thread has pairs of dims: of each 16, pair l / 4.
  __device__ __forceinline__ void store(const Out& out, const Each& sum, const Cursor& at, float v_factor) const {
    tell([&](int j, int odd) { return sum[2 * j + odd]; }, true);
    __syncwarp();
    sync();
    const u32 tag = memory.tag;
    finish_rows(at, v_factor, tag);
    const u32 pair = lane / 4;
    const bool whole = at.whole != 0;
    float factors[COLUMNS];  // on their way together, as places
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) factors[i] = exchange.of_warp[0][i / 2 * 8 + lane % 4 * 2 + i % 2];
    if (whole) {
      u64 places[COLUMNS];
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) places[i] = exchange.place[i / 2 * 8 + lane % 4 * 2 + i % 2];
#pragma unroll
      for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const u64 to = places[2 * j + odd];
          const float factor = factors[2 * j + odd];
          if (to == 0) continue;
#pragma unroll
          for (int slab = 0; slab < SLABS; ++slab)
            reinterpret_cast<u32*>(to + 2 * ((warp * 2 + slab) * 16))[pair] =
                pack<T>(out[slab][4 * j + odd] * factor, out[slab][4 * j + 2 + odd] * factor);
        }
    } else {
      // In the order that consumer.cuh has, which the merge knows: of four numbers two are pair l / 4's, two those of the pair
      // after the next three. The lower half of the lanes stores even rows, the upper half odd ones.
      const bool upper = pair >= 4;
      u64 places[ROWS / 8];
#pragma unroll
      for (int j = 0; j < ROWS / 8; ++j) places[j] = exchange.place[8 * j + lane % 4 * 2 + upper];
#pragma unroll
      for (int j = 0; j < ROWS / 8; ++j) {
        const u64 to = places[j];
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
          const float* const from = out[slab] + 4 * j;
          const float even[2] = {from[0] * factors[2 * j], from[2] * factors[2 * j]};
          const float odd[2] = {from[1] * factors[2 * j + 1], from[3] * factors[2 * j + 1]};
          float given[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) given[i] = __shfl_xor_sync(~0u, upper ? even[i] : odd[i], 16);
          if (to == 0) continue;
          float* const place = reinterpret_cast<float*>(to) + (warp * 2 + slab) * 16 + pair % 4 * 4;
          const float first[2] = {upper ? given[0] : even[0], upper ? given[1] : even[1]};
          const float last[2] = {upper ? odd[0] : given[0], upper ? odd[1] : given[1]};
          if (p.split == 0)
            store_part(place, first[0], first[1], last[0], last[1], tag);
          else
            store_four(place, first[0], first[1], last[0], last[1]);
        }
      }
    }
    __syncwarp();
  }

  // --- tiles ----------------------------------------------------------------------------------------------------------

  // Scores of an edge tile as they count, or of any with a soft cap, given what makes them so.
  __device__ __forceinline__ void settle(Scores& scores, float scale, bool edge, i32 tile) const {
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) scores[i] *= scale;
    if (p.cap_in != 0.f) {
#pragma unroll
      for (int i = 0; i < ROWS / 2; ++i) scores[i] = soft_capped(scores[i]) * p.cap_out;
    }
    if (edge) mask(scores, tile);
  }

  // A tile from the caches, whose product with V is on its way behind it.
  __device__ __forceinline__ void cached_tile(Scores& scores, Out& out, Each& sum, const Cursor& at, i32 tile, i32 full,
                                              float scale) {
    const bool edge = tile >= full;
    const u32 weights = shared_address(memory.weights[tile % 2]);
    if (edge) share_words(at, at.edge_begin + (tile - full) * WORDS, tile);
    u32 k[4 * K_STEPS], v[SLABS][4 * V_STEPS];
    take_k(k, wait_full(0));
    pin(k);
    // Not behind the next product, though that waits by itself: ptxas allows no products on their way that read registers
    // which were made meanwhile. And in a branch, ahead of which the numbers of K are made, under the product with V.
    if (tile > 0) finish_v(out);
    multiply_k<Fp16>(scores, k);
    const u32 v_slot = wait_full(1);
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
      for (int half = 0; half < 2; ++half) take_v(v[slab] + 8 * half, v_slot, slab, half);
    fence_async_proxy();  // under the product with K
    release(0);
    release(1);
    wgmma_wait<0>();
    pin(scores);
    if (edge || p.cap_in != 0.f) {
      settle(scores, scale, edge, tile);
      scale = 1.f;
    }
    Each part;
    softmax<Fp16>(scores, scale, out, sum, part, weights, tile == 0);
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
      pin(v[slab]);
      pin(out[slab]);
    }
    wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) multiply_v<Fp16>(out[slab], v[slab] + 8 * half, weights, half);
    wgmma_commit();
    add(sum, part);
    place = place.next();
  }

  // An edge tile where nodes bring their own K and V; no product is on its way before or behind it.
  __device__ __forceinline__ void fresh_tile(Scores& scores, Out& out, Each& sum, const Cursor& at, i32 tile, i32 full,
                                             float cached_scale, float fresh_scale, float& v_factor) {
    const i32 unit = at.edge_begin + (tile - full) * WORDS;
    const u32 weights = shared_address(memory.weights[tile % 2]);
    share_words(at, unit, tile);
    {
      u32 k[4 * K_STEPS];
      take_fresh_k(k, wait_full(0), at, unit);
      multiply_k<T>(scores, k);
      fence_async_proxy();
      release(0);
      wgmma_wait<0>();
      pin(scores);
    }
    settle(scores, word_of(at, unit, warp / 2) >= 0 ? fresh_scale : cached_scale, true, tile);
    Each part;
    softmax<T>(scores, 1.f, out, sum, part, weights, tile == 0);
    add(sum, part);
    multiply_fresh(out, wait_full(1), weights, at, unit, tile, v_factor);
    fence_async_proxy();
    release(1);
    place = place.next();
  }

  __device__ __forceinline__ void item(const Cursor& at) {
    const i32 full = uniform(at.full_tiles), tiles = uniform(at.tiles);
    const float of_q = p.q_sign != 0 ? -load_q(at) : load_q(at);
    const float k_scale = k_worth(p, at);
    float v_factor = v_worth(p, at);
    const float fresh_scale = (p.cap_in != 0.f ? p.cap_in : p.scale) * of_q, cached_scale = fresh_scale * k_scale;

    Scores scores;
    Out out;
    Each sum;
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
      for (int i = 0; i < ROWS / 2; ++i) out[slab][i] = 0.f;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) sum[i] = 0.f;
    for (u32 row = lane; row < ROWS; row += 32) exchange.base[warp][row] = LOWEST;
    __syncwarp();

    const i32 cached = p.k_tree != nullptr ? full : tiles;
    i32 tile = 0;
#pragma unroll 1
    for (; tile < cached; ++tile) cached_tile(scores, out, sum, at, tile, full, cached_scale);
    if (tile < tiles) {
      finish_v(out);
      restore_q();
#pragma unroll 1
      for (; tile < tiles; ++tile) fresh_tile(scores, out, sum, at, tile, full, cached_scale, fresh_scale, v_factor);
    }
    release_q();
    finish_v(out);
    store(out, sum, at, v_factor);
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
    if (p.split == 0) Merge<T, HEAD_DIM, 1, Memory, ROWS>(p, memory).run();
  }
};

}  // namespace treeattn
