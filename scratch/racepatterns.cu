// Which hand-overs through shared memory does racecheck follow? One block of two warps, ROUNDS rounds over one buffer.
// arg: pattern number.
#include <cstdio>
#include <cstdlib>
typedef unsigned u32; typedef unsigned long long u64;
__device__ u32 sa(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void init(u64* b, u32 n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(sa(b)), "r"(n) : "memory"); }
__device__ void arrive(u64* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(sa(b)) : "memory"); }
__device__ void noinc(u64* b) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(sa(b)) : "memory"); }
__device__ void wait(u64* b, u32 parity) {
  u32 ok = 0;
  while (!ok) asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0,1,0,p;}" : "=r"(ok) : "r"(sa(b)), "r"(parity) : "memory");
}
__device__ void cpasync(void* to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(sa(to)), "l"(from) : "memory"); }
constexpr int ROUNDS = 8;
// WRITE: 0 st.shared, 1 cp.async. FULL: 0 each lane arrives, 1 syncwarp and lane 0, 2 cp.async noinc by each lane, 3 wait_all, syncwarp, lane 0; 4 wait_all, each lane
// EMPTY: 0 each lane, 1 syncwarp and lane 0. READ: 0 ld.shared same lane's 16 bytes rotated by one lane, 1 ldmatrix
// SLOTS: of the buffer. LATE: the reader's data is used only after its release (no wait for the load).
template <int WRITE, int FULL, int EMPTY, int READ, int SLOTS>
__global__ void k(const uint4* in, u32* out) {
  __shared__ alignas(128) uint4 buffer[SLOTS][32];
  __shared__ u64 full[SLOTS], empty[SLOTS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x < SLOTS) { init(&full[threadIdx.x], (FULL == 0 || FULL == 2 || FULL == 4) ? 32 : 1); init(&empty[threadIdx.x], EMPTY == 0 ? 32 : 1); }
  __syncthreads();
  u32 sum = 0;
  for (int r = 0; r < ROUNDS; ++r) {
    const int s = r % SLOTS; const u32 ph = r / SLOTS % 2;
    if (warp == 0) {
      wait(&empty[s], ph ^ 1);
      if (WRITE == 0) buffer[s][lane] = in[lane + r]; else cpasync(&buffer[s][lane], in + lane + r);
      if (FULL == 3 || FULL == 4) asm volatile("cp.async.wait_all;" ::: "memory");
      if (FULL == 0 || FULL == 4) arrive(&full[s]);
      else if (FULL == 2) noinc(&full[s]);
      else { __syncwarp(); if (lane == 0) arrive(&full[s]); }
    } else {
      wait(&full[s], ph);
      if (READ == 0) { uint4 v = buffer[s][(lane + 1) % 32]; sum += v.x + v.w; }
      else { u32 a, b, c, d; asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(sa(&buffer[s][lane])) : "memory"); sum += a + b + c + d; }
      if (EMPTY == 0) arrive(&empty[s]); else { __syncwarp(); if (lane == 0) arrive(&empty[s]); }
    }
  }
  if (WRITE == 1) asm volatile("cp.async.wait_all;" ::: "memory");
  if (warp == 1) out[lane] = sum;
}
int main(int argc, char** argv) {
  uint4* in; u32* out; cudaMalloc(&in, 4096); cudaMemset(in, 1, 4096); cudaMalloc(&out, 128);
  int p = atoi(argv[1]);
  const char* n = "";
#define P(i, text, ...) case i: n = text; k<__VA_ARGS__><<<1, 64>>>(in, out); break;
  switch (p) {
    P(1, "st, each lane arrives; each lane gives back", 0, 0, 0, 0, 2)
    P(2, "st, syncwarp + lane 0 arrives; each lane gives back", 0, 1, 0, 0, 2)
    P(3, "st, each lane arrives; syncwarp + lane 0 gives back", 0, 0, 1, 0, 2)
    P(4, "st, lane 0 both ways", 0, 1, 1, 0, 2)
    P(5, "cp.async, noinc; each lane gives back", 1, 2, 0, 0, 2)
    P(6, "cp.async, noinc; lane 0 gives back", 1, 2, 1, 0, 2)
    P(7, "cp.async, wait, each lane arrives; each lane gives back", 1, 4, 0, 0, 2)
    P(8, "cp.async, wait, lane 0 arrives; each lane gives back", 1, 3, 0, 0, 2)
    P(9, "cp.async, noinc, ldmatrix; each lane gives back", 1, 2, 0, 1, 2)
    P(10, "cp.async, noinc, ldmatrix; lane 0 gives back", 1, 2, 1, 1, 2)
    P(11, "st, each lane, one slot", 0, 0, 0, 0, 1)
    P(12, "st, lane 0 both, one slot", 0, 1, 1, 0, 1)
  }
  printf("pattern %d (%s): %s\n", p, n, cudaGetErrorString(cudaDeviceSynchronize()));
}
