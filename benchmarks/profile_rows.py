r"""One call of chosen rows by the kernels of csrc, for Nsight Compute.

    ncu --clock-control none --cache-control all -k regex:_sm90_ --set full --page raw --csv --log-file rows.csv \
        python benchmarks/profile_rows.py gqa 0 5 8
    python benchmarks/profile_rows.py --read rows.csv --out limits.json

With a set of workloads and numbers of its rows (all without numbers) a call of each is made, in their order. `--read`
makes a table of what the profiler wrote: which of the limits of the chip a kernel is near, in per cent of their peaks.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

LIMITS = {
    "us": "gpu__time_duration.sum",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "shared": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
"""What a table has, and the metric of Nsight Compute that says it."""
MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3}


def call_rows(name: str, numbers: list[int]) -> None:
    """One call of each row, its caches made before."""
    import torch

    from treeattn.bench.inputs import Inputs
    from treeattn.bench.providers import tree_calls
    from treeattn.bench.workloads import SETS

    rows = SETS[name]()
    for work in [rows[number] for number in numbers] if numbers else rows:
        inputs = Inputs(work, torch.device("cuda"), 0)
        tree_calls(inputs, "cuda").calls[0]()
        torch.cuda.synchronize()
        print(work.name(), flush=True)
        torch.cuda.empty_cache()


def read_rows(path: Path) -> list[dict[str, float | str]]:
    """The kernels of a log in their order, with `LIMITS`."""
    units, *found = csv.DictReader(line for line in path.read_text().splitlines() if line.startswith('"'))
    scale = MICROSECONDS[units[LIMITS["us"]]]
    rows = []
    for row in found:
        numbers = {name: float(row[metric].replace(",", "")) for name, metric in LIMITS.items()}
        numbers["us"] *= scale
        rows.append({"kernel": row["Kernel Name"]} | {name: round(number, 1) for name, number in numbers.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", nargs="?", default="gqa")
    parser.add_argument("rows", nargs="*", type=int)
    parser.add_argument("--read", type=Path, metavar="LOG")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.read is None:
        call_rows(options.set, options.rows)
        return
    rows = read_rows(options.read)
    for row in rows:
        print(" | ".join(map(str, row.values())))
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
