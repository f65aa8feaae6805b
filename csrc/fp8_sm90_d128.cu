// Head dim 128: a stage of 64 keys is 16 KB, Q of 72 rows 18 KB, and so are their weights, twice a tile's.

#include "fp8_sm90.cuh"

TREEATTN_FP8(fp8_sm90_bf16_e4m3_d128_r40, Bf16, 128, 40, 64, 5, 2, E4m3)
TREEATTN_FP8(fp8_sm90_bf16_e4m3_d128_r72, Bf16, 128, 72, 64, 4, 2, E4m3)
TREEATTN_FP8(fp8_sm90_fp16_e4m3_d128_r40, Fp16, 128, 40, 64, 5, 2, E4m3)
TREEATTN_FP8(fp8_sm90_fp16_e4m3_d128_r72, Fp16, 128, 72, 64, 4, 2, E4m3)
