// Which tiles a block computes: it walks its stretch of the plan's line, item by item (treeattn/kernels/plan.py).
//
// An item is a tile of packed query rows against the keys of one request and KV head. The plan counts its keys in
// units: full tiles of KEYS keys of the prefix, then *edge* units of 32 keys: what is left of the prefix, then the tree.
// No unit straddles the end of the prefix. Here up to KEYS / 32 edge units are gathered to one tile of shared memory.

#pragma once

#include "params.h"

namespace treeattn {

constexpr i32 EDGE_KEYS = 32;  // of an edge unit: one mask word a row
constexpr i32 WORK_FIELDS = 16, SPAN_FIELDS = 4;

__device__ __forceinline__ i32 least(i32 a, i32 b) { return a < b ? a : b; }
__device__ __forceinline__ i32 most(i32 a, i32 b) { return a > b ? a : b; }
__device__ __forceinline__ i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }

// Where a block is on the line, and the item there. A copy for each warp, in shared memory, which its first lane keeps:
// the loops over tiles need the registers. (Volatile where it is written: wide accesses would take registers of a
// producer that has 32.)
struct Cursor {
  i32 request, kv_head, row_tile, unit, left, nodes, prefix, first_row, row_tiles, tile_rows, lane;

  // The part of the item that is this block's.
  i32 full_units;            // full tiles of the prefix, of the whole item
  i32 tail_units;            // edge units that hold the end of the prefix
  i32 full_tiles;            // tiles of this part that need no mask
  i32 edge_begin, edge_end;  // its edge units, counted from the item's first edge unit
  i32 tiles;                 // of this part, edge tiles included
  i32 end;                   // unit behind the last
  i32 whole;                 // nobody else has a part
  i32 present;               // nodes that there are
  i32 row0, row_end;         // packed rows of the request and KV head
  i64 first_page;            // of the request, in the table; the producer's
};

template <int KEYS>
__device__ __forceinline__ void cursor_place(volatile Cursor& at, const AttentionParams& p) {
  at.full_units = at.prefix / KEYS;
  at.tail_units = ceil_div(at.prefix % KEYS, EDGE_KEYS);
  const i32 units = at.full_units + at.tail_units + ceil_div(at.nodes, EDGE_KEYS);
  at.end = least(units, at.unit + at.left);
  at.full_tiles = most(least(at.end, at.full_units) - at.unit, 0);
  at.edge_begin = most(at.unit - at.full_units, 0);
  at.edge_end = most(at.end - at.full_units, 0);
  at.tiles = at.full_tiles + ceil_div(at.edge_end - at.edge_begin, KEYS / EDGE_KEYS);
  at.whole = at.unit == 0 && at.end == units;
  at.present = least(at.nodes, p.total_q - at.first_row);
  at.row0 = at.row_tile * at.tile_rows;
  at.row_end = least(at.row0 + at.tile_rows, at.present * p.group);
}

__device__ __forceinline__ void cursor_start(volatile Cursor& at, const i32* work) {
  at.request = work[0];
  at.kv_head = work[1];
  at.row_tile = work[2];
  at.unit = work[3];
  at.left = work[4];
  at.nodes = work[5];
  at.prefix = work[6];
  at.first_row = work[7];
  at.row_tiles = work[8];
  at.tile_rows = work[9];
  at.lane = work[11];
}

// Past the item at the cursor (or past a request without any): row tiles of a KV head, KV heads, requests.
template <int TILE_ROWS>
__device__ __forceinline__ void cursor_advance(volatile Cursor& at, const AttentionParams& p) {
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

}  // namespace treeattn
