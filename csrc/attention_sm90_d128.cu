// Head dim 128: a stage of 64 keys is 32 KB, Q of a consumer 16 KB. 6 stages, or 3 in each of two blocks, or 5.
// Of three consumers the products take half of Q from shared memory: all of it would be 16 registers more than a thread has.

#include "attention_sm90.cuh"

TREEATTN_ATTENTION(attention_sm90_bf16_d128_c1_n64, Bf16, 128, 1, 64, 3, 8, 2, 0)
TREEATTN_ATTENTION(attention_sm90_bf16_d128_c2_n64, Bf16, 128, 2, 64, 6, 8, 1, 0)
TREEATTN_ATTENTION(attention_sm90_bf16_d128_c3_n64, Bf16, 128, 3, 64, 5, 4, 1, 0)
TREEATTN_ATTENTION(attention_sm90_fp16_d128_c1_n64, Fp16, 128, 1, 64, 3, 8, 2, 0)
TREEATTN_ATTENTION(attention_sm90_fp16_d128_c2_n64, Fp16, 128, 2, 64, 6, 8, 1, 0)
TREEATTN_ATTENTION(attention_sm90_fp16_d128_c3_n64, Fp16, 128, 3, 64, 5, 4, 1, 0)
