// Shared memory of a block of the FP8 kernels: the ring, Q and the items as in ring.cuh, and what the consumer
// warpgroup hands from warp to warp.
//
// A half tile is one panel of [KEYS rows, 128 bytes] in the 128-byte swizzle, a number a byte.

#pragma once

#include "ring.cuh"

namespace treeattn {

// What the warps of the consumer tell each other of its ROWS rows.
template <int ROWS, int WORDS>
struct Exchange {
  alignas(16) float of_warp[4][ROWS];  // of a warp's keys: the greatest score of each row, or the sum of its weights
  float base[4][ROWS];        // of the weights, base 2; the same for each warp, which has its own
  u64 place[ROWS];            // where the row goes at the end of an item; 0: it is not there
  u32 words[2][WORDS][ROWS];  // what each row sees of an edge tile; by turns
};

template <int HEAD_DIM, int ROWS, int KEYS, int STAGES>
struct Fp8Shared : Shared<HEAD_DIM, 1, KEYS, STAGES, 0, 1, ROWS> {
  using Base = Shared<HEAD_DIM, 1, KEYS, STAGES, 0, 1, ROWS>;
  static constexpr int WORDS = KEYS / EDGE_KEYS;  // mask words of a row and tile
  static_assert(HEAD_DIM == 128, "a row of the caches is a row of the swizzle");

  struct alignas(ATOM_BYTES) Layout : Base::Layout {
    alignas(ATOM_BYTES) unsigned char weights[2][ROWS * KEYS * 2];  // a row's keys side by side, as K; by turns
    Exchange<ROWS, WORDS> exchange;
  };
};

}  // namespace treeattn
