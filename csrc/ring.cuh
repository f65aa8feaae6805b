// Shared memory of a block: a ring of stages, each a tile of K and one of V, KEYS rows each; Q; the next items.
//
// An item's half tiles are used as K0 K1 V0 K2 V1 and so on: a consumer multiplies K(i + 1) ahead of V(i). Each half tile
// has barriers of its own, so that the producer may refill K while V is still to be read.
//
// A panel is 128 bytes of each row in the 128-byte swizzle, in atoms of 8 rows: the 16-byte chunk c of row r is at
// r % 8 * 128 + (c ^ r % 8) * 16 of atom r / 8. A panel of Q has its atoms side by side. A half tile has those of all
// panels side by side, so that one box of a tensor map brings a page's rows of all: atom r / 8 of panel p is at
// r / 8 * GROUP_BYTES + p * ATOM_BYTES. K is read from it with keys as columns of the product, V with keys summed over.

#pragma once

#include "ptx.cuh"
#include "schedule.cuh"

namespace treeattn {

constexpr u32 ITEMS = 4;  // that the walk along the plan may be ahead; a power of two
constexpr u32 Q_ARRIVALS = 96;  // threads that copy Q
constexpr u32 ITEM_LANES = 8;   // that hand over an item, 16 bytes each
constexpr u32 PRODUCER_ARRIVALS = 128;  // each thread's copies arrive by themselves; a tensor copy's thread for all
constexpr u32 PANEL_COLUMNS = 64;
constexpr int OPTION_WINDOW = 1, OPTION_CAP = 2;  // of a kernel, added up; what others cost is outside its loop
constexpr u32 MULTIPROCESSOR_BYTES = 227 * 1024;  // of shared memory, for one block or for two
// K and V on their way to a multiprocessor by tensor copies: twice what memory's rate times its latency asks for. The ring may
// hold more that is there. Were all of it on its way, 25 MB at a time, L2 would give less: (1, 17, 131072, 32/8) takes
// 126.7 µs with 64 KB, 128.8 with 96, 137 with 192.
constexpr u32 FLIGHT_BYTES = 64 * 1024;
constexpr u32 ATOM_BYTES = 1024;  // 8 rows of a panel, the period of the swizzle

// CACHED_BYTES: of a number of the caches; CONSUMER_ROWS: of a consumer's Q.
template <int HEAD_DIM, int CONSUMERS, int KEYS, int STAGES, int Q_STEPS, int CACHED_BYTES = 2, int CONSUMER_ROWS = 64>
struct Shared {
  static constexpr int CACHED = CACHED_BYTES, NUMBER = CACHED_BYTES, ROWS = CONSUMER_ROWS;  // NUMBER: of the ring's
  static constexpr u32 GROUP_BYTES = HEAD_DIM * NUMBER / 128 * ATOM_BYTES;  // of 8 rows of a half tile
  static constexpr u32 HALF_BYTES = KEYS * HEAD_DIM * NUMBER;
  static constexpr u32 Q_BYTES = ROWS * HEAD_DIM * 2;  // of a consumer

  struct alignas(ATOM_BYTES) Layout {
    unsigned char stages[STAGES][2][HALF_BYTES];  // K, V
    unsigned char q[CONSUMERS][Q_BYTES];           // of the item, panels of all its rows, as K
    u64 full[STAGES][2];   // complete when all rows are there
    u64 empty[STAGES][2];  // each consumer warp arrives when it has read it
    u64 q_full, q_empty;
    u64 item_full[ITEMS], item_empty[ITEMS];
    u64 boxes[ITEMS];  // all tensor copies of the item have been asked for
    u64 edges[ITEMS];  // and all copies of its edge tiles
    Cursor walk, items[ITEMS];
    u32 passed;       // tiles that the producer's first warp has left to others since it last waited for one
    Part parts[2];    // of items that are cut, where the block begins and where it ends
    u32 num_parts;
    u32 before[2];    // their words, as this block found them
    u32 tag;          // of what this launch leaves of them
  };
  static constexpr u32 BARRIERS = 4 * STAGES + 2 + 4 * ITEMS;

  // Arrivals that a barrier takes, by its number from `full` on.
  static __device__ __forceinline__ u32 arrivals(u32 barrier) {
    const i32 of_q = barrier - 4 * STAGES, of_item = of_q - 2;
    if (of_q < 0) return barrier < 2 * STAGES ? PRODUCER_ARRIVALS : 4 * CONSUMERS;
    if (of_item < 0) return of_q == 0 ? Q_ARRIVALS : 4 * CONSUMERS;
    if (of_item < static_cast<i32>(2 * ITEMS))
      return of_item < static_cast<i32>(ITEMS) ? ITEM_LANES : 4 * CONSUMERS + 3;  // the first warp's item is its own
    return of_item < static_cast<i32>(3 * ITEMS) ? 1 : 2;
  }
};

// Position in the ring, of a producer or of a consumer, in one register: the stage; how often it has come round, modulo
// 2; and items so far, of which a number gives the place where one is handed over, and the phases of its barriers and Q's.
template <int STAGES>
struct Place {
  static constexpr u32 ROUND = 256, ITEM = 512;
  u32 bits = 0;

  __device__ __forceinline__ u32 stage() const { return bits % ROUND; }
  __device__ __forceinline__ u32 phase() const { return bits / ROUND % 2; }
  __device__ __forceinline__ u32 item_slot() const { return bits / ITEM % ITEMS; }
  __device__ __forceinline__ u32 item_phase() const { return bits / (ITEM * ITEMS) % 2; }
  __device__ __forceinline__ u32 item() const { return bits / ITEM; }
  __device__ __forceinline__ u32 q_phase() const { return (item() + 1) % 2; }  // of the Q before; the first item's is not copied here
  __device__ __forceinline__ void next_item() { bits += ITEM; }
  __device__ __forceinline__ Place next() const {
    return {bits % ROUND == STAGES - 1 ? (bits ^ ROUND) - (STAGES - 1) : bits + 1};
  }
  // So many stages ago, fewer than there are.
  __device__ __forceinline__ Place before(u32 stages) const {
    return {bits % ROUND < stages ? (bits ^ ROUND) + (STAGES - stages) : bits - stages};
  }
  __device__ __forceinline__ void skip(u32 tiles) {
    const u32 end = stage() + tiles;
    bits = bits / ITEM * ITEM + end % STAGES + (phase() + end / STAGES) % 2 * ROUND;
  }
};

// A checked build: a producer that is late at one place in seven.
__device__ __forceinline__ void sleep_now_and_then() {
#if TREEATTN_DELAY
  if ((clock() * 2654435761u >> 16) % 7 == 0) __nanosleep(2000);
#endif
}

// Arrival of a warp at a barrier of an MLA block, with what all its lanes have done, by one of them behind __syncwarp. racecheck
// follows a lane's own arrival only: for it there is a build in which each lane arrives.
#if TREEATTN_LANES_ARRIVE
constexpr u32 WARP_ARRIVALS = 32;
#else
constexpr u32 WARP_ARRIVALS = 1;
#endif

__device__ __forceinline__ void warp_arrive(u64& barrier, u32 lane) {
  if (WARP_ARRIVALS == 32 || lane == 0) barrier_arrive(shared_address(&barrier));
}

// Hand over the item at the walk, as one of those at places: each lane that has written arrives.
__device__ __forceinline__ void hand_item(Cursor& to, const Cursor& walk, u64& full, u32 lane) {
  static_assert(sizeof(Cursor) == ITEM_LANES * 16, "a lane for each 16 bytes");
  if (lane < ITEM_LANES) {
    u32 part[4];
    load_shared_16(part, shared_address(&walk) + lane * 16);
    store_shared_16(shared_address(&to) + lane * 16, part[0], part[1], part[2], part[3]);
    barrier_arrive(shared_address(&full));
  }
  __syncwarp();
}

// Copy ROWS rows of numbers of 16 bits to panels in the swizzle, of lane r the one at `address`. `to` is of this lane's
// part of the first copy; the swizzle's bits of later ones are disjoint from its. STRIDE: from 8 rows of a panel to the
// next 8. Bit 0 of an address: the row is 0. STREAMED: as K and V.
template <int HEAD_DIM, int ROWS, u32 STRIDE = ATOM_BYTES, bool STREAMED = false>
__device__ __forceinline__ void copy_rows(u32 to, u64 address, u32 lane) {
  constexpr u32 LANES = HEAD_DIM / 8, AT_ONCE = 32 / LANES;  // lanes of a row, 16 bytes each; rows of a copy
#pragma unroll 1
  for (u32 begin = 0; begin < ROWS; begin += 8, to += STRIDE) {
#pragma unroll
    for (u32 row = 0; row < 8; row += AT_ONCE) {
      const u64 from = __shfl_sync(~0u, address, begin + row + lane / LANES);
      const u32 place = (to ^ (row << 4)) + row * 128, bytes = from & 1 ? 0 : 16;
      const u64 numbers = (from & ~1ull) + lane % LANES * 16;
      if constexpr (STREAMED)
        stream_async_16(place, numbers, bytes);
      else
        copy_async_16(place, numbers, bytes);
    }
  }
}

// Where a lane's part of the first copy to rows from `row` on goes, a multiple of 8, in a tile whose panels are `panel`
// bytes apart.
template <int HEAD_DIM, u32 STRIDE = ATOM_BYTES>
__device__ __forceinline__ u32 copy_place(u32 tile, u32 panel, u32 row, u32 lane) {
  const u32 part = lane / (HEAD_DIM / 8), chunk = lane % (HEAD_DIM / 8);
  return tile + chunk / 8 * panel + row * (STRIDE / 8) + part * 128 + ((chunk % 8 ^ part) << 4);
}

// Address of a row of Q, given its number in the item's row tile.
__device__ __forceinline__ u64 q_row(const AttentionParams& p, const Cursor& at, u32 local) {
  const u32 row = at.row0 + local, node = row_node(p, row), head = at.kv_head * p.group + (row - node * p.group);
  const i64 place = (at.first_row + static_cast<i64>(node)) * p.stride_q_row + static_cast<i64>(head) * p.stride_q_head;
  return static_cast<i32>(row) < at.row_end ? reinterpret_cast<u64>(p.q) + 2 * place : reinterpret_cast<u64>(p.q) | 1;
}

}  // namespace treeattn
