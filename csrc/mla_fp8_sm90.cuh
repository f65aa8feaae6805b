// Tree attention over latent rows in FP8 (MLA) on Hopper: the block of mla_sm90.cuh, whose producer makes numbers of the
// cache 16 bits wide.

#pragma once

#include "mla_fp8_producer.cuh"
#include "mla_sm90.cuh"

namespace treeattn {

constexpr int MLA_FP8_PRODUCER_REGISTERS = 64, MLA_FP8_SCORES_REGISTERS = 128;

}  // namespace treeattn

// One kernel: as TREEATTN_MLA, with the format of the cache. The host reads these lines (treeattn/cuda/build.py).
#define TREEATTN_MLA_FP8(NAME, T, FORMAT, Q_STEPS, LATENTS, ROPES)                                                    \
  extern "C" __global__ void __launch_bounds__(treeattn::MLA_THREADS, 1)                                              \
      NAME(const __grid_constant__ treeattn::AttentionParams params) {                                                \
    using namespace treeattn;                                                                                         \
    mla_sm90<MlaFp8Shared<Q_STEPS, LATENTS, ROPES>, MlaFp8Producer<T, FORMAT, Q_STEPS, LATENTS, ROPES>,               \
             MlaScores<T, Q_STEPS, LATENTS, ROPES, true>, MlaOutput<T, Q_STEPS, LATENTS, ROPES, true>,                \
             MLA_FP8_PRODUCER_REGISTERS, MLA_FP8_SCORES_REGISTERS>(params);                                           \
  }
