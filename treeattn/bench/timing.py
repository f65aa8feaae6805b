"""Times in microseconds: medians over replays of a CUDA graph of many calls, or of host calls."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from treeattn.graphs import capture

__all__ = ["Timing", "graph_of", "measure_ceilings", "time_calls", "time_graph", "time_host"]

REPLAYS = 15
FEWEST_REPLAYS, ENOUGH_S = 3, 1.5  # of a graph that takes long: the most replays that end within this, or the fewest
FEWEST_CALLS = 8


class Timing(NamedTuple):
    """Median, 20th and 80th percentile, microseconds per call."""

    us: float
    p20: float
    p80: float


def _summary(samples: list[float]) -> Timing:
    ordered = sorted(samples)
    pick = [ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in (0.5, 0.2, 0.8)]
    return Timing(*pick)


def graph_of(calls: Sequence[Callable[[], Any]]) -> tuple[torch.cuda.CUDAGraph, int]:
    """The calls in one CUDA graph, again until there are `FEWEST_CALLS`, replayed once; and how many these are."""
    rounds = -(-FEWEST_CALLS // len(calls))

    def each() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    def some() -> None:
        for call in calls[:2]:
            call()

    graph, _ = capture(each, warm_up=some)
    graph.replay()
    torch.cuda.synchronize()
    return graph, rounds * len(calls)


def time_graph(calls: Sequence[Callable[[], Any]], replays: int = REPLAYS) -> Timing:
    """Capture the calls in one CUDA graph and time its replays.

    The calls rotate over copies of their inputs, so that each finds a cold L2: the caller provides enough of them.
    """
    graph, count = graph_of(calls)
    begin_s = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    replays = min(replays, max(FEWEST_REPLAYS, int(ENOUGH_S / (time.perf_counter() - begin_s))))
    new_event: Callable[[], Any] = functools.partial(torch.cuda.Event, enable_timing=True)
    events = [(new_event(), new_event()) for _ in range(replays)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return _summary([begin.elapsed_time(end) * 1000 / count for begin, end in events])


def time_host(call: Callable[[], Any], samples: int = 300, sync: Callable[[], None] | None = None) -> Timing:
    """Time each call on the host clock; `sync` empties the queue now and then, outside the samples."""
    for _ in range(20):
        call()
    took = []
    for index in range(samples):
        if sync is not None and index % 25 == 0:
            sync()
        begin = time.perf_counter()
        call()
        took.append((time.perf_counter() - begin) * 1e6)
    if sync is not None:
        sync()
    return _summary(took)


def time_calls(calls: Sequence[Callable[[], Any]], device: torch.device) -> Timing:
    """Graph replays on CUDA; on a CPU the host clock over a few calls."""
    if device.type == "cuda":
        return time_graph(calls)
    calls[0]()
    took = []
    for _ in range(3):
        begin = time.perf_counter()
        for call in calls[:3]:
            call()
        took.append((time.perf_counter() - begin) * 1e6 / len(calls[:3]))
    return _summary(took)


def measure_ceilings(device: torch.device, copy_bytes: int = 2**31, size: int = 8192) -> dict[str, float]:
    """What this device reaches, by the clock of the rows.

    ``copy_tb_s`` is of a copy of `copy_bytes`, reads and writes counted, ``bf16_tflop_s`` of a product of square
    matrices. The floors of the rows are those of an H200: a result of another chip tells its own by these numbers.
    """
    source = torch.empty(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(left)
    copy = time_calls([lambda: target.copy_(source)], device).us
    matmul = time_calls([lambda: torch.mm(left, left, out=product)], device).us
    rates = {"copy_tb_s": 2 * copy_bytes / copy / 1e6, "bf16_tflop_s": 2 * size**3 / matmul / 1e6}
    return {name: float(f"{rate:.4g}") for name, rate in rates.items()}
