"""Work in processes of its own, where a crash or a hang costs one item and is told, not the run.

Tasks are lists of items; one worker does the items of a task in order, so that what it prepares for the first (compiled
kernels) serves the rest. A worker that dies, hangs or lost its device is replaced, and goes on behind the item it died
of. With one job everything runs here, in this process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["STALL_S", "Crash", "run_tasks"]

STALL_S = 300.0
"""Seconds without an answer after which a worker counts as hung; compiling a kernel on a busy core takes up to 60."""
RETIRED = 86
"""Exit status of a worker that cannot go on and has answered for its last item."""


@dataclass(frozen=True)
class Crash:
    """What came of an item instead of a result: the end of a traceback, or how its worker died."""

    message: str


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    items: deque[Any] = field(default_factory=deque)
    since: float = 0.0
    started: bool = False


def _attempt(function: Callable[[Any], Any], item: Any) -> Any:
    try:
        return function(item)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Crash(f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})")


def _serve(pipe: Connection, function: Callable[[Any], Any], usable: Callable[[Any], bool]) -> None:
    """The life of a worker: it says that it is there; then lists of items come in, one result for each goes out."""
    import torch

    torch.set_num_threads(1)  # the other cores have workers of their own
    pipe.send(None)
    while True:
        for item in pipe.recv():
            result = _attempt(function, item)
            pipe.send(result)
            if isinstance(result, Crash) and not usable(item):
                sys.exit(RETIRED)


def _always(item: Any) -> bool:
    return True


def run_tasks(
    function: Callable[[Any], Any],
    tasks: Sequence[Sequence[Any]],
    jobs: int = 1,
    *,
    usable: Callable[[Any], bool] = _always,
    stall_s: float = STALL_S,
) -> Iterator[tuple[Any, Any]]:
    """Each item with its result, or a :class:`Crash`, as they come.

    Parameters
    ----------
    function : callable
        Of a module, so that a worker can import it; items and results can be pickled.
    tasks : sequence of sequences
        The longest first.
    jobs : int
        Processes; 1 for none but this one.
    usable : callable
        Called after an item that raised, with it: whether its worker can go on, or another must take over.
    stall_s : float
        Seconds without an answer after which a worker is killed, once it has started.
    """
    if jobs <= 1:
        for task in tasks:
            for item in task:
                yield item, _attempt(function, item)
        return
    context = multiprocessing.get_context("spawn")
    waiting = deque(deque(task) for task in tasks if task)
    workers: list[_Worker] = []
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, function, usable), daemon=True)
                process.start()
                theirs.close()
                workers.append(_Worker(process, ours))
                _give(workers[-1], waiting.popleft())
            ready = wait([worker.pipe for worker in workers], timeout=1.0)
            for worker in [*workers]:
                if worker.pipe in ready:
                    yield from _collect(worker, waiting, workers)
                elif time.monotonic() - worker.since > (limit := stall_s if worker.started else STALL_S):
                    worker.process.kill()
                    yield worker.items.popleft(), Crash(f"no answer for {limit:.0f} s: killed")
                    _retire(worker, waiting, workers)
    finally:
        for worker in workers:
            worker.process.kill()


def _give(worker: _Worker, items: deque[Any]) -> None:
    worker.items, worker.since = items, time.monotonic()
    with contextlib.suppress(OSError):  # it may have retired since; its pipe then ends, and the items wait for another
        worker.pipe.send(list(items))


def _collect(worker: _Worker, waiting: deque[deque[Any]], workers: list[_Worker]) -> Iterator[tuple[Any, Any]]:
    """One answer of a worker, or its death."""
    try:
        result = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join()
        if worker.items and worker.process.exitcode != RETIRED:
            yield worker.items.popleft(), Crash(f"its process died with exit status {worker.process.exitcode}")
        _retire(worker, waiting, workers)
        return
    worker.since = time.monotonic()
    if not worker.started:
        worker.started = True
        return
    yield worker.items.popleft(), result
    if worker.items:
        return
    if waiting:
        _give(worker, waiting.popleft())
    else:
        worker.process.kill()
        _retire(worker, waiting, workers)


def _retire(worker: _Worker, waiting: deque[deque[Any]], workers: list[_Worker]) -> None:
    """Forget a worker that is gone; what it had left to do waits for another one."""
    worker.pipe.close()
    worker.process.join()
    workers.remove(worker)
    if worker.items:
        waiting.appendleft(worker.items)
