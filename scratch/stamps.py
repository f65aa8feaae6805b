"""Where a block's time goes: stamps of the global timer, ns from the first block's plan (min/median/max over blocks)."""
import ctypes, gc
import torch
from treeattn.bench.inputs import COLD_BYTES, Inputs
from treeattn.bench.providers import tree_calls
from treeattn.bench.timing import time_graph
from treeattn.bench.workloads import SETS
from treeattn.driver import Module, check, driver

def stats(v):
    v = sorted(x for x in v if x >= 0)
    return f"{v[0]}/{v[len(v)//2]}/{v[-1]} ({len(v)})" if v else "-"

mla = [w for w in SETS["mla"]() if w.q_len == 17 and (w.batch, w.prefix, w.qo_heads) in ((1, 131072, 8), (32, 4096, 8), (8, 4096, 8), (1, 16384, 8))]
gqa = [w for w in SETS["gqa"]() if (w.batch, w.q_len, w.prefix, w.qo_heads) in ((1, 17, 131072, 32), (32, 17, 4096, 32), (1, 17, 2048, 8), (8, 65, 8192, 32), (1, 17, 16384, 8), (64, 8, 2048, 64))]
for kind, works in (("mla", mla), ("gqa", gqa)):
    for work in works:
        inputs = Inputs(work, torch.device("cuda"), COLD_BYTES)
        calls = tree_calls(inputs, "cuda").calls
        for c in calls[:4]: c()
        torch.cuda.synchronize()
        at, size = ctypes.c_uint64(), ctypes.c_size_t()
        for module in [m for m in gc.get_objects() if isinstance(m, Module)]:
            code = driver().cuModuleGetGlobal_v2(ctypes.byref(at), ctypes.byref(size), module.handle, b"treeattn_stamps")
            if code: print("no global", code); continue
            zero = (ctypes.c_char * size.value)()
            check("clear", driver().cuMemcpyHtoD_v2(at, zero, size))
            for c in (calls * 4)[4:10]: c()
            torch.cuda.synchronize()
            host = (ctypes.c_uint64 * (size.value // 8))()
            check("copy", driver().cuMemcpyDtoH_v2(host, at, size))
            t = torch.tensor([int(x) for x in host], dtype=torch.int64).view(256, 3, 8, 8)
            if (t[:, 2, 0, 1] > 0).sum() == 0: continue
            n = int((t[:, 2, 0, 1] > 0).sum())
            begin = t[:n, 2, 0, 1][t[:n, 2, 0, 1] > 0].min()
            rel = torch.where(t > 0, t - begin, torch.full_like(t, -1))[:n]
            print("==", kind, work.name(), f"{time_graph(calls).us:.1f} us, {n} blocks; plan seen {stats(rel[:, 2, 0, 1].tolist())}")
            names = (("known", 2, 0), ("begin", 0, 0), ("Q", 0, 1), ("QK0", 0, 2), ("QK1", 0, 3), ("QK2", 0, 4), ("end", 0, 5), ("PV0", 1, 0), ("PVend", 1, 1), ("stored", 1, 2)) if kind == "mla" else (("begin", 0, 0), ("Q", 0, 1), ("first tile", 0, 2), ("end", 0, 5))
            for item in range(3):
                line = [f"{name} {stats(rel[:, role, item, index].tolist())}" for name, role, index in names if (rel[:, role, item, index] >= 0).any()]
                if line: print("  item", item, "; ".join(line))
            last = rel[:, 0, :, 5].max(1).values
            if kind == "gqa": print("  before merge", stats(rel[:, 1, 0, 0].tolist()), "after", stats(rel[:, 1, 0, 1].tolist()))
            sm = t[:n, 2, 7, 7] - 1
            order = last.argsort(descending=True)
            q = [last.sort().values[int(k * (n - 1) / 10)].item() for k in range(11)]
            print("  ends by decile", q, "latest SMs", [(sm[i].item(), last[i].item()) for i in order[:8].tolist()], "earliest", [(sm[i].item(), last[i].item()) for i in order[-6:].tolist()])
        torch.cuda.empty_cache()
