// Shared memory of an MLA block with an FP8 cache: the rings of mla_ring.cuh, and numbers of the cache on their way.
//
// Each thread of the producer asks for 16 bytes at a time, finds them at a place of its own, and puts them into a ring as
// numbers of 16 bits (mla_fp8_producer.cuh). There are places for six panels of a tile, of nine.

#pragma once

#include "mla_ring.cuh"

namespace treeattn {

constexpr u32 MLA_ASKED = 6;                     // panels
constexpr u32 ASKED_BYTES = 64 * PANEL_COLUMNS;  // of one
constexpr u32 FILL_ARRIVALS = 128;               // of a part of a ring: all threads of the producer

template <int Q_STEPS, int LATENTS, int ROPES>
struct MlaFp8Shared : MlaShared<Q_STEPS, LATENTS, ROPES> {
  using Base = MlaShared<Q_STEPS, LATENTS, ROPES>;

  struct alignas(ATOM_BYTES) Layout : Base::Layout {
    alignas(ATOM_BYTES) unsigned char asked[MLA_ASKED][ASKED_BYTES];
  };

  static __device__ __forceinline__ u32 arrivals(u32 barrier) {
    const bool of_ring = barrier < 2 * LATENTS || (barrier >= 4 * LATENTS && barrier < 4 * LATENTS + ROPES);
    return of_ring ? FILL_ARRIVALS : Base::arrivals(barrier);
  }
};

}  // namespace treeattn
