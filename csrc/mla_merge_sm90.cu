#include "mla_merge.cuh"

TREEATTN_MLA_MERGE(mla_merge_sm90_bf16, Bf16)
TREEATTN_MLA_MERGE(mla_merge_sm90_fp16, Fp16)
