"""Times of chosen rows. args: label, backend, set, indices or 'all'."""
import os, sys
import torch
from treeattn.bench.gate import gate
from treeattn.bench.inputs import COLD_BYTES, Inputs
from treeattn.bench.providers import tree_calls
from treeattn.bench.timing import time_graph
from treeattn.bench.workloads import SETS
label, backend, name = sys.argv[1:4]
works = SETS[name]()
if len(sys.argv) > 4 and sys.argv[4] != "all": works = [works[int(i)] for i in sys.argv[4].split(",")]
out = []
for work in works:
    inputs = Inputs(work, torch.device("cuda"), COLD_BYTES)
    calls = tree_calls(inputs, backend)
    if not os.environ.get("NOGATE"): gate("x", inputs, calls)
    out.append(f"{work.batch},{work.q_len},{work.prefix},{work.qo_heads}: {min(time_graph(calls.calls).us for _ in range(3)):.1f}")
    torch.cuda.empty_cache()
print(label, backend, name, " | ".join(out), flush=True)
