// Shared memory of a block: a ring of stages, each a tile of K and one of V, KEYS rows each; Q; the next items.
//
// An item's half tiles are used as K0 K1 V0 K2 V1 and so on: a consumer multiplies K(i + 1) ahead of V(i). Each half tile
// has barriers of its own, so that the producer may refill K while V is still to be read.
//
// A half tile is HEAD_DIM / 64 panels of [KEYS rows, 128 bytes] in the 128-byte swizzle: the 16-byte chunk c of row r is
// at r * 128 + (c ^ r % 8) * 16. K is read from it with keys as columns of the product, V with keys summed over.

#pragma once

#include "ptx.cuh"
#include "schedule.cuh"

namespace treeattn {

constexpr u32 ITEMS = 4;  // that the walk along the plan may be ahead; a power of two
constexpr u32 Q_ARRIVALS = 96;  // threads that copy Q
constexpr u32 PRODUCER_ARRIVALS = 128;  // each thread's copies arrive by themselves; a tensor copy's thread for all
constexpr u32 PANEL_COLUMNS = 64;
constexpr int OPTION_WINDOW = 1, OPTION_CAP = 2;  // of a kernel, added up; what others cost is outside its loop
constexpr u32 ATOM_BYTES = 1024;  // 8 rows of a panel, the period of the swizzle

template <int HEAD_DIM, int CONSUMERS, int KEYS, int STAGES, int Q_STEPS>
struct Shared {
  static constexpr u32 PANEL_BYTES = KEYS * PANEL_COLUMNS * 2;
  static constexpr u32 HALF_BYTES = KEYS * HEAD_DIM * 2;
  static constexpr u32 Q_BYTES = 64 * HEAD_DIM * 2;  // of a consumer

  struct alignas(ATOM_BYTES) Layout {
    unsigned char stages[STAGES][2][HALF_BYTES];  // K, V
    unsigned char q[CONSUMERS][Q_BYTES];           // of the item, panels of 64 rows, as K
    u64 full[STAGES][2];   // complete when all rows are there
    u64 empty[STAGES][2];  // each consumer warp arrives when it has read it
    u64 q_full, q_empty;
    u64 item_full[ITEMS], item_empty[ITEMS];
    u64 boxes[ITEMS];  // all tensor copies of the item have been asked for
    u64 edges[ITEMS];  // and all copies of its edge tiles
    Cursor walk, items[ITEMS];
  };
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
  __device__ __forceinline__ u32 q_phase() const { return bits / ITEM % 2; }
  __device__ __forceinline__ void next_item() { bits += ITEM; }
  __device__ __forceinline__ Place next() const {
    return {bits % ROUND == STAGES - 1 ? (bits ^ ROUND) - (STAGES - 1) : bits + 1};
  }
  __device__ __forceinline__ void skip(u32 tiles) {
    const u32 end = stage() + tiles;
    bits = bits / ITEM * ITEM + end % STAGES + (phase() + end / STAGES) % 2 * ROUND;
  }
};

// Copy an item, a number a lane.
__device__ __forceinline__ void copy_item(Cursor& to, const Cursor& from, u32 lane) {
  if (lane < CURSOR_FIELDS) reinterpret_cast<i32*>(&to)[lane] = reinterpret_cast<const i32*>(&from)[lane];
}

}  // namespace treeattn
