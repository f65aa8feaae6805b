// The producer warpgroup of an MLA block with an FP8 cache: makes its numbers 16 bits wide on the way to the rings, so that
// what reads these is as for a cache of 16 bits. Of both formats, bf16 and float16 have every number.
//
// All four warps do the same: a thread has a row of each half of a tile, 32 rows apart, and of its panels the 16 numbers
// number t % 4. It asks for them six panels ahead, two thirds of a tile (cp.async to places that are its own, which needs no
// barrier), and writes them as two pieces of 16 bytes. Rows are found one by one: there are no tensor copies, and pages of
// any size are the same.
//
// A tile's parts are brought one after another, each by all threads: the rope part, whose place is free first, then the
// quarters as scores take them. Nobody waits for ever: who waits for a place of a ring waits until a tile is done that is
// two tiles back at least, which needs the parts of that tile and of the one behind it.
//
// Q and fresh rows have 16 bits and are copied to the rings as they are.
//
// The last warp also walks along the plan, and hands out an item while the first tile of the one before is on its way.

#pragma once

#include "mla_fp8_ring.cuh"
#include "mla_producer.cuh"

namespace treeattn {

template <class T, class Format, int Q_STEPS, int LATENTS, int ROPES>
struct MlaFp8Producer : MlaProducer<Q_STEPS, LATENTS, ROPES, 1> {
  using Base = MlaProducer<Q_STEPS, LATENTS, ROPES, 1>;
  using Memory = typename MlaFp8Shared<Q_STEPS, LATENTS, ROPES>::Layout;
  using Base::lane;
  using Base::p;
  static constexpr u32 PARTS = 5, ROPE = 0;  // of a tile; the number of the rope part
  static constexpr u32 THIRD = MLA_PANELS / 3, THIRD_BYTES = THIRD * ASKED_BYTES;
  static_assert(MLA_ASKED == 2 * THIRD, "thirds of a tile take turns");
  using Rows = u64[2];  // where this thread's piece of the first panel is, of both of its rows; bit 0: the row is 0

  // A part's place in a ring.
  struct Spot {
    u32 to, full, empty, phase;
  };

  Memory& memory;
  Place<LATENTS> latent;  // of the tile's first quarters, in both rings
  Place<ROPES> rope;
  u32 asked = 0, written = 0;  // of this thread: where its pieces arrive, and where it writes its numbers in a panel

  __device__ __forceinline__ MlaFp8Producer(const AttentionParams& params, Memory& shared)
      : Base(params, shared), memory(shared) {}

  // This thread's row in each half of a tile.
  static __device__ __forceinline__ u32 row() { return thread_in_group() / 4; }
  static __device__ __forceinline__ u32 piece() { return thread_in_group() % 4; }

  // Where piece `number` of its row is in a panel, of eight.
  static __device__ __forceinline__ u32 place_of(u32 number) { return row() * 128 + ((number ^ row() % 8) << 4); }

  // --- parts of a tile: the rope part, quarters 0, 1, 3 and 2 -----------------------------------------------------------

  static __device__ __forceinline__ constexpr u32 quarter_of(u32 part) { return part < 3 ? part - 1 : 6 - part; }
  static __device__ __forceinline__ constexpr u32 panels_of(u32 part) { return part == ROPE ? 1 : 2; }
  static __device__ __forceinline__ constexpr u32 first_panel(u32 part) {
    return (part == ROPE ? LATENT_DIMS : quarter_dim(quarter_of(part))) / PANEL_COLUMNS;
  }

  __device__ __forceinline__ Spot spot(u32 part) const {
    if (part == ROPE) {
      const u32 full = shared_address(&memory.rope_full[rope.stage()]);
      return {shared_address(memory.ropes[rope.stage()]), full, full + 8 * ROPES, rope.phase()};
    }
    const u32 half = quarter_of(part) % HALVES;
    const Place<LATENTS> at = part < 3 ? latent : latent.next();
    const u32 full = shared_address(&memory.latent_full[half][at.stage()]);
    return {shared_address(memory.latents[half][at.stage()]), full, full + 8 * HALVES * LATENTS, at.phase()};
  }

  __device__ __forceinline__ void pass_tile() {
    latent = latent.next().next();
    rope = rope.next();
  }

  __device__ __forceinline__ void wait_empty(const Spot& at, u32 part) const {
    barrier_wait(at.empty, at.phase ^ 1);
#if TREEATTN_CANARY  // a part that was given back too early shows as NaN: this warp's rows
    for (u32 panel = 0; panel < panels_of(part); ++panel)
      for (u32 half = 0; half < 2; ++half)
        for (u32 i = 0; i < 2; ++i)
          store_shared_16(at.to + panel * MLA_PANEL_BYTES + half * 32 * 128 + place_of(piece() + 4 * i), ~0u, ~0u, ~0u, ~0u);
    fence_async_proxy();
    __syncwarp();
#endif
    sleep_now_and_then();
  }

  // What this warp has written of a part is there. Its readers make products see it, as they do for rows that threads copy:
  // a fence here would wait for this thread's copies, which are on their way all the time (5 % of a call).
  static __device__ __forceinline__ void arrive(u32 full) {
    __syncwarp();
    if (WARP_ARRIVALS == 32)
      barrier_arrive(full);
    else if (thread_in_block() % 32 == 0)
      barrier_arrive(full, FILL_ARRIVALS / 4);
  }

  // --- numbers of the cache ---------------------------------------------------------------------------------------------

  // Panel number `index` of those that a tile's parts bring.
  static __device__ __forceinline__ constexpr u32 part_at(u32 index) { return (index + 1) / 2; }
  static __device__ __forceinline__ constexpr u32 within_part(u32 index) { return index == 0 ? 0 : (index - 1) % 2; }
  static __device__ __forceinline__ constexpr u32 panel_at(u32 index) {
    return first_panel(part_at(index)) + within_part(index);
  }

  // Where it arrives, of this thread's row of a half. `third`: where the tile's first third does.
  __device__ __forceinline__ u32 arriving(u32 third, u32 index, u32 half) const {
    const u32 begin = index / THIRD % 2 == 0 ? third : THIRD_BYTES - third;
    return asked + begin + index % THIRD * ASKED_BYTES + half * (ASKED_BYTES / 2);
  }

  // Ask for a panel, if there is one; one group in any case.
  __device__ __forceinline__ void ask(const Rows& rows, u32 third, u32 index, bool there) const {
    if (there) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half)
        stream_async_16(arriving(third, index, half), (rows[half] & ~1ull) + panel_at(index) * PANEL_COLUMNS,
                        rows[half] & 1 ? 0 : 16);
    }
    copy_async_commit();
  }

  // A panel that was asked for to its part's place. The part before is `due` to be reported, 0 if none is: behind the numbers
  // of this one, when its stores have had time, and ahead of the wait for a place, which may be for readers of it.
  __device__ __forceinline__ void bring(u32 third, u32 index, u32& due) const {
    const u32 part = part_at(index);
    const Spot at = spot(part);
    copy_async_wait<MLA_ASKED - 1>();
    u32 numbers[2][4], made[2][8];
#pragma unroll
    for (u32 half = 0; half < 2; ++half) load_shared_16(numbers[half], arriving(third, index, half));
#pragma unroll
    for (u32 half = 0; half < 2; ++half) widen_all<T, Format>(made[half], numbers[half]);
    if (within_part(index) == 0) {
      pin(made[0]);
      pin(made[1]);
      if (index != THIRD && (index > 0 || due != 0)) arrive(due);
      due = at.full;
      wait_empty(at, part);
    }
    const u32 to = at.to + within_part(index) * MLA_PANEL_BYTES + written;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 row = to + half * 32 * 128;
      store_widened(row, row ^ 16, made[half]);
    }
  }

  // --- rows of 16 bits --------------------------------------------------------------------------------------------------

  // Copy a tile of this thread's rows.
  __device__ __forceinline__ void copy_tile(u64 upper, u64 lower) {
#pragma unroll 1
    for (u32 part = 0; part < PARTS; ++part) {
      const Spot at = spot(part);
      wait_empty(at, part);
#pragma unroll 1
      for (u32 i = 0; i < panels_of(part); ++i) {
        const u32 to = at.to + i * MLA_PANEL_BYTES + place_of(piece());
        const u32 bytes = 2 * (first_panel(part) + i) * PANEL_COLUMNS + 16 * piece();
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
          const u64 row = half == 0 ? upper : lower, from = (row & ~1ull) + bytes;
          stream_async_16(to + half * 32 * 128, from, row & 1 ? 0 : 16);
          stream_async_16((to ^ 64) + half * 32 * 128, from + 64, row & 1 ? 0 : 16);
        }
      }
      copy_async_arrive(at.full);
    }
    pass_tile();
  }

  // --- where rows are ---------------------------------------------------------------------------------------------------

  __device__ __forceinline__ u32 position_at(const Cursor& at, i32 tile, u32 half) const {
    return at.full_key + tile * MLA_KEYS + half * 32 + row();
  }

  // Page ids of this thread's rows of a full tile. (Written in place: see producer.cuh.)
  __device__ __forceinline__ void load_pages(u32 (&pages)[2], const Cursor& at, i32 tile) const {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u64 index = first_page(p, at) + page_of(p, position_at(at, tile, half));
      reload(pages[half], static_cast<const u32*>(p.table) + (index << p.wide_table), tile < at.full_tiles);
    }
  }

  // This thread's rows of a tile of the cache, given their pages if it is a full one.
  __device__ __forceinline__ void locate(Rows& rows, const Cursor& at, i32 tile, i32 cached, u32 (&pages)[2]) const {
    if (tile < at.full_tiles) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half)
        rows[half] = this->cached(pages[half], position_at(at, tile, half), at.kv_head) + 16 * piece();
      load_pages(pages, at, tile + 1);
    } else {
      const i32 unit = fp8_unit<MLA_KEYS>(p, at, tile, cached), end = cached_end(p, at);
#pragma unroll 1
      for (u32 half = 0; half < 2; ++half) {
        const bool there = unit + static_cast<i32>(half) < end;
        const u64 found = there ? this->edge(at, unit + half, row()) + 16 * piece() : reinterpret_cast<u64>(p.k) | 1;
        (half == 0 ? rows[0] : rows[1]) = found;
      }
    }
  }

  // --- items ------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void item(const Cursor& at, bool walks) {
    const i32 tiles = at.tiles, cached = fp8_tiles<MLA_KEYS>(p, at).cached;
    u32 pages[2] = {0, 0}, third = 0;
    Rows rows;
    load_pages(pages, at, 0);
    locate(rows, at, 0, cached, pages);
#pragma unroll
    for (u32 index = 0; index < MLA_ASKED; ++index) ask(rows, third, index, cached > 0);
    copy_tile(q_row(p, at, row()), q_row(p, at, row() + 32));
    if (walks) {
      this->find_lane();
      this->advance();
      Place<LATENTS> behind = latent;
      behind.next_item();
      this->publish(behind);
    }
    u32 due = 0;
#pragma unroll 1
    for (i32 tile = 0; tile < cached; ++tile) {
      bool more = true;
#pragma unroll
      for (u32 index = 0; index < MLA_PANELS; ++index) {
        if (index == THIRD) {  // what is asked for from here on is of the next tile, which may take long to find
          arrive(due);
          more = tile + 1 < cached;
          if (more) locate(rows, at, tile + 1, cached, pages);
        }
        bring(third, index, due);
        ask(rows, index < THIRD ? third : THIRD_BYTES - third, (index + MLA_ASKED) % MLA_PANELS, more);
      }
      pass_tile();
      third = THIRD_BYTES - third;
    }
    if (due != 0) arrive(due);
#pragma unroll 1
    for (i32 tile = cached; tile < tiles; ++tile) {
      const i32 unit = fp8_unit<MLA_KEYS>(p, at, tile, cached);
      const u64 upper = this->edge(at, unit, row());
      copy_tile(upper, this->edge(at, unit + 1, row()));
    }
  }

  __device__ __forceinline__ void run(u32 warp) {
    this->find_lane();
    asked = shared_address(memory.asked) + thread_in_group() * 16;
    written = place_of(2 * piece());
    if (warp == 3) this->publish(latent);
    for (;;) {
      barrier_wait(shared_address(&memory.item_full[latent.item_slot()]), latent.item_phase());
      const Cursor& at = memory.items[latent.item_slot()];
      if (at.tiles == 0) break;
      item(at, warp == 3);
      __syncwarp();
      if (warp != 3) warp_arrive(memory.item_empty[latent.item_slot()], thread_in_block() % 32);
      latent.next_item();
    }
    copy_async_wait_all();  // no thread ends with copies on their way
  }
};

}  // namespace treeattn
