// Items that are cut between blocks: parts of their rows in global memory become rows of out, in the same launch.
//
// A block that has left its parts says so in a word of each cut item, waits until all blocks of the item have, and merges
// its share of the rows. The blocks of a grid need not run at the same time, though: one that has waited for PATIENCE
// leaves its share behind, for the block that comes last. So no block waits for ever for one that cannot start.
//
// The word counts blocks that are done, and in its upper half those that have left their share behind. It is 0 before and
// behind a launch: the last block takes off what it has seen, and one that gives up too late takes off its own.
// (In batch-invariant mode parts are splits, and another kernel merges them: treeattn/kernels/finish.py.)

#pragma once

#include "ring.cuh"

namespace treeattn {

constexpr int MERGE_BARRIER = 1;          // named barrier of all consumers
constexpr u64 PATIENCE = 2000000;         // ns; blocks of a grid that all run end within less, but for the longest calls
constexpr u32 ARRIVAL_FIELDS = 4;         // of a block: the word of the item that it begins, then its flags (left_behind)
constexpr u32 BEHIND = 1 << 16;           // one block that has left its share behind
enum Verdict : u32 { COMPLETE, LEFT_BEHIND, LAST };
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

// IN_FLIGHT: loads of four numbers of a thread, of a row of many parts; 8 items on 132 blocks have 17 parts.
template <class T, int HEAD_DIM, int CONSUMERS, class Memory, int CONSUMER_ROWS = 64, int IN_FLIGHT = 18>
struct Merge {
  static constexpr int THREADS = 128 * CONSUMERS, TILE_ROWS = CONSUMER_ROWS * CONSUMERS;
  static constexpr int ROW_LANES = HEAD_DIM / 4;  // threads that read a row, four numbers each
  static constexpr int READERS = THREADS / ROW_LANES;

  // Rows in the making: numbers of this thread, relative to 2^top, and the sum of weights.
  struct Row {
    float out[4], top, total;
  };

  const AttentionParams& p;
  Memory& memory;
  const i32 thread, reader, column;

  __device__ __forceinline__ Merge(const AttentionParams& params, Memory& shared)
      : p(params), memory(shared), thread(thread_in_block()), reader(thread / ROW_LANES), column(thread % ROW_LANES) {}

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

  __device__ __forceinline__ u32* word(const Part& part) const { return p.arrivals + part.first_block * ARRIVAL_FIELDS; }

  // Set where a block has left its share of an item behind, of the item that it ends or of the one that it begins.
  __device__ __forceinline__ u32* left_behind(const Part& part, i32 block) const {
    return p.arrivals + block * ARRIVAL_FIELDS + (block == part.first_block ? 1 : 2);
  }

  // Whether all blocks of an item have left their parts; by a thread that has said so of its own.
  __device__ __forceinline__ bool complete(const Part& part) const {
    const u32 done = load_acquire(word(part)) % BEHIND;
    return done == static_cast<u32>(part.blocks) || done == 0;
  }

  // What is to be done with an item, given its word as this block's arrival found it, and whether all parts are there.
  __device__ __forceinline__ u32 settle(const Part& part, u32 before, bool there) {
    const u32 blocks = part.blocks;
    if (before % BEHIND == blocks - 1) {
      const u32 behind = before / BEHIND;
      add_only(word(part), 0u - (blocks + behind * BEHIND));  // who sees the 0 sees what all before it have released
      return behind > 0 ? LAST : COMPLETE;
    }
    if (there) return COMPLETE;
    u32* flag = left_behind(part, part.first_block + part.own);
    store_relaxed(flag, 1);
    const u32 done = add_release(word(part), BEHIND) % BEHIND;
    if (done != blocks && done != 0) return LEFT_BEHIND;
    add_release(word(part), 0u - BEHIND);
    store_relaxed(flag, 0);
    return COMPLETE;
  }

  // Add parts `begin` to `end` of every READERS-th of the rows from `row` to `row_end`, ROWS of them, PARTS at a time.
  template <int ROWS, int PARTS>
  __device__ __forceinline__ void gather(Row (&rows)[ROWS], const Part& part, i32 row, i32 row_end, i32 begin, i32 end) const {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      rows[r].top = -infinity();
      rows[r].total = rows[r].out[0] = rows[r].out[1] = rows[r].out[2] = rows[r].out[3] = 0.f;
    }
#pragma unroll 1
    for (i32 first = begin; first < end; first += PARTS) {
      float values[ROWS][PARTS][4] = {}, lse[ROWS][PARTS];
      // a block's part of an item that it has not begun is in its first slot
      const i64 place = static_cast<i64>(2 * (part.first_block + first)) * TILE_ROWS + row;
      const float* const out_at = p.partial_out + place * HEAD_DIM + column * 4;
      const float* const lse_at = p.partial_lse + place;
      const i32 begun = first == 0 ? TILE_ROWS : 0;
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
          const bool there = first + i < end && (ROWS == 1 || row + r * READERS < row_end);
          const i32 behind = i * 2 * TILE_ROWS + r * READERS + (i == 0 ? begun : 0);
          load_four(values[r][i], out_at + behind * HEAD_DIM, there);
          lse[r][i] = load_one(lse_at + behind, there, -infinity());
        }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float top = rows[r].top;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) top = fmaxf(top, lse[r][i]);
        const float base = top == -infinity() ? 0.f : top, decay = exp2_approx(rows[r].top - base);
        rows[r].top = top;
        rows[r].total *= decay;
#pragma unroll
        for (int j = 0; j < 4; ++j) rows[r].out[j] *= decay;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
          if (first + i >= end) continue;
          const float weight = exp2_approx(lse[r][i] - base);
          rows[r].total += weight;
#pragma unroll
          for (int j = 0; j < 4; ++j) rows[r].out[j] += weight * values[r][i][j];
        }
      }
    }
  }

  // A row of out, and its lse. Parts are in the order of the fragments: 4 t + 2 j + i of each 16 is dim 8 j + 2 t + i.
  __device__ __forceinline__ void write(const Row& row, const Part& part, i32 local) const {
    const u32 packed = part.row0 + local, node = row_node(p, packed);
    const i64 place = part.first_row + static_cast<i64>(node), head = part.kv_head * p.group + (packed - node * p.group);
    float inverse = row.total > 0.f ? reciprocal_approx(row.total) : 0.f;
    float lse = row.total > 0.f ? row.top + log2_approx(row.total) : -infinity();
    if (p.sinks != nullptr) add_sink(p, inverse, lse, head);
    u32* to = reinterpret_cast<u32*>(static_cast<unsigned short*>(p.out) + place * p.stride_out_row +
                                     head * p.stride_out_head) + column / 4 * 8 + column % 4;
    to[0] = pack<T>(row.out[0] * inverse, row.out[1] * inverse);
    to[4] = pack<T>(row.out[2] * inverse, row.out[3] * inverse);
    if (p.lse != nullptr && column == 0) p.lse[place * p.stride_lse_row + head * p.stride_lse_head] = lse * LN2;
  }

  // Rows of at most PARTS parts, ROWS of them at once.
  template <int ROWS, int PARTS>
  __device__ __forceinline__ void few_parts(const Part& part, i32 begin, i32 end) const {
#pragma unroll 1
    for (i32 row = begin + reader; row < end; row += ROWS * READERS) {
      Row made[ROWS];
      gather<ROWS, PARTS>(made, part, row, end, 0, part.blocks);
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        if (row + r * READERS < end) write(made[r], part, row + r * READERS);
    }
  }

  // The rows of the share of block number `index` of an item.
  __device__ __forceinline__ void share(const Part& part, i32 index) {
    const i32 begin = part.rows * index / part.blocks, end = part.rows * (index + 1) / part.blocks, rows = end - begin;
    if (rows == 0) return;
    if (part.blocks <= 2) return few_parts<6, 2>(part, begin, end);
    if (part.blocks <= 8 && rows > READERS) return few_parts<2, 8>(part, begin, end);
    // few rows of many parts: several readers a row, which meet in shared memory
    const i32 ways = most(least(READERS / rows, ceil_div(part.blocks, IN_FLIGHT)), 1);
    const i32 way = reader % ways;
#pragma unroll 1
    for (i32 first = begin; first < end; first += READERS / ways) {
      const i32 row = first + reader / ways;
      const bool mine = reader / ways < READERS / ways && row < end;
      Row made[1] = {};
      if (mine) gather<1, IN_FLIGHT>(made, part, row, end, part.blocks * way / ways, part.blocks * (way + 1) / ways);
      if (ways > 1) {
        Row* meeting = reinterpret_cast<Row*>(memory.stages);
        meeting[thread] = made[0];
        sync();
        if (mine && way == 0) {
          float top = made[0].top;
          for (i32 i = 1; i < ways; ++i) top = fmaxf(top, meeting[thread + i * ROW_LANES].top);
          const float base = top == -infinity() ? 0.f : top;
          Row all = {{0.f, 0.f, 0.f, 0.f}, top, 0.f};
          for (i32 i = 0; i < ways; ++i) {
            const Row& other = meeting[thread + i * ROW_LANES];
            const float weight = exp2_approx(other.top - base);
            all.total += other.total * weight;
#pragma unroll
            for (int j = 0; j < 4; ++j) all.out[j] += other.out[j] * weight;
          }
          made[0] = all;
        }
        sync();
      }
      if (mine && way == 0) write(made[0], part, row);
    }
  }

  // Behind the block's last item: merge its share of the items that it has parts of.
  __device__ __forceinline__ void run() {
    sync();
    const i32 parts = uniform(memory.num_parts);
    if (parts == 0) return;
    u32 verdicts = 0;  // the first thread's: of both items, and for all whether one is not COMPLETE
    if (thread == 0) {
      // one fence for both, and the other blocks asked for while what the words were before is still on its way
      fence_gpu();
      const u32 first = add_relaxed(word(memory.parts[0]), 1);
      const u32 second = parts > 1 ? add_relaxed(word(memory.parts[1]), 1) : 0;
      const u64 begin = nanoseconds();
      bool first_there, second_there = true;
      do {
        first_there = complete(memory.parts[0]);
        if (parts > 1) second_there = complete(memory.parts[1]);
      } while (!(first_there && second_there) && nanoseconds() - begin <= PATIENCE);
      verdicts = settle(memory.parts[0], first, first_there);
      if (parts > 1) verdicts += settle(memory.parts[1], second, second_there) * 4;
    }
    verdicts += any(verdicts != 0) * 16;
#pragma unroll 1
    for (i32 i = 0; i < parts; ++i) {
      u32 verdict = COMPLETE;
      if (seldom(verdicts >= 16)) {
        const u32 own = verdicts >> 2 * i & 3;
        verdict = any(own == LAST) ? LAST : any(own == LEFT_BEHIND) ? LEFT_BEHIND : COMPLETE;
      }
      if (verdict == LEFT_BEHIND) continue;
      const Part part = memory.parts[i];
      const i32 turns = verdict == LAST ? part.blocks : 1;
#pragma unroll 1
      for (i32 turn = 0; turn < turns; ++turn) {
        const i32 index = part.own + turn < part.blocks ? part.own + turn : part.own + turn - part.blocks;
        if (turn == 0 || is_behind(part, part.first_block + index)) share(part, index);
      }
    }
  }

  // Whether a block has left its share behind; forgets it.
  __device__ __forceinline__ bool is_behind(const Part& part, i32 block) {
    bool behind = false;
    if (thread == 0) {
      behind = load_acquire(left_behind(part, block)) != 0;
      store_relaxed(left_behind(part, block), 0);
    }
    return any(behind);
  }
};

}  // namespace treeattn
