"""Tree attention over a paged prefix and the draft tree, and the merge of its partials.

``attention_kernel``
    One program walks its stretch of the plan. An item is a tile of packed query rows (node-major: row ``r`` of a KV
    head is node ``r // GROUP``, query head ``r % GROUP``) against KV tiles: first the full tiles of the prefix, which
    need no mask and no bounds, then the *edge*, in tiles of ``BLOCK_E``: what is left of the prefix, and the tree. An
    item that lies whole in one program is written to ``out``; a part of one goes to a partial slot.
``finish_kernel``
    Merges the partials of every item that was cut, in KV order, and writes out 0 and lse -inf in padding rows.

Row tiles: tree widths are 2^k + 1, so packed rows are 64 * m + GROUP. A tile has ``BLOCK_M`` rows for the warpgroup
matrix unit and ``BLOCK_R`` more that ride on the same K and V in shared memory, instead of doubling the tile.
Scores are kept in base 2 (``sm_scale`` carries log2 e).
"""

import triton
import triton.language as tl

from .plan import (
    BLOCK_E,
    WORK_FIELDS,
    WORK_FIRST_ROW,
    WORK_KV_HEAD,
    WORK_LEFT,
    WORK_NODES,
    WORK_PREFIX,
    WORK_REQUEST,
    WORK_ROW_TILE,
    WORK_ROW_TILES,
    WORK_TILE,
    WORK_TILE_ROWS,
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def row_offsets(rows, stride_row, stride_head, GROUP: tl.constexpr, WIDE: tl.constexpr):
    """Element offsets of packed rows from the first one of their request and KV head.

    int32 unless WIDE (an offset inside one request may pass 2^31); unsigned, so that a power of two is a shift.
    """
    node = (rows.to(tl.uint32) // GROUP).to(tl.int32)
    head = (rows.to(tl.uint32) % GROUP).to(tl.int32)
    if WIDE:
        return node.to(tl.int64) * stride_row + head.to(tl.int64) * stride_head
    else:
        return node * stride_row + head * stride_head


@triton.jit
def head_base(ptr, first_row, kv_head, stride_row, stride_head, GROUP: tl.constexpr):
    """Where row 0 of a request's KV head is: 64-bit, once a tile."""
    return ptr + first_row.to(tl.int64) * stride_row + (kv_head * GROUP).to(tl.int64) * stride_head


@triton.jit
def load_rows(base, offsets, valid, NEGATE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Packed query rows ``[rows, BLOCK_D]``, negated if asked; rows that are not valid are 0."""
    d = tl.arange(0, BLOCK_D)
    mask = valid[:, None]
    if BLOCK_D != HEAD_DIM:
        mask = mask & (d < HEAD_DIM)[None, :]
    q = tl.load(base + offsets[:, None] + d[None, :], mask=mask, other=0.0)
    if NEGATE:
        q = -q
    return q


@triton.jit
def page_offsets(table_ptr, position, valid, stride_page, stride_slot, PAGE_SIZE: tl.constexpr):
    """Element offsets of logical positions through the page table; only valid positions read it."""
    page = tl.load(table_ptr + position.to(tl.uint32) // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
    if PAGE_SIZE == 1:
        return page * stride_page
    return page * stride_page + (position % PAGE_SIZE) * stride_slot


@triton.jit
def tile_pages(table_ptr, tile, n, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids of a full prefix tile: one where the tile lies inside a page, else one for each of its keys."""
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(table_ptr + tile * BLOCK_N // PAGE_SIZE)
    else:
        return tl.load(table_ptr + (tile * BLOCK_N + n) // PAGE_SIZE)


@triton.jit
def tile_offsets(pages, tile, n, stride_page, stride_slot, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Element offsets ``[BLOCK_N]`` of a full prefix tile, from its :func:`tile_pages`."""
    if PAGE_SIZE == 1:
        return pages.to(tl.int64) * stride_page
    else:
        return pages.to(tl.int64) * stride_page + ((tile * BLOCK_N + n) % PAGE_SIZE) * stride_slot


@triton.jit
def load_tile(ptr, offsets, valid, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BOUNDED: tl.constexpr):
    """K or V rows ``[BLOCK_N, BLOCK_D]``. What is not valid is 0 and never read: a NaN there cannot poison."""
    d = tl.arange(0, BLOCK_D)
    pointers = ptr + offsets[:, None] + d[None, :]
    if BOUNDED:
        return tl.load(pointers, mask=valid[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    if BLOCK_D != HEAD_DIM:
        return tl.load(pointers, mask=(d < HEAD_DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def bit_or(a, b):
    return a | b


@triton.jit
def tree_words(base, rows, valid, word, num_words, GROUP: tl.constexpr):
    """32-bit mask word number `word` of each packed row; 0 for a row that does not exist."""
    node = (rows.to(tl.uint32) // GROUP).to(tl.int32)
    return tl.load(base + node * num_words + word, mask=valid, other=0)


@triton.jit
def attend(q, k, v, acc, row_max, row_sum, sees, sm_scale, MASKED: tl.constexpr):
    """One KV tile of the online softmax; ``row_max`` is of the scores before ``sm_scale``, which must be positive.

    ``sees`` is read only if MASKED.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        scores = tl.where(sees, scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    if MASKED:
        # a row that has seen nothing yet keeps -inf as its maximum; -inf - -inf would be NaN
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
    else:
        base = new_max
    base = base * sm_scale
    weights = tl.exp2(scores * sm_scale - base[:, None])
    decay = tl.exp2(row_max * sm_scale - base)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def attend_few(q_t, k, v, acc_t, row_max, row_sum, sees_t, sm_scale, MASKED: tl.constexpr):
    """:func:`attend` for a handful of rows, transposed: keys, then head dims, are the long side of the products.

    The matrix unit's tile is 64 rows at least. With K (and V transposed) as the left operand a few query rows cost
    their own number of columns, and K and V are read from the shared memory where the main rows have them.
    """
    scores = tl.dot(k, q_t, input_precision="ieee")
    if MASKED:
        scores = tl.where(sees_t, scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 0))
    if MASKED:
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
    else:
        base = new_max
    base = base * sm_scale
    weights = tl.exp2(scores * sm_scale - base[None, :])
    decay = tl.exp2(row_max * sm_scale - base)
    row_sum = row_sum * decay + tl.sum(weights, 0)
    acc_t = tl.dot(tl.trans(v), weights.to(v.dtype), acc_t * decay[None, :], input_precision="ieee")
    return acc_t, new_max, row_sum


@triton.jit
def normalise(acc, row_max, row_sum):
    """Output and base-2 log-sum-exp of rows; 0 and -inf for a row that saw nothing."""
    seen = row_sum > 0
    total = tl.where(seen, row_sum, 1.0)
    return acc * (1.0 / total)[:, None], tl.where(seen, row_max + tl.log2(total), -float("inf"))


@triton.jit
def store_out(out_base, lse_base, acc, lse2, rows, valid, stride_out_row, stride_out_head, stride_lse_row,
              stride_lse_head, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
              HAS_LSE: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Write finished rows to ``out`` and ``lse``."""
    d = tl.arange(0, BLOCK_D)
    mask = valid[:, None]
    if BLOCK_D != HEAD_DIM:
        mask = mask & (d < HEAD_DIM)[None, :]
    offsets = row_offsets(rows, stride_out_row, stride_out_head, GROUP, WIDE)
    tl.store(out_base + offsets[:, None] + d[None, :], acc.to(out_base.dtype.element_ty), mask=mask)
    if HAS_LSE:
        tl.store(lse_base + row_offsets(rows, stride_lse_row, stride_lse_head, GROUP, WIDE), lse2 * LN2, mask=valid)


@triton.jit
def store_partial(out_base, lse_base, acc, lse2, local_rows, valid, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write a part of an item, float32, to its slot."""
    d = tl.arange(0, BLOCK_D)
    mask = valid[:, None]
    if BLOCK_D != HEAD_DIM:
        mask = mask & (d < HEAD_DIM)[None, :]
    tl.store(out_base + (local_rows * HEAD_DIM)[:, None] + d[None, :], acc, mask=mask)
    tl.store(lse_base + local_rows, lse2, mask=valid)


@triton.jit
def attention_kernel(
    q_ptr,  # [total_q, num_qo_heads, head_dim]
    k_ptr,  # paged cache, through stride_k_*
    v_ptr,
    k_tree_ptr,  # [total_q, kv_heads, head_dim], read if FRESH
    v_tree_ptr,
    out_ptr,  # [total_q, num_qo_heads, head_dim]
    lse_ptr,  # float32 [total_q, num_qo_heads] through stride_lse_*, written if HAS_LSE
    partial_out_ptr,  # float32 [2 * num_programs, TILE_ROWS, head_dim]
    partial_lse_ptr,  # float32 [2 * num_programs, TILE_ROWS], base 2
    work_ptr,  # the plan
    nodes_ptr,
    prefix_lens_ptr,
    qo_indptr_ptr,
    mask_words_ptr,  # mask words as int32 [total_q, num_words]
    kv_indptr_ptr,  # read if CSR
    table_ptr,  # kv_indices, or the block table
    tree_slots_ptr,  # [total_q], read if TREE_SLOTS
    sm_scale,  # times log2(e)
    total_q,  # rows of q: what a replayed graph may touch, whatever the layout claims
    num_words,
    stride_table_request,
    stride_q_row,
    stride_q_head,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    stride_k_tree_row,
    stride_k_tree_head,
    stride_v_tree_row,
    stride_v_tree_head,
    stride_out_row,
    stride_out_head,
    stride_lse_row,
    stride_lse_head,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CSR: tl.constexpr,
    TREE_SLOTS: tl.constexpr,
    FRESH: tl.constexpr,
    HAS_LSE: tl.constexpr,
    NEGATE: tl.constexpr,  # sm_scale is negative
    WIDE: tl.constexpr,  # offsets inside one request may pass 2^31
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SWAP_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,  # finish_kernel may start early and wait for this one
):
    TILE_ROWS: tl.constexpr = BLOCK_M + BLOCK_R
    program = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    work = work_ptr + program * WORK_FIELDS
    request = tl.load(work + WORK_REQUEST)
    kv_head = tl.load(work + WORK_KV_HEAD)
    row_tile = tl.load(work + WORK_ROW_TILE)
    tile = tl.load(work + WORK_TILE)
    left = tl.load(work + WORK_LEFT)
    nodes = tl.load(work + WORK_NODES)
    prefix = tl.load(work + WORK_PREFIX)
    first_row = tl.load(work + WORK_FIRST_ROW)
    row_tiles = tl.load(work + WORK_ROW_TILES)
    tile_rows = tl.load(work + WORK_TILE_ROWS)  # rows are dealt evenly, so that no tile is nearly empty
    n = tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_E)
    # maxima are taken before the scale, which must be positive then (and 0 * -inf must not be NaN)
    scale = tl.maximum(tl.abs(sm_scale), 1e-30)

    while left > 0:
        full_tiles = prefix // BLOCK_N
        tail_tiles = tl.cdiv(prefix % BLOCK_N, BLOCK_E)
        item_tiles = full_tiles + tail_tiles + tl.cdiv(nodes, BLOCK_E)
        if nodes > 0:
            row0 = row_tile * tile_rows
            row_end = tl.minimum(row0 + tile_rows, tl.minimum(nodes, total_q - first_row) * GROUP)
            last = tl.minimum(item_tiles, tile + left)

            m = tl.arange(0, BLOCK_M)
            rows = row0 + m
            valid = rows < row_end
            q_base = head_base(q_ptr, first_row, kv_head, stride_q_row, stride_q_head, GROUP)
            q = load_rows(q_base, row_offsets(rows, stride_q_row, stride_q_head, GROUP, WIDE), valid, NEGATE, HEAD_DIM,
                          BLOCK_D)  # fmt: skip
            words_base = mask_words_ptr + first_row.to(tl.int64) * num_words
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
            row_sum = tl.zeros([BLOCK_M], tl.float32)
            if BLOCK_R > 0:
                r = BLOCK_M + tl.arange(0, BLOCK_R)
                rows_r = row0 + r
                valid_r = rows_r < row_end
                q_r = load_rows(q_base, row_offsets(rows_r, stride_q_row, stride_q_head, GROUP, WIDE), valid_r, NEGATE,
                                HEAD_DIM, BLOCK_D)  # fmt: skip
                if SWAP_R:
                    q_r = tl.trans(q_r)
                    acc_r = tl.zeros([BLOCK_D, BLOCK_R], tl.float32)
                else:
                    acc_r = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
                max_r = tl.full([BLOCK_R], -float("inf"), tl.float32)
                sum_r = tl.zeros([BLOCK_R], tl.float32)

            if CSR:
                pages_ptr = table_ptr + tl.load(kv_indptr_ptr + request)
            else:
                pages_ptr = table_ptr + request.to(tl.int64) * stride_table_request
            k_head_ptr = k_ptr + kv_head.to(tl.int64) * stride_k_head
            v_head_ptr = v_ptr + kv_head.to(tl.int64) * stride_v_head

            # page ids are fetched one tile ahead, in registers: were they loaded in the loop that uses them, Triton's
            # pipeline would wait for every copy in flight to get at them
            end_full = tl.minimum(last, full_tiles)
            pages = tile_pages(pages_ptr, tl.minimum(tile, tl.maximum(full_tiles - 1, 0)), n, PAGE_SIZE, BLOCK_N)
            for t in tl.range(tile, end_full, num_stages=STAGES):
                k_off = tile_offsets(pages, t, n, stride_k_page, stride_k_slot, PAGE_SIZE, BLOCK_N)
                v_off = tile_offsets(pages, t, n, stride_v_page, stride_v_slot, PAGE_SIZE, BLOCK_N)
                pages = tile_pages(pages_ptr, tl.minimum(t + 1, end_full - 1), n, PAGE_SIZE, BLOCK_N)
                k = load_tile(k_head_ptr, k_off, n < BLOCK_N, HEAD_DIM, BLOCK_D, False)
                v = load_tile(v_head_ptr, v_off, n < BLOCK_N, HEAD_DIM, BLOCK_D, False)
                acc, row_max, row_sum = attend(q, k, v, acc, row_max, row_sum, valid, scale, False)
                if BLOCK_R > 0:
                    if SWAP_R:
                        acc_r, max_r, sum_r = attend_few(q_r, k, v, acc_r, max_r, sum_r, valid_r, scale, False)
                    else:
                        acc_r, max_r, sum_r = attend(q_r, k, v, acc_r, max_r, sum_r, valid_r, scale, False)

            for t in tl.range(tl.maximum(tile, full_tiles), last, num_stages=1):
                in_prefix = t < full_tiles + tail_tiles
                word = tl.maximum(t - full_tiles - tail_tiles, 0)
                node = word * BLOCK_E + e
                position = tl.where(in_prefix, full_tiles * BLOCK_N + (t - full_tiles) * BLOCK_E + e, prefix + node)
                words = tree_words(words_base, rows, valid, word, num_words, GROUP)
                some = tl.reduce(words, 0, bit_or)
                if BLOCK_R > 0:
                    words_r = tree_words(words_base, rows_r, valid_r, word, num_words, GROUP)
                    some = some | tl.reduce(words_r, 0, bit_or)
                # a key that no row of the tile sees is not read: it may hold anything, and 0 * NaN is NaN
                needed = tl.where(in_prefix, position < prefix, (node < nodes) & ((some >> e) & 1 != 0))
                k_base, v_base = k_head_ptr, v_head_ptr
                if TREE_SLOTS or FRESH:
                    if in_prefix:
                        k_off = page_offsets(pages_ptr, position, needed, stride_k_page, stride_k_slot, PAGE_SIZE)
                        v_off = page_offsets(pages_ptr, position, needed, stride_v_page, stride_v_slot, PAGE_SIZE)
                    elif FRESH:
                        k_base = k_tree_ptr + kv_head.to(tl.int64) * stride_k_tree_head
                        v_base = v_tree_ptr + kv_head.to(tl.int64) * stride_v_tree_head
                        k_off = (first_row + node).to(tl.int64) * stride_k_tree_row
                        v_off = (first_row + node).to(tl.int64) * stride_v_tree_row
                    else:
                        slot = tl.load(tree_slots_ptr + first_row + node, mask=needed, other=0).to(tl.int64)
                        k_off = slot // PAGE_SIZE * stride_k_page + slot % PAGE_SIZE * stride_k_slot
                        v_off = slot // PAGE_SIZE * stride_v_page + slot % PAGE_SIZE * stride_v_slot
                else:
                    k_off = page_offsets(pages_ptr, position, needed, stride_k_page, stride_k_slot, PAGE_SIZE)
                    v_off = page_offsets(pages_ptr, position, needed, stride_v_page, stride_v_slot, PAGE_SIZE)
                k = load_tile(k_base, k_off, needed, HEAD_DIM, BLOCK_D, True)
                v = load_tile(v_base, v_off, needed, HEAD_DIM, BLOCK_D, True)
                sees = (((words[:, None] >> e[None, :]) & 1 != 0) | in_prefix) & needed[None, :]
                acc, row_max, row_sum = attend(q, k, v, acc, row_max, row_sum, sees, scale, True)
                if BLOCK_R > 0:
                    sees_r = (((words_r[:, None] >> e[None, :]) & 1 != 0) | in_prefix) & needed[None, :]
                    if SWAP_R:
                        sees_r = tl.trans(sees_r)
                        acc_r, max_r, sum_r = attend_few(q_r, k, v, acc_r, max_r, sum_r, sees_r, scale, True)
                    else:
                        acc_r, max_r, sum_r = attend(q_r, k, v, acc_r, max_r, sum_r, sees_r, scale, True)

            # the first part of a cut item goes to slot 2p + 1, any later part to slot 2p: a program has one of each
            whole = (tile == 0) & (last == item_tiles)
            slot = 2 * program + (tile == 0).to(tl.int32)
            out_base = head_base(out_ptr, first_row, kv_head, stride_out_row, stride_out_head, GROUP)
            lse_base = head_base(lse_ptr, first_row, kv_head, stride_lse_row, stride_lse_head, GROUP)
            part_base = partial_out_ptr + slot.to(tl.int64) * (TILE_ROWS * HEAD_DIM)
            part_lse_base = partial_lse_ptr + slot.to(tl.int64) * TILE_ROWS
            acc, lse2 = normalise(acc, row_max * scale, row_sum)
            if whole:
                store_out(out_base, lse_base, acc, lse2, rows, valid, stride_out_row, stride_out_head, stride_lse_row,
                          stride_lse_head, GROUP, HEAD_DIM, BLOCK_D, HAS_LSE, WIDE)  # fmt: skip
            else:
                store_partial(part_base, part_lse_base, acc, lse2, m, valid, HEAD_DIM, BLOCK_D)
            if BLOCK_R > 0:
                if SWAP_R:
                    acc_r = tl.trans(acc_r)
                acc_r, lse2_r = normalise(acc_r, max_r * scale, sum_r)
                if whole:
                    store_out(out_base, lse_base, acc_r, lse2_r, rows_r, valid_r, stride_out_row, stride_out_head,
                              stride_lse_row, stride_lse_head, GROUP, HEAD_DIM, BLOCK_D, HAS_LSE, WIDE)  # fmt: skip
                else:
                    store_partial(part_base, part_lse_base, acc_r, lse2_r, r, valid_r, HEAD_DIM, BLOCK_D)
            left -= last - tile
            tile = 0
            row_tile += 1
            if row_tile == row_tiles:
                row_tile = 0
                kv_head += 1
        if (kv_head == KV_HEADS) | (nodes == 0):
            kv_head = 0
            if left > 0:
                request += 1
                nodes = tl.load(nodes_ptr + request)
                prefix = tl.load(prefix_lens_ptr + request)
                first_row = tl.load(qo_indptr_ptr + request)
                row_tiles = tl.maximum(tl.cdiv(nodes * GROUP, TILE_ROWS), 1)
                tile_rows = tl.cdiv(nodes * GROUP, row_tiles)


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
def merge_parts(partial_out_ptr, partial_lse_ptr, first, last, local, valid, TILE_ROWS: tl.constexpr,
                HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Combine the partials that programs `first` to `last` left of an item's rows, in KV order."""
    c = tl.arange(0, PARTS)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([PARTS, local.shape[0], BLOCK_D], tl.float32)
    top = tl.full([PARTS, local.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([PARTS, local.shape[0]], tl.float32)
    for part in range(first, last + 1, PARTS):
        program = part + c
        slot = 2 * program + (program == first).to(tl.int32)
        place = slot.to(tl.int64)[:, None] * TILE_ROWS + local[None, :]
        there = (program <= last)[:, None] & valid[None, :]
        lse2 = tl.load(partial_lse_ptr + place, mask=there, other=-float("inf"))
        value = tl.load(partial_out_ptr + place[:, :, None] * HEAD_DIM + d[None, None, :],
                        mask=there[:, :, None] & (d < HEAD_DIM)[None, None, :], other=0.0)  # fmt: skip
        new_top = tl.maximum(top, lse2)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weight = tl.exp2(lse2 - base)
        decay = tl.exp2(top - base)
        total = total * decay + weight
        acc = acc * decay[:, :, None] + value * weight[:, :, None]
        top = new_top
    row_max = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(row_max == -float("inf"), 0.0, row_max)[None, :])
    row_sum = tl.sum(total * weight, 0)
    acc = tl.sum(acc * weight[:, :, None], 0)
    return acc, row_max, row_sum


@triton.jit
def finish_kernel(
    out_ptr,  # [total_q, num_qo_heads, head_dim]
    lse_ptr,  # float32 [total_q, num_qo_heads] through stride_lse_*, written if HAS_LSE
    partial_out_ptr,  # float32 [2 * num_programs, TILE_ROWS, head_dim]
    partial_lse_ptr,  # float32 [2 * num_programs, TILE_ROWS], base 2
    work_ptr,  # the plan
    item_start_ptr,
    nodes_ptr,
    share_ptr,
    prefix_lens_ptr,
    qo_indptr_ptr,
    row_request_ptr,  # int32 [total_q]
    total_q,
    num_qo_heads,
    num_merges,  # items of the whole capacity, or boundaries between programs; CHUNKS programs each
    items_a_request,
    stride_out_row,
    stride_out_head,
    stride_lse_row,
    stride_lse_head,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ZERO_TAIL: tl.constexpr,  # rows past qo_indptr[batch] are padding too
    BY_ITEM: tl.constexpr,  # a merge per item; else one per boundary between two programs of the plan
    HAS_LSE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    CHUNK_PARTS: tl.constexpr,
    ZERO_ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,  # launched before attention_kernel has ended
):
    program = tl.program_id(0)
    if program >= num_merges * CHUNKS:
        if PDL:
            tl.extra.cuda.gdc_wait()
        row = (program - num_merges * CHUNKS) * ZERO_ROWS + tl.arange(0, ZERO_ROWS)
        owner = tl.load(row_request_ptr + row, mask=row < total_q, other=-1)
        owned = owner >= 0
        node = row - tl.load(qo_indptr_ptr + owner, mask=owned, other=0)
        padding = owned & (node >= tl.load(nodes_ptr + owner, mask=owned, other=0))
        if ZERO_TAIL:
            padding = padding | ((row < total_q) & (owner < 0))
        if tl.max(padding.to(tl.int32), 0) > 0:
            zero_rows(out_ptr, lse_ptr, row, padding, num_qo_heads, stride_out_row, stride_out_head, stride_lse_row,
                      stride_lse_head, HEAD_DIM, BLOCK_D, HAS_LSE)  # fmt: skip
        return

    index = program // CHUNKS
    share = tl.load(share_ptr)
    work = work_ptr + (index + 1) * WORK_FIELDS
    if BY_ITEM:
        request = index // items_a_request
        item = index % items_a_request
        start = tl.load(item_start_ptr + request)
        nodes = tl.load(nodes_ptr + request)
        prefix = tl.load(prefix_lens_ptr + request)
        first_row = tl.load(qo_indptr_ptr + request)
        row_tiles = tl.maximum(tl.cdiv(nodes * GROUP, TILE_ROWS), 1)
        kv_head = item // row_tiles
        row_tile = item % row_tiles
    else:
        kv_head = tl.load(work + WORK_KV_HEAD)
        row_tile = tl.load(work + WORK_ROW_TILE)
        start = (index + 1) * share - tl.load(work + WORK_TILE)
        nodes = tl.load(work + WORK_NODES)
        prefix = tl.load(work + WORK_PREFIX)
        first_row = tl.load(work + WORK_FIRST_ROW)
        row_tiles = tl.load(work + WORK_ROW_TILES)
    item_tiles = prefix // BLOCK_N + tl.cdiv(prefix % BLOCK_N, BLOCK_E) + tl.cdiv(nodes, BLOCK_E)
    if BY_ITEM:
        start += item * item_tiles
        mine = (kv_head < KV_HEADS) & (nodes > 0)
    else:
        # the first boundary inside an item is the one that merges it
        mine = (tl.load(work + WORK_TILE) > 0) & (start >= index * share) & (tl.load(work + WORK_LEFT) > 0)
    first = start // share
    last = (start + item_tiles - 1) // share
    # every program waits, also those with nothing to do: what follows in the stream must find attention done
    if PDL:
        tl.extra.cuda.gdc_wait()
    if mine & (first < last):
        tile_rows = tl.cdiv(nodes * GROUP, row_tiles)
        local = program % CHUNKS * CHUNK_ROWS + tl.arange(0, CHUNK_ROWS)
        rows = row_tile * tile_rows + local
        valid = (local < tile_rows) & (rows < tl.minimum(nodes, total_q - first_row) * GROUP)
        if tl.max(valid.to(tl.int32), 0) > 0:
            acc, row_max, row_sum = merge_parts(partial_out_ptr, partial_lse_ptr, first, last, local, valid,
                                                TILE_ROWS, HEAD_DIM, BLOCK_D, CHUNK_PARTS)  # fmt: skip
            acc, lse2 = normalise(acc, row_max, row_sum)
            store_out(head_base(out_ptr, first_row, kv_head, stride_out_row, stride_out_head, GROUP),
                      head_base(lse_ptr, first_row, kv_head, stride_lse_row, stride_lse_head, GROUP), acc, lse2, rows,
                      valid, stride_out_row, stride_out_head, stride_lse_row, stride_lse_head, GROUP, HEAD_DIM, BLOCK_D,
                      HAS_LSE, WIDE)  # fmt: skip
