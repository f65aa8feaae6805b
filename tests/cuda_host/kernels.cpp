// The kernels of csrc on the host, behind one C function; built with ptx.cuh of this folder in place of csrc's.

#include "ptx.cuh"

int block_threads;

#include "attention_sm90_d128.cu"
#include "attention_sm90_d128_capped.cu"
#include "attention_sm90_d128_window.cu"
#include "attention_sm90_d64.cu"
#include "attention_sm90_d64_capped.cu"
#include "attention_sm90_d64_window.cu"

static treeattn::AttentionParams call;
static void (*chosen)(const treeattn::AttentionParams);
static void start() { chosen(call); }

// Runs a kernel for every block of the grid; false if it comes to a standstill. Seed 0: all warps are as fast.
extern "C" bool run_kernel(const char* name, const treeattn::AttentionParams* params, int blocks, int threads, int seed) {
  treeattn::schedule_seed = seed;
  chosen = nullptr;
#define TREEATTN_NAMED(NAME) \
  if (std::strcmp(name, #NAME) == 0) chosen = NAME;
  TREEATTN_KERNELS
  if (chosen == nullptr) {
    std::fprintf(stderr, "%s is not in this build\n", name);
    return false;
  }
  call = *params;
  block_threads = threads;
  for (int block = 0; block < blocks; ++block) {
    blockIdx.x = block;
    std::memset(treeattn::shared_bytes, 0xFF, sizeof(treeattn::shared_bytes));  // NaN
    if (!treeattn::run_block(threads, start)) return false;
  }
  return true;
}
