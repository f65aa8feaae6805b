// A sliding window: see the kernels without.

#include "attention_sm90.cuh"

TREEATTN_ATTENTION(attention_sm90_bf16_d128_c1_n64_window, Bf16, 128, 1, 64, 3, 8, 2, 1)
TREEATTN_ATTENTION(attention_sm90_bf16_d128_c2_n64_window, Bf16, 128, 2, 64, 6, 8, 1, 1)
TREEATTN_ATTENTION(attention_sm90_bf16_d128_c3_n64_window, Bf16, 128, 3, 64, 5, 4, 1, 1)
TREEATTN_ATTENTION(attention_sm90_fp16_d128_c1_n64_window, Fp16, 128, 1, 64, 3, 8, 2, 1)
TREEATTN_ATTENTION(attention_sm90_fp16_d128_c2_n64_window, Fp16, 128, 2, 64, 6, 8, 1, 1)
TREEATTN_ATTENTION(attention_sm90_fp16_d128_c3_n64_window, Fp16, 128, 3, 64, 5, 4, 1, 1)
