// A soft cap, with or without a sliding window: see the kernels without.

#include "fp8_wide_sm90.cuh"

TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e4m3_d128_c2_n64_capped, Bf16, 128, 2, 64, 4, 8, 1, 3, Fp16, E4m3, 4)
TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e4m3_d128_c2_n64_capped_fresh, Bf16, 128, 2, 64, 4, 8, 1, 3, Bf16, E4m3, 4)
TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e4m3_d128_c3_n64_capped, Bf16, 128, 3, 64, 4, 3, 1, 3, Fp16, E4m3, 3)
TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e4m3_d128_c3_n64_capped_fresh, Bf16, 128, 3, 64, 4, 3, 1, 3, Bf16, E4m3, 3)
TREEATTN_FP8_WIDE(fp8_wide_sm90_fp16_e4m3_d128_c2_n64_capped, Fp16, 128, 2, 64, 4, 8, 1, 3, Fp16, E4m3, 4)
TREEATTN_FP8_WIDE(fp8_wide_sm90_fp16_e4m3_d128_c3_n64_capped, Fp16, 128, 3, 64, 4, 3, 1, 3, Fp16, E4m3, 3)
