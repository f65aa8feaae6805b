// Head dim 256: a stage of 64 keys is 64 KB, Q of a consumer 32 KB. 3 stages, or 2 of two consumers; one block an SM.
// A quarter of Q is in registers: half of it would spill (attention_sm90.cuh).

#include "attention_sm90.cuh"

TREEATTN_ATTENTION(attention_sm90_bf16_d256_c1_n64, Bf16, 256, 1, 64, 3, 4, 1, 0)
TREEATTN_ATTENTION(attention_sm90_bf16_d256_c2_n64, Bf16, 256, 2, 64, 2, 4, 1, 0)
TREEATTN_ATTENTION(attention_sm90_fp16_d256_c1_n64, Fp16, 256, 1, 64, 3, 4, 1, 0)
TREEATTN_ATTENTION(attention_sm90_fp16_d256_c2_n64, Fp16, 256, 2, 64, 2, 4, 1, 0)
