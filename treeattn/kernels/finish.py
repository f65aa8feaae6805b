"""What attention leaves to be done: merge the partials of items that were cut, and write padding rows.

Launched behind ``attention_kernel`` on the same stream, on Hopper and later with programmatic dependent launch: its
programs may start early, find out what they have to do, and wait there.
"""

import triton
import triton.language as tl

from .plan import (
    SPAN_FIELDS,
    SPAN_FIRST,
    SPAN_FULL,
    SPAN_HEAD_STEP,
    SPAN_NODES,
    SPAN_PLACE,
    SPAN_PREFIX,
    SPAN_ROW_STEP,
    SPAN_SHARE,
    WORK_FIELDS,
    WORK_FIRST,
    WORK_FIRST_ROW,
    WORK_FULL,
    WORK_KV_HEAD,
    WORK_LEFT,
    WORK_NODES,
    WORK_NUMBER,
    WORK_PREFIX,
    WORK_ROW_TILE,
    WORK_ROW_TILES,
    WORK_SHARE,
    WORK_TILE,
    kv_tiles,
)
from .tiles import add_sinks, head_base, normalise, store_out


@triton.jit
def zero_rows(out_ptr, lse_ptr, row, padding, heads, stride_out_row, stride_out_head, stride_lse_row,
              stride_lse_head, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LSE: tl.constexpr):  # fmt: skip
    """Out 0 and lse -inf in the rows that are padding."""
    d = tl.arange(0, BLOCK_D)
    row = row.to(tl.int64)
    zero = tl.zeros([row.shape[0], BLOCK_D], out_ptr.dtype.element_ty)
    empty = tl.full([row.shape[0]], -float("inf"), tl.float32)
    for head in range(heads):
        pointers = out_ptr + (row * stride_out_row + head * stride_out_head)[:, None] + d[None, :]
        tl.store(pointers, zero, mask=padding[:, None] & (d < HEAD_DIM)[None, :])
        if HAS_LSE:
            tl.store(lse_ptr + row * stride_lse_row + head * stride_lse_head, empty, mask=padding)


@triton.jit
def merge_parts(partial_out_ptr, partial_lse_ptr, first, last, local, valid, d, BLOCK_M: tl.constexpr,
                HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """Combine the partials of an item's rows in the dims `d`, in KV order, PARTS in flight.

    They are those that programs `first` to `last` left, or if SPLIT those of the places `first` to `last` on the line.

    One warp holds whole rows, so sums over parts stay inside a thread: between warps they would go through shared
    memory, and with 16-way bank conflicts (48 µs instead of 6 for 263 merges of 64 rows).
    """
    c = tl.arange(0, PARTS)
    acc = tl.zeros([local.shape[0], d.shape[0]], tl.float32)
    top = tl.full([local.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([local.shape[0]], tl.float32)
    for part in range(first, last + 1, PARTS):
        program = part + c
        slot = program if SPLIT else 2 * program + (program == first).to(tl.int32)
        place = slot.to(tl.int64)[:, None] * BLOCK_M + local[None, :]
        there = (program <= last)[:, None] & valid[None, :]
        value = tl.load(partial_out_ptr + place[:, :, None] * HEAD_DIM + d[None, None, :],
                        mask=there[:, :, None] & (d < HEAD_DIM)[None, None, :], other=0.0)  # fmt: skip
        lse2 = tl.load(partial_lse_ptr + place, mask=there, other=-float("inf"))
        new_top = tl.maximum(top, tl.max(lse2, 0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weight = tl.exp2(lse2 - base[None, :])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weight, 0)
        acc = acc * decay[:, None] + tl.sum(value * weight[:, :, None], 0)
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["total_q", "num_qo_heads", "num_merges", "items_a_request", "chunks"])
def finish_kernel(
    out_ptr,  # [total_q, num_qo_heads, head_dim_v]
    lse_ptr,  # float32 [total_q, num_qo_heads] through stride_lse_*, written if HAS_LSE
    sinks_ptr,  # [num_qo_heads], read if SINKS
    partial_out_ptr,  # float32 [2 * num_programs, BLOCK_M, head_dim_v]
    partial_lse_ptr,  # float32 [2 * num_programs, BLOCK_M], base 2
    work_ptr,  # the plan
    spans_ptr,
    qo_indptr_ptr,
    row_request_ptr,  # int32 [total_q]
    total_q,
    num_qo_heads,
    num_merges,  # items of the whole capacity, or boundaries between programs
    chunks,  # of the rows of each merge; each has a program for each CHUNK_DIMS dims
    items_a_request,
    stride_out_row,
    stride_out_head,
    stride_lse_row,
    stride_lse_head,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PART: tl.constexpr,
    RANGED: tl.constexpr,
    SPLIT: tl.constexpr,  # tiles of a split in batch-invariant mode, else 0
    SINKS: tl.constexpr,  # 0 none, 1 in out, 2 in out and lse
    ZERO_TAIL: tl.constexpr,  # rows past qo_indptr[batch] are padding too
    BY_ITEM: tl.constexpr,  # a merge per item; else one per boundary between two programs of the plan
    HAS_LSE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    CHUNK_DIMS: tl.constexpr,
    CHUNK_PARTS: tl.constexpr,
    ZERO_ROWS: tl.constexpr,
    FRAGMENTS: tl.constexpr,  # partial_out is in the order in which csrc's kernel holds it
    WIDE: tl.constexpr,
    PDL: tl.constexpr,  # launched before attention_kernel has ended
):
    DIM_CHUNKS: tl.constexpr = BLOCK_V // CHUNK_DIMS
    program = tl.program_id(0)
    programs = chunks * DIM_CHUNKS  # of each merge
    if program >= num_merges * programs:
        if PDL:
            tl.extra.cuda.gdc_wait()
        row = (program - num_merges * programs) * ZERO_ROWS + tl.arange(0, ZERO_ROWS)
        owner = tl.load(row_request_ptr + row, mask=row < total_q, other=-1)
        owned = owner >= 0
        node = row - tl.load(qo_indptr_ptr + owner, mask=owned, other=0)
        padding = owned & (node >= tl.load(spans_ptr + owner * SPAN_FIELDS + SPAN_NODES, mask=owned, other=0))
        if ZERO_TAIL:
            padding = padding | ((row < total_q) & (owner < 0))
        if tl.max(padding.to(tl.int32), 0) > 0:
            zero_rows(out_ptr, lse_ptr, row, padding, num_qo_heads, stride_out_row, stride_out_head, stride_lse_row,
                      stride_lse_head, HEAD_DIM_V, BLOCK_V, HAS_LSE)  # fmt: skip
        return

    index = program // programs
    work = work_ptr + (index + 1) * WORK_FIELDS
    if BY_ITEM:
        request = index // items_a_request
        item = index % items_a_request
        span = spans_ptr + request * SPAN_FIELDS
        nodes = tl.load(span + SPAN_NODES)
        prefix = tl.load(span + SPAN_PREFIX)
        begin = tl.load(span + SPAN_FIRST)
        full = tl.load(span + SPAN_FULL)
        first_row = tl.load(qo_indptr_ptr + request)
        row_tiles = tl.maximum(tl.cdiv(nodes * GROUP, BLOCK_M), 1)
        kv_head = item // row_tiles
        row_tile = item % row_tiles
        start = tl.load(span + SPAN_PLACE)
        start += row_tile * tl.load(span + SPAN_ROW_STEP) + kv_head * tl.load(span + SPAN_HEAD_STEP)
        share = tl.load(span + SPAN_SHARE)
        mine = (kv_head < KV_HEADS) & (nodes > 0)
    else:
        kv_head = tl.load(work + WORK_KV_HEAD)
        row_tile = tl.load(work + WORK_ROW_TILE)
        share = tl.load(work + WORK_SHARE)
        tile = tl.load(work + WORK_TILE)
        start = tl.load(work + WORK_NUMBER) * share - tile
        # the first boundary inside an item is the one that merges it
        mine = (tile > 0) & (tile <= share) & (tl.load(work + WORK_LEFT) > 0)
        nodes = tl.load(work + WORK_NODES)
        prefix = tl.load(work + WORK_PREFIX)
        begin = prefix * 0
        full = prefix * 0
        if RANGED:
            begin = tl.load(work + WORK_FIRST)
            full = tl.load(work + WORK_FULL)
        first_row = tl.load(work + WORK_FIRST_ROW)
        row_tiles = tl.load(work + WORK_ROW_TILES)
    full_tiles, front_tiles, tail_tiles, tree_tiles = kv_tiles(prefix, begin, full, nodes, BLOCK_N, RANGED, PART)
    item_tiles = full_tiles + front_tiles + tail_tiles + tree_tiles
    if SPLIT > 0:
        item_tiles = tl.cdiv(item_tiles, SPLIT)
    if SPLIT > 0:
        first = start
        last = start + item_tiles - 1
    else:
        first = start // share
        last = (start + item_tiles - 1) // share
    # every program waits, also those with nothing to do: what follows in the stream must find attention done
    if PDL:
        tl.extra.cuda.gdc_wait()
    if mine & (first < last):
        tile_rows = tl.cdiv(nodes * GROUP, row_tiles)
        local = program % programs // DIM_CHUNKS * CHUNK_ROWS + tl.arange(0, CHUNK_ROWS)
        d = program % DIM_CHUNKS * CHUNK_DIMS + tl.arange(0, CHUNK_DIMS)
        rows = row_tile * tile_rows + local
        valid = (local < tile_rows) & (rows < tl.minimum(nodes, total_q - first_row) * GROUP)
        if tl.max(valid.to(tl.int32), 0) > 0:
            acc, row_max, row_sum = merge_parts(partial_out_ptr, partial_lse_ptr, first, last, local, valid, d,
                                                BLOCK_M, HEAD_DIM_V, CHUNK_PARTS, SPLIT > 0)  # fmt: skip
            acc, lse2 = normalise(acc, row_max, row_sum)
            if SINKS != 0:
                acc, lse2 = add_sinks(acc, lse2, sinks_ptr, kv_head, rows, valid, GROUP, SINKS == 2)
            if FRAGMENTS:
                # 4 t + 2 j + i of each 16 is dim 8 j + 2 t + i: as a thread t of four has them of a product
                d = d // 16 * 16 + d % 4 // 2 * 8 + d % 16 // 4 * 2 + d % 2
            # lse, which all programs of a row know, is written by each of them
            store_out(head_base(out_ptr, first_row, kv_head, stride_out_row, stride_out_head, GROUP),
                      head_base(lse_ptr, first_row, kv_head, stride_lse_row, stride_lse_head, GROUP), acc, lse2, rows,
                      valid, d, stride_out_row, stride_out_head, stride_lse_row, stride_lse_head, GROUP, HEAD_DIM_V,
                      HAS_LSE, WIDE)  # fmt: skip
