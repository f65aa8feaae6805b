// Head dim 128: half tiles of 64 keys are 16 KB. 13 slots with 10 on their way (160 KB), or 7 with 5 in each of two blocks.
// Three consumers have half of Q in shared memory: all of it would be 16 registers more than a thread has.

#include "attention_sm90.cuh"

TREEATTN_ATTENTION(attention_sm90_bf16_d128_c1_n64, Bf16, 128, 1, 64, 7, 8, 5, 2)
TREEATTN_ATTENTION(attention_sm90_bf16_d128_c2_n64, Bf16, 128, 2, 64, 13, 8, 9, 1)
TREEATTN_ATTENTION(attention_sm90_bf16_d128_c2_n128, Bf16, 128, 2, 128, 6, 8, 4, 1)
TREEATTN_ATTENTION(attention_sm90_bf16_d128_c3_n64, Bf16, 128, 3, 64, 12, 4, 8, 1)
TREEATTN_ATTENTION(attention_sm90_fp16_d128_c1_n64, Fp16, 128, 1, 64, 7, 8, 5, 2)
TREEATTN_ATTENTION(attention_sm90_fp16_d128_c2_n64, Fp16, 128, 2, 64, 13, 8, 9, 1)
TREEATTN_ATTENTION(attention_sm90_fp16_d128_c3_n64, Fp16, 128, 3, 64, 12, 4, 8, 1)
