"""Tables from rows: one line a shape and provider, geomeans, and the targets where a row has one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .providers import CHAINS
from .targets import GQA_TARGETS, MLA_TARGETS, Target
from .workloads import fp8_pays, options_text

__all__ = ["geomean", "shape_key", "table"]

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


def target_of(row: Row) -> Target | None:
    """The row of targets.json that a measured row belongs to."""
    targets, dim = {"gqa": (GQA_TARGETS, 128), "mla": (MLA_TARGETS, 576)}.get(row["kind"], ((), 0))
    if row.get("head_dim", 128) != dim or row["kv_dtype"] != "bfloat16":
        return None
    shape = (row["batch"], row["q_len"], row["prefix"], row["qo_heads"], row["kv_heads"])
    return next((target for target in targets if target[:5] == shape), None)


def table(rows: Sequence[Row]) -> str:
    """The rows as text, with geomeans below."""
    chains = {shape_key(row): row for row in rows if row["provider"] in CHAINS}
    lines = [
        f"{'kind':10} {'shape (batch, q_len, prefix, heads)':38} {'page':>5} {'provider':18} {'us':>9} {'p20':>9} "
        f"{'p80':>9} {'floor':>8} {'share':>6} {'GB/s':>6} {'TFLOP/s':>7} {'/chain':>6} {'must':>6} {'goal':>6} "
        f"{'rel_err':>8}"
    ]
    for row in rows:
        us, floor = row["us"], row["floor_us"]
        chain, target = chains.get(shape_key(row)), target_of(row)
        shape = f"{row['batch']}, {row['q_len']}, {row['prefix']}, {row['qo_heads']}/{row['kv_heads']}"
        page = f"{row['page_size'] or '-'}{'h' if row.get('kv_layout') == 'HND' else ''}"
        ours = target if row["provider"].startswith("treeattn") else None
        lines.append(
            f"{row['kind'][:10]:10} {shape + options_text(row):38} {page:>5} {row['provider']:18} {us:9.2f} "
            f"{row['p20']:9.2f} {row['p80']:9.2f} {floor:8.2f} {f'{floor / us:.0%}':>6} "
            f"{row.get('bytes', 0) / us / 1e3:6.0f} {row.get('flop', 0) / us / 1e6:7.1f} "
            f"{'-' if chain is None else format(us / chain['us'], '.2f'):>6} "
            f"{ours.must if ours else '-':>6} {ours.goal if ours else '-':>6} "
            f"{row['rel_err'] if row['rel_err'] is None else format(row['rel_err'], '.1e'):>8}"
        )
    return "\n".join([*lines, *_summaries(rows, chains)])


def _summaries(rows: Sequence[Row], chains: dict[tuple[Any, ...], Row]) -> list[str]:
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for provider in dict.fromkeys(row["provider"] for row in rows if row["kind"] == kind):
            mine = [row for row in rows if row["kind"] == kind and row["provider"] == provider]
            if provider not in CHAINS:
                lines += _against_peers(f"{kind} {provider}", mine, chains)
            lines += _fp8(f"{kind} {provider}", mine)
            lines += _layers(f"{kind} {provider}", mine)
    return lines


def _against_peers(name: str, mine: Sequence[Row], chains: dict[tuple[Any, ...], Row]) -> list[str]:
    """Geomeans of a provider's rows of a kind against each chain, and against the best tree peers."""
    lines = []
    pairs = [(row, chains[shape_key(row)]) for row in mine if shape_key(row) in chains]
    for peer in CHAINS:
        ratios = [row["us"] / chain["us"] for row, chain in pairs if chain["provider"] == peer]
        if ratios:
            lines.append(
                f"{name}: {geomean(ratios):.3f} x {peer} in geomean over {len(ratios)} rows, worst {max(ratios):.2f}"
            )
    scaled = [(row["us"] / (t.tree * chain["us"] / t.chain), t) for row, chain in pairs if (t := target_of(row))]
    if scaled and mine[0]["provider"].startswith("treeattn"):
        worst = max(scaled, key=lambda pair: pair[0])
        lines.append(
            f"{name}: {geomean(ratio for ratio, _ in scaled):.3f} x the best tree peer of each row "
            f"(its time scaled by this run's chain), worst {worst[0]:.2f} against {worst[1].tree_peer} at "
            f"{tuple(worst[1][:5])}"
        )
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
