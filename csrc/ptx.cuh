// PTX of sm_90a that the kernels are written in: barriers, asynchronous copies, warpgroup matrix products.
//
// No toolkit header: NVRTC compiles these files as they are.

#pragma once

#include "params.h"

// A checked build traps after so many tries of a microsecond at one barrier instead of hanging. Tries, not time: a process
// whose turn on the GPU is over waits too.
#ifndef TREEATTN_TRAP_AFTER
#define TREEATTN_TRAP_AFTER 0
#endif

namespace treeattn {

struct Bf16 {};
struct Fp16 {};
struct E4m3 {};
struct E5m2 {};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Ends the grid with an error.
__device__ __forceinline__ void trap() { asm volatile("trap;"); }

// Thread of its block, of its warpgroup; blocks of the grid. Read anew each time: a value that is kept would hold a register
// where there are few.
__device__ __forceinline__ u32 thread_in_block() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
__device__ __forceinline__ u32 thread_in_group() { return thread_in_block() % 128; }
__device__ __forceinline__ u32 blocks_of_grid() {
  u32 blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}

// What is not so on the way to the first keys: code elsewhere, so that the way is straight and its instructions are there.
__device__ __forceinline__ bool seldom(bool condition) { return __builtin_expect(condition, false); }

// Lane 0's number, which the compiler then knows to be the same in all lanes.
template <class T>
__device__ __forceinline__ T uniform(T number) {
  return __shfl_sync(~0u, number, 0);
}

// --- barriers -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 times) {
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared::cta.b64 state, [%0], %1;\n\t}" ::"r"(barrier), "r"(times)
               : "memory");
}

// Arrive once, and let the barrier wait for so many bytes of tensor copies.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool barrier_passed(u32 barrier, u32 parity) {
  u32 passed;
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed != 0;
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
#if TREEATTN_TRAP_AFTER > 0
  asm volatile(
      "{\n\t.reg .pred p, q;\n\t.reg .u32 tries;\n\t"
      "mov.u32 tries, 0;\n"
      "again%=:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1, 1000;\n\t"
      "@p bra passed%=;\n\t"
      "add.u32 tries, tries, 1;\n\t"
      "setp.eq.u32 q, tries, %2;\n\t"
      "@q trap;\n\t"
      "bra again%=;\n"
      "passed%=:\n\t}" ::"r"(barrier), "r"(parity), "n"(TREEATTN_TRAP_AFTER)
      : "memory");
#else
  while (!barrier_passed(barrier, parity)) {
  }
#endif
}

// What this thread has written to shared memory (cp.async too, once waited for) is seen by wgmma from here on; and what it
// has read may be overwritten by tensor copies. An arrival alone does not wait for loads, and tensor copies do not queue
// behind them: where loads are held up (stores of other warps that miss the TLB), they would read what comes next.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- asynchronous copies --------------------------------------------------------------------------------------------

// What L2 gives up first and last when it needs room, as createpolicy says it for all of an access. K and V are read once a
// step; parts of rows that are to be merged are wanted soon.
constexpr u64 EVICT_FIRST = 0x12F0000000000000, EVICT_LAST = 0x14F0000000000000;

// 16 bytes from global to shared memory past L1; `bytes` 0 reads nothing and writes zeros.
__device__ __forceinline__ void copy_async_16(u32 to, u64 from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// The same of K and V. (The policy is made for each copy: where a thread has 32 registers, two that hold it spill others.)
__device__ __forceinline__ void stream_async_16(u32 to, u64 from, u32 bytes) {
  asm volatile(
      "{\n\t.reg .b64 policy;\n\tcreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n\t"
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, policy;\n\t}" ::"r"(to), "l"(from), "r"(bytes)
      : "memory");
}

// Read a number from global memory in place, if it is there. Written so that it stays in one register: a copy of one to
// another waits for the load.
__device__ __forceinline__ void reload(u32& number, const u32* from, bool there) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t"
      "@p ld.global.nc.u32 %0, [%1];\n\t}"
      : "+r"(number)
      : "l"(from), "r"(static_cast<int>(there)));
}

// 16 bytes to shared memory.
__device__ __forceinline__ void store_shared_16(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// 16 bytes of shared memory.
__device__ __forceinline__ void load_shared_16(u32 (&to)[4], u32 from) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// Four 8 x 8 blocks of 16-bit numbers: `row` is of lane l row l % 8 of block l / 8. Lane l gets of each block row l / 4,
// columns 2 (l % 4) and the next.
__device__ __forceinline__ void load_blocks(u32* to, u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

// The same of columns: lane l gets of each block column l / 4, rows 2 (l % 4) and the next.
__device__ __forceinline__ void load_blocks_across(u32 (&to)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

// The other way: four 8 x 8 blocks to shared memory.
__device__ __forceinline__ void store_blocks(u32 row, const u32 (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(from[0]), "r"(from[1]),
               "r"(from[2]), "r"(from[3])
               : "memory");
}

// The same, where a lane has parts of columns: of each block column l / 4, rows 2 (l % 4) and the next.
__device__ __forceinline__ void store_blocks_across(u32 row, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// Two blocks, whose rows lanes 0 to 15 name.
__device__ __forceinline__ void store_blocks_across(u32 row, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(a), "r"(b) : "memory");
}

// Parts of rows to global memory, where another block reads them soon: not to be written back by L2 meanwhile.
__device__ __forceinline__ void store_four(float* to, float a, float b, float c, float d) {
  asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d),
               "l"(EVICT_LAST)
               : "memory");
}

// The same of 16 bytes whose numbers, and then a word that is not there before, other blocks see all at once or not at all: no
// fence is needed.
__device__ __forceinline__ void store_at_once(void* to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile(
      "{\n\t.reg .b64 low, high;\n\t.reg .b128 all;\n\tmov.b64 low, {%1, %2};\n\tmov.b64 high, {%3, %4};\n\t"
      "mov.b128 all, {low, high};\n\tst.relaxed.gpu.global.L2::cache_hint.b128 [%0], all, %5;\n\t}" ::"l"(to),
      "r"(a), "r"(b), "r"(c), "r"(d), "l"(EVICT_LAST)
      : "memory");
}

// Of 8 bytes.
__device__ __forceinline__ void store_at_once(void* to, u32 a, u32 b) {
  asm volatile(
      "{\n\t.reg .b64 all;\n\tmov.b64 all, {%1, %2};\n\tst.relaxed.gpu.global.L2::cache_hint.b64 [%0], all, %3;\n\t}" ::"l"(to),
      "r"(a), "r"(b), "l"(EVICT_LAST)
      : "memory");
}

// None of this thread's copies is on its way.
__device__ __forceinline__ void copy_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// This thread's copies since the last call are one group.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// No more than PENDING groups, the newest, are on their way.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// This thread's copies so far arrive at the barrier when they are there, as one arrival.
__device__ __forceinline__ void copy_async_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// A box of a tensor map to shared memory, in the map's swizzle, by one thread: 64 dims from `dim` on of slots from `slot`
// on, of a head and a page. The barrier is told of its bytes.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, i32 dim, i32 slot, i32 head, i32 page,
                                         u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to), "l"(&map), "r"(dim), "r"(slot), "r"(head), "r"(page),
      "r"(barrier), "l"(EVICT_FIRST)
      : "memory");
}

// The same of a map whose boxes have all panels of their slots, side by side for each 8 slots: panels from number
// `panel` on, eights of slots from number `group` on.
__device__ __forceinline__ void copy_panels(u32 to, const TensorMap& map, i32 panel, i32 group, i32 page, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %2, %3, %4, %5}], [%6], %7;" ::"r"(to), "l"(&map), "r"(0), "r"(panel), "r"(group), "r"(page),
      "r"(barrier), "l"(EVICT_FIRST)
      : "memory");
}

__device__ __forceinline__ void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// --- registers and dependent launches -------------------------------------------------------------------------------

template <int COUNT>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// The next kernel of the stream may be launched as soon as every block has come here.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// The kernels before in the stream are done, and what they have written is there.
__device__ __forceinline__ void wait_prerequisites() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// --- between blocks -------------------------------------------------------------------------------------------------

// Add to a word; what this block has written before is seen by whom the sum is. Returns the word as it was.
__device__ __forceinline__ u32 add_release(u32* word, u32 number) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(number) : "memory");
  return before;
}

__device__ __forceinline__ u32 add_relaxed(u32* word, u32 number) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(number) : "memory");
  return before;
}

// The same, of which nobody waits for an answer.
__device__ __forceinline__ void add_only(u32* word, u32 number) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(number) : "memory");
}

// What this thread knows to be written is there for whoever sees what it writes behind this.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ u32 load_acquire(const u32* word) {
  u32 number;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(number) : "l"(word) : "memory");
  return number;
}

// Not from L1, which may have what was there before.
__device__ __forceinline__ u32 load_relaxed(const u32* word) {
  u32 number;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(number) : "l"(word) : "memory");
  return number;
}

// Add one to a word that is 0 behind `last`. Returns the word as it was.
__device__ __forceinline__ u32 count_relaxed(u32* word, u32 last) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(last) : "memory");
  return before;
}

__device__ __forceinline__ void store_relaxed(u32* word, u32 number) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(number) : "memory");
}

// What other blocks have stored at once, where `wanted`. (A branch, which becomes a predicate: numbers that the asm took and
// gave back would be copied to four registers in a row and from there.)
__device__ __forceinline__ void load_at_once(u32 (&to)[4], const void* from, bool wanted) {
  if (!wanted) return;
  asm volatile(
      "{\n\t.reg .b64 low, high;\n\t.reg .b128 all;\n\tld.relaxed.gpu.global.b128 all, [%4];\n\t"
      "mov.b128 {low, high}, all;\n\tmov.b64 {%0, %1}, low;\n\tmov.b64 {%2, %3}, high;\n\t}"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
      : "l"(from)
      : "memory");
}

__device__ __forceinline__ void load_at_once(u32 (&to)[2], const void* from, bool wanted) {
  if (!wanted) return;
  asm volatile("{\n\t.reg .b64 all;\n\tld.relaxed.gpu.global.b64 all, [%2];\n\tmov.b64 {%0, %1}, all;\n\t}"
               : "=r"(to[0]), "=r"(to[1])
               : "l"(from)
               : "memory");
}

// Whether to look again for what another block is to write, which takes half a microsecond at least: blocks that all run end
// within fewer looks, but for the longest calls.
__device__ __forceinline__ bool patient(u32 looks) { return looks < 4096; }

// --- numbers --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float of_half(unsigned short bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}

// A number of a list in global memory: 0 float32, 1 float16, 2 bfloat16, 3 float64.
__device__ __forceinline__ float number_at(const void* list, i64 index, i32 type) {
  if (type == 0) return __ldg(static_cast<const float*>(list) + index);
  if (type == 3) return static_cast<float>(__ldg(static_cast<const double*>(list) + index));
  const unsigned short bits = __ldg(static_cast<const unsigned short*>(list) + index);
  return type == 1 ? of_half(bits) : __int_as_float(static_cast<i32>(bits) << 16);
}

// Two numbers in 16 bits each, the first in the low half.
template <class T>
__device__ __forceinline__ u32 pack(float low, float high);

template <>
__device__ __forceinline__ u32 pack<Bf16>(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

template <>
__device__ __forceinline__ u32 pack<Fp16>(float low, float high) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Four FP8 numbers as float16, which they are: the first two, and the last two.
template <class Format>
__device__ __forceinline__ void widen(u32 four, u32& first, u32& last);

template <>
__device__ __forceinline__ void widen<E4m3>(u32 four, u32& first, u32& last) {
  asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\t"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n\tcvt.rn.f16x2.e4m3x2 %1, high;\n\t}"
      : "=r"(first), "=r"(last)
      : "r"(four));
}

template <>
__device__ __forceinline__ void widen<E5m2>(u32 four, u32& first, u32& last) {
  first = __byte_perm(four, 0, 0x1404);
  last = __byte_perm(four, 0, 0x3424);
}

// The same: the first and the third, and the second and the fourth.
template <class Format>
__device__ __forceinline__ void widen_across(u32 four, u32& even, u32& odd) {
  widen<Format>(__byte_perm(four, 0, 0x3120), even, odd);
}

template <>
__device__ __forceinline__ void widen_across<E5m2>(u32 four, u32& even, u32& odd) {
  even = __byte_perm(four, 0, 0x2404);
  odd = __byte_perm(four, 0, 0x3414);
}

// Two float16 as numbers of T, in place of each other.
template <class T>
__device__ __forceinline__ u32 narrow_halves(u32 both) {
  return pack<T>(of_half(both & 0xFFFF), of_half(both >> 16));
}
template <>
__device__ __forceinline__ u32 narrow_halves<Fp16>(u32 both) {
  return both;
}

// The same number, which the compiler does not know to be: what is made of it is not kept for elsewhere.
__device__ __forceinline__ float made_anew(float number) {
  asm volatile("" : "+f"(number));
  return number;
}

// --- warpgroup matrix products --------------------------------------------------------------------------------------

// A warpgroup's registers (accumulators, A) are as its threads left them: before the first product that uses them.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// So many threads wait for each other at named barrier `id`.
template <int THREADS>
__device__ __forceinline__ void threads_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// The same, and whether the condition holds for one of them.
template <int THREADS>
__device__ __forceinline__ bool threads_any(int id, bool condition) {
  u32 any;
  asm volatile(
      "{\n\t.reg .pred p, q;\n\tsetp.ne.b32 p, %3, 0;\n\t"
      "bar.red.or.pred q, %1, %2, p;\n\t"
      "selp.u32 %0, 1, 0, q;\n\t}"
      : "=r"(any)
      : "r"(id), "n"(THREADS), "r"(static_cast<int>(condition))
      : "memory");
  return any != 0;
}

// The compiler must not move a use of registers that a product writes across this.
template <int COUNT>
__device__ __forceinline__ void pin(float (&values)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Nor make registers that a product reads behind this, where products are on their way.
template <int COUNT>
__device__ __forceinline__ void pin(u32 (&values)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

// Shared memory operand of a product in the 128-byte swizzle. The tile begins at a multiple of 1024 bytes; `stride` is
// from 8 rows of 128 bytes to the next 8, `leading` from 64 columns to the next 64 where columns are the outer axis of
// the product (V), and not read where they are summed over (K).
__device__ __forceinline__ u64 operand(u32 address, u32 leading, u32 stride) {
  return static_cast<u64>((address & 0x3FFFF) >> 4) | static_cast<u64>(leading >> 4) << 16 |
         static_cast<u64>(stride >> 4) << 32 | static_cast<u64>(1) << 62;
}

// d[64, N] (+)= a[64, 16] b[16, N]: `a` in registers, `b` in shared memory. ACROSS: a row of shared memory is one of
// the 16 (V: a key), not one of the N (K). Thread t holds of `d` rows t / 32 * 16 + t % 32 / 4 + {0, 8}, columns
// 8 j + 2 (t % 4) + {0, 1} at d[4 j + {0, 1}] and, of the lower row, d[4 j + {2, 3}]; of `a` the same places for j of 0
// and 1, in the order a[0] row 0 j 0, a[1] row 8 j 0, a[2] row 0 j 1, a[3] row 8 j 1. `run_shared`: `a` in shared memory,
// rows of 16 numbers that are summed over.
template <class T, int N, int ACROSS>
struct Product;

#define TREEATTN_F8(d, i)                                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

#define TREEATTN_PRODUCT(TYPE, NAME)                                                                               \
  template <int ACROSS>                                                                                            \
  struct Product<TYPE, 64, ACROSS> {                                                                               \
    static __device__ __forceinline__ void run(float (&d)[32], const u32* a, u64 b, int accumulate) {              \
      asm volatile(                                                                                                \
          "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %37, 0;\n\t"                                                       \
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME                                              \
          " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
          "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n\t}"       \
          : TREEATTN_F8(d, 0), TREEATTN_F8(d, 8), TREEATTN_F8(d, 16), TREEATTN_F8(d, 24)                           \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(ACROSS));                     \
    }                                                                                                              \
    static __device__ __forceinline__ void run_shared(float (&d)[32], u64 a, u64 b, int accumulate) {              \
      asm volatile(                                                                                                \
          "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %34, 0;\n\t"                                                       \
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME                                              \
          " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
          "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, %35;\n\t}"                     \
          : TREEATTN_F8(d, 0), TREEATTN_F8(d, 8), TREEATTN_F8(d, 16), TREEATTN_F8(d, 24)                           \
          : "l"(a), "l"(b), "r"(accumulate), "n"(ACROSS));                                                         \
    }                                                                                                              \
  };                                                                                                               \
  template <int ACROSS>                                                                                            \
  struct Product<TYPE, 128, ACROSS> {                                                                              \
    static __device__ __forceinline__ void run(float (&d)[64], const u32* a, u64 b, int accumulate) {              \
      asm volatile(                                                                                                \
          "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %69, 0;\n\t"                                                       \
          "wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME                                             \
          " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
          "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "   \
          "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "   \
          "%62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n\t}"                                               \
          : TREEATTN_F8(d, 0), TREEATTN_F8(d, 8), TREEATTN_F8(d, 16), TREEATTN_F8(d, 24), TREEATTN_F8(d, 32),      \
            TREEATTN_F8(d, 40), TREEATTN_F8(d, 48), TREEATTN_F8(d, 56)                                             \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(ACROSS));                     \
    }                                                                                                              \
    static __device__ __forceinline__ void run_shared(float (&d)[64], u64 a, u64 b, int accumulate) {              \
      asm volatile(                                                                                                \
          "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"                                                       \
          "wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME                                             \
          " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
          "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "   \
          "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "   \
          "%62, %63}, %64, %65, p, 1, 1, 0, %67;\n\t}"                                                             \
          : TREEATTN_F8(d, 0), TREEATTN_F8(d, 8), TREEATTN_F8(d, 16), TREEATTN_F8(d, 24), TREEATTN_F8(d, 32),      \
            TREEATTN_F8(d, 40), TREEATTN_F8(d, 48), TREEATTN_F8(d, 56)                                             \
          : "l"(a), "l"(b), "r"(accumulate), "n"(ACROSS));                                                         \
    }                                                                                                              \
  };                                                                                                               \
  template <int ACROSS>                                                                                            \
  struct Product<TYPE, 256, ACROSS> {                                                                              \
    static __device__ __forceinline__ void run(float (&d)[128], const u32* a, u64 b, int accumulate) {             \
      asm volatile(                                                                                                \
          "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %133, 0;\n\t"                                                      \
          "wgmma.mma_async.sync.aligned.m64n256k16.f32." NAME "." NAME                                             \
          " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "      \
          "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "        \
          "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "        \
          "%59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "        \
          "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, "        \
          "%97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, "          \
          "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, {%128, "     \
          "%129, %130, %131}, %132, p, 1, 1, %134;\n\t}"                                                           \
          : TREEATTN_F8(d, 0), TREEATTN_F8(d, 8), TREEATTN_F8(d, 16), TREEATTN_F8(d, 24), TREEATTN_F8(d, 32),      \
            TREEATTN_F8(d, 40), TREEATTN_F8(d, 48), TREEATTN_F8(d, 56), TREEATTN_F8(d, 64), TREEATTN_F8(d, 72),    \
            TREEATTN_F8(d, 80), TREEATTN_F8(d, 88), TREEATTN_F8(d, 96), TREEATTN_F8(d, 104), TREEATTN_F8(d, 112),  \
            TREEATTN_F8(d, 120)                                                                                    \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(ACROSS));                     \
    }                                                                                                              \
  };

TREEATTN_PRODUCT(Bf16, "bf16")
TREEATTN_PRODUCT(Fp16, "f16")
#undef TREEATTN_PRODUCT

#define TREEATTN_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])

// Where rows of queries are the columns of a product: as many as there are, in eights.
#define TREEATTN_PRODUCT(TYPE, NAME)                                                                               \
  template <int ACROSS>                                                                                            \
  struct Product<TYPE, 40, ACROSS> {                                                                               \
    static __device__ __forceinline__ void run(float (&d)[20], const u32* a, u64 b, int accumulate) {              \
      asm volatile(                                                                                                \
          "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %25, 0;\n\t"                                                       \
          "wgmma.mma_async.sync.aligned.m64n40k16.f32." NAME "." NAME                                              \
          " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19},"           \
          " {%20, %21, %22, %23}, %24, p, 1, 1, %26;\n\t}"                                                         \
          : TREEATTN_F8(d, 0), TREEATTN_F8(d, 8), TREEATTN_F4(d, 16)                                               \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(ACROSS));                     \
    }                                                                                                              \
  };                                                                                                               \
  template <int ACROSS>                                                                                            \
  struct Product<TYPE, 72, ACROSS> {                                                                               \
    static __device__ __forceinline__ void run(float (&d)[36], const u32* a, u64 b, int accumulate) {              \
      asm volatile(                                                                                                \
          "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %41, 0;\n\t"                                                       \
          "wgmma.mma_async.sync.aligned.m64n72k16.f32." NAME "." NAME                                              \
          " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
          "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35}, {%36, %37, %38, %39}, %40,"      \
          " p, 1, 1, %42;\n\t}"                                                                                    \
          : TREEATTN_F8(d, 0), TREEATTN_F8(d, 8), TREEATTN_F8(d, 16), TREEATTN_F8(d, 24), TREEATTN_F4(d, 32)       \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(ACROSS));                     \
    }                                                                                                              \
  };

TREEATTN_PRODUCT(Bf16, "bf16")
TREEATTN_PRODUCT(Fp16, "f16")
#undef TREEATTN_PRODUCT
#undef TREEATTN_F4
#undef TREEATTN_F8

}  // namespace treeattn
