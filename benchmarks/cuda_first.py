"""Build, check and time the CUDA backend on a Hopper GPU in one call of a few minutes, stage by stage.

    PYTHONPATH=. OUT=/tmp/out BUDGET=385 python3 benchmarks/cuda_first.py [build smoke cases time variants ...]

Each stage is a process of its own with a limit, and each check one that a fault ends alone. Checked builds trap
instead of hanging.

build     compile with nvcc and, where CuPy has it, NVRTC; registers, local memory and blocks an SM of each kernel
smoke     a few shapes, simplest first, against float64; says of each how far off it is
cases     named shapes (page sizes, fresh, slots, padding, ragged) and random cases against float64, both dtypes
time      the 27 rows of targets.json: cuda beside triton and, where it imports, FlashAttention-3
variants  the kernel's other shapes and signalling on some rows, and the attention without the merge
graph     one graph over 20 random steps; one input 200 times, bit for bit; host time of a call
canary    the cases with slots filled with NaN before they are refilled, and a producer that sleeps now and then
probe     where a wrong kernel is wrong (cuda_probe.py): run if smoke fails
memcheck  smoke under compute-sanitizer: run if smoke fails

Writes $OUT/cuda-first.json (a key for each stage; few files come back from a lent machine); the tables are printed
again at the end, the times last.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cuda_common import CANARY, CHECKED, OUT, WORKERS, save, saved
from cuda_times import time_rows, variants
from isolated import run_isolated

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"build": 90, "smoke": 100, "cases": 120, "time": 150, "variants": 120, "canary": 90, "graph": 50,
          "probe": 60, "memcheck": 150}  # fmt: skip
BUDGET = float(os.environ.get("BUDGET", 385))
"""Seconds for everything; what does not fit is left out, the last stages first."""
RANDOM_CASES = 120


def build() -> int:
    from treeattn.cuda.build import BuildError, build, find_compiler

    def one(job: tuple[str, int, str]) -> tuple[bool, str]:
        kind, dim, macros = job
        begin = time.perf_counter()
        try:
            words = f"{len(build(f'attention_sm90_d{dim}.cu', macros.split(), kind))} bytes"
        except BuildError as error:
            return kind == "nvcc", f"{kind} d{dim} {macros}: FAILED {error}"
        return False, f"{kind} d{dim} {macros}: {words}, {time.perf_counter() - begin:.1f} s"

    for kind in ("nvcc", "nvrtc"):
        try:
            print(f"  {kind} {find_compiler(kind).version}")
        except BuildError as error:
            print(f"  {kind}: {error}")
    needed = ("", CHECKED, CANARY)
    jobs = [("nvcc", dim, macros) for dim in (128, 64) for macros in needed]
    jobs += [("nvrtc", dim, "") for dim in (128, 64)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(one, jobs))
    print("\n".join(f"  {words}" for _, words in found))
    kernels = kernel_lines()
    print("\n".join(kernels))
    save("build", [*(words for _, words in found), *kernels])
    return sum(failed for failed, _ in found)


def kernel_lines() -> list[str]:
    """What the driver says of each kernel: two blocks an SM must fit where the plan deals work to two."""
    from treeattn.cuda.build import kernels_in
    from treeattn.cuda.config import Variant
    from treeattn.cuda.launch import load
    from treeattn.driver import LOCAL_BYTES, NUM_REGISTERS

    lines = []
    for dim in (128, 64):
        for name, shape in kernels_in(f"attention_sm90_d{dim}.cu").items():
            function = load(Variant(shape.dtype.lower(), dim, shape.consumers, shape.keys), 0)
            blocks = function.blocks_per_sm(128 * (shape.consumers + 1))
            lines.append(
                f"  {name}: {function.attribute(NUM_REGISTERS)} registers, {function.attribute(LOCAL_BYTES)} bytes of "
                f"local memory, {blocks} of {shape.blocks} blocks an SM{'' if blocks == shape.blocks else ': WRONG'}"
            )
    return lines


def named_cases() -> list[tuple[str, dict[str, Any]]]:
    """Arguments of :func:`make` by name, the simplest first."""
    cases: list[tuple[str, dict[str, Any]]] = []

    def add(name: str, **shape: Any) -> None:
        cases.append((name, shape))

    # one item, one tile, no mask beyond the diagonal; then more tiles, rows, warpgroups, heads
    add("chain-1-prefix-0", q_lens=[1], prefixes=[0], heads=(1, 1))
    add("one-full-tile", q_lens=[1], prefixes=[64], heads=(8, 1))
    add("c1", q_lens=[8], prefixes=[320], heads=(8, 1), page=64)
    add("c2", q_lens=[17], prefixes=[320], heads=(4, 1), page=64)
    add("c2-heads", q_lens=[17], prefixes=[1000], heads=(32, 8), page=64)
    add("c3", q_lens=[17], prefixes=[1000], heads=(8, 1), page=64)
    add("c3-heads", q_lens=[17], prefixes=[3000], heads=(64, 8), page=128)
    add("c3-tiles", q_lens=[65], prefixes=[1000], heads=(8, 1), page=64)
    for page in (1, 16, 48, 64, 128):
        for table in ("csr", "block"):
            add(f"page-{page}-{table}", q_lens=[17, 17], prefixes=[777, 130], heads=(8, 2), page=page, table=table)
    for tree_kv in ("slots", "fresh"):
        add(tree_kv, q_lens=[17, 17], prefixes=[65, 500], heads=(8, 2), page=16, tree_kv=tree_kv)
    add("ragged", q_lens=[1, 8, 17, 65, 3], prefixes=[0, 63, 1025, 300, 5], heads=(8, 1), page=16)
    add("ragged-c1", q_lens=[1, 8, 3, 5], prefixes=[0, 63, 5000, 300], heads=(8, 2), page=64)
    add("padded", q_lens=[17, 17, 17], nodes=[17, 1, 9], prefixes=[100, 0, 4000], heads=(8, 1), page=64)
    add("empty", q_lens=[8, 8, 8], nodes=[8, 0, 3], prefixes=[100, 64, 0], heads=(4, 1), page=64)
    add("wide", q_lens=[257], prefixes=[1000], heads=(8, 1), page=64)
    add("wide-c2", q_lens=[129, 2], prefixes=[64, 7], heads=(2, 2), page=1)
    add("long", q_lens=[17], prefixes=[60_000], heads=(8, 1), page=64)
    add("many", q_lens=[8] * 40, prefixes=list(range(0, 4000, 100)), heads=(8, 1), page=16)
    add("hnd", q_lens=[17], prefixes=[500], heads=(32, 8), page=16, kv_layout="HND", table="block")
    add("int64-strided", q_lens=[17], prefixes=[500], heads=(8, 2), page=64, wide=True)
    add("negative-scale", q_lens=[17], prefixes=[500], heads=(8, 2), page=64, sm_scale=-0.11)
    return cases


def make(dim: int, dtype: Any, q_lens: list[int], prefixes: list[int], heads: tuple[int, int], page: int = 64,
         table: str = "csr", tree_kv: str = "logical", nodes: list[int] | None = None, kv_layout: str = "NHD",
         wide: bool = False, sm_scale: float | None = None) -> Any:  # fmt: skip
    import random

    import torch

    from treeattn.testing import Placement, build_case, draw_tree

    rng = random.Random(sum(q_lens) + sum(prefixes))
    place = Placement(
        page_size=page, table=table, tree_kv=tree_kv, kv_layout=kv_layout, strided_q=wide,
        index_dtype=torch.int64 if wide else torch.int32,
    )  # fmt: skip
    trees = [draw_tree("recent", count, rng) for count in nodes or q_lens]
    return build_case(trees, prefixes, q_lens=q_lens, heads=heads, head_dim=dim, dtype=dtype, device="cuda",
                      placement=place, sm_scale=sm_scale, seed=1)  # fmt: skip


def checked(name: str, case: Any, path: str) -> dict[str, Any]:
    from treeattn.testing import check_case

    try:
        verdict = check_case(case, "cuda", path)
        ok, ratio, words = verdict.ok, verdict.ratio, verdict.message
    except NotImplementedError as error:
        ok, ratio, words = True, -1.0, f"refused: {error}"
    except Exception as error:
        ok, ratio, words = False, math.inf, f"{type(error).__name__}: {str(error)[:300]}"
    return {"name": name, "path": path, "ok": ok, "ratio": ratio, "message": words}


def run_job(job: tuple[str, str, Any]) -> dict[str, Any]:
    """A check in a process of the pool: name, path, and a shape or a seed."""
    import torch

    from treeattn.testing import random_case

    name, path, what = job
    if isinstance(what, int):
        dtype, dim = (torch.bfloat16, torch.float16)[what % 2], (64, 128)[what // 2 % 2]
        return checked(name, random_case(what, device="cuda", dtype=dtype, head_dim=dim), path)
    dim, dtype, shape = what
    return checked(name, make(dim, getattr(torch, dtype), **shape), path)


def summary(stage: str, rows: list[dict[str, Any]]) -> int:
    save(stage, rows)
    wrong = sum(not row["ok"] for row in rows)
    for row in [row for row in rows if not row["ok"]][:25]:
        print(f"  WRONG {row['name']} ({row['path']}): {row['message'][:400]}")
    refused = sum(row["ratio"] == -1 for row in rows)
    worst = max((row["ratio"] for row in rows if math.isfinite(row["ratio"])), default=0)
    print(f"  {len(rows)} checks, {refused} refused, {wrong} wrong, worst error {worst:.2f} of its budget", flush=True)
    return wrong


def lost_job(job: tuple[str, str, Any], reason: str) -> dict[str, Any]:
    return {"name": job[0], "path": job[1], "ok": False, "ratio": math.inf, "message": reason}


def smoke() -> int:
    jobs = [(name, "plain", (128, "bfloat16", shape)) for name, shape in named_cases()[:8]]
    jobs += [(f"{name} d64", "plain", (64, "float16", shape)) for name, shape in named_cases()[2:6:3]]
    rows = run_isolated(run_job, jobs, lost_job, len(jobs), 90)
    for row in rows:
        print(f"  {row['name']}: {row['ratio']:.3f} of the budget {row['message'][:200]}", flush=True)
    return summary("smoke", rows)


def probe() -> int:
    import torch
    from cuda_probe import SHAPES
    from cuda_probe import probe as run

    found = run_isolated(run, list(SHAPES), lambda name, reason: ([f"  {name}: {reason}"], {}), len(SHAPES), 50)
    lines = [line for part, _ in found for line in part]
    print("\n".join(lines), flush=True)
    save("probe", lines)
    torch.save({name: kept for name, (_, kept) in zip(SHAPES, found, strict=True)}, OUT / "cuda-first-probe.pt")
    return 0


def cases(stage: str = "cases") -> int:
    jobs: list[tuple[str, str, Any]] = []
    for index, (name, shape) in enumerate(named_cases()):
        jobs.append((f"{name} d128 bfloat16", "plain", (128, "bfloat16", shape)))
        other = ((64, "float16"), (128, "float16"), (64, "bfloat16"))[index % 3]
        jobs.append((f"{name} d{other[0]} {other[1]}", "static" if index % 2 else "plain", (*other, shape)))
    jobs += [(f"seed {seed}", "static" if seed % 3 == 2 else "plain", seed) for seed in range(RANDOM_CASES)]
    return summary(stage, run_isolated(run_job, jobs, lost_job, WORKERS))


def canary() -> int:
    return cases("canary")


def graph() -> int:
    """A graph over steps that shrink and grow; the same input again and again."""
    import torch

    import treeattn
    from treeattn.bench.timing import time_host
    from treeattn.testing import random_case
    from treeattn.testing.run import StaticRun
    from treeattn.testing.tolerance import judge

    torch.manual_seed(0)
    pins: dict[str, Any] = {
        "head_dim": 128, "group": 4, "num_kv_heads": 2, "page_size": 64, "table": "block", "tree_kv": "logical",
        "kv_layout": "NHD", "cache": "paged", "uniform": True, "max_width": 17, "max_prefix": 700, "batch": 3,
        "source": "parents", "strided_q": False, "sm_scale": None, "index_dtype": torch.int32, "tail": 0,
        "out": "dense",
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    steps = [random_case(seed, device="cuda", dtype=torch.bfloat16, **pins) for seed in range(20)]
    static = StaticRun.for_cases(steps, "cuda")
    for number, case in enumerate(steps):
        result = static.run(case)
        verdict = judge(case, result.out, result.lse)
        message = result.touched or verdict.message
        rows.append({"name": f"step {number}", "path": "one set of buffers", "ok": verdict.ok and not result.touched,
                     "ratio": verdict.ratio, "message": message})  # fmt: skip
    # the same input: outputs of a graph and of eager calls, bit for bit
    batch, q_len, prefix, hq, hkv = 4, 17, 5000, 32, 8
    pages = batch * 80
    k, v = (torch.randn(pages, 64, hkv, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(batch * q_len, hq, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, 80)
    parents = torch.arange(-1, q_len - 1, device="cuda", dtype=torch.int32).repeat(batch, 1)
    layout = treeattn.TreeLayout.from_parents(parents, torch.full((batch,), prefix, device="cuda", dtype=torch.int32))
    step = treeattn.plan(layout, treeattn.PagedKV(block_table=table, page_size=64), hq, hkv, 128, backend="cuda")
    out = torch.empty_like(q)
    treeattn.tree_attention(q, k, v, step, out=out)
    first = out.clone()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        treeattn.tree_attention(q, k, v, step, out=out)
    differ = 0
    for turn in range(200):
        out.fill_(float("nan"))
        captured.replay() if turn % 2 else treeattn.tree_attention(q, k, v, step, out=out)
        differ += not torch.equal(out, first)
    print(f"  200 repetitions, {differ} differ")
    rows.append({"name": "repeat", "path": "graph and eager", "ok": differ == 0, "ratio": float(differ), "message": ""})
    host = time_host(lambda: treeattn.tree_attention(q, k, v, step, out=out), sync=torch.cuda.synchronize)
    print(f"  host time of a call: {host.us:.1f} us (20 % below {host.p20:.1f}, 20 % above {host.p80:.1f})")
    return summary("graph", rows)


STAGES: dict[str, Callable[[], int]] = {
    "build": build, "smoke": smoke, "cases": cases, "time": time_rows, "variants": variants, "canary": canary,
    "graph": graph, "probe": probe,
}  # fmt: skip
ORDER = ("build", "smoke", "cases", "time", "variants", "graph", "canary")
MEMCHECK = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "5",
            "--target-processes", "all"]  # fmt: skip
MACROS = {"smoke": CHECKED, "cases": CHECKED, "canary": CANARY, "graph": CHECKED, "probe": CHECKED}


def run_stage(stage: str, left: float) -> Any:
    """Exit status of a stage, or why there is none."""
    begin = time.perf_counter()
    print(f"== {stage}", flush=True)
    environ = {**os.environ, "TREEATTN_CUDA_MACROS": MACROS.get(stage, ""), "PYTHONUNBUFFERED": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    limit = min(LIMITS[stage], left)
    command = [sys.executable, __file__, "--stage", stage]
    if stage == "memcheck":
        environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # torch's allocator would hide overruns
        command = [*MEMCHECK, *command[:-1], "smoke"]
    # a session of its own, so that the processes of a stage that hangs end with it
    running = subprocess.Popen(command, env=environ, start_new_session=True)
    status: Any
    try:
        status = running.wait(limit)
    except subprocess.TimeoutExpired:
        status = f"no end after {limit:.0f} s"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    print(f"== {stage}: exit status {status}, {time.perf_counter() - begin:.0f} s", flush=True)
    return status


def main() -> int:
    if len(sys.argv) == 3 and sys.argv[1] == "--stage":
        return 1 if STAGES[sys.argv[2]]() else 0
    start, failed = time.perf_counter(), []
    (OUT / "cuda-first.json").unlink(missing_ok=True)
    todo = list(sys.argv[1:] or ORDER)
    while todo:
        stage = todo.pop(0)
        left = BUDGET - (time.perf_counter() - start)
        if left < 25:
            print(f"== {stage}: no time left")
            failed.append(stage)
            continue
        if run_stage(stage, left) == 0:
            continue
        failed.append(stage)
        if stage == "build":
            print("== nothing more without build")
            break
        if stage == "smoke":
            # no time for a wrong kernel: what is wrong with it
            todo = ["probe", "memcheck"]
    for stage, found in saved().items():
        if isinstance(found, dict):
            print(f"== {stage}", *found["table"], sep="\n")
    print(f"== failed: {', '.join(failed) or 'nothing'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
