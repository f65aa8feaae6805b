"""Tree attention over a paged prefix and the draft tree.

One program walks its stretch of the plan. An item is a tile of packed query rows against KV tiles: first the full tiles
of the prefix, which need no mask and no bounds, then the *edge*, in tiles of ``BLOCK_E``: where a window begins inside
the prefix, what is left of the prefix behind the full tiles, and the tree. An item that lies whole in one program is
written to ``out``; a part of one goes to a partial slot, which ``finish_kernel`` merges.

Row tiles: tree widths are 2^k + 1, so packed rows are 64 * m + GROUP. They are dealt evenly to the tiles of ``BLOCK_M``
rows, and tiles of the same rows of all requests walk K and V side by side (lanes, see the plan).

Options are constexprs, and without them the code is the same as if they were not there.
"""

import triton
import triton.language as tl

from .plan import (
    BLOCK_E,
    TURN_FIELDS,
    TURN_FIRST,
    TURN_FIRST_ROW,
    TURN_FULL,
    TURN_NODES,
    TURN_PREFIX,
    TURN_REQUEST,
    TURN_ROW_TILES,
    TURN_TILE_ROWS,
    WORK_FIELDS,
    WORK_FIRST,
    WORK_FIRST_ROW,
    WORK_FULL,
    WORK_KV_HEAD,
    WORK_LANE,
    WORK_LEFT,
    WORK_NODES,
    WORK_NUMBER,
    WORK_PREFIX,
    WORK_REQUEST,
    WORK_ROW_TILE,
    WORK_ROW_TILES,
    WORK_TILE,
    WORK_TILE_ROWS,
    WORK_TURN,
    kv_tiles,
)
from .tiles import (
    add_sinks,
    attend,
    bit_or,
    cache_scale,
    cached_pages,
    decode,
    edge_load,
    edge_place,
    head_base,
    load_rows,
    load_tile,
    normalise,
    row_factors,
    row_offsets,
    store_out,
    store_partial,
    tile_base,
    tile_offsets,
    tile_pages,
    tree_words,
    window_rows,
    within_int32,
)


# what changes with the batch must not make another kernel of the same code
@triton.jit(do_not_specialize=["total_q", "num_words", "stride_table_request", "window_left"])
def attention_kernel(
    q_ptr,  # [total_q, num_qo_heads, head_dim]
    k_ptr,  # paged cache, through stride_k_*; bytes if FP8
    v_ptr,  # not read if SHARED_KV
    k_tree_ptr,  # [total_q, kv_heads, head_dim], read if FRESH
    v_tree_ptr,
    out_ptr,  # [total_q, num_qo_heads, head_dim_v]
    lse_ptr,  # float32 [total_q, num_qo_heads] through stride_lse_*, written if HAS_LSE
    sm_scale,  # times log2(e)
    soft_cap,  # read if CAPPED
    sinks_ptr,  # [num_qo_heads], read if SINKS
    k_scale,  # a number, or float32 [1] or [kv_heads]: see K_SCALE
    v_scale,
    partial_out_ptr,  # float32 [2 * num_programs, BLOCK_M, head_dim_v]
    partial_lse_ptr,  # float32 [2 * num_programs, BLOCK_M], base 2
    work_ptr,  # the plan
    turns_ptr,
    prefix_lens_ptr,  # int32 [batch], read if WINDOW
    positions_ptr,  # int64 [total_q], read if WINDOW
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
    window_left,  # read if WINDOW
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CSR: tl.constexpr,
    TREE_SLOTS: tl.constexpr,
    FRESH: tl.constexpr,
    SHARED_KV: tl.constexpr,  # V is the first HEAD_DIM_V dims of K
    FP8: tl.constexpr,  # of the caches: 0 none, 1 e4m3, 2 e5m2
    DECODE: tl.constexpr,  # how, see `decode`
    K_SCALE: tl.constexpr,  # what k_scale is: 0 none, 1 a number, 2 a pointer to one, 3 to one a KV head
    V_SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    PART: tl.constexpr,
    RANGED: tl.constexpr,
    SPLIT: tl.constexpr,  # tiles of a split in batch-invariant mode, in which `tile` and `left` count splits; else 0
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,  # 0 none, 1 in out, 2 in out and lse
    HAS_LSE: tl.constexpr,
    NEGATE: tl.constexpr,  # sm_scale is negative
    WIDE: tl.constexpr,  # offsets inside one request, or inside one page, may pass 2^31
    SAME_STRIDES: tl.constexpr,  # of the K and V caches
    SLOT_STRIDE: tl.constexpr,  # stride_k_slot if it is compiled in, else 0
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_REST: tl.constexpr,  # dims of K behind those of V, if SHARED_KV; else 0
    APART: tl.constexpr,  # if BLOCK_REST: the scores behind a branch, see `attend`
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,  # finish_kernel may start early and wait for this one
):
    if SAME_STRIDES:
        # one set of offsets serves both, in half the registers
        stride_v_page, stride_v_slot, stride_v_head = stride_k_page, stride_k_slot, stride_k_head
    if SLOT_STRIDE > 0:
        # the offsets of a tile's rows are constants then, not 2 registers each
        stride_k_slot = SLOT_STRIDE
        stride_v_slot = SLOT_STRIDE
    # the dims of K that are multiplied at once: all, or those that V shares
    MAIN_DIMS: tl.constexpr = HEAD_DIM_V if SHARED_KV else HEAD_DIM
    REST_DIMS: tl.constexpr = HEAD_DIM - MAIN_DIMS
    SCALED: tl.constexpr = K_SCALE + V_SCALE > 0
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    # e4m3 and e5m2 are float16 numbers, so that is what they are multiplied in; fresh K and V may be larger
    HALF: tl.constexpr = FP8 != 0 and dtype == tl.bfloat16 and not SHARED_KV
    cached_dtype: tl.constexpr = tl.float16 if HALF else dtype
    edge_dtype: tl.constexpr = dtype if FRESH else cached_dtype
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    work = work_ptr + tl.program_id(0) * WORK_FIELDS
    request = tl.load(work + WORK_REQUEST)
    kv_head = tl.load(work + WORK_KV_HEAD)
    row_tile = tl.load(work + WORK_ROW_TILE)
    tile = tl.load(work + WORK_TILE)
    left = tl.load(work + WORK_LEFT)
    nodes = tl.load(work + WORK_NODES)
    prefix = tl.load(work + WORK_PREFIX)
    first = prefix * 0
    full = prefix * 0
    if RANGED:
        first = tl.load(work + WORK_FIRST)
        full = tl.load(work + WORK_FULL)
    first_row = tl.load(work + WORK_FIRST_ROW)
    row_tiles = tl.load(work + WORK_ROW_TILES)
    tile_rows = tl.load(work + WORK_TILE_ROWS)  # rows are dealt evenly, so that no tile is nearly empty
    lane = tl.load(work + WORK_LANE)
    zero = row_tiles >> 31  # which the compiler cannot know
    turn = tl.load(work + WORK_TURN)
    number = tl.load(work + WORK_NUMBER)
    n = tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_E)
    # maxima are taken before the scale, which must be positive then (and 0 * -inf must not be NaN)
    scale = tl.maximum(tl.abs(sm_scale), 1e-30)

    while left > 0:
        full_tiles, front_tiles, tail_tiles, tree_tiles = kv_tiles(prefix, first, full, nodes, BLOCK_N, RANGED, PART)
        item_tiles = full_tiles + front_tiles + tail_tiles + tree_tiles
        row0 = row_tile * tile_rows
        present = tl.minimum(nodes, total_q - first_row)
        row_end = tl.minimum(row0 + tile_rows, present * GROUP)
        if SPLIT > 0:
            begin = tile * SPLIT
            last = tl.minimum(item_tiles, begin + SPLIT)
        else:
            begin = tile
            last = tl.minimum(item_tiles, tile + left)

        m = tl.arange(0, BLOCK_M)
        rows = row0 + m
        valid = rows < row_end
        q_base = head_base(q_ptr, first_row, kv_head, stride_q_row, stride_q_head, GROUP)
        q_off = row_offsets(rows, stride_q_row, stride_q_head, GROUP, WIDE)
        q = load_rows(q_base, q_off, valid, NEGATE, MAIN_DIMS, BLOCK_D)
        q_rest = q
        if BLOCK_REST > 0:
            q_rest = load_rows(q_base + MAIN_DIMS, q_off, valid, NEGATE, REST_DIMS, BLOCK_REST)
        row_scale = scale
        q_edge = q
        if HALF:  # and so no SHARED_KV, of which q_rest is
            factors, inverses = row_factors(q)
            row_scale = scale * inverses
            q_edge = (q * factors[:, None]).to(edge_dtype)
            q = (q * factors[:, None]).to(cached_dtype)
        words_base = mask_words_ptr + first_row.to(tl.int64) * num_words
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M, 2, 4] if BLOCK_REST > 0 and APART else [BLOCK_M], tl.float32)

        if CSR:
            pages_ptr = table_ptr + tl.load(kv_indptr_ptr + request)
        else:
            pages_ptr = table_ptr + request.to(tl.int64) * stride_table_request
        k_head_ptr = k_ptr + kv_head.to(tl.int64) * stride_k_head
        v_head_ptr = v_ptr + kv_head.to(tl.int64) * stride_v_head
        k_factor = cache_scale(k_scale, kv_head, K_SCALE)
        v_factor = cache_scale(v_scale, kv_head, V_SCALE)
        if FRESH and SCALED:
            v_factor += tl.zeros([], tl.float32)  # a loop changes it, which a constant cannot be

        # page ids are fetched one tile ahead, in registers: were they loaded in the loop that uses them, Triton's
        # pipeline would wait for every copy in flight to get at them
        begin_full = begin
        end_full = tl.minimum(last, full_tiles)
        if RANGED:
            begin_full += tl.cdiv(full, BLOCK_N)
            end_full += tl.cdiv(full, BLOCK_N)
        pages = tile_pages(pages_ptr, begin_full, end_full, n, PAGE_SIZE, BLOCK_N)
        for t in tl.range(begin_full, end_full, num_stages=STAGES):
            k_off = tile_offsets(pages, t, n, stride_k_page, stride_k_slot, PAGE_SIZE, BLOCK_N, WIDE)
            v_off = tile_offsets(pages, t, n, stride_v_page, stride_v_slot, PAGE_SIZE, BLOCK_N, WIDE)
            k_base = tile_base(k_head_ptr, pages, t, stride_k_page, stride_k_slot, PAGE_SIZE, BLOCK_N, WIDE)
            v_base = tile_base(v_head_ptr, pages, t, stride_v_page, stride_v_slot, PAGE_SIZE, BLOCK_N, WIDE)
            pages = tile_pages(pages_ptr, t + 1, end_full, n, PAGE_SIZE, BLOCK_N)
            row0 += zero
            k = decode(load_tile(k_base, k_off, n < BLOCK_N, MAIN_DIMS, BLOCK_D, False), cached_dtype, FP8,
                       DECODE)  # fmt: skip
            k_rest = k
            if BLOCK_REST > 0:
                k_rest = load_tile(k_base + MAIN_DIMS, k_off, n < BLOCK_N, REST_DIMS, BLOCK_REST, False)
                k_rest = decode(k_rest, cached_dtype, FP8, DECODE)
            if SHARED_KV:
                v = k
            else:
                v = decode(load_tile(v_base, v_off, n < BLOCK_N, HEAD_DIM_V, BLOCK_V, False), cached_dtype, FP8,
                           DECODE)  # fmt: skip
            acc, row_max, row_sum = attend(q, q_rest, k, k_rest, v, acc, row_max, row_sum, valid, row_scale,
                                           k_factor, soft_cap, zero, False, SCALED, CAPPED, BLOCK_REST > 0,
                                           APART, HALF)  # fmt: skip

        if BLOCK_REST > 0 and APART:
            row_sum = tl.sum(tl.sum(row_sum, 2), 1)
        # row0 went through the loop with a 0 that the compiler cannot see, so that these are made here, not before
        # the loop and held in (and spilled from) the registers that it needs
        rows = row0 + m
        valid = rows < row_end
        if WINDOW:
            prefix_len = tl.load(prefix_lens_ptr + request)
            since = window_rows(positions_ptr, rows, valid, first_row, prefix, prefix_len, window_left, GROUP)
        k_own_ptr = k_tree_ptr + kv_head.to(tl.int64) * stride_k_tree_head
        v_own_ptr = v_tree_ptr + kv_head.to(tl.int64) * stride_v_tree_head

        for t in tl.range(tl.maximum(begin, full_tiles), last, num_stages=1):
            in_prefix, word, node, position, bound = edge_place(t - full_tiles, front_tiles, tail_tiles, prefix,
                                                                first, full, e, BLOCK_N, BLOCK_E,
                                                                RANGED)  # fmt: skip
            words = tree_words(words_base, rows, valid, word, num_words, GROUP)
            # a key that no row of the tile sees is not read: it may hold anything, and 0 * NaN is NaN
            if WINDOW:
                inside = tl.where(in_prefix, position < bound, node < present)
                in_tree = inside & (position >= prefix)
                own = tl.load(positions_ptr + first_row + node, mask=in_tree, other=0) - prefix_len
                at = tl.where(in_prefix, position, prefix + within_int32(own))
                sees = ((words[:, None] >> e[None, :]) & 1 != 0) | (in_prefix & valid)[:, None]
                sees = sees & inside[None, :] & (at[None, :] >= since[:, None])
                needed = tl.max(sees.to(tl.int32), 0) > 0
            else:
                some = tl.reduce(words, 0, bit_or)
                needed = tl.where(in_prefix, position < bound, (node < present) & ((some >> e) & 1 != 0))
                sees = (((words[:, None] >> e[None, :]) & 1 != 0) | in_prefix) & needed[None, :]
            page, within = cached_pages(pages_ptr, tree_slots_ptr, in_prefix, position, node, needed, prefix,
                                        first_row, PAGE_SIZE, TREE_SLOTS, FRESH)  # fmt: skip
            k = edge_load(k_head_ptr, k_own_ptr, page, within, in_prefix, position, node, needed, prefix, first_row,
                          stride_k_page, stride_k_slot, stride_k_tree_row, 0, edge_dtype, FRESH, FP8, DECODE, WIDE,
                          MAIN_DIMS, BLOCK_D)  # fmt: skip
            k_rest = k
            if BLOCK_REST > 0:
                k_rest = edge_load(k_head_ptr, k_own_ptr, page, within, in_prefix, position, node, needed, prefix,
                                   first_row, stride_k_page, stride_k_slot, stride_k_tree_row, MAIN_DIMS,
                                   edge_dtype, FRESH, FP8, DECODE, WIDE, REST_DIMS, BLOCK_REST)  # fmt: skip
            if SHARED_KV:
                v = k
            else:
                v = edge_load(v_head_ptr, v_own_ptr, page, within, in_prefix, position, node, needed, prefix,
                              first_row, stride_v_page, stride_v_slot, stride_v_tree_row, 0, edge_dtype, FRESH, FP8,
                              DECODE, WIDE, HEAD_DIM_V, BLOCK_V)  # fmt: skip
            k_by = k_factor
            if FRESH and SCALED:
                # fresh V is behind all of the cache, which has its factor then
                k_by = tl.where(in_prefix, k_factor, 1.0)
                acc = acc * tl.where(in_prefix, 1.0, v_factor)
                v_factor = tl.where(in_prefix, v_factor, 1.0)
            acc, row_max, row_sum = attend(q_edge, q_rest, k, k_rest, v, acc, row_max, row_sum, sees,
                                           row_scale, k_by, soft_cap, zero, True, SCALED, CAPPED, BLOCK_REST > 0,
                                           APART, HALF)  # fmt: skip

        whole = (begin == 0) & (last == item_tiles)
        if SPLIT > 0:
            slot = number
        else:
            # the first part of a cut item goes to slot 2p + 1, any later part to slot 2p: a program has one of each
            slot = 2 * number + (tile == 0).to(tl.int32)
        out_base = head_base(out_ptr, first_row, kv_head, stride_out_row, stride_out_head, GROUP)
        lse_base = head_base(lse_ptr, first_row, kv_head, stride_lse_row, stride_lse_head, GROUP)
        part_base = partial_out_ptr + slot.to(tl.int64) * (BLOCK_M * HEAD_DIM_V)
        part_lse_base = partial_lse_ptr + slot.to(tl.int64) * BLOCK_M
        if SCALED:
            # not on the weights, which have 16 bits and would underflow
            acc = acc * v_factor
        if CAPPED:
            acc, lse2 = normalise(acc, row_max, row_sum)
        else:
            acc, lse2 = normalise(acc, row_max * row_scale, row_sum)
        if whole:
            if SINKS != 0:
                acc, lse2 = add_sinks(acc, lse2, sinks_ptr, kv_head, rows, valid, GROUP, SINKS == 2)
            store_out(out_base, lse_base, acc, lse2, rows, valid, tl.arange(0, BLOCK_V), stride_out_row,
                      stride_out_head, stride_lse_row, stride_lse_head, GROUP, HEAD_DIM_V, HAS_LSE,
                      WIDE)  # fmt: skip
        else:
            store_partial(part_base, part_lse_base, acc, lse2, m, valid, HEAD_DIM_V, BLOCK_V)
        if SPLIT > 0:
            left -= 1
            number += 1
            tile = tl.where(last == item_tiles, 0, tile + 1)
            row_tile += (last == item_tiles).to(tl.int32)
        else:
            left -= last - tile
            tile = 0
            row_tile += 1
        if row_tile == tl.where(lane < 0, row_tiles, lane + 1):
            row_tile = tl.maximum(lane, 0)
            kv_head += 1
        if kv_head == KV_HEADS:
            kv_head = 0
            if left > 0:
                record = turns_ptr + turn * TURN_FIELDS
                request = tl.load(record + TURN_REQUEST)
                nodes = tl.load(record + TURN_NODES)
                prefix = tl.load(record + TURN_PREFIX)
                if RANGED:
                    first = tl.load(record + TURN_FIRST)
                    full = tl.load(record + TURN_FULL)
                first_row = tl.load(record + TURN_FIRST_ROW)
                row_tiles = tl.load(record + TURN_ROW_TILES)
                tile_rows = tl.load(record + TURN_TILE_ROWS)
                turn += 1
