// Head dim 128: a stage of 64 keys is 32 KB, Q of a consumer 16 KB, a tile on its way 16 KB: 225 KB in all.

#include "fp8_wide_sm90.cuh"

TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e4m3_d128_c2_n64, Bf16, 128, 2, 64, 4, 8, 1, 0, Fp16, E4m3, 4)
TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e4m3_d128_c2_n64_fresh, Bf16, 128, 2, 64, 4, 8, 1, 0, Bf16, E4m3, 4)
TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e4m3_d128_c3_n64, Bf16, 128, 3, 64, 4, 3, 1, 0, Fp16, E4m3, 3)
TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e4m3_d128_c3_n64_fresh, Bf16, 128, 3, 64, 4, 3, 1, 0, Bf16, E4m3, 3)
TREEATTN_FP8_WIDE(fp8_wide_sm90_fp16_e4m3_d128_c2_n64, Fp16, 128, 2, 64, 4, 8, 1, 0, Fp16, E4m3, 4)
TREEATTN_FP8_WIDE(fp8_wide_sm90_fp16_e4m3_d128_c3_n64, Fp16, 128, 3, 64, 4, 3, 1, 0, Fp16, E4m3, 3)
