"""Write two tables into README.md, so that none is typed by hand: measured times, and what each backend covers.

    python benchmarks/readme_table.py            # rewrite the tables
    python benchmarks/readme_table.py --check    # exit status 1 if a table is not what the results or the code say

Times come from benchmarks/results/h200-gqa.json. Where a provider was measured at several page sizes, its best one
counts: ours and the peers' alike. What the backends cover comes from treeattn.capabilities.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from treeattn.bench.targets import GQA_TARGETS
from treeattn.capabilities import support_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/h200-gqa.json"
README = ROOT / "README.md"
BEGIN, END = TIMES = "<!-- table:begin -->", "<!-- table:end -->"
SUPPORT = "<!-- support:begin -->", "<!-- support:end -->"

OURS, CHAIN = "treeattn_triton", "fa3_causal"
GEOMETRY = ("batch", "q_len", "prefix", "qo_heads", "kv_heads")
HEADER = (
    "batch", "q_len", "prefix", "heads", "floor", "treeattn", "share of floor", "FA3 causal chain", "best other tree",
)  # fmt: skip
PEER_NAMES = {"fi_xqa_mask_p64": "FlashInfer XQA", "fa3_cascade_p64": "FA3 cascade"}

NO_RESULTS = (
    "No run of `treeattn bench gqa` is committed yet; what single configurations took on an H200 while they were\n"
    "tuned stands in [docs/performance.md](docs/performance.md)."
)

Geometry = tuple[int, ...]


def best_times(rows: Iterable[dict[str, Any]]) -> dict[Geometry, dict[str, dict[str, Any]]]:
    """Find the fastest row of each provider for each geometry, in the order of the file."""
    best: dict[Geometry, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] != "gqa" or row["kv_dtype"] not in ("bf16", "bfloat16"):
            continue
        providers = best.setdefault(tuple(row[key] for key in GEOMETRY), {})
        kept = providers.get(row["provider"])
        if kept is None or row["us"] < kept["us"]:
            providers[row["provider"]] = row
    return best


def geometric_mean(values: list[float]) -> float:
    """Geometric mean; the values must be positive and at least one."""
    return math.exp(sum(map(math.log, values)) / len(values))


def table_row(cells: Iterable[object]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def render(results: dict[str, Any]) -> str:
    """Render the table and the sentences under it, in Markdown."""
    times = {geometry: found for geometry, found in best_times(results["rows"]).items() if OURS in found}
    if not times:
        raise ValueError(f"no bf16 GQA row of provider {OURS!r} among {len(results['rows'])} rows")
    lines = [table_row(HEADER), table_row("--:" for _ in HEADER)]
    elsewhere = {target[:5]: target for target in GQA_TARGETS}
    ratios, tree_ratios = [], []
    for (batch, q_len, prefix, qo_heads, kv_heads), providers in times.items():
        us, floor = providers[OURS]["us"], providers[OURS]["floor_us"]
        chain = providers[CHAIN]["us"] if CHAIN in providers else None
        ratios += [us / chain] if chain else []
        target = elsewhere.get((batch, q_len, prefix, qo_heads, kv_heads))
        peer_cell = ""
        if chain and target:
            peer = target.tree * chain / target.chain
            tree_ratios.append(us / peer)
            peer_cell = f"{peer:.1f} ({PEER_NAMES[target.tree_peer]})"
        heads, chain_cell = f"{qo_heads}/{kv_heads}", f"{chain:.1f}" if chain else ""
        measured = (f"{floor:.1f}", f"{us:.1f}", f"{floor / us:.0%}", chain_cell, peer_cell)
        lines.append(table_row((batch, q_len, prefix, heads, *measured)))
    env = results["env"]
    versions = ", ".join(f"{name} {env[name]}" for name in ("torch", "triton") if name in env)
    note = (
        f"Microseconds a call on {env['gpu']} ({versions}): bf16, head dim 128, median of graph replays over "
        "rotating copies of the cache, the best page size of each provider."
    )
    if ratios:
        mean, low, high = geometric_mean(ratios), min(ratios), max(ratios)
        note += (
            f" Against FlashAttention-3's causal chain, which takes no tree, a tree costs {mean:.2f}x "
            f"in geometric mean over {len(ratios)} rows ({low:.2f}x to {high:.2f}x)."
        )
    if tree_ratios:
        mean, high = geometric_mean(tree_ratios), max(tree_ratios)
        note += (
            " The best other tree kernel of each row (of SGLang's Triton and FA3 cascade paths, FlashInfer's custom "
            "mask and XQA) was measured in another run and is scaled by FA3's time in this one; against it a tree "
            f"costs {mean:.2f}x ({high:.2f}x at worst)."
        )
    return "\n".join([*lines, "", note])


def table_of(path: Path) -> str:
    """Render the results at `path`; where none are committed yet, say so."""
    if path.exists():
        return render(json.loads(path.read_text()))
    return NO_RESULTS


def insert(readme: str, table: str, marks: tuple[str, str] = TIMES) -> str:
    """Replace what stands between the two marks in `readme`."""
    begin, end = marks
    if readme.count(begin) != 1 or readme.count(end) != 1:
        raise ValueError(f"README must hold {begin} and {end} once each")
    head, rest = readme.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n{table}\n{end}{tail}"


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if out of date")
    options = parser.parse_args()
    before = options.readme.read_text()
    after = insert(insert(before, table_of(options.results)), support_table(), SUPPORT)
    if options.check:
        return int(before != after)
    options.readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
