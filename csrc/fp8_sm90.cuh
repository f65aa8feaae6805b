// Tree attention of grouped queries over FP8 caches on Hopper.
#pragma once

#include "block.cuh"
#include "fp8_consumer.cuh"
#include "producer.cuh"

namespace treeattn {

// Registers of a thread once the roles have split: 64 K a multiprocessor in all.
template <int CONSUMERS>
struct Fp8Registers;
template <>
struct Fp8Registers<1> {
  static constexpr int PRODUCER = 32, CONSUMER = 224;  // of two blocks
};
template <>
struct Fp8Registers<2> {
  static constexpr int PRODUCER = 40, CONSUMER = 232;
};

}  // namespace treeattn

// One kernel: its name tells dtype, format of the caches, head dim, consumer warpgroups and rows of each. The host reads
// these lines (treeattn/cuda/build.py).
#define TREEATTN_FP8(NAME, T, FORMAT, HEAD_DIM, CONSUMERS, ROWS, KEYS, STAGES, BLOCKS)                               \
  extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), BLOCKS)                                      \
      NAME(const __grid_constant__ treeattn::AttentionParams params) {                                             \
    using namespace treeattn;                                                                                      \
    using Memories = Fp8Shared<HEAD_DIM, CONSUMERS, ROWS, KEYS, STAGES>;                                           \
    run_block<Fp8Registers<CONSUMERS>, Memories, CONSUMERS,                                                        \
              Producer<T, HEAD_DIM, CONSUMERS, KEYS, STAGES, 0, OPTION_WINDOW, Memories>,                          \
              Fp8Consumer<T, FORMAT, HEAD_DIM, CONSUMERS, ROWS, KEYS, STAGES>>(params);                            \
  }
