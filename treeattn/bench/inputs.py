"""Tensors of a workload on a device: trees, shuffled pages, and as many copies of K and V as a cold L2 needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .workloads import LARGEST_PAGE, Workload

__all__ = ["Inputs", "Paged"]

COLD_BYTES = 256e6
MOST_BYTES = 48e9
"""Of all copies: with a window a call reads so little of a copy that cold ones would not fit."""
FP8_SCALES = 0.24, 0.27
"""Of K and V: no powers of two, so that a scale applied twice or not at all shows."""


@dataclass(frozen=True)
class Paged:
    """K and V copies under one page size: `k[i]`, `v[i]` are caches, `table [batch, width]` the shuffled pages.

    Where V is a part of K, `v[i]` is a view of `k[i]`.
    """

    k: list[Tensor]
    v: list[Tensor]
    table: Tensor
    page_size: int
    kv_layout: str

    def slots(self, request: int, positions: Tensor) -> Tensor:
        """int64 token slots (page times page size plus offset) of some positions of a request."""
        return self.table[request, positions // self.page_size].long() * self.page_size + positions % self.page_size


class Inputs:
    """Random tensors of a workload.

    Parameters
    ----------
    workload : Workload
    device : torch.device
    cold_bytes : float
        K and V copies rotate over at least this much memory, so that a call finds nothing of its own in L2.

    Attributes
    ----------
    q : Tensor
        `[total_q, qo_heads, head_dim]`.
    pool_k, pool_v : Tensor
        `[copies, slots, kv_heads, head_dim]` and `head_dim_v`; `pool_v` is a view of `pool_k` with ``shared_kv``.
    k_scale, v_scale : Tensor or None
        float32 `[1]`, for FP8 caches; with ``shared_kv`` both are the one of K.
    sm_scale : float
        ``head_dim ** -0.5``, for MLA too: the scores of random inputs then have a variance of 1.
    """

    def __init__(self, workload: Workload, device: torch.device, cold_bytes: float = COLD_BYTES, seed: int = 0) -> None:
        self.workload, self.device = workload, device
        self.dtype: torch.dtype = getattr(torch, workload.dtype)
        self.kv_dtype: torch.dtype = getattr(torch, workload.cache_dtype)
        self.sm_scale = workload.head_dim**-0.5
        self.generator = torch.Generator(device).manual_seed(seed)
        work = workload
        self.prefix_lens = torch.tensor(work.all_prefixes, dtype=torch.int32, device=device)
        starts = [0]
        for q_len in work.all_q_lens:
            starts.append(starts[-1] + q_len)
        self.starts = starts
        self.qo_indptr = torch.tensor(starts, dtype=torch.int32, device=device)
        self.num_nodes = torch.tensor(work.all_nodes, dtype=torch.int32, device=device)
        self.parents = self._trees()
        self.q = self._normal(work.total_q, work.qo_heads, work.head_dim)
        self.lengths = [p + q for p, q in zip(work.all_prefixes, work.all_q_lens, strict=True)]
        self.blocks = [-(-length // LARGEST_PAGE) for length in self.lengths]
        slots = sum(self.blocks) * LARGEST_PAGE
        numbers = work.head_dim if work.shared_kv else work.head_dim + work.dim_v
        most = int(MOST_BYTES / max(slots * work.kv_heads * numbers * self.kv_dtype.itemsize, 1))
        self.copies = max(1, min(math.ceil(cold_bytes / max(work.kv_bytes, 1)), most))
        self.k_scale = self.v_scale = None
        if work.fp8:
            self.k_scale, self.v_scale = (torch.full((1,), scale, device=device) for scale in FP8_SCALES)
        self.pool_k = self._cache(slots, work.head_dim)
        if work.shared_kv:
            self.pool_v, self.v_scale = self.pool_k[..., : work.dim_v], self.k_scale
        else:
            self.pool_v = self._cache(slots, work.dim_v)

    def _normal(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(generator=self.generator)

    def _cache(self, slots: int, dim: int) -> Tensor:
        """`[copies, slots, kv_heads, dim]`; FP8 with a deviation of 4, well inside what either format holds."""
        shape = (slots, self.workload.kv_heads, dim)
        if not self.workload.fp8:
            return self._normal(self.copies, *shape)
        pool = torch.empty((self.copies, *shape), dtype=self.kv_dtype, device=self.device)
        for copy in pool:
            copy.copy_(self._normal(*shape).mul_(4))
        return pool

    def _trees(self) -> Tensor:
        """Flat `[total_q]`; each node's parent is among the 8 before it."""
        rows = torch.cat([torch.arange(q, device=self.device) for q in self.workload.all_q_lens])
        back = (torch.rand(len(rows), generator=self.generator, device=self.device) * rows.clamp(max=8)).long() + 1
        return (rows - back).clamp(min=-1).to(torch.int32)

    @property
    def uniform(self) -> bool:
        """Whether every request has the same number of rows."""
        return self.workload.q_lens is None

    def layout_args(self) -> dict[str, Any]:
        """Arguments of `TreeLayout.from_parents` and `StaticBuffers.update_`."""
        args: dict[str, Any] = {"prefix_lens": self.prefix_lens}
        if self.workload.nodes is not None:
            args["num_nodes"] = self.num_nodes
        if self.uniform:
            return {**args, "parents": self.parents.reshape(self.workload.batch, self.workload.q_len)}
        return {**args, "parents": self.parents, "qo_indptr": self.qo_indptr}

    def paged(self, page_size: int, kv_layout: str = "NHD") -> Paged:
        """The same memory as pages of another size and order (its content is random anyway), pages shuffled."""
        work = self.workload
        if LARGEST_PAGE % page_size:
            raise ValueError(f"page_size must divide {LARGEST_PAGE}, got {page_size}")
        pages = self.pool_k.shape[1] // page_size
        order = torch.randperm(pages, generator=self.generator, device=self.device).to(torch.int32)
        width = max(self.blocks, default=1) * LARGEST_PAGE // page_size
        table = torch.zeros(work.batch, width, dtype=torch.int32, device=self.device)
        first = 0
        for request, blocks in enumerate(self.blocks):
            count = blocks * LARGEST_PAGE // page_size
            table[request, :count] = order[first : first + count]
            first += count
        axes = (work.kv_heads, page_size) if kv_layout == "HND" else (page_size, work.kv_heads)
        shape = (pages, *axes, work.head_dim)
        k = [copy.view(shape) for copy in self.pool_k]
        if work.shared_kv:
            v = [copy[..., : work.dim_v] for copy in k]
        else:
            v = [copy.view(*shape[:-1], work.dim_v) for copy in self.pool_v]
        return Paged(k, v, table, page_size, kv_layout)

    def tree_rows(self, request: int) -> Tensor:
        """Bool `[q_len, q_len]` on the device: ancestors or self, real rows only."""
        start, stop = self.starts[request], self.starts[request + 1]
        parents = self.parents[start:stop].tolist()
        count = self.workload.all_nodes[request]
        seen = torch.zeros(stop - start, stop - start, dtype=torch.bool)
        for row in range(count):
            if parents[row] >= 0:
                seen[row] = seen[parents[row]]
            seen[row, row] = True
        return seen.to(self.device)

    def visible(self, request: int, mask: str = "tree") -> Tensor:
        """Bool `[q_len, prefix + q_len]`: what each row sees under the mask "tree" or "causal", window included."""
        prefix, q_len = self.workload.all_prefixes[request], self.workload.all_q_lens[request]
        if mask == "causal":
            own = torch.ones(q_len, q_len, dtype=torch.bool, device=self.device).tril()
        else:
            own = self.tree_rows(request)
        seen = torch.cat([torch.ones(q_len, prefix, dtype=torch.bool, device=self.device), own], dim=1)
        if self.workload.window_left >= 0:
            positions = prefix + own.sum(dim=1) - 1
            keys = torch.cat([torch.arange(prefix, device=self.device), positions])
            seen &= keys >= positions[:, None] - self.workload.window_left
        return seen
