"""Sweep the option table on the GPU of this machine, and see an injected fault caught; record both.

    python benchmarks/gpu_sweep.py --git-rev "$(git rev-parse HEAD)" --out benchmarks/results

Runs ``treeattn check --device cuda --backend triton`` over ``--cases`` random cases, then once more with a wrong mask
bit in each of ``--fault-cases``, which must fail. What came out is put into `gpu-tests.json` under ``check``, beside
what benchmarks/gpu_tests.py wrote. The exit status is 0 only if nothing was wrong, every option occurred at least
``LEAST_OPTION`` times, every legal pair at least ``LEAST_PAIR`` times, and the fault was caught.

``--backend cuda`` sweeps the kernels of csrc instead, to ``check-cuda``: of the same cases they refuse what they do not
cover, and the counts are of those that ran.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LEAST_OPTION = 100
LEAST_PAIR = 10


def check(backend: str, cases: int, *more: str) -> tuple[int, dict[str, Any]]:
    """Run ``treeattn check``; its exit status and what it wrote, nothing if it wrote nothing."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "check.json")
        command = [sys.executable, "-m", "treeattn", "check", "--device", "cuda", "--backend", backend, "--quiet"]
        command += ["--cases", str(cases), "--json", str(report), *more]
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        return status, json.loads(report.read_text()) if report.exists() else {}


def rarest(counts: dict[str, int], names: set[str]) -> tuple[str, int]:
    """Which of `names` occurred least, and how often."""
    name = min(sorted(names), key=lambda name: counts.get(name, 0))
    return name, counts.get(name, 0)


def legal_names() -> tuple[set[str], set[str]]:
    """Options and legal pairs as the report spells them."""
    from treeattn.testing.sweep import AXES, pairs

    def option(value: tuple[str, str]) -> str:
        return "=".join(value)

    options = {option(value) for axis in AXES for value in axis.values}
    return options, {" + ".join(map(option, pair)) for pair in pairs()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--git-rev", required=True, help="revision that is checked, recorded in the result")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "benchmarks/results")))
    parser.add_argument("--backend", choices=("triton", "cuda"), default="triton")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--fault-cases", type=int, default=60)
    parser.add_argument("--jobs", type=int, help="processes (default: treeattn check's own)")
    options = parser.parse_args()
    jobs = [] if options.jobs is None else ["--jobs", str(options.jobs)]

    sys.path.insert(0, str(ROOT))
    backend = options.backend
    status, found = check(backend, options.cases, *jobs)
    if not found:
        print("the check wrote no report")
        return 1
    names, pairs = legal_names()
    counts = found["drawn"]
    if backend == "cuda":
        counts = found["backends"][backend]["ran"]
        names = {name for name in names if counts["options"][name]}
        pairs = {pair for pair in pairs if counts["pairs"][pair]}
    option, least_option = rarest(counts["options"], names)
    pair, least_pair = rarest(counts["pairs"], pairs)
    fault_status, fault = check(backend, options.fault_cases, "--inject-fault", "--show", "2", *jobs)
    record = {
        "git_rev": options.git_rev,
        "cases": options.cases,
        "cases_that_ran": found["backends"][backend]["ran"]["cases"],
        "runs": found["runs"],
        "failures": len(found["failures"]),
        "refused": {name: backend["refused"] for name, backend in found["backends"].items()},
        "worst_share_of_budget": round(found["worst_ratio"], 3),
        "options": len(names),
        "rarest_option": {"name": option, "count": least_option},
        "legal_pairs": len(pairs),
        "rarest_pair": {"name": pair, "count": least_pair},
        "seconds": round(found["seconds"], 1),
        "injected_fault": {"cases": options.fault_cases, "exit_status": fault_status, "caught": fault.get("caught", 0)},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "gpu-tests.json"
    whole = json.loads(path.read_text()) if path.exists() else {}
    whole["check" if backend == "triton" else f"check-{backend}"] = record
    path.write_text(json.dumps(whole, indent=2) + "\n")
    print(json.dumps(record, indent=1))
    often = found["runs"] > 0 if backend == "cuda" else (least_option >= LEAST_OPTION and least_pair >= LEAST_PAIR)
    right = status == 0 and not found["failures"]
    caught = fault_status == 1 and record["injected_fault"]["caught"] > 0
    for name, holds in {"the options occurred": often, "all right": right, "the fault was caught": caught}.items():
        print(f"{name}: {'yes' if holds else 'NO'}")
    return int(not (often and right and caught))


if __name__ == "__main__":
    sys.exit(main())
