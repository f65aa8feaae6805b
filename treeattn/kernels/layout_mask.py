"""The layout from a mask: rows read and packed, then every field derived from the words.

`read_rows_kernel` has up to SPLITS programs a row, each with a stretch of the prefix part, so that one long row is
read by several multiprocessors at once; the first also packs the node part into `mask_words`. `finish_kernel`, a
program a request, reads what they found and writes every field. Two launches, since a hole in any row empties the
whole request, which needs all rows read first; words need only the second.

Between the two, fields that the second writes anyway hold what was found:

- `depths[row]`, of the node part: 0 = no node is visible, 1 = some, -1 - j = node j is neither visible nor masked;
- byte s of `parents[row]`, of stretch s of the prefix part: SEEN, HIDDEN and ODD bits. Which column it was is looked
  up only where the request is refused for it.
"""

import triton
import triton.language as tl

from treeattn.kernels.layout_rows import (
    block_sizes,
    pick,
    report,
    request_shape,
    row_bounds,
    write_request,
    write_rows,
    write_tail,
)

# Status codes (treeattn.status.Status).
MASK_HOLE = tl.constexpr(3)
MASK_SIZE = tl.constexpr(7)
BIAS_VALUE = tl.constexpr(8)

# How the elements of a flat mask are stored.
BYTES = tl.constexpr(0)
BITS = tl.constexpr(1)
BIAS = tl.constexpr(2)

SPLITS = 4  # bytes of an entry of `parents`
THREADS, COLUMNS = 256, 32  # of a program that reads a prefix part, and columns that each of them has in flight

SEEN = tl.constexpr(1)  # some column of the stretch is visible
HIDDEN = tl.constexpr(2)  # some is not
ODD = tl.constexpr(4)  # some is neither visible nor masked

NO_COLUMN = tl.constexpr(2**31 - 1)
# treeattn.masks.BIAS_MASKED
BIAS_MASKED = tl.constexpr(-1e4)


@triton.jit
def _visible(mask_ptr, start, first, lane, inside, FORMAT: tl.constexpr):
    """Load elements `first + lane` of a block: (visible, neither visible nor masked); neither of them if not inside."""
    if FORMAT == BITS:
        bit = (first % 8).to(tl.int32) + lane
        byte = tl.load(mask_ptr + (start + first // 8) + bit // 8, mask=inside, other=0)
        visible = ((byte.to(tl.int32) >> (bit % 8)) & 1) != 0
        return visible, visible & (visible == 0)
    if FORMAT == BYTES:
        visible = tl.load(mask_ptr + (start + first) + lane, mask=inside, other=0) != 0
        return visible, visible & (visible == 0)
    value = tl.load(mask_ptr + (start + first) + lane, mask=inside, other=float("-inf")).to(tl.float32)
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
    size = pick(sizes, index, b)
    if HAS_INDPTR:
        begin = tl.load(mask_indptr_ptr + b * stride_mask_indptr, mask=b < batch, other=0).to(tl.int64)
        short = (begin < 0) | (begin + size > mask_size)
    else:
        begin = tl.sum(tl.where(index < b, sizes, 0), 0)
        short = begin + size > mask_size
        if EXACT:
            short = tl.sum(sizes, 0) != mask_size
    return begin, begin + size, short


@triton.jit
def _prefix_flags(
    mask_ptr, begin, row, low, high, FORMAT: tl.constexpr, THREADS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """SEEN, HIDDEN and ODD of columns `low .. high` of the row whose first element is `row`."""
    lane = tl.arange(0, COLUMNS)[:, None] * THREADS + tl.arange(0, THREADS)[None, :]
    # each thread counts its own: a sum over all in the loop would have the warps wait for each other in every round
    seen = tl.zeros([THREADS], tl.int32)
    odd = tl.zeros([THREADS], tl.int32)
    for first in range(low, high, THREADS * COLUMNS):
        inside = lane < tl.minimum(high - first, THREADS * COLUMNS).to(tl.int32)
        visible, neither = _visible(mask_ptr, begin, row + first, lane, inside, FORMAT)
        seen += tl.sum(visible.to(tl.int32), 0)
        if FORMAT == BIAS:
            odd += tl.sum(neither.to(tl.int32), 0)
    count = tl.sum(seen, 0)
    flags = tl.where(count > 0, SEEN, 0) | tl.where(count < high - low, HIDDEN, 0)
    if FORMAT == BIAS:
        flags = flags | tl.where(tl.sum(odd, 0) > 0, ODD, 0)
    return flags


@triton.jit
def _first_column(mask_ptr, begin, row, prefix, FORMAT: tl.constexpr, WANTED: tl.constexpr, CHUNK: tl.constexpr):
    """The first column of a row's prefix part that is HIDDEN, or ODD; NO_COLUMN if none is."""
    lane = tl.arange(0, CHUNK)
    first = prefix * 0
    found = prefix * 0 + NO_COLUMN
    while (first < prefix) & (found == NO_COLUMN):
        inside = lane < tl.minimum(prefix - first, CHUNK).to(tl.int32)
        visible, neither = _visible(mask_ptr, begin, row + first, lane, inside, FORMAT)
        if WANTED == ODD:
            wanted = neither
        else:
            wanted = inside & (visible == 0)
        found = tl.min(tl.where(wanted, first + lane, NO_COLUMN), 0)
        first += CHUNK
    return found


@triton.jit(do_not_specialize=["batch", "q_len", "limit", "mask_size", "max_q_len", "splits"])
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
    out_state_ptr,  # depths
    out_flags_ptr,  # parents
    batch,
    q_len,
    limit,
    max_q_len,
    splits,  # programs of a row, at most SPLITS
    NUM_WORDS: tl.constexpr,
    FORMAT: tl.constexpr,
    WITH_PREFIX: tl.constexpr,
    HAS_INDPTR: tl.constexpr,
    EXACT: tl.constexpr,
    RAGGED: tl.constexpr,
    HAS_NODES: tl.constexpr,
    BATCH: tl.constexpr,
    THREADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    i = tl.program_id(0)
    b = tl.program_id(1)
    split = tl.program_id(2)
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
        if WITH_PREFIX:
            stretch = tl.cdiv(prefix, splits)
            flags = _prefix_flags(
                mask_ptr, begin, row, tl.minimum(split * stretch, prefix), tl.minimum((split + 1) * stretch, prefix),
                FORMAT, THREADS, COLUMNS,
            )  # fmt: skip
            flags_ptr = out_flags_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
            tl.store(flags_ptr + (start + i) * 4 + split, flags.to(tl.uint8))
        if split == 0:
            odd = width * 0 + NO_COLUMN
            some = width * 0
            bit = tl.arange(0, 64)
            for w in range(NUM_WORDS):
                inside = w * 64 + bit < width
                visible, neither = _visible(mask_ptr, begin, row + prefix + w * 64, bit, inside, FORMAT)
                word = tl.sum(visible.to(tl.int64) << bit.to(tl.int64), 0)
                tl.store(out_words_ptr + (start + i) * NUM_WORDS + w, word)
                odd = tl.minimum(odd, tl.min(tl.where(neither, w * 64 + bit, NO_COLUMN), 0))
                some = tl.where(word != 0, 1, some)
            tl.store(out_state_ptr + start + i, tl.where(odd == NO_COLUMN, some, -1 - odd))


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
        "splits",
    ]
)
def finish_kernel(
    words_ptr,  # int64, row r word w at r * stride_words_row + w * stride_words_word; may be out_words_ptr
    stride_words_row,
    stride_words_word,
    words_given,  # words of a row there are
    positions_ptr,
    positions_size,
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
    out_qo_ptr,
    out_prefix_ptr,
    out_nodes_ptr,
    out_mask_indptr_ptr,
    out_words_ptr,
    out_parents_ptr,  # holds the flags of read_rows_kernel on entry
    out_depths_ptr,  # and its states
    out_positions_ptr,
    out_request_ptr,
    status_ptr,
    batch,
    capacity,
    q_len,
    limit,
    total_q,
    max_q_len,
    splits,
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
    CHUNK: tl.constexpr,
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
            begin, stop, short = mask_block(
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
            odd = odd_row < BLOCK
            odd_value = prefix - 1 - pick(state, all_rows, odd_row)
            if WITH_PREFIX:
                flags = tl.load(out_parents_ptr + start + all_rows, mask=all_rows < nodes, other=SEEN)
                flags = flags & _low_bits(8 * splits).to(tl.int32)
                odd_rows = (state < 0) | ((flags & (ODD * 0x01010101)) != 0)
                none = (state == 0) & ((flags & (SEEN * 0x01010101)) == 0) & (odd_rows == 0)
                if HAS_NODES == 0:
                    nodes = tl.max(tl.where((all_rows < nodes) & (none == 0), all_rows + 1, 0), 0)
                hides = none & (prefix > 0)
                hides = hides | ((none == 0) & (odd_rows == 0) & ((flags & (HIDDEN * 0x01010101)) != 0))
                hole_row = tl.min(tl.where(hides & (all_rows < nodes), all_rows, BLOCK), 0)
                odd_row = tl.min(tl.where(odd_rows, all_rows, BLOCK), 0)
                odd = odd_row < BLOCK
                if hole_row < BLOCK:
                    code = tl.full([], MASK_HOLE, tl.int32)
                    about_row = hole_row.to(tl.int64)
                    row = about_row * (prefix + width)
                    about_value = _first_column(mask_ptr, begin, row, prefix, FORMAT, HIDDEN, CHUNK)
                    nodes = nodes * 0
                if (FORMAT == BIAS) & odd:
                    row = odd_row.to(tl.int64) * (prefix + width)
                    column = _first_column(mask_ptr, begin, row, prefix, FORMAT, ODD, CHUNK)
                    node = prefix - 1 - pick(state, all_rows, odd_row)
                    odd_value = tl.where(column == NO_COLUMN, node, column)
            code = tl.where(odd, BIAS_VALUE, code)
            about_row = tl.where(odd, odd_row, about_row)
            about_value = tl.where(odd, odd_value, about_value)
            nodes = tl.where(odd, 0, nodes)
            tl.debug_barrier()  # warps may each have read all states and flags, which the rows below overwrite
        else:
            narrow = nodes > words_given * 64
            code = tl.where(narrow, MASK_SIZE, code)
            about_row = tl.where(narrow, words_given * 64, about_row)
            about_value = tl.where(narrow, nodes, about_value)
            nodes = tl.where(narrow, 0, nodes)
        for first in range(0, width, ROWS):
            local = first + tl.arange(0, ROWS)
            rows = start + local
            inside = local < width
            real = local < nodes
            held = real[:, None] & (word < words_given)[None, :] & (word < NUM_WORDS)[None, :]
            source = words_ptr + rows[:, None] * stride_words_row + word[None, :].to(tl.int64) * stride_words_word
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
            b, capacity, start, width, prefix, nodes, before, pick(sizes, index, b), out_qo_ptr,
            out_prefix_ptr, out_nodes_ptr, out_mask_indptr_ptr,
        )  # fmt: skip
        if code != 0:
            report(status_ptr, code, b, about_row, about_value)
