"""The option table of ``treeattn check``: what a random case may ask for, and a pure function from a seed to a case.

A case takes one value of every axis. The axes of `KERNEL` decide which kernels are compiled: they are drawn from a pool
of `KERNELS` rows that together hold every legal pair (a GPU needs seconds to compile each). The axes of `BATCH` are
the batch's own, drawn from `BATCHES` rows of the same kind. Seed n takes row ``n % KERNELS`` of the pool, shuffled anew
for every `KERNELS` seeds, so that any 2000 seeds in a row hold each option 100 times and each legal pair 10 times. The
rest of a case (trees, lengths, widths, page order, numbers) is drawn from its seed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from .build import build_case, draw_prefix
from .cases import Case, Options, Placement
from .covering import Axis, Value, covering_rows, legal_pairs
from .trees import draw_tree

__all__ = ["AXES", "BATCH", "ILLEGAL", "KERNEL", "KERNELS", "Draw", "draw", "pairs", "sweep_case"]

KERNEL = (
    Axis("dtype", {"float32": 2, "float16": 3, "bfloat16": 4, "float64": 1}),
    Axis("kv_dtype", {"same": 6, "e4m3": 2, "e5m2": 2}),
    Axis("scales", {"none": 6, "float": 1, "tensor": 1, "heads": 2}),
    Axis("values", {"alike": 5, "head_dim_v": 2, "shared_kv": 2}),
    Axis("window", {"none": 5, "window": 2, "windowed cache": 2}),
    Axis("soft_cap", {"none": 2, "cap": 1}),
    Axis("sinks", {"none": 3, "sinks": 1, "sinks in lse": 1}),
    Axis("part", {"all": 5, "prefix": 1, "tree": 1}),
    Axis("bits", {"any": 4, "batch invariant": 1}),
    Axis("nodes", {"logical": 2, "tree_slots": 1, "fresh": 1}),
    Axis("page", {"1": 2, "5": 1, "16": 2, "64": 2, "128": 1}),
    Axis("table", {"csr": 1, "block": 1}),
    Axis("index", {"int32": 2, "int64": 1}),
    Axis("layout", {"NHD": 1, "HND": 1}),
    Axis("cache", {"paged": 3, "flat": 1, "interleaved": 1, "packed": 1, "strided": 1, "unlike": 1}),
    Axis("q", {"dense": 2, "strided": 1}),
    Axis("out", {"dense": 2, "gaps": 1, "transposed": 1}),
    Axis("sm_scale", {"default": 3, "given": 1, "negative": 1}),
)
"""What decides which kernels run. `values`: what V is; `nodes`: where their K and V are; `out`: strides of out, lse."""

BATCH = (
    Axis("mask", {"parents": 3, "full": 1, "tree": 1, "general": 1, "chain": 1}),
    Axis("widths", {"uniform": 1, "ragged": 1}),
    Axis("padding", {"no": 1, "yes": 1}),
    Axis("empties", {"no": 2, "yes": 1}),
    Axis("tail", {"no": 1, "yes": 1}),
    Axis("stale", {"valid": 1, "zero": 1, "negative": 1, "huge": 1}),
    Axis("poison", {"nan": 1, "inf": 1, "mixed": 1, "noise": 1}),
)
"""What one batch is: masks and what they are made from, ragged rows, padding, empty requests, rows behind the last."""

AXES = (*KERNEL, *BATCH)
OPTION_AXES = ("kv_dtype", "scales", "values", "window", "soft_cap", "sinks", "part", "bits")
"""Axes of kernels whose first value asks for nothing that a backend may lack."""
KERNELS, FLOAT64, BARE, BATCHES = 80, 8, 12, 24
"""Rows of the pools; `FLOAT64` of the kernels are for that dtype, `BARE` of them have no option."""
FEWEST_KERNELS, FEWEST_BATCHES = 6, 3
"""Rows that each value has at least: 6 kernels of 80 are 144 cases of 2000."""

_NO_SHARED_PAGE = "K and V of unlike sizes, or V inside K, do not share a page"
_CHAIN = "a chain is a uniform batch without a tree: TreeLayout.chain takes no padding"
_RAGGED = "rows behind the last request need offsets: a uniform batch has none"
_FORMS: tuple[tuple[str, Sequence[tuple[Value, Value]]], ...] = (
    ("scales are for an FP8 cache", [(("kv_dtype", "same"), ("scales", one)) for one in ("float", "tensor", "heads")]),
    ("token slots [slots, heads, dim] have no page axis to order", [(("cache", "flat"), ("layout", "HND"))]),
    (_NO_SHARED_PAGE, [(("values", "head_dim_v"), ("cache", kind)) for kind in ("interleaved", "packed")]),
    (_NO_SHARED_PAGE, [(("values", "shared_kv"), ("cache", kind)) for kind in ("interleaved", "packed")]),
    ("V inside K has K's strides", [(("values", "shared_kv"), ("cache", "unlike"))]),
    (_CHAIN, [(("mask", "chain"), pair) for pair in (("widths", "ragged"), ("padding", "yes"), ("empties", "yes"))]),
    (_RAGGED, [(("tail", "yes"), ("widths", "uniform"))]),
    (
        "a mask's length says how many rows there are",
        [(("tail", "yes"), ("mask", kind)) for kind in ("full", "tree", "general", "chain")],
    ),
)
ILLEGAL: dict[frozenset[Value], str] = {frozenset(pair): why for why, found in _FORMS for pair in found}
"""Pairs that no case can have, with the reason. Every other pair of values of two axes is legal."""

GROUPS = (4, 1, 8, 2, 3, 6, 5, 12)
KV_HEADS = (2, 1, 4, 3)
DIMS = {
    "alike": (128, 64, 80, 256, 96, 16, 40, 72, 32, 192),
    "head_dim_v": ((192, 128), (48, 32), (40, 64), (128, 64), (64, 128), (80, 96)),
    "shared_kv": ((576, 512), (80, 64), (320, 256), (64, 64), (96, 40)),
}
SMALL_DIMS = {"alike": (16, 32, 64, 40), "head_dim_v": ((48, 32), (40, 64)), "shared_kv": ((80, 64), (48, 16))}
WIDTHS, SMALL_WIDTHS = (17, 8, 33, 65, 9, 4, 129, 70), (8, 9, 17, 4)
PREFIXES, SMALL_PREFIXES = (17, 64, 130, 300, 700), (5, 20, 40)
WINDOWS, CAPS = (16, 0, 3, 40, 127), (5.0, 30.0, 50.0)
SCALES = {"default": None, "given": 0.3, "negative": -0.2}
FP8 = {"same": None, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Draw:
    """What a seed draws.

    Attributes
    ----------
    seed, kernel : int
        The second is the row of the pool of kernels.
    chosen : dict of str to str
        By axis, its value.
    """

    seed: int
    kernel: int
    chosen: Mapping[str, str]

    @property
    def dtype(self) -> torch.dtype:
        """Of q and out."""
        found: torch.dtype = getattr(torch, self.chosen["dtype"])
        return found


@cache
def kernels() -> list[dict[str, str]]:
    """The pool of kernels.

    Those of float64 come on top, so that a backend without it misses no pair of the others; and those without any
    option, so that one without options still runs every kind of address, and a fault in them is not hidden.
    """
    of_dtype, *others = KERNEL
    few = {"float64": of_dtype.shares["float64"]}
    usual = Axis("dtype", {name: share for name, share in of_dtype.shares.items() if name not in few})
    bare = [Axis(axis.name, {next(iter(axis.shares)): 1}) if axis.name in OPTION_AXES else axis for axis in others]
    return [
        *covering_rows((usual, *others), ILLEGAL, KERNELS - FLOAT64 - BARE, seed=0, fewest=FEWEST_KERNELS),
        *covering_rows((Axis("dtype", few), *others), ILLEGAL, FLOAT64, seed=0, only=("dtype",)),
        *covering_rows((usual, *bare), ILLEGAL, BARE, seed=0, only=()),
    ]


@cache
def batches() -> list[dict[str, str]]:
    """The pool of what batches are like."""
    return covering_rows(BATCH, ILLEGAL, BATCHES, seed=0, fewest=FEWEST_BATCHES)


@cache
def pairs() -> list[tuple[Value, Value]]:
    """Every legal pair of options."""
    return legal_pairs(AXES, ILLEGAL)


def draw(seed: int, dtype: torch.dtype | None = None) -> Draw:
    """The options of a seed.

    Parameters
    ----------
    dtype : torch.dtype, optional
        Instead of the kernel's own.
    """
    block, place = divmod(seed, KERNELS)
    kernel = random.Random(block).sample(range(KERNELS), KERNELS)[place]
    chosen = {**kernels()[kernel], **batches()[(block + kernel) % BATCHES]}
    if dtype is not None:
        chosen["dtype"] = str(dtype).removeprefix("torch.")
    return Draw(seed, kernel, chosen)


def sweep_case(
    seed: int | Draw, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None, scale: str = "normal"
) -> Case:
    """The case of a seed; `scale` and `device` as in :func:`random_case`."""
    drawn = draw(seed, dtype) if isinstance(seed, int) else seed
    chosen, small = drawn.chosen, scale == "small"
    rng = random.Random(drawn.seed)
    geometry = _geometry(drawn.kernel, chosen, small)
    source = chosen["mask"]
    widths, nodes = _widths(chosen, geometry["max_q_len"], rng)
    longest = rng.choice(SMALL_PREFIXES if small else PREFIXES)
    page = int(chosen["page"])
    prefixes = [draw_prefix(rng, longest, page, width) for width in widths]
    masks = None
    if source == "general":
        gen = torch.Generator().manual_seed(drawn.seed)
        masks = [torch.rand(width, width, generator=gen) < rng.choice((0.1, 0.5, 0.9)) for width in widths]
        source = rng.choice(("full", "tree"))
    return build_case(
        [draw_tree("chain" if source == "chain" else "any", count, rng) for count in nodes],
        prefixes,
        q_lens=widths,
        masks=masks,
        source=source,
        dtype=drawn.dtype,
        device=device,
        placement=_placement(chosen, rng),
        tail=3 if chosen["tail"] == "yes" else 0,
        sharpness=rng.choice((1.0, 1.0, 4.0)),
        sm_scale=SCALES[chosen["sm_scale"]],
        seed=drawn.seed,
        **geometry,
    )


def _geometry(kernel: int, chosen: Mapping[str, str], small: bool) -> dict[str, Any]:
    """Heads, dims, options and declared width of a kernel: the same for all of its cases."""
    rng = random.Random(kernel)
    kv_heads = KV_HEADS[kernel // len(GROUPS) % (2 if small else len(KV_HEADS))]
    group = GROUPS[kernel % (4 if small else len(GROUPS))]
    if chosen["values"] == "shared_kv":
        kv_heads = 1 + (kernel % 5 == 0)  # MLA has one; a second tells whether anything counts on that
    dims: Any = rng.choice((SMALL_DIMS if small else DIMS)[chosen["values"]])
    head_dim, head_dim_v = (dims, None) if isinstance(dims, int) else dims
    window = -1 if chosen["window"] == "none" else WINDOWS[kernel % len(WINDOWS)]
    options = Options(
        head_dim_v=head_dim_v,
        kv_dtype=FP8[chosen["kv_dtype"]],
        scales=chosen["scales"],
        shared_kv=chosen["values"] == "shared_kv",
        window_left=window,
        windowed=chosen["window"] == "windowed cache",
        part=chosen["part"],
        logits_soft_cap=CAPS[kernel % len(CAPS)] if chosen["soft_cap"] == "cap" else 0.0,
        sinks=chosen["sinks"] != "none",
        sinks_in_lse=chosen["sinks"] == "sinks in lse",
        batch_invariant=chosen["bits"] == "batch invariant",
    )
    width = rng.choice(SMALL_WIDTHS if small else WIDTHS)
    return {"heads": (kv_heads * group, kv_heads), "head_dim": head_dim, "options": options, "max_q_len": width}


def _widths(chosen: Mapping[str, str], most: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """q_len and num_nodes of each request, such that what was chosen is there."""
    batch = rng.choice((1, 2, 3, 4, 5))
    width = rng.choice((most, most, rng.randint(2, most), 1))
    padded, empties = chosen["padding"] == "yes", chosen["empties"] == "yes"
    if chosen["widths"] == "ragged" or empties:
        batch = max(batch, 2)
    if padded:
        width = max(width, 2)
    widths = [width] * batch
    if chosen["widths"] == "ragged":
        widths = [rng.randint(1, most) for _ in range(batch)]
        widths[rng.randrange(batch)] = most
        if len(set(widths)) == 1:
            widths[0] = most - 1
        if batch > 2 and rng.random() < 0.3:
            widths[1 + widths[1:].index(min(widths[1:]))] = 0
    nodes = list(widths)
    if padded:
        nodes = [rng.randint(1, one) if one and rng.random() < 0.7 else one for one in widths]
        if nodes == widths:
            widest = widths.index(max(widths))
            nodes[widest] = rng.randint(1, widths[widest] - 1)
    if empties:
        kept = rng.choice([b for b in range(batch) if widths[b] and (not padded or nodes[b] < widths[b])])
        rest = [b for b in range(batch) if b != kept and widths[b]]
        for b in {rng.choice(rest), *(b for b in rest if rng.random() < 0.4)}:
            nodes[b] = 0
    return widths, nodes


def _placement(chosen: Mapping[str, str], rng: random.Random) -> Placement:
    return Placement(
        page_size=int(chosen["page"]),
        table=chosen["table"],
        index_dtype=getattr(torch, chosen["index"]),
        tree_kv="slots" if chosen["nodes"] == "tree_slots" else chosen["nodes"],
        kv_layout=chosen["layout"],
        cache=chosen["cache"],
        stale=chosen["stale"],
        poison=chosen["poison"],
        extra_pages=rng.choice((0, 2, 9)),
        strided_q=chosen["q"] == "strided",
        out=chosen["out"],
    )
