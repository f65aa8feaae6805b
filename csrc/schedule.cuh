// Which tiles a block computes: it walks its stretch of the plan's line, item by item (treeattn/kernels/plan.py).
//
// An item is a tile of packed query rows against the keys of one request and KV head. The plan counts its keys in
// units: full tiles of KEYS keys of the prefix, then *edge* units of 32 keys: where a window begins, what is left of the
// prefix, then the tree. No unit straddles the end of the prefix. Here up to KEYS / 32 edge units are gathered to one tile
// of shared memory.
//
// One lane of the producer walks, ahead of the consumers, and hands each item to the other warps (ring.cuh).

#pragma once

#include "params.h"

namespace treeattn {

constexpr i32 EDGE_KEYS = 32;  // of an edge unit: one mask word a row
constexpr i32 WORK_FIELDS = 16, TURN_FIELDS = 8, SPAN_FIELDS = 8, SPAN_NODES = 3;
// Of a block: the word of the item that it begins, its flags (merge.cuh), and the launches with these buffers so far. Of MLA's first
// block alone: how many blocks of the merge have read those launches, and the launches (mla_merge.cuh).
constexpr u32 ARRIVAL_FIELDS = 4, ARRIVAL_READERS = 2, ARRIVAL_LAUNCHES = 3;

// What the parts of a launch carry, given how many there have been before: odd, and another for each.
__device__ __forceinline__ u32 tag_of(u32 launches) { return 2 * launches + 1; }

constexpr u32 BEHIND = 1 << 16;  // in a word: one block that has left its share behind, above those that have come
constexpr i32 PART_PREFIX = 1;

__device__ __forceinline__ i32 least(i32 a, i32 b) { return a < b ? a : b; }
__device__ __forceinline__ i32 most(i32 a, i32 b) { return a > b ? a : b; }
__device__ __forceinline__ i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }

// Where a block is on the line, and the item there, in shared memory.
struct alignas(16) Cursor {
  // As the plan's record of the block; `unit` and `left` count splits in batch-invariant mode. `number` is of the program that
  // the block runs, or there the place on the line.
  i32 request, kv_head, row_tile, unit, left, nodes, prefix, first_row, row_tiles, tile_rows, turn, lane, first, full, number;
  i32 share;  // of each block, in units or splits

  // The part of the item that is this block's.
  i32 full_key;              // where its full tiles begin
  i32 tail_key;              // where the edge units behind the full tiles begin
  i32 front_units;           // edge units where some rows begin to see, of the whole item
  i32 prefix_units;          // edge units that hold keys of the prefix, these included
  i32 full_tiles;            // tiles of this part that need no mask
  i32 edge_begin, edge_end;  // its edge units, counted from the item's first edge unit
  i32 tiles;                 // of this part, edge tiles included; 0: there is nothing more to do
  i32 end;                   // unit behind the last
  i32 units;                 // of the whole item
  i32 whole;                 // nobody else has a part
  i32 present;               // nodes that there are
  i32 row0, row_end;         // packed rows of the request and KV head
  i32 prefix_len;            // if there is a window: what positions are counted from
};
constexpr i32 PLANNED_FIELDS = 16;

// Node of a packed row of a request and KV head.
__device__ __forceinline__ u32 row_node(const AttentionParams& p, u32 row) {
  return __umulhi(2 * row, p.group_magic);
}

// Where the nodes of a request are, counted as the keys of its prefix are.
__device__ __forceinline__ i32 key_of_node(const AttentionParams& p, const Cursor& at, i32 node) {
  const i64 behind = __ldg(p.positions + at.first_row + node) - at.prefix_len, most = 0x3FFFFFFF;  // sums of two fit
  return at.prefix + static_cast<i32>(behind < -most ? -most : behind > most ? most : behind);
}

// The plan's record of a block, of which `first` and `full` are only there if it is ranged.
__device__ __forceinline__ i32 planned(const AttentionParams& p, i32 block, i32 field) {
  return (field == 12 || field == 13) && p.ranged == 0 ? 0 : p.work[block * WORK_FIELDS + field];
}

// Fill in the part of the item at the cursor.
template <int KEYS>
__device__ __forceinline__ void cursor_place(Cursor& at, const AttentionParams& p) {
  const i32 prefix = at.prefix, full = at.full;
  const i32 before = ceil_div(full, KEYS), full_units = most(prefix / KEYS - before, 0);
  const i32 tail_key = most(full, prefix / KEYS * KEYS), front_units = ceil_div(full - at.first, EDGE_KEYS);
  const i32 prefix_units = front_units + ceil_div(prefix - tail_key, EDGE_KEYS);
  at.tail_key = tail_key;
  at.front_units = front_units;
  at.prefix_units = prefix_units;
  const i32 units = full_units + prefix_units + (p.part == PART_PREFIX ? 0 : ceil_div(at.nodes, EDGE_KEYS));
  const i32 begin = p.split > 0 ? at.unit * p.split : at.unit;
  const i32 end = least(units, begin + (p.split > 0 ? p.split : at.left));
  const i32 full_tiles = most(least(end, full_units) - begin, 0);
  const i32 edge_begin = most(begin - full_units, 0), edge_end = most(end - full_units, 0);
  at.full_key = (before + begin) * KEYS;
  at.full_tiles = full_tiles;
  at.edge_begin = edge_begin;
  at.edge_end = edge_end;
  at.tiles = full_tiles + ceil_div(edge_end - edge_begin, KEYS / EDGE_KEYS);
  at.end = end;
  at.units = units;
  at.whole = begin == 0 && end == units;
  const i32 present = least(at.nodes, p.total_q - at.first_row), row0 = at.row_tile * at.tile_rows;
  at.present = present;
  at.row0 = row0;
  at.row_end = least(row0 + at.tile_rows, present * p.group);
  if (p.positions != nullptr) at.prefix_len = p.prefix_lens[at.request];
}

// The slot of partials that takes the part at the cursor. The first part of a cut item goes to slot 2p + 1 of program p, any later
// part to slot 2p: a block has one of each at most.
__device__ __forceinline__ i64 part_slot(const Cursor& at, const AttentionParams& p) {
  return static_cast<i64>(p.split > 0 ? at.number : 2 * at.number + (at.unit == 0));
}

// What a block has computed of an item that is cut, and which blocks have the rest (merge.cuh). They are counted by their
// programs' numbers: the plan deals blocks to lanes in turn.
struct Part {
  i32 first_block, blocks;  // that share the item
  i32 own;                  // this one among them
  i32 first_row, kv_head, row0, rows;
};

// The part at the cursor; not in batch-invariant mode.
__device__ __forceinline__ Part part_of(const Cursor& at) {
  const i32 in_front = at.unit > 0 ? 0 : at.share - at.left;  // units of this block before the item
  const i32 before = ceil_div(at.unit, at.share), behind = (in_front + at.units - 1 - at.unit) / at.share;
  return {at.number - before, before + behind + 1, before, at.first_row, at.kv_head, at.row0, at.row_end - at.row0};
}

__device__ __forceinline__ u32* arrival_word(const AttentionParams& p, const Part& part) {
  return p.arrivals + part.first_block * ARRIVAL_FIELDS;
}

// Past the part at the cursor: splits, row tiles of a KV head, KV heads, requests.
__device__ __forceinline__ void cursor_advance(Cursor& at, const AttentionParams& p) {
  if (p.split > 0) {
    at.left -= 1;
    at.number += 1;
  } else {
    at.left -= at.end - at.unit;
  }
  if (p.split > 0 && at.end < at.units) {
    at.unit += 1;
    return;
  }
  at.unit = 0;
  at.row_tile += 1;
  // a block of a lane keeps to one row tile
  if (at.row_tile == (at.lane < 0 ? at.row_tiles : at.lane + 1)) {
    at.row_tile = most(at.lane, 0);
    at.kv_head += 1;
  }
  if (at.kv_head == p.kv_heads) {
    at.kv_head = 0;
    if (at.left > 0) {
      const i32* turn = p.turns + static_cast<i64>(at.turn) * TURN_FIELDS;
      at.request = turn[0];
      at.nodes = turn[1];
      at.prefix = turn[2];
      at.first_row = turn[3];
      at.row_tiles = turn[4];
      at.tile_rows = turn[5];
      at.first = turn[6];
      at.full = turn[7];
      at.turn += 1;
    }
  }
}

// To the item at the cursor; `tiles` is 0 behind the last.
template <int KEYS>
__device__ __forceinline__ void cursor_find(Cursor& at, const AttentionParams& p) {
  if (at.left > 0)
    cursor_place<KEYS>(at, p);
  else
    at.tiles = 0;
}

}  // namespace treeattn
