// The producer warpgroup: brings K and V of the block's items into the ring.
//
// Full tiles of the prefix come by tensor copies, a box of a page at a time, which the first warp asks for. It also walks
// along the plan, and hands each item to the other warps of the block; nothing else keeps it, so that the next item's
// tiles are on their way while the other warps copy what needs a look at each row, 16 bytes a thread: Q, the end of the
// prefix and the tree, where a row that nobody sees must not be read. Of tensor copies only so many are on their way at a
// time (FLIGHT_BYTES), though the ring has room for more. One lane finds out where a key is (page, or slot,
// or row of the fresh tensors) and tells the lanes that copy its row.
//
// Where no tensor map can be made (pages of less than 8 slots or of an odd number, odd strides, KV heads that are not
// whole panels apart), all four warps copy the full tiles too.

#pragma once

#include "keys.cuh"
#include "padding.cuh"
#include "ring.cuh"

namespace treeattn {

// Where K and V of one key are; bit 0 of k is set where nothing may be read: the row becomes 0. A score of 0 is masked
// then, and a weight of 0 times V must not be a NaN that lies in a page nobody may see.
struct KeyAddress {
  u64 k, v;
};

template <class T, int HEAD_DIM, int CONSUMERS, int KEYS, int STAGES, int Q_STEPS, int OPTIONS,
          class Memories = Shared<HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS>>
struct Producer {
  using Memory = typename Memories::Layout;
  static constexpr int CACHED = Memories::CACHED, NUMBER = Memories::NUMBER;  // bytes of a number of the caches, of the ring
  static constexpr int ROW_BYTES = HEAD_DIM * NUMBER;                         // of a key in the ring
  static constexpr int TILE_ROWS = Memories::ROWS * CONSUMERS;
  static constexpr int WARP_KEYS = KEYS / 4;
  static constexpr int PAGE_TILES = 32 / WARP_KEYS;     // tiles whose page ids a warp reads at once
  static constexpr u32 BLOCKS = sizeof(Memory) > MULTIPROCESSOR_BYTES / 2 ? 1 : 2;  // of a multiprocessor
  static constexpr u32 ON_THE_WAY = FLIGHT_BYTES / (BLOCKS * 2 * Memories::HALF_BYTES);  // tiles, at a time
  static constexpr u32 EDGE_WARPS = 2;
  static constexpr bool WINDOW = (OPTIONS & OPTION_WINDOW) != 0;

  const AttentionParams& p;
  Memory& memory;
  u32 warp = 0, lane = 0;
  u32 pages = 0;  // the first warp's: lane r has the page of box r of the item's next 32
  Place<STAGES> place;

  __device__ __forceinline__ Producer(const AttentionParams& params, Memory& shared) : p(params), memory(shared) {}

  __device__ __forceinline__ void find_thread() {
    const u32 thread = thread_in_group();
    warp = thread / 32;
    lane = thread % 32;
  }

  // Wait until a half of the stage at `place` may be written, and say where it is.
  __device__ __forceinline__ u32 wait_empty(u32 half) {
    barrier_wait(shared_address(&memory.empty[place.stage()][half]), place.phase() ^ 1);
    return shared_address(memory.stages[place.stage()][half]);
  }

  // Wait until this half of the tile asked for ON_THE_WAY tiles ago is there.
  __device__ __forceinline__ void wait_full(u32 half) {
    static_assert(ON_THE_WAY >= 1 && ON_THE_WAY < STAGES, "its barrier is at this round or the one before");
    const Place<STAGES> asked = place.before(ON_THE_WAY);
    barrier_wait(shared_address(&memory.full[asked.stage()][half]), asked.phase());
  }

  // A checked build: a half tile that was given back too early shows as NaN. By warp number `index` of `warps`.
  template <u32 WARPS>
  __device__ __forceinline__ void spoil(u32 to, u32 index) {
#if TREEATTN_CANARY
    for (u32 at = (index * 32 + lane) * 16; at < Memories::HALF_BYTES; at += WARPS * 32 * 16)
      store_shared_16(to + at, ~0u, ~0u, ~0u, ~0u);
    if constexpr (WARPS > 1) threads_sync<32 * WARPS>(WARPS);  // the consumers' barriers are 5 and on
    fence_async_proxy();
    __syncwarp();
#endif
    sleep_now_and_then();
  }

  // Copy the rows at `address` (of lane r: row r of this warp) to a half of the stage at `place`, as number `index` of the
  // warps that share the keys of a tile.
  template <u32 WARPS>
  __device__ __forceinline__ void copy(u64 address, u32 half, u32 index) {
    const u32 begin = wait_empty(half);
    find_thread();
    spoil<WARPS>(begin, index);
    constexpr u32 ROWS = KEYS / WARPS, STRIDE = Memories::GROUP_BYTES;
    const u32 to = copy_place<ROW_BYTES / 2, STRIDE>(begin, ATOM_BYTES, index * ROWS, lane);
    copy_rows<ROW_BYTES / 2, ROWS, STRIDE, CONSUMERS != 3>(to, address, lane);  // of three, the policy would spill
    const u32 barrier = shared_address(&memory.full[place.stage()][half]);
    copy_async_arrive(barrier);
    find_thread();
    if (WARPS < 4 && lane == 0) barrier_arrive(barrier, PRODUCER_ARRIVALS / WARPS - 32);  // for the other warps
  }

  // Whether some row of the tile sees this lane's node of a mask word.
  __device__ __forceinline__ bool node_seen(const Cursor& at, i32 word) const {
    if constexpr (WINDOW) {
      if (p.positions != nullptr) return node_within(at, word);
    }
    u32 seen = 0;
    for (i32 node = at.row0 / p.group + lane; node * p.group < at.row_end; node += 32) seen |= mask_word(p, at, node, word);
    return (__reduce_or_sync(~0u, seen) >> lane & 1) != 0;
  }

  // The same where a window may hide a node that the row's words have. (By position: not even its own, in any mask.)
  __device__ __forceinline__ bool node_within(const Cursor& at, i32 word) const {
    const i32 own = word * EDGE_KEYS + lane;
    const i32 key = own < at.present ? key_of_node(p, at, own) : 0;
    bool seen = false;
#pragma unroll 1
    for (i32 first = at.row0 / p.group; first * p.group < at.row_end; first += 32) {
      const i32 node = first + lane;
      const bool there = node * p.group < at.row_end;
      const u32 words = there ? mask_word(p, at, node, word) : 0;
      const i32 since = there ? key_of_node(p, at, node) - p.window_left : 0;
#pragma unroll 1
      for (u32 row = 0; row < 32; ++row)
        seen |= (__shfl_sync(~0u, words, row) >> lane & 1) != 0 & __shfl_sync(~0u, since, row) <= key;
    }
    return seen;
  }

  // Addresses of the key that this lane looks after, given its page and its position in the request or the cache.
  __device__ __forceinline__ KeyAddress cached(u32 page, u32 position, i32 kv_head) const {
    const u32 within = position - page_of(p, position) * p.page_size;
    const i64 k = page * p.stride_k_page + within * p.stride_k_slot + kv_head * p.stride_k_head;
    const i64 v = page * p.stride_v_page + within * p.stride_v_slot + kv_head * p.stride_v_head;
    return {reinterpret_cast<u64>(p.k) + CACHED * k, reinterpret_cast<u64>(p.v) + CACHED * v};
  }

  // The same of a key of an edge unit.
  __device__ __forceinline__ KeyAddress edge(const Cursor& at, i32 unit) const {
    const i32 offset = lane;
    const i32 word = unit - at.prefix_units;
    i32 position = at.tail_key + unit * EDGE_KEYS + offset, end = at.prefix;
    if constexpr (WINDOW) {
      const bool front = unit < at.front_units;
      position += (front ? at.first : at.tail_key - at.front_units * EDGE_KEYS) - at.tail_key;
      end = front ? at.full : end;
    }
    const bool in_tree = word >= 0;
    const i32 node = word * EDGE_KEYS + offset;
    bool valid = unit < at.edge_end;
    if (in_tree) {
      const bool seen = valid && node_seen(at, word);
      valid = node < at.present && seen;
      position = at.prefix + node;
    } else {
      valid = valid && position < end;
    }
    KeyAddress address = {reinterpret_cast<u64>(p.k) | 1, reinterpret_cast<u64>(p.v) | 1};
    if (!valid) return address;
    if (in_tree && p.k_tree != nullptr) {
      if (NUMBER != 2) return address;  // a fresh row has other numbers than the ring: the consumers read it themselves
      const i64 row = at.first_row + node;
      address.k = reinterpret_cast<u64>(p.k_tree) + 2 * (row * p.stride_k_tree_row + at.kv_head * p.stride_k_tree_head);
      address.v = reinterpret_cast<u64>(p.v_tree) + 2 * (row * p.stride_v_tree_row + at.kv_head * p.stride_v_tree_head);
      return address;
    }
    if (in_tree && p.tree_slots != nullptr) {
      const u32 slot = index_at(p.tree_slots, at.first_row + node, p.wide_slots);
      return cached(page_of(p, slot), slot, at.kv_head);
    }
    const u32 page = index_at(p.table, first_page(p, at) + page_of(p, position), p.wide_table);
    return cached(page, position, at.kv_head);
  }

  // Position in its request of the key that this lane looks after in a full tile.
  __device__ __forceinline__ u32 position_at(const Cursor& at, i32 tile) const {
    return at.full_key + tile * KEYS + warp * WARP_KEYS + lane % WARP_KEYS;
  }

  // Page ids of the next PAGE_TILES full tiles: lane r has that of key r % WARP_KEYS of tile r / WARP_KEYS.
  __device__ __forceinline__ void load_pages(u32& pages, const Cursor& at, i32 tile) const {
    tile += lane / WARP_KEYS;
    const u64 index = first_page(p, at) + page_of(p, position_at(at, tile));
    reload(pages, static_cast<const u32*>(p.table) + (index << p.wide_table), tile < at.full_tiles);
  }

  // Page ids of the next 32 boxes.
  __device__ __forceinline__ void find_boxes(const Cursor& at, u32 first) {
    const u32 rows = p.page_rows, position = at.full_key + (first + lane) * rows;
    if (rows != 0 && position < static_cast<u32>(at.full_key + at.full_tiles * KEYS))
      pages = index_at(p.table, first_page(p, at) + page_of(p, position), p.wide_table);
  }

  // Number of a KV head's first panel, counted from that of head 0.
  static __device__ __forceinline__ u32 head_panel(i32 kv_head, i64 stride) {
    return kv_head * static_cast<u32>(static_cast<u64>(stride) / (128 / CACHED));
  }

  // Full tiles by tensor copies: a lane for each box of a half tile.
  __device__ __forceinline__ void full_boxes(const Cursor& at) {
    const u32 rows = p.page_rows, boxes = KEYS / rows, all = at.full_tiles * boxes;
    const i32 head = at.kv_head;
#pragma unroll 1
    for (u32 first = 0; first < all; first += boxes) {
      if (seldom(first % 32 == 0 && first > 0)) find_boxes(at, first);
      const u32 page = __shfl_sync(~0u, pages, first + lane);
      const u32 position = at.full_key + (first + lane) * rows, within = position - page_of(p, position) * p.page_size;
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        if (first >= ON_THE_WAY * boxes) wait_full(half);
        const u32 to = wait_empty(half), barrier = shared_address(&memory.full[place.stage()][half]);
        spoil<1>(to, 0);
        if (lane == 0) {
          barrier_expect(barrier, Memories::HALF_BYTES);
          barrier_arrive(barrier, PRODUCER_ARRIVALS - 1);
        }
        __syncwarp();
        if (lane < boxes)
          copy_panels(to + lane * rows * ROW_BYTES, half == 0 ? p.k_map : p.v_map,
                      head_panel(head, half == 0 ? p.stride_k_head : p.stride_v_head), within / 8, page, barrier);
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
      for (u32 half = 0; half < 2; ++half) copy<4>(half == 0 ? address.k : address.v, half, warp);
      place = place.next();
    }
  }

  // Q of the item, up to 32 rows a warp at a time; rows that are not there are 0.
  __device__ __forceinline__ void copy_q(const Cursor& at) {
    constexpr u32 AT_ONCE = Memories::ROWS % 32 == 0 ? 32 : 8;
    barrier_wait(shared_address(&memory.q_empty), place.q_phase());
#pragma unroll 1
    for (u32 begin = (warp - 1) * AT_ONCE; begin < TILE_ROWS; begin += 3 * AT_ONCE)
      copy_rows<HEAD_DIM, AT_ONCE>(
          copy_place<HEAD_DIM>(shared_address(memory.q[begin / Memories::ROWS]), Memories::ROWS * 128,
                               begin % Memories::ROWS, lane),
          q_row(p, at, begin + lane % AT_ONCE), lane);
    copy_async_arrive(shared_address(&memory.q_full));
  }

  // Edge tiles, by the second and third warp: a unit of 32 keys each.
  __device__ __forceinline__ void edge_rows(const Cursor& at) {
    static_assert(KEYS == EDGE_WARPS * EDGE_KEYS, "a lane for each key");
    i32 unit = at.edge_begin + warp - 1;
#pragma unroll 1
    for (i32 tile = at.full_tiles; tile < at.tiles; ++tile) {
      const KeyAddress address = edge(at, unit);
#pragma unroll 1
      for (u32 half = 0; half < 2; ++half) copy<EDGE_WARPS>(half == 0 ? address.k : address.v, half, warp - 1);
      place = place.next();
      unit += EDGE_WARPS;
      find_thread();
    }
  }

  // A phase tells odd from even only, so a warp that writes to the ring must know that what was there two rounds ago has
  // been read. It does if it waited for a place less than a round ago; one that left places to others asks those.
  __device__ __forceinline__ void item(const Cursor& at) {
    find_thread();
    if (seldom(warp != 0 && place.item() > 0)) copy_q(at);  // the first item's Q is the consumers' own, who have nothing else to do
    find_thread();
    const bool edges = warp - 1 < EDGE_WARPS;
    if (seldom(p.page_rows == 0)) {
      full_rows(at);
    } else {
      const u32 boxes = shared_address(&memory.boxes[place.item_slot()]);
      if (warp == 0) {
        u32 passed = memory.passed;
        if (at.full_tiles > 0) {
          const Place<STAGES> before = {place.bits - place.ITEM};
          if (seldom(passed >= STAGES)) barrier_wait(shared_address(&memory.edges[before.item_slot()]), before.item_phase());
          full_boxes(at);
          passed = 0;
        }
        __syncwarp();
        if (lane == 0) {
          memory.passed = passed + at.tiles - at.full_tiles;
          barrier_arrive(boxes);
        }
      } else {
        if (edges && at.tiles > at.full_tiles) barrier_wait(boxes, place.item_phase());
        place.skip(at.full_tiles);
      }
    }
    find_thread();
    if (edges) {
      edge_rows(at);
      if (lane == 0) barrier_arrive(shared_address(&memory.edges[place.item_slot()]));
    } else {
      place.skip(at.tiles - at.full_tiles);
    }
    if (seldom(p.page_rows == 0)) threads_sync<128>(4);
  }

  // Hand the item at the cursor to the other warps, as the item of a place.
  __device__ __forceinline__ void publish(const Place<STAGES>& to) {
    barrier_wait(shared_address(&memory.item_empty[to.item_slot()]), to.item_phase() ^ 1);
    hand_item(memory.items[to.item_slot()], memory.walk, memory.item_full[to.item_slot()], lane);
  }

  // The walk's steps, of which it takes one behind each item.
  __device__ __forceinline__ void find_item() {
    if (lane == 0) cursor_find<KEYS>(memory.walk, p);
    __syncwarp();
    if (memory.walk.tiles == 0) come();
  }

  // Behind the last item: tell the other blocks of those that are cut that this one is there (merge.cuh).
  __device__ __forceinline__ void come() {
    if (lane < memory.num_parts) {
      const u32 before = add_relaxed(arrival_word(p, memory.parts[lane]), 1);
      if (seldom(before >= BEHIND)) fence_gpu();
      memory.before[lane] = before;
    }
    __syncwarp();
  }

  __device__ __forceinline__ void pass_item() {
    if (lane == 0) {
      // a cut item is merged behind the last one, when the other blocks are about as far
      if (memory.walk.whole == 0 && p.split == 0) memory.parts[memory.num_parts++] = part_of(memory.walk);
      cursor_advance(memory.walk, p);
    }
  }

  // Find the first item at or behind the walk, and where its first pages are.
  __device__ __forceinline__ void find() {
    find_item();
    if (memory.walk.tiles != 0) find_boxes(memory.walk, 0);
  }

  // The first warp's, before the block's barriers are there.
  __device__ __forceinline__ void begin() {
    begin_walk();
    find();
  }

  __device__ __forceinline__ void begin_walk() {
    find_thread();
    wait_prerequisites();
    launch_dependents();  // not before: they read the plan ahead of their own wait
    u32* const launches = p.arrivals + blockIdx.x * ARRIVAL_FIELDS + ARRIVAL_LAUNCHES;
    const u32 before = load_relaxed(launches);  // on its way with the plan's record
    if (lane < PLANNED_FIELDS) reinterpret_cast<i32*>(&memory.walk)[lane] = planned(p, blockIdx.x, lane);
    __syncwarp();
    if (lane == 0) {
      memory.passed = memory.num_parts = 0;
      memory.tag = tag_of(before);
      *launches = before + 1;
    }
    __syncwarp();
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      find_thread();
      if (warp == 0)
        publish(place);
      else
        barrier_wait(shared_address(&memory.item_full[place.item_slot()]), place.item_phase());
      const Cursor& at = memory.items[place.item_slot()];
      if (seldom(warp == 3 && place.item() == 0)) zero_padding<HEAD_DIM>(p, 32 * blockIdx.x, 32 * blocks_of_grid());
      if (at.tiles == 0) break;
      item(at);
      find_thread();
      __syncwarp();
      if (warp != 0) {
        if (lane == 0) barrier_arrive(shared_address(&memory.item_empty[place.item_slot()]));
      } else {
        pass_item();
        find();
      }
      place.next_item();
    }
    // no thread ends with copies on their way
    copy_async_wait_all();
  }
};

}  // namespace treeattn
