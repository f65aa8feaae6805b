"""One verify step on a GPU called again and again: which rows are unlike those of the first call.

    python tests/repeated_calls.py --heads 64 --kv-heads 1 --dim 576 --seconds 10

As a program it ends with status 1 if there were any: several at a time make the GPU switch between processes in the
middle of a kernel, behind which caches are cold and what a block does takes other times than alone.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

import treeattn

MLA_DIM, MLA_DIM_V = 576, 512


class RepeatedCalls:
    """A batch of chains on shuffled pages, through the kernels of csrc.

    Attributes
    ----------
    calls, unlike : int
        So far.
    where : list of (row, head, times, times NaN)
        The first rows that were unlike.
    """

    def __init__(self, heads: tuple[int, int], dim: int, kv_dtype: torch.dtype, prefix: int = 5000) -> None:
        batch, q_len = 4, 8 if heads == (8, 1) and dim != MLA_DIM else 17
        self.mla = dim == MLA_DIM
        generator = torch.Generator("cuda").manual_seed(0)
        pages = -(-(prefix + q_len) // 64)
        shape = (batch * pages, 64, heads[1], dim)
        self.k, self.v = (torch.randn(shape, device="cuda", generator=generator).to(kv_dtype) for _ in range(2))
        self.q = torch.randn(batch * q_len, heads[0], dim, device="cuda", generator=generator).bfloat16()
        table = torch.randperm(batch * pages, device="cuda", generator=generator).int().view(batch, pages)
        layout = treeattn.TreeLayout.chain(torch.full((batch,), prefix, dtype=torch.int32, device="cuda"), q_len)
        latent = {"head_dim_v": MLA_DIM_V, "shared_kv": True} if self.mla else {}
        self.step = treeattn.plan(
            layout, treeattn.PagedKV(block_table=table, page_size=64), *heads, dim,
            dtype=self.q.dtype, kv_dtype=kv_dtype, backend="cuda", **latent,
        )  # fmt: skip
        self.out = self.q.new_empty(*self.q.shape[:2], MLA_DIM_V if self.mla else dim)
        self.attend()
        self.first = self.out.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.attend()
        self.differ = torch.zeros(self.q.shape[:2], dtype=torch.int32, device="cuda")
        self.missing, self.total = torch.zeros_like(self.differ), torch.zeros((), dtype=torch.int64, device="cuda")
        self.calls = 0

    def attend(self) -> None:
        """One call."""
        v = None if self.mla else self.v
        treeattn.tree_attention(self.q, self.k, v, self.step, out=self.out, sm_scale=0.07)

    def run(self, calls: int) -> None:
        """So many calls, every other one by the graph; nothing waits for the GPU."""
        for turn in range(calls):
            self.out.fill_(float("nan"))
            self.graph.replay() if turn % 2 else self.attend()
            unlike = (self.out != self.first).any(-1)
            self.differ += unlike
            self.missing += self.out.isnan().any(-1)
            self.total += unlike.any()
        self.calls += calls

    @property
    def unlike(self) -> int:
        return int(self.total)

    @property
    def where(self) -> list[tuple[int, int, int, int]]:
        places = self.differ.nonzero().tolist()[:40]
        return [(row, head, int(self.differ[row, head]), int(self.missing[row, head])) for row, head in places]

    def __str__(self) -> str:
        found = f"{self.unlike} of {self.calls} calls were unlike the first"
        return found + (f"; (row, head, times, times NaN): {self.where}" if self.unlike else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128, help=f"{MLA_DIM}: MLA")
    parser.add_argument("--kv-dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    repeated = RepeatedCalls((options.heads, options.kv_heads), options.dim, getattr(torch, options.kv_dtype))
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        repeated.run(50)
        torch.cuda.synchronize()
    print(repeated)
    return int(repeated.unlike > 0)


if __name__ == "__main__":
    sys.exit(main())
