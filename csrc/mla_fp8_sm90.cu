// 4 of 9 panels of Q in registers; 4 quarters of each half, 2 rope parts, 5 panels of Q, 2 of weights and 6 panels of the
// cache on their way are 224 KB.

#include "mla_fp8_sm90.cuh"

TREEATTN_MLA_FP8(mla_fp8_sm90_bf16_e4m3, Bf16, 16, 4, 2, E4m3)
TREEATTN_MLA_FP8(mla_fp8_sm90_fp16_e4m3, Fp16, 16, 4, 2, E4m3)
