"""Launching the plan and the attention of a step with little host time.

Triton's own dispatch costs about 10 µs a call, most of it to find the compiled kernel again; handing it a tensor costs
a driver call more than handing it an address. The calls of a layer repeat with the same shapes, so :class:`Launch`
finds the kernel once, keeps every argument that stays and leaves Triton out of later launches where it may
(:mod:`treeattn.kernels.packed`). Keeping them takes longer than a launch through Triton, so the second call does it: a
step of one layer (SGLang's drop-in) has no second. What Triton compiles in (divisibility of strides and
addresses by 16) is part of what :func:`treeattn.tree_attention` keeps a :class:`LayerLaunch` by.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from .. import backends
from ..config import next_power_of_2
from ..plan import Step
from ..scoring import Scoring, scale_kind
from ..status import Status
from .attention import attention_kernel
from .finish import finish_kernel
from .packed import PackedLaunch, pack
from .plan import plan_kernel

PLAN_BLOCK = 4  # programs of the attention kernel that one program of the plan places
PLAN_ELEMENTS = 8192  # programs times requests that a program of the plan looks at together
MAX_CLASSES = 16  # numbers of row tiles in a batch, the most and below, up to which there are lanes
CLASS_ELEMENTS = 2048  # classes times requests, at most: each class has code of its own
ZERO_ROWS = 8  # query rows that one program of the finish kernel looks at for padding
FEW_MERGES = 4096  # rows to merge up to which each gets a program of its own: latency counts there, not their number
INVARIANT_ROWS, INVARIANT_PARTS = 2, 8  # rows and parts of a merge in batch-invariant mode
MERGE_DIMS = 128  # that one program of the finish kernel merges of a row: wide rows are merged by several at once
MERGE_ELEMENTS = 4096  # of partials that the one warp of a finish program has in flight: 128 registers of a thread
MANY_PARTS, MANY_DIMS = 64, 32  # of a program where an item may have more than half as many: one or two rounds of loads
POSITIONS = 256  # of nodes that a warp of the plan looks at together
PARTS = {"all": 0, "prefix": 1, "tree": 2}
FP8 = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
LOG2_E = 1.4426950408889634
E4M3_ARCH = 89  # compute capability from which one instruction makes float16 of e4m3
WGMMA_ROWS = 64  # the fewest rows of a tile that wgmma multiplies
PDL_ARCH = 90  # compute capability from which kernels may be launched ahead of the end of the one before


class Launch:
    """A kernel with its grid, options and all arguments but the leading ones, which a call brings.

    Parameters
    ----------
    kernel : triton.JITFunction
    grid : tuple of int
    device : torch.device
    arguments : dict
        Every parameter that stays, by name; tensors are kept alive.
    options : dict
        ``num_warps`` and the like.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        device: torch.device,
        arguments: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        self.kernel, self.grid, self.device = kernel, (*grid, 1, 1)[:3], device
        self.arguments, self.options = arguments, options
        self.rest: dict[str, Any] | None = None
        self.compiled: Any = None
        self.direct: PackedLaunch | None = None

    def __call__(self, *leading: Any) -> None:
        """Launch on its device's current stream; once the kernel is compiled, leading tensors come as addresses."""
        index = self.device.index
        if self.compiled is None:
            self.first(*leading)
        # torch.cuda.current_device() is the same behind a check that CUDA is initialised, and 0.5 µs
        elif torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self(*leading)
        elif self.direct is not None:
            self.direct.launch(torch._C._cuda_getCurrentRawStream(index), leading)
        elif self.rest is None:
            self.keep(len(leading))
            self(*leading)
        else:
            compiled, stream = self.compiled, torch._C._cuda_getCurrentRawStream(index)
            compiled.run(
                *self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *leading,
                *self.rest.values(),
            )  # fmt: skip

    def first(self, *leading: Any) -> None:
        """Launch with leading tensors through Triton's own dispatch, which compiles unless another thread just has."""
        names = self.kernel.arg_names
        given = dict(zip(names, leading, strict=False))
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            compiled = self.kernel[self.grid](**given, **self.arguments, **self.options)
        if not backends.interpreted():
            self.compiled = compiled

    def keep(self, num_leading: int) -> None:
        """Make the arguments that stay ready for later launches, all but the first `num_leading`."""
        names = self.kernel.arg_names
        given = ((name, self.arguments[name]) for name in names[num_leading:])
        rest = {name: value.data_ptr() if isinstance(value, Tensor) else value for name, value in given}
        self.direct = pack(self.compiled, self.grid, self.device.index, names[:num_leading], rest)
        self.rest = rest

    def replace(self, name: str, value: int) -> None:
        """Give a number another value from now on: one that the kernel is not specialised on, and no leading one."""
        self.arguments[name] = value
        if self.rest is not None:
            self.rest[name] = value
            if self.direct is not None:
                self.direct.replace(name, value)


def window_of(step: Step) -> int:
    """Width of a step's window within what int32 sums of positions allow; 0 where there is none."""
    return min(max(step.window_left, 0), 2**30)


def is_ranged(step: Step) -> bool:
    """Whether a row may not see the prefix from its beginning."""
    return step.window_left >= 0 or step.part == "tree"


def split_of(step: Step) -> int:
    """KV tiles of a split in batch-invariant mode, else 0."""
    return step.config.split_tiles if step.batch_invariant else 0


def is_aligned(step: Step) -> bool:
    """Whether the plan lets items begin with programs of their own: not measured for Triton's smaller programs."""
    return step.backend == "cuda" and not step.batch_invariant


def busy_of(step: Step) -> int:
    """Sixteenths of the programs that lanes must keep busy.

    With 128 heads of MLA, 17 nodes are 34 row tiles: lanes keep 102 of 132 programs busy, and memory sees the keys
    once. On one line the row tiles of a request are spread over all of its keys, more than L2 holds, and memory would
    see them 34 times: 5.1 GB at 131072 keys, which take longer (counted, not measured).
    """
    return 12 if step.backend == "cuda" and step.shared_kv else 15


def launch_plan(step: Step) -> None:
    """Make the plan of a step, on the current stream."""
    launch = step.launches.get("plan")
    if launch is None:
        launch = step.launches["plan"] = plan_launch(step)
    width = step.kv.launch_width
    if launch.arguments["max_pages"] != width:
        launch.replace("max_pages", width)
    launch()


def plan_launch(step: Step) -> Launch:
    """The launch of a step's plan: nothing of it changes from call to call."""
    layout, kv, config, buffers = step.layout, step.kv, step.config, step.buffers
    csr = kv.kv_indptr is not None
    block_b = max(16, next_power_of_2(layout.batch))
    block_p = max(1, min(PLAN_BLOCK, PLAN_ELEMENTS // block_b))
    row_tiles = triton.cdiv(layout.max_q_len * step.group, config.block_m)  # of a request, at most
    warps = min(16, max(1, block_b // 64))  # of 64 requests one: its sums cross no shared memory
    arguments = {
        "prefix_lens_ptr": layout.prefix_lens,
        "num_nodes_ptr": layout.num_nodes,
        "qo_indptr_ptr": layout.qo_indptr,
        "kv_indptr_ptr": kv.kv_indptr if csr else layout.qo_indptr,
        "kv_start_ptr": layout.qo_indptr if kv.kv_start is None else kv.kv_start,
        "positions_ptr": layout.positions,
        "status_ptr": layout.status,
        "work_ptr": buffers.work,
        "turns_ptr": buffers.turns,
        "spans_ptr": buffers.spans,
        "arrivals_ptr": buffers.arrivals,
        "batch": layout.batch,
        "max_pages": kv.width,
        "num_programs": step.num_programs,
        "min_share": 1 if step.batch_invariant else config.min_share,
        "window_left": window_of(step),
        "KV_CAPACITY_CODE": int(Status.KV_CAPACITY),
        "WORK_CODE": int(Status.WORK),
        "GROUP": step.group,
        "KV_HEADS": step.num_kv_heads,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "PAGE_SIZE": kv.page_size,
        "CSR": csr,
        "NODES_IN_TABLE": step.nodes_in_table,
        "HAS_START": kv.kv_start is not None,
        "WINDOW": step.window_left >= 0,
        "PART": PARTS[step.part],
        "RANGED": is_ranged(step),
        "SPLIT": split_of(step),
        "ALIGNED": is_aligned(step),
        "BUSY": busy_of(step),
        "CLASSES": max(1, min(MAX_CLASSES, next_power_of_2(row_tiles), CLASS_ELEMENTS // block_b)),
        "BLOCK_B": block_b,
        "BLOCK_P": block_p,
        "COLUMNS": max(1, POSITIONS * warps // block_b),
    }
    grid = (triton.cdiv(step.num_programs, block_p),)
    return Launch(plan_kernel, grid, layout.device, arguments, {"num_warps": warps})


class LayerLaunch:
    """The two launches of a layer call for one set of shapes, strides, dtypes, alignments and kinds of options.

    Parameters
    ----------
    step : Step
    q, out, lse, k_tree, v_tree
        Tensors of the first such call, for their shapes and strides.
    scoring : Scoring
        Options of the first such call: which there are, not their values.
    cache_strides : tuple of int
        Page, slot and head stride of the K cache, then of the V cache, in elements.
    zero_tail : bool
        Rows past the last request are written too.
    arch : int, optional
        Compute capability times ten, of the step's device by default: for compiling without that chip.
    """

    def __init__(
        self,
        step: Step,
        q: Tensor,
        k_tree: Tensor | None,
        v_tree: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
        scoring: Scoring,
        *,
        cache_strides: tuple[int, ...],
        zero_tail: bool,
        arch: int | None = None,
    ) -> None:
        config = step.config
        reach = (
            step.layout.max_q_len * max(abs(q.stride(0)), abs(out.stride(0))),
            step.kv.page_size * max(abs(cache_strides[1]), abs(cache_strides[4])),
        )
        wide = max(reach) >= 2**31
        arch = backends.arch(step.layout.device) if arch is None else arch
        pdl = arch >= PDL_ARCH
        rows = q.shape[0]
        shared = {
            "GROUP": step.group,
            "KV_HEADS": step.num_kv_heads,
            "HEAD_DIM_V": step.head_dim_v,
            "HAS_LSE": lse is not None,
            "PART": PARTS[step.part],
            "RANGED": is_ranged(step),
            "SPLIT": split_of(step),
            "SINKS": 0 if scoring.sinks is None else 1 + scoring.sinks_in_lse,
            "BLOCK_V": padded(step.head_dim_v),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "WIDE": wide,
            "PDL": pdl,
            "total_q": rows,
            "stride_out_row": out.stride(0),
            "stride_out_head": out.stride(1),
            "stride_lse_row": 0 if lse is None else lse.stride(0),
            "stride_lse_head": 0 if lse is None else lse.stride(1),
            "partial_out_ptr": step.buffers.partial_out,
            "partial_lse_ptr": step.buffers.partial_lse,
            "work_ptr": step.buffers.work,
            "qo_indptr_ptr": step.layout.qo_indptr,
        }
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
        if config.max_registers:
            options["maxnreg"] = config.max_registers
        arguments = shared | _attention_arguments(step, q, k_tree, v_tree, cache_strides, scoring)
        # for wgmma; mma.sync, with fewer rows, is 1.2 to 3 times as slow that way. The interpreter takes both.
        arguments["APART"] = config.block_m >= (WGMMA_ROWS if arch > 0 else 32)
        arguments["DECODE"] = 0 if arch == 0 else 2 if arch >= E4M3_ARCH else 1
        self.attention: Any = Launch(attention_kernel, (step.num_programs,), step.layout.device, arguments, options)
        arguments, programs = _finish_arguments(step, rows, zero_tail)
        options = {"num_warps": 1, "enable_fp_fusion": True} | ({"launch_pdl": True} if pdl else {})
        self.finish = Launch(finish_kernel, (programs,), step.layout.device, shared | arguments, options)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor | None,
        k_tree: Tensor | None,
        v_tree: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
        scoring: Scoring,
    ) -> None:
        """Attention of one layer, then its merge, on the current stream."""
        if self.finish.compiled is None:
            leading = self.leading(q, k_cache, v_cache, k_tree, v_tree, out, lse, scoring)
            self.attention.first(*leading)
            self.finish.first(*finish_leading(leading))
            return
        out_at, lse_at, sinks_at = out.data_ptr(), _address(lse), _address(scoring.sinks)
        k_scale, v_scale = scoring.k_scale, scoring.v_scale
        self.attention(
            q.data_ptr(), k_cache.data_ptr(), _address(v_cache), _address(k_tree), _address(v_tree), out_at, lse_at,
            scoring.sm_scale * LOG2_E, scoring.logits_soft_cap, sinks_at,
            k_scale.data_ptr() if isinstance(k_scale, Tensor) else k_scale,
            v_scale.data_ptr() if isinstance(v_scale, Tensor) else v_scale,
        )  # fmt: skip
        self.finish(out_at, lse_at, sinks_at)

    @staticmethod
    def leading(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor | None,
        k_tree: Tensor | None,
        v_tree: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
        scoring: Scoring,
    ) -> tuple[Any, ...]:
        """Leading arguments of the attention kernel; what there is not is some tensor that is not read."""
        if k_cache.dtype in FP8:
            k_cache = k_cache.view(torch.uint8)
            v_cache = None if v_cache is None else v_cache.view(torch.uint8)
        return (
            q, k_cache, k_cache if v_cache is None else v_cache, q if k_tree is None else k_tree,
            q if v_tree is None else v_tree, out, out if lse is None else lse, scoring.sm_scale * LOG2_E,
            scoring.logits_soft_cap, out if scoring.sinks is None else scoring.sinks, scoring.k_scale,
            scoring.v_scale,
        )  # fmt: skip


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def finish_leading(leading: tuple[Any, ...]) -> tuple[Any, ...]:
    """Leading arguments of the finish kernel, given those of the attention kernel: out, lse, sinks."""
    return (*leading[5:7], leading[9])


def padded(dim: int) -> int:
    """A head dim as the matrix unit takes it."""
    return max(16, next_power_of_2(dim))


def _attention_arguments(
    step: Step,
    q: Tensor,
    k_tree: Tensor | None,
    v_tree: Tensor | None,
    cache_strides: tuple[int, ...],
    scoring: Scoring,
) -> dict[str, Any]:
    layout, kv, config = step.layout, step.kv, step.config
    csr = kv.kv_indptr is not None
    rest = step.head_dim - step.head_dim_v if step.shared_kv else 0
    names = ("k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head")
    return {
        "turns_ptr": step.buffers.turns,
        **{f"stride_{name}": stride for name, stride in zip(names, cache_strides, strict=True)},
        "mask_words_ptr": step.words32,
        "num_words": 2 * layout.num_words,
        "kv_indptr_ptr": kv.kv_indptr if csr else layout.qo_indptr,
        "table_ptr": kv.table,
        "tree_slots_ptr": layout.qo_indptr if kv.tree_slots is None else kv.tree_slots,
        "stride_table_request": kv.table.stride(0),
        "stride_q_row": q.stride(0),
        "stride_q_head": q.stride(1),
        "stride_k_tree_row": 0 if k_tree is None else k_tree.stride(0),
        "stride_k_tree_head": 0 if k_tree is None else k_tree.stride(1),
        "stride_v_tree_row": 0 if v_tree is None else v_tree.stride(0),
        "stride_v_tree_head": 0 if v_tree is None else v_tree.stride(1),
        "prefix_lens_ptr": layout.prefix_lens,
        "positions_ptr": layout.positions,
        "window_left": window_of(step),
        "HEAD_DIM": step.head_dim,
        "PAGE_SIZE": kv.page_size,
        "CSR": csr,
        "TREE_SLOTS": kv.tree_slots is not None,
        "FRESH": k_tree is not None,
        "SHARED_KV": step.shared_kv,
        "FP8": FP8.get(step.kv_dtype, 0),
        "K_SCALE": scale_kind(scoring.k_scale),
        "V_SCALE": scale_kind(scoring.v_scale),
        "WINDOW": step.window_left >= 0,
        "CAPPED": scoring.logits_soft_cap > 0,
        "NEGATE": scoring.sm_scale < 0,
        "SAME_STRIDES": cache_strides[:3] == cache_strides[3:],
        "SLOT_STRIDE": cache_strides[1] if step.shared_kv and cache_strides[1] < 2**20 else 0,
        "BLOCK_D": padded(step.head_dim_v if step.shared_kv else step.head_dim),
        "BLOCK_REST": padded(rest) if rest > 0 else 0,
        "STAGES": config.num_stages,
    }


def _finish_arguments(step: Step, rows: int, zero_tail: bool) -> tuple[dict[str, Any], int]:
    """Arguments of the finish kernel, and its programs: merges of items or of boundaries, then padding."""
    layout, config = step.layout, step.config
    items_a_request = triton.cdiv(layout.max_q_len * step.group, config.block_m) * step.num_kv_heads
    by_item = step.batch_invariant or layout.batch * items_a_request < step.num_programs
    merges = layout.batch * items_a_request if by_item else step.num_programs - 1
    tile_rows = min(config.block_m, layout.max_q_len * step.group)
    chunk_rows = 1 if merges * tile_rows <= FEW_MERGES else 4
    chunks = triton.cdiv(tile_rows, chunk_rows)
    # an item that is cut evenly has so many parts, and its ends two more; between boundaries two are usual
    parts = 2 + (triton.cdiv(step.num_programs, max(merges, 1)) if by_item else 0)
    if step.batch_invariant:  # nor may the order of sums depend on a capacity
        chunk_rows, chunks, parts = INVARIANT_ROWS, triton.cdiv(tile_rows, INVARIANT_ROWS), INVARIANT_PARTS
    parts, dims = next_power_of_2(parts), min(padded(step.head_dim_v), MERGE_DIMS)
    if parts >= MANY_PARTS:
        parts, dims = MANY_PARTS, min(dims, MANY_DIMS)
    parts = min(parts, max(MERGE_ELEMENTS // (dims * chunk_rows), 1))
    arguments = {
        "spans_ptr": step.buffers.spans,
        "row_request_ptr": layout.row_request,
        "num_qo_heads": step.num_qo_heads,
        "num_merges": merges,
        "chunks": chunks,
        "items_a_request": items_a_request,
        "ZERO_TAIL": zero_tail,
        "BY_ITEM": by_item,
        "BLOCK_M": config.block_m,
        "CHUNK_ROWS": chunk_rows,
        "CHUNK_DIMS": dims,
        "CHUNK_PARTS": parts,
        "ZERO_ROWS": ZERO_ROWS,
        "FRAGMENTS": step.backend == "cuda",
    }
    programs = chunks * (padded(step.head_dim_v) // dims)
    return arguments, merges * programs + triton.cdiv(rows, ZERO_ROWS)
