// A block of the kernels for grouped queries: its barriers, then one producer warpgroup behind CONSUMERS others.

#pragma once

#include "ring.cuh"

namespace treeattn {

template <class Registers, class Memories, int CONSUMERS, class Producer, class Consumer>
__device__ __forceinline__ void run_block(const AttentionParams& p) {
  using Memory = typename Memories::Layout;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Memory& memory = *reinterpret_cast<Memory*>(shared_bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = uniform(warp / 4);
  Producer producer(p, memory);

  if (uniform(warp) == 4 * CONSUMERS) producer.begin();  // the way to the first keys is the longest, and starts here
  if (uniform(warp) == 0) {
    if (shared_address(shared_bytes) % ATOM_BYTES != 0) trap();
    for (u32 barrier = lane; barrier < Memories::BARRIERS; barrier += 32)
      barrier_init(shared_address(memory.full) + 8 * barrier, Memories::arrivals(barrier));
    fence_async_proxy();
    if (lane == 0 && p.page_rows != 0) {
      prefetch(p.k_map);
      prefetch(p.v_map);
    }
  }
  __syncthreads();

  if (group == CONSUMERS) {
    if constexpr (Registers::PRODUCER < Registers::CONSUMER) give_registers<Registers::PRODUCER>();
    producer.run();
  } else {
    if constexpr (Registers::PRODUCER < Registers::CONSUMER) take_registers<Registers::CONSUMER>();
    Consumer consumer(p, memory, group, lane);
    consumer.run();
  }
}

}  // namespace treeattn
