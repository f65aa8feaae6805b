"""Tensors of a workload on a device: trees, shuffled pages, and as many copies of K and V as a cold L2 needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .workloads import Workload

__all__ = ["Inputs", "Paged"]

LARGEST_PAGE = 128
COLD_BYTES = 256e6


@dataclass(frozen=True)
class Paged:
    """K and V copies under one page size: `k[i]`, `v[i]` are caches, `table [batch, width]` the shuffled pages."""

    k: list[Tensor]
    v: list[Tensor]
    table: Tensor
    page_size: int
    kv_layout: str


class Inputs:
    """Random tensors of a workload.

    Parameters
    ----------
    workload : Workload
    device : torch.device
    cold_bytes : float
        K and V copies rotate over at least this much memory, so that a call finds nothing of its own in L2.
    """

    def __init__(self, workload: Workload, device: torch.device, cold_bytes: float = COLD_BYTES, seed: int = 0) -> None:
        self.workload, self.device = workload, device
        self.dtype: torch.dtype = getattr(torch, workload.dtype)
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
        self.copies = max(1, math.ceil(cold_bytes / max(work.kv_bytes, 1)))
        slots = sum(self.blocks) * LARGEST_PAGE
        self.pool_k = self._normal(self.copies, slots, work.kv_heads, work.head_dim)
        self.pool_v = self._normal(self.copies, slots, work.kv_heads, work.head_dim)

    def _normal(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(generator=self.generator)

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
        caches = [[copy.view(shape) for copy in pool] for pool in (self.pool_k, self.pool_v)]
        return Paged(caches[0], caches[1], table, page_size, kv_layout)

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
