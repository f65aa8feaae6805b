// csrc/ptx.cuh for the host: the same functions, each GPU thread a fiber. A block runs until it waits for another.
//
// For tests of the kernels' logic without a GPU: indices, phases of barriers, masks, the walk, what is copied when. A
// copy happens when it is waited for, no earlier; so does a product, of which each warp reads what is in shared memory for
// itself. (Registers are read when it is issued.) Operands are read through their descriptors, by the canonical layouts of
// the PTX manual.

#pragma once

#include <csetjmp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include <ucontext.h>

#define __device__
#define __global__ inline  // no code for a kernel that nobody calls
#define __shared__
#define __forceinline__ inline
#define __align__(bytes)
#define __launch_bounds__(...)
#define __grid_constant__

#include "params.h"

struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx, gridDim;

namespace treeattn {

struct Bf16 {};
struct Fp16 {};
struct E4m3 {};
struct E5m2 {};

alignas(1024) unsigned char shared_bytes[227 * 1024];

// --- fibers ---------------------------------------------------------------------------------------------------------

constexpr int MOST_THREADS = 512, STACK = 128 * 1024;

struct Copy {
  u32 to;
  u64 from;
  u32 bytes;
};

// A product that has been issued: what this thread's part of it is made of.
struct Pending {
  void (*perform)(const Pending&);
  float* d;
  u64 in_shared, b;
  float a[2][16];  // of its two rows, from registers
  int accumulate;
};

struct Fiber {
  ucontext_t context;
  jmp_buf here;
  std::unique_ptr<char[]> stack;
  bool started = false, done = false;
  u32 waits_at = 0;  // a barrier
  std::vector<Copy> open;
  std::vector<size_t> copied;  // copies behind each commit
  std::vector<Pending> products;
  std::vector<size_t> groups;  // products behind each commit
  size_t issued = 0;           // products so far
};

// Threads that meet: each leaves a value and goes on once all have.
template <int SIZE, class Value>
struct Meeting {
  int arrived = 0;
  u32 held = 0, kind = 0;
  Value left[2][SIZE];

  const Value* meet(int me, const Value& value, u32 what);
};

// What a thread brings to a product: its numbers of A, or a descriptor of it, and a descriptor of B.
struct Share {
  float a[4][2];
  u64 in_shared, b;
};

struct Named {
  int arrived = 0, threads = 0;
  u32 held = 0;
  bool says[2] = {};  // somebody, in this meeting and in the one before
};

// A multiprocessor: what a block has while it runs, and its shared memory while another runs.
struct Machine {
  Fiber fibers[MOST_THREADS];
  Meeting<32, u64> warps[MOST_THREADS / 32];
  Meeting<32, Share> shares[MOST_THREADS / 32];
  std::vector<Share> issued[MOST_THREADS / 128];  // products of a warpgroup, in order
  Named named[17];  // the last is of __syncthreads
  std::vector<unsigned char> memory;
  u32 block, round = 0, sloth[MOST_THREADS / 32] = {};
  bool waits = false;  // for another block
};

inline Machine* machine;
inline jmp_buf scheduler;
inline int running;
inline void (*body)();
inline u32 turn;       // of a warp: the others stand still
inline long progress;  // barriers passed and meetings held; none in a whole round of fibers means that all hang

inline void enter() {
  body();
  machine->fibers[running].done = true;
  _longjmp(scheduler, 1);
}

inline void yield() {
  if (_setjmp(machine->fibers[running].here) == 0) _longjmp(scheduler, 1);
  threadIdx.x = running;
}

// Warps come to run at random, some of them seldom for a while: what must not depend on who is ahead shows here.
inline u32 schedule_seed;
inline u32 draw() {
  schedule_seed = schedule_seed * 1664525 + 1013904223;
  return schedule_seed >> 16;
}

constexpr int MOST_IDLE_ROUNDS = 2000;  // without progress: all hang

inline void tell(int threads);

enum Outcome { DONE, WAITS, HANGS };

inline void prepare(Machine& made, u32 block, int threads) {
  made.block = block;
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = made.fibers[i];
    fiber.stack.reset(new char[STACK]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
}

// Run the machine's block until it is done, or waits for another.
inline Outcome run_block(int threads) {
  u32* sloth = machine->sloth;
  int idle_rounds = 0;
  blockIdx.x = machine->block;
  for (;; ++machine->round) {
    long before = progress;
    bool all = true;
    machine->waits = false;
    for (int warp = 0; warp < threads / 32; ++warp) {
      turn += 1;
      if (machine->round % 64 == 0) sloth[warp] = schedule_seed == 0 ? 0 : draw() % 4 == 0 ? 31 : draw() % 8;
      const bool rests = sloth[warp] != 0 && draw() % 32 < sloth[warp];
      for (int i = 32 * warp; i < 32 * warp + 32; ++i) {
        if (machine->fibers[i].done) continue;
        all = false;
        if (rests) continue;
        running = i;
        threadIdx.x = i;
        if (_setjmp(scheduler) == 0) {
          if (machine->fibers[i].started) _longjmp(machine->fibers[i].here, 1);
          machine->fibers[i].started = true;
          setcontext(&machine->fibers[i].context);
        }
        progress += machine->fibers[running].done;
      }
    }
    if (all) return DONE;
    if (machine->waits) progress = before;  // a look at what another block writes is none, though lanes meet for it
    idle_rounds = progress == before ? idle_rounds + 1 : 0;
    if (machine->waits && idle_rounds >= 8) return WAITS;
    if (idle_rounds == MOST_IDLE_ROUNDS) {
      tell(threads);
      return HANGS;
    }
  }
}

template <int SIZE, class Value>
const Value* Meeting<SIZE, Value>::meet(int me, const Value& value, u32 what) {
  const u32 mine = held;
  if (arrived == 0) kind = what;
  if (kind != what) {
    std::fprintf(stderr, "thread %d does %u where others do %u\n", running, what, kind);
    std::abort();
  }
  left[mine % 2][me] = value;
  if (++arrived == SIZE) {
    arrived = 0;
    held += 1;
    progress += 1;
  } else {
    while (held == mine) yield();
  }
  return left[mine % 2];
}

// At a barrier so many threads meet; another number at the same time is undefined on a chip.
inline bool named_meet(int id, int threads, bool says = false) {
  Named& at = machine->named[id];
  if (at.arrived != 0 && at.threads != threads) {
    std::fprintf(stderr, "barrier %d is waited at by %d and by %d threads\n", id, at.threads, threads);
    std::abort();
  }
  const u32 mine = at.held;
  at.threads = threads;
  if (at.arrived == 0) at.says[mine % 2] = false;
  at.says[mine % 2] |= says;
  if (++at.arrived == threads) {
    at.arrived = 0;
    at.held += 1;
    progress += 1;
  } else {
    while (at.held == mine) yield();
  }
  return at.says[mine % 2];
}

inline const u64* warp_meets(u64 value, u32 what) { return machine->warps[running / 32].meet(running % 32, value, what); }

}  // namespace treeattn

inline void __syncwarp() { treeattn::warp_meets(0, 1); }
extern int block_threads;
inline void __syncthreads() { treeattn::named_meet(16, block_threads); }
template <class T>
inline T __shfl_sync(unsigned, T value, unsigned lane) {
  treeattn::u64 bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = treeattn::warp_meets(bits, 2)[lane % 32];
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
inline float __shfl_xor_sync(unsigned, float value, unsigned mask) {
  return __shfl_sync(~0u, value, treeattn::running % 32 ^ mask);
}
inline bool __any_sync(unsigned, bool value) {
  const treeattn::u64* all = treeattn::warp_meets(value, 3);
  bool any = false;
  for (int i = 0; i < 32; ++i) any |= all[i] != 0;
  return any;
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  const treeattn::u64* all = treeattn::warp_meets(value, 4);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(all[i]);
  return bits;
}
inline bool __all_sync(unsigned, bool value) { return !__any_sync(~0u, !value); }
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  const treeattn::u64* all = treeattn::warp_meets(value, 10);
  unsigned sum = 0;
  for (int i = 0; i < 32; ++i) sum += static_cast<unsigned>(all[i]);
  return sum;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const treeattn::u64* all = treeattn::warp_meets(value, 9);
  unsigned most = 0;
  for (int i = 0; i < 32; ++i) most = all[i] > most ? static_cast<unsigned>(all[i]) : most;
  return most;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const treeattn::u64 both = a | static_cast<treeattn::u64>(b) << 32;
  unsigned made = 0;
  for (int i = 0; i < 4; ++i) made |= static_cast<unsigned>(both >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return made;
}
inline float __uint_as_float(unsigned bits) {
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}
inline unsigned __float_as_uint(float number) {
  unsigned bits;
  std::memcpy(&bits, &number, 4);
  return bits;
}
inline float __int_as_float(int bits) {
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const treeattn::u64* all = treeattn::warp_meets(value, 8);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(all[i] != 0) << i;
  return bits;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<treeattn::u64>(a) * b >> 32; }
inline int __ffs(unsigned value) { return __builtin_ffs(static_cast<int>(value)); }
template <class T>
inline T __ldg(const T* from) {
  return *from;
}

namespace treeattn {

[[noreturn]] inline void trap() {
  std::fprintf(stderr, "trap\n");
  std::abort();
}
inline bool seldom(bool condition) { return condition; }
inline u32 thread_in_block() { return running; }
inline u32 thread_in_group() { return running % 128; }
inline u32 blocks_of_grid() { return gridDim.x; }
inline u32 shared_address(const void* pointer) {
  return static_cast<u32>(static_cast<const unsigned char*>(pointer) - shared_bytes);
}

template <class T>
inline T uniform(T number) {
  return __shfl_sync(~0u, number, 0);
}

// A barrier: arrivals that it takes, those that are missing, bytes that are, and how often it has completed.
struct Barrier {
  u32 wanted : 10, missing : 10, completed : 12;
  i32 bytes;
};

inline Barrier& barrier_at(u32 address) { return *reinterpret_cast<Barrier*>(shared_bytes + address); }
inline void barrier_init(u32 barrier, u32 arrivals) {
  barrier_at(barrier) = {arrivals, arrivals, 0, 0};
}
inline void barrier_turn(Barrier& at) {
  if (at.missing != 0 || at.bytes != 0) return;
  at.missing = at.wanted;
  at.completed += 1;
  progress += 1;
}
inline void barrier_arrive(u32 barrier, u32 times = 1) {
  Barrier& at = barrier_at(barrier);
  if (times > at.missing) {
    std::fprintf(stderr, "%u arrivals where %d are missing\n", times, at.missing);
    std::abort();
  }
  at.missing -= times;
  barrier_turn(at);
}
inline void barrier_expect(u32 barrier, u32 bytes) {
  barrier_at(barrier).bytes += bytes;
  barrier_arrive(barrier);
}
inline void barrier_wait(u32 barrier, u32 parity) {
  machine->fibers[running].waits_at = barrier;
  while (barrier_at(barrier).completed % 2 == parity) yield();
  machine->fibers[running].waits_at = 0;
}
inline bool barrier_passed(u32 barrier, u32 parity) { return barrier_at(barrier).completed % 2 != parity; }
// At a standstill: where the first lane of each warp waits, and what is missing there.
inline void tell(int threads) {
  for (int i = 0; i < threads; i += 32) {
    const u32 at = machine->fibers[i].waits_at;
    std::fprintf(stderr, "warp %d: done %d, barrier at byte %u: %d of %d missing, completed %d, %d bytes\n", i / 32,
                 machine->fibers[i].done, at, barrier_at(at).missing, barrier_at(at).wanted, barrier_at(at).completed,
                 barrier_at(at).bytes);
  }
}
inline void fence_async_proxy() {}

inline void copy_now(const Copy& copy) {
  if (copy.bytes != 0)
    std::memcpy(shared_bytes + copy.to, reinterpret_cast<const void*>(copy.from), 16);
  else
    std::memset(shared_bytes + copy.to, 0, 16);
}
inline void copy_async_16(u32 to, u64 from, u32 bytes) { machine->fibers[running].open.push_back({to, from, bytes}); }
inline void stream_async_16(u32 to, u64 from, u32 bytes) { copy_async_16(to, from, bytes); }
// The first copies that are on their way.
inline void copies_come(size_t count) {
  Fiber& own = machine->fibers[running];
  for (size_t i = 0; i < count; ++i) copy_now(own.open[i]);
  own.open.erase(own.open.begin(), own.open.begin() + count);
  for (size_t& behind : own.copied) behind -= behind < count ? behind : count;
}
inline void copy_async_wait_all() { copies_come(machine->fibers[running].open.size()); }
inline void copy_async_commit() {
  Fiber& own = machine->fibers[running];
  own.copied.push_back(own.open.size());
}
template <int PENDING>
inline void copy_async_wait() {
  Fiber& own = machine->fibers[running];
  if (own.copied.size() <= PENDING) return;
  const size_t count = own.copied[own.copied.size() - 1 - PENDING];
  own.copied.erase(own.copied.begin(), own.copied.end() - PENDING);
  copies_come(count);
}
// The words of a map here: address, shape (5, innermost first), byte strides (4), box (5), and 256 times its rank plus
// the bytes of a number. A box comes number by number, its innermost axis first, 128 bytes long; what lies
// outside of the shape is 0. The swizzle is of address bits.
template <int RANK>
inline void copy_tensor(u32 to, const TensorMap& map, const i32 (&first)[RANK], u32 barrier) {
  const u64 *shape = map.words + 1, *strides = map.words + 6, *box = map.words + 10;
  const u64 bytes = map.words[15] % 256, rank = map.words[15] / 256;
  if (rank != RANK || box[0] * bytes != 128 || to % 128 != 0) {
    std::fprintf(stderr, "a copy of %d axes to byte %u, of a map of %llu and boxes of %llu bytes\n", RANK, to, rank,
                 box[0] * bytes);
    std::abort();
  }
  u64 rows = 1;
  for (int axis = 1; axis < RANK; ++axis) rows *= box[axis];
  for (u64 row = 0; row < rows; ++row) {
    const char* from = reinterpret_cast<const char*>(map.words[0]);
    bool inside = true;
    u64 left = row;
    for (int axis = 1; axis < RANK; ++axis) {
      const i64 at = first[axis] + static_cast<i64>(left % box[axis]);
      left /= box[axis];
      inside &= 0 <= at && at < static_cast<i64>(shape[axis]);
      from += at * static_cast<i64>(strides[axis - 1]);
    }
    for (u64 column = 0; column < box[0]; ++column) {
      const i64 at = first[0] + static_cast<i64>(column);
      unsigned short number = 0;
      if (inside && 0 <= at && at < static_cast<i64>(shape[0])) std::memcpy(&number, from + at * bytes, bytes);
      u32 place = to + row * 128 + column * bytes;
      place ^= (place >> 7 & 7) << 4;
      std::memcpy(shared_bytes + place, &number, bytes);
    }
  }
  Barrier& at = barrier_at(barrier);
  at.bytes -= rows * 128;
  barrier_turn(at);
}
inline void copy_box(u32 to, const TensorMap& map, i32 dim, i32 slot, i32 head, i32 page, u32 barrier) {
  copy_tensor<4>(to, map, {dim, slot, head, page}, barrier);
}
inline void copy_panels(u32 to, const TensorMap& map, i32 panel, i32 group, i32 page, u32 barrier) {
  copy_tensor<5>(to, map, {0, 0, panel, group, page}, barrier);
}
inline void prefetch(const TensorMap&) {}
inline void copy_async_arrive(u32 barrier) {
  copy_async_wait_all();
  barrier_arrive(barrier);
}
inline void reload(u32& number, const u32* from, bool there) {
  if (there) number = *from;
}
inline void store_shared_16(u32 to, u32 a, u32 b, u32 c, u32 d) {
  const u32 all[4] = {a, b, c, d};
  std::memcpy(shared_bytes + to, all, 16);
}
inline void load_shared_16(u32 (&to)[4], u32 from) { std::memcpy(to, shared_bytes + from, 16); }
inline void load_blocks(u32* to, u32 row) {
  const u64* rows = warp_meets(row, 7);
  for (int block = 0; block < 4; ++block)
    std::memcpy(to + block, shared_bytes + rows[block * 8 + running % 32 / 4] + running % 4 * 4, 4);
}
inline void store_blocks(u32 row, const u32 (&from)[4]) {
  u32 rows[32];
  const u64* all = warp_meets(row, 8);
  for (int i = 0; i < 32; ++i) rows[i] = static_cast<u32>(all[i]);
  for (int block = 0; block < 4; ++block)
    std::memcpy(shared_bytes + rows[block * 8 + running % 32 / 4] + running % 4 * 4, from + block, 4);
}
// Lane l gets of each block column l / 4, rows 2 (l % 4) and the next.
inline void load_blocks_across(u32 (&to)[4], u32 row) {
  const u64* rows = warp_meets(row, 10);
  const int lane = running % 32;
  for (int block = 0; block < 4; ++block)
    for (int i = 0; i < 2; ++i)
      std::memcpy(reinterpret_cast<char*>(to + block) + 2 * i,
                  shared_bytes + rows[block * 8 + lane % 4 * 2 + i] + lane / 4 * 2, 2);
}
// Lane l has of each block row l / 4, columns 2 (l % 4) and the next; a row of memory becomes a column.
template <int COUNT>
inline void store_columns(u32 row, const u32 (&parts)[COUNT]) {
  u32 rows[32];
  const u64* all = warp_meets(row, 20 + COUNT);
  for (int i = 0; i < 32; ++i) rows[i] = static_cast<u32>(all[i]);
  const int lane = running % 32;
  for (int block = 0; block < COUNT; ++block)
    for (int i = 0; i < 2; ++i) {
      const unsigned short number = parts[block] >> 16 * i & 0xFFFF;
      std::memcpy(shared_bytes + rows[block * 8 + lane % 4 * 2 + i] + lane / 4 * 2, &number, 2);
    }
}
inline void store_blocks_across(u32 row, u32 a, u32 b, u32 c, u32 d) { store_columns<4>(row, {a, b, c, d}); }
inline void store_blocks_across(u32 row, u32 a, u32 b) { store_columns<2>(row, {a, b}); }
inline void store_at_once(void* to, u32 a, u32 b, u32 c, u32 d) {
  const u32 all[4] = {a, b, c, d};
  std::memcpy(to, all, 16);
}
inline void store_at_once(void* to, u32 a, u32 b) {
  const u32 all[2] = {a, b};
  std::memcpy(to, all, 8);
}
inline void store_four(float* to, float a, float b, float c, float d) {
  to[0] = a;
  to[1] = b;
  to[2] = c;
  to[3] = d;
}
template <int COUNT>
inline void take_registers() {}
template <int COUNT>
inline void give_registers() {}
inline void launch_dependents() {}
inline void wait_prerequisites() {}

// --- between blocks

inline u32 add_release(u32* word, u32 number) {
  const u32 before = *word;
  *word += number;
  progress += 1;
  return before;
}
inline u32 add_relaxed(u32* word, u32 number) { return add_release(word, number); }
inline void add_only(u32* word, u32 number) { add_release(word, number); }
inline void fence_gpu() {}
inline u32 load_acquire(const u32* word) {
  machine->waits = true;
  yield();
  return *word;
}
inline void store_relaxed(u32* word, u32 number) { *word = number; }
inline u32 load_relaxed(const u32* word) { return *word; }
inline u32 count_relaxed(u32* word, u32 last) {
  const u32 before = *word;
  *word = before >= last ? 0 : before + 1;
  progress += 1;
  return before;
}
// Somebody waits for what another block writes, mostly.
template <int COUNT>
void load_at_once(u32 (&to)[COUNT], const void* from, bool wanted) {
  if (!wanted) return;
  machine->waits = true;
  yield();
  std::memcpy(to, from, 4 * COUNT);
}
// Now and then a warp has no patience left.
inline bool patient(u32) { return uniform(schedule_seed == 0 || draw() % 64 != 0); }

inline float infinity() { return INFINITY; }
inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float reciprocal_approx(float x) { return 1 / x; }

template <class T>
float wide(unsigned short bits);
template <>
inline float wide<Fp16>(unsigned short bits) {
  _Float16 number;
  std::memcpy(&number, &bits, 2);
  return static_cast<float>(number);
}
template <>
inline float wide<Bf16>(unsigned short bits) {
  const u32 high = static_cast<u32>(bits) << 16;
  float number;
  std::memcpy(&number, &high, 4);
  return number;
}
template <class T>
unsigned short narrow(float number);
template <>
inline unsigned short narrow<Fp16>(float number) {
  const _Float16 half = static_cast<_Float16>(number);
  unsigned short bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
template <>
inline unsigned short narrow<Bf16>(float number) {
  u32 bits;
  std::memcpy(&bits, &number, 4);
  if (number != number) return 0x7FFF;
  return static_cast<unsigned short>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
template <class T>
inline u32 pack(float low, float high) {
  return narrow<T>(low) | static_cast<u32>(narrow<T>(high)) << 16;
}

inline float of_half(unsigned short bits) { return wide<Fp16>(bits); }

// FP8 numbers by the definition of their formats.
template <class Format>
inline float number_of(unsigned char bits);
template <>
inline float number_of<E4m3>(unsigned char bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  float number = exponent == 15 && fraction == 7 ? NAN
                 : exponent == 0                 ? std::ldexp(fraction, -9)
                                                 : std::ldexp(8 + fraction, exponent - 10);
  return bits & 0x80 ? -number : number;
}
template <>
inline float number_of<E5m2>(unsigned char bits) {
  const int exponent = bits >> 2 & 31, fraction = bits & 3;
  float number = exponent == 31 ? (fraction ? NAN : INFINITY)
                 : exponent == 0 ? std::ldexp(fraction, -16)
                                 : std::ldexp(4 + fraction, exponent - 17);
  return bits & 0x80 ? -number : number;
}
template <class Format>
inline void widen(u32 four, u32& first, u32& last) {
  u32 made[4];
  for (int i = 0; i < 4; ++i) made[i] = narrow<Fp16>(number_of<Format>(four >> 8 * i & 0xFF));
  first = made[0] | made[1] << 16;
  last = made[2] | made[3] << 16;
}
template <class Format>
inline void widen_across(u32 four, u32& even, u32& odd) {
  widen<Format>(__byte_perm(four, 0, 0x3120), even, odd);
}
template <class T>
inline u32 narrow_halves(u32 both) {
  return pack<T>(wide<Fp16>(both & 0xFFFF), wide<Fp16>(both >> 16));
}

inline float made_anew(float number) { return number; }

inline float number_at(const void* list, i64 index, i32 type) {
  if (type == 0) return static_cast<const float*>(list)[index];
  if (type == 3) return static_cast<float>(static_cast<const double*>(list)[index]);
  const unsigned short bits = static_cast<const unsigned short*>(list)[index];
  return type == 1 ? wide<Fp16>(bits) : wide<Bf16>(bits);
}

inline void wgmma_fence() {}
inline void wgmma_commit() {
  Fiber& own = machine->fibers[running];
  own.groups.push_back(own.products.size());
}
template <int PENDING>
inline void wgmma_wait() {
  Fiber& own = machine->fibers[running];
  if (own.groups.size() > PENDING) {
    const size_t count = own.groups[own.groups.size() - 1 - PENDING];
    for (size_t i = 0; i < count; ++i) own.products[i].perform(own.products[i]);
    own.products.erase(own.products.begin(), own.products.begin() + count);
    own.groups.erase(own.groups.begin(), own.groups.end() - PENDING);
    for (size_t& behind : own.groups) behind -= count;
  }
  warp_meets(0, 30);
}
template <int THREADS>
inline void threads_sync(int id) {
  named_meet(id, THREADS);
}
template <int THREADS>
inline bool threads_any(int id, bool says) {
  return named_meet(id, THREADS, says);
}
template <int COUNT>
inline void pin(float (&)[COUNT]) {}
template <int COUNT>
inline void pin(u32 (&)[COUNT]) {}

inline u64 operand(u32 address, u32 leading, u32 stride) {
  return static_cast<u64>((address & 0x3FFFF) >> 4) | static_cast<u64>(leading >> 4) << 16 |
         static_cast<u64>(stride >> 4) << 32 | static_cast<u64>(1) << 62;
}

// A number of an operand: `line` is its row of K-major tiles (K: a key), its column of the others (V: a dim).
template <class T>
inline float operand_number(u64 descriptor, int k, int line, bool across) {
  const u32 start = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4;
  const u32 stride = (descriptor >> 32 & 0x3FFF) << 4;
  u32 at = across ? start + line / 64 * leading + line % 64 * 2 + k / 8 * stride + k % 8 * 128
                  : start + line / 8 * stride + line % 8 * 128 + k * 2;
  at ^= (at >> 7 & 7) << 4;
  unsigned short bits;
  std::memcpy(&bits, shared_bytes + at, 2);
  return wide<T>(bits);
}

typedef float Four __attribute__((vector_size(16)));

// Operands of a product as floats, read once in a turn of a warp: B, and A where it is in shared memory.
struct Operands {
  u32 turn;
  u64 in_shared, of;
  void (*by)(const Pending&);
  float a[16][16];
  Four b[4][32][16];  // by thread of four and block of 8 columns: two numbers of B's row k, for both rows of A
};
inline Operands operands;

template <class T, int N, int ACROSS>
struct Product {
  static void read(const Pending& product) {
    Operands& to = operands;
    if (to.turn == turn && to.of == product.b && to.in_shared == product.in_shared && to.by == perform) return;
    to.turn = turn;
    to.of = product.b;
    to.in_shared = product.in_shared;
    to.by = perform;
    for (int column = 0; column < N; column += 2)
      for (int k = 0; k < 16; ++k) {
        const float one = operand_number<T>(product.b, k, column, ACROSS);
        const float other = operand_number<T>(product.b, k, column + 1, ACROSS);
        to.b[column % 8 / 2][column / 8][k] = Four{one, other, one, other};
      }
    if (product.in_shared == 0) return;
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < 16; ++k)
        to.a[row][k] = operand_number<T>(product.in_shared, k, running % 128 / 32 * 16 + row, false);
  }
  static void perform(const Pending& product) {
    read(product);
    const int row = running % 32 / 4;
    const float* upper = product.in_shared != 0 ? operands.a[row] : product.a[0];
    const float* lower = product.in_shared != 0 ? operands.a[row + 8] : product.a[1];
    Four a[16];
    for (int k = 0; k < 16; ++k) a[k] = Four{upper[k], upper[k], lower[k], lower[k]};
    for (int block = 0; block < N / 8; ++block) {
      Four sum = {};
      if (product.accumulate) std::memcpy(&sum, product.d + 4 * block, sizeof(sum));
      for (int k = 0; k < 16; ++k) sum += a[k] * operands.b[running % 4][block][k];
      std::memcpy(product.d + 4 * block, &sum, sizeof(sum));
    }
  }
  static void add(float (&d)[N / 2], const Share& share, u32 what, int accumulate) {
    // warps of a warpgroup issue the same products, but need not be at the same one
    std::vector<Share>& issued = machine->issued[running / 128];
    const size_t mine = machine->fibers[running].issued++;
    if (issued.size() == mine) issued.push_back(share);
    const Share first = issued[mine];
    const Share* all = machine->shares[running / 32].meet(running % 32, share, what);
    if (share.b != first.b || share.in_shared != first.in_shared) {
      std::fprintf(stderr, "threads of a warpgroup name unlike operands\n");
      std::abort();
    }
    Pending product = {perform, d, share.in_shared, share.b, {}, accumulate};
    const int row = running % 32 / 4;
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < 16; ++k) product.a[half][k] = all[row * 4 + k % 8 / 2].a[half + k / 8 * 2][k % 2];
    machine->fibers[running].products.push_back(product);
  }
  static void run(float (&d)[N / 2], const u32* mine, u64 b, int accumulate) {
    Share share = {{}, 0, b};
    for (int i = 0; i < 8; ++i) share.a[i / 2][i % 2] = wide<T>(mine[i / 2] >> (i % 2 * 16) & 0xFFFF);
    add(d, share, 5, accumulate);
  }
  static void run_shared(float (&d)[N / 2], u64 a, u64 b, int accumulate) {
    add(d, {{}, a, b}, 6, accumulate);
  }
};

}  // namespace treeattn
