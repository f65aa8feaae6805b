"""The command `treeattn bench`: run workloads, compare two results, draw plots."""

from __future__ import annotations

import argparse
import functools
import sys
import textwrap
from collections.abc import Sequence

__all__ = ["main"]

OK, WRONG, USAGE = 0, 1, 2

HELP = """\
Times are medians (with 20th and 80th percentile) of replays of a CUDA graph over rotating copies of K and V, so that L2
is cold; no time appears before the same inputs pass a check against float64. A provider that fails has no time for that
row, its message instead, and the exit status is 1. floor = max(bytes / 4.28 TB/s, FLOP / 780 TFLOP/s), the ceilings
measured on an H200.

  treeattn bench [SET ...]                        sets: {sets}
  treeattn bench compare A.json B.json            ratios, and what changed by more than its spread
  treeattn bench plot RESULT.json ... --out DIR   needs matplotlib: pip install 'treeattn[bench]'

providers: {providers}
on request: {on_request}

examples:
  treeattn bench gqa --out h200.json              with every provider that works here
  treeattn bench small --device cpu --providers treeattn_torch sdpa
  treeattn bench gqa --page-size 1 --providers treeattn_triton
  treeattn bench --file mine.json                 your own: [{{"batch": 4, "q_len": 33, "prefix": 9000}}, ...]
  treeattn bench compare old.json new.json --tolerance 0.05      exit status 1 if a row got more than 5 % slower
"""


def _say(text: str) -> None:
    print(text, flush=True)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Run `treeattn bench` with the words behind it; returns the exit status (argparse exits by itself with 2)."""
    if argv and argv[0] == "compare":
        return _compare(argv[1:])
    if argv and argv[0] == "plot":
        return _plot(argv[1:])
    return _run(argv)


def _run(argv: Sequence[str]) -> int:
    from ..cli import at_least, device_name
    from .peers import PEERS
    from .providers import PROVIDERS
    from .workloads import DTYPES, SETS

    on_request = [name for name, peer in PEERS.items() if peer.on_request]
    parser = argparse.ArgumentParser(
        prog="treeattn bench",
        description=HELP.format(
            sets=", ".join(SETS),
            providers=textwrap.fill(", ".join(name for name in PROVIDERS if name not in on_request), 108),
            on_request=", ".join(on_request),
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sets", nargs="*", metavar="SET", help="workload sets; gqa on a GPU, small on a CPU")
    parser.add_argument("--providers", nargs="+", metavar="NAME", help="only these, in this order")
    parser.add_argument("--device", type=device_name, help="cuda where there is one, else cpu")
    parser.add_argument("--file", metavar="FILE", help="your own workloads, JSON or TOML (docs/tools.md)")
    parser.add_argument("--page-size", type=at_least(1), help="for all workloads, instead of each set's own")
    parser.add_argument("--kv-layout", choices=("NHD", "HND"))
    parser.add_argument("--dtype", choices=tuple(DTYPES))
    parser.add_argument("--out", metavar="JSON", help="write the result")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return _measure(parser.parse_args(argv))


def _measure(args: argparse.Namespace) -> int:
    import torch

    from .providers import PROVIDERS, usual_providers
    from .report import table
    from .run import run_workloads, save
    from .workloads import load_workloads

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("torch sees no CUDA device; --device cpu runs the set 'small' to show how it works")
        if device.index is not None:
            torch.cuda.set_device(device)
    sets = args.sets or ([] if args.file else ["gqa" if device.type == "cuda" else "small"])
    providers = args.providers or usual_providers(device)
    if unknown := [name for name in providers if name not in PROVIDERS]:
        raise ValueError(f"no provider {', '.join(unknown)}; there are {', '.join(PROVIDERS)}")
    work = load_workloads(sets, args.file, page_size=args.page_size, dtype=args.dtype, kv_layout=args.kv_layout)
    keep = functools.partial(save, path=args.out) if args.out else None
    result = run_workloads(work, providers, device, progress=None if args.quiet else _progress, keep=keep)
    for name, reason in result["left_out"].items():
        _say(f"left out: {name}: {reason}")
    reasons = dict.fromkeys((row["provider"], row["reason"]) for row in result["skipped"])
    for name, reason in reasons:
        rows = [row for row in result["skipped"] if (row["provider"], row["reason"]) == (name, reason)]
        _say(f"not for {name}: {len(rows)} of {len(work)} workloads: {reason}")
    env = result["env"]
    _say(", ".join(f"{key} {env[key]}" for key in ("gpu", "driver", "torch", "triton", "git_rev", "date")))
    _say(table(result["rows"], result["failed"]))
    if args.out:
        save(result, args.out)
        _say(f"written: {args.out}")
    if result["failed"]:
        _say(f"WRONG {len(result['failed'])} failed: no time is reported for a wrong result")
        return WRONG
    return OK if result["rows"] else USAGE


def _compare(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="treeattn bench compare",
        description="Rows of two results by workload and provider: ratios B / A and their geomeans. A row has changed "
        "if each median is outside the other's 20th to 80th percentile. Exit status: 0; with --tolerance 1 if a row "
        "that changed is slower by more, or failed in B; 2 if no row is in both.",
    )
    parser.add_argument("a", metavar="A.json")
    parser.add_argument("b", metavar="B.json")
    parser.add_argument("--tolerance", type=_share, metavar="SHARE", help="how much slower is all right, e.g. 0.05")
    args = parser.parse_args(argv)
    from .compare import compare_results, load_result

    found = compare_results(load_result(args.a), load_result(args.b))
    _say(found.text)
    if not found.matched and not found.broken:
        raise ValueError(f"{args.a} and {args.b} have no row of the same workload and provider")
    if args.tolerance is None:
        return OK
    if found.worst > 1 + args.tolerance:
        _say(f"WRONG the worst row is x{found.worst:.3f}, more than x{1 + args.tolerance:.3f}")
    if found.broken:
        _say(f"WRONG {found.broken} row(s) failed in {args.b}")
    return WRONG if found.broken or found.worst > 1 + args.tolerance else OK


def _share(text: str) -> float:
    """An argument type: a float of 0 or more."""
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} must be 0 or more")
    return value


def _plot(argv: Sequence[str]) -> int:
    from .plots import PICTURES, plot_files

    parser = argparse.ArgumentParser(
        prog="treeattn bench plot",
        description="Draw results from their JSON alone: latency against prefix and against q_len with the floor, the "
        "ratio to the causal chain for each row, and all rows. What a result has no rows for is named.",
    )
    parser.add_argument("files", nargs="+", metavar="RESULT.json")
    parser.add_argument("--out", default=".", metavar="DIR", help="where the PNG files go (default: here)")
    parser.add_argument("--only", nargs="+", choices=tuple(PICTURES), default=tuple(PICTURES), help="some pictures")
    args = parser.parse_args(argv)
    written, undrawn = plot_files(args.files, args.out, args.only)
    for path in written:
        _say(f"written: {path}")
    for name, reason in undrawn.items():
        _say(f"not drawn: {name}: {reason}")
    return OK if written else USAGE
