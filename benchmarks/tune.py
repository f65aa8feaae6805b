"""Time configurations of the kernels that are not (yet) what a step takes.

    PYTHONPATH=. python benchmarks/tune.py --configs 128n64w8s3p1 64n64w4s3p2 64n32w4s4p2 --out tune.json
    PYTHONPATH=. python benchmarks/tune.py --sets mla --configs 64n64w8s2p1 64n32w8s2p1 --out tune-mla.json
    PYTHONPATH=. python benchmarks/tune.py --sets ragged --configs c1 c2 c3 --out tune-ragged.json

A configuration of Triton is written ``<block_m>n<block_n>w<warps>s<stages>p<programs per SM>[m<share>][x<cap>]``;
``m`` is the fewest KV tiles of a program, ``x`` caps a thread's registers; the padded head dim follows from the
workload. ``c1``, ``c2`` and ``c3`` are the kernels of csrc for 16-bit caches, by their consumer warpgroups. Every one
passes the benchmark's gate on the inputs that are timed. Kernels are compiled beforehand in a pool of processes, and
the peers of ``treeattn bench`` stand beside them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from treeattn.bench.gate import gate
from treeattn.bench.inputs import COLD_BYTES, Inputs
from treeattn.bench.providers import CHAINS, PROVIDERS, tree_calls, unavailable
from treeattn.bench.run import environment
from treeattn.bench.timing import time_graph
from treeattn.bench.workloads import Workload, load_workloads
from treeattn.config import KernelConfig, select_config
from treeattn.cuda.config import consumer_config

PATTERN = re.compile(r"(\d+)n(\d+)w(\d+)s(\d+)p(\d+)(?:m(\d+))?(?:x(\d+))?$")
CUDA_PATTERN = re.compile(r"c([123])$")


def backend_of(text: str) -> str:
    """Whose configuration it is."""
    return "cuda" if CUDA_PATTERN.match(text) else "triton"


def parse_config(text: str, work: Workload) -> KernelConfig:
    """Read a configuration for a workload as written in the module's docstring."""
    if cuda := CUDA_PATTERN.match(text):
        return consumer_config(int(cuda[1]), work.head_dim)
    found = PATTERN.match(text)
    if found is None:
        raise ValueError(f"{text!r} is not written as the docstring of benchmarks/tune.py says")
    block_m, block_n, warps, stages, programs, share, registers = found.groups()
    # block_d is the geometry's, whatever the chip: with shared_kv what lies behind V is padded apart
    usual = select_config(
        90, getattr(torch, work.dtype), work.group, work.head_dim, work.q_len, head_dim_v=work.dim_v,
        shared_kv=work.shared_kv, kv_dtype=getattr(torch, work.cache_dtype),
    )  # fmt: skip
    return replace(
        usual, block_m=int(block_m), block_n=int(block_n), num_warps=int(warps), num_stages=int(stages),
        programs_per_sm=int(programs), min_share=int(share or 2), reason="tuning", max_registers=int(registers or 0),
    )  # fmt: skip


def small(work: Workload) -> Workload:
    """The least workload that needs the same kernels: one request of the largest width, a short prefix."""
    return replace(work, kind="compile", batch=1, prefix=256, prefixes=None, q_lens=None, layers=1)


def compile_ahead(job: tuple[Workload, str]) -> str | None:
    """Compile a configuration on a small workload; says what went wrong."""
    work, text = job
    try:
        inputs = Inputs(work, torch.device("cuda"), cold_bytes=0)
        tree_calls(inputs, backend_of(text), parse_config(text, work)).calls[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{text} on {work.name()}: {type(error).__name__}: {str(error)[:300]}"
    return None


def measure(work: Workload, configs: list[str], peers: list[str]) -> dict[str, Any]:
    """Microseconds of each configuration and peer on a workload; NaN for what fails the gate."""
    inputs = Inputs(work, torch.device("cuda"), COLD_BYTES)
    times: dict[str, float] = {}
    for name in peers:
        variants = PROVIDERS[name](inputs)
        if variants:
            times[name] = min(time_graph(variant.calls).us for variant in variants)
    for text in configs:
        try:
            calls = tree_calls(inputs, backend_of(text), parse_config(text, work))
            gate(text, inputs, calls)
            times[text] = time_graph(calls.calls).us
        except Exception as error:
            print(f"{text} on {work.name()}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    return {"workload": work.name(), "floor_us": work.floor_us, "us": times}


def main() -> int:
    """Compile, measure, print a line for each workload and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", required=True)
    parser.add_argument("--sets", nargs="+", default=["gqa"], help="workload sets of treeattn bench")
    parser.add_argument("--rows", nargs="+", type=int, help="indices into the sets, all by default")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    works = load_workloads(args.sets)
    works = works if args.rows is None else [works[index] for index in args.rows]
    for work in works:
        for text in args.configs:
            parse_config(text, work)
    jobs = dict.fromkeys((small(work), text) for work in works for text in args.configs)
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        for problem in pool.map(compile_ahead, jobs):
            if problem:
                print(problem, file=sys.stderr)
    device = torch.device("cuda")
    peers = [name for name in CHAINS if unavailable(name, device, works) is None]
    rows = []
    for work in works:
        rows.append(measure(work, args.configs, peers))
        ranked = sorted(rows[-1]["us"].items(), key=lambda item: item[1])
        times = "  ".join(f"{name} {us:.1f}" for name, us in ranked)
        print(f"{work.name()} floor {work.floor_us:.1f} | {times}", flush=True)
        torch.cuda.empty_cache()
    if args.out is not None:
        args.out.write_text(json.dumps({"env": environment(device), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
