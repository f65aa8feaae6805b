// Which ways to hand shared memory from one warp to another does racecheck follow? All of these are right.
//
//   nvcc -std=c++17 -O2 -arch=sm_90a -o patterns benchmarks/racecheck_patterns.cu
//   for i in 1 2 3 4 5 6 7 8 9 10 11 12; do compute-sanitizer --tool racecheck --racecheck-report all ./patterns $i; done
//
// A block of two warps: the first writes 16 bytes a lane to a slot, behind an mbarrier on which the second waits; that reads
// another lane's bytes, and gives the slot back at a second mbarrier. What it counts on an H200 is in docs/cuda.md.

#include <cstdio>
#include <cstdlib>

using u32 = unsigned;
using u64 = unsigned long long;

enum Write { STORES, COPIES };  // st.shared, cp.async
enum Full {
  EACH,         // each lane arrives
  ONE,          // one lane, behind __syncwarp
  BY_COPIES,    // each lane's copies, by cp.async.mbarrier.arrive.noinc
  WAITED_EACH,  // each lane that has waited for its copies
  WAITED_ONE    // one lane, behind __syncwarp, when all have
};
enum Read { LOADS, MATRICES };  // ld.shared, ldmatrix
constexpr int ROUNDS = 8;

__device__ u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }
__device__ void init(u64& barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}
__device__ void arrive(u64& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
__device__ void copies_arrive(u64& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
__device__ void wait(u64& barrier, u32 parity) {
  u32 passed = 0;
  while (passed == 0)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(passed)
                 : "r"(shared_address(&barrier)), "r"(parity)
                 : "memory");
}
__device__ void copy(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ void arrive_as_one(u64& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(barrier);
}

template <Write WRITE, Full FULL, Full EMPTY, Read READ, int SLOTS>
__global__ void hand_over(const uint4* in, u32* out) {
  __shared__ alignas(128) uint4 slots[SLOTS][32];
  __shared__ u64 full[SLOTS], empty[SLOTS];
  const u32 lane = threadIdx.x % 32;
  if (threadIdx.x < SLOTS) {
    init(full[threadIdx.x], FULL == ONE || FULL == WAITED_ONE ? 1 : 32);
    init(empty[threadIdx.x], EMPTY == ONE ? 1 : 32);
  }
  __syncthreads();
  u32 sum = 0;
  for (int round = 0; round < ROUNDS; ++round) {
    const int slot = round % SLOTS;
    const u32 phase = round / SLOTS % 2;
    if (threadIdx.x < 32) {
      wait(empty[slot], phase ^ 1);
      if (WRITE == STORES)
        slots[slot][lane] = in[lane + round];
      else
        copy(&slots[slot][lane], in + lane + round);
      if (FULL == WAITED_EACH || FULL == WAITED_ONE) copies_wait();
      if (FULL == BY_COPIES)
        copies_arrive(full[slot]);
      else if (FULL == ONE || FULL == WAITED_ONE)
        arrive_as_one(full[slot]);
      else
        arrive(full[slot]);
    } else {
      wait(full[slot], phase);
      if (READ == LOADS) {
        const uint4 read = slots[slot][(lane + 1) % 32];
        sum += read.x + read.w;
      } else {
        u32 read[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(read[0]), "=r"(read[1]), "=r"(read[2]), "=r"(read[3])
                     : "r"(shared_address(&slots[slot][lane]))
                     : "memory");
        sum += read[0] + read[1] + read[2] + read[3];
      }
      if (EMPTY == ONE)
        arrive_as_one(empty[slot]);
      else
        arrive(empty[slot]);
    }
  }
  if (WRITE == COPIES) copies_wait();
  if (threadIdx.x >= 32) out[lane] = sum;
}

int main(int count, char** words) {
  using Kernel = void (*)(const uint4*, u32*);
  const Kernel kernels[] = {
      hand_over<STORES, EACH, EACH, LOADS, 2>,       hand_over<STORES, ONE, EACH, LOADS, 2>,
      hand_over<STORES, EACH, ONE, LOADS, 2>,        hand_over<STORES, ONE, ONE, LOADS, 2>,
      hand_over<COPIES, BY_COPIES, EACH, LOADS, 2>,  hand_over<COPIES, BY_COPIES, ONE, LOADS, 2>,
      hand_over<COPIES, WAITED_EACH, EACH, LOADS, 2>, hand_over<COPIES, WAITED_ONE, EACH, LOADS, 2>,
      hand_over<COPIES, BY_COPIES, EACH, MATRICES, 2>, hand_over<COPIES, BY_COPIES, ONE, MATRICES, 2>,
      hand_over<STORES, EACH, EACH, LOADS, 1>,       hand_over<STORES, ONE, ONE, LOADS, 1>,
  };
  const int number = count > 1 ? std::atoi(words[1]) : 0;
  if (number < 1 || number > 12) {
    std::fprintf(stderr, "usage: patterns 1..12\n");
    return 2;
  }
  uint4* in;
  u32* out;
  cudaMalloc(&in, 4096);
  cudaMemset(in, 1, 4096);
  cudaMalloc(&out, 128);
  kernels[number - 1]<<<1, 64>>>(in, out);
  std::printf("pattern %d: %s\n", number, cudaGetErrorString(cudaDeviceSynchronize()));
}
