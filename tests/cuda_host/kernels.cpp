// The kernels of csrc on the host, behind one C function; built with ptx.cuh of this folder in place of csrc's.

#include "ptx.cuh"

int block_threads;

#include "attention_sm90_d128.cu"
#include "attention_sm90_d128_capped.cu"
#include "attention_sm90_d128_window.cu"
#include "attention_sm90_d256.cu"
#include "attention_sm90_d256_capped.cu"
#include "attention_sm90_d256_window.cu"
#include "attention_sm90_d64.cu"
#include "attention_sm90_d64_capped.cu"
#include "attention_sm90_d64_window.cu"
#include "fp8_sm90_d128.cu"
#include "fp8_sm90_d128_e5m2.cu"
#include "fp8_wide_sm90_d128.cu"
#include "fp8_wide_sm90_d128_capped.cu"
#include "fp8_wide_sm90_d128_capped_e5m2.cu"
#include "fp8_wide_sm90_d128_e5m2.cu"
#include "fp8_wide_sm90_d128_window.cu"
#include "fp8_wide_sm90_d128_window_e5m2.cu"
#include "mla_fp8_sm90.cu"
#include "mla_fp8_sm90_e5m2.cu"
#include "mla_merge_sm90.cu"
#include "mla_sm90.cu"

static treeattn::AttentionParams call;
static void (*chosen)(const treeattn::AttentionParams);
static void start() { chosen(call); }

// Runs a kernel for every block of the grid, in any order, of which those that wait for others are left in between; false
// if it comes to a standstill. Seed 0: all warps are as fast, and no block loses its patience.
extern "C" bool run_kernel(const char* name, const treeattn::AttentionParams* params, int blocks, int threads, int seed) {
  using namespace treeattn;
  schedule_seed = seed;
  chosen = nullptr;
#define TREEATTN_NAMED(NAME) \
  if (std::strcmp(name, #NAME) == 0) chosen = NAME;
  TREEATTN_KERNELS
  if (chosen == nullptr) {
    std::fprintf(stderr, "%s is not in this build\n", name);
    return false;
  }
  call = *params;
  body = start;
  block_threads = threads;
  gridDim.x = blocks;
  std::vector<std::unique_ptr<Machine>> waiting;
  std::vector<u32> left;
  for (int block = 0; block < blocks; ++block) left.insert(left.begin() + (seed ? draw() % (block + 1) : block), block);
  long before = progress;
  for (int idle = 0; !left.empty() || !waiting.empty(); ++idle) {
    if (progress != before) idle = 0;
    if (idle > 10000) return false;
    before = progress;
    std::unique_ptr<Machine> own;
    if (waiting.empty() || (!left.empty() && draw() % 2 == 0)) {
      own.reset(new Machine);
      prepare(*own, left.back(), threads);
      left.pop_back();
      std::memset(shared_bytes, 0xFF, sizeof(shared_bytes));  // NaN
    } else {
      const u32 index = draw() % waiting.size();
      own = std::move(waiting[index]);
      waiting.erase(waiting.begin() + index);
      std::memcpy(shared_bytes, own->memory.data(), own->memory.size());
    }
    machine = own.get();
    const Outcome outcome = run_block(threads);
    if (outcome == HANGS) return false;
    if (outcome == DONE) continue;
    own->memory.assign(shared_bytes, shared_bytes + sizeof(shared_bytes));
    waiting.push_back(std::move(own));
  }
  return true;
}
