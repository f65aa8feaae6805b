"""Which tiles the Triton kernels use: a pure function of chip and geometry, tested and measured, never tuned in serving."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KernelConfig:
    """Tile sizes and launch shape of ``attention_kernel`` and ``finish_kernel``.

    Attributes
    ----------
    block_m, block_r : int
        Packed query rows of a row tile: ``block_m`` on the main matrix instruction, ``block_r`` more on the same K/V.
    few_r : bool
        The ``block_r`` rows are computed transposed (their cost is their number, not a 64-row tile).
    block_n : int
        Keys of a KV tile, the unit in which the plan counts.
    block_d : int
        Head dim, padded to a power of two.
    num_warps, num_stages : int
        Warps a program; depth of the software pipeline over KV tiles.
    programs_per_sm : int
        Programs that fit on a multiprocessor at once; the plan deals work to ``SMs * programs_per_sm`` of them.
    min_share : int
        Fewest KV tiles worth a program of its own (a partial costs its write and its merge).
    reason : str
        Why, with the measurement.
    """

    block_m: int
    block_r: int
    few_r: bool
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_share: int
    reason: str

    @property
    def tile_rows(self) -> int:
        """Rows of a whole row tile."""
        return self.block_m + self.block_r


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def select_config(arch: int, dtype: torch.dtype, group: int, head_dim: int, max_q_len: int) -> KernelConfig:
    """Kernel configuration of a geometry.

    Parameters
    ----------
    arch : int
        Compute capability times ten (90 for an H200), 0 for the interpreter.
    dtype : torch.dtype
        Of q, K and V.
    group : int
        Query heads of a KV head.
    head_dim : int
        16 to 256.
    max_q_len : int
        Declared maximum of query rows of a request.
    """
    rows = group * max_q_len
    block_d = max(16, next_power_of_2(head_dim))
    if arch == 0:
        few = 16 if rows % 32 else 0
        return KernelConfig(16 if rows <= 40 else 32, few, few > 0, 16, block_d, 4, 1, 1, 1, "interpreter")
    if dtype == torch.float32:
        return KernelConfig(16, 0, False, 32, block_d, 4, 2, 2, 2, "true float32 products run on the CUDA cores")
    if rows <= 16:
        return KernelConfig(16, 0, False, 64, block_d, 4, 4, 2, 2, "one small tile")
    if rows <= 80:
        few = 0 if rows <= 64 else 16
        return KernelConfig(64, few, few > 0, 64, block_d, 4, 4, 2, 2, "one 64-row tile")
    few = 0 if rows % 128 == 0 else 16
    return KernelConfig(128, few, few > 0, 64, block_d, 8, 4, 1, 2, "128-row tiles")
