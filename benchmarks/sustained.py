"""Times of calls in a burst and without a pause, each with the SM clock behind it: where power limits a chip.

    PYTHONPATH=. python benchmarks/sustained.py --backend cuda gqa:12 gqa:14 ragged:3

A row is a set of `treeattn bench` and a number in it. The clock is what a kernel counts that spins for 40 µs behind the
calls.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from treeattn.bench.inputs import COLD_BYTES, Inputs
from treeattn.bench.providers import tree_calls
from treeattn.bench.timing import graph_of
from treeattn.bench.workloads import SETS, Workload

BURST, PAUSE_S = 3, 0.3
SPIN = r"""
extern "C" __global__ void spin(unsigned long long* told) {
  unsigned long long begin, now;
  const long long clocks = clock64();
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (now - begin < 40000);
  told[0] = clock64() - clocks;
  told[1] = now - begin;
}
"""


def clock_reader() -> Callable[[], float]:
    """A function that measures the SM clock, GHz, on the current stream."""
    import cupy

    kernel, told = cupy.RawKernel(SPIN, "spin"), cupy.zeros(2, dtype=cupy.uint64)

    def read() -> float:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel((1,), (1,), (told,))
            clocks, nanoseconds = told.get().tolist()
        return float(round(clocks / nanoseconds, 3))

    return read


def measure(work: Workload, backend: str, seconds: float, clock: Callable[[], float]) -> dict[str, Any]:
    """µs a call of `BURST` replays behind a pause, then of the last of `seconds` without one; GHz behind each."""
    graph, count = graph_of(tree_calls(Inputs(work, torch.device("cuda"), COLD_BYTES), backend).calls)
    new_event: Callable[[], Any] = functools.partial(torch.cuda.Event, enable_timing=True)

    def replay(times: int) -> float:
        begin, end = new_event(), new_event()
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1000 / (times * count)

    time.sleep(PAUSE_S)
    burst, burst_ghz = replay(BURST), clock()
    began, last = time.perf_counter(), burst
    while time.perf_counter() - began < seconds:
        last = replay(10)
    row = [work.batch, work.q_len, work.prefix, work.qo_heads, work.kv_heads]
    return {"row": row, "burst_us": burst, "burst_ghz": burst_ghz, "sustained_us": last, "sustained_ghz": clock()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", metavar="SET:NUMBER")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    clock, rows = clock_reader(), []
    for name in args.rows:
        which, number = name.split(":")
        rows.append(measure(SETS[which]()[int(number)], args.backend, args.seconds, clock))
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
