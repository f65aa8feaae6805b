// Shared memory of an MLA block: three rings that tiles of latent rows pass through, and what is handed on.
//
// A tile is 32 rows of 576 dims: of Q twice, then of each 32 keys of the item. The latent part, 512 dims, is K and V: a
// half of it for each output warpgroup, in a ring of its own. The rope part, the last 64 dims, is K only. Tiles are that
// small so that two are read and one is multiplied with V while two more are on their way.
//
// A place of a ring is one panel or four of [32 rows, 128 bytes] in the 128-byte swizzle (ring.cuh).

#pragma once

#include "ring.cuh"

namespace treeattn {

constexpr int MLA_KEYS = 32, MLA_ROWS = 64;
constexpr u32 LATENT_DIMS = 512, ROPE_DIMS = 64, MLA_PANELS = (LATENT_DIMS + ROPE_DIMS) / PANEL_COLUMNS;
constexpr u32 HALVES = 2, HALF_DIMS = LATENT_DIMS / HALVES, HALF_PANELS = HALF_DIMS / PANEL_COLUMNS;
constexpr u32 TILE_PANEL_BYTES = MLA_KEYS * PANEL_COLUMNS * 2, ROWS_PANEL_BYTES = MLA_ROWS * PANEL_COLUMNS * 2;
constexpr u32 WEIGHTS = 4;  // tiles whose weights may be there, two side by side in a panel
constexpr u32 SCORERS = 4, WRITERS = 8, MLA_READERS = SCORERS + WRITERS;  // warps: one warpgroup of scores, two of out

template <int Q_STEPS, int LATENTS, int ROPES>
struct MlaShared {
  static_assert(Q_STEPS % 4 == 0 && LATENTS >= 4 && ROPES >= 3, "scores run two tiles ahead of sums");
  static constexpr u32 KEPT = MLA_PANELS - Q_STEPS / 4;  // panels of Q that are not in registers: the last ones

  struct alignas(ATOM_BYTES) Layout {
    unsigned char latents[HALVES][LATENTS][HALF_PANELS * TILE_PANEL_BYTES];
    unsigned char ropes[ROPES][TILE_PANEL_BYTES];
    unsigned char q[KEPT][ROWS_PANEL_BYTES];
    unsigned char weights[WEIGHTS / 2][ROWS_PANEL_BYTES];  // [64 rows, 2 tiles of 32 keys]
    float decay[WEIGHTS][MLA_ROWS];    // with them: what sums so far are multiplied by, where `raised` says so
    float inverse[WEIGHTS][MLA_ROWS];  // and, with an item's last tile, what its sums are multiplied by
    u32 raised[WEIGHTS][4];            // by warp, its rows
    u64 latent_full[HALVES][LATENTS], latent_empty[HALVES][LATENTS];
    u64 rope_full[ROPES], rope_empty[ROPES];
    u64 weights_full[WEIGHTS], weights_empty[WEIGHTS];
    u64 item_full[ITEMS], item_empty[ITEMS];
    Cursor walk, items[ITEMS];
  };
};

// First row of the slot that takes this block's part of an item: as in consumer.cuh.
__device__ __forceinline__ i64 mla_part(const AttentionParams& p, const Cursor& at) {
  return static_cast<i64>(p.split > 0 ? at.place : 2 * blockIdx.x + (at.unit == 0)) * MLA_ROWS;
}

// Copy an item, a number a lane.
__device__ __forceinline__ void copy_item(Cursor& to, const Cursor& from, u32 lane) {
  if (lane < CURSOR_FIELDS) reinterpret_cast<i32*>(&to)[lane] = reinterpret_cast<const i32*>(&from)[lane];
}

}  // namespace treeattn
