// Shared memory of an MLA block: three rings that tiles of latent rows pass through in parts, and what is handed on.
//
// A tile is 64 rows of 576 dims: of Q first, then of each 64 keys of the item. The rope part, its last 64 dims, is K only.
// The latent part is K and V, and each half of it has a ring of its own: it is V of one output warpgroup, in two quarters
// of 128 dims, as its products come. When the first are done their quarter is given back, and another is asked for.
//
// A part is one panel or two of [64 rows, 128 bytes] in the 128-byte swizzle (ring.cuh).

#pragma once

#include "fp8_tiles.cuh"
#include "ring.cuh"

namespace treeattn {

constexpr int MLA_KEYS = 64, MLA_ROWS = 64;
constexpr u32 LATENT_DIMS = 512, ROPE_DIMS = 64, MLA_PANELS = (LATENT_DIMS + ROPE_DIMS) / PANEL_COLUMNS;
constexpr u32 MLA_PANEL_BYTES = MLA_KEYS * PANEL_COLUMNS * 2;
constexpr u32 HALVES = 2, QUARTERS = 4, QUARTER_DIMS = LATENT_DIMS / QUARTERS;
constexpr u32 RING_ARRIVALS = 32;  // of a ring's warp: each lane's copies arrive by themselves; a tensor copy's lane for all
constexpr u32 SCORERS = 4, WRITERS = 8, MLA_READERS = SCORERS + WRITERS;  // warps: one warpgroup of scores, two of out

// Where a quarter begins, in the order of products with K: first and second quarter of each half.
__device__ __forceinline__ constexpr u32 quarter_dim(u32 quarter) {
  return quarter % HALVES * (LATENT_DIMS / HALVES) + quarter / HALVES * QUARTER_DIMS;
}

template <int Q_STEPS, int LATENTS, int ROPES>
struct MlaShared {
  static_assert(Q_STEPS % 4 == 0 && LATENTS >= QUARTERS && ROPES >= 2, "two tiles are read at the same time");
  static constexpr u32 KEPT = MLA_PANELS - Q_STEPS / 4;  // panels of Q that are not in registers: the last ones

  struct alignas(ATOM_BYTES) Layout {
    unsigned char latents[HALVES][LATENTS][2 * MLA_PANEL_BYTES];
    unsigned char ropes[ROPES][MLA_PANEL_BYTES];
    unsigned char q[KEPT][MLA_PANEL_BYTES];
    unsigned char weights[2][MLA_PANEL_BYTES];  // of tiles that are to be multiplied with V: [64 rows, 64 keys]
    float decay[2][MLA_ROWS];                   // with them: what sums so far are multiplied by, where `raised` says so
    float inverse[2][MLA_ROWS];                 // and, with an item's last tile, what its sums are multiplied by
    u32 raised[2][4];                           // by warp, its rows
    u64 latent_full[HALVES][LATENTS], latent_empty[HALVES][LATENTS];
    u64 rope_full[ROPES], rope_empty[ROPES];
    u64 weights_full[2], weights_empty[2];
    u64 item_full[ITEMS], item_empty[ITEMS];
    Cursor walk, items[ITEMS];
    u32 tag;  // of what this launch leaves of cut items
  };
  static constexpr u32 BARRIERS = 4 * LATENTS + 2 * ROPES + 4 + 2 * ITEMS;

  // Arrivals that a barrier takes, by its number from `latent_full` on.
  static __device__ __forceinline__ u32 arrivals(u32 barrier) {
    const i32 of_rope = barrier - 4 * LATENTS, of_weights = of_rope - 2 * ROPES, of_item = of_weights - 4;
    if (of_rope < 0) return barrier < 2 * LATENTS ? RING_ARRIVALS : 4 * WARP_ARRIVALS;
    if (of_weights < 0) return of_rope < ROPES ? RING_ARRIVALS : 4 * WARP_ARRIVALS;
    if (of_item < 0) return (of_weights < 2 ? SCORERS : WRITERS) * WARP_ARRIVALS;
    return of_item < static_cast<i32>(ITEMS) ? ITEM_LANES : (MLA_READERS + 3) * WARP_ARRIVALS;  // all but the walk
  }
};

// First row of the slot that takes this block's part of an item.
__device__ __forceinline__ i64 mla_part(const AttentionParams& p, const Cursor& at) {
  return part_slot(at, p) * MLA_ROWS;
}

}  // namespace treeattn
