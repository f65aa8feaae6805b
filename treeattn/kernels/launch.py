"""Launching the Triton kernels with little host time.

Triton's own dispatch costs about 10 µs a call, most of it to find the compiled kernel again. A layer's calls repeat with
the same shapes, so :class:`Launch` keeps the compiled kernel and the arguments that stay, and passes the tensors of the
call to the driver. What Triton specialises on (divisibility of strides and of addresses by 16) is part of the key
under which callers keep a launch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from .. import backends
from ..config import next_power_of_2
from ..plan import Step
from ..status import Status
from .attention import attention_kernel, finish_kernel
from .plan import plan_kernel

PLAN_BLOCK = 16
LOG2_E = 1.4426950408889634


class Launch:
    """A compiled kernel with a fixed grid and fixed trailing arguments."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], device: torch.device, options: dict[str, Any]) -> None:
        self.kernel, self.grid, self.device, self.options = kernel, (*grid, 1, 1)[:3], device, options
        self.compiled: Any = None

    def __call__(self, *args: Any, **constants: Any) -> None:
        if self.compiled is None:
            compiled = self.kernel[self.grid](*args, **constants, **self.options)
            if not backends.interpreted():
                self.compiled = compiled
                self.constants = tuple(constants.values())
            return
        compiled = self.compiled
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        compiled.run(*self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args,
                     *self.constants)  # fmt: skip


def launch_plan(step: Step) -> None:
    """Make the plan of a step, on the current stream."""
    layout, kv, config, buffers = step.layout, step.kv, step.config, step.buffers
    csr = kv.kv_indptr is not None
    launch = step.launches.get("plan")
    if launch is None:
        grid = (triton.cdiv(step.num_programs, PLAN_BLOCK),)
        launch = step.launches["plan"] = Launch(plan_kernel, grid, layout.device, {"num_warps": 4})
    launch(
        layout.prefix_lens, layout.num_nodes, layout.qo_indptr, kv.kv_indptr if csr else layout.qo_indptr,
        layout.status, buffers.work, buffers.item_start, buffers.nodes, buffers.share,
        layout.batch, kv.table.shape[-1], step.num_programs, config.min_share,
        KV_CAPACITY_CODE=int(Status.KV_CAPACITY), WORK_CODE=int(Status.WORK),
        GROUP=step.group, KV_HEADS=step.num_kv_heads,
        TILE_ROWS=config.tile_rows, BLOCK_N=config.block_n, PAGE_SIZE=kv.page_size, CSR=csr,
        NODES_IN_TABLE=step.nodes_in_table, BLOCK_B=max(16, next_power_of_2(layout.batch)), BLOCK_P=PLAN_BLOCK,
    )  # fmt: skip


def alignment(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Whether each tensor starts at a multiple of 16 bytes, which Triton compiles in."""
    return tuple(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)


def launch_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: Step,
    *,
    k_tree: Tensor | None,
    v_tree: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    sm_scale: float,
    zero_tail: bool,
    strides: tuple[int, ...],
) -> None:
    """Run attention and its merge on the current stream; `strides` of the cache as page, slot, head of K, then of V."""
    layout, kv, config, plan = step.layout, step.kv, step.config, step.buffers
    fresh = k_tree is not None
    csr = kv.kv_indptr is not None
    key = (
        strides, q.stride(), out.stride(), lse is None or lse.stride(), None if not fresh else (k_tree.stride(), v_tree.stride()),
        alignment(q, k_cache, v_cache, k_tree, v_tree, out, lse), q.shape[0], zero_tail, sm_scale < 0,
    )  # fmt: skip
    pair = step.launches.get(key)
    if pair is None:
        pair = step.launches[key] = make_launches(step, q.shape[0])
    attention, finish, items, by_item, chunks = pair
    wide = layout.max_q_len * max(map(abs, (q.stride(0), out.stride(0)))) >= 2**31
    pdl = finish.options["launch_pdl"]
    lse_strides = (0, 0) if lse is None else lse.stride()
    attention(
        q, k_cache, v_cache, k_tree if fresh else q, v_tree if fresh else q, out, lse if lse is not None else out,
        plan.partial_out, plan.partial_lse, plan.work, plan.nodes, layout.prefix_lens, layout.qo_indptr,
        step.words32, kv.kv_indptr if csr else layout.qo_indptr, kv.table,
        kv.tree_slots if kv.tree_slots is not None else layout.qo_indptr, sm_scale * LOG2_E, q.shape[0],
        2 * layout.num_words, kv.table.stride(0), q.stride(0), q.stride(1), *strides,
        *((k_tree.stride(0), k_tree.stride(1), v_tree.stride(0), v_tree.stride(1)) if fresh else (0, 0, 0, 0)),
        out.stride(0), out.stride(1), *lse_strides,
        GROUP=step.group, KV_HEADS=step.num_kv_heads, HEAD_DIM=step.head_dim, PAGE_SIZE=kv.page_size, CSR=csr,
        TREE_SLOTS=kv.tree_slots is not None, FRESH=fresh, HAS_LSE=lse is not None, NEGATE=sm_scale < 0, WIDE=wide, BLOCK_D=config.block_d,
        BLOCK_M=config.block_m, BLOCK_R=config.block_r, BLOCK_N=config.block_n, STAGES=config.num_stages, PDL=pdl, SWAP_R=config.few_r,
    )  # fmt: skip
    finish(
        out, lse if lse is not None else out, plan.partial_out, plan.partial_lse, plan.work, plan.item_start,
        plan.nodes, plan.share, layout.prefix_lens, layout.qo_indptr, layout.row_request, q.shape[0],
        step.num_qo_heads, items, max_row_tiles(step) * step.num_kv_heads, out.stride(0), out.stride(1), *lse_strides,
        GROUP=step.group, KV_HEADS=step.num_kv_heads, HEAD_DIM=step.head_dim, ZERO_TAIL=zero_tail, BY_ITEM=by_item,
        HAS_LSE=lse is not None, BLOCK_D=config.block_d, TILE_ROWS=config.tile_rows, BLOCK_N=config.block_n,
        CHUNKS=chunks, CHUNK_ROWS=CHUNK_ROWS, CHUNK_PARTS=CHUNK_PARTS, ZERO_ROWS=ZERO_ROWS, WIDE=wide, PDL=pdl,
    )  # fmt: skip


CHUNK_ROWS, CHUNK_PARTS, ZERO_ROWS = 4, 8, 16
USE_PDL = True


def max_row_tiles(step: Step) -> int:
    """Row tiles of a request of the declared maximum width."""
    return triton.cdiv(step.layout.max_q_len * step.group, step.config.tile_rows)


def make_launches(step: Step, rows_q: int) -> tuple[Launch, Launch, int, bool, int]:
    """The two launches of a layer call, and how the merge is divided: items or boundaries, row chunks of each."""
    layout, config = step.layout, step.config
    items = layout.batch * max_row_tiles(step) * step.num_kv_heads
    by_item = items < step.num_programs
    merges = items if by_item else step.num_programs - 1
    rows = min(config.tile_rows, layout.max_q_len * step.group)
    chunks = triton.cdiv(rows, CHUNK_ROWS)
    attention = Launch(
        attention_kernel, (step.num_programs,), layout.device,
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
    )  # fmt: skip
    grid = (merges * chunks + triton.cdiv(rows_q, ZERO_ROWS),)
    finish = Launch(finish_kernel, grid, layout.device, {"num_warps": 4, "launch_pdl": USE_PDL and backends.arch(layout.device) >= 90})
    return attention, finish, merges, by_item, chunks
