// The same for e5m2.

#include "fp8_wide_sm90.cuh"

TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e5m2_d128_c2_n64_capped, Bf16, 128, 2, 64, 4, 8, 1, 3, Fp16, E5m2, 4)
TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e5m2_d128_c2_n64_capped_fresh, Bf16, 128, 2, 64, 4, 8, 1, 3, Bf16, E5m2, 4)
TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e5m2_d128_c3_n64_capped, Bf16, 128, 3, 64, 4, 3, 1, 3, Fp16, E5m2, 3)
TREEATTN_FP8_WIDE(fp8_wide_sm90_bf16_e5m2_d128_c3_n64_capped_fresh, Bf16, 128, 3, 64, 4, 3, 1, 3, Bf16, E5m2, 3)
TREEATTN_FP8_WIDE(fp8_wide_sm90_fp16_e5m2_d128_c2_n64_capped, Fp16, 128, 2, 64, 4, 8, 1, 3, Fp16, E5m2, 4)
TREEATTN_FP8_WIDE(fp8_wide_sm90_fp16_e5m2_d128_c3_n64_capped, Fp16, 128, 3, 64, 4, 3, 1, 3, Fp16, E5m2, 3)
