"""The command ``treeattn``: info, demo, check, bench.

Exit status: 0 all right, 1 something is wrong (a check or a gate failed, a demo was not lossless), 2 the command line
or a file cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .check import CheckReport

__all__ = ["main"]

OK, WRONG, USAGE = 0, 1, 2
PAIRS_FROM = 1000  # cases from which every pair of options is printed unasked

EPILOG = """\
examples:
  treeattn info                                   what works here, and which kernel a geometry gets
  treeattn demo                                   decode with a real model and draft trees, compare with greedy
  treeattn check --device cuda                    every backend of this GPU against float64
  treeattn check --dump mine.pt                   judge tensors from your own integration
  treeattn bench gqa --out h200.json              the 27 GQA shapes, beside FlashAttention-3 where it imports
exit status: 0 all right, 1 something is wrong, 2 the command line or a file cannot be used
"""

CHECK_HELP = """\
Random and adversarial verify steps run plainly and through StaticBuffers, between guard regions and poison (NaN, Inf),
and are compared with attention in float64. The budget of an error is twice what plain PyTorch makes in the same dtype
plus a few eps; a ratio above 1 is wrong. Every line about a case ends with the command that repeats it.

A random case draws one value of every option from its seed: dtype, FP8 cache and scales, V of other dims or inside K
(MLA), window, windowed cache, soft cap, sinks, prefix or tree alone, where the nodes' K and V are, page size, CSR or
block table, index dtype, NHD or HND, strides, sign of the scale, masks and their form, ragged rows, padding, empty
requests. In any 2000 seeds each option occurs 100 times and each legal pair of options 10 times or more; the counts are
printed (--pairs, --json). What a backend does not cover it must refuse with NotImplementedError: such cases are counted
apart. What its table (README, "What runs where") has it must not refuse.

Cases that share compiled kernels run in one process, and --jobs processes share them: a GPU's time goes to compiling. A
process that dies or hangs is a failure, and the others go on.

examples:
  treeattn check                                  all backends that work on the CPU, 100 random cases each
  treeattn check --device cuda --cases 2000       the whole sweep; minutes on 16 cores
  treeattn check --cases 2000 --backend torch --jobs 2 --json counts.json
  treeattn check --case 123                       one random case again
  treeattn check --case word-stride               one adversarial case (--list names them)
  treeattn check --inject-fault                   one wrong mask bit a case: must end with exit status 1
  treeattn check --dump mine.pt                   what is wrong in tensors from your own integration

A dump is a dict saved with torch.save, with these keys (* = one of a choice, see the text):
"""


def _say(text: str) -> None:
    print(text, flush=True)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def at_least(low: int) -> Callable[[str], int]:
    """An argument type: an int that is `low` or more."""

    def number(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is too small, must be {low} or more")
        return value

    return number


def device_name(text: str) -> str:
    """An argument type: a device that this command can use."""
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (":" in text and not index.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no device; take cpu, cuda or cuda:N")
    return text


def _info(args: argparse.Namespace) -> int:
    if args.sglang:
        return _info_sglang()
    if args.vllm:
        return _info_vllm()
    from . import info

    found = info.gather(tuple(args.geometry or info.DEFAULT_GEOMETRIES), args.q_len, args.dtype, args.arch)
    _say(json.dumps(found, indent=1) if args.json else info.render(found))
    return OK


def _info_sglang() -> int:
    from .adapters.sglang import plugin

    text, fits = plugin.report()
    _say(text)
    return OK if fits else WRONG


def _info_vllm() -> int:
    from .adapters.vllm import hooks

    if hooks.installed_version() is None:
        raise ValueError("vLLM is not installed in this environment")
    found = hooks.look_up_all()
    _say(hooks.render(found))
    return OK if all(one.matches for one in found) else WRONG


def _check(args: argparse.Namespace) -> int:
    if args.list:
        from .testing.faults import ADVERSARIAL

        for name, build in ADVERSARIAL.items():
            _say(f"{name:24} {' '.join((build.__doc__ or '').split())}".rstrip())
        return OK
    if args.dump:
        return _check_dump(args.dump)
    import torch

    from .check import run_check

    report = run_check(
        args.device,
        args.backend,
        cases=args.cases,
        seed=args.seed,
        case=args.case,
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        inject_fault=args.inject_fault,
        fail_fast=args.fail_fast,
        jobs=args.jobs,
        progress=None if args.quiet else _progress,
    )
    _say_counts(report, args.seed, args.cases >= PAIRS_FROM if args.pairs is None else args.pairs)
    if args.json:
        Path(args.json).write_text(json.dumps(report.as_json(), indent=1) + "\n")
        _say(f"written: {args.json}")
    for failure in report.failures[: args.show]:
        _say(f"WRONG {failure}")
    if len(report.failures) > args.show:
        _say(f"... and {len(report.failures) - args.show} more")
    if report.worst and report.ok:
        _say(f"worst: {report.worst}")
    verdict = "all right" if report.ok else f"{len(report.failures)} wrong"
    if not report.runs:
        verdict = "nothing ran"
    took = f"{report.runs} runs on {args.device} in {report.seconds:.1f} s"
    _say(f"{took}, worst error / budget {report.worst_ratio:.2f}: {verdict}")
    if args.inject_fault:
        _say(
            f"injected fault caught, as it must be (in {report.caught} cases)"
            if report.failures
            else "injected fault NOT caught: this check is blind"
        )
    return OK if report.ok else WRONG


def _say_counts(report: CheckReport, seed: int, pairs: bool) -> None:
    """How often each option occurred, and what was refused."""
    counts = report.drawn
    if counts is not None:
        _say(f"options of {counts.cases} random cases from seed {seed}:")
        _say("\n".join(counts.option_lines()))
        rarest = ", ".join(f"{name} ({count})" for count, name in counts.rarest_pairs(3))
        _say(f"pairs of options: {len(counts.pairs)} of {len(counts.legal)} legal ones; rarest: {rarest}")
        if pairs:
            _say("\n".join(counts.pair_lines()))
            _say("not legal together:")
            _say("\n".join(counts.illegal_lines()))
    for backend, refused in report.refused.items():
        ran = report.ran[backend]
        if not refused:
            continue
        _say(f"{backend} does not cover, and refused, {sum(refused.values())} cases:")
        _say("\n".join(f"  {count:5} {reason}" for reason, count in refused.most_common()))
        if counts is not None:
            _say(f"options of the {ran.cases} random cases that {backend} ran:")
            _say("\n".join(ran.option_lines()))
    for path, runs in report.paths.items():
        _say(f"path {path}: {runs} runs")


def _check_dump(path: str) -> int:
    from .dump import judge_dump, load_dump

    report = judge_dump(load_dump(path))
    for finding in report.findings:
        _say(f"WRONG {finding}")
    for note in report.notes:
        _say(f"note: {note}")
    _say(f"{path}: " + ("all right" if report.ok else f"{len(report.findings)} finding(s)"))
    return OK if report.ok else WRONG


def _demo(args: argparse.Namespace, rest: Sequence[str]) -> int:
    from .demo import run

    return int(run.main(list(rest)))


def _bench(args: argparse.Namespace, rest: Sequence[str]) -> int:
    from .bench import command

    return command.main(list(rest))


def _parser() -> argparse.ArgumentParser:
    from . import __version__

    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="treeattn",
        description="Attention kernels for tree verify in speculative decoding.",
        epilog=EPILOG,
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"treeattn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_info(commands, raw)
    demo = commands.add_parser(
        "demo", help="decode a real model with draft trees and compare with greedy decoding", add_help=False
    )
    demo.set_defaults(run=_demo)
    _add_check(commands, raw)
    bench = commands.add_parser(
        "bench", help="time named workloads against their floor and other projects' kernels", add_help=False
    )
    bench.set_defaults(run=_bench)
    return parser


Commands = "argparse._SubParsersAction[argparse.ArgumentParser]"
Formatter = type[argparse.RawDescriptionHelpFormatter]


def _add_info(commands: argparse._SubParsersAction[argparse.ArgumentParser], raw: Formatter) -> None:
    info = commands.add_parser(
        "info",
        help="versions, GPU, backends, and which kernel a geometry gets",
        description="What works here and why not, and the kernel, tile, split and merge that a geometry gets.",
        epilog="examples:\n  treeattn info --geometry 32/8/128 --q-len 65\n  treeattn info --arch 120 --json\n",
        formatter_class=raw,
    )
    info.add_argument(
        "--geometry",
        action="append",
        metavar="QO/KV/DIM",
        help="heads and head dim, e.g. 32/8/128; repeatable",
    )
    info.add_argument("--q-len", type=at_least(1), default=17, help="declared max_q_len (default 17)")
    info.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    info.add_argument(
        "--arch", type=at_least(80), metavar="CC", help="describe another chip: compute capability times ten, e.g. 90"
    )
    info.add_argument("--json", action="store_true", help="print JSON")
    for name, framework in (("--sglang", "SGLang"), ("--vllm", "vLLM")):
        info.add_argument(
            name, action="store_true", help=f"instead: if the adapter fits the {framework} here (exit status 1 if not)"
        )
    info.set_defaults(run=_info)


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser], raw: Formatter) -> None:
    from .dump.judge import DUMP_KEYS

    keys = "\n".join(f"  {key:22} {text}" for key, text in DUMP_KEYS.items())
    check = commands.add_parser(
        "check",
        help="compare backends with float64 on hard inputs, or judge a dump of yours",
        description=CHECK_HELP + keys,
        formatter_class=raw,
    )
    check.add_argument("--device", type=device_name, default="cpu", help="cpu (default) or cuda")
    check.add_argument(
        "--backend", action="append", help="reference, torch or triton; repeatable; default: all that work"
    )
    check.add_argument("--cases", type=at_least(0), default=100, help="random cases per backend (default 100)")
    check.add_argument("--seed", type=int, default=0, help="seed of the first random case; the next has seed + 1")
    check.add_argument("--case", metavar="SEED|NAME", help="only this case")
    check.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16", "float64"),
        help="only this one; default: what each seed draws, and all but float64 for the adversarial cases",
    )
    check.add_argument("--dump", metavar="FILE", help="judge tensors saved with torch.save instead")
    check.add_argument(
        "--inject-fault", action="store_true", help="one wrong mask bit a case, to see the check fail (exit status 1)"
    )
    check.add_argument("--fail-fast", action="store_true", help="stop at the first wrong run")
    check.add_argument(
        "--show", type=at_least(0), default=10, metavar="N", help="print at most N wrong runs (default 10)"
    )
    check.add_argument(
        "--jobs", type=at_least(1), metavar="N", help="processes; default: the cores up to 14 on a GPU, 1 on a CPU"
    )
    check.add_argument(
        "--pairs",
        action=argparse.BooleanOptionalAction,
        help=f"print the count of every legal pair of options (default from {PAIRS_FROM} cases on)",
    )
    check.add_argument("--json", metavar="FILE", help="write counts, refusals and failures")
    check.add_argument("--list", action="store_true", help="name the adversarial cases")
    check.add_argument("--quiet", action="store_true", help="no progress on stderr")
    check.set_defaults(run=_check)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (argparse exits by itself on a usage error, with 2)."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help()
        return USAGE
    own_words = args.command in ("demo", "bench")
    if rest and not own_words:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    run: Callable[..., int] = args.run
    try:
        return run(args, rest) if own_words else run(args)
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"treeattn {args.command}: {error}", file=sys.stderr)
        return USAGE
