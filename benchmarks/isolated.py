"""Jobs in processes that a fault cannot spread from: a CUDA error ends its process, and the next job gets a new one.

In a plain pool a process whose context is lost would fail every job after it, and one that dies would break the pool.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

SPAWN = get_context("spawn")


def _serve(work: Callable[[Any], Any], pipe: Connection) -> None:
    """In the child: a job at a time, until its context is lost."""
    import torch

    while (job := pipe.recv()) is not None:
        result = work(job)
        try:
            torch.cuda.synchronize()
            healthy = True
        except Exception:  # whatever a lost context makes torch say
            healthy = False
        pipe.send((healthy, result))
        if not healthy:
            return


class _Worker:
    """A child process that is replaced when it is lost."""

    def __init__(self, work: Callable[[Any], Any], limit: float) -> None:
        self.work, self.limit = work, limit
        self.process: Any = None

    def run(self, job: Any) -> tuple[Any, str | None]:
        """Result of a job, and None; or None and how it was lost."""
        if self.process is None:
            self.pipe, theirs = SPAWN.Pipe()
            self.process = SPAWN.Process(target=_serve, args=(self.work, theirs), daemon=True)
            self.process.start()
            theirs.close()
        try:
            self.pipe.send(job)
            if not self.pipe.poll(self.limit):
                self.end()
                return None, f"no answer after {self.limit:.0f} s"
            healthy, result = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code, self.process = self.process.exitcode, None
            return None, f"its process ended with {code}"
        if not healthy:
            self.end()
        return result, None

    def end(self) -> None:
        """Kill the process, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def run_isolated(
    work: Callable[[Any], Any], jobs: Sequence[Any], lost: Callable[[Any, str], Any], workers: int, limit: float = 60
) -> list[Any]:
    """Results of `work` over `jobs`, in order.

    Parameters
    ----------
    work : callable
        Of a module that a child imports; it catches what it can.
    lost : callable
        Makes the result of a job whose process died, or gave no answer, from the job and the reason.
    workers : int
    limit : float
        Seconds for a job, the start of its process included.
    """
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(jobs)):
        todo.put(index)
    results: list[Any] = [None] * len(jobs)

    def loop() -> None:
        worker = _Worker(work, limit)
        while True:
            try:
                index = todo.get_nowait()
            except queue.Empty:
                break
            result, reason = worker.run(jobs[index])
            results[index] = result if reason is None else lost(jobs[index], reason)
        worker.end()

    threads = [threading.Thread(target=loop) for _ in range(min(workers, len(jobs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
