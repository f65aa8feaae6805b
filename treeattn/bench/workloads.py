"""Named workloads: the shapes that a benchmark runs, and their floor.

A set is a list of `Workload`; `SETS` names them, and `load_workloads` reads your own from a JSON file (a list of
objects with the fields of `Workload`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .targets import GQA_TARGETS

__all__ = ["SETS", "Workload", "load_workloads"]

COPY_BYTES_PER_S = 4.28e12
"""Measured on an H200 with a device-to-device copy, reads and writes counted."""
BF16_FLOP_PER_S = 780e12
"""Measured on an H200 with a bf16 matrix product."""


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
    def element_bytes(self) -> int:
        """Bytes of a number of K, V, q and out."""
        return 4 if self.dtype == "float32" else 2

    @property
    def kv_bytes(self) -> int:
        """K and V of prefix and nodes, once."""
        keys = sum(p + n for p, n in zip(self.all_prefixes, self.all_nodes, strict=True))
        return 2 * keys * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def bytes(self) -> int:
        """The fewest bytes a call moves: K and V of prefix and nodes, q and out, once each."""
        return self.kv_bytes + 2 * sum(self.all_nodes) * self.qo_heads * self.head_dim * self.element_bytes

    @property
    def flop(self) -> int:
        """``4 * heads * rows * keys * head_dim`` over the requests."""
        pairs = sum(n * (p + n) for p, n in zip(self.all_prefixes, self.all_nodes, strict=True))
        return 4 * self.qo_heads * self.head_dim * pairs

    @property
    def floor_us(self) -> float:
        """No call can be faster on an H200 in 16 bits."""
        return 1e6 * max(self.bytes / COPY_BYTES_PER_S, self.flop / BF16_FLOP_PER_S)

    def name(self) -> str:
        """The shape in a few characters."""
        text = f"{self.kind} b{self.batch} q{self.q_len} p{self.prefix} {self.qo_heads}/{self.kv_heads}"
        return text + ("" if self.head_dim == 128 else f" d{self.head_dim}")


def _gqa() -> list[Workload]:
    return [Workload("gqa", t.batch, t.q_len, t.prefix, t.qo_heads, t.kv_heads) for t in GQA_TARGETS]


def _ragged() -> list[Workload]:
    rng = random.Random(0)
    prefixes = tuple(int(2 ** rng.uniform(math.log2(512), 16)) for _ in range(32))
    mixed = tuple(rng.randint(1, 65) for _ in range(32))
    mean = sum(prefixes) // 32
    rows = []
    for heads in ((32, 8), (8, 1)):
        rows += [
            Workload("ragged", 32, 17, mean, *heads, prefixes=prefixes),
            Workload("ragged-uniform", 32, 17, mean, *heads),
            Workload("ragged-mixed", 32, max(mixed), mean, *heads, prefixes=prefixes, q_lens=mixed),
        ]
    return rows


def _pages() -> list[Workload]:
    base = [(1, 17, 16384, 32, 8), (8, 17, 4096, 32, 8), (8, 65, 8192, 32, 8)]
    kinds = [(1, "NHD"), (16, "NHD"), (64, "NHD"), (128, "NHD"), (64, "HND")]
    return [Workload("pages", *shape, page_size=page, kv_layout=layout) for shape in base for page, layout in kinds]


def _shapes() -> list[Workload]:
    rows = [Workload("shapes", 8, q, 4096) for q in (1, 4, 33, 129)]
    rows += [Workload("shapes", 8, 17, 4096, group * 4, 4) for group in (5, 6, 12)]
    rows += [Workload("shapes", 8, 17, 4096, head_dim=dim) for dim in (64, 256)]
    rows += [Workload("shapes", 8, 17, 4096), Workload("padded", 8, 34, 4096, nodes=17)]
    return rows


def _small() -> list[Workload]:
    return [
        Workload("small", 2, 9, 100, 4, 2, 64, page_size=16, dtype="float32"),
        Workload("small", 1, 17, 64, 8, 2, 64, page_size=1, dtype="float32"),
        Workload("small", 3, 5, 40, 4, 1, 32, page_size=16, dtype="float32", prefixes=(3, 40, 77), q_lens=(5, 1, 4)),
    ]


SETS: dict[str, Callable[[], list[Workload]]] = {
    "gqa": _gqa,
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
    """Workloads of named sets and of a JSON file, with fields replaced where `overrides` has a value.

    Raises
    ------
    ValueError
        For a set that does not exist or a field that a workload does not have.
    """
    rows: list[Workload] = []
    for name in names:
        if name not in SETS:
            raise ValueError(f"no workload set {name!r}; there are {', '.join(SETS)}")
        rows += SETS[name]()
    if file is not None:
        known = {field.name for field in dataclasses.fields(Workload)}
        for index, entry in enumerate(json.loads(Path(file).read_text())):
            if unknown := sorted(set(entry) - known):
                raise ValueError(
                    f"{file}, entry {index}: no field {', '.join(unknown)}; there are {', '.join(sorted(known))}"
                )
            entry = {"kind": "own", **entry}
            fixed: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
            }
            for key, value in fixed.items():
                whole = isinstance(value, (int, tuple)) and not isinstance(value, bool)
                if not (isinstance(value, str) if key in ("kind", "kv_layout", "dtype") else whole):
                    raise ValueError(f"{file}, entry {index}: {key} is {value!r}")
            if fixed.get("batch", 1) < 1 or fixed.get("q_len", 1) < 1:
                raise ValueError(f"{file}, entry {index}: batch and q_len must be at least 1")
            rows.append(Workload(**fixed))
    changed = {key: value for key, value in overrides.items() if value is not None}
    return [dataclasses.replace(row, **changed) for row in rows]
