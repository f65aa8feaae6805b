"""A CUDA graph of a callable, as the demo and the benchmark capture them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["capture"]

Result = TypeVar("Result")


def capture(
    run: Callable[[], Result], *, warm_up: Callable[[], object] | None = None, device: torch.device | None = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Warm up on a stream of its own, then capture `run`.

    Garbage is collected before, and not during: a graph that dies while another is captured resets itself, which a
    stream does not permit then, and the capture fails.

    Parameters
    ----------
    run : callable
        What the graph does; it must be capturable.
    warm_up : callable, optional
        Run twice before the capture, `run` by default: compiles kernels and lets libraries make their handles.
    device : torch.device, optional
        The current CUDA device by default.

    Returns
    -------
    torch.cuda.CUDAGraph
    object
        What `run` returned under capture: a replay writes these tensors again.
    """
    warm_up = run if warm_up is None else warm_up
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                warm_up()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph):
                result = run()
        finally:
            if collects:
                gc.enable()
    return graph, result
