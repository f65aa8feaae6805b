"""Walking trees and moving K and V on the device: `verify` has the meaning, this the launches.

The walk is one program a request over parents and tokens in registers. A move is one program for each
(request, cache, block of columns); a column is one word of a token's K or V over all heads. Rows of a path
are moved a tile at a time, and a barrier between a tile's reads and its writes makes the in-place move
safe, since a tile only reads rows at or above the ones it writes. Caches that differ only in their base
pointer share a launch through a device table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from treeattn.kernels.layout_rows import Launch, report
from treeattn.kv import cache_strides

if TYPE_CHECKING:
    from torch import Tensor

    from treeattn.kv import KVLayout, PagedKV
    from treeattn.layout import TreeLayout
    from treeattn.verify import Accepted

KV_CAPACITY = tl.constexpr(5)


@triton.jit(do_not_specialize=["max_q_len"])
def accept_kernel(
    parents_ptr,  # int32 [total_q], local
    qo_ptr,
    nodes_ptr,
    draft_ptr,  # int32|int64 [total_q]
    target_ptr,
    rows_ptr,  # int32 [batch, max_q_len]
    lens_ptr,
    bonus_ptr,
    max_q_len,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    start = tl.load(qo_ptr + b).to(tl.int64)
    nodes = tl.load(nodes_ptr + b)
    local = tl.arange(0, BLOCK)
    real = local < nodes
    parent = tl.load(parents_ptr + start + local, mask=real, other=-1)
    draft = tl.load(draft_ptr + start + local, mask=real, other=-1).to(tl.int64)
    target = tl.load(target_ptr + start + local, mask=real, other=-1).to(tl.int64)
    path = tl.full([BLOCK], -1, tl.int32)
    length = nodes * 0
    bonus = start * 0 - 1
    current = tl.where(nodes > 0, 0, BLOCK)
    while current < BLOCK:
        path = tl.where(local == length, current, path)
        length += 1
        bonus = tl.sum(tl.where(local == current, target, 0), 0)
        # A child lies above its parent, so the walk ends after at most num_nodes steps.
        child = real & (parent == current) & (local > current) & (draft == bonus)
        current = tl.min(tl.where(child, local, BLOCK), 0)
    tl.store(rows_ptr + b.to(tl.int64) * max_q_len + local, path, mask=local < max_q_len)
    tl.store(lens_ptr + b, length)
    tl.store(bonus_ptr + b, bonus)


def accept_triton_(layout: TreeLayout, draft: Tensor, target: Tensor, out: Accepted) -> None:
    """Launch `accept_kernel`, a program a request."""
    if layout.batch > 0:
        accept_launch(layout, draft, target, out)()


def accept_launch(layout: TreeLayout, draft: Tensor, target: Tensor, out: Accepted) -> Launch:
    """Prepare the walk of at least one request."""
    block = max(triton.next_power_of_2(layout.max_q_len), 16)
    arguments = {
        "parents_ptr": layout.parents,
        "qo_ptr": layout.qo_indptr,
        "nodes_ptr": layout.num_nodes,
        "draft_ptr": draft,
        "target_ptr": target,
        "rows_ptr": out.rows,
        "lens_ptr": out.lens,
        "bonus_ptr": out.bonus,
        "max_q_len": layout.max_q_len,
        "BLOCK": block,
        "num_warps": min(max(block // 128, 1), 8),
    }
    return Launch(accept_kernel, (layout.batch,), arguments)


@triton.jit(do_not_specialize=["stride_rows_b", "columns"])
def global_rows_kernel(
    rows_ptr,
    stride_rows_b,
    stride_rows_i,
    lens_ptr,
    stride_lens,
    qo_ptr,
    out_ptr,  # int64 [batch, columns]
    columns,
    HAS_LENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + b.to(tl.int64) * stride_rows_b + i * stride_rows_i, mask=i < columns, other=-1)
    held = row >= 0
    if HAS_LENS:
        held &= i < tl.load(lens_ptr + b * stride_lens)
    flat = tl.where(held, tl.load(qo_ptr + b).to(tl.int64) + row, -1)
    tl.store(out_ptr + b.to(tl.int64) * columns + i, flat, mask=i < columns)


def global_rows_triton_(layout: TreeLayout, rows: Tensor, lens: Tensor | None, out: Tensor) -> None:
    """Launch `global_rows_kernel`."""
    if rows.numel() == 0:
        return
    block = min(max(triton.next_power_of_2(rows.shape[1]), 16), 256)
    arguments = {
        "rows_ptr": rows,
        "stride_rows_b": rows.stride(0),
        "stride_rows_i": rows.stride(1),
        "lens_ptr": rows if lens is None else lens,
        "stride_lens": 0 if lens is None else lens.stride(0),
        "qo_ptr": layout.qo_indptr,
        "out_ptr": out,
        "columns": rows.shape[1],
        "HAS_LENS": lens is not None,
        "BLOCK": block,
        "num_warps": 1,
    }
    Launch(global_rows_kernel, (rows.shape[0], triton.cdiv(rows.shape[1], block)), arguments)()


@triton.jit
def slot_offsets(
    row, held, start, prefix, b, slots_ptr, table_ptr, table_begin, table_pages, page_size,
    stride_cache_page, stride_cache_slot, HAS_SLOTS: tl.constexpr,
):  # fmt: skip
    """Element offset in a cache of each row's place, and which places are outside the table."""
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + start + row, mask=held, other=0).to(tl.int64)
        page = slot // page_size
        offset = slot % page_size
        outside = held & (slot < 0)
    else:
        position = prefix + row
        entry = position // page_size
        outside = held & (entry >= table_pages)
        page = tl.load(table_ptr + table_begin + entry, mask=held & (outside == 0), other=0).to(tl.int64)
        offset = position % page_size
    return page * stride_cache_page + offset * stride_cache_slot, outside


@triton.jit(do_not_specialize=["stride_rows_b", "rows_columns", "stride_table", "table_width"])
def compact_kernel(
    bases_ptr,  # int64 [caches]: device addresses
    rows_ptr,
    stride_rows_b,
    stride_rows_i,
    rows_columns,
    lens_ptr,
    stride_lens,
    qo_ptr,
    prefix_ptr,
    nodes_ptr,
    slots_ptr,  # tree_slots
    table_ptr,  # block_table or kv_indices
    stride_table,
    table_width,
    indptr_ptr,  # kv_indptr
    start_ptr,  # kv_start, read if HAS_START
    page_size,
    stride_cache_page,  # strides in words
    stride_cache_slot,
    stride_cache_head,
    head_words,
    columns,  # heads * head_words
    status_ptr,
    HAS_SLOTS: tl.constexpr,
    HAS_START: tl.constexpr,
    CSR: tl.constexpr,
    WORD: tl.constexpr,  # bytes of a word
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    b = tl.program_id(0)
    nodes = tl.load(nodes_ptr + b)
    count = tl.minimum(tl.minimum(tl.load(lens_ptr + b * stride_lens).to(tl.int32), nodes), rows_columns)
    start = tl.load(qo_ptr + b).to(tl.int64)
    prefix = tl.load(prefix_ptr + b).to(tl.int64)
    if HAS_START:
        first = tl.load(start_ptr + b).to(tl.int64)
        prefix -= tl.minimum(tl.maximum(first, 0), prefix)
    table_begin = b.to(tl.int64) * stride_table
    table_pages = start * 0 + table_width  # not table_width.to(): a width of 1 is compiled in as a plain int
    if CSR:
        table_begin = tl.load(indptr_ptr + b).to(tl.int64)
        table_end = tl.load(indptr_ptr + b + 1).to(tl.int64)
        table_pages = tl.where((table_begin >= 0) & (table_end <= table_width), table_end - table_begin, 0)
    address = tl.load(bases_ptr + tl.program_id(1))
    if WORD == 8:
        base = address.to(tl.pointer_type(tl.int64))
    elif WORD == 4:
        base = address.to(tl.pointer_type(tl.int32))
    elif WORD == 2:
        base = address.to(tl.pointer_type(tl.int16))
    else:
        base = address.to(tl.pointer_type(tl.int8))
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    part = (column // head_words).to(tl.int64) * stride_cache_head + column % head_words
    for first in range(0, count, ROWS):
        i = first + tl.arange(0, ROWS)
        row = tl.load(rows_ptr + b.to(tl.int64) * stride_rows_b + i * stride_rows_i, mask=i < count, other=-1)
        # Only rows above their place move; the rest of the path, and anything malformed, stays.
        held = (i < count) & (row > i) & (row < nodes)
        source, source_outside = slot_offsets(
            row, held, start, prefix, b, slots_ptr, table_ptr, table_begin, table_pages, page_size,
            stride_cache_page, stride_cache_slot, HAS_SLOTS,
        )  # fmt: skip
        target, target_outside = slot_offsets(
            i, held, start, prefix, b, slots_ptr, table_ptr, table_begin, table_pages, page_size,
            stride_cache_page, stride_cache_slot, HAS_SLOTS,
        )  # fmt: skip
        outside = source_outside | target_outside
        if tl.max(outside.to(tl.int32), 0) > 0:
            need = prefix + tl.max(tl.where(outside, row, 0), 0) + 1
            report(status_ptr, KV_CAPACITY, b, table_pages * page_size, need)
        move = (held & (outside == 0))[:, None] & inside[None, :]
        words = tl.load(base + source[:, None] + part[None, :], mask=move)
        tl.debug_barrier()
        tl.store(base + target[:, None] + part[None, :], words, mask=move)
        tl.debug_barrier()


_pointer_tables: dict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = {}


def _pointer_table(caches: list[Tensor]) -> Tensor:
    """Device table of base addresses. Kept for good: captured graphs hold its address."""
    key = (caches[0].device, tuple(cache.data_ptr() for cache in caches))
    table = _pointer_tables.get(key)
    if table is None:
        if key[0].type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"compact_kv_ meets these {len(caches)} caches for the first time during a graph capture; "
                "call it once before capturing, so that their pointer table exists"
            )
        table = torch.tensor(key[1], dtype=torch.int64, device=key[0])
        _pointer_tables[key] = table
    return table


def _word_bytes(cache: Tensor, strides: tuple[int, int, int]) -> int:
    """Widest word, in bytes, that divides a head's row, every stride and the base address."""
    size = cache.element_size()
    sizes = [cache.shape[-1] * size, cache.data_ptr(), *(stride * size for stride in strides)]
    return next(word for word in (8, 4, 2, 1) if all(value % word == 0 for value in sizes))


def compact_kv_triton_(
    caches: list[Tensor], kv: PagedKV, layout: TreeLayout, rows: Tensor, lens: Tensor, kv_layout: KVLayout
) -> None:
    """Launch `compact_kernel` once for each set of caches that differ only in their base address."""
    for launch in compact_launches(caches, kv, layout, rows, lens, kv_layout):
        launch()


def compact_launches(
    caches: list[Tensor], kv: PagedKV, layout: TreeLayout, rows: Tensor, lens: Tensor, kv_layout: KVLayout
) -> list[Launch]:
    """List what to launch; sets are independent of each other."""
    launches = []
    groups: dict[tuple[object, ...], list[Tensor]] = {}
    for cache in caches:
        strides = cache_strides(cache, kv.page_size, kv_layout)
        heads = cache.shape[-2] if cache.ndim == 3 or kv_layout == "NHD" else cache.shape[1]
        key = (cache.element_size(), cache.shape[-1], heads, strides, _word_bytes(cache, strides))
        groups.setdefault(key, []).append(cache)
    for (size, head_dim, heads, strides, word), group in groups.items():
        head_words = head_dim * size // word
        if heads * head_words == 0 or rows.shape[1] == 0:
            continue
        block = min(max(triton.next_power_of_2(heads * head_words), 32), 128)
        table = kv.table
        arguments = {
            "bases_ptr": _pointer_table(group),
            "rows_ptr": rows,
            "stride_rows_b": rows.stride(0),
            "stride_rows_i": rows.stride(1),
            "rows_columns": rows.shape[1],
            "lens_ptr": lens,
            "stride_lens": lens.stride(0),
            "qo_ptr": layout.qo_indptr,
            "prefix_ptr": layout.prefix_lens,
            "nodes_ptr": layout.num_nodes,
            "slots_ptr": table if kv.tree_slots is None else kv.tree_slots,
            "table_ptr": table,
            "stride_table": table.stride(0) if kv.block_table is not None else 0,
            "table_width": kv.launch_width,
            "indptr_ptr": table if kv.kv_indptr is None else kv.kv_indptr,
            "start_ptr": table if kv.kv_start is None else kv.kv_start,
            "page_size": kv.page_size,
            "stride_cache_page": strides[0] * size // word,
            "stride_cache_slot": strides[1] * size // word,
            "stride_cache_head": strides[2] * size // word,
            "head_words": head_words,
            "columns": heads * head_words,
            "status_ptr": layout.status,
            "HAS_SLOTS": kv.tree_slots is not None,
            "HAS_START": kv.kv_start is not None,
            "CSR": kv.kv_indptr is not None,
            "WORD": word,
            "ROWS": 8,
            "COLUMNS": block,
            "num_warps": 4,
        }
        grid = (rows.shape[0], len(group), triton.cdiv(heads * head_words, block))
        launches.append(Launch(compact_kernel, grid, arguments))
    return launches
