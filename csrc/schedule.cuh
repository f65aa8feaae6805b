// Which tiles a block computes: it walks its stretch of the plan's line, item by item (treeattn/kernels/plan.py).
//
// An item is a tile of packed query rows against the keys of one request and KV head. The plan counts its keys in
// units: full tiles of KEYS keys of the prefix, then *edge* units of 32 keys: what is left of the prefix, then the tree.
// No unit straddles the end of the prefix. Here up to KEYS / 32 edge units are gathered to one tile of shared memory.
//
// One lane of the producer walks, ahead of the consumers, and hands each item to the other warps (ring.cuh).

#pragma once

#include "params.h"

namespace treeattn {

constexpr i32 EDGE_KEYS = 32;  // of an edge unit: one mask word a row
constexpr i32 WORK_FIELDS = 16, SPAN_FIELDS = 4;

__device__ __forceinline__ i32 least(i32 a, i32 b) { return a < b ? a : b; }
__device__ __forceinline__ i32 most(i32 a, i32 b) { return a > b ? a : b; }
__device__ __forceinline__ i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }

// Where a block is on the line, and the item there, in shared memory.
struct alignas(16) Cursor {
  // As the plan's record of the block.
  i32 request, kv_head, row_tile, unit, left, nodes, prefix, first_row, row_tiles, tile_rows, zero, lane;

  // The part of the item that is this block's.
  i32 full_units;            // full tiles of the prefix, of the whole item
  i32 tail_units;            // edge units that hold the end of the prefix
  i32 full_tiles;            // tiles of this part that need no mask
  i32 edge_begin, edge_end;  // its edge units, counted from the item's first edge unit
  i32 tiles;                 // of this part, edge tiles included; 0: there is nothing more to do
  i32 end;                   // unit behind the last
  i32 whole;                 // nobody else has a part
  i32 present;               // nodes that there are
  i32 row0, row_end;         // packed rows of the request and KV head
  i32 passed;                // the producer's: tiles that its first warp has left to others since it last waited for one
};
constexpr i32 PLANNED_FIELDS = 12, CURSOR_FIELDS = sizeof(Cursor) / sizeof(i32);

// Fill in the part of the item at the cursor.
template <int KEYS>
__device__ __forceinline__ void cursor_place(Cursor& at, const AttentionParams& p) {
  const i32 prefix = at.prefix, nodes = at.nodes, unit = at.unit, left = at.left, row0 = at.row_tile * at.tile_rows;
  const i32 rows = at.tile_rows, present = least(nodes, p.total_q - at.first_row);
  const i32 full_units = prefix / KEYS, tail_units = ceil_div(prefix % KEYS, EDGE_KEYS);
  const i32 units = full_units + tail_units + ceil_div(nodes, EDGE_KEYS), end = least(units, unit + left);
  const i32 full_tiles = most(least(end, full_units) - unit, 0);
  const i32 edge_begin = most(unit - full_units, 0), edge_end = most(end - full_units, 0);
  at.full_units = full_units;
  at.tail_units = tail_units;
  at.full_tiles = full_tiles;
  at.edge_begin = edge_begin;
  at.edge_end = edge_end;
  at.tiles = full_tiles + ceil_div(edge_end - edge_begin, KEYS / EDGE_KEYS);
  at.end = end;
  at.whole = unit == 0 && end == units;
  at.present = present;
  at.row0 = row0;
  at.row_end = least(row0 + rows, present * p.group);
}

// Past the item at the cursor (or past a request without any): row tiles of a KV head, KV heads, requests.
template <int TILE_ROWS>
__device__ __forceinline__ void cursor_advance(Cursor& at, const AttentionParams& p) {
  if (at.nodes > 0) {
    at.left -= at.end - at.unit;
    at.unit = 0;
    at.row_tile += 1;
    // a block of a lane keeps to one row tile
    if (at.row_tile == (at.lane < 0 ? at.row_tiles : at.lane + 1)) {
      at.row_tile = most(at.lane, 0);
      at.kv_head += 1;
    }
  }
  if (at.kv_head == p.kv_heads || at.nodes == 0) {
    at.kv_head = 0;
    if (at.left > 0) {
      at.request += 1;
      const i32* span = p.spans + static_cast<i64>(at.request) * SPAN_FIELDS;
      at.prefix = span[0];
      at.nodes = span[3];
      at.first_row = p.qo_indptr[at.request];
      at.row_tiles = most(ceil_div(at.nodes * p.group, TILE_ROWS), 1);
      at.tile_rows = ceil_div(at.nodes * p.group, at.row_tiles);
    }
  }
}

// To the first item at or behind the cursor; `tiles` is 0 behind the last.
template <int KEYS, int TILE_ROWS>
__device__ __forceinline__ void cursor_find(Cursor& at, const AttentionParams& p) {
  while (at.left > 0 && at.nodes == 0) cursor_advance<TILE_ROWS>(at, p);
  if (at.left > 0)
    cursor_place<KEYS>(at, p);
  else
    at.tiles = 0;
}

}  // namespace treeattn
