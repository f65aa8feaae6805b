"""``treeattn check``: a sweep over the option table and adversarial verify steps, judged against float64.

Each case runs plainly and through StaticBuffers, with poisoned memory and guard regions; each adversarial case is also
read bit by bit (`treeattn.testing.exact`). What a backend does not cover (`treeattn.capabilities`) it must refuse, and
what it covers it must not. Seeds become cases in `treeattn.testing.sweep`; `judge_dump` is for tensors from somebody's
own integration and lives in `treeattn.dump`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from .testing.counts import Counts

__all__ = ["CheckReport", "flip_mask_bit", "run_check"]

Progress = Callable[[str], None]
SCORED = ("very-negative-score",)
"""Adversarial cases whose point is in their scores: q = 0 would take it away."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of the adversarial cases."""
MOST_JOBS = 14
"""Processes on a GPU: each holds about 0.5 GiB of it for its context."""
MOST_CRASHES = 50
"""After so many the check gives up: something is wrong with the machine, and each costs a new process."""
SLOW = (("triton", "cpu"), ("reference", "cuda"))
"""The interpreter, and a loop over nodes that launches a dozen kernels each: their random cases are small ones."""
ADVERSARIAL_TASK = 6
PROGRESS_S = 2


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
    drawn : Counts or None
        How often each option and pair of options was drawn, for one backend; None without random cases.
    ran : dict of str to Counts
        By backend, the same for the cases that it did not refuse.
    refused : dict of str to Counter
        By backend, how many cases it refused, by what it lacks.
    paths : Counter
        Runs by path.
    caught : int
        Cases times backends with a wrong run.
    """

    runs: int = 0
    worst_ratio: float = -1.0
    worst: str = ""
    repeat: str = ""
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    drawn: Counts | None = None
    ran: dict[str, Counts] = field(default_factory=dict)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    paths: Counter[str] = field(default_factory=Counter)
    caught: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        """Plain data; pairs of options by name, such as ``"window=window + sinks=sinks"``."""
        names = ("runs", "caught", "worst_ratio", "worst", "repeat", "failures", "seconds")
        return {
            "ok": self.ok,
            **{name: getattr(self, name) for name in names},
            "paths": dict(self.paths),
            "drawn": None if self.drawn is None else self.drawn.as_json(),
            "backends": {
                name: {"refused": dict(self.refused[name]), "ran": ran.as_json()} for name, ran in self.ran.items()
            },
        }


class Item(NamedTuple):
    """One case on one backend, as a worker gets it; `dtype` None is the case's own."""

    order: int
    backend: str
    device: str
    name: str
    adversarial: bool
    dtype: torch.dtype | None
    inject_fault: bool


class Outcome(NamedTuple):
    """What came of it: `runs` are (path, ok, ratio, message), or it was `refused` because of what is lacking."""

    description: str
    dtype: str
    runs: list[tuple[str, bool, float, str]]
    refused: str | None


def flip_mask_bit(layout: Any) -> None:
    """Flip one bit of a layout's mask: whether the last node of the first request with nodes sees itself.

    No window hides it, whatever its width.
    """
    for request, nodes in enumerate(layout.num_nodes.tolist()):
        if nodes > 0:
            node = nodes - 1
            bit = 1 << node % 64
            layout.mask_words[int(layout.qo_indptr[request]) + node, node // 64] ^= bit - 2**64 if bit == 2**63 else bit
            return


def _forget_a_token(layout: Any) -> None:
    """Take a token from the first prefix: a fault for runs that read no mask."""
    for request, (nodes, prefix) in enumerate(zip(layout.num_nodes.tolist(), layout.prefix_lens.tolist(), strict=True)):
        if nodes > 0 and prefix > 0:
            layout.prefix_lens[request] -= 1
            return


def _case_of(item: Item) -> Any:
    from .testing.faults import adversarial_case
    from .testing.sweep import sweep_case

    device = torch.device(item.device)
    if item.adversarial:
        return adversarial_case(item.name, dtype=item.dtype or torch.float32, device=device)
    scale = "small" if (item.backend, device.type) in SLOW else "normal"
    return sweep_case(int(item.name), dtype=item.dtype, device=device, scale=scale)


def run_item(item: Item) -> Outcome:
    """Build a case, run it on every path and judge it; whatever else goes wrong is raised."""
    from .capabilities import missing
    from .testing.run import asked_of

    case = _case_of(item)
    dtype = str(case.dtype)[6:]
    asked = asked_of(case)
    lacking = missing(item.backend, case.device.type, asked)
    if lacking is not None:
        # a step is refused for what it lacks before a call is for its soft cap or sinks
        at_plan = missing(item.backend, case.device.type, replace(asked, logits_soft_cap=0.0, sinks=False))
        wrong = _refuses(case, item.backend, at_plan or lacking)
        runs = [] if wrong is None else [("plain", False, float("inf"), wrong)]
        return Outcome(case.describe(), dtype, runs, lacking)
    try:
        runs = [(path, bool(v.ok), float(v.ratio), v.message) for path, v in _runs(case, item)]
    except NotImplementedError as error:
        runs = [("plain", False, float("inf"), f"refused, though its capability table has all of it: {error}")]
    return Outcome(case.describe(), dtype, runs, None)


def _refuses(case: Any, backend: str, lacking: str) -> str | None:
    """What is wrong with how a backend meets a case that it does not cover, or None."""
    from .testing import run_plain

    try:
        run_plain(case, backend)
    except NotImplementedError as error:
        return None if lacking in str(error) else f"it must say that {lacking}, it says: {error}"
    return f"it ran, though by its capability table {lacking}"


def _runs(case: Any, item: Item) -> Iterator[tuple[str, Any]]:
    """Name and verdict of each run of a case."""
    from .testing import Verdict, check_case, run_plain, truth, wrong_weight

    expected = truth(case)
    spoil = None
    if item.inject_fault:
        spoil = _forget_a_token if case.options.part == "prefix" else flip_mask_bit
        yield "plain", check_case(case, item.backend, "plain", expected, spoil=spoil)
    else:
        for path in ("plain", "static"):
            yield path, check_case(case, item.backend, path, expected)
    if item.adversarial and case.name not in SCORED:
        wrong = wrong_weight(case, lambda probe: run_plain(probe, item.backend, spoil=spoil).out)
        yield "mask bits", Verdict(wrong is None, 0.0 if wrong is None else float("inf"), wrong or "exact")


def _device_answers(item: Item) -> bool:
    """Whether a worker can go on after an error: one on a GPU may have taken the context with it."""
    if not item.device.startswith("cuda"):
        return True
    try:
        torch.cuda.synchronize(item.device)
    except Exception:
        return False
    return True


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


def default_jobs(device: str) -> int:
    """Processes of a check: the cores, up to `MOST_JOBS`, on a GPU, where compiling takes the time; 1 on a CPU."""
    if not device.startswith("cuda"):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_JOBS)


def _tasks(
    backend: str, device: str, cases: int, seed: int, case: str | None, dtype: torch.dtype | None, fault: bool
) -> Iterator[list[Item]]:
    """Lists of cases that share compiled kernels, without their order: the adversarial ones first, which vary most."""
    from .testing.faults import ADVERSARIAL
    from .testing.sweep import draw

    def item(name: str, adversarial: bool, kind: torch.dtype | None) -> Item:
        return Item(0, backend, device, name, adversarial, kind, fault)

    names = list(ADVERSARIAL) if case is None else [case] if case in ADVERSARIAL else []
    for kind in DTYPES if dtype is None else (dtype,):
        for first in range(0, len(names), ADVERSARIAL_TASK):
            yield [item(name, True, kind) for name in names[first : first + ADVERSARIAL_TASK]]
    by_kernel: dict[int, list[Item]] = {}
    seeds = range(seed, seed + cases) if case is None else () if names else (int(case),)
    for number in seeds:
        by_kernel.setdefault(draw(number).kernel, []).append(item(str(number), False, dtype))
    yield from by_kernel.values()


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
    jobs: int | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Check backends on a device.

    Parameters
    ----------
    device : str
    backends : sequence of str, optional
        Default: every backend that works on the device.
    cases : int
        Random cases per backend, seeds ``seed, seed + 1, ...``; the adversarial ones come on top, in each dtype.
    case : str, optional
        Only this case: a seed, or the name of an adversarial case.
    dtype : torch.dtype, optional
        Only this dtype; default: what a seed draws, and for the adversarial cases float32, float16 and bfloat16.
    inject_fault : bool
        Flip a mask bit of every case (or take a token from a prefix where no mask is read): the check must then fail.
    fail_fast : bool
        Stop at the first wrong run.
    jobs : int, optional
        Worker processes, 1 for none; default: :func:`default_jobs`. A worker that dies is a failure.
    progress : callable, optional
        Gets a line from time to time.

    Raises
    ------
    ValueError
        If a named backend does not work on the device (with the reason), or `case` names nothing.
    """
    from .testing.faults import ADVERSARIAL
    from .testing.workers import Crash, run_tasks

    if case is not None and case not in ADVERSARIAL and not case.removeprefix("-").isdigit():
        raise ValueError(f"case {case!r} is neither a seed nor one of {', '.join(ADVERSARIAL)}")
    begin = last = time.monotonic()
    chosen = _chosen_backends(torch.device(device), backends)
    jobs = default_jobs(device) if jobs is None else jobs
    unordered = [task for name in chosen for task in _tasks(name, device, cases, seed, case, dtype, inject_fault)]
    if jobs > 1:  # what compiles most comes first, so that no long task is left for the end
        unordered.sort(key=lambda task: (task[0].backend != "triton", not task[0].adversarial))
    total, tasks = 0, []
    for task in unordered:
        tasks.append([one._replace(order=total + place) for place, one in enumerate(task)])
        total += len(task)
    report, failures, crashes = CheckReport(), [], 0
    for done, (item, outcome) in enumerate(run_tasks(run_item, tasks, jobs, usable=_device_answers), 1):
        wrong = _note(report, item, outcome)
        failures += [(item.order, line) for line in wrong]
        crashes += isinstance(outcome, Crash)
        if crashes == MOST_CRASHES:
            failures.append((total, f"gave up after {crashes} crashes, {total - done} cases were not run"))
        if crashes == MOST_CRASHES or (wrong and fail_fast):
            break
        if progress and time.monotonic() - last > PROGRESS_S:
            last = time.monotonic()
            counts = f"{done} of {total} cases, {sum(sum(found.values()) for found in report.refused.values())} refused"
            now = f"now {item.backend} case {item.name}"
            progress(f"{counts}, {now}, worst ratio {report.worst_ratio:.2f}, {len(failures)} wrong")
    report.failures = [line for _, line in sorted(failures)]
    report.drawn = _drawn(cases, seed, dtype) if case is None and cases else None
    report.seconds = time.monotonic() - begin
    return report


def _drawn(cases: int, seed: int, dtype: torch.dtype | None) -> Counts:
    from .testing.counts import Counts
    from .testing.sweep import draw

    counts = Counts()
    for number in range(seed, seed + cases):
        counts.add(draw(number, dtype))
    return counts


def _note(report: CheckReport, item: Item, outcome: Any) -> list[str]:
    """Enter an item's outcome; returns the lines about what is wrong."""
    from .testing.counts import Counts
    from .testing.sweep import draw
    from .testing.workers import Crash

    repeat = f"treeattn check --device {item.device} --backend {item.backend}"
    crashed = isinstance(outcome, Crash)
    dtype = None if item.dtype is None else str(item.dtype)[6:]
    dtype = dtype if crashed else outcome.dtype
    repeat += (f" --dtype {dtype}" if dtype else "") + f" --case {item.name}" + " --inject-fault" * item.inject_fault
    refused = report.refused.setdefault(item.backend, Counter())
    ran = report.ran.setdefault(item.backend, Counts())
    if crashed:
        report.caught += 1
        return [f"{item.backend} case {item.name}: {outcome.message}\n    repeat: {repeat}"]
    if outcome.refused is not None:
        refused[outcome.refused.partition(", asked for")[0].partition(", got")[0]] += 1
    elif not item.adversarial:
        ran.add(draw(int(item.name), item.dtype))
    wrong = []
    for path, ok, ratio, message in outcome.runs:
        report.runs += 1
        report.paths[path] += 1
        line = f"{item.backend} {path}: {message}\n    {outcome.description}\n    repeat: {repeat}"
        if not ok:
            wrong.append(line)
        if ratio > report.worst_ratio:
            report.worst_ratio, report.worst, report.repeat = ratio, line, repeat
    report.caught += bool(wrong)
    return wrong
