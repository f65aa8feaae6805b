// A sliding window: see the kernels without.

#include "fp8_wide_sm90.cuh"

TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e4m3_d128_c2_n64_window, Bf16, 128, 2, 64, 4, 8, 1, 1, Fp16, E4m3, 4)
TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e4m3_d128_c2_n64_window_fresh, Bf16, 128, 2, 64, 4, 8, 1, 1, Bf16, E4m3, 4)
TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e4m3_d128_c3_n64_window, Bf16, 128, 3, 64, 4, 3, 1, 1, Fp16, E4m3, 3)
TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e4m3_d128_c3_n64_window_fresh, Bf16, 128, 3, 64, 4, 3, 1, 1, Bf16, E4m3, 3)
TREEATTN_FP8_WIDE(fp8_wide_sm90_fp16_e4m3_d128_c2_n64_window, Fp16, 128, 2, 64, 4, 8, 1, 1, Fp16, E4m3, 4)
TREEATTN_FP8_WIDE(fp8_wide_sm90_fp16_e4m3_d128_c3_n64_window, Fp16, 128, 3, 64, 4, 3, 1, 1, Fp16, E4m3, 3)
