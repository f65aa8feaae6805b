"""Which of the Hopper kernels a geometry takes: a pure function, tested, never tuned in serving."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..config import KernelConfig
from ..geometry import Geometry

ARCH = 90
HEAD_DIMS = (64, 128, 256)
WIDE = 256
"""Head dim whose sums, 128 registers a thread, leave room for two consumers and one block an SM."""
MLA_DIMS = (576, 512)
"""Of latent rows: of K, and of V in it."""
MLA_WARPS = 16
MERGE_BLOCKS = 16
"""Of the merge of MLA, for each program of the plan (csrc/mla_merge.cuh)."""
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
FP8_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
FP8_ROWS = (40, 72)
"""Rows of the row tiles of the kernels that widen an FP8 cache in the registers of one consumer."""
KEYS = 64
WINDOW, CAP = 1, 2
"""Options that have kernels of their own, as bits (``OPTION_*`` of csrc/ring.cuh)."""
SUFFIXES = {0: "", WINDOW: "_window", WINDOW + CAP: "_capped"}
"""Of the names of kernels and source files, by their options."""


class Variant(NamedTuple):
    """What a kernel is compiled for; its name in ``csrc``.

    Attributes
    ----------
    dtype : {"bf16", "fp16"}
    head_dim : int
    consumers : int
        Warpgroups of 64 packed rows.
    keys : int
        Keys of a KV tile.
    options : int
        Sum of `WINDOW` and `CAP`: the kernels with a cap take a window too. Those of `FP8_ROWS` take both.
    cached : {"", "e4m3", "e5m2"}
        Format of an FP8 cache.
    rows : int
        Of a consumer: 64, or one of `FP8_ROWS` for FP8 caches.
    fresh : bool
        Of the wide kernels for FP8 caches, one whose products are in bf16, as fresh rows are.
    merges : bool
        The merge of MLA, whatever its cache.
    """

    dtype: str
    head_dim: int
    consumers: int
    keys: int
    options: int = 0
    cached: str = ""
    rows: int = 64
    fresh: bool = False
    merges: bool = False

    @property
    def name(self) -> str:
        """Of the kernel's function."""
        if self.merges:
            return f"mla_merge_sm90_{self.dtype}"
        if self.is_mla:
            return f"mla_fp8_sm90_{self.dtype}_{self.cached}" if self.cached else f"mla_sm90_{self.dtype}"
        if self.rows in FP8_ROWS:
            return f"fp8_sm90_{self.dtype}_{self.cached}_d{self.head_dim}_r{self.rows}"
        kind, numbers = ("fp8_wide", f"{self.dtype}_{self.cached}") if self.cached else ("attention", self.dtype)
        shape = f"d{self.head_dim}_c{self.consumers}_n{self.keys}{SUFFIXES[self.options]}"
        return f"{kind}_sm90_{numbers}_{shape}" + "_fresh" * self.fresh

    @property
    def source(self) -> str:
        """The file of ``csrc`` that has it."""
        if self.merges:
            return "mla_merge_sm90.cu"
        suffix = "_e5m2" if self.cached == "e5m2" else ""
        if self.is_mla:
            return f"mla_fp8_sm90{suffix}.cu" if self.cached else "mla_sm90.cu"
        if self.rows in FP8_ROWS:
            return f"fp8_sm90_d{self.head_dim}{suffix}.cu"
        kind = "fp8_wide" if self.cached else "attention"
        return f"{kind}_sm90_d{self.head_dim}{SUFFIXES[self.options]}{suffix}.cu"

    @property
    def is_mla(self) -> bool:
        """V is a part of K."""
        return self.head_dim == MLA_DIMS[0]


def consumers_for(rows: int, head_dim: int = 128) -> int:
    """Consumer warpgroups of a block for `rows` packed rows of a request and KV head.

    The fewest 64-row products in all, then the fewest reads of K and V, then the smaller block: 64 rows take one, 68
    two, 136 three; 260 take two tiles on three, 512 four tiles on two. At head dim 256, which has two at most, the
    fewest reads come first: from L2 the 64 KB of a tile take about 2,500 clocks, the products of 64 rows 1,024.
    """
    if head_dim == WIDE:
        return 1 if rows <= 64 else 2

    def cost(consumers: int) -> tuple[int, int, int]:
        tiles = -(-rows // (64 * consumers))
        return tiles * -(-rows // (64 * tiles)), tiles, consumers

    return 1 if rows <= 64 else min((2, 3), key=cost)


def fp8_tile_rows(rows: int) -> int:
    """Rows of a row tile of the kernels for FP8 caches, for `rows` packed rows of a request and KV head.

    One tile of `FP8_ROWS` if it holds them: their warpgroup widens K and V for itself. Else the tiles of 64-row
    warpgroups that a cache of 16 bits takes (`consumers_for`), whose producer widens K and V once for all: two
    warpgroups that each did it for 72 rows took 1.23 to 1.35 times as long as with 16 bits (docs/performance.md).
    """
    return next((tile for tile in FP8_ROWS if rows <= tile), 64 * consumers_for(rows))


def cuda_config(geometry: Geometry, max_q_len: int) -> KernelConfig:
    """Tiles of a group of layers, in the terms of the plan."""
    if geometry.shared_kv:
        reason = "64 rows, whose sums are half of the registers"
        return KernelConfig(64, KEYS, geometry.head_dim, MLA_WARPS, 2, 1, 2, reason)
    if geometry.kv_dtype in FP8_NAMES:
        tile = fp8_tile_rows(geometry.group * max_q_len)
        consumers, blocks = (1, 2) if tile in FP8_ROWS else (tile // 64, 1)
        reason = f"FP8: {consumers} consumer(s) of {tile // consumers} rows"
        return KernelConfig(tile, KEYS, geometry.head_dim, 4 * (consumers + 1), 4, blocks, 2, reason)
    return consumer_config(consumers_for(geometry.group * max_q_len, geometry.head_dim), geometry.head_dim)


def consumer_config(consumers: int, head_dim: int) -> KernelConfig:
    """Tiles of the kernels for caches of 16 bits that have so many consumer warpgroups."""
    blocks = 2 if consumers == 1 and head_dim != WIDE else 1
    reason = {
        1: f"one 64-row warpgroup, {blocks} block(s) an SM",
        2: "two 64-row warpgroups on the same K and V",
        3: "three 64-row warpgroups on the same K and V",
    }[consumers]
    return KernelConfig(64 * consumers, KEYS, head_dim, 4 * (consumers + 1), 6, blocks, 2, reason)


def variant_of(
    geometry: Geometry, config: KernelConfig, capped: bool = False, fresh: bool | None = None
) -> Variant:  # fmt: skip
    """The kernel that a configuration stands for, for calls with a soft cap or without, with fresh rows or without.

    `fresh` is what the geometry says by default; a call may bring fresh rows though the geometry has none.
    """
    if geometry.shared_kv:
        cached = FP8_NAMES.get(geometry.kv_dtype, "")
        return Variant(DTYPE_NAMES[geometry.dtype], geometry.head_dim, 1, config.block_n, cached=cached)
    dtype, cached = DTYPE_NAMES[geometry.dtype], FP8_NAMES.get(geometry.kv_dtype, "")
    if cached and config.block_m in FP8_ROWS:
        return Variant(dtype, geometry.head_dim, 1, config.block_n, cached=cached, rows=config.block_m)
    options = WINDOW + CAP if capped else WINDOW if geometry.window_left >= 0 else 0
    if config.block_m % 64 != 0:
        tiles = f"{', '.join(map(str, FP8_ROWS))} or a multiple of 64" if cached else "a multiple of 64"
        raise NotImplementedError(
            f"backend 'cuda' has row tiles of {tiles} rows here, got {config.block_m}; backend='triton' takes any tile"
        )
    fresh = (geometry.fresh_tree if fresh is None else fresh) and bool(cached) and geometry.dtype == torch.bfloat16
    return Variant(dtype, geometry.head_dim, config.block_m // 64, config.block_n, options, cached, fresh=fresh)


def merge_of(geometry: Geometry) -> Variant | None:
    """The kernel that merges a geometry's partials in a launch of its own, where csrc has one."""
    if not geometry.shared_kv or geometry.batch_invariant:
        return None
    return Variant(DTYPE_NAMES[geometry.dtype], geometry.head_dim, 1, KEYS, merges=True)
