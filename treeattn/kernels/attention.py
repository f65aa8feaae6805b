"""Tree attention over a paged prefix and the draft tree.

One program walks its stretch of the plan. An item is a tile of packed query rows against KV tiles: first the full tiles
of the prefix, which need no mask and no bounds, then the *edge*, in tiles of ``BLOCK_E``: what is left of the prefix,
and the tree. An item that lies whole in one program is written to ``out``; a part of one goes to a partial slot, which
``finish_kernel`` merges.

Row tiles: tree widths are 2^k + 1, so packed rows are 64 * m + GROUP. They are dealt evenly to the tiles of ``BLOCK_M``
rows, and tiles of the same rows of all requests walk K and V side by side (lanes, see the plan).
"""

import triton
import triton.language as tl

from .plan import (
    BLOCK_E,
    WORK_FIELDS,
    WORK_FIRST_ROW,
    WORK_KV_HEAD,
    WORK_LANE,
    WORK_LEFT,
    WORK_NODES,
    WORK_PREFIX,
    WORK_REQUEST,
    WORK_ROW_TILE,
    WORK_ROW_TILES,
    WORK_TILE,
    WORK_TILE_ROWS,
    WORK_ZERO,
)
from .tiles import (
    attend,
    bit_or,
    edge_addresses,
    head_base,
    load_rows,
    load_tile,
    normalise,
    row_offsets,
    store_out,
    store_partial,
    tile_base,
    tile_offsets,
    tile_pages,
    tree_words,
)


# what changes with the batch must not make another kernel of the same code
@triton.jit(do_not_specialize=["total_q", "num_words", "stride_table_request"])
def attention_kernel(
    q_ptr,  # [total_q, num_qo_heads, head_dim]
    k_ptr,  # paged cache, through stride_k_*
    v_ptr,
    k_tree_ptr,  # [total_q, kv_heads, head_dim], read if FRESH
    v_tree_ptr,
    out_ptr,  # [total_q, num_qo_heads, head_dim]
    lse_ptr,  # float32 [total_q, num_qo_heads] through stride_lse_*, written if HAS_LSE
    sm_scale,  # times log2(e)
    partial_out_ptr,  # float32 [2 * num_programs, BLOCK_M, head_dim]
    partial_lse_ptr,  # float32 [2 * num_programs, BLOCK_M], base 2
    work_ptr,  # the plan
    nodes_ptr,
    prefix_lens_ptr,
    qo_indptr_ptr,
    mask_words_ptr,  # mask words as int32 [total_q, num_words]
    kv_indptr_ptr,  # read if CSR
    table_ptr,  # kv_indices, or the block table
    tree_slots_ptr,  # [total_q], read if TREE_SLOTS
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
    WIDE: tl.constexpr,  # offsets inside one request, or inside one page, may pass 2^31
    SAME_STRIDES: tl.constexpr,  # of the K and V caches
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,  # finish_kernel may start early and wait for this one
):
    if SAME_STRIDES:
        # one set of offsets serves both, in half the registers
        stride_v_page, stride_v_slot, stride_v_head = stride_k_page, stride_k_slot, stride_k_head
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
    lane = tl.load(work + WORK_LANE)
    zero = tl.load(work + WORK_ZERO)
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
            present = tl.minimum(nodes, total_q - first_row)
            row_end = tl.minimum(row0 + tile_rows, present * GROUP)
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

            if CSR:
                pages_ptr = table_ptr + tl.load(kv_indptr_ptr + request)
            else:
                pages_ptr = table_ptr + request.to(tl.int64) * stride_table_request
            k_head_ptr = k_ptr + kv_head.to(tl.int64) * stride_k_head
            v_head_ptr = v_ptr + kv_head.to(tl.int64) * stride_v_head

            # page ids are fetched one tile ahead, in registers: were they loaded in the loop that uses them, Triton's
            # pipeline would wait for every copy in flight to get at them
            end_full = tl.minimum(last, full_tiles)
            pages = tile_pages(pages_ptr, tile, end_full, n, PAGE_SIZE, BLOCK_N)
            for t in tl.range(tile, end_full, num_stages=STAGES):
                k_off = tile_offsets(pages, t, n, stride_k_page, stride_k_slot, PAGE_SIZE, BLOCK_N, WIDE)
                v_off = tile_offsets(pages, t, n, stride_v_page, stride_v_slot, PAGE_SIZE, BLOCK_N, WIDE)
                k_base = tile_base(k_head_ptr, pages, t, stride_k_page, stride_k_slot, PAGE_SIZE, BLOCK_N, WIDE)
                v_base = tile_base(v_head_ptr, pages, t, stride_v_page, stride_v_slot, PAGE_SIZE, BLOCK_N, WIDE)
                pages = tile_pages(pages_ptr, t + 1, end_full, n, PAGE_SIZE, BLOCK_N)
                row0 += zero
                k = load_tile(k_base, k_off, n < BLOCK_N, HEAD_DIM, BLOCK_D, False)
                v = load_tile(v_base, v_off, n < BLOCK_N, HEAD_DIM, BLOCK_D, False)
                acc, row_max, row_sum = attend(q, k, v, acc, row_max, row_sum, valid, scale, False)

            # row0 went through the loop with a 0 that the compiler cannot see, so that these are made here, not before
            # the loop and held in (and spilled from) the registers that it needs
            rows = row0 + m
            valid = rows < row_end

            for t in tl.range(tl.maximum(tile, full_tiles), last, num_stages=1):
                in_prefix = t < full_tiles + tail_tiles
                word = tl.maximum(t - full_tiles - tail_tiles, 0)
                node = word * BLOCK_E + e
                position = tl.where(in_prefix, full_tiles * BLOCK_N + (t - full_tiles) * BLOCK_E + e, prefix + node)
                words = tree_words(words_base, rows, valid, word, num_words, GROUP)
                some = tl.reduce(words, 0, bit_or)
                # a key that no row of the tile sees is not read: it may hold anything, and 0 * NaN is NaN
                needed = tl.where(in_prefix, position < prefix, (node < present) & ((some >> e) & 1 != 0))
                k_base, v_base, k_off, v_off = edge_addresses(
                    k_head_ptr, v_head_ptr, k_tree_ptr, v_tree_ptr, pages_ptr, tree_slots_ptr, in_prefix, position,
                    node, needed, prefix, first_row, kv_head, stride_k_page, stride_k_slot, stride_v_page,
                    stride_v_slot, stride_k_tree_row, stride_k_tree_head, stride_v_tree_row, stride_v_tree_head,
                    PAGE_SIZE, TREE_SLOTS, FRESH, WIDE,
                )  # fmt: skip
                k = load_tile(k_base, k_off, needed, HEAD_DIM, BLOCK_D, True)
                v = load_tile(v_base, v_off, needed, HEAD_DIM, BLOCK_D, True)
                sees = (((words[:, None] >> e[None, :]) & 1 != 0) | in_prefix) & needed[None, :]
                acc, row_max, row_sum = attend(q, k, v, acc, row_max, row_sum, sees, scale, True)

            # the first part of a cut item goes to slot 2p + 1, any later part to slot 2p: a program has one of each
            whole = (tile == 0) & (last == item_tiles)
            slot = 2 * program + (tile == 0).to(tl.int32)
            out_base = head_base(out_ptr, first_row, kv_head, stride_out_row, stride_out_head, GROUP)
            lse_base = head_base(lse_ptr, first_row, kv_head, stride_lse_row, stride_lse_head, GROUP)
            part_base = partial_out_ptr + slot.to(tl.int64) * (BLOCK_M * HEAD_DIM)
            part_lse_base = partial_lse_ptr + slot.to(tl.int64) * BLOCK_M
            acc, lse2 = normalise(acc, row_max * scale, row_sum)
            if whole:
                store_out(out_base, lse_base, acc, lse2, rows, valid, stride_out_row, stride_out_head, stride_lse_row,
                          stride_lse_head, GROUP, HEAD_DIM, BLOCK_D, HAS_LSE, WIDE)  # fmt: skip
            else:
                store_partial(part_base, part_lse_base, acc, lse2, m, valid, HEAD_DIM, BLOCK_D)
            left -= last - tile
            tile = 0
            row_tile += 1
            if row_tile == tl.where(lane < 0, row_tiles, lane + 1):
                row_tile = tl.maximum(lane, 0)
                kv_head += 1
        if (kv_head == KV_HEADS) | (nodes == 0):
            kv_head = 0
            if left > 0:
                request += 1
                nodes = tl.load(nodes_ptr + request)
                prefix = tl.load(prefix_lens_ptr + request)
                first_row = tl.load(qo_indptr_ptr + request)
                row_tiles = tl.maximum(tl.cdiv(nodes * GROUP, BLOCK_M), 1)
                tile_rows = tl.cdiv(nodes * GROUP, row_tiles)
