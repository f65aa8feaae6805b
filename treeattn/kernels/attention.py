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

from .plan import BLOCK_E, WORK_FIELDS

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(ptr, rows, valid, first_row, kv_head, stride_row, stride_head, sign, GROUP: tl.constexpr,
              HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Packed query rows ``[len(rows), BLOCK_D]``, times `sign`; rows that are not valid are 0."""
    d = tl.arange(0, BLOCK_D)
    token = (first_row + rows // GROUP).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    offsets = token * stride_row + head * stride_head
    mask = valid[:, None]
    if BLOCK_D != HEAD_DIM:
        mask = mask & (d < HEAD_DIM)[None, :]
    q = tl.load(ptr + offsets[:, None] + d[None, :], mask=mask, other=0.0)
    return (q * sign).to(q.dtype)


@triton.jit
def page_offsets(table_ptr, position, valid, stride_page, stride_slot, PAGE_SIZE: tl.constexpr):
    """Element offsets of logical positions through the page table; only valid positions read it."""
    page = tl.load(table_ptr + position // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
    if PAGE_SIZE == 1:
        return page * stride_page
    return page * stride_page + (position % PAGE_SIZE) * stride_slot


@triton.jit
def full_tile_offsets(table_ptr, tile, stride_page, stride_slot, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Element offsets ``[BLOCK_N]`` of a prefix tile in which every position exists."""
    n = tl.arange(0, BLOCK_N)
    if PAGE_SIZE % BLOCK_N == 0:
        # the tile lies in one page: one scalar load, and rows at a constant stride
        page = tl.load(table_ptr + tile * BLOCK_N // PAGE_SIZE).to(tl.int64)
        return page * stride_page + (tile * BLOCK_N % PAGE_SIZE) * stride_slot + n * stride_slot
    position = tile * BLOCK_N + n
    page = tl.load(table_ptr + position // PAGE_SIZE).to(tl.int64)
    if PAGE_SIZE == 1:
        return page * stride_page
    return page * stride_page + (position % PAGE_SIZE) * stride_slot


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
def tree_words(words_ptr, rows, valid, first_row, word, num_words, GROUP: tl.constexpr):
    """32-bit mask word number `word` of each packed row; 0 for a row that does not exist."""
    return tl.load(words_ptr + (first_row + rows // GROUP).to(tl.int64) * num_words + word, mask=valid, other=0)


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
def store_rows(out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, acc, row_max, row_sum, rows, local_rows, valid,
               first_row, kv_head, slot, whole, stride_out_row, stride_out_head, stride_lse_row, stride_lse_head,
               GROUP: tl.constexpr, TILE_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LSE: tl.constexpr):  # fmt: skip
    """Write a row tile to ``out`` (a whole item) or to its partial slot."""
    d = tl.arange(0, BLOCK_D)
    seen = row_sum > 0
    acc = acc / tl.where(seen, row_sum, 1.0)[:, None]
    lse2 = tl.where(seen, row_max + tl.log2(tl.where(seen, row_sum, 1.0)), -float("inf"))
    mask = valid[:, None] & (d < HEAD_DIM)[None, :]
    if whole:
        token = (first_row + rows // GROUP).to(tl.int64)
        head = kv_head * GROUP + rows % GROUP
        pointers = out_ptr + (token * stride_out_row + head * stride_out_head)[:, None] + d[None, :]
        tl.store(pointers, acc.to(out_ptr.dtype.element_ty), mask=mask)
        if HAS_LSE:
            tl.store(lse_ptr + token * stride_lse_row + head * stride_lse_head, lse2 * LN2, mask=valid)
    else:
        place = slot.to(tl.int64) * TILE_ROWS + local_rows
        tl.store(partial_out_ptr + place[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)
        tl.store(partial_lse_ptr + place, lse2, mask=valid)


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
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SWAP_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    TILE_ROWS: tl.constexpr = BLOCK_M + BLOCK_R
    program = tl.program_id(0)
    work = work_ptr + program * WORK_FIELDS
    request = tl.load(work + 0)
    item = tl.load(work + 1)
    tile = tl.load(work + 2)
    left = tl.load(work + 3)
    nodes = tl.load(work + 4)
    prefix = tl.load(work + 5)
    first_row = tl.load(work + 6)
    n = tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_E)
    # maxima are taken before the scale: a negative one turns q around, and 0 * -inf must not be NaN
    sign = tl.where(sm_scale < 0, -1.0, 1.0)
    scale = tl.maximum(tl.abs(sm_scale), 1e-30)

    while left > 0:
        row_tiles = tl.cdiv(nodes * GROUP, TILE_ROWS)
        full_tiles = prefix // BLOCK_N
        tail_tiles = tl.cdiv(prefix % BLOCK_N, BLOCK_E)
        item_tiles = full_tiles + tail_tiles + tl.cdiv(nodes, BLOCK_E)
        if nodes > 0:
            kv_head = item // row_tiles
            row_tile = item % row_tiles
            # the rows of a request are dealt evenly, so that no tile is nearly empty
            tile_rows = tl.cdiv(nodes * GROUP, row_tiles)
            row0 = row_tile * tile_rows
            row_end = tl.minimum(row0 + tile_rows, tl.minimum(nodes, total_q - first_row) * GROUP)
            last = tl.minimum(item_tiles, tile + left)

            m = tl.arange(0, BLOCK_M)
            rows = row0 + m
            valid = rows < row_end
            q = load_rows(q_ptr, rows, valid, first_row, kv_head, stride_q_row, stride_q_head, sign, GROUP, HEAD_DIM,
                          BLOCK_D)  # fmt: skip
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
            row_sum = tl.zeros([BLOCK_M], tl.float32)
            if BLOCK_R > 0:
                r = BLOCK_M + tl.arange(0, BLOCK_R)
                rows_r = row0 + r
                valid_r = rows_r < row_end
                q_r = load_rows(q_ptr, rows_r, valid_r, first_row, kv_head, stride_q_row, stride_q_head, sign, GROUP,
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

            for t in tl.range(tile, tl.minimum(last, full_tiles), num_stages=STAGES):
                k_off = full_tile_offsets(pages_ptr, t, stride_k_page, stride_k_slot, PAGE_SIZE, BLOCK_N)
                k = load_tile(k_head_ptr, k_off, n < BLOCK_N, HEAD_DIM, BLOCK_D, False)
                v_off = full_tile_offsets(pages_ptr, t, stride_v_page, stride_v_slot, PAGE_SIZE, BLOCK_N)
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
                words = tree_words(mask_words_ptr, rows, valid, first_row, word, num_words, GROUP)
                some = tl.reduce(words, 0, bit_or)
                if BLOCK_R > 0:
                    words_r = tree_words(mask_words_ptr, rows_r, valid_r, first_row, word, num_words, GROUP)
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
            store_rows(out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, acc, row_max * scale, row_sum, rows, m, valid,
                       first_row, kv_head, slot, whole, stride_out_row, stride_out_head, stride_lse_row,
                       stride_lse_head, GROUP, TILE_ROWS, HEAD_DIM, BLOCK_D, HAS_LSE)  # fmt: skip
            if BLOCK_R > 0:
                if SWAP_R:
                    acc_r = tl.trans(acc_r)
                store_rows(out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, acc_r, max_r * scale, sum_r, rows_r, r, valid_r,
                           first_row, kv_head, slot, whole, stride_out_row, stride_out_head, stride_lse_row,
                           stride_lse_head, GROUP, TILE_ROWS, HEAD_DIM, BLOCK_D, HAS_LSE)  # fmt: skip
            left -= last - tile
            item += 1
        tile = 0
        if (item >= row_tiles * KV_HEADS) & (left > 0):
            request += 1
            item = 0
            nodes = tl.load(nodes_ptr + request)
            prefix = tl.load(prefix_lens_ptr + request)
            first_row = tl.load(qo_indptr_ptr + request)


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
    acc = tl.zeros([local.shape[0], BLOCK_D], tl.float32)
    row_max = tl.full([local.shape[0]], -float("inf"), tl.float32)
    row_sum = tl.zeros([local.shape[0]], tl.float32)
    for part in range(first, last + 1, PARTS):
        program = part + c
        slot = 2 * program + (program == first).to(tl.int32)
        place = slot.to(tl.int64)[:, None] * TILE_ROWS + local[None, :]
        there = (program <= last)[:, None] & valid[None, :]
        lse2 = tl.load(partial_lse_ptr + place, mask=there, other=-float("inf"))
        value = tl.load(partial_out_ptr + place[:, :, None] * HEAD_DIM + d[None, None, :],
                        mask=there[:, :, None] & (d < HEAD_DIM)[None, None, :], other=0.0)  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(lse2, 0))
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
        weight = tl.exp2(lse2 - base[None, :])
        decay = tl.exp2(row_max - base)
        row_sum = row_sum * decay + tl.sum(weight, 0)
        acc = acc * decay[:, None] + tl.sum(value * weight[:, :, None], 0)
        row_max = new_max
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
):
    program = tl.program_id(0)
    if program >= num_merges * CHUNKS:
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
    share = tl.load(share_ptr).to(tl.int64)
    if BY_ITEM:
        request = index // items_a_request
        item = index % items_a_request
    else:
        work = work_ptr + (index + 1) * WORK_FIELDS
        request = tl.load(work + 0)
        item = tl.load(work + 1)
    nodes = tl.load(nodes_ptr + request)
    prefix = tl.load(prefix_lens_ptr + request)
    row_tiles = tl.cdiv(nodes * GROUP, TILE_ROWS)
    item_tiles = prefix // BLOCK_N + tl.cdiv(prefix % BLOCK_N, BLOCK_E) + tl.cdiv(nodes, BLOCK_E)
    if BY_ITEM:
        start = tl.load(item_start_ptr + request) + item.to(tl.int64) * item_tiles
        mine = item < row_tiles * KV_HEADS
    else:
        # the first boundary inside an item is the one that merges it
        tile = tl.load(work + 2)
        start = (index + 1) * share - tile
        mine = (tile > 0) & (start >= index * share) & (tl.load(work + 3) > 0)
    first = (start // share).to(tl.int32)
    last = ((start + item_tiles - 1) // share).to(tl.int32)
    if mine & (first < last):
        tile_rows = tl.cdiv(nodes * GROUP, row_tiles)
        kv_head = item // row_tiles
        local = program % CHUNKS * CHUNK_ROWS + tl.arange(0, CHUNK_ROWS)
        rows = item % row_tiles * tile_rows + local
        first_row = tl.load(qo_indptr_ptr + request)
        valid = (local < tile_rows) & (rows < tl.minimum(nodes, total_q - first_row) * GROUP)
        if tl.max(valid.to(tl.int32), 0) > 0:
            acc, row_max, row_sum = merge_parts(partial_out_ptr, partial_lse_ptr, first, last, local, valid,
                                                TILE_ROWS, HEAD_DIM, BLOCK_D, CHUNK_PARTS)  # fmt: skip
            store_rows(out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, acc, row_max, row_sum, rows, local, valid,
                       first_row, kv_head, 0, True, stride_out_row, stride_out_head, stride_lse_row, stride_lse_head,
                       GROUP, TILE_ROWS, HEAD_DIM, BLOCK_D, HAS_LSE)  # fmt: skip
