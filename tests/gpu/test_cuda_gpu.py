"""The kernels of csrc on a Hopper GPU: named shapes, random cases, checked builds, and the same bits again."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from option_bodies import (
    general_masks_take_the_callers_positions,
    merged_parts_are_the_whole,
    rows_do_not_depend_on_the_batch,
)
from property_bodies import inf_and_nan_of_v_come_through
from repeated_calls import RepeatedCalls
from settings_of_tests import Setting

import treeattn
from treeattn.cuda.build import Fp8Shape, Fp8WideShape, KernelShape, MlaFp8Shape, MlaMergeShape, kernels_in, source_dir
from treeattn.cuda.config import KEYS, MLA_DIMS, Variant
from treeattn.cuda.launch import load
from treeattn.driver import LOCAL_BYTES
from treeattn.testing import Case, Options, Placement, build_case, check_case, draw_tree, random_case
from treeattn.testing.truth import truth

REASON = treeattn.available_backends("cuda")["cuda"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.csrc,
    pytest.mark.skipif(torch.cuda.is_available() and REASON is not None, reason=f"backend 'cuda': {REASON}"),
]
CHECKED = "TREEATTN_TRAP_AFTER=3000000"
"""A build that ends with an error where it would hang at a barrier."""
CANARY = f"{CHECKED} TREEATTN_CANARY=1 TREEATTN_DELAY=1"
"""And one that spoils a half tile before it is written again, and whose producer sleeps now and then."""
KINDS = tuple((dim, dtype) for dtype in (torch.bfloat16, torch.float16) for dim in (128, 64, 256))
"""Three that follow each other have all head dims."""

SHAPES: dict[str, dict[str, Any]] = {
    "lone-root": {"q_lens": [1], "prefixes": [0], "heads": (1, 1)},
    "one-full-tile": {"q_lens": [1], "prefixes": [64], "heads": (8, 1)},
    "c1": {"q_lens": [8], "prefixes": [320], "heads": (8, 1), "page_size": 64},
    "c2": {"q_lens": [17], "prefixes": [320], "heads": (4, 1), "page_size": 64},
    "c2-heads": {"q_lens": [17], "prefixes": [1000], "heads": (32, 8), "page_size": 64},
    "c3": {"q_lens": [17], "prefixes": [1000], "heads": (8, 1), "page_size": 64},
    "c3-heads": {"q_lens": [17], "prefixes": [3000], "heads": (64, 8), "page_size": 128},
    "c3-tiles": {"q_lens": [65], "prefixes": [1000], "heads": (8, 1), "page_size": 64},
    **{
        f"page-{page}-{table}": {
            "q_lens": [17, 17], "prefixes": [777, 130], "heads": (8, 2), "page_size": page, "table": table,
        }
        for page in (1, 8, 12, 16, 48, 64, 128)
        for table in ("csr", "block")
    },
    **{
        tree_kv: {"q_lens": [17, 17], "prefixes": [65, 500], "heads": (8, 2), "page_size": 16, "tree_kv": tree_kv}
        for tree_kv in ("slots", "fresh")
    },
    "ragged": {"q_lens": [1, 8, 17, 65, 3], "prefixes": [0, 63, 1025, 300, 5], "heads": (8, 1), "page_size": 16},
    "ragged-c1": {"q_lens": [1, 8, 3, 5], "prefixes": [0, 63, 5000, 300], "heads": (8, 2), "page_size": 64},
    "padded": {"q_lens": [17] * 3, "nodes": [17, 1, 9], "prefixes": [100, 0, 4000], "heads": (8, 1), "page_size": 64},
    "empty": {"q_lens": [8] * 3, "nodes": [8, 0, 3], "prefixes": [100, 64, 0], "heads": (4, 1), "page_size": 64},
    "wide": {"q_lens": [257], "prefixes": [1000], "heads": (8, 1), "page_size": 64},
    "wide-edges": {"q_lens": [400, 3], "prefixes": [2000, 130], "heads": (2, 2), "page_size": 16},
    "wider-edges": {"q_lens": [1025], "prefixes": [1000], "heads": (4, 2), "page_size": 64},
    "wide-c2": {"q_lens": [129, 2], "prefixes": [64, 7], "heads": (2, 2)},
    "long": {"q_lens": [17], "prefixes": [60_000], "heads": (8, 1), "page_size": 64},
    "many": {"q_lens": [8] * 40, "prefixes": list(range(0, 4000, 100)), "heads": (8, 1), "page_size": 16},
    "hnd": {"q_lens": [17], "prefixes": [500], "heads": (32, 8), "page_size": 16, "kv_layout": "HND", "table": "block"},
    "int64-strided": {
        "q_lens": [17], "prefixes": [500], "heads": (8, 2), "page_size": 64, "index_dtype": torch.int64,
        "strided_q": True,
    },
    "negative-scale": {"q_lens": [17], "prefixes": [500], "heads": (8, 2), "page_size": 64, "sm_scale": -0.11},
    "negative-scale-c3": {"q_lens": [17], "prefixes": [500], "heads": (8, 1), "page_size": 64, "sm_scale": -0.11},
    **{
        f"{cache}-{page}-{layout}-{heads}": {
            "q_lens": [17, 17], "prefixes": [777, 130], "heads": (4 * heads, heads), "page_size": page, "cache": cache,
            "kv_layout": layout,
        }
        for cache, page, layout, heads in (
            ("interleaved", 16, "NHD", 2), ("interleaved", 64, "HND", 2), ("packed", 24, "HND", 2),
            ("flat", 16, "NHD", 2), ("strided", 16, "NHD", 1), ("strided", 16, "NHD", 2), ("unlike", 32, "HND", 1),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("source", [path.name for path in sorted(source_dir().glob("*.cu"))])
def test_as_many_blocks_fit_as_the_plan_counts_on(source: str) -> None:
    """And no thread has local memory, as the driver says of the kernels that it has loaded."""
    for name, shape in kernels_in(source).items():
        variant = Variant(shape.dtype.lower(), MLA_DIMS[0], 1, KEYS)
        if isinstance(shape, Fp8WideShape):
            variant = Variant(shape.dtype.lower(), shape.head_dim, shape.consumers, shape.keys, shape.options,
                              shape.format.lower(), fresh=shape.products == "Bf16")  # fmt: skip
        elif isinstance(shape, KernelShape):
            variant = Variant(shape.dtype.lower(), shape.head_dim, shape.consumers, shape.keys, shape.options)
        elif isinstance(shape, Fp8Shape):
            variant = Variant(shape.dtype.lower(), shape.head_dim, shape.consumers, shape.keys,
                              cached=shape.format.lower(), rows=shape.rows)  # fmt: skip
        elif isinstance(shape, MlaFp8Shape):
            variant = variant._replace(cached=shape.format.lower())
        elif isinstance(shape, MlaMergeShape):
            variant = variant._replace(merges=True)
        assert variant.name == name
        function = load(variant, torch.cuda.current_device())
        assert function.attribute(LOCAL_BYTES) == 0, name
        assert function.blocks_per_sm(shape.threads) == shape.blocks, name


@pytest.fixture
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels built with the macros that the test asks for."""
    monkeypatch.setenv("TREEATTN_CUDA_MACROS", getattr(request, "param", CHECKED))


def shaped(name: str, dim: int, dtype: torch.dtype, options: Options | None = None,
           shapes: dict[str, dict[str, Any]] = SHAPES) -> Case:  # fmt: skip
    shape = dict(shapes[name])
    q_lens, prefixes, heads = shape.pop("q_lens"), shape.pop("prefixes"), shape.pop("heads")
    nodes, sm_scale = shape.pop("nodes", q_lens), shape.pop("sm_scale", None)
    rng = random.Random(sum(q_lens) + sum(prefixes))
    trees = [draw_tree("recent", count, rng) for count in nodes]
    return build_case(trees, prefixes, q_lens=q_lens, heads=heads, head_dim=dim, dtype=dtype, device="cuda",
                      placement=Placement(**shape), sm_scale=sm_scale, options=options, seed=1)  # fmt: skip


@pytest.mark.parametrize("build", [CHECKED, CANARY], ids=["checked", "canary"], indirect=True)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("build")
def test_shapes(name: str) -> None:
    first = list(SHAPES).index(name)
    for index in range(first, first + 3):
        case = shaped(name, *KINDS[index % 6])
        verdict = check_case(case, "cuda", ("plain", "static")[index % 2])
        assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@pytest.mark.parametrize("part", range(20))
@pytest.mark.usefixtures("build")
def test_random_cases(part: int) -> None:
    """Any placement; rows of K and V that start at odd addresses are refused, in words."""
    refused = 0
    for seed in range(6 * part, 6 * part + 6):
        dim, dtype = KINDS[seed % 6]
        case = random_case(seed, device="cuda", dtype=dtype, head_dim=dim)
        for path in ("plain", "static"):
            try:
                verdict = check_case(case, "cuda", path)
            except NotImplementedError as error:
                if "multiples of" not in str(error):
                    raise
                refused += 1
                continue
            assert verdict.ok, f"{path}: {verdict.message}\n{case.describe()}"
    assert refused < 12


@pytest.mark.parametrize(
    ("dim", "kv_dtype"),
    [(128, torch.bfloat16), (256, torch.bfloat16), (128, torch.float8_e4m3fn), (128, torch.float8_e5m2)],
)
@pytest.mark.parametrize("heads", [(8, 1), (32, 8), (64, 8)], ids=["c1", "c2", "c3"])
def test_the_same_bits_again_and_again(heads: tuple[int, int], dim: int, kv_dtype: torch.dtype) -> None:
    """One input a thousand times, by calls and by replays of a graph."""
    repeated = RepeatedCalls(heads, dim, kv_dtype)
    repeated.run(1000)
    assert repeated.unlike == 0, repeated


OPTIONS: dict[str, Options] = {
    "sinks": Options(sinks=True),
    "sinks-in-lse": Options(sinks=True, sinks_in_lse=True),
    "prefix": Options(part="prefix"),
    "tree": Options(part="tree", sinks=True),
    **{f"window-{left}": Options(window_left=left) for left in (0, 3, 90, 1000)},
    "windowed-cache": Options(window_left=300, windowed=True),
    "prefix-window": Options(window_left=40, part="prefix"),
    "tree-window": Options(window_left=1, part="tree"),
    "cap": Options(logits_soft_cap=3.0),
    "cap-window-sinks": Options(logits_soft_cap=30.0, window_left=133, sinks=True),
    "invariant": Options(batch_invariant=True, sinks=True),
    "invariant-window": Options(batch_invariant=True, window_left=500),
}
OPTION_SHAPES = (
    "lone-root", "c1", "c2-heads", "c3-heads", "c3-tiles", "page-12-block", "fresh", "ragged", "padded", "many",
)  # fmt: skip


@pytest.mark.parametrize("build", [CHECKED, CANARY], ids=["checked", "canary"], indirect=True)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.usefixtures("build")
def test_options(name: str) -> None:
    for index, shape in enumerate(OPTION_SHAPES, list(OPTIONS).index(name)):
        case = shaped(shape, *KINDS[index % 6], OPTIONS[name])
        verdict = check_case(case, "cuda", ("plain", "static")[index % 2])
        assert verdict.ok, f"{verdict.message}\n{case.describe()}"


class OwnSetting(Setting):
    """Cases that the kernels cover."""

    def case(self, seed: int, dtype: torch.dtype, **pins: Any) -> Case:
        own = {"head_dim": (64, 128, 256)[seed % 3], "cache": "paged", "strided_q": False}
        return super().case(seed, dtype, **{**own, **pins})


SETTING = OwnSetting("cuda", torch.device("cuda"), (torch.float16, torch.bfloat16))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("build")
def test_options_together(seed: int) -> None:
    merged_parts_are_the_whole(SETTING, seed)
    general_masks_take_the_callers_positions(SETTING, seed)
    rows_do_not_depend_on_the_batch(SETTING, seed)
    rows_do_not_depend_on_the_batch(SETTING, seed, Options(window_left=20, sinks=True, logits_soft_cap=4.0))


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CACHES = ((torch.bfloat16, E4M3), (torch.float16, E5M2), (torch.float16, E4M3), (torch.bfloat16, E5M2))
SCALES = ("float", "heads", "none", "tensor")
FP8_SHAPES: dict[str, dict[str, Any]] = {
    # but for views whose rows are 8 numbers apart: of a byte each, rows are not at multiples of 16 bytes, and refused
    **{name: shape for name, shape in SHAPES.items() if shape.get("cache") not in ("strided", "unlike")},
    "rows-of-40": {"q_lens": [8], "prefixes": [5000], "heads": (40, 8), "page_size": 64},
    "200-rows": {"q_lens": [40], "prefixes": [2000], "heads": (10, 2), "page_size": 64},
    "wide-c2-heads": {"q_lens": [20], "prefixes": [3000], "heads": (32, 8), "page_size": 64},
    "wide-c2-fresh": {"q_lens": [20, 5], "prefixes": [3333, 64], "heads": (32, 8), "page_size": 16, "tree_kv": "fresh"},
    "wide-c2-page-1": {"q_lens": [25, 9], "prefixes": [1777, 64], "heads": (8, 2), "page_size": 1},
    "wide-c3-page-1": {"q_lens": [17, 9], "prefixes": [5777, 64], "heads": (64, 8), "page_size": 1},
    "wide-c3-fresh": {"q_lens": [17, 17], "prefixes": [3000, 31], "heads": (64, 8), "tree_kv": "fresh"},
    "wide-c3-many": {"q_lens": [17] * 40, "prefixes": list(range(0, 4000, 100)), "heads": (8, 1), "page_size": 24},
    "wide-c3-long": {"q_lens": [17], "prefixes": [60_000], "heads": (8, 1), "page_size": 16},
    "wide-negative": {"q_lens": [17], "prefixes": [500], "heads": (8, 1), "sm_scale": -0.11, "tree_kv": "fresh"},
    "fresh-of-72": {"q_lens": [17, 5], "prefixes": [3333, 64], "heads": (32, 8), "page_size": 64, "tree_kv": "fresh"},
    "fresh-wide": {"q_lens": [257, 3], "prefixes": [130, 20], "heads": (8, 2), "page_size": 16, "tree_kv": "fresh"},
    "fresh-alone": {"q_lens": [17, 9, 33], "prefixes": [0, 64, 31], "heads": (8, 2), "tree_kv": "fresh"},
    "sharp": {"q_lens": [17], "prefixes": [5000], "heads": (8, 2), "page_size": 64, "sm_scale": 2.0},
    "sharp-fresh": {"q_lens": [17], "prefixes": [500], "heads": (8, 1), "sm_scale": 2.0, "tree_kv": "fresh"},
}  # fmt: skip


def cached(name: str, turn: int, options: Options) -> Case:
    """A case of `FP8_SHAPES` with an FP8 cache."""
    dtype, kv_dtype = CACHES[turn % 4]
    asked = dataclasses.replace(options, kv_dtype=kv_dtype, scales=SCALES[(turn + turn // 4) % 4])
    return shaped(name, 128, dtype, asked, FP8_SHAPES)


@pytest.mark.parametrize("build", ["", CHECKED, CANARY], ids=["plain", "checked", "canary"], indirect=True)
@pytest.mark.parametrize("name", FP8_SHAPES)
@pytest.mark.usefixtures("build")
def test_fp8_shapes(name: str) -> None:
    first = list(FP8_SHAPES).index(name)
    for turn in (first, first + 1):
        case = cached(name, turn, Options())
        verdict = check_case(case, "cuda", ("plain", "static")[turn % 2])
        assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@pytest.mark.parametrize("build", [CHECKED, CANARY], ids=["checked", "canary"], indirect=True)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.usefixtures("build")
def test_fp8_options(name: str) -> None:
    shapes = (*OPTION_SHAPES, "fresh-of-72", "sharp", "wide-c2-heads", "wide-c2-fresh", "wide-c3-fresh")
    for turn, shape in enumerate(shapes, list(OPTIONS).index(name)):
        case = cached(shape, turn, OPTIONS[name])
        verdict = check_case(case, "cuda", ("plain", "static")[turn // 2 % 2])
        assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@pytest.mark.parametrize("part", range(10))
@pytest.mark.usefixtures("build")
def test_fp8_random_cases(part: int) -> None:
    for seed in range(6 * part, 6 * part + 6):
        dtype, kv_dtype = CACHES[seed % 4]
        case = random_case(seed, device="cuda", dtype=dtype, head_dim=128, cache="paged", strided_q=False,
                           options=Options(kv_dtype=kv_dtype, scales=SCALES[seed % 3]))  # fmt: skip
        for path in ("plain", "static"):
            verdict = check_case(case, "cuda", path)
            assert verdict.ok, f"{path}: {verdict.message}\n{case.describe()}"


@pytest.mark.parametrize("heads", [(4, 1), (8, 1), (5, 1)], ids=["one-consumer", "c3", "c2"])
@pytest.mark.parametrize("turn", range(8))
@pytest.mark.usefixtures("build")
def test_fp8_inf_and_nan_come_through(turn: int, heads: tuple[int, int]) -> None:
    """Of V, in the dims where they are; by tensor copies and by rows."""
    dtype, kv_dtype = CACHES[turn % 4]
    rng = random.Random(turn)
    case = build_case([draw_tree("recent", 17, rng)], [300], q_lens=[17], heads=heads, head_dim=128, dtype=dtype,
                      device="cuda", placement=Placement(page_size=(64, 1)[turn // 4]),
                      options=Options(kv_dtype=kv_dtype, scales="heads"), seed=1)  # fmt: skip
    inf_and_nan_of_v_come_through(case, "cuda")


MLA_SHAPES: dict[str, dict[str, Any]] = {
    "lone-root": {"q_lens": [1], "prefixes": [0], "heads": 8},
    "one-tile": {"q_lens": [8], "prefixes": [64], "heads": 8, "page_size": 64},
    "8-heads": {"q_lens": [17], "prefixes": [5000], "heads": 8, "page_size": 64},
    "16-heads": {"q_lens": [17, 17], "prefixes": [3000, 3000], "heads": 16, "page_size": 64},
    "64-heads": {"q_lens": [17], "prefixes": [700], "heads": 64, "page_size": 128, "kv_layout": "HND"},
    "128-heads": {"q_lens": [17], "prefixes": [3000], "heads": 128, "page_size": 64},
    **{
        f"page-{page}-{table}": {
            "q_lens": [17, 9], "prefixes": [777, 130], "heads": 8, "page_size": page, "table": table,
        }
        for page in (1, 8, 12, 16, 48, 64, 128)
        for table in ("csr", "block")
    },
    **{
        tree_kv: {"q_lens": [17, 17], "prefixes": [65, 500], "heads": 8, "page_size": 64, "tree_kv": tree_kv}
        for tree_kv in ("slots", "fresh")
    },
    "ragged": {"q_lens": [1, 8, 17, 65, 3], "prefixes": [0, 63, 1025, 300, 5], "heads": 8, "page_size": 16},
    "many": {"q_lens": [8] * 40, "prefixes": list(range(0, 4000, 100)), "heads": 8, "page_size": 16},
    "padded": {"q_lens": [17] * 3, "nodes": [17, 1, 9], "prefixes": [100, 0, 4000], "heads": 8, "page_size": 64},
    "empty": {"q_lens": [8] * 3, "nodes": [8, 0, 3], "prefixes": [100, 64, 0], "heads": 16, "page_size": 64},
    "wide": {"q_lens": [257], "prefixes": [1000], "heads": 8, "page_size": 64},
    "long": {"q_lens": [17], "prefixes": [60_000], "heads": 8, "page_size": 64},
    "negative-scale": {"q_lens": [17], "prefixes": [500], "heads": 8, "page_size": 64, "sm_scale": -0.05},
    "sharp": {"q_lens": [17], "prefixes": [500], "heads": 8, "page_size": 64, "sm_scale": 1.0},
}  # fmt: skip
MLA_OPTIONS = {"none": Options(), **{name: OPTIONS[name] for name in ("sinks", "prefix", "tree", "invariant")}}


@pytest.mark.parametrize("build", ["", CHECKED, CANARY], ids=["plain", "checked", "canary"], indirect=True)
@pytest.mark.parametrize("options", MLA_OPTIONS)
@pytest.mark.parametrize("name", MLA_SHAPES)
@pytest.mark.usefixtures("build")
def test_mla(name: str, options: str) -> None:
    index = list(MLA_SHAPES).index(name) + list(MLA_OPTIONS).index(options)
    case = latent(name, (torch.bfloat16, torch.float16)[index % 2], MLA_OPTIONS[options])
    verdict = check_case(case, "cuda", ("plain", "static")[index // 2 % 2])
    assert verdict.ok, f"{verdict.message}\n{case.describe()}"


def latent(name: str, dtype: torch.dtype, options: Options) -> Case:
    """A case of `MLA_FP8_SHAPES`."""
    shape = dict(MLA_FP8_SHAPES[name])
    q_lens, prefixes, heads = shape.pop("q_lens"), shape.pop("prefixes"), shape.pop("heads")
    nodes, sm_scale = shape.pop("nodes", q_lens), shape.pop("sm_scale", None)
    rng = random.Random(sum(q_lens) + sum(prefixes))
    trees = [draw_tree("recent", count, rng) for count in nodes]
    asked = dataclasses.replace(options, shared_kv=True, head_dim_v=MLA_DIMS[1])
    return build_case(trees, prefixes, q_lens=q_lens, heads=(heads, 1), head_dim=MLA_DIMS[0], dtype=dtype, seed=1,
                      device="cuda", placement=Placement(**shape), sm_scale=sm_scale, options=asked)  # fmt: skip


MLA_FP8_SHAPES: dict[str, dict[str, Any]] = {
    **MLA_SHAPES,
    **{
        f"fresh-behind-{prefix}": {"q_lens": [17, 5], "prefixes": [prefix, 4000], "heads": 16, "tree_kv": "fresh",
                                   "page_size": 64}
        for prefix in (0, 64, 96, 97)
    },
    "fresh-wide": {"q_lens": [257, 3], "prefixes": [130, 20], "heads": 8, "tree_kv": "fresh", "page_size": 1},
    "many-fresh": {"q_lens": [8] * 40, "prefixes": list(range(0, 4000, 100)), "heads": 8, "tree_kv": "fresh"},
}  # fmt: skip


@pytest.mark.parametrize("build", ["", CHECKED, CANARY], ids=["plain", "checked", "canary"], indirect=True)
@pytest.mark.parametrize("name", MLA_FP8_SHAPES)
@pytest.mark.usefixtures("build")
def test_mla_fp8(name: str) -> None:
    """Each shape with three of the options."""
    first = list(MLA_FP8_SHAPES).index(name)
    for turn in range(first, first + 3):
        dtype, kv_dtype = CACHES[turn % 4]
        options = MLA_OPTIONS[list(MLA_OPTIONS)[2 * turn % 5]]
        asked = dataclasses.replace(options, kv_dtype=kv_dtype, scales=SCALES[(turn + turn // 4) % 4])
        case = latent(name, dtype, asked)
        verdict = check_case(case, "cuda", ("plain", "static")[turn // 2 % 2])
        assert verdict.ok, f"{verdict.message}\n{case.describe()}"


@pytest.mark.parametrize("part", range(6))
@pytest.mark.usefixtures("build")
def test_mla_fp8_random_cases(part: int) -> None:
    for seed in range(6 * part, 6 * part + 6):
        dtype, kv_dtype = CACHES[seed % 4]
        case = random_case(seed, device="cuda", dtype=dtype, head_dim=MLA_DIMS[0], num_kv_heads=1, cache="paged",
                           strided_q=False, source=("parents", "general")[seed % 2],
                           options=Options(shared_kv=True, head_dim_v=MLA_DIMS[1], kv_dtype=kv_dtype,
                                           scales=SCALES[seed % 3]))  # fmt: skip
        for path in ("plain", "static"):
            verdict = check_case(case, "cuda", path)
            assert verdict.ok, f"{path}: {verdict.message}\n{case.describe()}"


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("heads", [8, 64])
def test_mla_the_same_bits_again_and_again(heads: int, kv_dtype: torch.dtype) -> None:
    repeated = RepeatedCalls((heads, 1), MLA_DIMS[0], kv_dtype)
    repeated.run(1000)
    assert repeated.unlike == 0, repeated


BESIDE = ((64, 1, MLA_DIMS[0], "bfloat16"), (128, 1, MLA_DIMS[0], "bfloat16"), (32, 8, 128, "bfloat16"),
          (64, 1, MLA_DIMS[0], "float8_e4m3fn"), (8, 1, 256, "bfloat16"), (32, 8, 128, "float8_e4m3fn"),
          (64, 8, 128, "float8_e4m3fn"))  # fmt: skip


def test_the_same_bits_beside_other_processes() -> None:
    """Programs that take turns on the GPU: MLA once read rows that were overwritten meanwhile, in 2 calls of 1000."""
    script = Path(__file__).resolve().parent.parent / "repeated_calls.py"
    running = []
    for heads, kv_heads, dim, kv_dtype in 2 * BESIDE:
        command = [sys.executable, str(script), f"--heads={heads}", f"--kv-heads={kv_heads}", f"--dim={dim}",
                   f"--kv-dtype={kv_dtype}", "--seconds=15"]  # fmt: skip
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [process.communicate(timeout=300)[0] for process in running]
    wrong = [output for process, output in zip(running, outputs, strict=True) if process.returncode != 0]
    assert not wrong, "\n".join(wrong)
    assert all(" calls were unlike" in output for output in outputs)


MLA_LATENT = Options(shared_kv=True, head_dim_v=MLA_DIMS[1])
MILLION = {
    "grouped": ((8, 2), 128, Options()),
    "grouped-fp8": ((8, 2), 128, Options(kv_dtype=E4M3, scales="float")),
    "grouped-fp8-wide": ((8, 1), 128, Options(kv_dtype=E4M3, scales="float")),
    "grouped-invariant": ((8, 1), 64, Options(batch_invariant=True)),
    "mla": ((8, 1), MLA_DIMS[0], MLA_LATENT),
    "mla-fp8": ((8, 1), MLA_DIMS[0], dataclasses.replace(MLA_LATENT, kv_dtype=E4M3, scales="float")),
    "mla-invariant": ((8, 1), MLA_DIMS[0], dataclasses.replace(MLA_LATENT, batch_invariant=True)),
}


@pytest.mark.parametrize("kind", MILLION)
def test_a_million_tokens(kind: str) -> None:
    """And none, and a root alone, in the same batch."""
    heads, dim, options = MILLION[kind]
    trees = [draw_tree("recent", 17, random.Random(3)), draw_tree("any", 9, random.Random(4)), [-1]]
    case = build_case(trees, [1_000_003, 0, 5], q_lens=[17, 17, 2], heads=heads, head_dim=dim, dtype=torch.bfloat16,
                      device="cuda", placement=Placement(page_size=64, table="block"), options=options)  # fmt: skip
    expected = truth(case)
    for path in ("plain", "static"):
        verdict = check_case(case, "cuda", path, expected)
        assert verdict.ok, f"{path}: {verdict.message}\n{case.describe()}"
