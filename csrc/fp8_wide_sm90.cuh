// Tree attention of grouped queries over FP8 caches on Hopper, more than 72 packed rows: the consumers of attention_sm90.cuh,
// two or three, whose producer makes numbers of the cache 16 bits wide. (Fewer rows: fp8_sm90.cuh.)
//
// Each number is made once for all rows of a tile. The products of two consumers take about 1,500 clocks for 64 keys and those
// of three 2,000, which is more than memory takes for their 16 KB (885), and what the producer does is to be under them.
// Products are in float16, which both formats are with one instruction for two numbers, as bf16 with four. But for fresh rows
// of bf16, which float16 has not: there are kernels with products in bf16 for those.

#pragma once

#include "block.cuh"
#include "consumer.cuh"
#include "fp8_wide_producer.cuh"

namespace treeattn {

// Registers of a thread once the roles have split: 64 K a multiprocessor in all.
template <int CONSUMERS>
struct Fp8WideRegisters;
template <>
struct Fp8WideRegisters<2> {
  static constexpr int PRODUCER = 72, CONSUMER = 216;
};
template <>
struct Fp8WideRegisters<3> {
  static constexpr int PRODUCER = 56, CONSUMER = 152;
};

// Of a thread at launch. A warpgroup that asks for more than the others leave of all waits for ever.
template <int CONSUMERS>
constexpr int LAUNCH_REGISTERS = 65536 / (128 * (CONSUMERS + 1)) / 8 * 8;
template <int CONSUMERS>
constexpr bool REGISTERS_SUFFICE = CONSUMERS * Fp8WideRegisters<CONSUMERS>::CONSUMER + Fp8WideRegisters<CONSUMERS>::PRODUCER <=
                                   (CONSUMERS + 1) * LAUNCH_REGISTERS<CONSUMERS>;
static_assert(REGISTERS_SUFFICE<2> && REGISTERS_SUFFICE<3>);

}  // namespace treeattn

// One kernel: as TREEATTN_ATTENTION (T: of Q and out), then the type of the products, the format of the caches and the tiles
// on their way. The host reads these lines (treeattn/cuda/build.py).
#define TREEATTN_FP8_WIDE(NAME, T, HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS, BLOCKS, OPTIONS, PRODUCTS, FORMAT, STAGED) \
  extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), BLOCKS)                                      \
      NAME(const __grid_constant__ treeattn::AttentionParams params) {                                             \
    using namespace treeattn;                                                                                      \
    using Memories = Fp8WideShared<HEAD_DIM, CONSUMERS, KEYS, STAGES, STAGED, Q_STEPS>;                            \
    run_block<Fp8WideRegisters<CONSUMERS>, Memories, CONSUMERS,                                                    \
              Fp8WideProducer<PRODUCTS, FORMAT, HEAD_DIM, CONSUMERS, KEYS, STAGES, STAGED, Q_STEPS, OPTIONS>,      \
              Consumer<PRODUCTS, HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS, OPTIONS, Memories, true, T>>(params); \
  }
