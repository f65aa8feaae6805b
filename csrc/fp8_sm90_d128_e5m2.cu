// The same for e5m2.

#include "fp8_sm90.cuh"

TREEATTN_FP8(fp8_sm90_bf16_e5m2_d128_r40, Bf16, 128, 40, 64, 5, 2, E5m2)
TREEATTN_FP8(fp8_sm90_bf16_e5m2_d128_r72, Bf16, 128, 72, 64, 4, 2, E5m2)
TREEATTN_FP8(fp8_sm90_fp16_e5m2_d128_r40, Fp16, 128, 40, 64, 5, 2, E5m2)
TREEATTN_FP8(fp8_sm90_fp16_e5m2_d128_r72, Fp16, 128, 72, 64, 4, 2, E5m2)
