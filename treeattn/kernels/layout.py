"""The layout on the device: from parents or chains in one launch, from flat masks in two.

`ancestors_kernel` has a program for each (request, word). It loads the request's parents once and doubles
pointers in registers (`layout_torch` has the maths), so the depth of a tree costs log2(depth) gathers and no
dependent load, and malformed parents cost nothing more: they are found before the first round.

A mask is read by `read_rows_kernel`, a program a row: the prefix part is only searched for holes, the node
part packed into `mask_words`; what was found goes into `depths[row]` as a state. `finish_kernel`, a program
a request, reads states and words and writes every field. Two launches, since emptying a request for a hole
in any row needs all rows read first; words need only the second one.

Every launch has extra programs that write the rows past the last request. Each program derives the row
bounds of its request itself, so there is no prefix-sum kernel. All offsets are 64-bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from treeattn.layout import TreeLayout
    from treeattn.layout_input import LayoutInput

# Status codes (treeattn.status.Status; jitted code reads only constexpr globals).
PARENT = tl.constexpr(1)
NUM_NODES = tl.constexpr(2)
MASK_HOLE = tl.constexpr(3)
QO_INDPTR = tl.constexpr(4)
MASK_SIZE = tl.constexpr(7)
BIAS_VALUE = tl.constexpr(8)

# How the elements of a flat mask are stored.
BYTES = tl.constexpr(0)
BITS = tl.constexpr(1)
BIAS = tl.constexpr(2)

NO_COLUMN = tl.constexpr(2**31 - 1)
BIAS_MASKED = tl.constexpr(-1e4)
TAIL = 1024
_FORMATS = {"full": BYTES, "tree": BYTES, "packed": BITS, "bias": BIAS}


@triton.jit
def report(status_ptr, code, request, row, value):
    """Record the first finding; later ones lose the compare-and-swap."""
    if tl.atomic_cas(status_ptr, 0, code) == 0:
        tl.store(status_ptr + 1, request)
        tl.store(status_ptr + 2, tl.minimum(row.to(tl.int64), 2147483647).to(tl.int32))
        tl.store(
            status_ptr + 3, tl.minimum(tl.maximum(value.to(tl.int64), -2147483648), 2147483647).to(tl.int32)
        )


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _pick(values, index, b):
    return tl.sum(tl.where(index == b, values, 0), 0)


@triton.jit
def row_bounds(qo_ptr, stride_qo, batch, q_len, limit, RAGGED: tl.constexpr, BATCH: tl.constexpr):
    """Bounds of every request's rows, monotone and inside `limit`; requests past `batch` are empty."""
    index = tl.arange(0, BATCH)
    if RAGGED:
        inside = index < batch
        raw_low = tl.load(qo_ptr + index * stride_qo, mask=inside, other=0).to(tl.int64)
        raw_high = tl.load(qo_ptr + (index + 1) * stride_qo, mask=inside, other=0).to(tl.int64)
        first = _pick(raw_low, index, 0)
        low = tl.minimum(tl.maximum(tl.associative_scan(raw_low, 0, _larger), 0), limit)
        high = tl.minimum(tl.maximum(tl.maximum(tl.associative_scan(raw_high, 0, _larger), first), 0), limit)
        end = tl.max(tl.where(inside, high, 0), 0)
        low = tl.where(inside, tl.where(index == 0, 0, low), end)
        high = tl.where(inside, high, end)
    else:
        low = tl.minimum(index, batch).to(tl.int64) * q_len
        high = tl.minimum(index + 1, batch).to(tl.int64) * q_len
        raw_low = low
        raw_high = high
    return index, low, high, raw_low, raw_high


@triton.jit
def request_shape(
    b, low, high, raw_low, raw_high, index, prefix_ptr, stride_prefix, nodes_ptr, stride_nodes, batch, q_len,
    max_q_len, RAGGED: tl.constexpr, HAS_NODES: tl.constexpr,
):  # fmt: skip
    """Start, width, prefix and node count of request b; `code` is what is wrong with them, 0 for nothing."""
    if RAGGED:
        start = _pick(low, index, b)
        stop = _pick(high, index, b)
        raw_start = _pick(raw_low, index, b)
        raw_stop = _pick(raw_high, index, b)
    else:
        start = tl.minimum(b, batch).to(tl.int64) * q_len
        stop = tl.minimum(b + 1, batch).to(tl.int64) * q_len
        raw_start = start
        raw_stop = stop
    width = (stop - start).to(tl.int32)
    active = b < batch
    prefix = tl.load(prefix_ptr + b * stride_prefix, mask=active, other=0).to(tl.int64)
    given = width.to(tl.int64)
    if HAS_NODES:
        given = tl.load(nodes_ptr + b * stride_nodes, mask=active, other=0).to(tl.int64)
    broken = active & ((raw_start != start) | (raw_stop != stop) | (width > max_q_len))
    too_many = (given > width) & (prefix >= 0)
    code = tl.where(broken, QO_INDPTR, tl.where(too_many, NUM_NODES, 0))
    about_row = tl.where(broken, raw_start, width.to(tl.int64))
    about_value = tl.where(broken, raw_stop, given)
    nodes = tl.where((code == 0) & (prefix >= 0), tl.maximum(given, 0), 0).to(tl.int32)
    return start, width, tl.maximum(prefix, 0), nodes, code, about_row, about_value


@triton.jit
def block_sizes(index, low, high, prefix_ptr, stride_prefix, batch, WITH_PREFIX: tl.constexpr):
    """Elements of every request's block in the full form (or the tree form)."""
    widths = high - low
    if WITH_PREFIX:
        prefix = tl.load(prefix_ptr + index * stride_prefix, mask=index < batch, other=0).to(tl.int64)
        return widths * (tl.maximum(prefix, 0) + widths)
    return widths * widths


@triton.jit
def write_request(
    b, capacity, start, width, prefix, nodes, before, size, out_qo_ptr, out_prefix_ptr, out_nodes_ptr,
    out_mask_indptr_ptr
):  # fmt: skip
    """Per-request fields; the last program also closes both indptrs."""
    tl.store(out_qo_ptr + b, start.to(tl.int32))
    tl.store(out_mask_indptr_ptr + b, before)
    tl.store(out_prefix_ptr + b, prefix.to(tl.int32))
    tl.store(out_nodes_ptr + b, nodes)
    if b == capacity - 1:
        tl.store(out_qo_ptr + capacity, (start + width).to(tl.int32))
        tl.store(out_mask_indptr_ptr + capacity, before + size)


@triton.jit
def write_rows(
    rows, inside, parents, depths, positions, request, out_parents_ptr, out_depths_ptr, out_positions_ptr,
    out_request_ptr
):  # fmt: skip
    """Per-row fields beside the words."""
    tl.store(out_parents_ptr + rows, parents.to(tl.int32), mask=inside)
    tl.store(out_depths_ptr + rows, depths.to(tl.int32), mask=inside)
    tl.store(out_positions_ptr + rows, positions.to(tl.int64), mask=inside)
    tl.store(out_request_ptr + rows, request.to(tl.int32), mask=inside)


@triton.jit
def write_tail(
    first, words, end, total_q, out_words_ptr, out_parents_ptr, out_depths_ptr, out_positions_ptr,
    out_request_ptr, NUM_WORDS: tl.constexpr, WITH_FIELDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of no request from `end` on, among ROWS rows from `first`; `words` is the block to write."""
    rows = first + tl.arange(0, ROWS)
    inside = (rows >= end) & (rows < total_q)
    at = rows[:, None] * NUM_WORDS + words[None, :]
    tl.store(out_words_ptr + at, at * 0, mask=inside[:, None] & (words < NUM_WORDS)[None, :])
    if WITH_FIELDS:
        none = tl.full([ROWS], -1, tl.int32)
        write_rows(
            rows, inside, none, none + 1, tl.zeros_like(rows), none, out_parents_ptr, out_depths_ptr,
            out_positions_ptr, out_request_ptr,
        )  # fmt: skip


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
            given = tl.load(
                parents_ptr + base + local.to(tl.int64) * stride_parents_row, mask=local < nodes, other=-1
            )
            sound = tl.where(local == 0, given == -1, (given >= 0) & (given < local))
            first_bad = tl.min(tl.where((local < nodes) & (sound == 0), local, BLOCK), 0)
            bad = first_bad < BLOCK
            code = tl.where(bad, PARENT, code)
            about_row = tl.where(bad, first_bad, about_row)
            about_value = tl.where(bad, _pick(given.to(tl.int64), local, first_bad), about_value)
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
                b, capacity, start, width, prefix, nodes, before, _pick(sizes, index, b), out_qo_ptr,
                out_prefix_ptr, out_nodes_ptr, out_mask_indptr_ptr,
            )  # fmt: skip
            if code != 0:
                report(status_ptr, code, b, about_row, about_value)


@triton.jit
def _visible(mask_ptr, start, element, inside, FORMAT: tl.constexpr):
    """Load elements of a block: (visible, neither visible nor masked)."""
    if FORMAT == BITS:
        byte = tl.load(mask_ptr + start + element // 8, mask=inside, other=0)
        visible = ((byte.to(tl.int32) >> (element % 8).to(tl.int32)) & 1) != 0
        return visible, visible & (visible == 0)
    if FORMAT == BYTES:
        visible = tl.load(mask_ptr + start + element, mask=inside, other=0) != 0
        return visible, visible & (visible == 0)
    value = tl.load(mask_ptr + start + element, mask=inside, other=float("-inf")).to(tl.float32)
    visible = value == 0
    return visible, (visible == 0) & ((value <= BIAS_MASKED) == 0)


@triton.jit
def mask_block(
    b, index, low, high, prefix_ptr, stride_prefix, mask_indptr_ptr, stride_mask_indptr, mask_size, batch,
    FORMAT: tl.constexpr, WITH_PREFIX: tl.constexpr, HAS_INDPTR: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Where request b's block starts and ends in the mask (bytes for BITS), and whether it is all there."""
    sizes = block_sizes(index, low, high, prefix_ptr, stride_prefix, batch, WITH_PREFIX)
    if FORMAT == BITS:
        sizes = (sizes + 7) // 8
    size = _pick(sizes, index, b)
    if HAS_INDPTR:
        begin = tl.load(mask_indptr_ptr + b * stride_mask_indptr, mask=b < batch, other=0).to(tl.int64)
        short = (begin < 0) | (begin + size > mask_size)
    else:
        begin = tl.sum(tl.where(index < b, sizes, 0), 0)
        short = begin + size > mask_size
        if EXACT:
            short = tl.sum(sizes, 0) != mask_size
    return begin, begin + size, short


@triton.jit(do_not_specialize=["batch", "q_len", "limit", "mask_size", "max_q_len"])
def read_rows_kernel(
    mask_ptr,
    mask_indptr_ptr,
    stride_mask_indptr,
    mask_size,
    qo_ptr,
    stride_qo,
    prefix_ptr,
    stride_prefix,
    nodes_ptr,
    stride_nodes,
    out_words_ptr,
    out_state_ptr,  # depths: 0 = nothing visible, 1 = sound, 2 + c = hole at c, -1 - c = neither at c
    batch,
    q_len,
    limit,
    max_q_len,
    NUM_WORDS: tl.constexpr,
    FORMAT: tl.constexpr,
    WITH_PREFIX: tl.constexpr,
    HAS_INDPTR: tl.constexpr,
    EXACT: tl.constexpr,
    RAGGED: tl.constexpr,
    HAS_NODES: tl.constexpr,
    BATCH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i = tl.program_id(0)
    b = tl.program_id(1)
    index, low, high, raw_low, raw_high = row_bounds(qo_ptr, stride_qo, batch, q_len, limit, RAGGED, BATCH)
    start, width, prefix, nodes, _code, _row, _value = request_shape(
        b, low, high, raw_low, raw_high, index, prefix_ptr, stride_prefix, nodes_ptr, stride_nodes, batch,
        q_len, max_q_len, RAGGED, HAS_NODES,
    )  # fmt: skip
    begin, _stop, short = mask_block(
        b, index, low, high, prefix_ptr, stride_prefix, mask_indptr_ptr, stride_mask_indptr, mask_size, batch,
        FORMAT, WITH_PREFIX, HAS_INDPTR, EXACT,
    )  # fmt: skip
    if (i < nodes) & (short == 0):
        if WITH_PREFIX == 0:
            prefix = prefix * 0
        row = i.to(tl.int64) * (prefix + width)
        hole = width * 0 + NO_COLUMN
        odd = width * 0 + NO_COLUMN
        some = width * 0
        if WITH_PREFIX:
            for first in range(0, prefix, CHUNK):
                column = first + tl.arange(0, CHUNK).to(tl.int64)
                inside = column < prefix
                visible, neither = _visible(mask_ptr, begin, row + column, inside, FORMAT)
                hole = tl.minimum(
                    hole, tl.min(tl.where(inside & (visible == 0), column, NO_COLUMN), 0).to(tl.int32)
                )
                odd = tl.minimum(odd, tl.min(tl.where(inside & neither, column, NO_COLUMN), 0).to(tl.int32))
                some = tl.maximum(some, tl.max((inside & visible).to(tl.int32), 0))
        bit = tl.arange(0, 64).to(tl.int64)
        for w in range(NUM_WORDS):
            node = w * 64 + bit
            inside = node < width
            visible, neither = _visible(mask_ptr, begin, row + prefix + node, inside, FORMAT)
            word = tl.sum((inside & visible).to(tl.int64) << bit, 0)
            tl.store(out_words_ptr + (start + i) * NUM_WORDS + w, word)
            odd = tl.minimum(
                odd, tl.min(tl.where(inside & neither, prefix + node, NO_COLUMN), 0).to(tl.int32)
            )
            some = tl.where(word != 0, 1, some)
        state = tl.where(some == 0, 0, tl.where(hole == NO_COLUMN, 1, 2 + tl.minimum(hole, NO_COLUMN - 2)))
        state = tl.where(odd == NO_COLUMN, state, -1 - odd)
        tl.store(out_state_ptr + start + i, state)


@triton.jit
def _popcount(x):
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    x = x + (x >> 32)
    return (x & 0x7F).to(tl.int32)


@triton.jit
def _low_bits(count):
    """Uint64 with the lowest `count` bits set, count clamped to 0..64."""
    kept = tl.minimum(tl.maximum(count, 0), 64).to(tl.uint64)
    one = kept * 0 + 1
    return tl.where(kept == 64, ~(kept * 0), (one << tl.minimum(kept, 63)) - 1)


@triton.jit
def _highest(x):
    """Index of the highest set bit, -1 for zero."""
    x = x | (x >> 1)
    x = x | (x >> 2)
    x = x | (x >> 4)
    x = x | (x >> 8)
    x = x | (x >> 16)
    x = x | (x >> 32)
    return _popcount(x) - 1


@triton.jit(
    do_not_specialize=[
        "batch",
        "capacity",
        "q_len",
        "limit",
        "total_q",
        "max_q_len",
        "mask_size",
        "positions_size",
    ]
)
def finish_kernel(
    words_ptr,  # int64, row r word w at r * stride_words_row + w * stride_words_word; may be out_words_ptr
    stride_words_row,
    stride_words_word,
    words_given,  # words of a row there are
    positions_ptr,
    positions_size,
    mask_indptr_ptr,
    stride_mask_indptr,
    mask_size,
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
    out_words_ptr,
    out_parents_ptr,
    out_depths_ptr,  # holds the states of read_rows_kernel on entry
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
    HAS_STATES: tl.constexpr,
    FORMAT: tl.constexpr,
    WITH_PREFIX: tl.constexpr,
    HAS_INDPTR: tl.constexpr,
    EXACT: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    RAGGED: tl.constexpr,
    HAS_NODES: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    b = tl.program_id(0)
    index, low, high, raw_low, raw_high = row_bounds(qo_ptr, stride_qo, batch, q_len, limit, RAGGED, BATCH)
    word = tl.arange(0, WORDS)
    if b >= capacity:
        write_tail(
            (b - capacity).to(tl.int64) * ROWS, word, tl.max(high, 0), total_q, out_words_ptr,
            out_parents_ptr, out_depths_ptr, out_positions_ptr, out_request_ptr, NUM_WORDS, True, ROWS,
        )  # fmt: skip
    else:
        start, width, prefix, nodes, code, about_row, about_value = request_shape(
            b, low, high, raw_low, raw_high, index, prefix_ptr, stride_prefix, nodes_ptr, stride_nodes,
            batch, q_len, max_q_len, RAGGED, HAS_NODES,
        )  # fmt: skip
        if HAS_STATES:
            _begin, stop, short = mask_block(
                b, index, low, high, prefix_ptr, stride_prefix, mask_indptr_ptr, stride_mask_indptr,
                mask_size, batch, FORMAT, WITH_PREFIX, HAS_INDPTR, EXACT,
            )  # fmt: skip
            short = short & (nodes > 0)
            code = tl.where(short, MASK_SIZE, code)
            about_row = tl.where(short, mask_size, about_row)
            about_value = tl.where(short, stop, about_value)
            nodes = tl.where(short, 0, nodes)
            all_rows = tl.arange(0, BLOCK)
            state = tl.load(out_depths_ptr + start + all_rows, mask=all_rows < nodes, other=1)
            odd_row = tl.min(tl.where(state < 0, all_rows, BLOCK), 0)
            if WITH_PREFIX:
                if HAS_NODES == 0:
                    nodes = tl.max(tl.where((all_rows < nodes) & (state != 0), all_rows + 1, 0), 0)
                hides = (all_rows < nodes) & ((state > 1) | ((state == 0) & (prefix > 0)))
                hole_row = tl.min(tl.where(hides, all_rows, BLOCK), 0)
                hole = hole_row < BLOCK
                code = tl.where(hole, MASK_HOLE, code)
                about_row = tl.where(hole, hole_row, about_row)
                about_value = tl.where(hole, tl.maximum(_pick(state, all_rows, hole_row) - 2, 0), about_value)
                nodes = tl.where(hole, 0, nodes)
            odd = odd_row < BLOCK
            code = tl.where(odd, BIAS_VALUE, code)
            about_row = tl.where(odd, odd_row, about_row)
            about_value = tl.where(odd, -1 - _pick(state, all_rows, odd_row), about_value)
            nodes = tl.where(odd, 0, nodes)
        for first in range(0, width, ROWS):
            local = first + tl.arange(0, ROWS)
            rows = start + local
            inside = local < width
            real = local < nodes
            held = real[:, None] & (word < words_given)[None, :] & (word < NUM_WORDS)[None, :]
            source = (
                words_ptr + rows[:, None] * stride_words_row + word[None, :].to(tl.int64) * stride_words_word
            )
            bits = tl.load(source, mask=held, other=0).to(tl.uint64, bitcast=True)
            bits = bits & _low_bits(nodes - word * 64)[None, :]
            seen = tl.sum(_popcount(bits), 1)
            below = bits & _low_bits(local[:, None] - word[None, :] * 64)
            parent = tl.max(tl.where(below != 0, word[None, :] * 64 + _highest(below), -1), 1)
            depth = tl.where(real, tl.maximum(seen - 1, 0), 0)
            position = prefix + depth
            if HAS_POSITIONS:
                known = real & (rows < positions_size)
                position = tl.load(positions_ptr + rows, mask=known, other=0).to(tl.int64)
                position = tl.where(known, position, prefix + depth)
                depth = tl.where(real, (position - prefix).to(tl.int32), 0)
            at = out_words_ptr + rows[:, None] * NUM_WORDS + word[None, :]
            keep = inside[:, None] & (word < NUM_WORDS)[None, :]
            tl.store(at, bits.to(tl.int64, bitcast=True), mask=keep)
            write_rows(
                rows, inside, tl.where(real, parent, -1), depth, position, local * 0 + b, out_parents_ptr,
                out_depths_ptr, out_positions_ptr, out_request_ptr,
            )  # fmt: skip
        sizes = block_sizes(index, low, high, prefix_ptr, stride_prefix, batch, True)
        before = tl.sum(tl.where(index < b, sizes, 0), 0)
        write_request(
            b, capacity, start, width, prefix, nodes, before, _pick(sizes, index, b), out_qo_ptr,
            out_prefix_ptr, out_nodes_ptr, out_mask_indptr_ptr,
        )  # fmt: skip
        if code != 0:
            report(status_ptr, code, b, about_row, about_value)


def _stride(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def write_layout_triton_(layout: TreeLayout, source: LayoutInput) -> None:
    """Launch the kernels for `source` on the current stream; no host read and no allocation."""
    if layout.batch == 0:
        return
    shape = _shape_arguments(layout, source)
    outputs = _outputs(layout)
    full = source.q_len is not None and source.batch * source.q_len == layout.total_q
    if source.kind in ("parents", "chain"):
        tail = 0 if full else triton.cdiv(layout.total_q, TAIL)
        block = max(triton.next_power_of_2(layout.max_q_len), 16)
        data = source.data if source.data is not None else layout.parents
        ancestors_kernel[(layout.batch + tail, layout.num_words)](
            parents_ptr=data,
            stride_parents_b=data.stride(0) if data.dim() == 2 else 0,
            stride_parents_row=data.stride(-1),
            total_q=layout.total_q,
            capacity=layout.batch,
            CHAIN=source.kind == "chain",
            BLOCK=block,
            TAIL_BLOCK=TAIL,
            # A warp for every four rows a lane: narrow trees then gather by shuffles inside one warp.
            num_warps=min(max(block // 128, 1), 8),
            **shape,
            **outputs,
        )
        return
    _write_mask(layout, source, shape, outputs, full)


def _write_mask(
    layout: TreeLayout, source: LayoutInput, shape: dict[str, Any], outputs: dict[str, Any], full: bool
) -> None:
    flat = source.kind != "words"
    data = source.data
    mask = {
        "mask_indptr_ptr": source.mask_indptr if source.mask_indptr is not None else layout.mask_indptr,
        "stride_mask_indptr": _stride(source.mask_indptr),
        "mask_size": data.numel(),
        "FORMAT": _FORMATS.get(source.kind, BYTES),
        "WITH_PREFIX": source.kind in ("full", "packed", "bias"),
        "HAS_INDPTR": source.mask_indptr is not None,
        "EXACT": source.exact,
    }
    if flat and layout.max_q_len > 0:
        read_rows_kernel[(layout.max_q_len, layout.batch)](
            mask_ptr=data.view(torch.uint8) if data.dtype == torch.bool else data,
            out_words_ptr=layout.mask_words,
            out_state_ptr=layout.depths,
            CHUNK=1024,
            num_warps=4,
            **mask,
            **shape,
        )
    words = layout.mask_words if flat else data
    rows = 32 if layout.num_words <= 8 else 16
    tail = 0 if full else triton.cdiv(layout.total_q, rows)
    finish_kernel[(layout.batch + tail,)](
        words_ptr=words,
        stride_words_row=words.stride(0),
        stride_words_word=words.stride(1),
        words_given=words.shape[1],
        positions_ptr=source.positions if source.positions is not None else layout.positions,
        positions_size=0 if source.positions is None else source.positions.numel(),
        total_q=layout.total_q,
        capacity=layout.batch,
        HAS_STATES=flat,
        HAS_POSITIONS=source.positions is not None,
        BLOCK=max(triton.next_power_of_2(layout.max_q_len), 16),
        ROWS=rows,
        WORDS=triton.next_power_of_2(layout.num_words),
        num_warps=4,
        **mask,
        **shape,
        **outputs,
    )


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
