"""Tables from rows: one line a shape and provider, what failed, geomeans, and the targets where a row has one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .peers import PEERS
from .providers import CHAINS
from .targets import GQA_TARGETS, MLA_TARGETS, Target
from .workloads import PAGES, fp8_pays, options_text

__all__ = ["geomean", "page_asked", "shape_key", "shape_text", "table"]

Row = dict[str, Any]


def geomean(values: Iterable[float]) -> float:
    """Geometric mean; NaN of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def shape_key(row: Row) -> tuple[Any, ...]:
    """What makes two rows the same workload, the provider and its pages aside.

    A field that a row does not have is the usual one: results of earlier revisions lack some.
    """
    dims = row.get("head_dim_v") or row.get("head_dim"), bool(row.get("shared_kv")), row.get("window_left", -1)
    dtype = row.get("dtype") or row.get("kv_dtype")
    lengths = tuple(row.get("prefixes") or ()), tuple(row.get("q_lens") or ())
    fields = ("kind", "batch", "q_len", "prefix", "qo_heads", "kv_heads", "head_dim", "kv_dtype", "nodes")
    return (*(row.get(field) for field in fields), dtype, *dims, *lengths)


def page_asked(row: Row) -> tuple[int, str]:
    """Page size and order of a row's workload, whatever page the provider took.

    Results of earlier revisions have the provider's page alone; what treeattn took is the workload's.
    """
    own: int = row["page_size"] if row["provider"].startswith("treeattn") else 64
    page: int = row.get("page_size_asked", own)
    layout: str = row.get("kv_layout", "NHD")
    return page, layout


def shape_text(row: Row) -> str:
    """Shape and options of a row in a few characters."""
    return f"{row['batch']}, {row['q_len']}, {row['prefix']}, {row['qo_heads']}/{row['kv_heads']}{options_text(row)}"


def target_of(row: Row) -> Target | None:
    """The row of targets.json that a measured row belongs to."""
    targets, dim = {"gqa": (GQA_TARGETS, 128), "mla": (MLA_TARGETS, 576)}.get(row["kind"], ((), 0))
    if row.get("head_dim", 128) != dim or row["kv_dtype"] != "bfloat16":
        return None
    shape = (row["batch"], row["q_len"], row["prefix"], row["qo_heads"], row["kv_heads"])
    return next((target for target in targets if target[:5] == shape), None)


def table(rows: Sequence[Row], failed: Sequence[Row] = ()) -> str:
    """The rows as text, then those that failed, with geomeans below."""
    chains = {shape_key(row): row for row in rows if row["provider"] in CHAINS}
    lines = [
        f"{'kind':14} {'shape (batch, q_len, prefix, heads)':38} {'page':>5} {'provider':22} {'us':>9} {'p20':>9} "
        f"{'p80':>9} {'floor':>8} {'share':>6} {'GB/s':>6} {'TFLOP/s':>7} {'/chain':>6} {'must':>6} {'goal':>6} "
        f"{'rel_err':>8}"
    ]
    for row in rows:
        us, floor = row["us"], row["floor_us"]
        chain, target = chains.get(shape_key(row)), target_of(row)
        page = f"{row['page_size'] or '-'}{'h' if row.get('kv_layout') == 'HND' else ''}"
        ours = target if row["provider"].startswith("treeattn") else None
        lines.append(
            f"{row['kind'][:14]:14} {shape_text(row):38} {page:>5} {row['provider']:22} {us:9.2f} "
            f"{row['p20']:9.2f} {row['p80']:9.2f} {floor:8.2f} {f'{floor / us:.0%}':>6} "
            f"{row.get('bytes', 0) / us / 1e3:6.0f} {row.get('flop', 0) / us / 1e6:7.1f} "
            f"{'-' if chain is None else format(us / chain['us'], '.2f'):>6} "
            f"{ours.must if ours else '-':>6} {ours.goal if ours else '-':>6} "
            f"{row['rel_err'] if row['rel_err'] is None else format(row['rel_err'], '.1e'):>8}"
        )
    for row in failed:
        lines.append(f"{row['kind'][:14]:14} {shape_text(row):38} {'':5} {row['provider']:22} FAILED {row['error']}")
    return "\n".join([*lines, *_summaries(rows, chains)])


def _summaries(rows: Sequence[Row], chains: dict[tuple[Any, ...], Row]) -> list[str]:
    lines = []
    peers: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["provider"] in PEERS and row["us"] < peers.get(shape_key(row), {"us": math.inf})["us"]:
            peers[shape_key(row)] = row
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for provider in dict.fromkeys(row["provider"] for row in rows if row["kind"] == kind):
            mine = [row for row in rows if row["kind"] == kind and row["provider"] == provider]
            if provider not in CHAINS:
                lines += _against_peers(f"{kind} {provider}", mine, chains, peers)
            lines += _fp8(f"{kind} {provider}", mine)
            lines += _layers(f"{kind} {provider}", mine)
    return lines + _pages(rows) + _pairs(rows)


def _against_peers(
    name: str, mine: Sequence[Row], chains: dict[tuple[Any, ...], Row], peers: dict[tuple[Any, ...], Row]
) -> list[str]:
    """Geomeans of a provider's rows of a kind against each chain, and against the best tree peers."""
    lines = []
    pairs = [(row, chains[shape_key(row)]) for row in mine if shape_key(row) in chains]
    for peer in CHAINS:
        ratios = [row["us"] / chain["us"] for row, chain in pairs if chain["provider"] == peer]
        if ratios:
            lines.append(
                f"{name}: {geomean(ratios):.3f} x {peer} in geomean over {len(ratios)} rows, worst {max(ratios):.2f}"
            )
    lines += _against_trees(name, mine, peers)
    scaled = [(row["us"] / (t.tree * chain["us"] / t.chain), t) for row, chain in pairs if (t := target_of(row))]
    if scaled and mine[0]["provider"].startswith("treeattn"):
        worst = max(scaled, key=lambda pair: pair[0])
        lines.append(
            f"{name}: {geomean(ratio for ratio, _ in scaled):.3f} x the best tree peer of each row "
            f"(its time scaled by this run's chain), worst {worst[0]:.2f} against {worst[1].tree_peer} at "
            f"{tuple(worst[1][:5])}"
        )
    return lines


def _against_trees(name: str, mine: Sequence[Row], peers: dict[tuple[Any, ...], Row]) -> list[str]:
    """A geomean of treeattn's rows against the best tree peer that was measured beside each."""
    pairs = [(row["us"] / peers[shape_key(row)]["us"], row) for row in mine if shape_key(row) in peers]
    if not pairs or not mine[0]["provider"].startswith("treeattn"):
        return []
    worst, row = max(pairs, key=lambda pair: pair[0])
    return [
        f"{name}: {geomean(ratio for ratio, _ in pairs):.3f} x the best tree peer of this run in geomean over "
        f"{len(pairs)} rows, worst {worst:.2f} against {peers[shape_key(row)]['provider']} at ({shape_text(row)})"
    ]


def _pages(rows: Sequence[Row]) -> list[str]:
    """Each page size and order of the set `pages` against its first one."""
    lines = []
    mine = [row for row in rows if row["kind"] == "pages" and row["provider"] not in CHAINS]
    for provider in dict.fromkeys(row["provider"] for row in mine):
        times = {(shape_key(row), page_asked(row)): row["us"] for row in mine if row["provider"] == provider}
        for page in PAGES[1:]:
            ratios = [
                us / times[shape, PAGES[0]]
                for (shape, asked), us in times.items()
                if asked == page and (shape, PAGES[0]) in times
            ]
            if ratios:
                lines.append(
                    f"pages {provider}: page {page[0]} {page[1]} {geomean(ratios):.3f} x page {PAGES[0][0]} "
                    f"{PAGES[0][1]} in geomean over {len(ratios)} rows, worst {max(ratios):.3f} "
                    f"(target {1.12 if page[0] == 1 else 1.05})"
                )
    return lines


PAIRS = {"ragged": "ragged-uniform", "mixed": "mixed-uniform", "padded": "padded-real"}
"""A kind of row, and the one that it may cost 1.15 times as much as."""


def _pairs(rows: Sequence[Row]) -> list[str]:
    """Ragged against uniform and padded against real batches, scaled by the floors where those are not quite equal."""
    lines = []
    for kind, usual in PAIRS.items():
        geometry = ("provider", "qo_heads", "kv_heads", "head_dim", "kv_dtype")
        plain = {tuple(row[key] for key in geometry): row for row in rows if row["kind"] == usual}
        for row in rows:
            beside = plain.get(tuple(row[key] for key in geometry))
            if row["kind"] == kind and beside is not None:
                ratio = row["us"] / beside["us"] * beside["floor_us"] / row["floor_us"]
                lines.append(f"{kind} {row['provider']}: ({shape_text(row)}) {ratio:.3f} x {usual} (target 1.15)")
    return lines


def _fp8(name: str, mine: Sequence[Row]) -> list[str]:
    """Rows with an FP8 cache over the same rows without: where it has to pay off, and altogether."""
    places = [(row, row["page_size"], row.get("kv_layout")) for row in mine]
    times = {(shape_key(row), *place): row for row, *place in places}
    lines = []
    for kv_dtype in dict.fromkeys(row["kv_dtype"] for row in mine if row["kv_dtype"].startswith("float8_")):
        few, every = [], []
        for row, *place in places:
            plain = times.get((shape_key({**row, "kv_dtype": row.get("dtype")}), *place))
            if row["kv_dtype"] != kv_dtype or plain is None:
                continue
            every.append(row["us"] / plain["us"])
            if fp8_pays(row["qo_heads"] // row["kv_heads"] * row["q_len"], plain["floor_us"]):
                few.append(every[-1])
        for ratios, which in ((few, "rows with R <= 72 and a floor above 15 us"), (every, "rows in all")):
            if ratios:
                short = kv_dtype.removeprefix("float8_").removesuffix("fn")
                lines.append(
                    f"{name}: {short} {geomean(ratios):.3f} x {mine[0].get('dtype')} in geomean over {len(ratios)} "
                    f"{which}, worst {max(ratios):.3f}"
                )
    return lines


def _layers(name: str, mine: Sequence[Row]) -> list[str]:
    """What all layers of a model step take together, one line a number of layers."""
    lines = []
    for layers in dict.fromkeys(row["layers"] for row in mine if row.get("layers", 1) > 1):
        steps = [
            f"({row['batch']}, {row['q_len']}, {row['prefix']}) {row['us'] * layers / 1000:.2f}"
            for row in mine
            if row.get("layers") == layers
        ]
        lines.append(f"{name}: ms a step of {layers} layers at (batch, q_len, prefix): {', '.join(steps)}")
    return lines
