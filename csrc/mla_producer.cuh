// The producer warpgroup of an MLA block: brings Q and the latent rows of the block's items into the rings.
//
// All four warps go along the rings together, part by part: who has nothing to copy for a part arrives for it as soon as
// its place is free. So none can be a round ahead of another, and phases of barriers, which tell odd from even only, say
// enough. The first warp walks along the plan, hands out items and asks for full tiles by tensor copies; the second and
// third copy edge tiles, a unit of 32 keys each; all but the first copy Q. Where no tensor map can be made (producer.cuh),
// all four copy full tiles.

#pragma once

#include "mla_ring.cuh"

namespace treeattn {

template <int Q_STEPS, int LATENTS, int ROPES>
struct MlaProducer {
  using Memory = typename MlaShared<Q_STEPS, LATENTS, ROPES>::Layout;
  static constexpr u32 WARP_KEYS = MLA_KEYS / 4;
  static constexpr u32 PAGE_TILES = 32 / WARP_KEYS;  // tiles whose page ids a warp reads at once
  static constexpr u32 WARP_ARRIVALS = PRODUCER_ARRIVALS / 4;
  static constexpr u32 Q_WARP_ROWS = 24;  // of three warps: whole atoms

  const AttentionParams& p;
  Memory& memory;
  u32 warp = 0, lane = 0;
  Place<LATENTS> latent;
  Place<ROPES> rope;

  __device__ __forceinline__ MlaProducer(const AttentionParams& params, Memory& shared) : p(params), memory(shared) {}

  __device__ __forceinline__ void find_thread() {
    const u32 thread = thread_in_group();
    warp = thread / 32;
    lane = thread % 32;
  }

  // Wait until the place of the next part may be written, and say where it is.
  __device__ __forceinline__ u32 wait_latent() {
    barrier_wait(shared_address(&memory.latent_empty[latent.stage()]), latent.phase() ^ 1);
    return shared_address(memory.latents[latent.stage()]);
  }
  __device__ __forceinline__ u32 wait_rope() {
    barrier_wait(shared_address(&memory.rope_empty[rope.stage()]), rope.phase() ^ 1);
    return shared_address(memory.ropes[rope.stage()]);
  }
  __device__ __forceinline__ u32 latent_barrier() const { return shared_address(&memory.latent_full[latent.stage()]); }
  __device__ __forceinline__ u32 rope_barrier() const { return shared_address(&memory.rope_full[rope.stage()]); }

  // A checked build: a part that was given back too early shows as NaN. Of `rows` rows from `to` on, panels of a part.
  template <u32 PANELS>
  __device__ __forceinline__ void spoil(u32 to, u32 rows) {
#if TREEATTN_CANARY
    for (u32 panel = 0; panel < PANELS; ++panel)
      for (u32 at = lane * 16; at < rows * 128; at += 32 * 16)
        store_shared_16(to + panel * MLA_PANEL_BYTES + at, ~0u, ~0u, ~0u, ~0u);
    fence_async_proxy();
    __syncwarp();
#endif
#if TREEATTN_DELAY
    if ((clock() * 2654435761u >> 16) % 7 == 0) __nanosleep(2000);
#endif
  }

  // This warp has nothing to copy for so many tiles.
  __device__ __forceinline__ void pass(u32 tiles) {
#pragma unroll 1
    for (; tiles > 0; --tiles) {
      wait_rope();
      __syncwarp();  // no lane may still look at a phase that the arrival lets end
      if (lane == 0) barrier_arrive(rope_barrier(), WARP_ARRIVALS);
      rope = rope.next();
#pragma unroll 1
      for (u32 quarter = 0; quarter < QUARTERS; ++quarter) {
        wait_latent();
        __syncwarp();
        if (lane == 0) barrier_arrive(latent_barrier(), WARP_ARRIVALS);
        latent = latent.next();
      }
    }
  }

  // Copy `rows` rows of PANELS panels to `to`, a multiple of 8: of lane r the one at `address` (odd: zeros).
  template <u32 PANELS>
  __device__ __forceinline__ void copy_rows(u32 to, u64 address, u32 rows) {
    constexpr u32 LANES = PANELS * 8, AT_ONCE = 32 / LANES;
    const u32 part = lane / LANES, chunk = lane % LANES;
    spoil<PANELS>(to, rows);
    to += chunk / 8 * MLA_PANEL_BYTES + part * 128 + ((chunk % 8 ^ part) << 4);
#pragma unroll 1
    for (u32 begin = 0; begin < rows; begin += 8, to += 8 * 128) {
#pragma unroll
      for (u32 row = 0; row < 8; row += AT_ONCE) {
        const u64 from = __shfl_sync(~0u, address, begin + row + part);
        copy_async_16((to ^ (row << 4)) + row * 128, (from & ~1ull) + chunk * 16, from & 1 ? 0 : 16);
      }
    }
  }

  // Copy this warp's rows of a tile, from row `begin` of it on, as `copy_rows`.
  __device__ __forceinline__ void copy_tile(u64 address, u32 begin, u32 rows) {
    copy_rows<1>(wait_rope() + begin * 128, address + LATENT_DIMS * 2, rows);
    copy_async_arrive(rope_barrier());
    rope = rope.next();
#pragma unroll 1
    for (u32 quarter = 0; quarter < QUARTERS; ++quarter) {
      find_thread();
      copy_rows<2>(wait_latent() + begin * 128, address + quarter_dim(quarter) * 2, rows);
      copy_async_arrive(latent_barrier());
      latent = latent.next();
    }
    find_thread();
  }

  // Q of the item; rows that are not there are 0.
  __device__ __forceinline__ void copy_q(const Cursor& at) {
    const u32 begin = (warp - 1) * Q_WARP_ROWS;
    const u32 row = at.row0 + begin + lane, node = row / p.group, head = at.kv_head * p.group + row % p.group;
    u64 address = reinterpret_cast<u64>(p.q) +
                  2 * ((at.first_row + static_cast<i64>(node)) * p.stride_q_row + static_cast<i64>(head) * p.stride_q_head);
    if (static_cast<i32>(row) >= at.row_end) address = reinterpret_cast<u64>(p.q) | 1;
    copy_tile(address, begin, least(Q_WARP_ROWS, MLA_ROWS - begin));
  }

  // Where the pages of the item's request begin in the table.
  __device__ __forceinline__ i64 first_page(const Cursor& at) const {
    return p.kv_indptr != nullptr ? index_at(p.kv_indptr, at.request, p.wide_indptr) : at.request * p.stride_table_request;
  }

  static __device__ __forceinline__ u32 index_at(const void* list, u64 index, i32 wide) {
    return __ldg(static_cast<const u32*>(list) + (index << wide));
  }

  __device__ __forceinline__ u32 page_of(u32 position) const {
    return static_cast<u32>((static_cast<u64>(position) * p.page_magic) >> p.page_shift);
  }

  // Where the key is that this lane looks after, given its page and its position in the request or the cache.
  __device__ __forceinline__ u64 cached(u32 page, u32 position, i32 kv_head) const {
    const u32 within = position - page_of(position) * p.page_size;
    return reinterpret_cast<u64>(p.k) + 2 * (page * p.stride_k_page + within * p.stride_k_slot + kv_head * p.stride_k_head);
  }

  // Whether some row of the tile sees this lane's node of a mask word.
  __device__ __forceinline__ bool node_seen(const Cursor& at, i32 word) const {
    u32 seen = 0;
    for (i32 node = at.row0 / p.group + lane; node * p.group < at.row_end; node += 32)
      seen |= __ldg(p.mask_words + static_cast<i64>(at.first_row + node) * p.num_words + word);
    return (__reduce_or_sync(~0u, seen) >> lane & 1) != 0;
  }

  // Where a key of an edge unit is; bit 0 is set where nothing may be read: the row becomes 0. A score of 0 is masked then,
  // and a weight of 0 times V must not be a NaN that lies in a page nobody may see.
  __device__ __forceinline__ u64 edge(const Cursor& at, i32 unit) const {
    const i32 word = unit - at.prefix_units, node = word * EDGE_KEYS + lane;
    i32 position = at.tail_key + unit * EDGE_KEYS + lane;
    const bool in_tree = word >= 0;
    bool valid = unit < at.edge_end;
    if (in_tree) {
      const bool seen = valid && node_seen(at, word);
      valid = node < at.present && seen;
      position = at.prefix + node;
    } else {
      valid = valid && position < at.prefix;
    }
    if (!valid) return reinterpret_cast<u64>(p.k) | 1;
    if (in_tree && p.k_tree != nullptr)
      return reinterpret_cast<u64>(p.k_tree) +
             2 * ((at.first_row + static_cast<i64>(node)) * p.stride_k_tree_row + at.kv_head * p.stride_k_tree_head);
    if (in_tree && p.tree_slots != nullptr) {
      const u32 slot = index_at(p.tree_slots, at.first_row + node, p.wide_slots);
      return cached(page_of(slot), slot, at.kv_head);
    }
    return cached(index_at(p.table, first_page(at) + page_of(position), p.wide_table), position, at.kv_head);
  }

  // Full tiles by tensor copies: a lane for each box of a part.
  __device__ __forceinline__ void full_boxes(const Cursor& at) {
    const u32 rows = p.page_rows, boxes = MLA_KEYS / rows, all = at.full_tiles * boxes;
    const u32 panel = lane / boxes, box = lane % boxes, head = at.kv_head;
    u32 pages = 0;
#pragma unroll 1
    for (u32 first = 0; first < all; first += boxes) {
      // lane r has the page of box r of the next 32
      if (first % 32 == 0) {
        const u32 position = at.full_key + (first + lane) * rows;
        if (first + lane < all) pages = index_at(p.table, first_page(at) + page_of(position), p.wide_table);
      }
      const u32 page = __shfl_sync(~0u, pages, first % 32 + box);
      const u32 position = at.full_key + (first + box) * rows, within = position - page_of(position) * p.page_size;
      const u32 place = panel * MLA_PANEL_BYTES + box * rows * 128;
      u32 to = wait_rope();
      spoil<1>(to, MLA_KEYS);
      expect(rope_barrier(), MLA_PANEL_BYTES);
      if (panel < 1) copy_box(to + place, p.k_map, LATENT_DIMS, within, head, page, rope_barrier());
      rope = rope.next();
#pragma unroll 1
      for (u32 quarter = 0; quarter < QUARTERS; ++quarter) {
        to = wait_latent();
        spoil<2>(to, MLA_KEYS);
        expect(latent_barrier(), 2 * MLA_PANEL_BYTES);
        if (panel < 2)
          copy_box(to + place, p.k_map, quarter_dim(quarter) + panel * PANEL_COLUMNS, within, head, page, latent_barrier());
        latent = latent.next();
      }
    }
  }

  // This warp's arrivals at a part that tensor copies bring.
  __device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    if (lane == 0) {
      barrier_expect(barrier, bytes);
      barrier_arrive(barrier, WARP_ARRIVALS - 1);
    }
    __syncwarp();
  }

  // Position in its request of the key that this lane looks after in a full tile.
  __device__ __forceinline__ u32 position_at(const Cursor& at, i32 tile) const {
    return at.full_key + tile * MLA_KEYS + warp * WARP_KEYS + lane % WARP_KEYS;
  }

  // Page ids of the next PAGE_TILES full tiles: lane r has that of key r % WARP_KEYS of tile r / WARP_KEYS.
  __device__ __forceinline__ void load_pages(u32& pages, const Cursor& at, i32 tile) const {
    tile += lane / WARP_KEYS;
    const u64 index = first_page(at) + page_of(position_at(at, tile));
    reload(pages, static_cast<const u32*>(p.table) + (index << p.wide_table), tile < at.full_tiles);
  }

  // Full tiles without tensor maps. (Page ids: see producer.cuh.)
  __device__ __forceinline__ void full_rows(const Cursor& at) {
    u32 pages = 0;
    load_pages(pages, at, 0);
#pragma unroll 1
    for (i32 tile = 0; tile < at.full_tiles; ++tile) {
      const u32 page = __shfl_sync(~0u, pages, tile % PAGE_TILES * WARP_KEYS + lane % WARP_KEYS);
      const u64 address = cached(page, position_at(at, tile), at.kv_head);
      if (tile % PAGE_TILES == PAGE_TILES - 1) load_pages(pages, at, tile + 1);
      copy_tile(address, warp * WARP_KEYS, WARP_KEYS);
    }
  }

  __device__ __forceinline__ void item(const Cursor& at) {
    if (warp == 0)
      pass(1);
    else
      copy_q(at);
    find_thread();
    if (p.page_rows == 0)
      full_rows(at);
    else if (warp == 0)
      full_boxes(at);
    else
      pass(at.full_tiles);
    find_thread();
    if (warp - 1 < 2) {
      i32 unit = at.edge_begin + warp - 1;
#pragma unroll 1
      for (i32 tile = at.full_tiles; tile < at.tiles; ++tile, unit += 2)
        copy_tile(edge(at, unit), (warp - 1) * EDGE_KEYS, EDGE_KEYS);
    } else {
      pass(at.tiles - at.full_tiles);
    }
  }

  // Hand the item at the cursor to the other warps.
  __device__ __forceinline__ void publish() {
    barrier_wait(shared_address(&memory.item_empty[latent.item_slot()]), latent.item_phase() ^ 1);
    if (lane == 0) cursor_find<MLA_KEYS, MLA_ROWS>(memory.walk, p);
    __syncwarp();
    copy_item(memory.items[latent.item_slot()], memory.walk, lane);
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&memory.item_full[latent.item_slot()]));
  }

  // The plan's record of this block is in memory.walk.
  __device__ __forceinline__ void run() {
    for (;;) {
      find_thread();
      if (warp == 0)
        publish();
      else
        barrier_wait(shared_address(&memory.item_full[latent.item_slot()]), latent.item_phase());
      const Cursor& at = memory.items[latent.item_slot()];
      if (at.tiles == 0) break;
      item(at);
      find_thread();
      __syncwarp();
      if (warp != 0) {
        if (lane == 0) barrier_arrive(shared_address(&memory.item_empty[latent.item_slot()]));
      } else {
        if (lane == 0) cursor_advance<MLA_ROWS>(memory.walk, p);
        __syncwarp();
      }
      latent.next_item();
    }
    // no thread ends with copies on their way
    copy_async_wait_all();
  }
};

}  // namespace treeattn
