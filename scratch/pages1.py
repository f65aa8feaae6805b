"""Times of page 1 beside page 64, this tree's kernels. NOGATE=1: kernels that are wrong on purpose."""
import os, sys
from dataclasses import replace
import torch
from treeattn.bench.gate import gate
from treeattn.bench.inputs import COLD_BYTES, Inputs
from treeattn.bench.providers import tree_calls
from treeattn.bench.timing import time_graph
from treeattn.bench.workloads import SETS, Workload
works = [Workload("pages", *s) for s in ((8, 65, 8192, 32, 8), (8, 65, 8192, 8, 1), (1, 17, 16384, 32, 8), (8, 17, 4096, 32, 8), (1, 17, 2048, 32, 8), (32, 17, 4096, 8, 1))]
mla = [w for w in SETS["mla"]() if (w.batch, w.prefix, w.qo_heads) in ((1, 131072, 8), (32, 4096, 8))]
chosen = works + mla
if len(sys.argv) > 2: chosen = [chosen[int(i)] for i in sys.argv[2].split(",")]
for work in chosen:
    out = []
    for page in (64, 1):
        try:
            inputs = Inputs(replace(work, page_size=page), torch.device("cuda"), COLD_BYTES)
            calls = tree_calls(inputs, "cuda")
            if not os.environ.get("NOGATE"):
                gate("x", inputs, calls)
            out.append(f"{page}: {time_graph(calls.calls).us:7.1f}")
        except Exception as e:
            out.append(f"{page}: {type(e).__name__} {str(e)[:100]}")
        torch.cuda.empty_cache()
    print(sys.argv[1], work.name(), *out, flush=True)
