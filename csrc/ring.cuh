// Shared memory of a block: a ring of half tiles, KEYS rows of K or of V each, in the order in which they are used.
//
// An item's half tiles come as K0 V0 K1 V1 and so on. A consumer multiplies K(i + 1) ahead of V(i), and so gives V(i) back
// only when K(i + 1) has come: two slots more than the producer has on their way keep the ring turning.
//
// A half tile is HEAD_DIM / 64 panels of [KEYS rows, 128 bytes] in the 128-byte swizzle: the 16-byte chunk c of row r is
// at r * 128 + (c ^ r % 8) * 16. K is read from it with keys as columns of the product, V with keys summed over.

#pragma once

#include "ptx.cuh"
#include "schedule.cuh"

// Who makes the copies, which are of the generic proxy, visible to wgmma, which is of the async proxy. 0: the producer,
// which waits for a copy, fences and arrives. 1: the consumer, behind a barrier at which the copies arrive by themselves.
// 2: nobody, and the copies arrive by themselves: to measure what the fence costs (it is a MEMBAR, and a producer's may
// wait for all copies that are on their way), not to be used.
#ifndef TREEATTN_CONSUMER_FENCE
#define TREEATTN_CONSUMER_FENCE 0
#endif

namespace treeattn {

constexpr u32 PRODUCER_ARRIVALS = TREEATTN_CONSUMER_FENCE ? 128 : 4;
constexpr u32 PANEL_COLUMNS = 64;
constexpr u32 ATOM_BYTES = 1024;  // 8 rows of a panel, the period of the swizzle

template <int HEAD_DIM, int CONSUMERS, int KEYS, int SLOTS, int Q_STEPS>
struct Shared {
  static constexpr u32 PANEL_BYTES = KEYS * PANEL_COLUMNS * 2;
  static constexpr u32 SLOT_BYTES = KEYS * HEAD_DIM * 2;
  static constexpr int WARPS = 4 * (CONSUMERS + 1);
  static constexpr int Q_PANELS = (HEAD_DIM / 16 - Q_STEPS) / 4;  // of Q that is not in registers

  struct alignas(ATOM_BYTES) Layout {
    unsigned char slots[SLOTS][SLOT_BYTES];
    unsigned char q[Q_PANELS > 0 ? CONSUMERS * Q_PANELS * 64 * 128 : 16];  // panels of 64 rows, as K
    u64 full[SLOTS];   // the producer arrives when all rows are there: a lane of each warp, or every thread
    u64 empty[SLOTS];  // each consumer warp arrives when it has read it
    Cursor cursors[WARPS];
  };
};

// Position in the ring, of a producer or of a consumer, in one register: the slot; how often it has come round, modulo 2;
// of a producer, half tiles that are on their way.
template <int SLOTS>
struct Place {
  static constexpr u32 ROUND = 1 << 8, PENDING = 1 << 9;
  u32 bits = 0;

  __device__ __forceinline__ u32 slot() const { return bits % ROUND; }
  __device__ __forceinline__ u32 phase() const { return bits / ROUND % 2; }
  __device__ __forceinline__ u32 pending() const { return bits / PENDING; }
  __device__ __forceinline__ void step() {
    bits += 1;
    if (slot() == SLOTS) bits = (bits ^ ROUND) - SLOTS;
  }
};

}  // namespace treeattn
