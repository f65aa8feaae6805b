// FP8 caches whose numbers are made 16 bits wide on the way to shared memory: how, and which tiles have them.
//
// Of both formats, bf16 and float16 have every number. Fresh rows have 16 bits and are worth what they are, unlike numbers
// of the cache, so that they are never in a tile with others: an item may have one tile more than it has of 16 bits.

#pragma once

#include "ptx.cuh"
#include "schedule.cuh"

namespace treeattn {

// --- tiles of an item -------------------------------------------------------------------------------------------------

struct Fp8Tiles {
  i32 cached, all;
};

__device__ __forceinline__ bool has_fresh(const AttentionParams& p, const Cursor& at) {
  return p.k_tree != nullptr && at.edge_end > at.prefix_units;
}

// Edge unit behind the last of the cache.
__device__ __forceinline__ i32 cached_end(const AttentionParams& p, const Cursor& at) {
  return has_fresh(p, at) ? most(at.prefix_units, at.edge_begin) : at.edge_end;
}

template <int KEYS>
__device__ __forceinline__ Fp8Tiles fp8_tiles(const AttentionParams& p, const Cursor& at) {
  constexpr i32 UNITS = KEYS / EDGE_KEYS;
  const i32 end = cached_end(p, at), cached = at.full_tiles + ceil_div(end - at.edge_begin, UNITS);
  return {cached, cached + ceil_div(at.edge_end - end, UNITS)};
}

// First edge unit of an edge tile.
template <int KEYS>
__device__ __forceinline__ i32 fp8_unit(const AttentionParams& p, const Cursor& at, i32 tile, i32 cached) {
  constexpr i32 UNITS = KEYS / EDGE_KEYS;
  return tile < cached ? at.edge_begin + (tile - at.full_tiles) * UNITS : cached_end(p, at) + (tile - cached) * UNITS;
}

// --- scales -----------------------------------------------------------------------------------------------------------

// What a number of the item's K is worth.
__device__ __forceinline__ float k_worth(const AttentionParams& p, const Cursor& at) {
  return p.k_scales != nullptr ? __ldg(p.k_scales + at.kv_head * p.stride_k_scale) : p.k_scale;
}

__device__ __forceinline__ float v_worth(const AttentionParams& p, const Cursor& at) {
  return p.v_scales != nullptr ? __ldg(p.v_scales + at.kv_head * p.stride_v_scale) : p.v_scale;
}

// A scale of scores, positive and not inf: 0 times -inf, or inf times 0, would be NaN.
__device__ __forceinline__ float bounded(float scale) { return fminf(fmaxf(scale, 1e-30f), 3e38f); }

// --- numbers ----------------------------------------------------------------------------------------------------------

template <class T>
constexpr bool IS_HALF = false;
template <>
constexpr bool IS_HALF<Fp16> = true;

// 16 numbers as numbers of T.
template <class T, class Format>
__device__ __forceinline__ void widen_all(u32 (&made)[8], const u32 (&numbers)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 low, high;
    widen<Format>(numbers[i], low, high);
    made[2 * i] = narrow_halves<T>(low);
    made[2 * i + 1] = narrow_halves<T>(high);
  }
}

// To two 16-byte chunks of shared memory.
__device__ __forceinline__ void store_widened(u32 first, u32 second, const u32 (&made)[8]) {
  store_shared_16(first, made[0], made[1], made[2], made[3]);
  store_shared_16(second, made[4], made[5], made[6], made[7]);
}

}  // namespace treeattn
