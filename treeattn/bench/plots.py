"""A picture of a result, from its JSON alone. Needs matplotlib (extra `bench`), imported on use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import shape_key
from .workloads import options_text

__all__ = ["plot_result"]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")


def plot_result(result: dict[str, Any], path: str | Path) -> Path:
    """Bars of microseconds per shape and provider, with each shape's floor as a line; log scale.

    Returns
    -------
    Path
        The PNG that was written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if row["floor_us"] > 0]
    if not rows:
        raise ValueError("the result has no row with a floor: nothing to plot")
    shapes = list(dict.fromkeys((shape_key(row), _page(row, rows)) for row in rows))
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    times = {(shape_key(row), _page(row, rows), row["provider"]): row for row in rows}
    figure, axes = plt.subplots(figsize=(max(7.0, 0.55 * len(shapes) + 2), 5.2), dpi=130)
    width = 0.8 / len(providers)
    for index, provider in enumerate(providers):
        at, heights, spread = [], [], []
        for place, shape in enumerate(shapes):
            row = times.get((*shape, provider))
            if row is not None:
                at.append(place - 0.4 + (index + 0.5) * width)
                heights.append(row["us"])
                spread.append((max(row["us"] - row["p20"], 0), max(row["p80"] - row["us"], 0)))
        axes.bar(
            at, heights, width, label=provider, color=COLOURS[index % len(COLOURS)],
            yerr=list(zip(*spread, strict=True)), error_kw={"elinewidth": 0.8},
        )  # fmt: skip
    for place, shape in enumerate(shapes):
        floor = next(row["floor_us"] for row in rows if (shape_key(row), _page(row, rows)) == shape)
        axes.hlines(
            floor,
            place - 0.42,
            place + 0.42,
            colors="black",
            linewidth=1.4,
            label="floor" if place == 0 else None,
        )
    axes.set_yscale("log")
    axes.set_ylabel("microseconds per attention call")
    axes.set_xticks(range(len(shapes)), [_label(rows, shape) for shape in shapes], rotation=60, ha="right", fontsize=7)
    env = result["env"]
    axes.set_title(f"{env.get('gpu') or 'CPU'}, torch {env.get('torch')}, Triton {env.get('triton')}, "
                   f"{(env.get('git_rev') or '')[:8]}, {(env.get('date') or '')[:10]}", fontsize=9)  # fmt: skip
    axes.grid(axis="y", which="both", linewidth=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8)
    figure.tight_layout()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path


def _page(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Pages tell rows apart only where one provider ran a shape with several."""
    same = {
        (other["page_size"], other.get("kv_layout"))
        for other in rows
        if other["provider"] == row["provider"] and shape_key(other) == shape_key(row)
    }
    return f" page {row['page_size']}{row.get('kv_layout', '')}" if len(same) > 1 else ""


def _label(rows: list[dict[str, Any]], shape: tuple[Any, str]) -> str:
    row = next(row for row in rows if shape_key(row) == shape[0])
    heads = f"{row['qo_heads']}/{row['kv_heads']}{options_text(row)}"
    return f"b{row['batch']} q{row['q_len']} p{row['prefix']} {heads}{shape[1]}"
