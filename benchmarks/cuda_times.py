"""Times of the CUDA backend: the 27 rows of targets.json, and other shapes of the kernel on some of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

from cuda_common import WORKERS, save
from isolated import run_isolated

VARIANT_ROWS = (0, 2, 3, 5, 6, 8, 12, 14, 15, 17, 18, 20, 23, 26)
PARTS = ("attention",)
"""Providers whose output is not whole."""


def timed(work: Any, names: list[tuple[str, Callable[[Any], Any]]], rows: list[dict[str, Any]]) -> dict[str, float]:
    """Times of each provider on a workload, each behind the gate but those whose name says that they do a part only."""
    import torch

    from treeattn.bench.gate import gate
    from treeattn.bench.inputs import COLD_BYTES, Inputs
    from treeattn.bench.timing import time_graph

    inputs = Inputs(work, torch.device("cuda"), COLD_BYTES)
    found: dict[str, float] = {}
    for name, provide in names:
        try:
            for calls in provide(inputs):
                error = math.nan if name in PARTS else gate(name, inputs, calls)
                timing = time_graph(calls.calls)
                found[name] = min(timing.us, found.get(name, math.inf))
                row = {"work": work.name(), "provider": name, "page": calls.page_size, **timing._asdict()}
                rows.append({**row, "rel_err": error, "floor_us": work.floor_us})
        except Exception as error:
            print(f"  {name} on {work.name()}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            found.setdefault(name, math.nan)
    return found


def warm_job(job: tuple[Any, str, Any]) -> str | None:
    """Compile what a workload needs by a call of it: plan and merge are compiled for its batch too."""
    import torch

    from treeattn.bench.inputs import Inputs
    from treeattn.bench.providers import tree_calls

    work, backend, config = job
    try:
        tree_calls(Inputs(work, torch.device("cuda"), cold_bytes=0), backend, config).calls[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{backend} on {work.name()}: {type(error).__name__}: {str(error)[:200]}"
    return None


def warm(jobs: Iterable[tuple[Any, str, Any]]) -> None:
    begin = time.perf_counter()
    problems = run_isolated(warm_job, list(jobs), lambda job, reason: f"{job[1]} on {job[0].name()}: {reason}", WORKERS)
    for problem in filter(None, problems):
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
        save("time", {"env": environment(torch.device("cuda")), "rows": rows, "table": lines})
    if logs:
        mean = [math.exp(sum(column) / len(logs)) for column in zip(*logs, strict=True)]
        lines.append(
            f"  geomean over {len(logs)} rows: cuda {mean[0]:.3f}x of the chain's speed, triton {mean[1]:.3f}x; cuda "
            f"{mean[2]:.3f}x of triton's speed"
        )
    save("time", {"env": environment(torch.device("cuda")), "rows": rows, "table": lines})
    return 27 - len(logs)


def variants() -> int:
    """Other shapes of the kernel on rows of each kind, and the attention without the merge."""
    from treeattn.bench.providers import tree_calls
    from treeattn.config import KernelConfig

    def config(consumers: int, keys: int, share: int = 2) -> KernelConfig:
        blocks = 2 if consumers == 1 else 1
        return KernelConfig(64 * consumers, keys, 128, 4 * consumers + 4, 6, blocks, share, "tuning")

    def run(made: KernelConfig | None) -> Callable[[Any], Any]:
        return lambda inputs: [tree_calls(inputs, "cuda", made)]

    kinds = {f"c{c}n{n}": config(c, n) for c, n in ((1, 64), (2, 64), (2, 128), (3, 64))}
    names = [("chosen", run(None)), *((name, run(made)) for name, made in kinds.items())]
    names += [("attention", attention_only(run(None)))]
    names += [("c2n64-m1", run(config(2, 64, 1))), ("c3n64-m1", run(config(3, 64, 1)))]
    rows: list[dict[str, Any]] = []
    lines = [f"  {'batch,q,prefix,heads':24} {'floor':>7} " + " ".join(f"{name:>12}" for name, _ in names)]
    works = [work for index, (work, _) in enumerate(gqa_rows()) if index in VARIANT_ROWS]
    warm((work, "cuda", made) for work in works for made in (None, *kinds.values(), config(2, 64, 1)))
    for work in works:
        found = timed(work, names, rows)
        shape = f"{work.batch},{work.q_len},{work.prefix},{work.qo_heads}/{work.kv_heads}"
        lines.append(f"  {shape:24} {work.floor_us:7.1f} " + " ".join(f"{found[name]:12.1f}" for name, _ in names))
        save("variants", {"rows": rows, "table": lines})
    return 0


def attention_only(provide: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A provider whose calls leave the merge out: what it and its launch take is the rest."""
    from dataclasses import replace

    from treeattn.cuda.launch import CudaLayerLaunch
    from treeattn.kernels.launch import LOG2_E

    def attend(self: Any, q: Any, k: Any, v: Any, k_tree: Any, v_tree: Any, out: Any, lse: Any, scoring: Any) -> None:
        self.attention(k.shape[0], q, k, v, k_tree, v_tree, out, lse, scoring.sm_scale * LOG2_E)

    def alone(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with patch.object(CudaLayerLaunch, "__call__", attend):
                return call()

        return run

    def parts(inputs: Any) -> Any:
        return [replace(calls, calls=[alone(call) for call in calls.calls]) for calls in provide(inputs)]

    return parts
