// Tree attention over latent rows (MLA, absorbed) on Hopper: scores over 576 dims, V is the first 512 of them.
//
// A block is 64 packed rows (nodes times heads) on four warpgroups: one brings tiles of 64 keys, one computes scores and
// weights, two hold 256 dims each of the sums. For a tile, in clocks of a multiprocessor:
//   products        Q K^T 36 steps of 32, P V 4 steps of 256                                                1152 + 1024
//   shared memory   K 576, V 512; panels of Q that are not in registers, 64 each: 192; P 64 in, 256 out;
//                   arriving rows 576                                                                              2176
//   registers       sums 128 of 160 a thread; Q 96 and scores 32 of 160; the producer 32: 64 K in all
// With all of Q in shared memory it would be 2560, more than the products take, and hold 48 KB that the rings have now: 5
// quarters of 16 KB for each half, two tiles in use and half of the next on its way, the other half when the first halves
// of P V end. The matrix unit goes Q K^T (i + 1), then P V (i) with softmax (i + 1) beside it, then Q K^T (i + 2). Row tiles
// of a request are lanes of the plan: their blocks walk the same keys at the same time, and memory sees them once; from L2
// each block reads 28 bytes a clock of the 2590 that a tile takes, which on all multiprocessors is what L2 has.

#pragma once

#include "mla_output.cuh"
#include "mla_producer.cuh"
#include "mla_scores.cuh"

namespace treeattn {

constexpr int MLA_THREADS = 512, MLA_LAUNCH_REGISTERS = 128;  // of a thread, before the roles split
constexpr int MLA_PRODUCER_REGISTERS = 32, MLA_SCORES_REGISTERS = 160, MLA_OUTPUT_REGISTERS = 160;  // 512 in all

template <class Memories, class Producer, class Scores, class Output, int PRODUCER_REGISTERS = MLA_PRODUCER_REGISTERS,
          int SCORES_REGISTERS = MLA_SCORES_REGISTERS>
__device__ __forceinline__ void mla_sm90(const AttentionParams& p) {
  static_assert(PRODUCER_REGISTERS + SCORES_REGISTERS + 2 * MLA_OUTPUT_REGISTERS == 512, "64 K");
  using Memory = typename Memories::Layout;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Memory& memory = *reinterpret_cast<Memory*>(shared_bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  Producer producer(p, memory);

  if (uniform(warp) >= 12) producer.begin(uniform(warp % 4));  // the way to the first keys is the longest, and starts here
  if (uniform(warp) == 0) {
    if (shared_address(shared_bytes) % ATOM_BYTES != 0) trap();
    for (u32 barrier = lane; barrier < Memories::BARRIERS; barrier += 32)
      barrier_init(shared_address(memory.latent_full) + 8 * barrier, Memories::arrivals(barrier));
    fence_async_proxy();
    if (lane == 0 && p.page_rows != 0) prefetch(p.k_map);
  }
  __syncthreads();

  const int group = uniform(warp / 4);
  if (group == 3) {
    give_registers<PRODUCER_REGISTERS>();
    producer.run(uniform(warp % 4));
  } else if (group == 2) {
    if constexpr (SCORES_REGISTERS > MLA_LAUNCH_REGISTERS) take_registers<SCORES_REGISTERS>();
    Scores scores(p, memory, uniform(warp % 4), lane);
    scores.run();
  } else {
    take_registers<MLA_OUTPUT_REGISTERS>();
    Output output(p, memory, group, uniform(warp % 4), lane);
    output.run();
  }
}

}  // namespace treeattn

// One kernel: 16-bit type, steps of 16 dims of Q that are in registers, quarters and rope parts in shared memory. The host
// reads these lines (treeattn/cuda/build.py).
#define TREEATTN_MLA(NAME, T, Q_STEPS, LATENTS, ROPES)                       \
  extern "C" __global__ void __launch_bounds__(treeattn::MLA_THREADS, 1)     \
      NAME(const __grid_constant__ treeattn::AttentionParams params) {       \
    using namespace treeattn;                                                \
    mla_sm90<MlaShared<Q_STEPS, LATENTS, ROPES>, MlaProducer<Q_STEPS, LATENTS, ROPES>, \
             MlaScores<T, Q_STEPS, LATENTS, ROPES>, MlaOutput<T, Q_STEPS, LATENTS, ROPES>>(params); \
  }
