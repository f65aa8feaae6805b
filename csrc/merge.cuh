// Items that are cut between blocks: parts of their rows in global memory become rows of out, in the same launch.
//
// A part's numbers carry the launch's tag: four of them and the tag are 16 bytes that are written at once, and so is a row's
// lse with it. A block reads its share of the rows of each cut item until it has found all parts' tags. So nothing is between
// a block's stores and the others' loads of them: no fence, and no word that tells that they are there. (The tag is odd and made of
// the number of the launch with these buffers, which are zeros at first: see treeattn/plan.py. Numbers have 15 bits of mantissa.)
//
// The blocks of a grid need not run at the same time, though: one that has looked in vain for long leaves its share behind, for
// the block that comes last. So no block waits for ever for one that cannot start. For each cut item a word counts the
// blocks that have come as far as their last item, whose parts are sure to be there soon, and in its upper half those that
// have left their share behind. It is 0 before and behind a launch: the last block takes off what it has seen, and one that
// gives up too late takes off its own.
// (In batch-invariant mode parts are splits of plain numbers, and another kernel merges them: treeattn/kernels/finish.py.)

#pragma once

#include "ring.cuh"

namespace treeattn {

constexpr int MERGE_BARRIER = 1;          // named barrier of all consumers
// Parts of a row that are looked for by their numbers, once the rest is there; while more are missing, by the lse alone: all
// numbers of all parts again and again would be more than L2 gives.
constexpr u32 LATE_PARTS = 2;
constexpr float LN2 = 0.6931471805599453f, LOG2_E = 1.4426950408889634f;

// Give the sink of a row's head its weight; a row that saw nothing stays 0 and -inf.
__device__ __forceinline__ void add_sink(const AttentionParams& p, float& inverse, float& lse, i64 head) {
  const float sink = fminf(fmaxf(number_at(p.sinks, head, p.sinks_type), -1e37f), 1e37f) * LOG2_E;  // not inf - inf
  const float top = fmaxf(lse, sink);
  const float all = top + log2_approx(exp2_approx(lse - top) + exp2_approx(sink - top));
  inverse *= exp2_approx(lse - all);
  if (p.sinks_in_lse != 0 && lse > -infinity()) lse = all;
}

// The hyperbolic tangent, with float32's precision near 0 too (as in treeattn/kernels/tiles.py).
__device__ __forceinline__ float soft_capped(float x) {
  const float square = x * x;
  const float near = x * (1.f + square * (-0.33333334f + square * (0.13333334f + square * -0.05396825f)));
  const float far = 1.f - 2.f * reciprocal_approx(exp2_approx(x * 2.885390081777927f) + 1.f);
  return square < 0.04f ? near : far;
}

// Four numbers of a part and the launch's tag, each number without its last 8 bits.
__device__ __forceinline__ void store_part(float* to, float a, float b, float c, float d, u32 tag) {
  const u32 x = __float_as_uint(a), y = __float_as_uint(b), z = __float_as_uint(c), w = __float_as_uint(d);
  store_at_once(to, __byte_perm(x, y, 0x5321), __byte_perm(y, z, 0x6532), __byte_perm(z, w, 0x7653), tag);
}

// The lse of a part of a row, of which the others know the place.
__device__ __forceinline__ void store_lse(const AttentionParams& p, i64 part_row, float lse, u32 tag) {
  store_at_once(reinterpret_cast<u64*>(p.partial_lse) + part_row, __float_as_uint(lse), tag);
}

__device__ __forceinline__ void numbers_of(float (&numbers)[4], const u32 (&part)[4]) {
  constexpr u32 KEPT = 0xFFFFFF00;
  numbers[0] = __uint_as_float(part[0] << 8);
  numbers[1] = __uint_as_float(__byte_perm(part[0], part[1], 0x5430) & KEPT);
  numbers[2] = __uint_as_float(__byte_perm(part[1], part[2], 0x4320) & KEPT);
  numbers[3] = __uint_as_float(part[2] & KEPT);
}

// Rows of cut items, made by the threads of a block. IN_FLIGHT: loads of four numbers of a thread, of a row of many parts; 8
// items on 132 blocks have 17 parts.
template <class T, int HEAD_DIM, int THREADS, int TILE_ROWS, int IN_FLIGHT = 18>
struct PartRows {
  static constexpr int ROW_LANES = HEAD_DIM / 4;  // threads that read a row, four numbers each
  static constexpr int READERS = THREADS / ROW_LANES;

  // Rows in the making: numbers of this thread, relative to 2^top, and the sum of weights.
  struct Row {
    float out[4] = {}, top = -infinity(), total = 0.f;
  };

  const AttentionParams& p;
  const u32 tag;
  u32 looks = 0;  // of this warp, in vain

  __device__ __forceinline__ PartRows(const AttentionParams& params, u32 of_launch) : p(params), tag(of_launch) {}

  static __device__ __forceinline__ i32 thread() { return thread_in_block(); }
  static __device__ __forceinline__ i32 reader() { return thread() / ROW_LANES; }
  static __device__ __forceinline__ i32 column() { return thread() % ROW_LANES; }

  // Add up parts `begin` to `end` of every READERS-th of the rows from `row` to `row_end`, ROWS of them, PARTS at a time, or all
  // at ONCE; by whole warps. Whether all were there.
  template <int ROWS, int PARTS, bool ONCE>
  __device__ __forceinline__ bool gather(Row (&rows)[ROWS], const Part& part, i32 row, i32 row_end, i32 begin, i32 end,
                                         bool limit) {
    // the lse of a row's parts are loaded by GROUP lanes of it, in SETS turns
    constexpr int MOST = ROW_LANES < 32 ? ROW_LANES : 32;
    constexpr int GROUP = PARTS <= 2 ? 2 : PARTS <= 8 ? 8 : PARTS <= 16 || MOST == 16 ? 16 : 32;
    constexpr int SETS = (PARTS + GROUP - 1) / GROUP;
    const u32 lane = thread() % 32, mine = lane % GROUP, of_group = lane - mine;
    if (!ONCE) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) rows[r] = {};
    }
#pragma unroll 1
    for (i32 first = begin; ONCE || __any_sync(~0u, first < end); first += PARTS) {
      // a block's part of an item that it has not begun is in its first slot
      const i64 place = static_cast<i64>(2 * (part.first_block + first)) * TILE_ROWS + row;
      const float* const out_at = p.partial_out + place * HEAD_DIM + column() * 4;
      const u64* const lse_at = reinterpret_cast<const u64*>(p.partial_lse) + place;
      const i32 begun = first == 0 ? TILE_ROWS : 0;
      u32 parts[ROWS][PARTS][4], lse[ROWS][SETS][2];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const bool here = row + r * READERS < row_end;
#pragma unroll
        for (int s = 0; s < SETS; ++s) {
          lse[r][s][0] = __float_as_uint(-infinity());
          const i32 i = s * GROUP + mine;
          lse[r][s][1] = here && i < PARTS && first + i < end ? ~tag : tag;
        }
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
          parts[r][i][0] = parts[r][i][1] = parts[r][i][2] = 0;
          parts[r][i][3] = here && first + i < end ? ~tag : tag;
        }
      }
      for (bool close = true;;) {  // the first look is at all: mostly they are there
        u32 missing = 0;  // of this lane's
        bool whole = true;
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
          for (int s = 0; s < SETS; ++s) {
            const i32 i = s * GROUP + mine;
            load_at_once(lse[r][s], lse_at + (i * 2 * TILE_ROWS + r * READERS + (i == 0 ? begun : 0)), lse[r][s][1] != tag);
          }
        if (close) {
#pragma unroll
          for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
              const i32 behind = i * 2 * TILE_ROWS + r * READERS + (i == 0 ? begun : 0);
              load_at_once(parts[r][i], out_at + behind * HEAD_DIM, parts[r][i][3] != tag);
            }
#pragma unroll
          for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < PARTS; ++i) whole = whole && parts[r][i][3] == tag;
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
          for (int s = 0; s < SETS; ++s) missing += lse[r][s][1] != tag;
        if (__all_sync(~0u, close && whole && missing == 0)) break;
        close = __reduce_add_sync(~0u, missing) <= LATE_PARTS * (32 / GROUP);
        if (limit && !patient(++looks)) return false;
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if (ONCE) rows[r] = {};
        float top = rows[r].top;
#pragma unroll
        for (int s = 0; s < SETS; ++s) top = fmaxf(top, __uint_as_float(lse[r][s][0]));
#pragma unroll
        for (int step = 1; step < GROUP; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
        const float base = top == -infinity() ? 0.f : top, decay = exp2_approx(rows[r].top - base);
        float weights[SETS], total = 0.f;
#pragma unroll
        for (int s = 0; s < SETS; ++s) total += weights[s] = exp2_approx(__uint_as_float(lse[r][s][0]) - base);
#pragma unroll
        for (int step = 1; step < GROUP; step *= 2) total += __shfl_xor_sync(~0u, total, step);
        rows[r].top = top;
        rows[r].total = rows[r].total * decay + total;
#pragma unroll
        for (int j = 0; j < 4; ++j) rows[r].out[j] *= decay;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
          const float weight = __shfl_sync(~0u, weights[i / GROUP], of_group + i % GROUP);
          float numbers[4];
          numbers_of(numbers, parts[r][i]);
#pragma unroll
          for (int j = 0; j < 4; ++j) rows[r].out[j] += weight * numbers[j];
        }
      }
      if (ONCE) break;
    }
    return true;
  }

  // A row of out, and its lse. Parts are in the order of the fragments: 4 t + 2 j + i of each 16 is dim 8 j + 2 t + i.
  __device__ __forceinline__ void write(const Row& row, const Part& part, i32 local) const {
    const u32 packed = part.row0 + local, node = row_node(p, packed);
    const i64 place = part.first_row + static_cast<i64>(node), head = part.kv_head * p.group + (packed - node * p.group);
    float inverse = row.total > 0.f ? reciprocal_approx(row.total) : 0.f;
    float lse = row.total > 0.f ? row.top + log2_approx(row.total) : -infinity();
    if (p.sinks != nullptr) add_sink(p, inverse, lse, head);
    u32* to = reinterpret_cast<u32*>(static_cast<unsigned short*>(p.out) + place * p.stride_out_row +
                                     head * p.stride_out_head) + column() / 4 * 8 + column() % 4;
    to[0] = pack<T>(row.out[0] * inverse, row.out[1] * inverse);
    to[4] = pack<T>(row.out[2] * inverse, row.out[3] * inverse);
    if (p.lse != nullptr && column() == 0) p.lse[place * p.stride_lse_row + head * p.stride_lse_head] = lse * LN2;
  }

  // Rows of at most PARTS parts, ROWS of them at once.
  template <int ROWS, int PARTS>
  __device__ __forceinline__ bool few_parts(const Part& part, i32 begin, i32 end, bool limit) {
#pragma unroll 1
    for (i32 row = begin + reader(); __any_sync(~0u, row < end); row += ROWS * READERS) {
      Row made[ROWS];
      if (!gather<ROWS, PARTS, true>(made, part, row, end, 0, part.blocks, limit)) return false;
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        if (row + r * READERS < end) write(made[r], part, row + r * READERS);
    }
    return true;
  }
};

// What a block does behind its last item. IN_FLIGHT as above.
template <class T, int HEAD_DIM, int CONSUMERS, class Memory, int CONSUMER_ROWS = 64, int IN_FLIGHT = 18>
struct Merge : PartRows<T, HEAD_DIM, 128 * CONSUMERS, CONSUMER_ROWS * CONSUMERS, IN_FLIGHT> {
  static constexpr int THREADS = 128 * CONSUMERS;
  using Rows = PartRows<T, HEAD_DIM, THREADS, CONSUMER_ROWS * CONSUMERS, IN_FLIGHT>;
  using Row = typename Rows::Row;
  using Rows::p;
  using Rows::READERS;
  using Rows::reader;
  using Rows::ROW_LANES;
  using Rows::thread;

  Memory& memory;

  __device__ __forceinline__ Merge(const AttentionParams& params, Memory& shared) : Rows(params, shared.tag), memory(shared) {}

  static __device__ __forceinline__ void sync() {
    __syncwarp();
    threads_sync<THREADS>(MERGE_BARRIER);
  }

  // The same, and whether the condition holds for one thread. What the first thread finds out about other blocks goes to
  // the others through the barrier, not through shared memory: for a word that it left there before a barrier of 384
  // threads, racecheck reported the first thread behind 256 that read it behind the barrier.
  static __device__ __forceinline__ bool any(bool condition) {
    __syncwarp();
    return uniform(threads_any<THREADS>(MERGE_BARRIER, condition));
  }

  // Set where a block has left its share of an item behind, of the item that it ends or of the one that it begins.
  __device__ __forceinline__ u32* left_behind(const Part& part, i32 block) const {
    return p.arrivals + block * ARRIVAL_FIELDS + (block == part.first_block ? 1 : 2);
  }

  // The rows of the share of block number `index` of an item. Whether this warp has found all parts; where it has not, what it
  // has written is for another to write again.
  __device__ __forceinline__ bool share(const Part& part, i32 index, bool limit) {
    const i32 begin = part.rows * index / part.blocks, end = part.rows * (index + 1) / part.blocks, rows = end - begin;
    if (rows == 0) return true;
    if (part.blocks <= 2) return this->template few_parts<6, 2>(part, begin, end, limit);
    if (part.blocks <= 8 && rows > READERS) return this->template few_parts<2, 8>(part, begin, end, limit);
    // few rows of many parts: several readers a row, which meet in shared memory
    const i32 ways = most(least(READERS / rows, ceil_div(part.blocks, IN_FLIGHT)), 1);
    const i32 way = reader() % ways;
    bool found = true;
    if (ways > 1) sync();  // nobody reads what was there
#pragma unroll 1
    for (i32 first = begin; first < end; first += READERS / ways) {
      const i32 row = first + reader() / ways;
      const bool mine = reader() / ways < READERS / ways && row < end;
      Row made[1];
      found = this->template gather<1, IN_FLIGHT, false>(made, part, row, mine ? end : row, part.blocks * way / ways,
                                                   part.blocks * (way + 1) / ways, limit) && found;
      if (ways > 1) {
        Row* meeting = reinterpret_cast<Row*>(memory.stages);
        meeting[thread()] = made[0];
        sync();
        if (mine && way == 0) {
          float top = made[0].top;
          for (i32 i = 1; i < ways; ++i) top = fmaxf(top, meeting[thread() + i * ROW_LANES].top);
          const float base = top == -infinity() ? 0.f : top;
          Row all;
          all.top = top;
          for (i32 i = 0; i < ways; ++i) {
            const Row& other = meeting[thread() + i * ROW_LANES];
            const float weight = exp2_approx(other.top - base);
            all.total += other.total * weight;
#pragma unroll
            for (int j = 0; j < 4; ++j) all.out[j] += other.out[j] * weight;
          }
          made[0] = all;
        }
        sync();
      }
      if (mine && way == 0) this->write(made[0], part, row);
    }
    return found;
  }

  // Behind the block's last item: merge its share of the items that it has parts of, then what others have left behind.
  __device__ __forceinline__ void run() {
    const i32 parts = uniform(memory.num_parts);
    if (parts == 0) return;
    u32 late = 0;  // items of which this warp has not found all parts
    i32 turn = 0;  // all items once; then of each 1, this block's share, and i + 2, that of block i
    for (i32 item = 0, index = memory.parts[0].own;;) {
      const bool found = share(memory.parts[item], index, turn == 0);
      if (turn == 0) {
        if (!found) late |= 1 << item;
        item += 1;
        if (item < parts) {
          index = memory.parts[item].own;
          continue;
        }
        bool left = false;
        for (item = 0; item < parts; ++item) left = forget(memory.parts[item], memory.before[item]) || left;
        if (!seldom(any(late != 0 || left))) return;
        item = 0;
        turn = 1;
      }
      if (!next(late, item, index, turn, parts)) return;
    }
  }

  // Whether this block is the last that came to an item, and others have left their shares to it.
  static __device__ __forceinline__ bool is_left(const Part& part, u32 before) {
    return before % BEHIND == part.blocks - 1u && before >= BEHIND;
  }

  // The same; the last block's first thread makes the item's word 0 again.
  __device__ __forceinline__ bool forget(const Part& part, u32 before) const {
    if (thread() == 0 && before % BEHIND == part.blocks - 1u) add_only(arrival_word(p, part), 0u - (before + 1));
    return is_left(part, before);
  }

  // The next share that is to be merged whatever it takes: this block's, if all blocks of the item have come by now, or one that
  // has been left to it.
  __device__ __forceinline__ bool next(u32 late, i32& item, i32& index, i32& turn, i32 parts) {
    for (; item < parts; ++item, turn = 1) {
      const Part& part = memory.parts[item];
      if (turn == 1) {
        turn = 2;
        index = part.own;
        if (any(late >> item & 1) && any(thread() == 0 && !leave_behind(part))) return true;
      }
      if (!is_left(part, memory.before[item])) continue;
      while (turn < part.blocks + 2) {
        index = turn++ - 2;
        if (index != part.own && is_behind(part, part.first_block + index)) return true;
      }
    }
    return false;
  }

  // Leave this block's share behind, by its first thread, if some block has not come yet.
  __device__ __forceinline__ bool leave_behind(const Part& part) {
    u32* flag = left_behind(part, part.first_block + part.own);
    store_relaxed(flag, 1);
    const u32 come = add_release(arrival_word(p, part), BEHIND) % BEHIND;
    if (come != static_cast<u32>(part.blocks) && come != 0) return true;
    add_release(arrival_word(p, part), 0u - BEHIND);
    store_relaxed(flag, 0);
    return false;
  }

  // Whether a block has left its share behind; forgets it.
  __device__ __forceinline__ bool is_behind(const Part& part, i32 block) {
    bool behind = false;
    if (thread() == 0) {
      behind = load_acquire(left_behind(part, block)) != 0;
      store_relaxed(left_behind(part, block), 0);
    }
    return any(behind);
  }
};

}  // namespace treeattn
