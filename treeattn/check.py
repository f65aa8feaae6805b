"""``treeattn check``: random and adversarial verify steps on the chosen backends, judged against float64.

Each case runs plainly and through StaticBuffers, with poisoned memory and guard regions; each adversarial case is also
read bit by bit (`treeattn.testing.exact`). `judge_dump` is for tensors from somebody's own integration and lives in
`treeattn.dump`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["CheckReport", "flip_mask_bit", "run_check"]

Progress = Callable[[str], None]
SCORED = ("very-negative-score",)
"""Adversarial cases whose point is in their scores: q = 0 would take it away."""


@dataclass
class CheckReport:
    """What a check found.

    Attributes
    ----------
    runs : int
        Cases times backends times paths.
    worst_ratio : float
        Largest error as a share of its budget; at most 1 is right.
    worst : str
        The run it belongs to, and where.
    repeat : str
        Command line that repeats the worst case.
    failures : list of str
    seconds : float
    """

    runs: int = 0
    worst_ratio: float = -1.0
    worst: str = ""
    repeat: str = ""
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.failures


def _dtypes_for(backend: str, device: torch.device, dtype: torch.dtype | None) -> Sequence[torch.dtype]:
    if dtype is not None:
        return (dtype,)
    if backend == "triton" and device.type == "cpu":
        return (torch.float32, torch.float16)
    return (torch.float32, torch.float16, torch.bfloat16)


def _cases(
    case: str | None, cases: int, seed: int, device: torch.device, dtype: torch.dtype, scale: str
) -> Iterator[tuple[Any, bool]]:
    from .testing import random_case
    from .testing.faults import ADVERSARIAL, adversarial_case

    if case is not None:
        if case in ADVERSARIAL:
            yield adversarial_case(case, dtype=dtype, device=device), True
        else:
            yield random_case(int(case), dtype=dtype, device=device, scale=scale), False
        return
    for name in ADVERSARIAL:
        yield adversarial_case(name, dtype=dtype, device=device), True
    for index in range(cases):
        yield random_case(seed + index, dtype=dtype, device=device, scale=scale), False


def flip_mask_bit(layout: Any) -> None:
    """Flip one bit of a layout's mask: whether the last node of the first request with two nodes sees node 0."""
    for request, nodes in enumerate(layout.num_nodes.tolist()):
        if nodes > 1:
            row = int(layout.qo_indptr[request]) + nodes - 1
            layout.mask_words[row, 0] ^= 1
            return


def _chosen_backends(device: torch.device, backends: Sequence[str] | None) -> list[str]:
    import treeattn

    usable = treeattn.available_backends(device)
    chosen = list(backends) if backends else [name for name, reason in usable.items() if reason is None]
    for name in chosen:
        if name not in usable:
            raise ValueError(f"no backend {name!r}; there are {', '.join(usable)}")
        if usable[name] is not None:
            raise ValueError(f"backend {name!r} does not work on {device}: {usable[name]}")
    if not chosen:
        raise ValueError(f"no backend works on {device}: " + "; ".join(f"{n}: {why}" for n, why in usable.items()))
    return chosen


def _runs(case: Any, backend: str, adversarial: bool, inject_fault: bool) -> Iterator[tuple[str, Any]]:
    """Name and verdict of each run of a case."""
    from .testing import Verdict, check_case, run_plain, truth, wrong_weight

    expected = truth(case)
    if inject_fault:
        yield "plain", check_case(case, backend, "plain", expected, spoil=flip_mask_bit)
    else:
        for path in ("plain", "static"):
            yield path, check_case(case, backend, path, expected)
    if adversarial and case.name not in SCORED:
        spoil = flip_mask_bit if inject_fault else None
        wrong = wrong_weight(case, lambda probe: run_plain(probe, backend, spoil=spoil).out)
        yield "mask bits", Verdict(wrong is None, 0.0 if wrong is None else float("inf"), wrong or "exact")


def run_check(
    device: str = "cpu",
    backends: Sequence[str] | None = None,
    *,
    cases: int = 100,
    seed: int = 0,
    case: str | None = None,
    dtype: torch.dtype | None = None,
    inject_fault: bool = False,
    fail_fast: bool = False,
    progress: Progress | None = None,
) -> CheckReport:
    """Check backends on a device.

    Parameters
    ----------
    device : str
    backends : sequence of str, optional
        Default: every backend that works on the device.
    cases : int
        Random cases per backend and dtype, seeds ``seed, seed + 1, ...``; the adversarial ones come on top.
    case : str, optional
        Only this case: a seed, or the name of an adversarial case.
    dtype : torch.dtype, optional
        Only this dtype; default: all that the backend computes on the device.
    inject_fault : bool
        Flip one mask bit of every case that has two nodes in a request: the check must then fail.
    fail_fast : bool
        Stop at the first wrong run.
    progress : callable, optional
        Gets a line from time to time.

    Raises
    ------
    ValueError
        If a named backend does not work on the device (with the reason), or `case` names nothing.
    """
    from .testing.faults import ADVERSARIAL

    if case is not None and case not in ADVERSARIAL and not case.lstrip("-").isdigit():
        raise ValueError(f"case {case!r} is neither a seed nor one of {', '.join(ADVERSARIAL)}")
    where = torch.device(device)
    report, begin = CheckReport(), time.monotonic()
    last = begin
    for backend in _chosen_backends(where, backends):
        scale = "small" if backend == "triton" and where.type == "cpu" else "normal"
        for kind in _dtypes_for(backend, where, dtype):
            for one, adversarial in _cases(case, cases, seed, where, kind, scale):
                for path, verdict in _runs(one, backend, adversarial, inject_fault):
                    _note(report, verdict, one, backend, path, device)
                report.seconds = time.monotonic() - begin
                if report.failures and fail_fast:
                    return report
                if progress and time.monotonic() - last > 2:
                    last = time.monotonic()
                    progress(
                        f"{report.runs} runs, now {backend} {str(kind)[6:]} case {one.name}, "
                        f"worst ratio {report.worst_ratio:.2f}, {len(report.failures)} wrong"
                    )
    return report


def _note(report: CheckReport, verdict: Any, case: Any, backend: str, path: str, device: str) -> None:
    report.runs += 1
    repeat = f"treeattn check --device {device} --backend {backend} --dtype {str(case.dtype)[6:]} --case {case.name}"
    line = f"{backend} {path}: {verdict.message}\n    {case.describe()}\n    repeat: {repeat}"
    if not verdict.ok:
        report.failures.append(line)
    if verdict.ratio > report.worst_ratio:
        report.worst_ratio, report.worst, report.repeat = verdict.ratio, line, repeat
