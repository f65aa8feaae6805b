// Shared memory of a block that takes an FP8 cache in numbers of 16 bits: the ring of ring.cuh, and numbers of the cache on
// their way to it.
//
// A thread of the producer asks for 16 bytes at a time, finds them at a place of its own, and puts them into the ring as
// numbers of 16 bits (fp8_wide_producer.cuh). There are places for STAGED tiles.

#pragma once

#include "ring.cuh"

namespace treeattn {

template <int HEAD_DIM, int CONSUMERS, int KEYS, int STAGES, int STAGED, int Q_STEPS>
struct Fp8WideShared : Shared<HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS> {
  using Base = Shared<HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS>;
  static constexpr int CACHED = 1;

  struct alignas(ATOM_BYTES) Layout : Base::Layout {
    alignas(ATOM_BYTES) unsigned char staged[STAGED][2][KEYS * HEAD_DIM];  // K, V
  };
};

}  // namespace treeattn
