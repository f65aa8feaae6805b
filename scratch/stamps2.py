"""Where the beginning of a GQA call goes: ns from the first block that has waited, in a graph of calls that follow each other."""
import ctypes, gc, sys
import torch
from treeattn.bench.inputs import COLD_BYTES, Inputs
from treeattn.bench.providers import tree_calls
from treeattn.bench.timing import time_graph
from treeattn.bench.workloads import SETS
from treeattn.driver import Module, check, driver
def stats(v):
    v = sorted(v)
    return f"{v[0]}/{v[len(v)//2]}/{v[-1]}({len(v)})" if v else "-"
works = [w for w in SETS["gqa"]() if (w.batch, w.q_len, w.prefix, w.qo_heads) in ((1, 17, 2048, 8), (1, 17, 2048, 32), (1, 17, 16384, 8), (8, 17, 4096, 8))]
for work in works:
    inputs = Inputs(work, torch.device("cuda"), COLD_BYTES)
    calls = tree_calls(inputs, "cuda").calls
    for c in calls[:2]: c()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for c in (calls * 8)[:7]: c()
    at, size = ctypes.c_uint64(), ctypes.c_size_t()
    for turn in range(2):
        graph.replay(); torch.cuda.synchronize()
    for module in [m for m in gc.get_objects() if type(m) is Module]:
        if driver().cuModuleGetGlobal_v2(ctypes.byref(at), ctypes.byref(size), module.handle, b"treeattn_stamps"): continue
        host = (ctypes.c_uint64 * (size.value // 8))()
        check("copy", driver().cuMemcpyDtoH_v2(host, at, size))
        t = torch.tensor([int(x) for x in host], dtype=torch.int64).view(256, 3, 8, 8)
        n = int((t[:, 2, 1, 1] > 0).sum())
        if n == 0: continue
        t = t[:n]; begin = t[:, 2, 1, 1].min()
        rel = t - begin
        busy = t[:, 2, 1, 5] > 0
        print("==", sys.argv[1], work.name(), f"{time_graph(calls).us:.1f} us, {n} blocks")
        names = (("entry", 2, 1, 0), ("waited", 2, 1, 1), ("plan", 2, 1, 2), ("found", 2, 1, 3), ("handed", 2, 1, 4), ("to boxes", 2, 1, 5), ("pages", 2, 1, 6), ("c begin", 0, 0, 0), ("Q", 0, 0, 1), ("K", 0, 0, 3), ("tile", 0, 0, 2), ("end", 0, 0, 5), ("merge", 1, 0, 0), ("merged", 1, 0, 1))
        for some, which in (("busy", busy), ("idle", ~busy)):
            print("  ", some, "; ".join(f"{name} {stats(rel[which, a, b, c].tolist())}" for name, a, b, c in names if which.any() and (t[which, a, b, c] > 0).all()))
    torch.cuda.empty_cache()
