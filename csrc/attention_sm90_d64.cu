// Head dim 64: half tiles of 64 keys are 8 KB, Q fits in registers.

#include "attention_sm90.cuh"

TREEATTN_ATTENTION(attention_sm90_bf16_d64_c1_n64, Bf16, 64, 1, 64, 13, 4, 9, 2)
TREEATTN_ATTENTION(attention_sm90_bf16_d64_c2_n64, Bf16, 64, 2, 64, 20, 4, 16, 1)
TREEATTN_ATTENTION(attention_sm90_bf16_d64_c3_n64, Bf16, 64, 3, 64, 20, 4, 16, 1)
TREEATTN_ATTENTION(attention_sm90_fp16_d64_c1_n64, Fp16, 64, 1, 64, 13, 4, 9, 2)
TREEATTN_ATTENTION(attention_sm90_fp16_d64_c2_n64, Fp16, 64, 2, 64, 20, 4, 16, 1)
TREEATTN_ATTENTION(attention_sm90_fp16_d64_c3_n64, Fp16, 64, 3, 64, 20, 4, 16, 1)
