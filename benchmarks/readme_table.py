"""Write two tables into README.md, so that none is typed by hand: measured times, and what each backend covers.

    python benchmarks/readme_table.py            # rewrite the tables
    python benchmarks/readme_table.py --check    # exit status 1 if a table is not what the results or the code say

Times come from benchmarks/results/h200-gqa.json, and h200-mla.json and h200-kimi.json beside it if they are there.
Where a provider was measured at several page sizes, its best one counts: ours and the peers' alike. What the backends
cover comes from treeattn.capabilities.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from treeattn.bench.targets import GQA_TARGETS, MLA_TARGETS, Target
from treeattn.capabilities import support_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/h200-gqa.json"
MLA_FILE, STEP_FILE = "h200-mla.json", "h200-kimi.json"
README = ROOT / "README.md"
BEGIN, END = TIMES = "<!-- table:begin -->", "<!-- table:end -->"
SUPPORT = "<!-- support:begin -->", "<!-- support:end -->"

OURS = {"treeattn_cuda": "CUDA", "treeattn_triton": "Triton"}
GEOMETRY = ("batch", "q_len", "prefix", "qo_heads", "kv_heads")
PEER_NAMES = {
    "fi_xqa_mask_p64": "FlashInfer XQA", "fa3_cascade_p64": "FA3 cascade", "sglang_extend_tree": "SGLang Triton",
}  # fmt: skip


class Family(NamedTuple):
    """What one table is about: its rows of a result, its chain, its targets and its words."""

    kind: str
    chain: str
    chain_header: str
    chain_name: str
    targets: tuple[Target, ...]
    shape: str
    tree_peers: str


GQA = Family(
    "gqa", "fa3_causal", "FA3 causal chain", "FlashAttention-3", GQA_TARGETS, "head dim 128",
    "of SGLang's Triton and FA3 cascade paths, FlashInfer's custom mask and XQA",
)  # fmt: skip
MLA = Family(
    "mla", "flashmla_causal", "FlashMLA causal chain", "FlashMLA", MLA_TARGETS, "MLA with latent rows of 576, V 512",
    "SGLang's Triton path",
)  # fmt: skip

NO_RESULTS = (
    "No run of `treeattn bench gqa` is committed yet; what single configurations took on an H200 while they were\n"
    "tuned stands in [docs/performance.md](docs/performance.md)."
)

Geometry = tuple[int, ...]


def best_times(rows: Iterable[dict[str, Any]], kind: str = "gqa") -> dict[Geometry, dict[str, dict[str, Any]]]:
    """Find the fastest row of each provider for each geometry, in the order of the file."""
    best: dict[Geometry, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] != kind or row["kv_dtype"] not in ("bf16", "bfloat16"):
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


def costs(ratios: list[float]) -> str:
    """What a tree costs against something, in words."""
    return f"{geometric_mean(ratios):.2f}x ({min(ratios):.2f}x to {max(ratios):.2f}x)"


def render(results: dict[str, Any], family: Family = GQA) -> str:
    """Render the table of a family and the sentences under it, in Markdown."""
    found_times = best_times(results["rows"], family.kind)
    times = {geometry: found for geometry, found in found_times.items() if found.keys() & OURS.keys()}
    if not times:
        rows = f"{len(results['rows'])} rows"
        raise ValueError(f"no bf16 {family.kind.upper()} row of {' or '.join(OURS)} among {rows}")
    kernels = [provider for provider in OURS if any(provider in found for found in times.values())]
    header = (
        "batch", "q_len", "prefix", "heads", "floor", *(f"treeattn {OURS[name]}" for name in kernels), "share of floor",
        family.chain_header, "best other tree",
    )  # fmt: skip
    lines = [table_row(header), table_row("--:" for _ in header)]
    elsewhere = {target[:5]: target for target in family.targets}
    ratios: dict[str, list[float]] = {name: [] for name in kernels}
    tree_ratios: dict[str, list[float]] = {name: [] for name in kernels}
    for (batch, q_len, prefix, qo_heads, kv_heads), providers in times.items():
        ours = {name: providers[name]["us"] for name in kernels if name in providers}
        floor = next(providers[name]["floor_us"] for name in ours)
        chain = providers[family.chain]["us"] if family.chain in providers else None
        target = elsewhere.get((batch, q_len, prefix, qo_heads, kv_heads))
        peer = target.tree * chain / target.chain if chain and target else None
        peer_cell = f"{peer:.1f} ({PEER_NAMES[target.tree_peer]})" if peer and target else ""
        for name, us in ours.items():
            ratios[name] += [us / chain] if chain else []
            tree_ratios[name] += [us / peer] if peer else []
        heads, chain_cell = f"{qo_heads}/{kv_heads}", f"{chain:.1f}" if chain else ""
        cells = [f"{ours[name]:.1f}" if name in ours else "" for name in kernels]
        measured = (f"{floor:.1f}", *cells, f"{floor / min(ours.values()):.0%}", chain_cell, peer_cell)
        lines.append(table_row((batch, q_len, prefix, heads, *measured)))
    env = results["env"]
    versions = ", ".join(f"{name} {env[name]}" for name in ("torch", "triton") if name in env)
    note = (
        f"Microseconds a call on {env['gpu']} ({versions}): bf16, {family.shape}, median of graph replays over "
        "rotating copies of the cache, the best page size of each provider; the share is of the faster kernels."
    )
    if any(ratios.values()):
        against = " and ".join(f"{costs(ratios[name])} with the {OURS[name]} kernels" for name in kernels)
        note += (
            f" Against {family.chain_name}'s causal chain, which takes no tree, a tree costs {against}, "
            f"in geometric mean over {max(map(len, ratios.values()))} rows."
        )
    if any(tree_ratios.values()):
        against = " and ".join(f"{costs(tree_ratios[name])}" for name in kernels)
        note += (
            f" The best other tree kernel of each row ({family.tree_peers}) was measured in another run and is scaled "
            f"by {family.chain_header.split()[0]}'s time in this one; against it a tree costs {against}."
        )
    return "\n".join([*lines, "", note])


def render_step(results: dict[str, Any]) -> str:
    """Render the attention of a verify step of Kimi K2.6 on one GPU of eight: milliseconds of all layers."""
    times = best_times(results["rows"], "kimi")
    kernels = [provider for provider in OURS if any(provider in found for found in times.values())]
    header = ("batch", "prefix", *(f"treeattn {OURS[name]}" for name in kernels), MLA.chain_header, "SGLang Triton")
    lines = [table_row(header), table_row("--:" for _ in header)]
    for geometry, providers in times.items():
        layers = next(iter(providers.values()))["layers"]
        us = {name: row["us"] for name, row in providers.items()}
        names = (*kernels, MLA.chain, "sglang_extend")
        cells = (f"{us[name] * layers / 1000:.2f}" if name in us else "" for name in names)
        lines.append(table_row((geometry[0], geometry[2], *cells)))
    note = (
        f"Milliseconds of attention in a verify step of Kimi K2.6 on one {results['env']['gpu']} of eight: 61 layers, "
        "8 heads, 17 nodes a request, calls as above, all in one run. FlashMLA's is a chain; SGLang's Triton path "
        "takes the trees."
    )
    return "\n".join([*lines, "", note])


def table_of(path: Path) -> str:
    """Render the results at `path`, and those beside it if there are any; where none are committed, say so."""
    parts = [render(json.loads(path.read_text())) if path.exists() else NO_RESULTS]
    mla, step = path.with_name(MLA_FILE), path.with_name(STEP_FILE)
    if mla.exists():
        parts.append(render(json.loads(mla.read_text()), MLA))
    if step.exists():
        parts.append(render_step(json.loads(step.read_text())))
    return "\n\n".join(parts)


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
