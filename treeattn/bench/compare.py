"""Compare two results: which rows got faster or slower by more than their own spread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .report import geomean, shape_key
from .workloads import options_text

__all__ = ["compare_results", "load_result"]


def load_result(path: str | Path) -> dict[str, Any]:
    """Read a result that `save` wrote."""
    result = json.loads(Path(path).read_text())
    if not isinstance(result, dict) or "rows" not in result or "env" not in result:
        raise ValueError(f"{path} is no benchmark result: it has no env and rows")
    return result


def compare_results(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, float]:
    """Rows of both results side by side.

    Returns
    -------
    text, worst
        The table, and the largest ratio new / old among rows whose p20-p80 ranges do not overlap (1.0 if none).
    """

    def by_key(result: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
        return {
            (row["provider"], row["page_size"], row.get("kv_layout"), *shape_key(row)): row for row in result["rows"]
        }

    before, after = by_key(old), by_key(new)
    shared = [key for key in before if key in after]
    lines = [f"{key}: {old['env'].get(key)} -> {new['env'].get(key)}" for key in ("gpu", "torch", "triton", "git_rev")
             if old["env"].get(key) != new["env"].get(key)]  # fmt: skip
    worst, ratios = 1.0, []
    for key in shared:
        a, b = before[key], after[key]
        ratio = b["us"] / a["us"]
        apart = b["p20"] > a["p80"] or b["p80"] < a["p20"]
        ratios.append(ratio)
        if apart:
            worst = max(worst, ratio)
        verdict = ("slower" if ratio > 1 else "faster") if apart else "within the spread"
        heads = f"{a['qo_heads']}/{a['kv_heads']}{options_text(a)}"
        shape = f"{a['kind']} ({a['batch']}, {a['q_len']}, {a['prefix']}, {heads}) page {a['page_size']}"
        lines.append(f"{shape:54} {a['provider']:18} {a['us']:9.2f} -> {b['us']:9.2f}  x{ratio:.3f}  {verdict}")
    if shared:
        lines.append(f"geomean of {len(shared)} rows: x{geomean(ratios):.3f}")
    only = len(before) + len(after) - 2 * len(shared)
    if only:
        lines.append(f"{only} rows are in one of the two results only")
    return "\n".join(lines), worst
