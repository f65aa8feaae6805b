"""Pictures of a result, from its JSON alone. Needs matplotlib (extra `bench`), imported on use.

A result gives up to four PNG files: latency against prefix and against q_len with the floor, the ratio to the causal
chain for each row, and all rows. Each carries the SHA-256 of the JSON that it was drawn from (`source_of`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .compare import load_result
from .providers import CHAINS
from .report import Row, geomean, page_asked, shape_key, shape_text, target_of

__all__ = ["PICTURES", "NothingToDrawError", "plot_files", "source_of"]

STYLES = {
    "treeattn_triton": ("#0072b2", "o"), "treeattn_cuda": ("#d55e00", "D"), "fa3_causal": ("#009e73", "s"),
    "flashmla_causal": ("#009e73", "s"), "fa3_cascade": ("#cc79a7", "^"), "flashinfer_custom_mask": ("#e69f00", "v"),
    "flashinfer_xqa": ("#b8860b", "<"), "sglang_extend": ("#56b4e9", "P"), "sdpa": ("#777777", "X"),
}  # fmt: skip
"""Colour and marker of a provider, the same in every picture (colours of Okabe and Ito, apart for the colour-blind)."""
OTHERS = ("#8a6d3b", "*"), ("#6a3d9a", "h"), ("#b15928", "p")
DPI = 110


class NothingToDrawError(ValueError):
    """A result has no rows for a picture; the message says which it would need."""


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise NotImplementedError(f"plots need matplotlib ({error}): pip install 'treeattn[bench]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _style(provider: str, providers: Sequence[str]) -> tuple[str, str]:
    rest = [name for name in providers if name not in STYLES]
    return STYLES[provider] if provider in STYLES else OTHERS[rest.index(provider) % len(OTHERS)]


def _names(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["provider"] for row in rows))


def _title(result: dict[str, Any]) -> str:
    env = result["env"]
    return (
        f"{env.get('gpu') or 'CPU'}, torch {env.get('torch')}, Triton {env.get('triton')}, "
        f"{(env.get('git_rev') or '')[:8]}, {(env.get('date') or '')[:10]}"
    )


def _where(row: Row) -> str:
    page, layout = page_asked(row)
    return f"{row['kind']} ({shape_text(row)})" + ("" if (page, layout) == (64, "NHD") else f" page {page} {layout}")


def _panels(rows: Iterable[Row], free: Sequence[str]) -> list[list[Row]]:
    """Rows that differ in the `free` fields alone, where the first of them has at least two values."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if not row.get("prefixes") and not row.get("q_lens"):
            found.setdefault((shape_key({**row, **dict.fromkeys(free)}), page_asked(row)), []).append(row)
    return [panel for panel in found.values() if len({row[free[0]] for row in panel}) > 1]


def draw_against(result: dict[str, Any], axis: str, other: str) -> Any:
    """Latency against `axis`, one panel a shape, one line a provider, the floor dashed.

    Where no rows differ in `axis` alone they are drawn as points, ordered by `axis`, then batch and `other`.
    """
    rows = [row for row in result["rows"] if row["floor_us"] > 0]
    panels, lines = _panels(rows, (axis,)), True
    if not panels:
        panels, lines = _panels(rows, (axis, "batch", other)), False
    if not panels:
        raise NothingToDrawError(f"no two rows of a shape differ in {axis}")
    plt = _pyplot()
    columns = min(3, len(panels))
    depth = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        depth, columns, figsize=(4.3 * columns + 0.6, 3.5 * depth + 1.0), dpi=DPI, squeeze=False, sharey=True
    )
    for place, axes in enumerate(grid.flat):
        if place >= len(panels):
            axes.axis("off")
            continue
        _panel(axes, panels[place], axis, other, lines, _names(rows))
        if place % columns == 0:
            axes.set_ylabel("µs a call")
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        found, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=min(5, len(handles)), fontsize=8)
    figure.suptitle(_title(result), fontsize=9)
    figure.tight_layout(rect=(0, 0.25 / figure.get_figheight() + 0.01, 1, 1))
    return figure


def _panel(axes: Any, panel: list[Row], axis: str, other: str, lines: bool, names: Sequence[str]) -> None:
    """One shape. Without lines each workload has a column of its own, so that none hides another."""
    columns = sorted({(row[axis], row["batch"], row[other]) for row in panel})

    def place(row: Row) -> float:
        return float(row[axis]) if lines else float(columns.index((row[axis], row["batch"], row[other])))

    floors = sorted({(place(row), row["floor_us"]) for row in panel})
    floor_style = {"linestyle": "--", "linewidth": 1} if lines else {"linestyle": "", "marker": "_", "markersize": 13}
    axes.plot(*zip(*floors, strict=True), color="black", label="floor", **floor_style)
    for provider in names:
        mine = sorted((row for row in panel if row["provider"] == provider), key=place)
        if not mine:
            continue
        colour, marker = _style(provider, names)
        times = [row["us"] for row in mine]
        spread = [[max(row["us"] - row["p20"], 0) for row in mine], [max(row["p80"] - row["us"], 0) for row in mine]]
        axes.errorbar(
            [place(row) for row in mine], times, yerr=spread, color=colour, marker=marker, markersize=4, linewidth=1.2,
            linestyle="-" if lines else "", label=provider, elinewidth=0.8,
        )  # fmt: skip
    axes.set_yscale("log")
    if lines:
        axes.set_xscale("log", base=2)
        axes.set_xticks([column[0] for column in columns], [str(column[0]) for column in columns], fontsize=7)
        axes.set_xlabel(axis)
    else:
        labels = [f"{value}: {batch} x {rest}" for value, batch, rest in columns]
        axes.set_xticks(range(len(columns)), labels, rotation=60, ha="right", fontsize=7)
        axes.set_xlabel(f"{axis}: batch x {other}")
    axes.minorticks_off()
    axes.margins(x=0.12)
    axes.grid(linewidth=0.3)
    fixed = panel[0]
    heads = shape_text(fixed).rsplit(", ", 1)[1]
    size = f"batch {fixed['batch']}, {other} {fixed[other]}, " if lines else ""
    axes.set_title(f"{fixed['kind']}: {size}{heads}", fontsize=8)


def draw_ratios(result: dict[str, Any]) -> Any:
    """Each row's time over the causal chain's of the same shape, one line a workload; goals where it has one."""
    chains = {shape_key(row): row for row in result["rows"] if row["provider"] in CHAINS}
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in result["rows"]:
        if shape_key(row) in chains and row["provider"] not in CHAINS:
            found.setdefault((shape_key(row), page_asked(row)), []).append(row)
    if not found:
        raise NothingToDrawError(f"no row of another provider beside one of {' or '.join(CHAINS)}")
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8.5, 0.23 * len(found) + 1.9), dpi=DPI)
    names = _names(row for rows in found.values() for row in rows)
    goals: list[tuple[float, int]] = []
    points: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
    for place, ((shape, _), rows) in enumerate(found.items()):
        for row in rows:
            points[row["provider"]].append((row["us"] / chains[shape]["us"], place))
        if (target := target_of(rows[0])) is not None:
            goals.append((target.goal / target.chain, place))
    if goals:
        axes.plot(*zip(*goals, strict=True), linestyle="", marker="|", markersize=9, color="black", label="goal")
    for name in names:
        colour, marker = _style(name, names)
        label = f"{name}, geomean {geomean(ratio for ratio, _ in points[name]):.2f}"
        axes.plot(*zip(*points[name], strict=True), linestyle="", marker=marker, markersize=5, color=colour,
                  label=label)  # fmt: skip
    axes.axvline(1, color="black", linewidth=0.9)
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    ticks = [tick for tick in (0.125, 0.25, 0.5, 0.7, 1, 1.4, 2, 4, 8, 16, 32, 64, 128) if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(found)), [_where(rows[0]) for rows in found.values()], fontsize=7)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.grid(linewidth=0.3)
    peers = " or ".join(dict.fromkeys(chain["provider"] for chain in chains.values()))
    axes.set_xlabel(f"time / {peers} (a causal chain, no tree); left of 1 is faster")
    axes.set_title(_title(result), fontsize=9)
    figure.legend(loc="lower center", ncols=2, fontsize=8)
    figure.tight_layout(rect=(0, 0.35 / figure.get_figheight() + 0.01, 1, 1))
    return figure


def draw_rows(result: dict[str, Any]) -> Any:
    """Bars of microseconds a workload and provider, with each workload's floor as a line."""
    rows = [row for row in result["rows"] if row["floor_us"] > 0]
    if not rows:
        raise NothingToDrawError("no row with a floor")
    plt = _pyplot()
    shapes = list(dict.fromkeys((shape_key(row), page_asked(row)) for row in rows))
    names = _names(rows)
    figure, axes = plt.subplots(figsize=(max(7.0, 0.4 * len(shapes) + 2), 5.2), dpi=DPI)
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        mine = [row for row in rows if row["provider"] == name]
        at = [shapes.index((shape_key(row), page_asked(row))) - 0.4 + (index + 0.5) * width for row in mine]
        spread = [[max(row["us"] - row["p20"], 0) for row in mine], [max(row["p80"] - row["us"], 0) for row in mine]]
        axes.bar(at, [row["us"] for row in mine], width, label=name, color=_style(name, names)[0], yerr=spread,
                 error_kw={"elinewidth": 0.8})  # fmt: skip
    first = {shape: next(r for r in rows if (shape_key(r), page_asked(r)) == shape) for shape in shapes}
    for place, shape in enumerate(shapes):
        axes.hlines(first[shape]["floor_us"], place - 0.42, place + 0.42, colors="black", linewidth=1.4,
                    label=None if place else "floor")  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylabel("µs a call")
    axes.set_xticks(range(len(shapes)), [_where(first[shape]) for shape in shapes], rotation=60, ha="right", fontsize=7)
    axes.set_title(_title(result), fontsize=9)
    axes.grid(axis="y", linewidth=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8)
    figure.tight_layout()
    return figure


PICTURES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "prefix": lambda result: draw_against(result, "prefix", "q_len"),
    "q_len": lambda result: draw_against(result, "q_len", "prefix"),
    "ratio": draw_ratios,
    "rows": draw_rows,
}


def source_of(file: str | Path) -> str:
    """What a picture says about the result it was drawn from: name and SHA-256."""
    return f"{Path(file).name} sha256:{hashlib.sha256(Path(file).read_bytes()).hexdigest()}"


def plot_files(
    files: Sequence[str | Path], out: str | Path, only: Sequence[str] = tuple(PICTURES)
) -> tuple[list[Path], dict[str, str]]:
    """Draw the pictures of every result into a folder, as ``<result>-<picture>.png``; `only` names some of them.

    Returns
    -------
    written, undrawn
        The files, and by name those that a result has no rows for, with the reason.

    Raises
    ------
    ValueError
        If a file is no result, or two have one name.
    NotImplementedError
        Without matplotlib.
    """
    stems = [Path(file).stem for file in files]
    if twice := sorted({stem for stem in stems if stems.count(stem) > 1}):
        raise ValueError(f"two results would be drawn under one name: {', '.join(twice)}")
    results = [load_result(file) for file in files]
    plt = _pyplot()
    written, undrawn = [], {}
    for file, stem, result in zip(files, stems, results, strict=True):
        for name in only:
            path = Path(out) / f"{stem}-{name}.png"
            try:
                figure = PICTURES[name](result)
            except NothingToDrawError as error:
                undrawn[path.name] = str(error)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata={"Source": source_of(file), "Software": "treeattn bench plot"})
            plt.close(figure)
            written.append(path)
    return written, undrawn
