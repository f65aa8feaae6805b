"""Build, check and time the CUDA backend on a Hopper GPU in one call of a few minutes, stage by stage.

    PYTHONPATH=. OUT=/tmp/out python3 benchmarks/cuda_first.py [build smoke cases time variants canary graph]

Each stage is a process of its own with a limit, so that a kernel that hangs or faults ends its stage only. Checked
builds trap instead of hanging.

build     compile with nvcc and, where CuPy has it, NVRTC
smoke     a few shapes, simplest first, against float64; says of each how far off it is
cases     named shapes (page sizes, fresh, slots, padding, ragged) and random cases against float64, both dtypes
canary    the same with slots filled with NaN before they are refilled, and a producer that sleeps now and then
memcheck  smoke under compute-sanitizer (only where it is named)
graph     one graph over 20 random steps; one input 200 times, bit for bit
time      the 27 rows of targets.json: cuda beside triton and, where it imports, FlashAttention-3
variants  the kernel's other shapes and signalling on some rows

Writes $OUT/cuda-first-<stage>.json and the tables; these are printed again at the end, the times last.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = Path(os.environ.get("OUT", "benchmarks/results"))
LIMITS = {"build": 120, "smoke": 90, "cases": 200, "time": 240, "variants": 200, "canary": 200, "graph": 60,
          "memcheck": 280}  # fmt: skip
BUDGET = 570
"""Seconds for everything; what does not fit is left out, the last stages first."""
CHECKED = "TREEATTN_TRAP_AFTER_MS=2000"
CANARY = f"{CHECKED} TREEATTN_CANARY=1 TREEATTN_DELAY=1"
FENCE = "TREEATTN_CONSUMER_FENCE=1"
VARIANT_ROWS = (0, 2, 3, 5, 6, 8, 12, 14, 15, 17, 18, 20, 23, 26)
RANDOM_CASES = 120
WORKERS = 12
"""Processes that share the GPU where Triton's compiler, not the GPU, takes the time."""


def save(stage: str, result: Any) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"cuda-first-{stage}.json").write_text(json.dumps(result, indent=1, default=str))


def table(stage: str, lines: list[str]) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"cuda-first-{stage}.txt").write_text("\n".join(lines) + "\n")


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
    jobs = [("nvcc", dim, macros) for dim in (128, 64) for macros in ("", CHECKED, CANARY, FENCE)]
    jobs += [("nvrtc", dim, "") for dim in (128, 64)]
    with ThreadPoolExecutor(10) as pool:
        found = list(pool.map(one, jobs))
    print("\n".join(f"  {words}" for _, words in found))
    save("build", [words for _, words in found])
    return sum(failed for failed, _ in found)


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


def smoke() -> int:
    import torch

    rows: list[dict[str, Any]] = []
    for name, shape in named_cases()[:8]:
        rows.append(checked(name, make(128, torch.bfloat16, **shape), "plain"))
        print(f"  {name}: {rows[-1]['ratio']:.3f} of the budget {rows[-1]['message'][:200]}", flush=True)
        torch.cuda.synchronize()
    return summary("smoke", rows)


def cases(stage: str = "cases") -> int:
    jobs: list[tuple[str, str, Any]] = []
    for index, (name, shape) in enumerate(named_cases()):
        jobs.append((f"{name} d128 bfloat16", "plain", (128, "bfloat16", shape)))
        other = ((64, "float16"), (128, "float16"), (64, "bfloat16"))[index % 3]
        jobs.append((f"{name} d{other[0]} {other[1]}", "static" if index % 2 else "plain", (*other, shape)))
    jobs += [(f"seed {seed}", "static" if seed % 3 == 2 else "plain", seed) for seed in range(RANDOM_CASES)]
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        return summary(stage, list(pool.map(run_job, jobs)))


def canary() -> int:
    return cases("canary")


def graph() -> int:
    """A graph over steps that shrink and grow; the same input again and again."""
    import torch

    import treeattn
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
    return summary("graph", rows)


def timed(work: Any, names: list[tuple[str, Callable[[Any], Any]]], rows: list[dict[str, Any]]) -> dict[str, float]:
    """Times of each provider on a workload, each behind the gate."""
    import torch

    from treeattn.bench.gate import gate
    from treeattn.bench.inputs import COLD_BYTES, Inputs
    from treeattn.bench.timing import time_graph

    inputs = Inputs(work, torch.device("cuda"), COLD_BYTES)
    found: dict[str, float] = {}
    for name, provide in names:
        try:
            for calls in provide(inputs):
                error = gate(name, inputs, calls)
                timing = time_graph(calls.calls)
                found[name] = min(timing.us, found.get(name, math.inf))
                row = {"work": work.name(), "provider": name, "page": calls.page_size, **timing._asdict()}
                rows.append({**row, "rel_err": error, "floor_us": work.floor_us})
        except Exception as error:
            print(f"  {name} on {work.name()}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            found.setdefault(name, math.nan)
    return found


def warm_job(job: tuple[Any, str, Any]) -> str | None:
    """Compile what a workload needs, on the least one that needs the same."""
    import torch
    from tune import small

    from treeattn.bench.inputs import Inputs
    from treeattn.bench.providers import tree_calls

    work, backend, config = job
    try:
        tree_calls(Inputs(small(work), torch.device("cuda"), cold_bytes=0), backend, config).calls[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{backend} on {work.name()}: {type(error).__name__}: {str(error)[:200]}"
    return None


def warm(jobs: Iterable[tuple[Any, str, Any]]) -> None:
    begin = time.perf_counter()
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        for problem in pool.map(warm_job, jobs):
            if problem:
                print(f"  {problem}", flush=True)
    print(f"  compiled ahead in {time.perf_counter() - begin:.0f} s", flush=True)


def gqa_rows() -> list[tuple[Any, Any]]:
    from treeattn.bench.targets import GQA_TARGETS
    from treeattn.bench.workloads import load_workloads

    return list(zip(load_workloads(["gqa"]), GQA_TARGETS, strict=True))


def time_rows() -> int:
    import torch

    from treeattn.bench.providers import PROVIDERS, unavailable
    from treeattn.bench.run import environment

    names = [(name, PROVIDERS[name]) for name in ("treeattn_cuda", "treeattn_triton")]
    reason = unavailable("fa3_causal", torch.device("cuda"))
    if reason is None:
        names.append(("fa3_causal", PROVIDERS["fa3_causal"]))
    else:
        print(f"  no FlashAttention-3 ({reason}): ratios are to the chain of targets.json")
    warm((work, name, None) for work, _ in gqa_rows() for name in ("cuda", "triton"))
    rows: list[dict[str, Any]] = []
    lines = [f"  {'batch,q,prefix,heads':24} {'R':>5} {'floor':>7} {'must':>7} {'goal':>7} {'chain':>7} {'triton':>7} "
             f"{'cuda':>7}  cuda/chain"]  # fmt: skip
    logs: list[tuple[float, float, float]] = []
    for work, target in gqa_rows():
        found = timed(work, names, rows)
        cuda, triton = found["treeattn_cuda"], found["treeattn_triton"]
        chain = found.get("fa3_causal", target.chain)
        scale = chain / target.chain
        shape = f"{work.batch},{work.q_len},{work.prefix},{work.qo_heads}/{work.kv_heads}"
        mark = "goal" if cuda <= target.goal * scale else "must" if cuda <= target.must * scale else ""
        numbers = (work.floor_us, target.must * scale, target.goal * scale, chain, triton, cuda)
        columns = " ".join(f"{number:7.1f}" for number in numbers)
        lines.append(f"  {shape:24} {work.q_len * work.group:>5} {columns}  {cuda / chain:.2f} {mark}")
        if math.isfinite(cuda) and math.isfinite(triton):
            logs.append((math.log(chain / cuda), math.log(chain / triton), math.log(triton / cuda)))
        save("time", {"env": environment(torch.device("cuda")), "rows": rows})
        table("time", lines)
    if logs:
        mean = [math.exp(sum(column) / len(logs)) for column in zip(*logs, strict=True)]
        lines.append(
            f"  geomean over {len(logs)} rows: cuda {mean[0]:.3f}x of the chain's speed, triton {mean[1]:.3f}x; cuda "
            f"{mean[2]:.3f}x of triton's speed"
        )
    table("time", lines)
    return 27 - len(logs)


def variants() -> int:
    """Other shapes of the kernel, and the fence on the consumer's side, on rows of each kind."""
    from treeattn.bench.providers import tree_calls
    from treeattn.config import KernelConfig

    def config(consumers: int, keys: int, share: int = 2) -> KernelConfig:
        blocks = 2 if consumers == 1 else 1
        return KernelConfig(64 * consumers, keys, 128, 4 * consumers + 4, 6, blocks, share, "tuning")

    def run(macros: str, made: KernelConfig) -> Callable[[Any], Any]:
        def provide(inputs: Any) -> Any:
            os.environ["TREEATTN_CUDA_MACROS"] = macros
            try:
                return [tree_calls(inputs, "cuda", made)]
            finally:
                os.environ["TREEATTN_CUDA_MACROS"] = ""

        return provide

    kinds = {f"c{c}n{n}": config(c, n) for c, n in ((1, 64), (2, 64), (2, 128), (3, 64))}
    names = [(name, run("", made)) for name, made in kinds.items()]
    names += [(f"{name}-fence", run(FENCE, kinds[name])) for name in ("c1n64", "c2n64", "c3n64")]
    names += [("c2n64-m1", run("", config(2, 64, 1))), ("c3n64-m1", run("", config(3, 64, 1)))]
    rows: list[dict[str, Any]] = []
    lines = [f"  {'batch,q,prefix,heads':24} {'floor':>7} " + " ".join(f"{name:>12}" for name, _ in names)]
    works = [work for index, (work, _) in enumerate(gqa_rows()) if index in VARIANT_ROWS]
    warm((work, "cuda", made) for work in works for made in kinds.values())
    for work in works:
        found = timed(work, names, rows)
        shape = f"{work.batch},{work.q_len},{work.prefix},{work.qo_heads}/{work.kv_heads}"
        lines.append(f"  {shape:24} {work.floor_us:7.1f} " + " ".join(f"{found[name]:12.1f}" for name, _ in names))
        save("variants", rows)
        table("variants", lines)
    table("variants", lines)
    return 0


STAGES: dict[str, Callable[[], int]] = {
    "build": build, "smoke": smoke, "cases": cases, "time": time_rows, "variants": variants, "canary": canary,
    "graph": graph,
}  # fmt: skip
MEMCHECK = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
MACROS = {"smoke": CHECKED, "cases": CHECKED, "canary": CANARY, "graph": CHECKED}


def main() -> int:
    if len(sys.argv) == 3 and sys.argv[1] == "--stage":
        return 1 if STAGES[sys.argv[2]]() else 0
    start, failed = time.perf_counter(), []
    for stage in sys.argv[1:] or list(STAGES):
        begin = time.perf_counter()
        left = BUDGET - (begin - start)
        if left < 40:
            print(f"== {stage}: no time left")
            failed.append(stage)
            continue
        print(f"== {stage}", flush=True)
        environ = {**os.environ, "TREEATTN_CUDA_MACROS": MACROS.get(stage, ""), "PYTHONUNBUFFERED": "1"}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        limit = min(LIMITS[stage], left)
        # a session of its own, so that the pool of a stage that hangs ends with it
        command = [sys.executable, __file__, "--stage", stage]
        if stage == "memcheck":
            environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # torch's allocator would hide overruns
            command = [*MEMCHECK, *command[:-1], "smoke"]
        running = subprocess.Popen(command, env=environ, start_new_session=True)
        try:
            status: Any = running.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            status = f"no end after {limit:.0f} s"
        print(f"== {stage}: exit status {status}, {time.perf_counter() - begin:.0f} s", flush=True)
        if status != 0:
            failed.append(stage)
        if status != 0 and stage in ("build", "smoke"):
            print(f"== nothing more without {stage}")
            break
    for stage in ("variants", "time"):
        path = OUT / f"cuda-first-{stage}.txt"
        if path.is_file() and path.stat().st_mtime > time.time() - BUDGET:
            print(f"== {stage}\n{path.read_text()}", end="")
    print(f"== failed: {', '.join(failed) or 'nothing'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
