// The same for e5m2.

#include "fp8_wide_sm90.cuh"

TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e5m2_d128_c2_n64_window, Bf16, 128, 2, 64, 4, 8, 1, 1, Fp16, E5m2, 4)
TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e5m2_d128_c2_n64_window_fresh, Bf16, 128, 2, 64, 4, 8, 1, 1, Bf16, E5m2, 4)
TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e5m2_d128_c3_n64_window, Bf16, 128, 3, 64, 4, 3, 1, 1, Fp16, E5m2, 3)
TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e5m2_d128_c3_n64_window_fresh, Bf16, 128, 3, 64, 4, 3, 1, 1, Bf16, E5m2, 3)
TREEATTN_FP8_WIDE(fp8_wide_sm90_fp16_e5m2_d128_c2_n64_window, Fp16, 128, 2, 64, 4, 8, 1, 1, Fp16, E5m2, 4)
TREEATTN_FP8_WIDE(fp8_wide_sm90_fp16_e5m2_d128_c3_n64_window, Fp16, 128, 3, 64, 4, 3, 1, 1, Fp16, E5m2, 3)
