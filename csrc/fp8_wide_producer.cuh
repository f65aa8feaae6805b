// The producer warpgroup where an FP8 cache is multiplied in 16 bits: makes its numbers of T on the way to the ring, so that
// consumers read this as for a cache of T (consumer.cuh).
//
// All four warps do the same: a warp has 16 keys of each tile, a thread of each half two rows, 8 keys apart, and of these the
// 16 numbers number t % 4 and t % 4 + 4. It asks for them STAGED tiles ahead (cp.async to places that are its own, which
// needs no barrier), and writes them as two pieces of 16 bytes; eight threads, which store at a time, have four pieces of two
// rows each, in all banks. Rows are found one by one: there are no tensor copies, and pages of any size are the same.
//
// For a tile of 64 keys a warp takes 8 loads of 16 numbers, 16 stores, and for each two numbers 1 instruction (float16) or 4
// (bf16): 64 or 256. With what finds and copies rows that is about 150 or 350 of its scheduler's clocks, of which consumers
// leave some 700 (two) or 500 (three) a tile. In shared memory: 128 clocks for what arrives, 128 to read and 256 to write it.
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
  using Base::place;
  using Base::warp;
  static constexpr u32 ROWS = KEYS / 4;                 // of a warp, in each half of a tile
  static constexpr u32 PIECE_BYTES = 128 * 16;          // of a piece of all threads
  static constexpr u32 PANEL_BYTES = KEYS * 128;        // of the ring
  static constexpr i32 Q_LATEST = 2;  // tiles that are brought while consumers may still have the Q of the item before
  static_assert(HEAD_DIM == 128 && ROWS == 16, "four pieces a thread: two rows, two panels");
  static_assert(Q_LATEST < STAGES, "that many tiles need no consumer of this item");

  __device__ __forceinline__ Fp8WideProducer(const AttentionParams& params, Memory& shared) : Base(params, shared) {}

  // --- numbers of the cache ---------------------------------------------------------------------------------------------

  // Where this thread's first piece of half a tile arrives.
  __device__ __forceinline__ u32 arriving(u32 slot, u32 half) const {
    return shared_address(memory.staged[slot][half]) + thread_in_group() * 16;
  }

  // Ask for this thread's pieces of half a tile, if there is one; one group in any case. `address`: of lane r the warp's row
  // r, if its bit 0 is not set.
  __device__ __forceinline__ void ask(u64 address, u32 slot, u32 half, bool there) const {
    if (there) {
      const u32 to = arriving(slot, half);
#pragma unroll
      for (u32 row = 0; row < 2; ++row) {
        const u64 from = __shfl_sync(~0u, address, 8 * row + lane / 4), begin = (from & ~1ull) + lane % 4 * 16;
#pragma unroll
        for (u32 panel = 0; panel < 2; ++panel)
          copy_async_16(to + (2 * row + panel) * PIECE_BYTES, begin + panel * 64, from & 1 ? 0 : 16);
      }
    }
    copy_async_commit();
  }

  // Half a tile that was asked for to its place in the ring.
  __device__ __forceinline__ void bring(u32 slot, u32 half) {
    copy_async_wait<2 * STAGED - 1>();
    u32 numbers[4][4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) load_shared_16(numbers[i], arriving(slot, half) + i * PIECE_BYTES);
    const u32 begin = this->wait_empty(half);
    this->template spoil<4>(begin, warp);
    const u32 to = begin + (warp * ROWS + lane / 4) * 128 + ((2 * (lane % 4) ^ lane / 4) << 4);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) store_widened<T, Format>(to + i / 2 * (8 * 128) + i % 2 * PANEL_BYTES, numbers[i]);
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&memory.full[place.stage()][half]), PRODUCER_ARRIVALS / 4);
  }

  // --- where rows are ---------------------------------------------------------------------------------------------------

  // This warp's rows of an edge tile, of lane r row r % 16: half of those of an edge unit, which is before `end` or empty.
  __device__ __forceinline__ KeyAddress edge_rows(const Cursor& at, i32 unit, i32 end) const {
    KeyAddress address = {reinterpret_cast<u64>(p.k) | 1, reinterpret_cast<u64>(p.v) | 1};
    unit += warp / 2;
    if (unit < end) address = this->edge(at, unit);
    const u32 from = warp % 2 * ROWS + lane % ROWS;
    return {__shfl_sync(~0u, address.k, from), __shfl_sync(~0u, address.v, from)};
  }

  // The same of a tile of the cache; page ids as in full_rows of producer.cuh.
  __device__ __forceinline__ KeyAddress cached_rows(const Cursor& at, i32 tile, i32 cached, u32& pages) const {
    if (seldom(tile >= at.full_tiles)) return edge_rows(at, fp8_unit<KEYS>(p, at, tile, cached), cached_end(p, at));
    const u32 page = __shfl_sync(~0u, pages, tile % Base::PAGE_TILES * ROWS + lane % ROWS);
    const KeyAddress address = this->cached(page, this->position_at(at, tile), at.kv_head);
    if (tile % Base::PAGE_TILES == Base::PAGE_TILES - 1) this->load_pages(pages, at, tile + 1);
    return address;
  }

  // --- items ------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void item(const Cursor& at) {
    const Fp8Tiles tiles = fp8_tiles<KEYS>(p, at);
    u32 pages = 0, slot = 0;
    this->load_pages(pages, at, 0);
#pragma unroll 1
    for (i32 tile = 0; tile < STAGED; ++tile) {
      KeyAddress rows = {};
      if (tile < tiles.cached) rows = cached_rows(at, tile, tiles.cached, pages);
      ask(rows.k, tile, 0, tile < tiles.cached);
      ask(rows.v, tile, 1, tile < tiles.cached);
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
        const bool more = tile + STAGED < tiles.cached;
        KeyAddress rows = {};
        bring(slot, 0);
        if (more) rows = cached_rows(at, tile + STAGED, tiles.cached, pages);
        ask(rows.k, slot, 0, more);
        bring(slot, 1);
        ask(rows.v, slot, 1, more);
        slot = slot == STAGED - 1 ? 0 : slot + 1;
      } else {
        const KeyAddress rows = edge_rows(at, fp8_unit<KEYS>(p, at, tile, tiles.cached), at.edge_end);
#pragma unroll 1
        for (u32 half = 0; half < 2; ++half) this->template copy<4>(half == 0 ? rows.k : rows.v, half, warp);
      }
      place = place.next();
    }
    if (!has_q) this->copy_q(at);
  }

  // The first warp's, before the block's barriers are there.
  __device__ __forceinline__ void begin() {
    this->begin_walk();
    this->find_item();
  }

  __device__ __forceinline__ void run() {
    this->find_thread();
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
