// A sliding window: see the kernels without.

#include "attention_sm90.cuh"

TREEATTN_ATTENTION(attention_sm90_bf16_d256_c1_n64_window, Bf16, 256, 1, 64, 3, 4, 1, 1)
TREEATTN_ATTENTION(attention_sm90_bf16_d256_c2_n64_window, Bf16, 256, 2, 64, 2, 4, 1, 1)
TREEATTN_ATTENTION(attention_sm90_fp16_d256_c1_n64_window, Fp16, 256, 1, 64, 3, 4, 1, 1)
TREEATTN_ATTENTION(attention_sm90_fp16_d256_c2_n64_window, Fp16, 256, 2, 64, 2, 4, 1, 1)
