"""Run every check that needs no GPU, each group in a process of its own, and close with one combined count.

Groups: `lint` (ruff, mypy), `cpu` (plain tests), `interpreter` (Triton kernels on CPU tensors), `compile`
(every shipped configuration for every chip, with the newest Triton, and the CUDA kernels) and `compile-old` (the
Triton kernels with the oldest). They cannot share a process: TRITON_INTERPRET must be set before Triton is imported,
and a compile test replaces Triton's driver.

Usage: `python tests/run.py [GROUP ...]`; TREEATTN_TEST_JOBS (default 2) is the number of worker processes.
The exit status is 0 only if every group ran at least one test and none failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JOBS = os.environ.get("TREEATTN_TEST_JOBS", "2")
OLD_TRITON = "3.6.0"
OLD_TRITON_DIR = str(ROOT / ".triton36")


@dataclass(frozen=True)
class Group:
    """One process: a plain command, counted as one check, or a pytest run, counted from its JUnit file."""

    name: str
    command: tuple[str, ...]
    is_pytest: bool = True
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Count:
    passed: int
    failed: int
    skipped: int


def pytest_group(name: str, *args: str, **env: str) -> Group:
    options = ("-q", "-n", JOBS, "--dist", "worksteal", "-m", "not gpu")
    return Group(name, (sys.executable, "-m", "pytest", *options, *args), env={"OMP_NUM_THREADS": "1", **env})


GROUPS = {
    "lint": (
        Group("ruff", (sys.executable, "-m", "ruff", "check", "."), is_pytest=False),
        Group("mypy", (sys.executable, "-m", "mypy"), is_pytest=False),
    ),
    "cpu": (pytest_group("cpu", "tests"),),
    "interpreter": (pytest_group("interpreter", "tests/interpreter", TRITON_INTERPRET="1"),),
    "compile": (pytest_group("compile", "tests/compile"),),
    "compile-old": (
        pytest_group(
            "compile-old", "tests/compile", "--ignore-glob=*/test_cuda_*.py", PYTHONPATH=OLD_TRITON_DIR,
            TREEATTN_TEST_TRITON=OLD_TRITON,
        ),
    ),
}


def count_junit(path: Path) -> Count:
    """Counts of a pytest run; errors in set-up or collection are failures."""
    suites = list(ElementTree.parse(path).getroot().iter("testsuite"))

    def total(key: str) -> int:
        return sum(int(suite.get(key, "0")) for suite in suites)

    failed, skipped = total("failures") + total("errors"), total("skipped")
    return Count(max(0, total("tests") - failed - skipped), failed, skipped)


def run_group(group: Group, scratch: Path) -> Count:
    print(f"\n--- {group.name}: {' '.join(group.command[1:])}", flush=True)
    command, report = list(group.command), scratch / f"{group.name}.xml"
    if group.is_pytest:
        command.append(f"--junit-xml={report}")
    start = time.monotonic()
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, **group.env}, check=False).returncode
    print(f"--- {group.name}: exit status {status} after {time.monotonic() - start:.0f} s", flush=True)
    if not group.is_pytest:
        return Count(int(status == 0), int(status != 0), 0)
    count = count_junit(report) if report.exists() else Count(0, 0, 0)
    if count.passed + count.failed == 0:
        print(f"--- {group.name}: no test ran, which counts as a failure")
    # A crash, an interruption, or nothing collected (exit status 5) leaves no failed test behind but is one.
    if (status != 0 and count.failed == 0) or count.passed + count.failed == 0:
        return Count(count.passed, count.failed + 1, count.skipped)
    return count


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - set(GROUPS))
    if unknown:
        print(f"unknown group {', '.join(unknown)}; there are {', '.join(GROUPS)}", file=sys.stderr)
        return 2
    groups = [group for name in (names or GROUPS) for group in GROUPS[name]]
    with tempfile.TemporaryDirectory() as scratch:
        counts = {group.name: run_group(group, Path(scratch)) for group in groups}
    print()
    for name, count in counts.items():
        print(f"{name:12s} {count.passed:6d} passed {count.failed:4d} failed {count.skipped:4d} skipped")
    failed = sum(count.failed for count in counts.values())
    passed, skipped = (sum(getattr(count, key) for count in counts.values()) for key in ("passed", "skipped"))
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
