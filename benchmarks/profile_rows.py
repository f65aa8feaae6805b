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
    "us": ("gpu__time_duration.sum",),
    "dram": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",),
    "l2": ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
    "tensor": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
    ),
    "shared": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
        "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    ),
    "issue": (
        "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
        "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_issued.avg.pct_of_peak_sustained_active",
        "sm__instruction_throughput.avg.pct_of_peak_sustained_active",
    ),
    "warps": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
}
"""What a table has, and the metrics of Nsight Compute that say it, the first that there is."""


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
    """The kernels of a log in their order, with `LIMITS` as far as they are there."""
    lines = [line for line in path.read_text().splitlines() if line.startswith('"')]
    found = list(csv.DictReader(lines))
    units, rows = found[0], []
    for row in found[1:]:
        made: dict[str, float | str] = {"kernel": row["Kernel Name"]}
        for name, metrics in LIMITS.items():
            metric = next((metric for metric in metrics if row.get(metric)), None)
            if metric is not None:
                scale = {"ns": 1e-3, "nsecond": 1e-3, "msecond": 1e3, "ms": 1e3}.get(units[metric], 1.0)
                made[name] = round(float(row[metric].replace(",", "")) * scale, 1)
        rows.append(made)
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
        print(" | ".join(str(row.get(name, "-")) for name in ("kernel", *LIMITS)))
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
