"""Named workloads: the shapes that a benchmark runs, and their floor.

A set is a list of `Workload`; `SETS` names them, and `load_workloads` adds your own from a file (:mod:`.own`).
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .targets import GQA_TARGETS, MLA_TARGETS

__all__ = [
    "DTYPES", "KV_DTYPES", "LARGEST_PAGE", "PAGES", "SETS", "Workload", "fp8_pays", "load_workloads", "options_text",
]  # fmt: skip

COPY_BYTES_PER_S = 4.28e12
"""Measured on an H200 with a device-to-device copy, reads and writes counted."""
BF16_FLOP_PER_S = 780e12
"""Measured on an H200 with a bf16 matrix product."""
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number of q and out."""
LARGEST_PAGE = 128
"""Every page size divides it."""
KV_DTYPES = {**DTYPES, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class Workload:
    """One shape.

    Attributes
    ----------
    kind : str
        Name of the kind of row: "gqa", "ragged", "pages", "step", ...
    batch, q_len, prefix : int
        Requests, query rows each, committed tokens each. For a ragged batch the largest q_len and the mean prefix.
    qo_heads, kv_heads, head_dim : int
    page_size : int
        1 uses CSR token slots, more a block table. FA3 chooses its own.
    kv_layout : {"NHD", "HND"}
    dtype : {"bfloat16", "float16", "float32"}
    prefixes, q_lens : tuple of int, optional
        Per request, for a ragged batch.
    nodes : int, optional
        Real nodes a request; the other rows are padding.
    head_dim_v : int, optional
        Of V and out, `head_dim` by default.
    shared_kv : bool
        V is the first `head_dim_v` numbers of K (MLA).
    kv_dtype : {"float8_e4m3fn", "float8_e5m2"}, optional
        Of the caches, `dtype` by default.
    window_left : int
        A row sees keys at positions ``>= its own - window_left``; negative for no window.
    layers : int
        Layers of a model step, each of which makes such a call: the report adds them up.
    """

    kind: str
    batch: int
    q_len: int
    prefix: int
    qo_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    kv_layout: str = "NHD"
    dtype: str = "bfloat16"
    prefixes: tuple[int, ...] | None = None
    q_lens: tuple[int, ...] | None = None
    nodes: int | None = None
    head_dim_v: int | None = None
    shared_kv: bool = False
    kv_dtype: str | None = None
    window_left: int = -1
    layers: int = 1

    @property
    def dim_v(self) -> int:
        """Numbers of a V or out vector."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def cache_dtype(self) -> str:
        """Name of the dtype of the caches."""
        return self.kv_dtype or self.dtype

    @property
    def fp8(self) -> bool:
        """Whether the caches hold FP8, which comes with scales."""
        return KV_DTYPES[self.cache_dtype] == 1

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.qo_heads // self.kv_heads

    @property
    def all_prefixes(self) -> tuple[int, ...]:
        """Committed tokens per request."""
        return self.prefixes or (self.prefix,) * self.batch

    @property
    def all_q_lens(self) -> tuple[int, ...]:
        """Query rows per request."""
        return self.q_lens or (self.q_len,) * self.batch

    @property
    def all_nodes(self) -> tuple[int, ...]:
        """Real rows per request."""
        return tuple(q if self.nodes is None else min(q, self.nodes) for q in self.all_q_lens)

    @property
    def total_q(self) -> int:
        """Query rows of the batch."""
        return sum(self.all_q_lens)

    @property
    def seen_keys(self) -> tuple[int, ...]:
        """Keys per request that its real rows see together: with a window, what the root sees, and the nodes."""
        window = self.window_left
        prefixes = (p if window < 0 else min(p, window) for p in self.all_prefixes)
        return tuple(p + n for p, n in zip(prefixes, self.all_nodes, strict=True))

    @property
    def kv_bytes(self) -> int:
        """K and V of what is seen of prefix and nodes, once; a latent row is both."""
        numbers = self.head_dim if self.shared_kv else self.head_dim + self.dim_v
        return sum(self.seen_keys) * self.kv_heads * numbers * KV_DTYPES[self.cache_dtype]

    @property
    def bytes(self) -> int:
        """The fewest bytes a call moves: `kv_bytes`, and q and out of the real rows, once each."""
        return self.kv_bytes + sum(self.all_nodes) * self.qo_heads * (self.head_dim + self.dim_v) * DTYPES[self.dtype]

    @property
    def flop(self) -> int:
        """``2 * heads * rows * keys * (head_dim + head_dim_v)`` over the requests."""
        pairs = sum(n * keys for n, keys in zip(self.all_nodes, self.seen_keys, strict=True))
        return 2 * self.qo_heads * (self.head_dim + self.dim_v) * pairs

    @property
    def floor_us(self) -> float:
        """No call can be faster on an H200 in 16 bits."""
        return 1e6 * max(self.bytes / COPY_BYTES_PER_S, self.flop / BF16_FLOP_PER_S)

    def name(self) -> str:
        """The shape in a few characters."""
        text = f"{self.kind} b{self.batch} q{self.q_len} p{self.prefix} {self.qo_heads}/{self.kv_heads}"
        return text + options_text(dataclasses.asdict(self))


def options_text(fields: dict[str, Any]) -> str:
    """What is not usual about a workload or a row of a result, in a few characters with a space before each."""
    dim = fields.get("head_dim", 128)
    dim_v = fields.get("head_dim_v") or dim
    text = "" if dim == dim_v == 128 else f" d{dim}" + (f"/{dim_v}" if dim_v != dim else "")
    kv_dtype = fields.get("kv_dtype") or ""
    if kv_dtype.startswith("float8_"):
        text += " " + kv_dtype.removeprefix("float8_").removesuffix("fn")
    window = fields.get("window_left", -1)
    return text + (f" w{window}" if window >= 0 else "")


def _gqa() -> list[Workload]:
    return [Workload("gqa", t.batch, t.q_len, t.prefix, t.qo_heads, t.kv_heads) for t in GQA_TARGETS]


def _mla_row(kind: str, batch: int, q_len: int, prefix: int, qo_heads: int, **more: Any) -> Workload:
    """A latent row of 512 and 64 RoPE dims, one KV head: DeepSeek V3 and its kin."""
    return Workload(kind, batch, q_len, prefix, qo_heads, 1, 576, head_dim_v=512, shared_kv=True, **more)


def _mla() -> list[Workload]:
    return [_mla_row("mla", t.batch, t.q_len, t.prefix, t.qo_heads) for t in MLA_TARGETS]


def _fp8() -> list[Workload]:
    """Each shape in bf16, then in e4m3: where FP8 has to pay off first, then where it must not cost anything."""
    shapes = [work for work in _gqa() if fp8_pays(work.group * work.q_len, work.floor_us)]
    shapes += [
        Workload("gqa", batch, q_len, prefix, *heads)
        for batch, q_len, prefix, heads in (
            (1, 17, 2048, (32, 8)), (1, 17, 131072, (8, 1)), (32, 17, 4096, (64, 8)), (8, 65, 8192, (32, 8)),
        )
    ]  # fmt: skip
    shapes += [_mla_row("fp8", 1, 17, 16384, 8), _mla_row("fp8", 32, 17, 4096, 8)]
    kinds = (None, "float8_e4m3fn")
    return [dataclasses.replace(work, kind="fp8", kv_dtype=kv_dtype) for work in shapes for kv_dtype in kinds]


def fp8_pays(rows: int, floor_us: float) -> bool:
    """Whether so many rows a KV head and a 16-bit floor leave enough to memory for FP8 to be 1.6 times as fast."""
    return rows <= 72 and floor_us > 15


def _kimi() -> list[Workload]:
    """Attention of a verify step of Kimi K2.6 on one GPU of eight: 64 heads / 8, budget 16 and the root, 61 layers."""
    return [
        _mla_row("kimi", batch, 17, prefix, 8, layers=61) for batch in (1, 8, 32) for prefix in (4096, 16384, 131072)
    ]


def _ragged() -> list[Workload]:
    """Prefixes log-uniform in 512 ... 65536, each kind beside a uniform batch of the same bytes and nearly the FLOP."""
    rng = random.Random(0)
    prefixes = tuple(int(2 ** rng.uniform(math.log2(512), 16)) for _ in range(32))
    mixed = tuple(rng.randint(1, 65) for _ in range(32))
    mean = sum(prefixes) // 32
    rows = []
    for heads in ((32, 8), (8, 1)):
        rows += [
            Workload("ragged", 32, 17, mean, *heads, prefixes=prefixes),
            Workload("ragged-uniform", 32, 17, mean, *heads),
            Workload("mixed", 32, max(mixed), mean, *heads, prefixes=prefixes, q_lens=mixed),
            Workload("mixed-uniform", 32, round(sum(mixed) / 32), mean, *heads),
        ]
    return rows


PAGES = ((64, "NHD"), (1, "NHD"), (16, "NHD"), (32, "NHD"), (128, "NHD"), (16, "HND"), (64, "HND"), (128, "HND"))
"""Page size and order; the others are compared with the first."""


def _pages() -> list[Workload]:
    base = [(1, 17, 16384, 32, 8), (8, 17, 4096, 32, 8), (8, 65, 8192, 32, 8)]
    return [Workload("pages", *shape, page_size=page, kv_layout=layout) for shape in base for page, layout in PAGES]


def _shapes() -> list[Workload]:
    """Widths, groups and head dims around (8, 17, 4096, 32/8), and a batch padded to twice its real nodes."""
    rows = [Workload("shapes", 8, q, 4096) for q in (1, 4, 17, 33, 65, 129)]
    rows += [Workload("shapes", 8, 17, 4096, group * 4, 4) for group in (5, 6, 12)]
    rows += [Workload("shapes", 8, 17, 4096, head_dim=dim) for dim in (64, 256)]
    return [*rows, Workload("padded", 8, 34, 4096, nodes=17), Workload("padded-real", 8, 17, 4096)]


def _small() -> list[Workload]:
    return [
        Workload("small", 2, 9, 100, 4, 2, 64, page_size=16, dtype="float32"),
        Workload("small", 1, 17, 64, 8, 2, 64, page_size=1, dtype="float32"),
        Workload("small", 3, 5, 40, 4, 1, 32, page_size=16, dtype="float32", prefixes=(3, 40, 77), q_lens=(5, 1, 4)),
    ]


SETS: dict[str, Callable[[], list[Workload]]] = {
    "gqa": _gqa,
    "mla": _mla,
    "fp8": _fp8,
    "kimi": _kimi,
    "small": _small,
    "ragged": _ragged,
    "pages": _pages,
    "shapes": _shapes,
    "step": lambda: [
        Workload("step", 64, 65, 2048),
        Workload("step", 8, 17, 4096),
        Workload("step", 64, 17, 4096),
    ],
}


def load_workloads(names: list[str], file: str | Path | None = None, **overrides: Any) -> list[Workload]:
    """Workloads of named sets and of a file, with fields replaced where `overrides` has a value.

    Raises
    ------
    ValueError
        For a set that does not exist, or what :func:`.own.read_workloads` says of the file.
    """
    from .own import read_workloads

    rows: list[Workload] = []
    for name in names:
        if name not in SETS:
            raise ValueError(f"no workload set {name!r}; there are {', '.join(SETS)}")
        rows += SETS[name]()
    if file is not None:
        rows += read_workloads(file)
    changed = {key: value for key, value in overrides.items() if value is not None}
    if LARGEST_PAGE % changed.get("page_size", 1):
        raise ValueError(f"page_size must divide {LARGEST_PAGE}, got {changed['page_size']}")
    return [dataclasses.replace(row, **changed) for row in rows]
