"""The steps that the attention kernel is made of: rows and keys in, one tile of online softmax, rows out.

Packed rows are node-major: row ``r`` of a KV head is node ``r // GROUP``, query head ``r % GROUP`` of that KV head.
Scores are kept in base 2: ``sm_scale`` carries log2(e), log-sum-exps leave through :func:`store_out` in natural log.
"""

import triton
import triton.language as tl

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
def table_pages(table_ptr, position, valid, PAGE_SIZE: tl.constexpr):
    """Page ids, 64-bit, of logical positions; only valid positions read the page table."""
    return tl.load(table_ptr + position.to(tl.uint32) // PAGE_SIZE, mask=valid, other=0).to(tl.int64)


@triton.jit
def tile_pages(table_ptr, tile, end, n, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids of a full prefix tile: one where the tile lies inside a page, else one for each of its keys.

    Nothing is read for a tile at or behind `end`.
    """
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(table_ptr + tile * BLOCK_N // PAGE_SIZE, mask=tile < end, other=0)
    elif BLOCK_N == 2 * PAGE_SIZE:
        # two scalar loads cost less than one for each key
        first = tl.load(table_ptr + tile * 2, mask=tile < end, other=0)
        second = tl.load(table_ptr + tile * 2 + 1, mask=tile < end, other=0)
        return tl.where(n < PAGE_SIZE, first, second)
    else:
        position = tile * BLOCK_N + n
        return tl.load(table_ptr + position // PAGE_SIZE, mask=position < end * BLOCK_N, other=0)


@triton.jit
def tile_base(ptr, pages, tile, stride_page, stride_slot, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
              WIDE: tl.constexpr):  # fmt: skip
    """Where a full prefix tile begins, if it lies in one page; else the cache itself."""
    if PAGE_SIZE % BLOCK_N != 0:
        return ptr
    elif WIDE:
        return ptr + pages.to(tl.int64) * stride_page
    else:
        return ptr + pages.to(tl.int64) * stride_page + tile * BLOCK_N % PAGE_SIZE * stride_slot


@triton.jit
def tile_offsets(pages, tile, n, stride_page, stride_slot, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
                 WIDE: tl.constexpr):  # fmt: skip
    """Element offsets ``[BLOCK_N]`` of a full prefix tile's keys from its :func:`tile_base`.

    In a page that holds the tile they are the same for every tile, and the compiler takes them out of the loop.
    """
    if PAGE_SIZE % BLOCK_N == 0:
        if WIDE:
            return (tile * BLOCK_N % PAGE_SIZE + n).to(tl.int64) * stride_slot
        else:
            return n * stride_slot
    elif PAGE_SIZE == 1:
        return pages.to(tl.int64) * stride_page
    elif BLOCK_N % PAGE_SIZE == 0:
        return pages.to(tl.int64) * stride_page + n % PAGE_SIZE * stride_slot
    else:
        return pages.to(tl.int64) * stride_page + (tile * BLOCK_N + n) % PAGE_SIZE * stride_slot


@triton.jit
def edge_addresses(
    k_head_ptr, v_head_ptr, k_tree_ptr, v_tree_ptr, pages_ptr, tree_slots_ptr, in_prefix, position, node, needed,
    prefix, first_row, kv_head, stride_k_page, stride_k_slot, stride_v_page, stride_v_slot, stride_k_tree_row,
    stride_k_tree_head, stride_v_tree_row, stride_v_tree_head, PAGE_SIZE: tl.constexpr, TREE_SLOTS: tl.constexpr,
    FRESH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Bases and element offsets of an edge tile's K and V: behind the prefix, at ``tree_slots``, or fresh.

    Selects, not branches: a branch holds both sides' blocks in registers (1140 bytes spilled).
    """
    k_base, v_base = k_head_ptr, v_head_ptr
    k_page, v_page = stride_k_page, stride_v_page
    within = position % PAGE_SIZE
    if WIDE:
        within = within.to(tl.int64)
    if TREE_SLOTS or FRESH:
        page = table_pages(pages_ptr, position, needed & (position < prefix), PAGE_SIZE)
        if FRESH:
            page = tl.where(in_prefix, page, first_row + node)
            within = tl.where(in_prefix, within, 0)
            k_page = tl.where(in_prefix, stride_k_page, stride_k_tree_row)
            v_page = tl.where(in_prefix, stride_v_page, stride_v_tree_row)
            if in_prefix == 0:
                k_base = k_tree_ptr + kv_head.to(tl.int64) * stride_k_tree_head
                v_base = v_tree_ptr + kv_head.to(tl.int64) * stride_v_tree_head
        else:
            in_tree = needed & (position >= prefix)
            slot = tl.load(tree_slots_ptr + first_row + node, mask=in_tree, other=0).to(tl.int64)
            page = tl.where(in_prefix, page, slot // PAGE_SIZE)
            within = tl.where(in_prefix, within, (slot % PAGE_SIZE).to(within.dtype))
    else:
        page = table_pages(pages_ptr, position, needed, PAGE_SIZE)
    return k_base, v_base, page * k_page + within * stride_k_slot, page * v_page + within * stride_v_slot


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
