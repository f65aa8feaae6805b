// 6 of 9 panels of Q in registers; 5 places a ring (160 KB and 20), 3 panels of Q and 2 of weights: 220 KB.

#include "mla_sm90.cuh"

TREEATTN_MLA(mla_sm90_bf16, Bf16, 24, 5, 5)
TREEATTN_MLA(mla_sm90_fp16, Fp16, 24, 5, 5)
