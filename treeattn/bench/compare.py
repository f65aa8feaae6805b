"""Compare two results: rows of the same workload and provider, and which changed by more than their own spread."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .report import Row, geomean, page_asked, shape_key, shape_text

__all__ = ["Comparison", "compare_results", "load_result"]

NEEDED = ("kind", "batch", "q_len", "prefix", "qo_heads", "kv_heads", "kv_dtype", "page_size", "provider")
TIMES = ("us", "p20", "p80", "floor_us")


def load_result(path: str | Path) -> dict[str, Any]:
    """Read a result that `save` wrote, and check that it is one.

    Raises
    ------
    ValueError
        If it is not JSON, or not a result: the message names the row and the field.
    OSError
        If it cannot be read.
    """
    try:
        result = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(result, dict) or "rows" not in result or "env" not in result:
        raise ValueError(f"{path} is no benchmark result: it has no env and rows")
    for field, needed in (("rows", NEEDED + TIMES), ("failed", (*NEEDED, "error"))):
        for index, row in enumerate(result.get(field, ())):
            if missing := [name for name in needed if not isinstance(row, dict) or name not in row]:
                raise ValueError(f"{path} is no benchmark result: {field}[{index}] has no {', '.join(missing)}")
            if field == "rows" and not all(isinstance(row[name], (int, float)) for name in TIMES):
                raise ValueError(f"{path} is no benchmark result: rows[{index}] has a time that is no number")
            if field == "rows" and row["us"] <= 0:
                raise ValueError(f"{path} is no benchmark result: rows[{index}] took {row['us']} us")
    return dict(result)


@dataclass(frozen=True)
class Comparison:
    """What `compare_results` found.

    Attributes
    ----------
    text : str
        The table, with geomeans and what could not be compared below.
    matched : int
        Rows of the same workload and provider.
    worst : float
        Largest ratio B / A among the rows that changed by more than their spread; 1.0 if none got slower.
    broken : int
        Rows with a time in A that failed in B.
    """

    text: str
    matched: int
    worst: float
    broken: int


Key = tuple[Any, ...]


def _by_key(rows: list[Row], name: str, notes: list[str]) -> dict[Key, Row]:
    found: dict[Key, Row] = {}
    for row in rows:
        key = (row["provider"], page_asked(row), shape_key(row))
        if key in found:
            notes.append(f"twice in {name}, the faster counts: {_label(row)}")
        if key not in found or row.get("us", 0) < found[key].get("us", 0):
            found[key] = row
    return found


def _label(row: Row) -> str:
    page, layout = page_asked(row)
    lists = " ragged" if row.get("prefixes") or row.get("q_lens") else ""
    text = f"{row['kind']} ({shape_text(row)}){lists} page {page}{' HND' if layout == 'HND' else ''}"
    return f"{text:56} {row['provider']:22}"


def apart(a: Row, b: Row) -> bool:
    """Whether each median is outside the other's 20th to 80th percentile."""
    return not a["p20"] <= b["us"] <= a["p80"] and not b["p20"] <= a["us"] <= b["p80"]


def compare_results(a: dict[str, Any], b: dict[str, Any]) -> Comparison:
    """Set the rows of two results side by side.

    A row is matched by provider and workload: kind, shape, lengths, dtypes, options, page size and order. Ratios are
    B / A. What is in one of the two only, or failed, is listed.
    """
    notes: list[str] = []
    lines = [
        f"{key}: {a['env'].get(key)} -> {b['env'].get(key)}"
        for key in ("gpu", "driver", "torch", "triton", "git_rev")
        if a["env"].get(key) != b["env"].get(key)
    ]
    before, after = _by_key(a["rows"], "A", notes), _by_key(b["rows"], "B", notes)
    failed_a, failed_b = _by_key(a.get("failed", []), "A", notes), _by_key(b.get("failed", []), "B", notes)
    worst, ratios = 1.0, dict[str, list[float]]()
    for key, row in before.items():
        if (new := after.get(key)) is None:
            continue
        ratio = new["us"] / row["us"]
        ratios.setdefault(row["provider"], []).append(ratio)
        verdict = "within the spread"
        if apart(row, new):
            worst = max(worst, ratio)
            verdict = "SLOWER" if ratio > 1 else "faster"
        lines.append(f"{_label(row)} {row['us']:9.2f} -> {new['us']:9.2f}  x{ratio:.3f}  {verdict}")
    for provider, values in ratios.items():
        lines.append(f"geomean of {len(values)} rows of {provider}: x{geomean(values):.3f}")
    every = [ratio for values in ratios.values() for ratio in values]
    if len(ratios) > 1:
        lines.append(f"geomean of {len(every)} rows: x{geomean(every):.3f}")
    broken = [key for key in before if key in failed_b and key not in after]
    lines += [f"FAILED in B: {_label(before[key])} {failed_b[key]['error']}" for key in broken]
    lines += [f"failed in A, in B {row['us']:.2f}: {_label(row)}" for key, row in after.items() if key in failed_a]
    lines += [f"only in A: {_label(row)}" for key, row in before.items() if key not in after and key not in failed_b]
    lines += [f"only in B: {_label(row)}" for key, row in after.items() if key not in before and key not in failed_a]
    return Comparison("\n".join(lines + notes), len(every), worst, len(broken))
