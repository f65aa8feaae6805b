// The producer warpgroup of an MLA block: brings Q and the latent rows of the block's items into the rings.
//
// Three warps fill a ring each: one of each half of the latent part, one of the rope part. The last walks along the plan,
// ahead of them, and hands out items. Nobody waits for a place of a ring that is not its own.
//
// Full tiles of the prefix come by tensor copies, a box of a page at a time. Q, the end of the prefix and the tree are
// copied row by row, 16 bytes a lane, and so are full tiles where no tensor map can be made (producer.cuh).

#pragma once

#include "keys.cuh"
#include "mla_ring.cuh"

namespace treeattn {

// A ring that a warp fills, one of RINGS of a kind. A tile goes through it as PARTS parts of PANELS panels each, dims of a
// row from `dim` on.
template <int STAGES, u32 RINGS, u32 PARTS_, u32 PANELS_>
struct MlaRing {
  static constexpr u32 PARTS = PARTS_, PANELS = PANELS_, PART_DIMS = PANELS * PANEL_COLUMNS;
  static constexpr u32 PART_BYTES = PANELS * MLA_PANEL_BYTES;
  static constexpr u32 ON_THE_WAY = PARTS;  // parts at a time by tensor copies: of all rings 72 KB (FLIGHT_BYTES)

  const u32 stages, full;  // in shared memory
  const u32 dim;
  Place<STAGES> place;

  // Wait until the next part may be written, and say where it is.
  __device__ __forceinline__ u32 wait() const {
    barrier_wait(barrier() + 8 * RINGS * STAGES, place.phase() ^ 1);  // the empty ones are behind the full ones
    return stages + place.stage() * PART_BYTES;
  }
  __device__ __forceinline__ u32 barrier() const { return full + 8 * place.stage(); }

  // Wait until the part asked for ON_THE_WAY parts ago is there.
  __device__ __forceinline__ void wait_full() const {
    static_assert(ON_THE_WAY < STAGES, "its barrier is at this round or the one before");
    const Place<STAGES> asked = place.before(ON_THE_WAY);
    barrier_wait(full + 8 * asked.stage(), asked.phase());
  }
};

// NUMBER: bytes of a cached one.
template <int Q_STEPS, int LATENTS, int ROPES, u32 NUMBER = 2>
struct MlaProducer {
  using Memory = typename MlaShared<Q_STEPS, LATENTS, ROPES>::Layout;

  const AttentionParams& p;
  Memory& memory;
  u32 lane = 0;

  __device__ __forceinline__ MlaProducer(const AttentionParams& params, Memory& shared) : p(params), memory(shared) {}

  __device__ __forceinline__ void find_lane() { lane = thread_in_group() % 32; }

  // A checked build: a part that was given back too early shows as NaN.
  template <class Ring>
  __device__ __forceinline__ void spoil(const Ring& ring, u32 to) {
#if TREEATTN_CANARY
    for (u32 at = lane * 16; at < Ring::PART_BYTES; at += 32 * 16) store_shared_16(to + at, ~0u, ~0u, ~0u, ~0u);
    fence_async_proxy();
    __syncwarp();
#endif
    sleep_now_and_then();
  }

  // Copy the rows of a tile: of lane r those at `low` (row r) and `high` (row r + 32).
  template <class Ring>
  __device__ __forceinline__ void copy_tile(Ring& ring, u64 low, u64 high) {
#pragma unroll 1
    for (u32 part = 0; part < Ring::PARTS; ++part) {
      const u32 to = ring.wait(), bytes = 2 * (ring.dim + part * Ring::PART_DIMS);
      spoil(ring, to);
      copy_rows<Ring::PART_DIMS, 32, ATOM_BYTES, true>(copy_place<Ring::PART_DIMS>(to, MLA_PANEL_BYTES, 0, lane), low + bytes,
                                                       lane);
      copy_rows<Ring::PART_DIMS, 32, ATOM_BYTES, true>(copy_place<Ring::PART_DIMS>(to, MLA_PANEL_BYTES, 32, lane),
                                                       high + bytes, lane);
      copy_async_arrive(ring.barrier());
      ring.place = ring.place.next();
    }
  }

  // Where the key is that this lane looks after, given its page and its position in the request or the cache.
  __device__ __forceinline__ u64 cached(u32 page, u32 position, i32 kv_head) const {
    const u32 within = position - page_of(p, position) * p.page_size;
    const i64 k = page * p.stride_k_page + within * p.stride_k_slot + kv_head * p.stride_k_head;
    return reinterpret_cast<u64>(p.k) + NUMBER * k;
  }

  // Whether some row of the tile sees a node of a mask word.
  __device__ __forceinline__ bool node_seen(const Cursor& at, i32 word, u32 bit) const {
    u32 seen = 0;
    for (i32 node = row_node(p, at.row0) + lane; node * p.group < at.row_end; node += 32)
      seen |= mask_word(p, at, node, word);
    return (__reduce_or_sync(~0u, seen) >> bit & 1) != 0;
  }

  // Where a key of an edge unit is; bit 0 is set where nothing may be read: the row becomes 0. A score of 0 is masked then,
  // and a weight of 0 times V must not be a NaN that lies in a page nobody may see.
  __device__ __forceinline__ u64 edge(const Cursor& at, i32 unit, u32 key) const {
    const i32 word = unit - at.prefix_units, node = word * EDGE_KEYS + key;
    i32 position = at.tail_key + unit * EDGE_KEYS + key;
    const bool in_tree = word >= 0;
    bool valid = unit < at.edge_end;
    if (in_tree) {
      const bool seen = valid && node_seen(at, word, key);
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
      return cached(page_of(p, slot), slot, at.kv_head);
    }
    return cached(index_at(p.table, first_page(p, at) + page_of(p, position), p.wide_table), position, at.kv_head);
  }

  // Page ids of the item's next 32 boxes, a lane each.
  __device__ __forceinline__ u32 find_boxes(const Cursor& at, u32 first) const {
    const u32 rows = p.page_rows, position = at.full_key + (first + lane) * rows;
    if (rows == 0 || position >= static_cast<u32>(at.full_key + at.full_tiles * MLA_KEYS)) return 0;
    return index_at(p.table, first_page(p, at) + page_of(p, position), p.wide_table);
  }

  // Full tiles by tensor copies: a lane for each box of a part.
  template <class Ring>
  __device__ __forceinline__ void full_boxes(Ring& ring, const Cursor& at, u32 pages) {
    const u32 rows = p.page_rows, boxes = MLA_KEYS / rows, all = at.full_tiles * boxes;
    const u32 panel = lane / boxes, box = lane % boxes, head = at.kv_head;
#pragma unroll 1
    for (u32 first = 0; first < all; first += boxes) {
      if (seldom(first % 32 == 0 && first > 0)) pages = find_boxes(at, first);
      const u32 page = __shfl_sync(~0u, pages, first % 32 + box);
      const u32 position = at.full_key + (first + box) * rows, within = position - page_of(p, position) * p.page_size;
#pragma unroll
      for (u32 part = 0; part < Ring::PARTS; ++part) {
        if (first > 0) ring.wait_full();
        const u32 to = ring.wait(), barrier = ring.barrier();
        spoil(ring, to);
        if (lane == 0) {
          barrier_expect(barrier, Ring::PART_BYTES);
          barrier_arrive(barrier, RING_ARRIVALS - 1);
        }
        __syncwarp();
        if (panel < Ring::PANELS)
          copy_box(to + panel * MLA_PANEL_BYTES + box * rows * 128, p.k_map,
                   ring.dim + part * Ring::PART_DIMS + panel * PANEL_COLUMNS, within, head, page, barrier);
        ring.place = ring.place.next();
      }
    }
  }

  // Page ids of a full tile: lane r has those of keys r and r + 32. (Written in place: see producer.cuh.)
  __device__ __forceinline__ void load_pages(u32 (&pages)[2], const Cursor& at, i32 tile) const {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u64 index = first_page(p, at) + page_of(p, position_at(at, tile, half));
      reload(pages[half], static_cast<const u32*>(p.table) + (index << p.wide_table), tile < at.full_tiles);
    }
  }

  __device__ __forceinline__ u32 position_at(const Cursor& at, i32 tile, u32 half) const {
    return at.full_key + tile * MLA_KEYS + half * 32 + lane;
  }

  // Full tiles without tensor maps.
  template <class Ring>
  __device__ __forceinline__ void full_rows(Ring& ring, const Cursor& at) {
    u32 pages[2] = {0, 0};
    load_pages(pages, at, 0);
#pragma unroll 1
    for (i32 tile = 0; tile < at.full_tiles; ++tile) {
      const u64 low = cached(pages[0], position_at(at, tile, 0), at.kv_head);
      const u64 high = cached(pages[1], position_at(at, tile, 1), at.kv_head);
      load_pages(pages, at, tile + 1);
      copy_tile(ring, low, high);
    }
  }

  // Bring the items of the block, one after another, to a ring.
  template <class Ring>
  __device__ __forceinline__ void fill(Ring ring) {
    for (;;) {
      barrier_wait(shared_address(&memory.item_full[ring.place.item_slot()]), ring.place.item_phase());
      const Cursor& at = memory.items[ring.place.item_slot()];
      if (at.tiles == 0) break;
      find_lane();
      const u32 pages = find_boxes(at, 0);  // on their way while Q is asked for
      copy_tile(ring, q_row(p, at, lane), q_row(p, at, lane + 32));
      if (p.page_rows == 0)
        full_rows(ring, at);
      else
        full_boxes(ring, at, pages);
      find_lane();
      i32 unit = at.edge_begin;
#pragma unroll 1
      for (i32 tile = at.full_tiles; tile < at.tiles; ++tile, unit += 2)
        copy_tile(ring, edge(at, unit, lane), edge(at, unit + 1, lane));
      __syncwarp();
      warp_arrive(memory.item_empty[ring.place.item_slot()], lane);
      ring.place.next_item();
    }
    copy_async_wait_all();  // no thread ends with copies on their way
  }

  __device__ __forceinline__ void find() {
    if (lane == 0) {
      cursor_find<MLA_KEYS>(memory.walk, p);
      if (NUMBER == 1 && memory.walk.tiles != 0) memory.walk.tiles = fp8_tiles<MLA_KEYS>(p, memory.walk).all;
    }
    __syncwarp();
  }

  // The last warp's, before the block's barriers are there: read the plan, and find the first item.
  __device__ __forceinline__ void begin() {
    find_lane();
    wait_prerequisites();
    launch_dependents();  // not before: they read the plan ahead of their own wait
    if (lane < PLANNED_FIELDS) reinterpret_cast<i32*>(&memory.walk)[lane] = planned(p, blockIdx.x, lane);
    __syncwarp();
    find();
  }

  // Hand out the item at the walk; false behind the last.
  template <class Place>
  __device__ __forceinline__ bool publish(const Place& place) {
    barrier_wait(shared_address(&memory.item_empty[place.item_slot()]), place.item_phase() ^ 1);
    const bool ends = memory.walk.tiles == 0;
    hand_item(memory.items[place.item_slot()], memory.walk, memory.item_full[place.item_slot()], lane);
    return !ends;
  }

  __device__ __forceinline__ void advance() {
    if (lane == 0) cursor_advance(memory.walk, p);
    find();
  }

  // Hand out the items.
  __device__ __forceinline__ void walk() {
    find_lane();
    Place<1> place;
    while (publish(place)) {
      advance();
      place.next_item();
    }
  }

  __device__ __forceinline__ void run(u32 warp) {
    if (warp == 3)
      walk();
    else if (warp == 2)
      fill(MlaRing<ROPES, 1, 1, 1>{shared_address(memory.ropes), shared_address(memory.rope_full), LATENT_DIMS, {}});
    else
      fill(MlaRing<LATENTS, HALVES, 2, 2>{shared_address(memory.latents[warp]), shared_address(memory.latent_full[warp]),
                                          warp * (LATENT_DIMS / HALVES), {}});
  }
};

}  // namespace treeattn
