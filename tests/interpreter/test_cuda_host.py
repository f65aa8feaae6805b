"""The CUDA kernels on the host, thread by thread (tests/cuda_host), with Triton's plan and merge in the interpreter.

What this cannot show: registers, most races, and what the PTX of `csrc/ptx.cuh` does on a chip.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import itertools
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from option_bodies import (
    general_masks_take_the_callers_positions,
    merged_parts_are_the_whole,
    rows_do_not_depend_on_the_batch,
)
from property_bodies import inf_and_nan_of_v_come_through, unseen_keys_change_nothing
from settings_of_tests import Setting

import treeattn
from treeattn import backends
from treeattn.backends import choose_backend
from treeattn.buffers import tensors_of
from treeattn.capabilities import CAPABILITIES, Asked, missing
from treeattn.cuda.build import Fp8Shape, Fp8WideShape, MlaFp8Shape, MlaMergeShape, kernels_in, source_dir
from treeattn.cuda.config import MERGE_BLOCKS, cuda_config, merge_of, variant_of
from treeattn.cuda.launch import CacheMaps, fill, params_of, scale_at
from treeattn.driver import UINT8
from treeattn.fallback import FallbackLaunch, triton_twin
from treeattn.geometry import Geometry
from treeattn.kernels import launch as launching
from treeattn.kernels.plan import WORK_LANE, WORK_LEFT, WORK_ROW_TILES
from treeattn.kv import cache_strides
from treeattn.plan import Step, tags_parts
from treeattn.testing import Case, Options, Placement, build_case, check_case, draw_tree, judge, random_case
from treeattn.testing.run import StaticRun, asked_of, call_of, group_of, previous_of

GXX = shutil.which("g++")
HOST = Path(__file__).resolve().parent.parent / "cuda_host"
SCHEDULES = itertools.count(1)
"""Who runs when: another order in each call."""
pytestmark = pytest.mark.skipif(GXX is None, reason="no host compiler")
DIMS = (64, 128, 256, 128)
"""Head dims of cases by their seeds."""

BUILDS = ["", "-DTREEATTN_CANARY=1"]
CALLED = "Fp16"
"""The type of all cases here; of the other one there are only those for FP8 caches, which takes half as long."""


def built(folder: Path, macro: str) -> Path:
    """The kernels as a library of the host, built once for all workers that share `folder`."""
    made = folder / f"kernels{macro}.so"
    with open(folder / "cuda_host.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            sources = folder / f"cuda_host{macro}"
            sources.mkdir()
            for path in (*source_dir().iterdir(), *HOST.iterdir()):
                shutil.copy(path, sources)
            names = [name for source in source_dir().glob("*.cu") for name, shape in kernels_in(source.name).items()
                     if shape.dtype == CALLED or isinstance(shape, Fp8Shape | Fp8WideShape | MlaFp8Shape | MlaMergeShape)]  # fmt: skip
            listed = " ".join(f"TREEATTN_NAMED({name})" for name in names)
            subprocess.run(
                [str(GXX), "-std=c++17", "-O1", "-shared", "-fPIC", "-w", f"-DTREEATTN_KERNELS={listed}",
                 *filter(None, [macro]), "-o", str(made), str(sources / "kernels.cpp")], check=True,
            )  # fmt: skip
    return made


@pytest.fixture(scope="module", params=BUILDS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    loaded = ctypes.CDLL(str(built(shared, request.param)))
    loaded.run_kernel.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    loaded.run_kernel.restype = ctypes.c_bool
    return loaded


def host_map(
    to: Any, dtype: int, address: int, shape: Sequence[int], byte_strides: Sequence[int], box: Sequence[int]
) -> None:
    """In place of the driver's encoding, with what it asks for: what `copy_tensor` of tests/cuda_host/ptx.cuh reads."""
    rank, size = len(shape), 1 if dtype == UINT8 else 2
    assert len(byte_strides) == rank - 1
    assert len(box) == rank <= 5
    assert address % 16 == 0
    assert all(0 < stride < 2**40 and stride % 16 == 0 for stride in byte_strides)
    assert all(0 < count <= 256 for count in box)
    assert all(0 < extent <= 2**32 for extent in shape)
    assert box[0] * size <= 128
    missing_axes = 5 - rank
    parts = (address,), shape, [1] * missing_axes, byte_strides, [16] * missing_axes, box, [1] * missing_axes
    to.words[:] = [*itertools.chain(*parts), 256 * rank + size]


class HostAttention:
    """In place of the launch of Triton's attention kernel."""

    def __init__(self, library: Any, step: Step, *tensors: Any) -> None:
        self.library, self.step, self.maps = library, step, CacheMaps(step, tensors[-2])
        self.params = params_of(step, *tensors)
        self.sinks = tensors[-3].sinks is not None
        self.params.page_rows = self.maps.rows

    def __call__(self, q: Any, k: Any, v: Any, k_tree: Any, v_tree: Any, out: Any, lse: Any, scale: float,
                 cap: float, sinks: Any, k_scale: Any, v_scale: Any) -> None:  # fmt: skip
        config = self.step.config
        assert config is not None
        # Triton's launch has q in place of fresh rows that there are not, and out in place of lse and sinks
        k_tree, v_tree = (None if tensor is q else tensor for tensor in (k_tree, v_tree))
        lse = None if lse is out else lse
        sinks = sinks if self.sinks else None
        at = [0 if tensor is None else tensor.data_ptr() for tensor in (q, k, v, k_tree, v_tree, out, lse, sinks)]
        maps = self.maps.of(at[1], at[2], k.shape[0])
        fill(memoryview(self.params).cast("B"), maps, *at, scale, cap, scale_at(k_scale), scale_at(v_scale))
        grids = [(variant_of(self.step, config, cap > 0, k_tree is not None), 1, 32 * config.num_warps)]
        merge = merge_of(self.step)
        if merge is not None:
            grids.append((merge, MERGE_BLOCKS, MlaMergeShape.threads))
        for kernel, blocks, threads in grids:
            address, schedule = ctypes.addressof(self.params), next(SCHEDULES)
            blocks *= self.step.num_programs
            done = self.library.run_kernel(kernel.name.encode(), address, blocks, threads, schedule)
            assert done, f"a standstill of {kernel.name} (schedule {schedule})"

    first = __call__


def host_launch(library: Any) -> type[launching.LayerLaunch]:
    """A launch of the CUDA kernels on the host, with what Triton's kernels do of it."""

    class HostLayerLaunch(launching.LayerLaunch):
        def __init__(self, step: Step, q: Any, k_tree: Any, v_tree: Any, out: Any, lse: Any, scoring: Any,
                     **rest: Any) -> None:  # fmt: skip
            super().__init__(step, q, k_tree, v_tree, out, lse, scoring, **rest)
            self.finish.arguments["FRAGMENTS"] = True
            self.attention: Any = HostAttention(
                library, step, q, k_tree, v_tree, out, lse, scoring, rest["cache_strides"], rest["zero_tail"]
            )
            if tags_parts("cuda", step):
                self.finish.first = lambda *leading: None  # the attention kernel merges

    return HostLayerLaunch


@pytest.fixture
def on_host(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The triton backend, on the CPU, takes the tiles and the attention kernel of the cuda backend."""
    monkeypatch.setattr(launching, "LayerLaunch", host_launch(library))
    monkeypatch.setattr(launching, "is_aligned", lambda step: not step.batch_invariant)
    monkeypatch.setattr("treeattn.cuda.launch.encode_tensor_map", host_map)
    planning = sys.modules["treeattn.plan"]
    monkeypatch.setattr(planning, "group_config", lambda arch, geometry, width: cuda_config(geometry, width))
    monkeypatch.setattr(planning, "tags_parts", lambda backend, geometry: tags_parts("cuda", geometry))
    monkeypatch.setattr("treeattn.buffers.tags_parts", lambda backend, geometry: tags_parts("cuda", geometry))


@pytest.fixture
def auto_on_host(library: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The CPU is a Hopper GPU to "auto": it runs the CUDA kernels on the host, or Triton's in the interpreter.

    Returns which kernels ran: "cuda", "fallback" for a call of a CUDA step by Triton's, or "triton".
    """
    ran: list[str] = []
    planning = sys.modules["treeattn.plan"]

    def noted(name: str, made: type[Any]) -> type[Any]:
        class Noted(made):  # type: ignore[misc, valid-type]
            def __call__(self, *tensors: Any) -> None:
                ran.append(name)
                super().__call__(*tensors)

        return Noted

    def chosen(backend: str, device: torch.device, asked: Asked, size: backends.Size | None = None) -> str:
        return choose_backend("cuda", 90, asked, size) if backend == "auto" else backend

    covers = CAPABILITIES["cuda"]
    monkeypatch.setitem(CAPABILITIES, "cuda", dataclasses.replace(covers, devices={**covers.devices, "cpu": "a CPU"}))
    monkeypatch.setattr(backends, "chosen", chosen)
    monkeypatch.setattr("treeattn.cuda.ready.load_every", lambda *of: True)
    monkeypatch.setattr("treeattn.cuda.launch.prepare", lambda step: None)
    monkeypatch.setattr("treeattn.cuda.launch.encode_tensor_map", host_map)
    monkeypatch.setattr("treeattn.cuda.launch.CudaLayerLaunch", noted("cuda", host_launch(library)))
    monkeypatch.setattr("treeattn.fallback.FallbackLaunch", noted("fallback", FallbackLaunch))
    triton = noted("triton", launching.LayerLaunch)
    monkeypatch.setattr(launching, "LayerLaunch", triton)
    assert planning.backends is backends
    return ran


def shaped(q_lens: list[int], prefixes: list[int], heads: tuple[int, int], head_dim: int = 64,
           nodes: list[int] | None = None, options: Options | None = None, dtype: torch.dtype = torch.float16,
           **place: Any) -> Case:  # fmt: skip
    rng = random.Random(sum(q_lens) + sum(prefixes))
    trees = [draw_tree("recent", count, rng) for count in nodes or q_lens]
    return build_case(trees, prefixes, q_lens=q_lens, heads=heads, head_dim=head_dim, dtype=dtype,
                      placement=Placement(**place), options=options, seed=1)  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "lone-root": {"q_lens": [1], "prefixes": [0], "heads": (1, 1)},
    "c1-one-full-tile": {"q_lens": [8], "prefixes": [64], "heads": (8, 1), "head_dim": 128, "page_size": 64},
    "c1": {"q_lens": [8], "prefixes": [320], "heads": (8, 1), "head_dim": 128, "page_size": 64},
    "c2": {"q_lens": [17], "prefixes": [333], "heads": (4, 1), "head_dim": 128, "page_size": 16, "table": "block"},
    "c3-hnd": {"q_lens": [17], "prefixes": [200], "heads": (8, 1), "head_dim": 128, "page_size": 128,
               "kv_layout": "HND"},
    "slots": {"q_lens": [17, 17], "prefixes": [130, 1], "heads": (8, 2), "tree_kv": "slots", "page_size": 48},
    "fresh": {"q_lens": [17], "prefixes": [100], "heads": (8, 1), "tree_kv": "fresh"},
    "ragged": {"q_lens": [1, 8, 40, 3], "prefixes": [0, 63, 150, 5], "heads": (8, 1), "page_size": 16,
               "table": "block"},
    "boxes-of-8": {"q_lens": [17], "prefixes": [413], "heads": (4, 2), "page_size": 8, "table": "block"},
    "rows": {"q_lens": [9], "prefixes": [333], "heads": (8, 1), "head_dim": 128, "page_size": 12},
    "many-short": {"q_lens": [3] * 16, "prefixes": [5, 10, 0, 20, 200, 3, 7, 130, 1, 2, 0, 70, 9, 8, 7, 140],
                   "heads": (4, 2), "head_dim": 128, "page_size": 16, "table": "block"},
    "more-edge-tiles-than-stages": {"q_lens": [400, 3], "prefixes": [75, 130], "heads": (2, 2), "head_dim": 128,
                                    "page_size": 16},
    "padded": {"q_lens": [17, 17, 17], "prefixes": [65, 0, 300], "heads": (4, 1), "nodes": [17, 1, 9],
               "page_size": 64},
    "d256-lone-root": {"q_lens": [1], "prefixes": [0], "heads": (1, 1), "head_dim": 256},
    "d256-c1": {"q_lens": [8, 3], "prefixes": [420, 64], "heads": (8, 1), "head_dim": 256, "page_size": 64},
    "d256-c2": {"q_lens": [17], "prefixes": [333], "heads": (4, 1), "head_dim": 256, "page_size": 8, "table": "block"},
    "d256-two-row-tiles": {"q_lens": [17], "prefixes": [200], "heads": (8, 1), "head_dim": 256, "page_size": 128,
                           "kv_layout": "HND"},
    "d256-rows": {"q_lens": [9], "prefixes": [333], "heads": (8, 1), "head_dim": 256, "page_size": 1},
    "d256-slots": {"q_lens": [17, 17], "prefixes": [130, 1], "heads": (4, 1), "head_dim": 256, "tree_kv": "slots",
                   "page_size": 48},
    "d256-more-edge-tiles-than-stages": {"q_lens": [300, 3], "prefixes": [75, 130], "heads": (1, 1), "head_dim": 256,
                                         "page_size": 16},
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("on_host")
def test_shapes(name: str) -> None:
    case = shaped(**SHAPES[name])
    verdict = check_case(case, "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("turn", range(4))
@pytest.mark.usefixtures("on_host")
def test_who_is_ahead_does_not_matter(turn: int, head_dim: int) -> None:
    """Short requests, whose items the producer's first warp passes without a box, and one behind them that has some."""
    prefixes = [200 if request % 7 == 6 else request for request in range(49)]
    # of head dim 256, a block of one consumer and one of two, whose ring has two stages
    q_len, count = (3, 49) if head_dim == 128 else ((3, 28), (35, 14))[turn % 2]
    case = shaped([q_len] * count, prefixes[-count:], (2, 1), head_dim=head_dim, page_size=16)
    verdict = check_case(case, "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Blocks enough for lanes of several classes; which there were, by a request's row tiles and its own."""
    found: set[tuple[int, int]] = set()
    make = launching.launch_plan

    def noted(step: Step) -> None:
        make(step)
        assert step.buffers is not None
        for work in step.buffers.work[step.buffers.work[:, WORK_LEFT.value] > 0].tolist():
            found.add((work[WORK_ROW_TILES.value], work[WORK_LANE.value]))

    monkeypatch.setattr(backends, "INTERPRETER_PROGRAMS", 15)
    monkeypatch.setattr(launching, "busy_of", lambda step: 8)
    monkeypatch.setattr(launching, "launch_plan", noted)
    return found


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("options", [Options(), Options(window_left=90, sinks=True)], ids=["plain", "window"])
@pytest.mark.usefixtures("on_host")
def test_lanes_of_unlike_requests(
    options: Options, aligned: bool, lanes: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row tiles of 192: 2, 1, 2, 1 and 1 of them; one request has no nodes."""
    monkeypatch.setattr(launching, "is_aligned", lambda step: aligned)
    case = shaped([40, 3, 33, 5, 24, 9], [300, 200, 5, 64, 450, 130], (8, 1), nodes=[40, 3, 33, 0, 24, 9],
                  page_size=16, options=options)  # fmt: skip
    verdict = check_case(case, "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"
    assert lanes == {(2, 0), (2, 1), (1, 0)}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.usefixtures("on_host")
def test_random_cases(seed: int) -> None:
    case = random_case(seed, dtype=torch.float16, head_dim=DIMS[seed % 4], batch=1 + seed % 3,
                       max_prefix=130, max_width=(8, 17, 33)[seed % 3], num_kv_heads=1, cache="paged")  # fmt: skip
    verdict = check_case(case, "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


CANARY_ONLY = pytest.mark.parametrize("library", BUILDS[1:], indirect=True)
"""The build that shows more, where both would take a minute."""
# page size, cache, layout, KV heads, head dim, and slots of a tensor copy's box: 0 where rows are copied by threads
PAGES = [
    (1, "paged", "NHD", 2, 128, 0),
    (2, "interleaved", "HND", 1, 256, 0),
    (5, "strided", "NHD", 1, 128, 0),
    (8, "paged", "NHD", 2, 128, 8),
    (8, "unlike", "HND", 1, 256, 8),
    (16, "interleaved", "NHD", 2, 128, 16),
    (16, "strided", "NHD", 1, 128, 16),  # a page stride that is no multiple of 8 slots
    (16, "strided", "HND", 1, 256, 16),
    (16, "strided", "NHD", 2, 128, 0),  # KV heads 272 bytes apart
    (16, "unlike", "NHD", 2, 64, 0),  # of V alone
    (24, "paged", "HND", 2, 256, 8),
    (24, "packed", "NHD", 2, 64, 8),
    (32, "strided", "HND", 2, 128, 0),
    (48, "flat", "NHD", 2, 128, 16),
    (48, "packed", "HND", 2, 128, 16),
    (64, "paged", "HND", 2, 256, 64),
    (64, "interleaved", "HND", 2, 128, 64),
    (128, "paged", "NHD", 2, 256, 64),
    (128, "interleaved", "HND", 2, 64, 64),
]


def box_rows_of(case: Case) -> int:
    """Slots of a box of a case's caches; 0 where threads copy rows."""
    place = case.placement
    k, v = (cache_strides(cache, place.page_size, place.kv_layout) for cache in (case.k_cache, case.v_cache))
    return CacheMaps(treeattn.plan(case.layout(), case.kv(), **group_of(case)), (*k, *v)).rows


@CANARY_ONLY
@pytest.mark.parametrize("tree_kv", ["logical", "slots"])
@pytest.mark.parametrize(("page_size", "cache", "kv_layout", "kv_heads", "head_dim", "rows"), PAGES)
@pytest.mark.usefixtures("on_host")
def test_pages(
    page_size: int, cache: str, kv_layout: str, kv_heads: int, head_dim: int, rows: int, tree_kv: str
) -> None:
    place = {"page_size": page_size, "cache": cache, "kv_layout": kv_layout, "tree_kv": tree_kv}
    turn = page_size + kv_heads + (tree_kv == "slots")
    index = {"index_dtype": (torch.int32, torch.int64)[turn % 2], "table": ("csr", "block")[turn // 2 % 2]}
    options = Options(window_left=(-1, 150)[(turn + 1) // 2 % 2])
    case = shaped([17, 3], [333, 150], (4 * kv_heads, kv_heads), head_dim, options=options, **place, **index)
    assert box_rows_of(case) == rows
    verdict = check_case(case, "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@CANARY_ONLY
@settings(max_examples=20)
@given(seed=st.integers(0, 2**16), page_size=st.sampled_from([8, 16, 24, 48, 64, 128]),
       head_dim=st.sampled_from([64, 128, 256]), tree_kv=st.sampled_from(["logical", "slots", "fresh"]))  # fmt: skip
@pytest.mark.usefixtures("on_host")
def test_caches_that_tensor_maps_can_hold(seed: int, page_size: int, head_dim: int, tree_kv: str) -> None:
    cache = ("paged", "flat", "interleaved", "packed", "strided", "unlike")[seed % 6]
    kv_heads = 1 if cache in ("strided", "unlike") else 2
    case = random_case(seed, dtype=torch.float16, head_dim=head_dim, batch=2, uniform=True, max_prefix=300, max_width=9,
                       group=4, num_kv_heads=kv_heads, cache=cache, page_size=page_size, tree_kv=tree_kv)  # fmt: skip
    assert box_rows_of(case) == math.gcd(page_size, 64)
    verdict = check_case(case, "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


OPTION_SHAPES: dict[str, dict[str, Any]] = {
    "c1": {"q_lens": [8, 3], "prefixes": [200, 70], "heads": (8, 1), "page_size": 16, "nodes": [7, 3]},
    "c2": {"q_lens": [17, 5], "prefixes": [333, 64], "heads": (4, 1), "head_dim": 128, "page_size": 64,
           "table": "block"},
    "c2-chunks": {"q_lens": [70], "prefixes": [130], "heads": (2, 2), "page_size": 12},
    "c3": {"q_lens": [17, 17], "prefixes": [300, 0], "heads": (16, 2), "head_dim": 128, "tree_kv": "slots",
           "page_size": 48},
    "c3-fresh": {"q_lens": [17], "prefixes": [200], "heads": (8, 1), "tree_kv": "fresh", "page_size": 16},
    "d256": {"q_lens": [17, 3], "prefixes": [200, 70], "heads": (4, 1), "head_dim": 256, "page_size": 16,
             "nodes": [16, 3]},
    "d256-fresh": {"q_lens": [5], "prefixes": [200], "heads": (4, 1), "head_dim": 256, "tree_kv": "fresh",
                   "page_size": 12},
}  # fmt: skip
OPTIONS: dict[str, Options] = {
    "sinks": Options(sinks=True),
    "sinks-in-lse": Options(sinks=True, sinks_in_lse=True),
    "prefix": Options(part="prefix"),
    "tree": Options(part="tree", sinks=True),
    **{f"window-{left}": Options(window_left=left) for left in (0, 3, 90)},
    "windowed-cache": Options(window_left=70, windowed=True),
    "prefix-window": Options(window_left=40, part="prefix"),
    "tree-window": Options(window_left=1, part="tree"),
    "cap": Options(logits_soft_cap=3.0),
    "cap-window-sinks": Options(logits_soft_cap=5.0, window_left=33, sinks=True),
    "invariant": Options(batch_invariant=True, sinks=True),
    "invariant-window": Options(batch_invariant=True, window_left=50),
}


OPTION_CASES = [
    (name, shape) for name in OPTIONS for shape in OPTION_SHAPES
    if shape in ("c1", "c2", "c3", "d256") or "window" in name
]


@CANARY_ONLY
@pytest.mark.parametrize(("name", "shape"), OPTION_CASES)
@pytest.mark.usefixtures("on_host")
def test_options(name: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treeattn.config.INVARIANT_KEYS", 130)
    case = shaped(**OPTION_SHAPES[shape], options=OPTIONS[name])
    path = ("plain", "static")[(list(OPTIONS).index(name) + list(OPTION_SHAPES).index(shape)) % 2]
    verdict = check_case(case, "triton", path)
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@CANARY_ONLY
@pytest.mark.parametrize("shape", ["c1", "c2", "c3", "d256"])
@pytest.mark.usefixtures("on_host")
def test_parts_of_other_launches_are_not_taken(shape: str) -> None:
    """A call that finds what earlier ones have left, planned anew or not, is bit for bit the first of its step."""
    case = shaped(**OPTION_SHAPES[shape])

    def planned() -> Step:
        return treeattn.plan(case.layout(), case.kv(), **group_of(case), backend="triton")

    def called(step: Step, turn: int) -> torch.Tensor:
        q = case.q.roll(turn, -1)
        return treeattn.tree_attention(q, case.k_cache, case.v_cache, step, **call_of(case)).clone()

    step = planned()
    assert step.buffers is not None
    for turn in range(4):
        if turn == 2:
            launching.launch_plan(step)
        assert torch.equal(called(step, turn), called(planned(), turn))
        words, launches = step.buffers.arrivals[:, :-1], step.buffers.arrivals[:, -1]
        assert not words.any()
        assert (launches == turn + 1).all()


@CANARY_ONLY
@pytest.mark.parametrize("shape", ["c3", "d256"])
@pytest.mark.usefixtures("on_host")
def test_negative_scales(shape: str) -> None:
    """Q that products take from shared memory changes its sign there."""
    case = shaped(**OPTION_SHAPES[shape])
    verdict = check_case(dataclasses.replace(case, sm_scale=-0.11), "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


class HostSetting(Setting):
    """Cases that the kernels cover and the host can afford."""

    def case(self, seed: int, dtype: torch.dtype, **pins: Any) -> Case:
        own = {"head_dim": DIMS[seed % 4], "num_kv_heads": 1, "cache": "paged", "max_width": (8, 17)[seed % 2],
               "max_prefix": 130, "batch": 2}  # fmt: skip
        return super().case(seed, dtype, **{**own, **pins})


SETTING = HostSetting("triton", torch.device("cpu"), (torch.float16,), small=True)


@CANARY_ONLY
@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.usefixtures("on_host")
def test_parts_merge(seed: int) -> None:
    merged_parts_are_the_whole(SETTING, seed)


@CANARY_ONLY
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.usefixtures("on_host")
def test_general_masks_with_windows(seed: int) -> None:
    general_masks_take_the_callers_positions(SETTING, seed)


@CANARY_ONLY
@pytest.mark.parametrize("options", [Options(), Options(window_left=20, sinks=True)], ids=["plain", "window"])
@pytest.mark.usefixtures("on_host")
def test_batch_invariance(options: Options) -> None:
    rows_do_not_depend_on_the_batch(SETTING, 1, options)


@CANARY_ONLY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("on_host")
def test_sinks_of_any_type(dtype: torch.dtype) -> None:
    case = shaped(**OPTION_SHAPES["c1"], options=Options(sinks=True))
    assert case.sinks is not None
    given = dataclasses.replace(case, sinks=case.sinks.to(dtype))
    verdict = check_case(given, "triton")
    assert verdict.ok, verdict.message


def latent(q_lens: list[int], prefixes: list[int], heads: int, options: Options | None = None, **shape: Any) -> Case:
    """A case of MLA."""
    options = dataclasses.replace(options or Options(), shared_kv=True, head_dim_v=512)
    return shaped(q_lens, prefixes, (heads, 1), 576, options=options, **shape)


@pytest.fixture
def on_host_wide(on_host: None, on_host_wide_merge: None) -> None:
    """As `on_host`, with the merge of the other fixture."""


@pytest.fixture
def on_host_wide_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and wide programs for the merge, of which each costs Triton's interpreter time."""
    monkeypatch.setattr(launching, "FEW_MERGES", 0)
    monkeypatch.setattr(launching, "MERGE_DIMS", 512)
    monkeypatch.setattr(launching, "INVARIANT_ROWS", 16)
    monkeypatch.setattr(launching, "busy_of", lambda step: 12)


MLA_SHAPES: dict[str, dict[str, Any]] = {
    "lone-root": {"q_lens": [1], "prefixes": [0], "heads": 8, "page_size": 64},
    "one-full-tile": {"q_lens": [8], "prefixes": [64], "heads": 8, "page_size": 64},
    "tiles": {"q_lens": [8], "prefixes": [1000], "heads": 8, "page_size": 64},
    "three-row-tiles": {"q_lens": [17], "prefixes": [333], "heads": 8, "page_size": 16, "table": "block"},
    "16-heads": {"q_lens": [9], "prefixes": [200], "heads": 16, "page_size": 64},
    "64-heads": {"q_lens": [3], "prefixes": [130], "heads": 64, "page_size": 128, "kv_layout": "HND"},
    "rows": {"q_lens": [5, 2], "prefixes": [333, 64], "heads": 8, "page_size": 1},
    "rows-of-12": {"q_lens": [5], "prefixes": [200], "heads": 8, "page_size": 12, "table": "block"},
    "slots": {"q_lens": [17, 3], "prefixes": [130, 1], "heads": 8, "tree_kv": "slots", "page_size": 48},
    "fresh": {"q_lens": [17], "prefixes": [100], "heads": 8, "tree_kv": "fresh", "page_size": 64},
    "ragged": {"q_lens": [1, 8, 20, 3], "prefixes": [0, 63, 150, 5], "heads": 8, "page_size": 16, "table": "block"},
    "many-short": {"q_lens": [3] * 12, "prefixes": [5, 10, 0, 20, 200, 3, 7, 130, 1, 2, 0, 70], "heads": 8,
                   "page_size": 16, "table": "block"},
    "more-edge-tiles-than-places": {"q_lens": [150, 3], "prefixes": [75, 130], "heads": 1, "page_size": 16},
    "padded": {"q_lens": [17, 17, 17], "prefixes": [65, 0, 300], "heads": 8, "nodes": [17, 1, 9], "page_size": 64},
}  # fmt: skip


@pytest.mark.parametrize("name", MLA_SHAPES)
@pytest.mark.usefixtures("on_host_wide")
def test_mla_shapes(name: str) -> None:
    case = latent(**MLA_SHAPES[name])
    verdict = check_case(case, "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.usefixtures("on_host_wide")
def test_mla_whoever_is_ahead(turn: int) -> None:
    """Items of all lengths, so that each part of a tile comes to each place of the rings, in each kind of copy."""
    prefixes = [(0, 64, 5, 130, 33, 32, 200)[request * request % 7] for request in range(80 + turn)]
    case = latent([3] * len(prefixes), prefixes, 2, page_size=(16, 64, 1, 8)[turn])
    verdict = check_case(case, "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


MLA_OPTIONS = {name: OPTIONS[name] for name in ("sinks", "sinks-in-lse", "prefix", "tree", "invariant")}
MLA_OPTION_SHAPES = ("rows", "three-row-tiles", "slots", "fresh", "ragged", "padded")


@CANARY_ONLY
@pytest.mark.parametrize("name", MLA_OPTIONS)
@pytest.mark.usefixtures("on_host_wide")
def test_mla_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treeattn.config.INVARIANT_KEYS", 130)
    for index, shape in enumerate(MLA_OPTION_SHAPES, list(MLA_OPTIONS).index(name)):
        case = latent(**MLA_SHAPES[shape], options=MLA_OPTIONS[name])
        verdict = check_case(case, "triton", ("plain", "static")[index % 2])
        assert verdict.ok, f"{shape}: {verdict.message}\n{case.describe()}"


@CANARY_ONLY
@pytest.mark.parametrize("sm_scale", [-0.11, 0.0, 3.0])
@pytest.mark.usefixtures("on_host_wide")
def test_mla_scales(sm_scale: float) -> None:
    """With 3, rows jump from key to key: bases move in most tiles."""
    case = latent([9], [400], 8, page_size=64)
    verdict = check_case(dataclasses.replace(case, sm_scale=sm_scale), "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@CANARY_ONLY
@pytest.mark.parametrize("source", ["parents", "general"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("on_host_wide")
def test_mla_random_cases(seed: int, source: str) -> None:
    case = random_case(seed, dtype=torch.float16, head_dim=576, batch=1 + seed % 3, max_prefix=200, source=source,
                       max_width=(8, 17)[seed % 2], num_kv_heads=1, cache="paged",
                       options=Options(shared_kv=True, head_dim_v=512))  # fmt: skip
    verdict = check_case(case, "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


class LatentSetting(Setting):
    """Cases of MLA that the host can afford."""

    def case(self, seed: int, dtype: torch.dtype, **pins: Any) -> Case:
        own = {"head_dim": 576, "num_kv_heads": 1, "group": 8, "cache": "paged", "max_width": 17, "max_prefix": 130,
               "batch": 2, "options": Options(shared_kv=True, head_dim_v=512)}  # fmt: skip
        return super().case(seed, dtype, **{**own, **pins})


@CANARY_ONLY
@pytest.mark.parametrize("seed", [0, 1, 2, 4, 6])
@pytest.mark.usefixtures("on_host_wide")
def test_mla_unseen_rows_change_nothing(seed: int) -> None:
    setting = LatentSetting("triton", torch.device("cpu"), (torch.float16,), small=True)
    unseen_keys_change_nothing(setting, {"seed": seed})


# "auto", on a GPU that has the CUDA kernels: everything that Triton's kernels do works

FP8 = torch.float8_e4m3fn
AUTO_OPTIONS: dict[str, Options] = {
    "none": Options(),
    **{name: OPTIONS[name] for name in OPTIONS if name not in ("window-0", "window-3", "prefix-window", "tree-window")},
    "fp8": Options(kv_dtype=FP8, scales="heads"),
    "fp8-cap-sinks": Options(kv_dtype=FP8, scales="tensor", logits_soft_cap=4.0, sinks=True),
    "unlike-dims": Options(head_dim_v=32, logits_soft_cap=4.0),
}
AUTO_MLA: dict[str, Options] = {
    name: dataclasses.replace(options, shared_kv=True, head_dim_v=512)
    for name, options in {
        "none": Options(), "cap": Options(logits_soft_cap=3.0), "sinks": Options(sinks=True),
        "tree": Options(part="tree"), "cap-sinks": Options(logits_soft_cap=3.0, sinks=True, sinks_in_lse=True),
        "window": Options(window_left=9), "cap-invariant": Options(logits_soft_cap=3.0, batch_invariant=True),
        "fp8": Options(kv_dtype=FP8),
    }.items()
}  # fmt: skip


@CANARY_ONLY
@pytest.mark.parametrize("name", AUTO_OPTIONS)
def test_auto_does_what_triton_does(name: str, auto_on_host: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows at odd addresses too; each option with each way to prepare a step."""
    monkeypatch.setattr("treeattn.config.INVARIANT_KEYS", 130)
    ran: set[str] = set()
    covered = False  # as far as geometries tell: FP8 caches and unlike dims, in the end
    for seed, path in itertools.product(range(2), ("plain", "static")):
        dim = (64, 40)[seed]
        cache = ("paged", "strided", "packed")[(seed + (path == "static")) % 3]
        case = random_case(seed, dtype=torch.float16, head_dim=dim, batch=2, max_prefix=70, max_width=9,
                           num_kv_heads=2, cache=cache, options=AUTO_OPTIONS[name])  # fmt: skip
        verdict = check_case(case, "auto", path)
        assert verdict.ok, f"{path}: {verdict.message}\n{case.describe()}"
        ran |= set(auto_on_host)
        covered |= missing("cuda", "cuda", Asked(Geometry.of(**group_of(case)))) is None
    assert "triton" in ran
    assert ("cuda" in ran) == covered


@CANARY_ONLY
@pytest.mark.parametrize("name", AUTO_MLA)
def test_auto_does_what_triton_does_of_mla(name: str, auto_on_host: list[str], on_host_wide_merge: None) -> None:
    case = latent([5, 3], [100, 40], 8, options=AUTO_MLA[name], page_size=16)
    # a soft cap is known at the call, a window at the plan
    at_plan = missing("cuda", "cuda", Asked(Geometry.of(**group_of(case))))
    wanted = "triton" if at_plan else "fallback" if missing("cuda", "cuda", asked_of(case)) else "cuda"
    assert wanted == {"cap": "fallback", "window": "triton"}.get(name.partition("-")[0], "cuda")
    for path in ("plain", "static"):
        auto_on_host.clear()
        verdict = check_case(case, "auto", path)
        assert verdict.ok, f"{path}: {verdict.message}\n{case.describe()}"
        assert set(auto_on_host) == {wanted}


@CANARY_ONLY
def test_a_call_that_falls_back_between_others(auto_on_host: list[str]) -> None:
    """One group of static buffers, and calls with q at an odd address between those without."""
    case = shaped(**OPTION_SHAPES["c1"])
    before = previous_of(case, 5)
    static = StaticRun.for_cases([case, before], "auto")
    odd = torch.empty(static.q.numel() + 1, dtype=static.q.dtype)[1:].view_as(static.q)
    even, took = static.q, static.bufs.allocated_bytes
    results = []
    for static.q in (even, odd, even, odd):
        if len(results) == 2:
            static.update_(before)
        results.append(static.run(case))
        assert judge(case, results[-1].out, results[-1].lse).ok
    assert auto_on_host == ["cuda", "fallback"] * 2
    assert torch.equal(results[0].out, results[2].out)
    assert torch.equal(results[1].out, results[3].out)
    assert not torch.equal(results[0].out, results[1].out)  # other kernels, other sums
    twin = triton_twin(static.step)
    assert twin.buffers is not None
    assert static.bufs.allocated_bytes == took + sum(tensor.nbytes for tensor in tensors_of(twin.buffers).values())


@CANARY_ONLY
def test_a_backend_that_was_named_does_not_fall_back(auto_on_host: list[str]) -> None:
    case = latent([5], [100], 8, options=Options(logits_soft_cap=3.0), page_size=16)
    step = dataclasses.replace(treeattn.plan(case.layout(), case.kv(), **group_of(case)), auto=False)
    with pytest.raises(NotImplementedError, match=r"logits_soft_cap 3.0 apart only; backend='triton' can"):
        treeattn.tree_attention(case.q, case.k_cache, None, step, **call_of(case))
    case = shaped(**OPTION_SHAPES["c1"])
    step = dataclasses.replace(treeattn.plan(case.layout(), case.kv(), **group_of(case)), auto=False)
    odd = torch.empty(case.q.numel() + 1, dtype=case.q.dtype)[1:].view_as(case.q)
    with pytest.raises(NotImplementedError, match=r"needs rows of q at multiples of 16 bytes.*backend='triton' can"):
        treeattn.tree_attention(odd, case.k_cache, case.v_cache, step, **call_of(case))
    assert auto_on_host == []


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = ((torch.float16, E4M3), (torch.bfloat16, E4M3), (torch.bfloat16, E5M2), (torch.float16, E5M2))
SCALES = ("none", "float", "tensor", "heads")


@pytest.fixture
def on_host_fp8(on_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `on_host`, bfloat16 too: what Triton's interpreter cannot do is not asked of it here."""
    monkeypatch.setitem(CAPABILITIES, "triton", dataclasses.replace(CAPABILITIES["triton"], lacks_on={}))


def cached(shape: dict[str, Any], turn: int, options: Options | None = None) -> Case:
    """A case of a shape with an FP8 cache."""
    dtype, kv_dtype = KINDS[turn % 4]
    options = dataclasses.replace(options or Options(), kv_dtype=kv_dtype, scales=SCALES[(turn + turn // 4) % 4])
    return shaped(**{**shape, "head_dim": 128}, dtype=dtype, options=options)


FP8_SHAPES = {
    **SHAPES,
    "one-tile-of-72": {"q_lens": [17], "prefixes": [700], "heads": (4, 1), "page_size": 64},
    "rows-of-40": {"q_lens": [8], "prefixes": [500], "heads": (5, 1), "page_size": 64},
    "second-consumer-of-one": {"q_lens": [17, 18, 19], "prefixes": [64, 333, 130], "heads": (8, 2), "page_size": 32},
    "tiles-of-130": {"q_lens": [65], "prefixes": [500], "heads": (4, 1), "page_size": 64},
    "200-rows": {"q_lens": [40], "prefixes": [200], "heads": (5, 1), "page_size": 16},
    "wide-c2": {"q_lens": [20], "prefixes": [900], "heads": (4, 1), "page_size": 64},
    "wide-c2-boxes-of-8": {"q_lens": [20, 3], "prefixes": [413, 1300], "heads": (4, 1), "page_size": 24},
    "wide-c2-fresh": {"q_lens": [20, 40], "prefixes": [333, 64], "heads": (4, 1), "page_size": 16, "tree_kv": "fresh"},
    "wide-c2-page-1": {"q_lens": [20, 9], "prefixes": [333, 64], "heads": (4, 1), "page_size": 1},
    "wide-c3-page-1": {"q_lens": [17], "prefixes": [460], "heads": (8, 1), "page_size": 1, "kv_layout": "HND"},
    "wide-c3-fresh": {"q_lens": [17, 17], "prefixes": [333, 31], "heads": (8, 1), "page_size": 64, "tree_kv": "fresh"},
    "page-1": {"q_lens": [9, 17], "prefixes": [333, 64], "heads": (4, 1), "page_size": 1},
    "fresh-of-72": {"q_lens": [17], "prefixes": [333], "heads": (4, 1), "page_size": 64, "tree_kv": "fresh"},
    "fresh-wide": {"q_lens": [70, 3], "prefixes": [130, 20], "heads": (2, 2), "page_size": 16, "tree_kv": "fresh"},
    "fresh-alone": {"q_lens": [17, 9, 33], "prefixes": [0, 64, 31], "heads": (8, 2), "page_size": 64,
                    "tree_kv": "fresh"},
}  # fmt: skip


@pytest.mark.parametrize("name", FP8_SHAPES)
@pytest.mark.usefixtures("on_host_fp8")
def test_fp8_shapes(name: str) -> None:
    first = list(FP8_SHAPES).index(name)
    for turn in (first, first + 1):
        case = cached(FP8_SHAPES[name], turn)
        verdict = check_case(case, "triton", ("plain", "static")[turn % 2])
        assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@pytest.mark.parametrize("turn", range(8))
@pytest.mark.usefixtures("on_host_fp8")
def test_fp8_whoever_is_ahead(turn: int) -> None:
    """Items of all lengths for the wide kernels: each tile comes to each place of both rings, in each kind of copy."""
    count, group = (24, 4) if turn % 2 else (16, 8)  # 76 or 152 rows at most
    prefixes = [(0, 64, 5, 130, 33, 32, 200, 96, 520)[request * request % 9] for request in range(count + turn)]
    nodes = [(3, 19, 1, 9)[request % 4] for request in range(count + turn)]
    shape = {"q_lens": [19] * len(nodes), "nodes": nodes, "prefixes": prefixes, "heads": (group, 1),
             "page_size": (16, 64, 1, 8)[turn // 2], "tree_kv": ("logical", "fresh", "slots")[turn % 3]}  # fmt: skip
    case = cached(shape, turn)
    verdict = check_case(case, "triton", ("plain", "static")[turn // 4])
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@CANARY_ONLY
@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize(("page_size", "cache", "kv_layout", "rows"), [
    (5, "interleaved", "NHD", 0), (8, "flat", "NHD", 8), (16, "interleaved", "HND", 16), (16, "packed", "NHD", 16),
    (24, "packed", "HND", 8), (64, "interleaved", "NHD", 64),
])  # fmt: skip
@pytest.mark.usefixtures("on_host_fp8")
def test_fp8_pages(page_size: int, cache: str, kv_layout: str, rows: int, turn: int) -> None:
    case = cached({"q_lens": [9, 3], "prefixes": [333, 150], "heads": (8, 2), "page_size": page_size, "cache": cache,
                   "kv_layout": kv_layout, "index_dtype": (torch.int32, torch.int64)[turn % 2]}, turn)  # fmt: skip
    assert box_rows_of(case) == rows
    verdict = check_case(case, "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


FP8_OPTION_SHAPES: dict[str, dict[str, Any]] = {
    **{name: shape for name, shape in OPTION_SHAPES.items() if name != "c2"},
    "one-tile-of-72": {"q_lens": [17, 5], "prefixes": [333, 64], "heads": (4, 1), "page_size": 64, "table": "block"},
    "wide-c2": {"q_lens": [20, 5], "prefixes": [333, 64], "heads": (4, 1), "page_size": 64, "table": "block"},
    "wide-c2-fresh": {"q_lens": [20], "prefixes": [200], "heads": (4, 1), "page_size": 12, "tree_kv": "fresh"},
    "fresh-of-72": {"q_lens": [17, 40], "prefixes": [333, 70], "heads": (4, 2), "page_size": 16, "tree_kv": "fresh"},
}


@CANARY_ONLY
@pytest.mark.parametrize("shape", FP8_OPTION_SHAPES)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.usefixtures("on_host_fp8")
def test_fp8_options(name: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treeattn.config.INVARIANT_KEYS", 130)
    turn = list(OPTIONS).index(name) + list(FP8_OPTION_SHAPES).index(shape)
    case = cached(FP8_OPTION_SHAPES[shape], turn, OPTIONS[name])
    verdict = check_case(case, "triton", ("plain", "static")[turn // 2 % 2])
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@CANARY_ONLY
@pytest.mark.parametrize("tree_kv", ["logical", "fresh"])
@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("sm_scale", [-0.11, 0.0, 3.0])
@pytest.mark.usefixtures("on_host_fp8")
def test_fp8_scales_of_scores(sm_scale: float, turn: int, tree_kv: str) -> None:
    """With 3, rows jump from key to key: bases move in most tiles."""
    heads = (8, 1) if turn % 2 else (4, 1)
    case = cached({"q_lens": [17], "prefixes": [600], "heads": heads, "page_size": 64, "tree_kv": tree_kv}, turn)
    case = dataclasses.replace(case, sm_scale=sm_scale)
    verdict = check_case(case, "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@CANARY_ONLY
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.usefixtures("on_host_fp8")
def test_fp8_random_cases(seed: int) -> None:
    dtype, kv_dtype = KINDS[seed % 4]
    case = random_case(seed, dtype=dtype, head_dim=128, batch=1 + seed % 3, max_prefix=200, num_kv_heads=1,
                       max_width=(8, 17, 33)[seed % 3], cache="paged", source=("parents", "general")[seed // 4 % 2],
                       options=Options(kv_dtype=kv_dtype, scales=SCALES[seed % 3]))  # fmt: skip
    verdict = check_case(case, "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


class CachedSetting(HostSetting):
    """Cases with an FP8 cache that the host can afford."""

    def case(self, seed: int, dtype: torch.dtype, **pins: Any) -> Case:
        asked = pins.pop("options", None) or Options()
        options = dataclasses.replace(asked, kv_dtype=KINDS[seed % 4][1], scales=SCALES[seed % 3])
        return super().case(seed, dtype, **{**pins, "head_dim": 128, "options": options})


FP8_SETTING = CachedSetting("triton", torch.device("cpu"), (torch.float16, torch.bfloat16), small=True)


@CANARY_ONLY
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("on_host_fp8")
def test_fp8_options_together(seed: int) -> None:
    merged_parts_are_the_whole(FP8_SETTING, seed)
    general_masks_take_the_callers_positions(FP8_SETTING, seed)


@CANARY_ONLY
@pytest.mark.parametrize("options", [Options(), Options(window_left=20, sinks=True)], ids=["plain", "window"])
@pytest.mark.usefixtures("on_host_fp8")
def test_fp8_batch_invariance(options: Options) -> None:
    rows_do_not_depend_on_the_batch(FP8_SETTING, 1, options)


@CANARY_ONLY
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("on_host_fp8")
def test_fp8_unseen_rows_change_nothing(seed: int) -> None:
    unseen_keys_change_nothing(FP8_SETTING, {"seed": seed})


@CANARY_ONLY
@pytest.mark.parametrize("heads", [(4, 1), (5, 1), (8, 1)], ids=["one-consumer", "wide-c2", "wide-c3"])
@pytest.mark.parametrize("power", [-40, 30])
@pytest.mark.parametrize("tree_kv", ["logical", "fresh"])
@pytest.mark.usefixtures("on_host_fp8")
def test_fp8_queries_of_any_size(power: int, tree_kv: str, heads: tuple[int, int]) -> None:
    """bf16 queries are multiplied as float16, whose range is smaller."""
    case = cached({"q_lens": [17], "prefixes": [300], "heads": heads, "page_size": 64, "tree_kv": tree_kv}, 1)
    scaled = dataclasses.replace(case, q=case.q * 2.0**power, sm_scale=0.09 * 2.0**-power)
    verdict = check_case(scaled, "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@CANARY_ONLY
@pytest.mark.parametrize("heads", [(4, 1), (8, 1)], ids=["one-consumer", "wide"])
@pytest.mark.parametrize("what", ["k", "v"])
@pytest.mark.usefixtures("on_host_fp8")
def test_fp8_beside_fresh_numbers_that_float16_has_not(what: str, heads: tuple[int, int]) -> None:
    case = cached({"q_lens": [17], "prefixes": [300], "heads": heads, "page_size": 64, "tree_kv": "fresh"}, 1)
    (content,) = case.content_k if what == "k" else case.content_v
    large = content.clone()
    large[300:] *= 2.0**20
    verdict = check_case(dataclasses.replace(case.with_content(**{what: (large,)}), sm_scale=1e-6), "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@CANARY_ONLY
@pytest.mark.parametrize("heads", [(4, 1), (8, 1)], ids=["one-consumer", "wide"])
@pytest.mark.parametrize("turn", range(4))
@pytest.mark.usefixtures("on_host_fp8")
def test_fp8_fresh_rows_come_with_a_call_whose_step_has_none(turn: int, heads: tuple[int, int]) -> None:
    """The last page has room for the nodes, whose rows there are not read."""
    case = cached({"q_lens": [17], "prefixes": [300], "heads": heads, "page_size": 64, "tree_kv": "fresh"}, turn)
    outs = []
    for fresh_tree in (True, False):
        group = {**group_of(case), "fresh_tree": fresh_tree}
        step = treeattn.plan(case.layout(), case.kv(), **group, backend="triton")
        fresh = {"k_tree": case.k_tree, "v_tree": case.v_tree}
        out = treeattn.tree_attention(case.q, case.k_cache, case.v_cache, step, **call_of(case), **fresh)
        assert isinstance(out, torch.Tensor)
        assert out.isfinite().all()
        outs.append(out)
    assert torch.equal(*outs)


@CANARY_ONLY
@pytest.mark.parametrize("heads", [(4, 1), (8, 1)], ids=["one-consumer", "wide"])
@pytest.mark.parametrize("turn", range(4))
@pytest.mark.usefixtures("on_host_fp8")
def test_fp8_inf_and_nan_come_through(turn: int, heads: tuple[int, int]) -> None:
    """Of V, in the dims where they are; by tensor copies and by rows."""
    case = cached({"q_lens": [17], "prefixes": [300], "heads": heads, "page_size": (64, 1)[turn % 2]}, turn)
    inf_and_nan_of_v_come_through(case, "triton")


@CANARY_ONLY
@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("tree_kv", ["logical", "fresh"])
@pytest.mark.parametrize("q_len", [10, 17, 20])
@pytest.mark.usefixtures("on_host_fp8")
def test_fp8_negative_scales(q_len: int, tree_kv: str, cap: float) -> None:
    """The same bytes, of which each stands for the opposite; 80, 136 and 160 rows."""
    options = Options(kv_dtype=E4M3, scales="float", logits_soft_cap=cap)
    case = shaped([q_len], [200], (8, 1), 128, options=options, page_size=16, tree_kv=tree_kv)
    assert isinstance(case.k_scale, float)
    assert isinstance(case.v_scale, float)
    (k,), (v,) = case.content_k, case.content_v
    signs = torch.full((k.shape[0], 1, 1), -1.0)
    if tree_kv == "fresh":
        signs[200:] = 1.0  # not scaled
    given = dataclasses.replace(case, k_scale=-case.k_scale, v_scale=-case.v_scale, content_k=(k * signs,),
                                content_v=(v * signs,))  # fmt: skip
    verdict = check_case(given, "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


# MLA with an FP8 cache


@pytest.fixture
def on_host_latents(on_host_fp8: None, on_host_wide_merge: None) -> None:
    """As `on_host_fp8`, with the merge of the other fixture."""


def cached_latent(turn: int, options: Options | None = None, **shape: Any) -> Case:
    """A case of MLA with an FP8 cache."""
    dtype, kv_dtype = KINDS[turn % 4]
    options = dataclasses.replace(options or Options(), kv_dtype=kv_dtype, scales=SCALES[(turn + turn // 4) % 4])
    return latent(**shape, options=options, dtype=dtype)


MLA_FP8_SHAPES: dict[str, dict[str, Any]] = {
    **MLA_SHAPES,
    "fresh-behind-32": {"q_lens": [17], "prefixes": [96], "heads": 8, "tree_kv": "fresh", "page_size": 16},
    "fresh-behind-33": {"q_lens": [9, 40], "prefixes": [97, 161], "heads": 8, "tree_kv": "fresh", "page_size": 1},
    "fresh-alone": {"q_lens": [17, 9, 33], "prefixes": [0, 64, 31], "heads": 8, "tree_kv": "fresh", "page_size": 64},
    "fresh-wide": {"q_lens": [140, 3], "prefixes": [10, 20], "heads": 1, "tree_kv": "fresh", "page_size": 16},
    "fresh-hnd": {"q_lens": [3], "prefixes": [150], "heads": 64, "tree_kv": "fresh", "page_size": 128,
                  "kv_layout": "HND"},
}  # fmt: skip


@pytest.mark.parametrize("name", MLA_FP8_SHAPES)
@pytest.mark.usefixtures("on_host_latents")
def test_mla_fp8_shapes(name: str) -> None:
    turn = list(MLA_FP8_SHAPES).index(name)
    case = cached_latent(turn, **MLA_FP8_SHAPES[name])
    verdict = check_case(case, "triton", ("plain", "static")[turn % 2])
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@pytest.mark.parametrize("tree_kv", ["logical", "fresh"])
@pytest.mark.parametrize("turn", range(2))
@pytest.mark.usefixtures("on_host_latents")
def test_mla_fp8_whoever_is_ahead(turn: int, tree_kv: str) -> None:
    """Items of all lengths, with fresh rows beside rows of the cache, alone and behind a full tile."""
    prefixes = [(0, 64, 5, 130, 33, 32, 200)[request * request % 7] for request in range(80 + turn)]
    case = cached_latent(2 * turn + (tree_kv == "fresh"), q_lens=[3] * len(prefixes), prefixes=prefixes, heads=2,
                         page_size=(16, 1)[turn], tree_kv=tree_kv)  # fmt: skip
    verdict = check_case(case, "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@CANARY_ONLY
@pytest.mark.parametrize("name", MLA_OPTIONS)
@pytest.mark.usefixtures("on_host_latents")
def test_mla_fp8_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treeattn.config.INVARIANT_KEYS", 130)
    first = list(MLA_OPTIONS).index(name)
    for turn, shape in enumerate((*MLA_OPTION_SHAPES, "fresh-behind-32", "fresh-behind-33"), first):
        case = cached_latent(turn, MLA_OPTIONS[name], **MLA_FP8_SHAPES[shape])
        verdict = check_case(case, "triton", ("plain", "static")[turn // 2 % 2])
        assert verdict.ok, f"{shape}: {verdict.message}\n{case.describe()}"


def worth(case: Case, k_scale: float) -> Case:
    """The same bytes in a cache of another scale, of a case that has none."""
    dense = []
    for content, slots in zip(case.content_k, case.key_slots, strict=True):
        dense.append(torch.where(slots[:, None, None] >= 0, content * k_scale, content))
    content_v = tuple(content[..., :512] for content in dense)
    return dataclasses.replace(case, k_scale=k_scale, content_k=tuple(dense), content_v=content_v)


@CANARY_ONLY
@pytest.mark.parametrize("k_scale", [-0.3, 0.0, 1e-6, 50.0])
@pytest.mark.parametrize("sm_scale", [-0.11, 0.0, 3.0])
@pytest.mark.usefixtures("on_host_latents")
def test_mla_fp8_scales(sm_scale: float, k_scale: float) -> None:
    """Of either sign: that of Q is the product's, and fresh rows have one of them. With 3, bases move in most tiles."""
    for turn, (prefix, tree_kv) in enumerate(((400, "fresh"), (96, "fresh"), (333, "logical"))):
        dtype, kv_dtype = KINDS[turn % 4]
        case = latent([9], [prefix], 8, Options(kv_dtype=kv_dtype), dtype=dtype, page_size=64, tree_kv=tree_kv)
        verdict = check_case(dataclasses.replace(worth(case, k_scale), sm_scale=sm_scale), "triton")
        assert verdict.ok, f"{prefix}: {verdict.message}\n{case.describe()}"


@CANARY_ONLY
@pytest.mark.parametrize("source", ["parents", "general"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("on_host_latents")
def test_mla_fp8_random_cases(seed: int, source: str) -> None:
    dtype, kv_dtype = KINDS[seed % 4]
    options = Options(shared_kv=True, head_dim_v=512, kv_dtype=kv_dtype, scales=SCALES[seed % 3])
    case = random_case(seed, dtype=dtype, head_dim=576, batch=1 + seed % 3, max_prefix=200, source=source,
                       max_width=(8, 17)[seed % 2], num_kv_heads=1, cache="paged", options=options)  # fmt: skip
    verdict = check_case(case, "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@CANARY_ONLY
@pytest.mark.parametrize("tree_kv", ["slots", "fresh"])
@pytest.mark.usefixtures("on_host_latents")
def test_mla_fp8_two_kv_heads(tree_kv: str) -> None:
    """Of which each has a scale."""
    options = Options(shared_kv=True, head_dim_v=512, kv_dtype=E4M3, scales="heads")
    case = shaped([9, 3], [200, 70], (8, 2), 576, options=options, tree_kv=tree_kv, page_size=16)
    verdict = check_case(case, "triton")
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


class CachedLatentSetting(LatentSetting):
    """The same with an FP8 cache."""

    def case(self, seed: int, dtype: torch.dtype, **pins: Any) -> Case:
        asked = Options(shared_kv=True, head_dim_v=512, kv_dtype=KINDS[seed % 4][1], scales=SCALES[seed % 3])
        return super().case(seed, dtype, **{**pins, "options": asked})


@CANARY_ONLY
@pytest.mark.parametrize("seed", [0, 1, 2, 4, 6])
@pytest.mark.usefixtures("on_host_latents")
def test_mla_fp8_unseen_rows_change_nothing(seed: int) -> None:
    """NaN bytes of the cache, and fresh rows of NaN."""
    setting = CachedLatentSetting("triton", torch.device("cpu"), (torch.float16, torch.bfloat16), small=True)
    unseen_keys_change_nothing(setting, {"seed": seed})
