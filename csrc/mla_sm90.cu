// 6 of 9 panels of Q in registers; 5 quarters of each half, 3 rope parts, 3 panels of Q and 2 of weights are 224 KB.

#include "mla_sm90.cuh"

TREEATTN_MLA(mla_sm90_bf16, Bf16, 24, 5, 3)
TREEATTN_MLA(mla_sm90_fp16, Fp16, 24, 5, 3)
