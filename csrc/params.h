// What one launch of the attention kernel reads and writes. Passed by value; treeattn/cuda/params.py mirrors it.
//
// Strides count elements (of the tensor's own type), the last axis is contiguous, and every row of q, K and V starts at
// a multiple of 16 bytes (out: 4 bytes). Index tensors are int32 or int64; of an int64 the low half is read.

#pragma once

namespace treeattn {

using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

// A tensor map of the driver (CUtensorMap): a cache as [pages, eights of slots, panels of all heads, 8 slots, panel],
// boxes of all panels of a head; one of latent rows as [pages, kv heads, slots of a page, head_dim], boxes of 64 dims.
struct alignas(64) TensorMap {
  u64 words[16];
};

struct AttentionParams {
  TensorMap k_map, v_map;  // read where page_rows is not 0
  const void* q;        // [total_q, num_qo_heads, head_dim]
  const void* k;        // paged cache
  const void* v;        // paged cache
  const void* k_tree;   // [total_q, kv_heads, head_dim], the nodes' own; null: the nodes are in the cache
  const void* v_tree;   // [total_q, kv_heads, head_dim], null with k_tree
  void* out;            // [total_q, num_qo_heads, head_dim]
  float* lse;           // [total_q, num_qo_heads], natural log; null: not asked for
  const void* sinks;    // [num_qo_heads], of the type that sinks_type says; null: none
  const float* k_scales;  // of an FP8 cache, 1 or [kv_heads]; null: k_scale holds
  const float* v_scales;  // the same of V
  float* partial_out;   // [slots, tile rows, head_dim], two slots a program, or one for each split
  float* partial_lse;   // [slots, tile rows], base 2; but for splits and MLA with tags, [slots, tile rows, 2]: see merge.cuh
  const i32* work;      // [num_programs, 16], the plan: see treeattn/kernels/plan.py
  const i32* turns;     // [batch, 8], requests in the order in which blocks come to them
  const i32* spans;     // [batch, 8]
  u32* arrivals;        // [num_programs, 4], the fourth counts launches, the others are 0 between them: see merge.cuh
  const i32* row_request; // [total_q], request of each row, -1 behind the last
  const i32* qo_indptr; // [batch + 1]
  const u32* mask_words; // [total_q, num_words], bit j % 32 of word j / 32: the row sees node j
  const void* kv_indptr;  // [batch + 1], first page of each request in `table`; null: `table` is a block table
  const void* table;      // page ids: [pages of the batch], or [batch, stride_table_request]
  const void* tree_slots; // [total_q], token slot of each node; null: behind the prefix in the request's pages
  const i32* prefix_lens; // [batch], read with `positions`
  const i64* positions;   // [total_q], of the nodes; null: no window
  i64 stride_table_request;
  i64 stride_q_row, stride_q_head;
  i64 stride_k_page, stride_k_slot, stride_k_head;
  i64 stride_v_page, stride_v_slot, stride_v_head;
  i64 stride_k_tree_row, stride_k_tree_head;
  i64 stride_v_tree_row, stride_v_tree_head;
  i64 stride_out_row, stride_out_head;
  i64 stride_lse_row, stride_lse_head;
  float scale;     // |sm_scale| * log2(e), positive
  u32 q_sign;      // xor'ed to pairs of q: the sign bits where sm_scale is negative, else 0
  float cap_in;    // |sm_scale| / logits_soft_cap: what a product is multiplied by for its tanh
  float cap_out;   // logits_soft_cap * log2(e): and its tanh
  float k_scale;   // what a number of an FP8 cache stands for, without k_scales
  float v_scale;
  i32 total_q;     // rows of q: what a replayed graph may touch, whatever the layout claims
  i32 num_words;   // 32-bit words of a row's mask
  i32 group;       // query heads of a KV head
  u32 group_magic;  // ceil(2^31 / group): n / group is the upper half of 2 n * group_magic for n < 2^31 / group
  i32 kv_heads;
  i32 page_size;
  u32 page_magic;  // n / page_size is (n * page_magic) >> page_shift for n < 2^31
  i32 page_shift;
  i32 zero_tail;   // 1: rows behind the last request are padding too
  i32 wide_table;  // 1: `table` is int64, 0: int32
  i32 wide_indptr; // the same of `kv_indptr`
  i32 wide_slots;  // the same of `tree_slots`
  i32 window_left; // a row sees keys from its own position - window_left on
  i32 ranged;      // 1: the plan tells from where on the prefix is seen, 0: it is seen from its beginning
  i32 part;        // 1: the prefix alone, 2: the tree alone, 0: both
  i32 split;       // units of a split in batch-invariant mode, in which the plan counts splits; else 0
  i32 sinks_type;  // 0: float32, 1: float16, 2: bfloat16, 3: float64
  i32 sinks_in_lse; // 1: the lse counts them
  i32 stride_k_scale; // from a KV head to the next
  i32 stride_v_scale;
  i32 page_rows;   // slots of a page that a tensor map's box holds, 8 to 64; 0: the cache is copied without tensor maps
};

}  // namespace treeattn
