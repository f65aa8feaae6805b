// The producer warpgroup where an FP8 cache is multiplied in 16 bits: makes its numbers of T on the way to the ring, so that
// consumers read this as for a cache of T (consumer.cuh).
//
// All four warps do the same, each with 16 keys of each tile. What has to come into the ring is asked for STAGED tiles ahead:
// a full tile by tensor copies, all of it by one warp, the warps in turn; else each warp its own rows, 16 bytes a thread. A
// thread has of each half two rows, 8 keys apart, all of whose 16 numbers number t % 4 and t % 4 + 4 are its: it asks for
// those itself where threads do. Odd rows begin with the second, so that the eight threads which read or write at a time meet
// all banks.
//
// For a tile of 64 keys a warp takes 8 loads of 16 numbers, all at once, and 16 stores, and for each two numbers 1 instruction
// (float16) or 4 (bf16), beside two or three consumer warps of 300 instructions each on its scheduler, which take about 1,500
// or 2,000 clocks for the tile. Shared memory: 128 clocks for what arrives, 128 to read it, 256 to write.
//
// A slot is given back by each warp behind its fence, which also shows wgmma what it has written. Where there are no tensor
// copies that fence is the consumers', as for all that threads copy: a fence may wait for copies of its own thread, which are
// on their way all the time here.
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
  using Memories = Fp8WideShared<HEAD_DIM, CONSUMERS, KEYS, STAGES, STAGED, Q_STEPS>;
  using Base = Producer<T, HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS, OPTIONS, Memories>;
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
  static constexpr u32 GROUP_BYTES = Memories::GROUP_BYTES;  // of 8 rows in the ring
  static constexpr i32 Q_LATEST = 2;  // tiles that are brought while consumers may still have the Q of the item before
  static_assert(ROW_BYTES == 128 && ROWS == 16, "a thread has two rows of two pieces");
  static_assert(Q_LATEST < STAGES, "that many tiles need no consumer of this item");

  u32 turns = 0;  // bit s: phase of what has arrived in slot s, which counts tensor copies only
  u32 given = 0;  // bit s: the same of whether slot s has been given back, of all tiles
  u32 slot = 0;   // of the next tile of the cache
  u32 from;       // this thread's first piece in a slot; the other one of its row is at `from` ^ OTHER_PIECE
  u32 to;         // where its first half goes in a stage, seen from the stage's begin; of the other piece `to` ^ ATOM_BYTES

  __device__ __forceinline__ Fp8WideProducer(const AttentionParams& params, Memory& shared) : Base(params, shared) {}

  __device__ __forceinline__ void find_pieces() {
    this->find_thread();
    const u32 row = lane / 4, piece = first_piece();
    from = shared_address(memory.staged) + (warp * ROWS + row) * 128 + ((piece ^ row) << 4);
    to = warp * (ROWS / 8) * GROUP_BYTES + piece / 4 * ATOM_BYTES + row * 128 + ((piece % 4 * 2 ^ row) << 4);
  }

  static __device__ __forceinline__ u32 next_slot(u32 slot) { return slot == STAGED - 1 ? 0 : slot + 1; }

  // Number of this thread's first piece in its rows, of eight.
  __device__ __forceinline__ u32 first_piece() const { return lane % 4 + lane / 4 % 2 * 4; }

  // Tiles that come by tensor copies.
  __device__ __forceinline__ i32 boxed_tiles(const Cursor& at) const { return p.page_rows != 0 ? at.full_tiles : 0; }

  // --- where rows are ---------------------------------------------------------------------------------------------------

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
    if (tile % Base::PAGE_TILES == Base::PAGE_TILES - 1) this->load_pages(pages, at, tile + 1);
    return address;
  }

  // --- numbers of the cache ---------------------------------------------------------------------------------------------

  // Ask for a full tile by tensor copies, a lane for each box of K and of V; every fourth is this warp's. `pages`: of the 32
  // boxes that the tile is among.
  __device__ __forceinline__ void ask_boxes(const Cursor& at, i32 tile, u32 slot) {
    const u32 rows = p.page_rows, boxes = KEYS / rows, first = tile * boxes, box = lane % boxes, half = lane / boxes;
    const u32 page = __shfl_sync(~0u, pages, first % 32 + box);
    const u32 barrier = shared_address(&memory.arrived[slot]);
    barrier_wait(shared_address(&memory.given[slot]), given >> slot & 1 ^ 1);
    if (lane == 0) barrier_expect(barrier, SLOT_BYTES);
    __syncwarp();
    if (half < 2) {
      const u32 position = at.full_key + tile * KEYS + box * rows;
      const u32 within = position - page_of(p, position) * p.page_size;
      const u32 panel = this->head_panel(at.kv_head, half == 0 ? p.stride_k_head : p.stride_v_head);
      copy_panels(shared_address(memory.staged[slot]) + half * HALF_BYTES + box * rows * ROW_BYTES, half == 0 ? p.k_map : p.v_map,
                  panel, within / 8, page, barrier);
    }
    const u32 next = first + 4 * boxes;
    if (next / 32 != first / 32) this->find_boxes(at, next / 32 * 32);
  }

  // Ask for this thread's pieces of half a tile. `address`: of lane r the warp's row r, if its bit 0 is not set.
  __device__ __forceinline__ void ask_rows(u64 address, u32 begin) const {
#pragma unroll
    for (u32 row = 0; row < 2; ++row) {
      const u64 found = __shfl_sync(~0u, address, 8 * row + lane / 4), numbers = found & ~1ull;
      stream_async_16(begin + row * (8 * 128), numbers + first_piece() * 16, found & 1 ? 0 : 16);
      stream_async_16((begin ^ OTHER_PIECE) + row * (8 * 128), numbers + (first_piece() ^ 4) * 16, found & 1 ? 0 : 16);
    }
  }

  // Ask for a tile of the cache, if there is one; one group in any case. (What this warp's threads copy goes where it was the
  // last to read.)
  __device__ __forceinline__ void ask(const Cursor& at, i32 tile, const Fp8Tiles& tiles, i32 boxed, u32 slot) {
    if (tile < boxed) {
      if (tile % 4 == static_cast<i32>(warp)) ask_boxes(at, tile, slot);
    } else if (tile < tiles.cached) {
      const KeyAddress rows = cached_rows(at, tile, tiles.cached);
      ask_rows(rows.k, from + slot * SLOT_BYTES);
      ask_rows(rows.v, from + slot * SLOT_BYTES + HALF_BYTES);
    }
    copy_async_commit();
  }

  // Number `i` of this thread's four pieces of half a tile in a slot: of its first row two, then of the other.
  static __device__ __forceinline__ void take(u32 (&numbers)[4], u32 half, u32 i) {
    load_shared_16(numbers, (half ^ i % 2 * OTHER_PIECE) + i / 2 * (8 * 128));
  }

  static __device__ __forceinline__ void take_all(u32 (&numbers)[4][4], u32 half) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) take(numbers[i], half, i);
  }

  // To its place in a half stage of the ring, as numbers of T.
  __device__ __forceinline__ void put(u32 stage, const u32 (&numbers)[4], u32 i) const {
    u32 made[8];
    widen_all<T, Format>(made, numbers);
    const u32 first = stage + (to ^ i % 2 * ATOM_BYTES) + i / 2 * GROUP_BYTES;
    store_widened(first, first ^ 16, made);
  }

  // This warp's rows of a tile that has come to their places in the ring. V is on its way to registers while K is made.
  __device__ __forceinline__ void bring(u32 begin) {
#if TREEATTN_CANARY
    constexpr bool EARLY = false;  // a ring that is spoiled takes the registers
#else
    constexpr bool EARLY = true;
#endif
    u32 numbers[4][4];
    if (EARLY) take_all(numbers, begin);
    u32 stage = this->wait_empty(0);
    this->template spoil<4>(stage, warp);
    if (!EARLY) take_all(numbers, begin);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      put(stage, numbers[i], i);
      if (EARLY) take(numbers[i], begin + HALF_BYTES, i);
    }
    stage = this->wait_empty(1);
    this->template spoil<4>(stage, warp);
    if (!EARLY) take_all(numbers, begin + HALF_BYTES);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) put(stage, numbers[i], i);
#if TREEATTN_CANARY  // what is read before it has come shows as NaN
#pragma unroll
    for (u32 i = 0; i < 8; ++i)
      store_shared_16((begin ^ i % 2 * OTHER_PIECE) + i / 2 % 2 * (8 * 128) + i / 4 * HALF_BYTES, ~0u, ~0u, ~0u, ~0u);
#endif
    if (p.page_rows != 0) fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half)
        barrier_arrive(shared_address(&memory.full[place.stage()][half]), PRODUCER_ARRIVALS / 4);
    }
  }

  // --- items ------------------------------------------------------------------------------------------------------------

  // A tile of the cache from a slot to the ring.
  __device__ __forceinline__ void cached_tile(i32 tile, i32 boxed) {
    copy_async_wait<STAGED - 1>();
    if (tile < boxed) {
      barrier_wait(shared_address(&memory.arrived[slot]), turns >> slot & 1);
      turns ^= 1 << slot;
    } else {
      // no warp gives a slot back twice before another has once
      barrier_wait(shared_address(&memory.given[slot]), given >> slot & 1 ^ 1);
    }
    bring(from + slot * SLOT_BYTES);
    if (lane == 0) barrier_arrive(shared_address(&memory.given[slot]));
    given ^= 1 << slot;
  }

  __device__ __forceinline__ void item(const Cursor& at) {
    const Fp8Tiles tiles = fp8_tiles<KEYS>(p, at);
    const i32 boxed = boxed_tiles(at);
    if (p.page_rows != 0)
      this->find_boxes(at, 0);
    else
      this->load_pages(pages, at, 0);
    u32 last = slot;  // of the tile before
#pragma unroll 1
    for (i32 tile = 0; tile < STAGED; ++tile) {
      ask(at, tile, tiles, boxed, last);
      last = next_slot(last);
    }
    if (warp == 0) {
      this->pass_item();
      this->find_item();
      Place<STAGES> behind = place;
      behind.next_item();
      this->publish(behind);
    }
    bool has_q = warp == 0 || place.item() == 0;  // not the first warp's, and the first item's is the consumers' own
#pragma unroll 1
    for (i32 tile = 0; tile < tiles.all; ++tile) {
      if (!has_q) {
        has_q = tile >= Q_LATEST || uniform(barrier_passed(shared_address(&memory.q_empty), place.q_phase()));
        if (has_q) this->copy_q(at);
      }
      if (tile < tiles.cached) {
        if (tile > 0) {
          // to where the tile before was: the other warps are through with it by now, or soon
          ask(at, tile - 1 + STAGED, tiles, boxed, last);
        }
        cached_tile(tile, boxed);
        last = slot;
        slot = next_slot(slot);
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
    if (lane < 2 * STAGED) barrier_init(shared_address(memory.arrived) + 8 * lane, lane < STAGED ? 1 : 4);
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
    if (warp == 3) zero_padding<HEAD_DIM>(p, 32 * blockIdx.x, 32 * blocks_of_grid());
    copy_async_wait_all();  // no thread ends with copies on their way
  }
};

}  // namespace treeattn
