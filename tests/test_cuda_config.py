"""Which Hopper kernel a geometry takes: every one that is named is in csrc, and made for the plan's numbers."""

from __future__ import annotations

import pytest
import torch

from treeattn.capabilities import CAPABILITIES
from treeattn.cuda.build import KernelShape, kernels_in
from treeattn.cuda.config import HEAD_DIMS, KEYS, consumers_for, cuda_config, variant_of
from treeattn.geometry import Geometry

CONSUMERS = {
    # rows: of head dims 64 and 128, of 256
    1: (1, 1), 32: (1, 1), 64: (1, 1), 65: (2, 2), 68: (2, 2), 128: (2, 2), 129: (3, 2), 136: (3, 2), 192: (3, 2),
    260: (3, 2), 512: (2, 2), 520: (3, 2), 1028: (3, 2), 2056: (3, 2),
}  # fmt: skip


@pytest.mark.parametrize("rows", CONSUMERS)
def test_consumers(rows: int) -> None:
    narrow, wide = CONSUMERS[rows]
    assert [consumers_for(rows, head_dim) for head_dim in (64, 128, 256)] == [narrow, narrow, wide]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_kernel_that_is_asked_for_is_there(head_dim: int) -> None:
    """With the threads and the blocks of a multiprocessor that the plan counts on."""
    seen = set()
    for rows in range(1, 600):
        for dtype in (torch.bfloat16, torch.float16):
            for window_left in (-1, 7):
                geometry = Geometry.of(1, 1, head_dim, dtype=dtype, window_left=window_left)
                config = cuda_config(geometry, rows)
                assert (config.block_n, config.block_d) == (KEYS, head_dim)
                for capped in (False, True):
                    variant = variant_of(geometry, config, capped)
                    shape = kernels_in(variant.source)[variant.name] if variant not in seen else None
                    seen.add(variant)
                    if shape is None:
                        continue
                    assert isinstance(shape, KernelShape)
                    assert shape.threads == 32 * config.num_warps
                    assert shape.blocks == config.programs_per_sm
                    assert (shape.head_dim, 64 * shape.consumers) == (head_dim, config.block_m)
    assert len(seen) == 2 * 3 * (2 if head_dim == 256 else 3)
    sources = {variant.source for variant in seen}
    assert {variant.name for variant in seen} == {name for source in sources for name in kernels_in(source)}


def test_head_dims_are_those_of_the_table() -> None:
    assert CAPABILITIES["cuda"].head_dims == HEAD_DIMS
