// Tree attention of grouped queries over FP8 caches on Hopper, up to 72 packed rows (17 nodes of 4 heads: 68): a producer
// warpgroup and a consumer warpgroup of 40 or 72 rows a block, operands swapped (fp8_consumer.cuh). Two blocks a
// multiprocessor, each with keys of its own. (More rows: fp8_wide_sm90.cuh.)
//
// For a tile of 64 keys, in clocks of a multiprocessor:
//                                                                     40 rows  72 rows
//   products        Q K^T 8 steps and P V 8 of ROWS / 2                   320      576
//   shared memory   K and V in 128 and out 128, Q 2 ROWS,
//                   P ROWS in and 2 ROWS out                              456      616
//   exponentials    16 a clock                                            160      288
//   numbers of K and V made float16, 64 a clock                           256      256
//   instructions    of the four schedulers                                325      400
//   from memory     16 KB at 4.28 TB/s                                    885      885
// One warpgroup takes about 1050 clocks for a tile of 72 rows: products 576 and their latency 100, softmax 300, the way
// through shared memory 80; the numbers of K and V are made under the products. Two of them on a multiprocessor, which
// wait for nobody but their own memory, are ahead of it.

#pragma once

#include "block.cuh"
#include "fp8_consumer.cuh"
#include "producer.cuh"

namespace treeattn {

// Registers of a thread once the roles have split: 64 K a multiprocessor in all.
struct Fp8Registers {
  static constexpr int PRODUCER = 32, CONSUMER = 224;  // of two blocks
};

}  // namespace treeattn

// One kernel: its name tells dtype, format of the caches, head dim and rows. The host reads these lines
// (treeattn/cuda/build.py).
#define TREEATTN_FP8(NAME, T, HEAD_DIM, ROWS, KEYS, STAGES, BLOCKS, FORMAT)                                          \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                                        \
      NAME(const __grid_constant__ treeattn::AttentionParams params) {                                             \
    using namespace treeattn;                                                                                      \
    using Memories = Fp8Shared<HEAD_DIM, ROWS, KEYS, STAGES>;                                                      \
    run_block<Fp8Registers, Memories, 1, Producer<T, HEAD_DIM, 1, KEYS, STAGES, 0, OPTION_WINDOW, Memories>,       \
              Fp8Consumer<T, FORMAT, HEAD_DIM, ROWS, KEYS, STAGES>>(params);                                       \
  }
