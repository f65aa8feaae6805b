// The producer warpgroup where an FP8 cache is multiplied in 16 bits: makes its numbers of T on the way to the ring, so that
// consumers read this as for a cache of T (consumer.cuh).
//
// All four warps do the same, each with 16 keys of each tile, and wait for no other warp of theirs: a warp asks for its rows
// STAGED tiles ahead, by tensor copies where these can be, else 16 bytes a thread; and puts what has come into the ring. A
// thread has of each half two rows, 8 keys apart, all of whose 16 numbers number t % 4 and t % 4 + 4 are its: it asks for
// those itself where threads do. Odd rows begin with the second, so that the eight threads which read or write at a time meet
// all banks.
//
// For a tile of 64 keys a warp takes 8 loads of 16 numbers and 16 stores, for each two numbers 1 instruction (float16) or 4
// (bf16), and about 165 others: 255 or 445 in all, beside two or three consumer warps of 300 each on its scheduler, which take
// about 1,500 or 2,000 clocks for the tile. Shared memory: 128 clocks for what arrives, 128 to read it, 256 to write.
//
// What a warp has read may be overwritten by tensor copies that it asks for behind its fence, which also shows wgmma what it
// has written. Where there are no tensor copies that fence is the consumers', as for all that threads copy: a fence may wait
// for copies of its own thread, which are on their way all the time here.
//
// Fresh rows have 16 bits and are copied to the ring as they are, in tiles of their own (fp8_tiles.cuh).
//
// The first warp also walks along the plan, and hands out an item while the first tiles of the one before are on their way.

#pragma once

#include "fp8_tiles.cuh"
#include "fp8_wide_ring.cuh"
#include "producer.cuh"

namespace treeattn {

template <class T, class Format, int HEAD_DIM, int CONSUMERS, int KEYS, int STAGES, int STAGED, int Q_STEPS, int OPTIONS>
struct Fp8WideProducer : Producer<T, HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS, OPTIONS,
                                  Fp8WideShared<HEAD_DIM, CONSUMERS, KEYS, STAGES, STAGED, Q_STEPS>> {
  using Base = Producer<T, HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS, OPTIONS,
                        Fp8WideShared<HEAD_DIM, CONSUMERS, KEYS, STAGES, STAGED, Q_STEPS>>;
  using typename Base::Memory;
  using Base::lane;
  using Base::memory;
  using Base::p;
  using Base::pages;
  using Base::place;
  using Base::warp;
  static constexpr u32 ROWS = KEYS / 4;           // of a warp, in each half of a tile
  static constexpr u32 ROW_BYTES = HEAD_DIM;      // in the cache
  static constexpr u32 HALF_BYTES = KEYS * ROW_BYTES, SLOT_BYTES = 2 * HALF_BYTES, OTHER_PIECE = 64;
  static constexpr u32 PANEL_BYTES = KEYS * 128;  // of the ring
  static constexpr u32 LEAST_ROWS = 8;            // of a box; the most are ROWS
  static constexpr i32 TILES_AT_ONCE = 32 * LEAST_ROWS / ROWS;  // whose page ids a warp reads
  static constexpr i32 Q_LATEST = 2;  // tiles that are brought while consumers may still have the Q of the item before
  static_assert(ROW_BYTES == 128 && ROWS == 16, "a thread has two rows of two pieces");
  static_assert(Q_LATEST < STAGES, "that many tiles need no consumer of this item");

  u32 turns = 0;  // bit s: phase of slot s, whose barrier counts tensor copies only
  u32 from;       // this thread's first piece in a slot; the other one of its row is at `from` ^ OTHER_PIECE
  u32 to;         // where its first half goes in a stage, seen from the stage's begin; of the other piece `to` ^ PANEL_BYTES

  __device__ __forceinline__ Fp8WideProducer(const AttentionParams& params, Memory& shared) : Base(params, shared) {}

  __device__ __forceinline__ void find_pieces() {
    this->find_thread();
    const u32 row = lane / 4, piece = first_piece();
    from = shared_address(memory.staged) + (warp * ROWS + row) * 128 + ((piece ^ row) << 4);
    to = piece / 4 * PANEL_BYTES + (warp * ROWS + row) * 128 + ((piece % 4 * 2 ^ row) << 4);
  }

  // Number of this thread's first piece in its rows, of eight.
  __device__ __forceinline__ u32 first_piece() const { return lane % 4 + lane / 4 % 2 * 4; }

  // Tiles that come by tensor copies.
  __device__ __forceinline__ i32 boxed_tiles(const Cursor& at) const { return p.page_rows != 0 ? at.full_tiles : 0; }

  // --- where rows are ---------------------------------------------------------------------------------------------------

  // Page ids of the next full tiles: lane 2 t + b has that of box b of tile t, where these have LEAST_ROWS. (Else odd lanes
  // are not asked.) Without tensor maps: as load_pages of producer.cuh.
  __device__ __forceinline__ void find_pages(const Cursor& at, i32 tile) {
    if (p.page_rows == 0) return this->load_pages(pages, at, tile);
    tile += lane / 2;
    const u32 position = at.full_key + tile * KEYS + warp * ROWS + lane % 2 * LEAST_ROWS;
    const u64 index = first_page(p, at) + page_of(p, position);
    reload(pages, static_cast<const u32*>(p.table) + (index << p.wide_table), tile < at.full_tiles);
  }

  // This warp's rows of an edge tile, of lane r row r % 16: half of those of an edge unit, which is before `end` or empty.
  __device__ __forceinline__ KeyAddress edge_rows(const Cursor& at, i32 unit, i32 end) const {
    KeyAddress address = {reinterpret_cast<u64>(p.k) | 1, reinterpret_cast<u64>(p.v) | 1};
    unit += warp / 2;
    if (unit < end) address = this->edge(at, unit);
    const u32 from = warp % 2 * ROWS + lane % ROWS;
    return {__shfl_sync(~0u, address.k, from), __shfl_sync(~0u, address.v, from)};
  }

  // The same of a tile of the cache.
  __device__ __forceinline__ KeyAddress cached_rows(const Cursor& at, i32 tile, i32 cached) {
    if (tile >= at.full_tiles) return edge_rows(at, fp8_unit<KEYS>(p, at, tile, cached), cached_end(p, at));
    const u32 page = __shfl_sync(~0u, pages, tile % Base::PAGE_TILES * ROWS + lane % ROWS);
    const KeyAddress address = this->cached(page, this->position_at(at, tile), at.kv_head);
    if (tile % Base::PAGE_TILES == Base::PAGE_TILES - 1) find_pages(at, tile + 1);
    return address;
  }

  // --- numbers of the cache ---------------------------------------------------------------------------------------------

  // Ask for this warp's rows of a full tile by tensor copies, a lane for each box of K and of V.
  __device__ __forceinline__ void ask_boxes(const Cursor& at, i32 tile, u32 slot) {
    const u32 page = __shfl_sync(~0u, pages, tile % TILES_AT_ONCE * 2 + lane % 2);
    const u32 barrier = shared_address(&memory.arrived[slot][warp]);
    const u32 rows = shared_address(memory.staged[slot]) + warp * ROWS * 128;
    if (lane == 0) barrier_expect(barrier, 2 * ROWS * ROW_BYTES);
    __syncwarp();
    if (lane * p.page_rows < ROWS) {
      const u32 position = at.full_key + tile * KEYS + warp * ROWS + lane * LEAST_ROWS;
      const u32 within = position - page_of(p, position) * p.page_size;
      const u32 box = rows + lane * (LEAST_ROWS * 128);
      copy_box(box, p.k_map, 0, within, at.kv_head, page, barrier);
      copy_box(box + HALF_BYTES, p.v_map, 0, within, at.kv_head, page, barrier);
    }
    if (tile % TILES_AT_ONCE == TILES_AT_ONCE - 1) find_pages(at, tile + 1);
  }

  // Ask for this thread's pieces of half a tile. `address`: of lane r the warp's row r, if its bit 0 is not set.
  __device__ __forceinline__ void ask_rows(u64 address, u32 begin) const {
#pragma unroll
    for (u32 row = 0; row < 2; ++row) {
      const u64 found = __shfl_sync(~0u, address, 8 * row + lane / 4), numbers = found & ~1ull;
      copy_async_16(begin + row * (8 * 128), numbers + first_piece() * 16, found & 1 ? 0 : 16);
      copy_async_16((begin ^ OTHER_PIECE) + row * (8 * 128), numbers + (first_piece() ^ 4) * 16, found & 1 ? 0 : 16);
    }
  }

  // Ask for a tile of the cache, if there is one; one group in any case.
  __device__ __forceinline__ void ask(const Cursor& at, i32 tile, const Fp8Tiles& tiles, i32 boxed, u32 slot) {
    if (tile < boxed) {
      ask_boxes(at, tile, slot);
    } else if (tile < tiles.cached) {
      const KeyAddress rows = cached_rows(at, tile, tiles.cached);
      ask_rows(rows.k, from + slot * SLOT_BYTES);
      ask_rows(rows.v, from + slot * SLOT_BYTES + HALF_BYTES);
    }
    copy_async_commit();
  }

  // The same pieces of two rows.
  static __device__ __forceinline__ void take(u32 (&numbers)[2][4], u32 begin) {
#pragma unroll
    for (u32 row = 0; row < 2; ++row) load_shared_16(numbers[row], begin + row * (8 * 128));
#if TREEATTN_CANARY  // what is read before it has come shows as NaN
#pragma unroll
    for (u32 row = 0; row < 2; ++row) store_shared_16(begin + row * (8 * 128), ~0u, ~0u, ~0u, ~0u);
#endif
  }

  static __device__ __forceinline__ void put(u32 begin, const u32 (&numbers)[2][4]) {
    const u32 second = begin ^ 16;
#pragma unroll
    for (u32 row = 0; row < 2; ++row) {
      u32 made[8];
      widen_all<T, Format>(made, numbers[row]);
      store_widened(begin + row * (8 * 128), second + row * (8 * 128), made);
    }
  }

  // This warp's rows of half a tile that has come to their place in the ring.
  __device__ __forceinline__ void bring(u32 begin, u32 half) {
    u32 numbers[2][4];
    take(numbers, begin);
    const u32 stage = this->wait_empty(half);
    this->template spoil<4>(stage, warp);
    put(stage + to, numbers);
    take(numbers, begin ^ OTHER_PIECE);
    put(stage + (to ^ PANEL_BYTES), numbers);
    if (p.page_rows != 0) fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&memory.full[place.stage()][half]), PRODUCER_ARRIVALS / 4);
  }

  // --- items ------------------------------------------------------------------------------------------------------------

  // A tile of the cache from a slot to the ring, and the one for which it makes room to the slot.
  __device__ __forceinline__ void cached_tile(const Cursor& at, i32 tile, const Fp8Tiles& tiles, i32 boxed, u32 slot) {
    copy_async_wait<STAGED - 1>();
    if (tile < boxed) {
      barrier_wait(shared_address(&memory.arrived[slot][warp]), turns >> slot & 1);
      turns ^= 1 << slot;
    }
    const u32 begin = from + slot * SLOT_BYTES;
    bring(begin, 0);
    bring(begin + HALF_BYTES, 1);
    ask(at, tile + STAGED, tiles, boxed, slot);
  }

  __device__ __forceinline__ void item(const Cursor& at) {
    const Fp8Tiles tiles = fp8_tiles<KEYS>(p, at);
    const i32 boxed = boxed_tiles(at);
    find_pages(at, 0);
#pragma unroll 1
    for (i32 tile = 0; tile < STAGED; ++tile) ask(at, tile, tiles, boxed, tile);
    if (warp == 0) {
      this->pass_item();
      this->find_item();
      Place<STAGES> behind = place;
      behind.next_item();
      this->publish(behind);
    }
    bool has_q = warp == 0 || place.item() == 0;  // not the first warp's, and the first item's is the consumers' own
    u32 slot = 0;
#pragma unroll 1
    for (i32 tile = 0; tile < tiles.all; ++tile) {
      if (!has_q) {
        has_q = tile >= Q_LATEST || uniform(barrier_passed(shared_address(&memory.q_empty), place.q_phase()));
        if (has_q) this->copy_q(at);
      }
      if (tile < tiles.cached) {
        cached_tile(at, tile, tiles, boxed, slot);
        slot = slot == STAGED - 1 ? 0 : slot + 1;
      } else {
        const KeyAddress fresh = edge_rows(at, fp8_unit<KEYS>(p, at, tile, tiles.cached), at.edge_end);
#pragma unroll 1
        for (u32 half = 0; half < 2; ++half) this->template copy<4>(half == 0 ? fresh.k : fresh.v, half, warp);
      }
      place = place.next();
    }
    if (!has_q) this->copy_q(at);
  }

  // The first warp's, before the block's barriers are there.
  __device__ __forceinline__ void begin() {
    this->begin_walk();
    this->find_item();
    static_assert(STAGED * 4 <= 32, "a lane for each barrier");
    if (lane < STAGED * 4) barrier_init(shared_address(memory.arrived) + 8 * lane, 1);
    fence_async_proxy();
  }

  __device__ __forceinline__ void run() {
    find_pieces();
    if (warp == 0) this->publish(place);
    for (;;) {
      barrier_wait(shared_address(&memory.item_full[place.item_slot()]), place.item_phase());
      const Cursor& at = memory.items[place.item_slot()];
      if (at.tiles == 0) break;
      item(at);
      __syncwarp();
      if (warp != 0 && lane == 0) barrier_arrive(shared_address(&memory.item_empty[place.item_slot()]));
      place.next_item();
    }
    if (warp == 3) this->zero_padding();
    copy_async_wait_all();  // no thread ends with copies on their way
  }
};

}  // namespace treeattn
