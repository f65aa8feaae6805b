// Tree attention of grouped queries on Hopper: one producer warpgroup and CONSUMERS warpgroups of 64 rows a block.
//
// What the shapes are for, R = nodes * group packed rows of a request and KV head:
//   1 consumer, two blocks an SM    R <= 64: one block's loads and softmax fill the other's gaps
//   2 consumers                     R <= 128 (17 nodes of 4 heads: 68): each K/V tile is read by both, once from L2
//   3 consumers                     R to 192 (17 nodes of 8 heads: 136), and wider trees in tiles of up to 192 rows
// 64 keys a tile: short prefixes divide over more SMs, the edge wastes less, and three warpgroups' scores, weights,
// sums and Q fit in 160 registers.

#pragma once

#include "consumer.cuh"
#include "producer.cuh"

namespace treeattn {

// Registers of a thread once the roles have split: 64 K a multiprocessor in all.
template <int CONSUMERS>
struct Registers;
template <>
struct Registers<1> {
  static constexpr int PRODUCER = 56, CONSUMER = 200;
};
template <>
struct Registers<2> {
  static constexpr int PRODUCER = 72, CONSUMER = 216;
};
template <>
struct Registers<3> {
  static constexpr int PRODUCER = 32, CONSUMER = 160;
};

template <class T, int HEAD_DIM, int CONSUMERS, int KEYS, int STAGES, int Q_STEPS, int OPTIONS>
__device__ __forceinline__ void attention_sm90(const AttentionParams& p) {
  static_assert(KEYS % 64 == 0 && HEAD_DIM % 64 == 0, "tiles are whole panels");
  using Memory = typename Shared<HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS>::Layout;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Memory& memory = *reinterpret_cast<Memory*>(shared_bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  launch_dependents();
  if (threadIdx.x == 0) {
    if (shared_address(shared_bytes) % ATOM_BYTES != 0) trap();
    for (int half = 0; half < 2 * STAGES; ++half) {
      barrier_init(shared_address(&memory.full[half / 2][half % 2]), PRODUCER_ARRIVALS);
      barrier_init(shared_address(&memory.empty[half / 2][half % 2]), 4 * CONSUMERS);
    }
    barrier_init(shared_address(&memory.q_full), Q_ARRIVALS);
    barrier_init(shared_address(&memory.q_empty), 4 * CONSUMERS);
    for (int item = 0; item < ITEMS; ++item) {
      barrier_init(shared_address(&memory.item_full[item]), 1);
      barrier_init(shared_address(&memory.item_empty[item]), 4 * CONSUMERS + 3);  // the first warp's item is its own
      barrier_init(shared_address(&memory.boxes[item]), 1);
      barrier_init(shared_address(&memory.edges[item]), 2);
    }
    fence_async_proxy();
    if (p.page_rows != 0) {
      prefetch(p.k_map);
      prefetch(p.v_map);
    }
  }
  __syncthreads();

  const int group = uniform(warp / 4);
  if (group == CONSUMERS) {
    give_registers<Registers<CONSUMERS>::PRODUCER>();
    Producer<T, HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS, OPTIONS> producer(p, memory);
    producer.run();
  } else {
    take_registers<Registers<CONSUMERS>::CONSUMER>();
    Consumer<T, HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS, OPTIONS> consumer(p, memory, group, uniform(warp % 4), lane);
    consumer.run();
  }
}

}  // namespace treeattn

// One kernel: its name tells dtype, head dim, consumer warpgroups, keys of a tile and options. The host reads these lines
// for the shared memory that a kernel takes (treeattn/cuda/build.py).
#define TREEATTN_ATTENTION(NAME, T, HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS, BLOCKS, OPTIONS)                   \
  extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), BLOCKS)                                      \
      NAME(const __grid_constant__ treeattn::AttentionParams params) {                                             \
    treeattn::attention_sm90<treeattn::T, HEAD_DIM, CONSUMERS, KEYS, STAGES, Q_STEPS, OPTIONS>(params);            \
  }
