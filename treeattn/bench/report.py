"""Tables from rows: one line a shape and provider, geomeans, and the targets where a row has one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .targets import GQA_TARGETS, Target

__all__ = ["geomean", "shape_key", "table"]

Row = dict[str, Any]
CHAIN = "fa3_causal"


def geomean(values: Iterable[float]) -> float:
    """Geometric mean; NaN of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def shape_key(row: Row) -> tuple[Any, ...]:
    """What makes two rows the same workload, the provider and its pages aside."""
    lengths = tuple(row.get("prefixes") or ()), tuple(row.get("q_lens") or ())
    fields = ("kind", "batch", "q_len", "prefix", "qo_heads", "kv_heads", "head_dim", "kv_dtype", "nodes")
    return (*(row.get(field) for field in fields), *lengths)


def target_of(row: Row) -> Target | None:
    """The row of targets.json that a measured row belongs to."""
    if row["kind"] != "gqa" or row.get("head_dim", 128) != 128 or row["kv_dtype"] != "bfloat16":
        return None
    shape = (row["batch"], row["q_len"], row["prefix"], row["qo_heads"], row["kv_heads"])
    return next((target for target in GQA_TARGETS if target[:5] == shape), None)


def table(rows: Sequence[Row]) -> str:
    """The rows as text, with geomeans below."""
    chains = {shape_key(row): row["us"] for row in rows if row["provider"] == CHAIN}
    lines = [
        f"{'kind':10} {'shape (batch, q_len, prefix, heads)':34} {'page':>5} {'provider':18} {'us':>9} {'p20':>9} "
        f"{'p80':>9} {'floor':>8} {'share':>6} {'GB/s':>6} {'TFLOP/s':>7} {'/chain':>6} {'must':>6} {'goal':>6} "
        f"{'rel_err':>8}"
    ]
    for row in rows:
        us, floor = row["us"], row["floor_us"]
        chain, target = chains.get(shape_key(row)), target_of(row)
        shape = f"{row['batch']}, {row['q_len']}, {row['prefix']}, {row['qo_heads']}/{row['kv_heads']}"
        if row.get("head_dim", 128) != 128:
            shape += f" d{row['head_dim']}"
        page = f"{row['page_size'] or '-'}{'h' if row.get('kv_layout') == 'HND' else ''}"
        ours = target if row["provider"].startswith("treeattn") else None
        lines.append(
            f"{row['kind'][:10]:10} {shape:34} {page:>5} {row['provider']:18} {us:9.2f} "
            f"{row['p20']:9.2f} {row['p80']:9.2f} {floor:8.2f} {f'{floor / us:.0%}':>6} "
            f"{row.get('bytes', 0) / us / 1e3:6.0f} {row.get('flop', 0) / us / 1e6:7.1f} "
            f"{f'{us / chain:.2f}' if chain else '-':>6} "
            f"{ours.must if ours else '-':>6} {ours.goal if ours else '-':>6} "
            f"{row['rel_err'] if row['rel_err'] is None else format(row['rel_err'], '.1e'):>8}"
        )
    return "\n".join([*lines, *_summaries(rows, chains)])


def _summaries(rows: Sequence[Row], chains: dict[tuple[Any, ...], float]) -> list[str]:
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for provider in dict.fromkeys(row["provider"] for row in rows if row["kind"] == kind):
            if provider == CHAIN:
                continue
            mine = [row for row in rows if row["kind"] == kind and row["provider"] == provider]
            pairs = [(row, chains[shape_key(row)]) for row in mine if shape_key(row) in chains]
            if pairs:
                ratios = [row["us"] / chain for row, chain in pairs]
                lines.append(
                    f"{kind} {provider}: {geomean(ratios):.3f} x {CHAIN} in geomean over {len(pairs)} rows, "
                    f"worst {max(ratios):.2f}"
                )
            scaled = [(row["us"] / (t.tree * chain / t.chain), t) for row, chain in pairs if (t := target_of(row))]
            if scaled and provider.startswith("treeattn"):
                worst = max(scaled, key=lambda pair: pair[0])
                lines.append(
                    f"{kind} {provider}: {geomean(ratio for ratio, _ in scaled):.3f} x the best tree peer of each row "
                    f"(its time scaled by this run's chain), worst {worst[0]:.2f} against {worst[1].tree_peer} at "
                    f"{tuple(worst[1][:5])}"
                )
    return lines
