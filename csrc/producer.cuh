// The producer warpgroup: brings K and V of the block's items into the ring.
//
// Full tiles of the prefix come by tensor copies, which one warp asks for, a box of a page at a time. Where no tensor map
// can be made (pages of less than 8 slots or of an odd number, odd strides), and at the end of the prefix and in the tree, where a row that nobody
// sees must not be read, all four warps copy: each a quarter of a tile's keys, 16 bytes a thread and copy. One lane finds
// out where a key is (page, or slot, or row of the fresh tensors) and tells the lanes that copy its row, so that page ids
// are read and multiplied once a key.

#pragma once

#include "ring.cuh"

namespace treeattn {

// Where K and V of one key are; bit 0 of k is set where nothing may be read: the row becomes 0. A score of 0 is masked
// then, and a weight of 0 times V must not be a NaN that lies in a page nobody may see.
struct KeyAddress {
  u64 k, v;
};

template <class T, int HEAD_DIM, int CONSUMERS, int KEYS, int STAGES, int Q_STEPS>
struct Producer {
  using Memory = typename Shared<HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS>::Layout;
  static constexpr int WARP_KEYS = KEYS / 4;
  static_assert(EDGE_KEYS % WARP_KEYS == 0, "a warp's keys are of one edge unit");
  static constexpr int PAGE_TILES = 32 / WARP_KEYS;     // tiles whose page ids a warp reads at once
  static constexpr int ROW_LANES = HEAD_DIM / 8;        // lanes that copy a row, 16 bytes each
  static constexpr int COPY_ROWS = 32 / ROW_LANES;      // rows of one copy of a warp
  static constexpr int COPIES = WARP_KEYS / COPY_ROWS;  // of a warp and half tile

  const AttentionParams& p;
  Memory& memory;
  u32 warp = 0, lane = 0;
  Place<STAGES> place;

  __device__ __forceinline__ Producer(const AttentionParams& params, Memory& shared) : p(params), memory(shared) {}

  __device__ __forceinline__ void find_thread() {
    const u32 thread = thread_in_group();
    warp = thread / 32;
    lane = thread % 32;
  }

  // Wait until a half of the stage at `place` may be written, and say where it is.
  __device__ __forceinline__ u32 wait_empty(u32 half) {
    barrier_wait(shared_address(&memory.empty[place.stage][half]), place.phase ^ 1);
    return shared_address(memory.stages[place.stage][half]);
  }

  // A checked build: a half tile that was given back too early shows as NaN. By the lanes of `warps` warps.
  __device__ __forceinline__ void spoil(u32 to, u32 warps) {
#if TREEATTN_CANARY
    for (u32 at = (warp % warps * 32 + lane) * 16; at < KEYS * HEAD_DIM * 2; at += warps * 32 * 16)
      store_shared_16(to + at, ~0u, ~0u, ~0u, ~0u);
    if (warps == 4) warpgroup_sync(1);
    fence_async_proxy();
    __syncwarp();
#endif
#if TREEATTN_DELAY
    if ((clock() * 2654435761u >> 16) % 7 == 0) __nanosleep(2000);
#endif
  }

  // Copy the rows at `address` (of lane r: row r of this warp) to a half of the stage at `place`.
  __device__ __forceinline__ void copy(u64 address, u32 half) {
    find_thread();
    const u32 begin = wait_empty(half);
    spoil(begin, 4);
    // row r of a copy of COPY_ROWS rows; the swizzle's bits of its later copies are disjoint from those of the first
    const u32 part = lane / ROW_LANES, chunk = lane % ROW_LANES;
    const u32 to = begin + chunk / 8 * (KEYS * 128) + (warp * WARP_KEYS + part) * 128 + ((chunk % 8 ^ part) << 4);
#pragma unroll
    for (u32 i = 0; i < COPIES; ++i) {
      u64 from = __shfl_sync(~0u, address, i * COPY_ROWS + part);
      const u32 bytes = from & 1 ? 0 : 16;
      from = (from & ~1ull) + chunk * 16;
      copy_async_16((to ^ (i * COPY_ROWS % 8 << 4)) + i * (COPY_ROWS * 128), from, bytes);
    }
    copy_async_arrive(shared_address(&memory.full[place.stage][half]));
  }

  static __device__ __forceinline__ u32 index_at(const void* list, u64 index, i32 wide) {
    return __ldg(static_cast<const u32*>(list) + (index << wide));
  }

  // Which nodes of a mask word some row of the tile sees.
  __device__ __forceinline__ u32 seen_nodes(const Cursor& at, i32 word) const {
    u32 seen = 0;
    const i32 last = (at.row_end - 1) / p.group;
    for (i32 node = at.row0 / p.group + lane; node <= last; node += 32)
      seen |= __ldg(p.mask_words + static_cast<i64>(at.first_row + node) * p.num_words + word);
    return __reduce_or_sync(~0u, seen);
  }

  __device__ __forceinline__ u32 page_of(u32 position) const {
    return static_cast<u32>((static_cast<u64>(position) * p.page_magic) >> p.page_shift);
  }

  // Addresses of the key that this lane looks after, given its page and its position in the request or the cache.
  __device__ __forceinline__ KeyAddress cached(u32 page, u32 position, i32 kv_head) const {
    const u32 within = position - page_of(position) * p.page_size;
    const i64 k = page * p.stride_k_page + within * p.stride_k_slot + kv_head * p.stride_k_head;
    const i64 v = page * p.stride_v_page + within * p.stride_v_slot + kv_head * p.stride_v_head;
    return {reinterpret_cast<u64>(p.k) + 2 * k, reinterpret_cast<u64>(p.v) + 2 * v};
  }

  // The same of a key of an edge tile whose first unit is `unit`.
  __device__ __forceinline__ KeyAddress edge(const Cursor& at, i32 unit) const {
    // a warp's keys are of one unit, so that its lanes stay together: KEYS / 4 divides EDGE_KEYS
    const i32 key = warp * WARP_KEYS + lane % WARP_KEYS;
    unit += key / EDGE_KEYS;
    const i32 offset = key % EDGE_KEYS;
    const i32 word = unit - at.tail_units;
    i32 position = at.full_units * KEYS + unit * EDGE_KEYS + offset;
    const bool in_tree = word >= 0;
    const i32 node = word * EDGE_KEYS + offset;
    bool valid = unit < at.edge_end;
    if (in_tree) {
      const u32 seen = valid ? seen_nodes(at, word) : 0;
      valid = node < at.present && (seen >> offset & 1) != 0;
      position = at.prefix + node;
    } else {
      valid = valid && position < at.prefix;
    }
    KeyAddress address = {reinterpret_cast<u64>(p.k) | 1, reinterpret_cast<u64>(p.v) | 1};
    if (!valid) return address;
    if (in_tree && p.k_tree != nullptr) {
      const i64 row = at.first_row + node;
      address.k = reinterpret_cast<u64>(p.k_tree) + 2 * (row * p.stride_k_tree_row + at.kv_head * p.stride_k_tree_head);
      address.v = reinterpret_cast<u64>(p.v_tree) + 2 * (row * p.stride_v_tree_row + at.kv_head * p.stride_v_tree_head);
      return address;
    }
    if (in_tree && p.tree_slots != nullptr) {
      const u32 slot = index_at(p.tree_slots, at.first_row + node, p.wide_slots);
      return cached(page_of(slot), slot, at.kv_head);
    }
    const u32 page = index_at(p.table, at.first_page + page_of(position), p.wide_table);
    return cached(page, position, at.kv_head);
  }

  // Position in its request of the key that this lane looks after in a full tile.
  __device__ __forceinline__ u32 position_at(const Cursor& at, i32 tile) const {
    return (at.unit + tile) * KEYS + warp * WARP_KEYS + lane % WARP_KEYS;
  }

  // Page ids of the next PAGE_TILES full tiles: lane r has that of key r % WARP_KEYS of tile r / WARP_KEYS.
  __device__ __forceinline__ void load_pages(u32& pages, const Cursor& at, i32 tile) const {
    tile += lane / WARP_KEYS;
    const u64 index = at.first_page + page_of(position_at(at, tile));
    reload(pages, static_cast<const u32*>(p.table) + (index << p.wide_table), tile < at.full_tiles);
  }

  // Full tiles by tensor copies: a lane for each box of a half tile.
  __device__ __forceinline__ void full_boxes(const Cursor& at) {
    const u32 rows = p.page_rows, boxes = KEYS / rows, all = at.full_tiles * boxes;
    const u32 panel = lane / boxes, box = lane % boxes, head = at.kv_head;
    u32 pages = 0;
#pragma unroll 1
    for (u32 first = 0; first < all; first += boxes) {
      // lane r has the page of box r of the next 32
      if (first % 32 == 0) {
        const u32 position = at.unit * KEYS + (first + lane) * rows;
        if (first + lane < all) pages = index_at(p.table, at.first_page + page_of(position), p.wide_table);
      }
      const u32 page = __shfl_sync(~0u, pages, first % 32 + box);
      const u32 position = at.unit * KEYS + (first + box) * rows, within = position - page_of(position) * p.page_size;
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const u32 to = wait_empty(half), barrier = shared_address(&memory.full[place.stage][half]);
        spoil(to, 1);
        if (lane == 0) {
          barrier_expect(barrier, KEYS * HEAD_DIM * 2);
          barrier_arrive(barrier, PRODUCER_ARRIVALS - 1);
        }
        __syncwarp();
        if (panel < HEAD_DIM / 64)
          copy_box(to + panel * (KEYS * 128) + box * rows * 128, half == 0 ? p.k_map : p.v_map, panel * 64, within, head,
                   page, barrier);
      }
      place = place.next();
    }
  }

  // Full tiles without tensor maps.
  __device__ __forceinline__ void full_rows(const Cursor& at) {
    // Page ids are read behind the last use of those before, ahead of the copies of that tile. (A second register of them
    // would have to be moved to the first, which waits for its load, or spills where a producer has 32.)
    u32 pages = 0;
    load_pages(pages, at, 0);
#pragma unroll 1
    for (i32 tile = 0; tile < at.full_tiles; ++tile) {
      find_thread();
      const u32 page = __shfl_sync(~0u, pages, tile % PAGE_TILES * WARP_KEYS + lane % WARP_KEYS);
      const KeyAddress address = cached(page, position_at(at, tile), at.kv_head);
      if (tile % PAGE_TILES == PAGE_TILES - 1) load_pages(pages, at, tile + 1);
#pragma unroll 1
      for (u32 half = 0; half < 2; ++half) copy(half == 0 ? address.k : address.v, half);
      place = place.next();
    }
  }

  __device__ __forceinline__ void item(const Cursor& at) {
    find_thread();
    if (p.page_rows == 0) {
      full_rows(at);
    } else {
      if (warp == 0)
        full_boxes(at);
      else
        place.skip(at.full_tiles);
      // The other warps have not seen how far the ring has come, and a phase tells odd from even only.
      if (at.tiles > at.full_tiles) warpgroup_sync(1);
    }
#pragma unroll 1
    for (i32 tile = at.full_tiles; tile < at.tiles; ++tile) {
      find_thread();
      const KeyAddress address = edge(at, at.edge_begin + (tile - at.full_tiles) * (KEYS / EDGE_KEYS));
#pragma unroll 1
      for (u32 half = 0; half < 2; ++half) copy(half == 0 ? address.k : address.v, half);
      place = place.next();
    }
  }

  __device__ __forceinline__ void run(Cursor& at) {
    while (at.left > 0) {
      find_thread();
      if (lane == 0) {
        cursor_place<KEYS>(at, p);
        at.first_page = p.kv_indptr != nullptr ? index_at(p.kv_indptr, at.request, p.wide_indptr)
                                               : at.request * p.stride_table_request;
      }
      __syncwarp();
      if (at.nodes > 0) item(at);
      find_thread();
      __syncwarp();
      if (lane == 0) cursor_advance<64 * CONSUMERS>(at, p);
      __syncwarp();
    }
    // no thread ends with copies on their way
    copy_async_wait_all();
  }
};

}  // namespace treeattn
