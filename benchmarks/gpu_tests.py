"""Run the tests on the GPU of this machine, in several processes, and record what came out.

    python benchmarks/gpu_tests.py --git-rev "$(git rev-parse HEAD)" --out benchmarks/results

Works from a source tree that is not installed and has no git data, so the revision is an argument.
tests/interpreter holds bodies shared with the CPU and runs compiled here. Writes `gpu-tests.json` (git_rev,
passed, failed, skipped, gpu, versions, date) and, where something failed, `gpu-tests.log`. The exit status is
0 only if tests ran and none failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# What looks at a device; the rest is about the package, or has its bodies in tests/gpu too.
ON_GPU = (
    "tests/gpu",
    "tests/interpreter/test_bench_merge.py",
    "tests/interpreter/test_layout_kernels.py",
    "tests/interpreter/test_plan.py",
    "tests/interpreter/test_verify_kernels.py",
    "tests/test_adapter_transformers.py",
    "tests/test_demo.py",
    "tests/test_founding_bug.py",
    "tests/test_layout.py",
    "tests/test_masks.py",
    "tests/test_ops.py",
    "tests/test_validate.py",
    "tests/test_verify.py",
)


INTERRUPT_S = 20
"""What an interrupted run may take to say what failed."""


@dataclass(frozen=True)
class Outcome:
    """Counts and output of a pytest run."""

    passed: int
    failed: int
    skipped: int
    log: str


def run_tests(paths: list[str], jobs: int, marks: str, time_limit: float) -> Outcome:
    """Run pytest on `paths` with `jobs` workers (0: in one process); a crash or the time limit is a failure."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "TREEATTN_TEST_DEVICE": "cuda",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-p", "no:benchmark"]
        command += [*paths, f"--junit-xml={report}"]
        command += ["-n", str(jobs), "--dist", "worksteal"] if jobs else []
        command += ["--durations=25", *(["-m", marks] if marks else [])]
        with open(Path(scratch, "log"), "w+") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
            try:
                status = process.wait(time_limit)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # pytest then prints what has failed so far
                try:
                    process.wait(INTERRUPT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                status = 124
                output.seek(0, os.SEEK_END)
                output.write("\nstopped at the time limit")
            output.seek(0)
            log = output.read()
        suites = list(ElementTree.parse(report).getroot().iter("testsuite")) if report.exists() else []

    def total(key: str) -> int:
        return sum(int(suite.get(key, "0")) for suite in suites)

    failed, skipped = total("failures") + total("errors"), total("skipped")
    # any exit status without a failed test is a crash, or no test was found
    if status != 0 and failed == 0:
        failed = 1
    return Outcome(max(0, total("tests") - total("failures") - total("errors") - skipped), failed, skipped, log)


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
    parser.add_argument("--jobs", type=int, default=14, help="worker processes (default %(default)s)")
    parser.add_argument(
        "--marks", default="not weights", help="pytest -m expression (default: %(default)s, which need a download)"
    )
    parser.add_argument("--time-limit", type=float, default=540, help="seconds (default %(default)s)")
    parser.add_argument("paths", nargs="*", default=list(ON_GPU), help="test files (default: what looks at a device)")
    options = parser.parse_args()

    outcome = run_tests(options.paths, options.jobs, options.marks, options.time_limit)
    result = {
        "git_rev": options.git_rev,
        "passed": outcome.passed,
        "failed": outcome.failed,
        "skipped": outcome.skipped,
        **describe_machine(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "gpu-tests.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    kept = {name: value for name, value in before.items() if name.startswith("check")}  # benchmarks/gpu_sweep.py's
    path.write_text(json.dumps(result | kept, indent=2) + "\n")
    if outcome.failed:
        (options.out / "gpu-tests.log").write_text(outcome.log)
    print(outcome.log[-6000:])
    print(f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped", flush=True)
    return int(outcome.failed != 0 or outcome.passed == 0)


if __name__ == "__main__":
    sys.exit(main())
