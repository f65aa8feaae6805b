"""Run the tests on the GPU of this machine, several processes at a time, and record what came out.

    python benchmarks/gpu_tests.py --git-rev "$(git rev-parse HEAD)" --out benchmarks/results

Works from a source tree that is not installed and has no git data, so the revision is an argument. Each
test file is one pytest process on the CUDA device; tests/interpreter holds bodies shared with the CPU and
runs compiled here. Writes `gpu-tests.json` (git_rev, passed, failed, skipped, gpu, versions, date) and,
where something failed, `gpu-tests.log`. The exit status is 0 only if tests ran and none failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# About the package rather than a device, or in need of what such a machine does not have (a network, a
# model).
NOT_ON_GPU = ("tests/compile/", "tests/test_wheel.py", "tests/test_import.py", "tests/test_demo_smoke.py")


@dataclass(frozen=True)
class Outcome:
    """Counts and output of one test file."""

    file: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    log: str


def select_files(patterns: list[str]) -> list[Path]:
    """Test files below `patterns`, the largest first: they tend to take longest."""
    files: set[Path] = set()
    for pattern in patterns:
        path = ROOT / pattern
        files.update(path.rglob("test_*.py") if path.is_dir() else [path])
    wanted = [file for file in files if not str(file.relative_to(ROOT)).startswith(NOT_ON_GPU)]
    return sorted(wanted, key=lambda file: (-file.stat().st_size, file))


def run_file(file: Path, marks: str, deadline: float, extra: list[str]) -> Outcome:
    name = str(file.relative_to(ROOT))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "TREEATTN_TEST_DEVICE": "cuda",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name, *extra]
        command += [f"--junit-xml={report}", *(["-m", marks] if marks else [])]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=max(1.0, deadline - start),
            )
            status, log = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            output = error.stdout or b""
            text = output.decode(errors="replace") if isinstance(output, bytes) else output
            status, log = 124, f"{text}\nstopped at the time limit"
        suites = list(ElementTree.parse(report).getroot().iter("testsuite")) if report.exists() else []

    def total(key: str) -> int:
        return sum(int(suite.get(key, "0")) for suite in suites)

    failed, skipped = total("failures") + total("errors"), total("skipped")
    passed = total("tests") - failed - skipped
    # Exit status 5: every test of this file was deselected by name. Any other without a failed test is a
    # crash.
    if status not in (0, 5) and failed == 0:
        failed = 1
    return Outcome(name, passed, failed, skipped, time.monotonic() - start, log)


def describe_machine() -> dict[str, Any]:
    import torch
    import triton

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "driver": driver,
    }
    return {"gpu": torch.cuda.get_device_name(0), "versions": versions}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--git-rev", required=True, help="revision that is tested, recorded in the result")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "benchmarks/results")))
    parser.add_argument(
        "--jobs", type=int, default=6, help="pytest processes at a time (default %(default)s)"
    )
    parser.add_argument("--marks", default="", help="pytest -m expression, such as gpu (default: all tests)")
    parser.add_argument(
        "--time-limit", type=float, default=540, help="seconds for everything (default %(default)s)"
    )
    parser.add_argument("paths", nargs="*", default=["tests"], help="test files or folders (default: tests)")
    options, extra = parser.parse_known_args()

    machine = describe_machine()
    files = select_files(options.paths)
    deadline = time.monotonic() + options.time_limit
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(run_file, file, options.marks, deadline, extra) for file in files]
        outcomes = []
        for future in futures:
            outcome = future.result()
            outcomes.append(outcome)
            counts = f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped"
            print(f"{outcome.file}: {counts}, {outcome.seconds:.0f} s", flush=True)

    totals = {
        key: sum(getattr(outcome, key) for outcome in outcomes) for key in ("passed", "failed", "skipped")
    }
    result = {
        "git_rev": options.git_rev,
        **totals,
        **machine,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu-tests.json").write_text(json.dumps(result, indent=2) + "\n")
    failures = [f"==== {outcome.file}\n{outcome.log}" for outcome in outcomes if outcome.failed]
    if failures:
        (options.out / "gpu-tests.log").write_text("\n".join(failures))
        print("\n".join(log[-6000:] for log in failures))
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**totals), flush=True)
    return int(totals["failed"] != 0 or totals["passed"] == 0)


if __name__ == "__main__":
    sys.exit(main())
