// Head dim 64: a stage of 64 keys is 16 KB, Q fits in registers.

#include "attention_sm90.cuh"

TREEATTN_ATTENTION(attention_sm90_bf16_d64_c1_n64, Bf16, 64, 1, 64, 6, 4, 2, 0)
TREEATTN_ATTENTION(attention_sm90_bf16_d64_c2_n64, Bf16, 64, 2, 64, 10, 4, 1, 0)
TREEATTN_ATTENTION(attention_sm90_bf16_d64_c3_n64, Bf16, 64, 3, 64, 10, 4, 1, 0)
TREEATTN_ATTENTION(attention_sm90_fp16_d64_c1_n64, Fp16, 64, 1, 64, 6, 4, 2, 0)
TREEATTN_ATTENTION(attention_sm90_fp16_d64_c2_n64, Fp16, 64, 2, 64, 10, 4, 1, 0)
TREEATTN_ATTENTION(attention_sm90_fp16_d64_c3_n64, Fp16, 64, 3, 64, 10, 4, 1, 0)
