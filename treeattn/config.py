"""Which tiles the Triton kernels use: a pure function of chip and geometry, tested, never tuned in serving."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .geometry import Geometry

KIB = 1024

SHARED_PER_SM: dict[int, int] = {
    80: 164 * KIB,
    86: 100 * KIB,
    89: 100 * KIB,
    90: 228 * KIB,
    100: 228 * KIB,
    103: 228 * KIB,
    120: 100 * KIB,
}
"""Shared memory of a multiprocessor, by compute capability (CUDA programming guide)."""

SHARED_RESERVED = 1 * KIB
"""What the system takes of it for each block that runs there."""

EDGE_KEYS = 32
"""Keys of an edge tile: one 32-bit mask word a row, and half the registers of a full tile."""

INVARIANT_KEYS = 2048
"""Keys of a split in batch-invariant mode: one request of 128k and 8 KV heads then has 512 splits for 264 programs."""

MOST_REGISTERS = 255
"""Of a thread. Named, it keeps ptxas from aiming at a third program an SM and spilling for that (72 bytes)."""


@dataclass(frozen=True)
class KernelConfig:
    """Tile sizes and launch shape of ``attention_kernel`` and ``finish_kernel``.

    Attributes
    ----------
    block_m : int
        Packed query rows of a row tile.
    block_n : int
        Keys of a KV tile, the unit in which the plan counts.
    block_d : int
        Dims of K, padded to a power of two; those behind a shared V are padded apart.
    num_warps, num_stages : int
        Warps a program; depth of the software pipeline over KV tiles.
    programs_per_sm : int
        Programs that fit on a multiprocessor at once; the plan deals work to ``SMs * programs_per_sm`` of them.
    min_share : int
        Fewest KV tiles worth a program of its own (a partial costs its write and its merge).
    reason : str
        Why, with the measurement.
    max_registers : int
        Registers of a thread that the compiler may use, 0 for as many as it likes.
    """

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_share: int
    reason: str
    max_registers: int = 0

    @property
    def split_tiles(self) -> int:
        """KV tiles of a split in batch-invariant mode."""
        return max(INVARIANT_KEYS // self.block_n, 1)


SWIZZLE_ROWS = 8
"""Rows of 128 bytes that are the period of the swizzle in which csrc keeps K and V."""


def box_rows(page_size: int, keys: int) -> int:
    """Slots of a page that a tensor copy of csrc brings at once, of tiles of so many keys; 0 where there is none.

    >>> box_rows(16, 64), box_rows(48, 64), box_rows(256, 64), box_rows(1, 64)
    (16, 16, 64, 0)
    """
    rows = math.gcd(page_size, keys)
    return rows if rows >= SWIZZLE_ROWS else 0


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def known_chip(arch: int) -> int:
    """Compute capability whose configurations a chip takes: its own, or the newest known one that is older.

    Raises
    ------
    NotImplementedError
        For chips older than compute capability 8.0.
    """
    older = [chip for chip in SHARED_PER_SM if chip <= arch]
    if not older:
        raise NotImplementedError(f"Triton kernels need compute capability 8.0, got {arch / 10}; backend='torch' can")
    return max(older)


def shared_bytes(
    chip: int, dtype: torch.dtype, rows: int, block_n: int, block_d: int, num_stages: int, tiles: int = 2
) -> int:
    """Shared memory that ``attention_kernel`` takes of a block, at most (compile tests see what it really takes).

    q, the pipeline's K and V tiles, and 1 KiB for barriers and padding. Where the matrix unit reads shared memory
    by itself (wgmma, tcgen05: 16-bit types and 64 rows or more on sm_90, 100 and 103), a tile is in use while
    ``num_stages - 1`` more arrive. mma.sync and the CUDA cores take a tile to registers first, so its buffer is free
    again; there the weights also pass through shared memory, ``rows * block_n``. `tiles` is 1 where V is in K's tile.
    """
    item = dtype.itemsize
    in_place = chip in (90, 100, 103) and item == 2 and rows >= 64
    buffers = num_stages if in_place else max(num_stages - 1, 1)
    weights = 0 if in_place else rows * block_n
    return (rows * block_d + buffers * tiles * block_n * block_d + weights) * item + KIB


def fits(chip: int, shared: int, programs: int = 1) -> bool:
    """Whether `programs` blocks of `shared` bytes run on one multiprocessor at once."""
    return programs * (shared + SHARED_RESERVED) <= SHARED_PER_SM[chip]


def deepest_pipeline(
    chip: int,
    dtype: torch.dtype,
    block_m: int,
    block_d: int,
    programs: int,
    choices: Iterable[tuple[int, int]],
    tiles: int = 2,
) -> tuple[int, int, int]:
    """``block_n, num_stages, programs_per_sm``: the first of `choices` that fits, with fewer programs if it must be.

    Parameters
    ----------
    choices : iterable of (int, int)
        ``block_n`` and ``num_stages``, best first; the last must fit alone on every chip.
    """
    choices = tuple(choices)
    for count in range(programs, 0, -1):
        for block_n, stages in choices:
            if fits(chip, shared_bytes(chip, dtype, block_m, block_n, block_d, stages, tiles), count):
                return block_n, stages, count
    raise RuntimeError(f"no pipeline of {choices} fits {block_m} rows of {block_d} on sm_{chip}")


def select_config(
    arch: int,
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    max_q_len: int,
    *,
    head_dim_v: int | None = None,
    shared_kv: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> KernelConfig:
    """Kernel configuration of a geometry.

    Parameters
    ----------
    arch : int
        Compute capability times ten (90 for an H200), 0 for the interpreter. A chip that is not in
        :data:`SHARED_PER_SM` takes the configurations of the newest one before it.
    dtype : torch.dtype
        Of q, K and V.
    group : int
        Query heads of a KV head.
    head_dim : int
        Of q and K.
    max_q_len : int
        Declared maximum of query rows of a request.
    head_dim_v : int, optional
        Of V, `head_dim` by default.
    shared_kv : bool
        V is the first `head_dim_v` numbers of K.
    kv_dtype : torch.dtype, optional
        Of the caches, `dtype` by default.

    Raises
    ------
    NotImplementedError
        For chips older than compute capability 8.0.
    """
    rows = group * max_q_len
    dim_v = head_dim if head_dim_v is None else head_dim_v
    block_d = max(16, next_power_of_2(max(head_dim, dim_v)))
    if shared_kv:
        rest = head_dim - dim_v
        block_d = max(16, next_power_of_2(dim_v)) + (max(16, next_power_of_2(rest)) if rest else 0)
    if arch == 0:
        return KernelConfig(16 if rows <= 40 else 32, 16, block_d, 4, 1, 1, 1, "interpreter: small tiles cost least")
    chip = known_chip(arch)
    if shared_kv:
        return _shared_kv(chip, dtype, block_d)
    if dtype == torch.float32:
        return _float32(chip, block_d)
    if rows <= 16:
        return _few_rows(chip, dtype, block_d)
    if chip == 90:
        return _hopper(block_d)
    return _many_rows(chip, dtype, rows, block_d, fp8=kv_dtype not in (None, dtype))


def group_config(arch: int, geometry: Geometry, max_q_len: int) -> KernelConfig:
    """:func:`select_config` for a group of layers."""
    return select_config(
        arch, geometry.dtype, geometry.group, geometry.head_dim, max_q_len, head_dim_v=geometry.head_dim_v,
        shared_kv=geometry.shared_kv, kv_dtype=geometry.kv_dtype,
    )  # fmt: skip


def _hopper(block_d: int) -> KernelConfig:
    """More than 16 rows of a 16-bit type on sm_90; measured on an H200 in bfloat16, head_dim 128, pages of 64."""
    if block_d > 128:
        # Two warpgroups share the accumulator of 64 rows. Not measured.
        return KernelConfig(64, 32, block_d, 8, 4, 1, 2, "64 rows of up to 256 on two warpgroups")
    # 27 rows of the benchmark against FlashAttention-3's chain: 0.99x; tiles of 128 rows on eight warps 1.12x, though
    # they read K and V half as often: a second program fills the gaps that one leaves in the matrix unit. At batch 64,
    # q_len 8, 32/8 heads, prefix 2048, two stages take 174 us where three take 160, and four with 32 keys the same.
    reason = "64-row warpgroup tiles, two programs (128 rows 12 % slower)"
    return KernelConfig(64, 64, block_d, 4, 3, 2, 2, reason)


def _shared_kv(chip: int, dtype: torch.dtype, block_d: int) -> KernelConfig:
    """K and V in one latent row (MLA); measured on an H200 only, elsewhere chosen to fit and not to spill."""
    if dtype == torch.float32:
        return KernelConfig(16, 16, block_d, 8, 1, 1, 2, "true float32 products on the CUDA cores, latent rows")
    # The accumulator of 64 rows of 512 is half of the registers; tcgen05 would hold V twice (344 KiB). 32 keys leave
    # room for three tiles in flight, but q is read from shared memory once for each tile: 5 to 25 % slower.
    block_m, choices = (64, ((64, 2), (32, 2))) if chip == 90 else (32 if chip in (80, 100, 103) else 16, ((32, 2),))
    block_n, stages, programs = deepest_pipeline(chip, dtype, block_m, block_d, 1, choices, tiles=1)
    return KernelConfig(block_m, block_n, block_d, 8, stages, programs, 2, "latent rows read once for K and V")


def _few_rows(chip: int, dtype: torch.dtype, block_d: int) -> KernelConfig:
    """Up to 16 rows: mma.sync on every chip, memory-bound, so as many bytes in flight as two programs can have."""
    # 32 keys at 256: K and V are 32 KiB a stage, as 64 keys at 128
    keys = 64 if block_d <= 128 else 32
    block_n, stages, programs = deepest_pipeline(chip, dtype, 16, block_d, 2, ((keys, 4), (keys, 3), (keys, 2)))
    reason = "one 16-row tile, memory-bound"
    return KernelConfig(16, block_n, block_d, 4, stages, programs, 2, reason, MOST_REGISTERS)


def _many_rows(chip: int, dtype: torch.dtype, rows: int, block_d: int, fp8: bool) -> KernelConfig:
    """More than 16 rows of a 16-bit type on chips other than sm_90; chosen to fit and not to spill, not measured."""
    # 64 keys spill on sm_100 and 103 (80 bytes with 128 rows of 128), and everywhere if they come as FP8 (1656 bytes),
    # and do not fit twice on chips of 100 KiB
    wide = () if chip in (100, 103) or fp8 else ((64, 3), (64, 2))
    choices = (*wide, (32, 4), (32, 3), (32, 2))
    if block_d > 128:
        # four warps spill with an accumulator of 64 rows (1216 bytes), eight with one of 128 (772)
        block_m, warps, programs, choices, reason = 64, 8, 1, ((32, 2),), "64 rows of up to 256 on eight warps"
    elif rows <= 64:
        block_m, warps, programs, reason = 64, 4, 2, "one 64-row tile"
    else:
        # eight warps of 255 registers are all that a multiprocessor has
        block_m, warps, programs, reason = 128, 8, 1, "128-row tiles"
    block_n, stages, programs = deepest_pipeline(chip, dtype, block_m, block_d, programs, choices)
    return KernelConfig(block_m, block_n, block_d, warps, stages, programs, 2, reason, MOST_REGISTERS)


def _float32(chip: int, block_d: int) -> KernelConfig:
    """True float32 products run on the CUDA cores; one stage, as a pipeline's loads spill there (884 bytes at 128)."""
    # 32 rows of 256 spill, and two programs of that width are more than a multiprocessor's registers
    block_m, most = (32, 2) if block_d <= 128 else (16, 1)
    warps = 4 if block_d <= 64 else 8
    block_n, stages, programs = deepest_pipeline(chip, torch.float32, block_m, block_d, most, ((32, 1),))
    reason = "true float32 products on the CUDA cores"
    return KernelConfig(block_m, block_n, block_d, warps, stages, programs, 2, reason)
