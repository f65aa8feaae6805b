// Shared memory of a block that takes an FP8 cache in numbers of 16 bits: the ring of ring.cuh, and numbers of the cache on
// their way to it.
//
// A half tile that is asked for is one panel of [KEYS rows, 128 bytes] in the 128-byte swizzle, a number a byte. Each warp of
// the producer finds its own rows there, and puts them into the ring as numbers of 16 bits (fp8_wide_producer.cuh). There are
// places for STAGED tiles.

#pragma once

#include "ring.cuh"

namespace treeattn {

template <int HEAD_DIM, int CONSUMERS, int KEYS, int STAGES, int STAGED, int Q_STEPS>
struct Fp8WideShared : Shared<HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS> {
  using Base = Shared<HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS>;
  static constexpr int CACHED = 1;
  static_assert(HEAD_DIM == 128, "a row of the caches is a row of the swizzle");

  struct alignas(ATOM_BYTES) Layout : Base::Layout {
    alignas(ATOM_BYTES) unsigned char staged[STAGED][2][KEYS * HEAD_DIM];  // K, V
    u64 arrived[STAGED];  // tensor copies of a tile have
    u64 given[STAGED];    // each warp of the producer has read its rows
  };
};

}  // namespace treeattn
