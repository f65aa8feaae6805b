"""What "auto" takes: the faster backend of each committed row, and never one that lacks what Triton has."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from treeattn import backends, capabilities
from treeattn.backends import Size, choose_backend
from treeattn.bench.inputs import LARGEST_PAGE
from treeattn.capabilities import CAPABILITIES, OPTIONS, Asked, missing
from treeattn.cuda import ready
from treeattn.cuda.build import BuildError
from treeattn.cuda.config import Variant, cuda_config
from treeattn.cuda.launch import NotLoadedError
from treeattn.geometry import Geometry

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
OURS = ("treeattn_cuda", "treeattn_triton")
KEY = (
    "kind", "batch", "q_len", "prefix", "qo_heads", "kv_heads", "head_dim", "page_size", "page_size_asked", "kv_layout",
    "dtype", "kv_dtype",
)  # fmt: skip
ARCHS = (80, 86, 89, 90, 100, 103, 120)


def measured() -> Iterator[tuple[str, dict[str, Any], dict[str, float]]]:
    """Rows of attention calls that both kernels have in one run: where, a row, and µs by backend."""
    for path in sorted(RESULTS.glob("h200-*.json")):
        found: dict[Any, dict[str, dict[str, Any]]] = {}
        for row in json.loads(path.read_text())["rows"]:
            if row["provider"] in OURS and not row["kind"].startswith("step"):
                found.setdefault(tuple(str(row.get(name)) for name in KEY), {})[row["provider"]] = row
        for both in found.values():
            if set(both) == set(OURS):
                times = {provider.removeprefix("treeattn_"): row["us"] for provider, row in both.items()}
                yield path.name, both[OURS[0]], times


ROWS = list(measured())


def taken(row: dict[str, Any]) -> str:
    options = {name: row[name] for name in ("head_dim_v", "shared_kv") if name in row}
    geometry = Geometry.of(
        row["qo_heads"], row["kv_heads"], row["head_dim"], dtype=getattr(torch, row["dtype"]),
        kv_dtype=getattr(torch, row["kv_dtype"]), **options,
    )  # fmt: skip
    room = -(-(row["prefix"] + row["q_len"]) // LARGEST_PAGE) * LARGEST_PAGE
    return choose_backend("cuda", 90, Asked(geometry), Size(row["batch"], row["q_len"], room))


def name_of(row: dict[str, Any]) -> str:
    return f"{row['kind']}-{row['batch']}-{row['q_len']}-{row['prefix']}-{row['qo_heads']}/{row['kv_heads']}"


@pytest.mark.parametrize("index", range(len(ROWS)), ids=lambda index: name_of(ROWS[index][1]))
def test_auto_takes_the_faster_kernels_of_each_committed_row(index: int) -> None:
    file, row, times = ROWS[index]
    assert times[taken(row)] <= 1.05 * min(times.values()), file


def test_the_exception_is_a_row_that_needs_it() -> None:
    """The numbers of the comment in choose_backend; where a new run has others, it has to be written anew."""
    assert len(ROWS) >= 42
    apart = [(row["batch"], row["q_len"], row["prefix"], row["qo_heads"], row["kv_heads"]) for _, row, _ in ROWS
             if taken(row) == "triton"]  # fmt: skip
    assert apart == [(1, 17, 2048, 8, 1), (1, 17, 2048, 64, 8), (1, 17, 16384, 8, 1)]
    ratios = {name_of(row): times["cuda"] / times["triton"] for _, row, times in ROWS}
    assert ratios["gqa-1-17-2048-8/1"] == pytest.approx(1.45, abs=0.005)
    assert ratios["gqa-1-17-16384-8/1"] == pytest.approx(1.06, abs=0.005)
    assert ratios["gqa-1-17-2048-64/8"] == pytest.approx(1.155, abs=0.005)
    assert ratios["gqa-1-17-16384-64/8"] == pytest.approx(0.797, abs=0.005)
    assert sorted(ratios.values())[-4] <= 1.04


LARGE = Size(64, 17, 1 << 17)
SMALL = Size(1, 17, 4096)
TABLE: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "cpu": ("torch", ("cpu", 0, (32, 8, 128), LARGE), {}),
    "another-device": ("torch", ("xpu", 0, (32, 8, 128), LARGE), {}),
    "hopper": ("cuda", ("cuda", 90, (32, 8, 128), LARGE), {}),
    "hopper-of-no-known-size": ("cuda", ("cuda", 90, (8, 1, 128), None), {}),
    "no-code": ("triton", ("cuda", 90, (32, 8, 128), LARGE), {"cuda_works": False}),
    "ampere": ("triton", ("cuda", 80, (32, 8, 128), LARGE), {}),
    "blackwell": ("triton", ("cuda", 100, (32, 8, 128), LARGE), {}),
    "head-dim-256": ("cuda", ("cuda", 90, (16, 2, 256), LARGE), {}),
    "head-dim-96": ("triton", ("cuda", 90, (32, 8, 96), LARGE), {}),
    "float32": ("triton", ("cuda", 90, (32, 8, 128), LARGE), {"dtype": torch.float32}),
    "one-item": ("triton", ("cuda", 90, (8, 1, 128), SMALL), {}),
    "one-item-with-room": ("cuda", ("cuda", 90, (8, 1, 128), SMALL._replace(room=24577)), {}),
    "two-items": ("cuda", ("cuda", 90, (16, 2, 128), SMALL._replace(room=4097)), {}),
    "two-short-items": ("triton", ("cuda", 90, (16, 2, 128), SMALL), {}),
    "two-short-items-of-128-rows": ("cuda", ("cuda", 90, (16, 2, 128), SMALL._replace(max_q_len=16)), {}),
    "nine-short-items": ("cuda", ("cuda", 90, (72, 9, 128), SMALL), {}),
    "two-requests": ("cuda", ("cuda", 90, (8, 1, 128), SMALL._replace(requests=2)), {}),
    "two-row-tiles": ("cuda", ("cuda", 90, (8, 1, 128), SMALL._replace(max_q_len=25)), {}),
    "mla": ("cuda", ("cuda", 90, (8, 1, 576), SMALL), {"head_dim_v": 512, "shared_kv": True}),
    "mla-fp8": ("cuda", ("cuda", 90, (8, 1, 576), LARGE),
                {"head_dim_v": 512, "shared_kv": True, "kv_dtype": torch.float8_e4m3fn}),
    "mla-window": ("triton", ("cuda", 90, (8, 1, 576), LARGE),
                   {"head_dim_v": 512, "shared_kv": True, "window_left": 9}),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_table(name: str) -> None:
    wanted, (device, arch, heads, size), more = TABLE[name]
    works = {key: more.pop(key) for key in ("cuda_works",) if key in (more := dict(more))}
    assert choose_backend(device, arch, Asked(Geometry.of(*heads, **more)), size, **works) == wanted


GEOMETRIES = [
    {"head_dim": dim, "dtype": dtype, "kv_dtype": kv_dtype or dtype, **more}
    for dim in (40, 64, 128, 192, 256)
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    for kv_dtype in (None, torch.float8_e4m3fn, torch.float8_e5m2)
    for more in ({}, {"head_dim_v": 32})
] + [
    {"head_dim": dims[0], "head_dim_v": dims[1], "shared_kv": True, "dtype": dtype, "kv_dtype": dtype}
    for dims in ((576, 512), (320, 256), (64, 64))
    for dtype in (torch.bfloat16, torch.float32)
]  # fmt: skip
SWITCHES: dict[str, tuple[Any, ...]] = {
    "fresh_tree": (False, True), "window_left": (-1, 7), "part": ("all", "prefix", "tree"),
    "batch_invariant": (False, True),
}  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
def test_what_triton_covers_auto_covers(arch: int) -> None:
    """Of all that is known when a step is prepared: every combination of options, with the code of csrc and without."""
    counts: dict[str, int] = {}
    for geometry, size, works in itertools.product(GEOMETRIES, (None, SMALL, LARGE), (False, True)):
        for chosen in itertools.product(*SWITCHES.values()):
            options = dict(zip(SWITCHES, chosen, strict=True))
            asked = Asked(Geometry.of(8, 1, **geometry, **options), windowed_cache=options["window_left"] >= 0)
            name = choose_backend("cuda", arch, asked, size, cuda_works=works)
            counts[name] = counts.get(name, 0) + 1
            if missing("triton", "cuda", asked) is None:
                assert missing(name, "cuda", asked) is None, asked
    assert set(counts) == ({"triton", "cuda"} if arch == 90 else {"triton"})


def test_options_that_a_step_does_not_know_are_those_of_calls() -> None:
    """A new option has to say when it is known: what a call alone knows must fall back (treeattn/fallback.py)."""
    of_steps = {"fresh_tree", "fp8_e4m3", "fp8_e5m2", "unlike_dims", "shared_kv", "window", "windowed_cache", "part",
                "batch_invariant"}  # fmt: skip
    assert set(OPTIONS) == of_steps | {"soft_cap", "sinks"}
    assert CAPABILITIES["triton"].options == set(OPTIONS)
    assert CAPABILITIES["triton"].not_together == ()


# where the choice is made


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A device of compute capability 9.0, with or without code."""
    told: dict[str, Any] = {"reason": None, "asked": 0}

    def reason(device: torch.device) -> str | None:
        told["asked"] += 1
        return told["reason"]

    monkeypatch.setattr(backends, "arch", lambda device: 90 if device.type == "cuda" else 0)
    monkeypatch.setattr(backends, "_cuda_reason", reason)
    backends._has_cuda_code.cache_clear()
    yield told
    backends._has_cuda_code.cache_clear()


GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
PLAIN = Asked(Geometry.of(32, 8, 128))


def test_resolve(hopper: dict[str, Any]) -> None:
    assert backends.resolve("auto", GPU, PLAIN) == "cuda"
    assert backends.resolve("auto", GPU, PLAIN, LARGE) == "cuda"
    assert backends.resolve("auto", GPU, Asked(Geometry.of(8, 1, 128)), SMALL) == "triton"
    assert backends.resolve("cuda", GPU, Asked(Geometry.of(8, 1, 128)), SMALL) == "cuda"
    assert backends.resolve("triton", GPU, PLAIN) == "triton"
    assert backends.resolve("auto", CPU, PLAIN) == "torch"
    wide = Asked(Geometry.of(8, 1, 320))
    with pytest.raises(NotImplementedError, match="backend 'triton' cannot do this: it covers head_dim up to 256"):
        backends.resolve("auto", GPU, wide)
    assert "backend='torch' can" in str(backends.why_not("auto", GPU, wide))
    with pytest.raises(ValueError, match="got 'nothing'"):
        backends.why_not("nothing", GPU, PLAIN)


def test_without_code_auto_is_triton_and_asks_once(hopper: dict[str, Any]) -> None:
    hopper["reason"] = "there is neither code nor a compiler"
    assert [backends.resolve("auto", GPU, PLAIN) for _ in range(3)] == ["triton"] * 3
    assert hopper["asked"] == 1
    with pytest.raises(NotImplementedError, match="there is neither code nor a compiler; backend='triton' can"):
        backends.resolve("cuda", GPU, PLAIN)


# what auto loads before the first call


class Loads:
    """In place of the loader: what it was asked for, and what it raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.error: Exception | None = None
        self.fails_at = ""
        monkeypatch.setattr(ready, "load", self)
        monkeypatch.setattr(ready, "index_of", lambda device: 3)
        monkeypatch.setattr(ready, "failed", {})

    def __call__(self, variant: Variant, index: int, macros: tuple[str, ...]) -> None:
        assert (index, macros) == (3, ())
        self.asked.append(variant.name)
        if self.error is not None and self.fails_at in variant.name:
            raise self.error

    def every(self, **options: Any) -> bool:
        geometry = Geometry.of(**{"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, **options})
        return ready.load_every(geometry, cuda_config(geometry, 17), GPU)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    monkeypatch.delenv("TREEATTN_CUDA_MACROS", raising=False)
    return Loads(monkeypatch)


def test_kernels_of_all_calls_are_loaded_at_preparation(loads: Loads) -> None:
    assert loads.every()
    assert loads.asked == ["attention_sm90_bf16_d128_c2_n64", "attention_sm90_bf16_d128_c2_n64_capped"]
    loads.asked.clear()
    assert loads.every(window_left=5)
    assert loads.asked == ["attention_sm90_bf16_d128_c2_n64_window", "attention_sm90_bf16_d128_c2_n64_capped"]
    loads.asked.clear()
    assert loads.every(num_qo_heads=8, num_kv_heads=1, head_dim=576, head_dim_v=512, shared_kv=True)
    assert loads.asked == ["mla_sm90_bf16"]
    loads.asked.clear()
    assert loads.every(num_qo_heads=64, kv_dtype=torch.float8_e4m3fn)  # calls may bring fresh rows to any step
    wide = "fp8_wide_sm90_bf16_e4m3_d128_c3_n64"
    assert loads.asked == [wide, f"{wide}_fresh", f"{wide}_capped", f"{wide}_capped_fresh"]


@pytest.mark.parametrize("fails_at", ["", "capped"])
def test_a_failure_is_told_once_and_not_tried_again(loads: Loads, fails_at: str) -> None:
    loads.error, loads.fails_at = BuildError("nvcc is broken"), fails_at
    with pytest.warns(RuntimeWarning, match="'auto' takes Triton's kernels on device 3: nvcc is broken"):
        assert not loads.every()
    loads.error, tried = None, len(loads.asked)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not loads.every()
    assert len(loads.asked) == tried


def test_a_capture_takes_triton_for_now(loads: Loads) -> None:
    loads.error = NotLoadedError("not in a capture")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not loads.every()
    loads.error = None
    assert loads.every()


def test_other_errors_are_raised(loads: Loads) -> None:
    loads.error = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        loads.every()


def test_the_readme_says_who_is_taken() -> None:
    purposes = {name: covers.purpose for name, covers in capabilities.CAPABILITIES.items()}
    assert "`auto` on Hopper" in purposes["cuda"]
    assert "`auto` on other GPUs" in purposes["triton"]
