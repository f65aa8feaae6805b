"""The layout on the device: from parents or chains in one launch, from flat masks in two.

`ancestors_kernel` has a program for each (request, word). It loads the request's parents once and doubles pointers in
registers (`layout_torch` has the maths), so a tree costs log2(depth) gathers and no dependent load, and malformed
parents cost nothing more: they are found before the first round. Masks are read by `layout_mask`. Every launch has
extra programs for the rows past the last request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from treeattn.kernels.layout_mask import (
    BIAS,
    BITS,
    BYTES,
    COLUMNS,
    SPLITS,
    THREADS,
    finish_kernel,
    read_rows_kernel,
)
from treeattn.kernels.layout_rows import (
    Launch,
    block_sizes,
    pick,
    report,
    request_shape,
    row_bounds,
    write_request,
    write_rows,
    write_tail,
)

if TYPE_CHECKING:
    from treeattn.layout import TreeLayout
    from treeattn.layout_input import LayoutInput

PARENT = tl.constexpr(1)  # treeattn.status.Status
TAIL = 1024
_FORMATS = {"full": BYTES, "tree": BYTES, "packed": BITS, "bias": BIAS}


@triton.jit(do_not_specialize=["batch", "capacity", "q_len", "limit", "total_q", "max_q_len"])
def ancestors_kernel(
    parents_ptr,  # int32|int64, [batch, q_len], RAGGED: flat [total_q]
    stride_parents_b,
    stride_parents_row,
    qo_ptr,
    stride_qo,
    prefix_ptr,
    stride_prefix,
    nodes_ptr,
    stride_nodes,
    out_qo_ptr,
    out_prefix_ptr,
    out_nodes_ptr,
    out_mask_indptr_ptr,
    out_words_ptr,  # int64 [total_q, NUM_WORDS]
    out_parents_ptr,
    out_depths_ptr,
    out_positions_ptr,
    out_request_ptr,
    status_ptr,
    batch,
    capacity,
    q_len,
    limit,
    total_q,
    max_q_len,
    NUM_WORDS: tl.constexpr,
    CHAIN: tl.constexpr,
    RAGGED: tl.constexpr,
    HAS_NODES: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    w = tl.program_id(1)
    index, low, high, raw_low, raw_high = row_bounds(qo_ptr, stride_qo, batch, q_len, limit, RAGGED, BATCH)
    if b >= capacity:
        tail = (b - capacity).to(tl.int64) * TAIL_BLOCK
        if w == 0:
            write_tail(
                tail, tl.arange(0, 1), tl.max(high, 0), total_q, out_words_ptr, out_parents_ptr,
                out_depths_ptr, out_positions_ptr, out_request_ptr, NUM_WORDS, True, TAIL_BLOCK,
            )  # fmt: skip
        else:
            write_tail(
                tail, tl.arange(0, 1) + w, tl.max(high, 0), total_q, out_words_ptr, out_parents_ptr,
                out_depths_ptr, out_positions_ptr, out_request_ptr, NUM_WORDS, False, TAIL_BLOCK,
            )  # fmt: skip
    else:
        start, width, prefix, nodes, code, about_row, about_value = request_shape(
            b, low, high, raw_low, raw_high, index, prefix_ptr, stride_prefix, nodes_ptr, stride_nodes,
            batch, q_len, max_q_len, RAGGED, HAS_NODES,
        )  # fmt: skip
        local = tl.arange(0, BLOCK)
        if CHAIN:
            parent = local - 1
        else:
            if RAGGED:
                base = start * stride_parents_row
            else:
                base = b.to(tl.int64) * stride_parents_b
            given = tl.load(parents_ptr + base + local.to(tl.int64) * stride_parents_row, mask=local < nodes, other=-1)
            sound = tl.where(local == 0, given == -1, (given >= 0) & (given < local))
            first_bad = tl.min(tl.where((local < nodes) & (sound == 0), local, BLOCK), 0)
            bad = first_bad < BLOCK
            code = tl.where(bad, PARENT, code)
            about_row = tl.where(bad, first_bad, about_row)
            about_value = tl.where(bad, pick(given.to(tl.int64), local, first_bad), about_value)
            nodes = tl.where(bad, 0, nodes)
            parent = given.to(tl.int32)
        real = local < nodes
        ancestor = tl.where(real, parent, -1)
        if CHAIN:
            depth = tl.where(real, local, 0)
            seen = tl.minimum(tl.maximum(local - w * 64 + 1, 0), 64).to(tl.int64)
            word = tl.where(seen >= 64, -1, (tl.full([BLOCK], 1, tl.int64) << tl.minimum(seen, 63)) - 1)
            word = tl.where(real, word, 0)
        else:
            depth = (ancestor >= 0).to(tl.int32)
            own = tl.full([BLOCK], 1, tl.int64) << (local % 64).to(tl.int64)
            word = tl.where(real & (local // 64 == w), own, 0)
            far = ancestor
            while tl.max(far, 0) >= 0:
                at_far = tl.maximum(far, 0)
                has = far >= 0
                word |= tl.where(has, tl.gather(word, at_far, 0), 0)
                depth += tl.where(has, tl.gather(depth, at_far, 0), 0)
                far = tl.where(has, tl.gather(far, at_far, 0), -1)
        rows = start + local
        inside = local < width
        tl.store(out_words_ptr + rows * NUM_WORDS + w, word, mask=inside)
        # Only a malformed qo_indptr has rows past the block; they are padding.
        for first in range(BLOCK, width, BLOCK):
            more = start + first + local
            tl.store(out_words_ptr + more * NUM_WORDS + w, tl.zeros_like(more), mask=first + local < width)
        if w == 0:
            write_rows(
                rows, inside, ancestor, depth, prefix + depth, tl.zeros_like(local) + b, out_parents_ptr,
                out_depths_ptr, out_positions_ptr, out_request_ptr,
            )  # fmt: skip
            for first in range(BLOCK, width, BLOCK):
                nothing = tl.zeros_like(local)
                write_rows(
                    rows + first, first + local < width, nothing - 1, nothing, prefix + nothing, nothing + b,
                    out_parents_ptr, out_depths_ptr, out_positions_ptr, out_request_ptr,
                )  # fmt: skip
            sizes = block_sizes(index, low, high, prefix_ptr, stride_prefix, batch, True)
            before = tl.sum(tl.where(index < b, sizes, 0), 0)
            write_request(
                b, capacity, start, width, prefix, nodes, before, pick(sizes, index, b), out_qo_ptr,
                out_prefix_ptr, out_nodes_ptr, out_mask_indptr_ptr,
            )  # fmt: skip
            if code != 0:
                report(status_ptr, code, b, about_row, about_value)


def _stride(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def write_layout_triton_(layout: TreeLayout, source: LayoutInput) -> None:
    """Launch the kernels for `source` on the current stream; no host read and no allocation."""
    for launch in layout_launches(layout, source):
        launch()


def layout_launches(layout: TreeLayout, source: LayoutInput) -> list[Launch]:
    """List what to launch for `source`, in order."""
    if layout.batch == 0:
        return []
    shape = _shape_arguments(layout, source)
    outputs = _outputs(layout)
    full = source.q_len is not None and source.batch * source.q_len == layout.total_q
    if source.kind in ("parents", "chain"):
        tail = 0 if full else triton.cdiv(layout.total_q, TAIL)
        block = max(triton.next_power_of_2(layout.max_q_len), 16)
        data = source.data if source.data is not None else layout.parents
        arguments = {
            "parents_ptr": data,
            # flat parents of one width are [batch, q_len] without saying so
            "stride_parents_b": data.stride(0) if data.dim() == 2 else shape["q_len"] * data.stride(0),
            "stride_parents_row": data.stride(-1),
            "total_q": layout.total_q,
            "capacity": layout.batch,
            "CHAIN": source.kind == "chain",
            "BLOCK": block,
            "TAIL_BLOCK": TAIL,
            # A warp for every four rows a lane: narrow trees then gather by shuffles inside one warp.
            "num_warps": min(max(block // 128, 1), 16),
        }
        grid = (layout.batch + tail, layout.num_words)
        return [Launch(ancestors_kernel, grid, arguments | shape | outputs)]
    return _mask_launches(layout, source, shape, outputs, full)


def row_splits(rows: int, size: int, kind: str) -> int:
    """Programs that read one row of a mask: enough of them for a whole GPU, with no less to read than pays.

    Parameters
    ----------
    rows : int
        Of the mask at most.
    size : int
        Elements of the mask (bytes of a packed one), which tell how long a row is.
    kind : str
        Form of the mask.
    """
    columns = size * (8 if kind == "packed" else 1) // max(rows, 1)
    # 17 rows of 131072 bytes took 350 us on an H200 with a program each, of which a round of 1024 bytes took 2.7
    return max(min(SPLITS, 1024 // max(rows, 1), triton.cdiv(columns, 2048)), 1)


def _mask_launches(
    layout: TreeLayout, source: LayoutInput, shape: dict[str, Any], outputs: dict[str, Any], full: bool
) -> list[Launch]:
    flat = source.kind != "words"
    data = source.data
    with_prefix = source.kind in ("full", "packed", "bias")
    mask = {
        "mask_ptr": data.view(torch.uint8) if data.dtype == torch.bool else data,
        "splits": row_splits(layout.batch * layout.max_q_len, data.numel(), source.kind) if with_prefix else 1,
        "mask_indptr_ptr": source.mask_indptr if source.mask_indptr is not None else layout.mask_indptr,
        "stride_mask_indptr": _stride(source.mask_indptr),
        "mask_size": data.numel(),
        "FORMAT": _FORMATS.get(source.kind, BYTES),
        "WITH_PREFIX": with_prefix,
        "HAS_INDPTR": source.mask_indptr is not None,
        "EXACT": source.exact,
    }
    launches = []
    if flat and layout.max_q_len > 0:
        arguments = {
            "out_words_ptr": layout.mask_words,
            "out_state_ptr": layout.depths,
            "out_flags_ptr": layout.parents,
            "THREADS": THREADS,
            "COLUMNS": COLUMNS // 4 if source.kind == "packed" else COLUMNS,  # eight of them are one byte
            "num_warps": THREADS // 32 if with_prefix else 4,
        }
        grid = (layout.max_q_len, layout.batch, mask["splits"])
        launches.append(Launch(read_rows_kernel, grid, arguments | mask | shape))
    words = layout.mask_words if flat else data
    rows = 32 if layout.num_words <= 8 else 16
    tail = 0 if full else triton.cdiv(layout.total_q, rows)
    arguments = {
        "words_ptr": words,
        "stride_words_row": words.stride(0),
        "stride_words_word": words.stride(1),
        "words_given": words.shape[1],
        "positions_ptr": source.positions if source.positions is not None else layout.positions,
        "positions_size": 0 if source.positions is None else source.positions.numel(),
        "total_q": layout.total_q,
        "capacity": layout.batch,
        "HAS_STATES": flat,
        "HAS_POSITIONS": source.positions is not None,
        "BLOCK": max(triton.next_power_of_2(layout.max_q_len), 16),
        "ROWS": rows,
        "CHUNK": 256,
        "WORDS": triton.next_power_of_2(layout.num_words),
        "num_warps": 4,
    }
    launches.append(Launch(finish_kernel, (layout.batch + tail,), arguments | mask | shape | outputs))
    return launches


def _shape_arguments(layout: TreeLayout, source: LayoutInput) -> dict[str, Any]:
    return {
        "qo_ptr": source.qo_indptr if source.qo_indptr is not None else layout.qo_indptr,
        "stride_qo": _stride(source.qo_indptr),
        "prefix_ptr": source.prefix_lens,
        "stride_prefix": _stride(source.prefix_lens),
        "nodes_ptr": source.num_nodes if source.num_nodes is not None else layout.num_nodes,
        "stride_nodes": _stride(source.num_nodes),
        "batch": source.batch,
        "q_len": 0 if source.q_len is None else source.q_len,
        "limit": min(layout.total_q, source.rows),
        "max_q_len": layout.max_q_len,
        "NUM_WORDS": layout.num_words,
        "RAGGED": source.qo_indptr is not None,
        "HAS_NODES": source.num_nodes is not None,
        "BATCH": max(triton.next_power_of_2(layout.batch + 1), 16),
    }


def _outputs(layout: TreeLayout) -> dict[str, Any]:
    return {
        "out_qo_ptr": layout.qo_indptr,
        "out_prefix_ptr": layout.prefix_lens,
        "out_nodes_ptr": layout.num_nodes,
        "out_mask_indptr_ptr": layout.mask_indptr,
        "out_words_ptr": layout.mask_words,
        "out_parents_ptr": layout.parents,
        "out_depths_ptr": layout.depths,
        "out_positions_ptr": layout.positions,
        "out_request_ptr": layout.row_request,
        "status_ptr": layout.status,
    }
