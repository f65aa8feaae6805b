// The same for e5m2.

#include "mla_fp8_sm90.cuh"

TREEATTN_MLA_FP8(mla_fp8_sm90_bf16_e5m2, Bf16, 16, 4, 2, E5m2)
TREEATTN_MLA_FP8(mla_fp8_sm90_fp16_e5m2, Fp16, 16, 4, 2, E5m2)
