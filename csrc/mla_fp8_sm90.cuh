// Tree attention over latent rows in FP8 (MLA) on Hopper: the block of mla_sm90.cuh, whose producer makes numbers of the
// cache 16 bits wide. For a tile of 64 keys, in clocks of a multiprocessor:
//   products        as there                                                                                       2176
//   shared memory   K 576, V 512; five panels of Q 320; P 64 in, 256 out; rows of the cache 288 in and 288 out,
//                   their numbers in 16 bits 576                                                                   2880
//   instructions    of each of the producer's warps, one a scheduler: 1050 to make bf16, 620 to make float16
//   registers       the producer 64, which leaves the scores 128: four panels of Q, 64; sums 160 as there
// From L2 a block reads 13 bytes a clock, half of what the 16-bit kernel does, and 24 KB are on their way. The rings hold two
// tiles: when a quarter has been multiplied with V, it is made anew of the tile after next, while the other products run.

#pragma once

#include "mla_fp8_producer.cuh"
#include "mla_sm90.cuh"

namespace treeattn {

constexpr int MLA_FP8_PRODUCER_REGISTERS = 64, MLA_FP8_SCORES_REGISTERS = 128;

}  // namespace treeattn

// One kernel: as TREEATTN_MLA, with the format of the cache. The host reads these lines (treeattn/cuda/build.py).
#define TREEATTN_MLA_FP8(NAME, T, Q_STEPS, LATENTS, ROPES, FORMAT)                                                    \
  extern "C" __global__ void __launch_bounds__(treeattn::MLA_THREADS, 1)                                              \
      NAME(const __grid_constant__ treeattn::AttentionParams params) {                                                \
    using namespace treeattn;                                                                                         \
    mla_sm90<MlaFp8Shared<Q_STEPS, LATENTS, ROPES>, MlaFp8Producer<T, FORMAT, Q_STEPS, LATENTS, ROPES>,               \
             MlaScores<T, Q_STEPS, LATENTS, ROPES, true>, MlaOutput<T, Q_STEPS, LATENTS, ROPES>,                \
             MLA_FP8_PRODUCER_REGISTERS, MLA_FP8_SCORES_REGISTERS>(params);                                           \
  }
