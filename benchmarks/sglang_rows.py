"""Measure SGLang's extend kernel, treeattn's drop-in for it, and the plugin's path, over the rows of targets.json.

    python benchmarks/sglang_rows.py --git-rev "$(git rev-parse HEAD)" --out benchmarks/results/h200-sglang.json

All three see the same tensors: token slots (page size 1, int64), a mask in SGLang's FULL form for its kernel and the
drop-in, nodes' K and V fresh. No number appears before the output passes `treeattn bench`'s gate, and ours must agree
with SGLang's. Providers:

- ``sglang_extend``: ``extend_attention_fwd``, one call of a layer;
- ``treeattn_dropin``: ``treeattn.adapters.sglang.drop_in``, one call, its layout and plan made in it;
- ``treeattn_plugin``: the layer call alone, as the plugin's backend makes it in a graph. What the plugin adds once a
  step is in rows of the kind ``step-update``.

SGLang need not be installed: its kernel is three files of Triton, which benchmarks/sglang_pack.py packs with others
for the machine with the GPU; --source names the folder where they were unpacked.

The exit status is 1 if an output is wrong, or if the drop-in is not 1.5x faster on every row and 10x in geomean.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treeattn import PagedKV, TreeLayout
from treeattn.adapters.sglang import drop_in
from treeattn.adapters.sglang.extend_call import ExtendCall, attend, group_key
from treeattn.adapters.sglang.verify import VerifyStep, VerifySteps
from treeattn.bench.calls import Calls, kv_of
from treeattn.bench.gate import GateError, gate
from treeattn.bench.inputs import COLD_BYTES, Inputs
from treeattn.bench.report import geomean, shape_key, table
from treeattn.bench.run import _row as measured_row
from treeattn.bench.run import environment, save
from treeattn.bench.timing import time_calls, time_graph
from treeattn.bench.workloads import Workload, load_workloads

FIRST = "kernels/ops/attention/extend_attention.py"
MODULE = "sglang.kernels.ops.attention.extend_attention"
LEAST, LEAST_GEOMEAN = 1.5, 10.0
AGREE = 2e-2
"""Largest ``||ours - SGLang's|| / ||SGLang's||``: both are 16-bit outputs of the same maths."""

Extend = Callable[..., Any]


def load_extend(source: Path | None) -> Extend:
    """``extend_attention_fwd`` of the installed SGLang, or of packed files beside stand-ins for what they import."""
    if source is not None:
        root = source / "sglang"
        if not (root / FIRST).is_file():
            raise SystemExit(f"{root / FIRST} is missing: benchmarks/sglang_pack.py packs it")
        _stand_in(root)
    found: Extend = importlib.import_module(MODULE).extend_attention_fwd
    return found


def _stand_in(root: Path) -> None:
    """Empty packages around the packed files, and the few helpers that they ask for."""
    for name in ("sglang", "sglang.srt", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.attention"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.parent.joinpath(*name.split(".")))]
        sys.modules[name] = package
    on_cuda = torch.cuda.is_available() and torch.version.hip is None
    utils, environ = types.ModuleType("sglang.srt.utils"), types.ModuleType("sglang.srt.environ")
    utils.__getattr__ = lambda name: (lambda *args, **kwargs: on_cuda and name == "is_cuda")  # type: ignore[method-assign]
    unset = types.SimpleNamespace(get=lambda: None)
    environ.envs = type("Environment", (), {"__getattr__": lambda self, name: unset})()  # type: ignore[attr-defined]
    sys.modules.update({"sglang.srt.utils": utils, "sglang.srt.environ": environ})


def calls_of(inputs: Inputs) -> tuple[list[ExtendCall], Any, Tensor]:
    """A call for each copy of K and V, the addresses, and the out that they share."""
    work, device = inputs.workload, inputs.device
    paged = inputs.paged(1)
    kv = kv_of(paged, list(work.all_prefixes))
    layout = TreeLayout.from_parents(**inputs.layout_args())
    total = sum(q * (p + q) for q, p in zip(work.all_q_lens, work.all_prefixes, strict=True))
    mask = layout.full_mask(dtype=torch.uint8, total=total)
    nodes = torch.cat(
        [paged.table[r, p : p + q] for r, (p, q) in enumerate(zip(work.all_prefixes, work.all_q_lens, strict=True))]
    ).long()
    out = torch.empty(work.total_q, work.qo_heads, work.dim_v, dtype=inputs.dtype, device=device)
    calls = []
    for paged_k, paged_v in zip(paged.k, paged.v, strict=True):
        k, v = paged_k.flatten(0, 1), paged_v.flatten(0, 1)
        calls.append(
            ExtendCall(
                inputs.q, k[nodes], v[nodes].contiguous(), out, k, v, inputs.qo_indptr.long(), kv.kv_indptr,
                kv.kv_indices.long(), mask, True, layout.mask_indptr, work.q_len, 1.0, 1.0, inputs.sm_scale,
            )
        )  # fmt: skip
    return calls, paged, out


def plugin_steps(inputs: Inputs, call: ExtendCall) -> tuple[VerifySteps, VerifyStep]:
    """Static steps as the backend makes them, written once."""
    work = inputs.workload
    layout = TreeLayout.from_parents(**inputs.layout_args())
    step = VerifyStep(work.batch, work.q_len, inputs.prefix_lens, layout.tree_mask(dtype=torch.uint8), "tree")
    steps = VerifySteps([group_key(call)])
    steps.allocate(work.batch, work.q_len, work.prefix, PagedKV(kv_indptr=call.kv_indptr, kv_indices=call.kv_indices))
    steps.write_static(step)
    return steps, step


def measure(work: Workload, extend: Extend, device: torch.device) -> list[dict[str, Any]]:
    """The rows of a workload: three providers, and the plugin's step."""
    inputs = Inputs(work, device, COLD_BYTES if device.type == "cuda" else 0)
    calls, paged, out = calls_of(inputs)
    steps, step = plugin_steps(inputs, calls[0])
    group = steps.step_for(group_key(calls[0]))

    def runner(function: Callable[[ExtendCall], Any], call: ExtendCall) -> Callable[[], Tensor]:
        def run() -> Tensor:
            function(call)
            return out

        return run

    functions: dict[str, Callable[[ExtendCall], Any]] = {
        "sglang_extend": lambda call: extend(**vars(call)),
        "treeattn_dropin": lambda call: drop_in.extend_attention_fwd(**vars(call)),
        "treeattn_plugin": lambda call: attend(call, group),
    }
    rows, theirs = [], None
    for name, function in functions.items():
        offered = Calls([runner(function, call) for call in calls], "tree", paged, 1, out)
        rel_err = gate(name, inputs, offered)
        first = out.double()  # of the first copy, which the gate has run
        theirs = first if theirs is None else theirs
        apart = float((first - theirs).norm() / theirs.norm())
        if apart > AGREE:
            raise GateError(f"{name} on {work.name()}: {apart:.1e} from SGLang's output, limit {AGREE:.0e}")
        row = measured_row(work, name, 1, time_calls(offered.calls, device), rel_err)
        rows.append({**row, "from_sglang": apart})

    def update() -> None:
        steps.write_static(step)

    timing = time_graph([update] * 20) if device.type == "cuda" else time_calls([update], device)
    row = measured_row(work, "treeattn_plugin", 1, timing, rows[-1]["rel_err"])
    return [*rows, {**row, "kind": "step-update", "floor_us": 0.0, "bytes": 0, "flop": 0}]


def verdict(rows: list[dict[str, Any]]) -> tuple[str, bool]:
    """How much faster than SGLang's kernel, and whether the drop-in is fast enough."""
    base = {shape_key(row): row["us"] for row in rows if row["provider"] == "sglang_extend"}
    lines, enough = [], True
    for name in ("treeattn_dropin", "treeattn_plugin"):
        mine = [row for row in rows if row["provider"] == name and shape_key(row) in base]
        gains = [base[shape_key(row)] / row["us"] for row in mine]
        if not gains:
            return "nothing was measured", False
        lines.append(
            f"{name}: {geomean(gains):.1f}x faster than sglang_extend in geomean over {len(gains)} rows, "
            f"{min(gains):.2f}x at least, {max(gains):.0f}x at most"
        )
        if name == "treeattn_dropin":
            enough = min(gains) >= LEAST and geomean(gains) >= LEAST_GEOMEAN
    return "\n".join(lines), enough


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, metavar="SITE", help="unpacked files, where SGLang is not installed")
    parser.add_argument("--sets", nargs="+", default=["gqa", "mla"], help="workload sets of `treeattn bench`")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", help="of every workload (a CPU's interpreter needs float32)")
    parser.add_argument("--first", type=int, help="only so many rows of the sets")
    parser.add_argument("--git-rev", help="recorded in the result")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.git_rev:
        os.environ["TREEATTN_GIT_REV"] = args.git_rev
    device, extend = torch.device(args.device), load_extend(args.source)
    result: dict[str, Any] = {"env": environment(device), "rows": [], "left_out": {}}
    wrong = 0
    for work in load_workloads(args.sets, dtype=args.dtype)[: args.first]:
        try:
            result["rows"] += measure(work, extend, device)
        except Exception as error:  # of SGLang's kernel, too: any kind; the other rows keep their numbers
            wrong += 1
            what = str(error) if isinstance(error, GateError) else f"{work.name()}: {type(error).__name__}: {error}"
            print(f"WRONG {what}", flush=True)
            continue
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if args.out is not None:
                save(result, args.out)  # again after each row: a machine may be taken away
        print(f"{work.name()}: {[round(row['us'], 1) for row in result['rows'][-4:]]}", file=sys.stderr, flush=True)
    text, enough = verdict(result["rows"])
    print(table([row for row in result["rows"] if row["kind"] != "step-update"]))
    print(text)
    if args.out is not None:
        print(f"written: {args.out}")
    return int(wrong > 0 or not enough)


if __name__ == "__main__":
    sys.exit(main())
