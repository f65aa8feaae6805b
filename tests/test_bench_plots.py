"""Pictures of results: which rows and lines they show, and that the committed ones belong to the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_fakes
import pytest
from bench_rows import fake_row

from treeattn.bench.plots import NothingToDrawError, draw_against, draw_ratios, draw_rows, plot_files, source_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
PLOTS = ROOT / "docs/plots"
ENV = {"gpu": "G", "torch": "1", "triton": "2", "git_rev": "abcdefghij", "date": "2026-01-02T03:04:05Z"}


def _result(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"env": ENV, "rows": list(rows)}


def _lines(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """Points of each labelled line or error bar."""
    found = {line.get_label(): line for line in axes.lines} | {
        bars.get_label(): bars.lines[0] for bars in axes.containers
    }
    return {
        label: [(float(x), float(y)) for x, y in line.get_xydata()]
        for label, line in found.items()
        if not str(label).startswith("_")
    }


def test_latency_against_prefix() -> None:
    rows = [
        fake_row(provider, us * scale, prefix=prefix, floor_us=floor)
        for provider, scale in (("treeattn_triton", 1), ("fa3_causal", 2), ("sglang_extend", 9))
        for prefix, us, floor in ((16384, 30.0, 15.8), (2048, 10.0, 2.0), (131072, 150.0, 125.0))
    ]
    alone = fake_row("treeattn_triton", 5.0, batch=8, prefix=4096)
    ragged = [fake_row("p", 5.0, prefix=size, batch=9, prefixes=[1]) for size in (1, 2)]
    figure = draw_against(_result(*rows, alone, *ragged), "prefix", "q_len")
    (axes,) = figure.axes
    assert _lines(axes) == {
        "floor": [(2048, 2.0), (16384, 15.8), (131072, 125.0)],
        "treeattn_triton": [(2048, 10.0), (16384, 30.0), (131072, 150.0)],
        "fa3_causal": [(2048, 20.0), (16384, 60.0), (131072, 300.0)],
        "sglang_extend": [(2048, 90.0), (16384, 270.0), (131072, 1350.0)],
    }
    assert axes.get_title() == "gqa: batch 1, q_len 17, 32/8"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "floor", "treeattn_triton", "fa3_causal", "sglang_extend",
    ]  # fmt: skip
    assert figure.get_suptitle() == "G, torch 1, Triton 2, abcdefgh, 2026-01-02"


def test_shapes_have_panels_of_their_own() -> None:
    rows = [
        fake_row("p", 10.0 + q_len, q_len=q_len, qo_heads=heads, page_size_asked=page)
        for heads in (32, 64) for page in (16, 64) for q_len in (4, 17)
    ]  # fmt: skip
    figure = draw_against(_result(*rows), "q_len", "prefix")
    drawn = [axes for axes in figure.axes if axes.lines]
    assert len(drawn) == 4
    assert all(_lines(axes)["p"] == [(4, 14.0), (17, 27.0)] for axes in drawn)


def test_where_nothing_differs_in_one_field_alone_points_are_drawn() -> None:
    rows = [
        fake_row("p", 10.0, q_len=65, prefix=8192), fake_row("p", 20.0, q_len=17, batch=8),
        fake_row("p", 30.0, q_len=17, prefix=16384),
    ]  # fmt: skip
    (axes,) = draw_against(_result(*rows), "q_len", "prefix").axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["17: 1 x 16384", "17: 8 x 2048", "65: 1 x 8192"]
    assert _lines(axes)["p"] == [(0, 30.0), (1, 20.0), (2, 10.0)]
    with pytest.raises(NothingToDrawError, match="no two rows of a shape differ in q_len"):
        draw_against(_result(*rows[1:]), "q_len", "prefix")


def test_ratios_are_to_the_chain_of_the_same_shape() -> None:
    rows = [
        fake_row("treeattn_triton", 6.4), fake_row("fa3_causal", 12.8, page_size=128), fake_row("fa3_cascade", 25.6),
        fake_row("treeattn_triton", 30.0, batch=7), fake_row("fa3_causal", 10.0, batch=7),
        fake_row("sdpa", 9.0, batch=5),
    ]  # fmt: skip
    (axes,) = draw_ratios(_result(*rows)).axes
    lines = _lines(axes)
    assert lines.pop("treeattn_triton, geomean 1.22") == [(0.5, 0), (3.0, 1)]
    assert lines.pop("fa3_cascade, geomean 2.00") == [(2.0, 0)]
    assert lines == {"goal": [(6.5 / 12.8, 0)]}
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == ["gqa (1, 17, 2048, 32/8)", "gqa (7, 17, 2048, 32/8)"]
    with pytest.raises(NothingToDrawError, match="beside one of fa3_causal or flashmla_causal"):
        draw_ratios(_result(rows[0], rows[5]))


def test_all_rows_as_bars() -> None:
    step = fake_row("p", 9.0, kind="step-update", floor_us=0.0)
    (axes,) = draw_rows(_result(fake_row("p", 10.0), fake_row("r", 20.0), fake_row("p", 4.0, q_len=9), step)).axes
    bars = [container for container in axes.containers if hasattr(container, "patches")]
    heights = {one.get_label(): [bar.get_height() for bar in one] for one in bars}
    assert heights == {"p": [10.0, 4.0], "r": [20.0]}
    with pytest.raises(NothingToDrawError, match="no row with a floor"):
        draw_rows(_result(step))


def _png_source(path: Path) -> str:
    from PIL import Image

    with Image.open(path) as picture:
        return str(picture.text["Source"])  # type: ignore[attr-defined]


def test_files_are_named_and_carry_their_source(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(_result(fake_row("p", 10.0), fake_row("p", 9.0, prefix=9))))
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    written, undrawn = plot_files(files, tmp_path / "deep/plots")
    assert [path.name for path in written] == ["a-prefix.png", "a-rows.png", "b-prefix.png", "b-rows.png"]
    assert set(undrawn) == {"a-q_len.png", "a-ratio.png", "b-q_len.png", "b-ratio.png"}
    assert _png_source(written[0]) == source_of(files[0])
    assert [path.name for path in plot_files(files, tmp_path, ["prefix"])[0]] == ["a-prefix.png", "b-prefix.png"]
    files[0].write_text(files[0].read_text() + "\n")
    assert _png_source(written[0]) != source_of(files[0])
    with pytest.raises(ValueError, match="two results would be drawn under one name: a"):
        plot_files([files[0], tmp_path / "other/a.json"], tmp_path)
    with (
        bench_fakes.modules({"matplotlib": None}),
        pytest.raises(NotImplementedError, match=r"pip install 'treeattn\[bench\]'"),
    ):
        plot_files(files, tmp_path)


def test_committed_plots_are_those_of_the_committed_results() -> None:
    """After a new result: `make plots`."""
    shown = (ROOT / "docs/performance.md").read_text()
    pictures = sorted(PLOTS.glob("*.png"))
    assert pictures
    for picture in pictures:
        stem = picture.stem.rsplit("-", 1)[0]
        assert _png_source(picture) == source_of(RESULTS / f"{stem}.json"), picture.name
        assert f"(plots/{picture.name})" in shown, picture.name
    assert {"h200-gqa-prefix.png", "h200-gqa-q_len.png", "h200-gqa-ratio.png"} <= {path.name for path in pictures}
