// Shared memory of a block: a ring of stages, each a tile of K and one of V, KEYS rows each.
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

constexpr u32 PRODUCER_ARRIVALS = 128;  // each thread's copies arrive by themselves; a tensor copy's thread for all
constexpr u32 PANEL_COLUMNS = 64;
constexpr u32 ATOM_BYTES = 1024;  // 8 rows of a panel, the period of the swizzle

template <int HEAD_DIM, int CONSUMERS, int KEYS, int STAGES, int Q_STEPS>
struct Shared {
  static constexpr u32 PANEL_BYTES = KEYS * PANEL_COLUMNS * 2;
  static constexpr u32 HALF_BYTES = KEYS * HEAD_DIM * 2;
  static constexpr int WARPS = 4 * (CONSUMERS + 1);
  static constexpr int Q_PANELS = (HEAD_DIM / 16 - Q_STEPS) / 4;  // of Q that is not in registers

  struct alignas(ATOM_BYTES) Layout {
    unsigned char stages[STAGES][2][HALF_BYTES];  // K, V
    unsigned char q[Q_PANELS > 0 ? CONSUMERS * Q_PANELS * 64 * 128 : 16];  // panels of 64 rows, as K
    u64 full[STAGES][2];   // complete when all rows are there
    u64 empty[STAGES][2];  // each consumer warp arrives when it has read it
    Cursor cursors[WARPS];
  };
};

// Position in the ring, of a producer or of a consumer: the stage, and how often it has come round, modulo 2.
template <int STAGES>
struct Place {
  u32 stage = 0, phase = 0;

  __device__ __forceinline__ Place next() const { return {stage + 1 == STAGES ? 0 : stage + 1, phase ^ (stage + 1 == STAGES)}; }
  __device__ __forceinline__ void skip(u32 tiles) {
    stage += tiles;
    phase = (phase + stage / STAGES) % 2;
    stage %= STAGES;
  }
};

}  // namespace treeattn
