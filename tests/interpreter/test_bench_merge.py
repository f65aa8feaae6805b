"""The merge kernel of the benchmark's cascade against `treeattn.merge`."""

from __future__ import annotations

import pytest
import torch

from treeattn.bench.peers.merge import BLOCK_H, merge_states
from treeattn.merge import merge


@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 1, 16), (3, BLOCK_H, 128), (5, BLOCK_H + 3, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_merge_kernel(
    rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    out_a, out_b = (normal(rows, heads, dim).to(dtype) for _ in range(2))
    # one lse by heads, as a packed pass gives it; large and far apart, so that a plain exp would overflow
    lse_a = (normal(heads, rows) * 90).T
    lse_b = normal(rows, heads) * 90
    lse_b[0] = lse_a[0]
    lse_a[-1, -1] = -torch.inf
    out_a[-1, -1] = torch.nan
    want, _ = merge(out_a, lse_a, out_b, lse_b)
    guarded = torch.full((rows + 1, heads, dim), 7.0, dtype=dtype, device=device)
    got = merge_states(out_a, lse_a, out_b, lse_b, guarded[:rows])
    torch.testing.assert_close(got, want, atol=1e-5 if dtype == torch.float32 else 2e-3, rtol=1e-5)
    assert bool((guarded[rows] == 7).all())
    both = torch.full_like(lse_b, -torch.inf)
    assert bool((merge_states(out_a, both, out_b, both, torch.empty_like(out_a)) == 0).all())
