// Tree attention of grouped queries on Hopper: one producer warpgroup and CONSUMERS warpgroups of 64 rows a block.
//
// What the shapes are for, R = nodes * group packed rows of a request and KV head:
//   1 consumer, two blocks an SM    R <= 64: one block's loads and softmax fill the other's gaps
//   2 consumers                     R <= 128 (17 nodes of 4 heads: 68): each K/V tile is read by both, once from L2
//   3 consumers                     R to 192 (17 nodes of 8 heads: 136), and wider trees in tiles of up to 192 rows
// 64 keys a tile: short prefixes divide over more SMs, the edge wastes less, and three warpgroups' scores, weights,
// sums and Q fit in 160 registers.
//
// Head dim 256, of which a tile of 64 keys is 64 KB: two consumers at most, for sums are 128 registers a thread, scores 32,
// weights 16. A quarter of Q is 16 more, and 40 are left of 232; half of Q spills. For a tile, in clocks of a multiprocessor:
//   products        Q K^T 16 steps of 32, P V 4 steps of 128                       1024 a consumer
//   shared memory   K 256, V 256, three panels of Q of 64 each: 704 a consumer; 512 in     1920 of two
//   memory          64 KB at 4.28 TB/s                                             3540, from L2 about 2500
// so one consumer (R <= 64) and two (R <= 128) are memory-bound, and wide trees are bound by products, shared memory and L2
// alike. One consumer has the multiprocessor for itself and three stages (two blocks of it would have one stage each, with
// nothing on its way while it is read); two have two stages, of which 64 KB are on their way.

#pragma once

#include "block.cuh"
#include "consumer.cuh"
#include "producer.cuh"

namespace treeattn {

// Registers of a thread once the roles have split: 64 K a multiprocessor in all.
template <int CONSUMERS, int HEAD_DIM>
struct Registers;
template <int HEAD_DIM>
struct Registers<1, HEAD_DIM> {
  static constexpr int PRODUCER = 32, CONSUMER = 224;
};
template <int HEAD_DIM>
struct Registers<2, HEAD_DIM> {
  static constexpr int PRODUCER = 40, CONSUMER = 232;
};
template <int HEAD_DIM>
struct Registers<3, HEAD_DIM> {
  static constexpr int PRODUCER = 32, CONSUMER = 160;
};
template <>
struct Registers<1, 256> {
  static constexpr int PRODUCER = 255, CONSUMER = 255;  // of two warpgroups, all that a thread can have: nothing to give
};
template <>
struct Registers<2, 256> {
  static constexpr int PRODUCER = 40, CONSUMER = 232;
};

template <class T, int HEAD_DIM, int CONSUMERS, int KEYS, int STAGES, int Q_STEPS, int OPTIONS>
__device__ __forceinline__ void attention_sm90(const AttentionParams& p) {
  static_assert(KEYS % 64 == 0 && HEAD_DIM % 64 == 0, "tiles are whole panels");
  run_block<Registers<CONSUMERS, HEAD_DIM>, Shared<HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS>, CONSUMERS,
            Producer<T, HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS, OPTIONS>,
            Consumer<T, HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS, OPTIONS>>(p);
}

}  // namespace treeattn

// One kernel: its name tells dtype, head dim, consumer warpgroups, keys of a tile and options. The host reads these lines
// for the shared memory that a kernel takes (treeattn/cuda/build.py).
#define TREEATTN_ATTENTION(NAME, T, HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS, BLOCKS, OPTIONS)                   \
  extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), BLOCKS)                                      \
      NAME(const __grid_constant__ treeattn::AttentionParams params) {                                             \
    treeattn::attention_sm90<treeattn::T, HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS, OPTIONS>(params);            \
  }
