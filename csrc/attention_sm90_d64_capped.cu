// A soft cap, with or without a sliding window: see the kernels without.

#include "attention_sm90.cuh"

TREEATTN_ATTENTION(attention_sm90_bf16_d64_c1_n64_capped, Bf16, 64, 1, 64, 6, 4, 2, 3)
TREEATTN_ATTENTION(attention_sm90_bf16_d64_c2_n64_capped, Bf16, 64, 2, 64, 10, 4, 1, 3)
TREEATTN_ATTENTION(attention_sm90_bf16_d64_c3_n64_capped, Bf16, 64, 3, 64, 10, 4, 1, 3)
TREEATTN_ATTENTION(attention_sm90_fp16_d64_c1_n64_capped, Fp16, 64, 1, 64, 6, 4, 2, 3)
TREEATTN_ATTENTION(attention_sm90_fp16_d64_c2_n64_capped, Fp16, 64, 2, 64, 10, 4, 1, 3)
TREEATTN_ATTENTION(attention_sm90_fp16_d64_c3_n64_capped, Fp16, 64, 3, 64, 10, 4, 1, 3)
