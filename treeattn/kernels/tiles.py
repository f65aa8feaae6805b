"""The steps that the attention kernel is made of: rows and keys in, one tile of online softmax, rows out.

Packed rows are node-major: row ``r`` of a KV head is node ``r // GROUP``, query head ``r % GROUP`` of that KV head.
Scores are kept in base 2: ``sm_scale`` carries log2(e), log-sum-exps leave through :func:`store_out` in natural log.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)

# Four FP8 numbers of a register become two registers of two float16. A byte goes to the upper half of its 16 bits ...
E5M2_BITS = tl.constexpr("prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;")
# ... and for e4m3 all but its sign one bit down; times 2^8.
E4M3_BITS = tl.constexpr("""{
    .reg .b32 a, b, c, d, e;
    mov.b32 e, 0x5c005c00;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.b32 c, a, 1;
    shr.b32 d, b, 1;
    and.b32 c, c, 0x3f803f80;
    and.b32 d, d, 0x3f803f80;
    lop3.b32 a, a, 0x80008000, c, 0xea;
    lop3.b32 b, b, 0x80008000, d, 0xea;
    mul.rn.f16x2 $0, a, e;
    mul.rn.f16x2 $1, b, e;
}""")
E4M3_CONVERT = tl.constexpr("""{
    .reg .b16 a, b;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 $0, a;
    cvt.rn.f16x2.e4m3x2 $1, b;
}""")


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
def load_rows(base, offsets, valid, NEGATE: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr):
    """Packed query rows ``[rows, BLOCK]``, negated if asked; rows that are not valid are 0."""
    d = tl.arange(0, BLOCK)
    mask = valid[:, None]
    if BLOCK != DIMS:
        mask = mask & (d < DIMS)[None, :]
    q = tl.load(base + offsets[:, None] + d[None, :], mask=mask, other=0.0)
    if NEGATE:
        q = -q
    return q


@triton.jit
def row_factors(q):
    """A power of two for each packed row, and its inverse, float32: times it the row's largest number is in [256, 512).

    What is 2^-32 of the largest and less loses bits as float16 then, which is less than a float32 sum loses.
    """
    top = tl.max(tl.abs(q).to(tl.float32), 1)
    exponent = tl.maximum(top.to(tl.int32, bitcast=True) >> 23, 32)
    return ((262 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 8) << 23).to(tl.float32, bitcast=True)


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
def edge_place(index, front_tiles, tail_tiles, prefix, first, full, e, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
               RANGED: tl.constexpr):  # fmt: skip
    """Where edge tile number `index` is: in the prefix or not, mask word, keys as nodes and as places, end of these.

    Edge tiles come in the order: before the full tiles, behind them, the tree. Places count tokens, then nodes.
    """
    aligned = prefix // BLOCK_N * BLOCK_N
    if RANGED:
        in_front = index < front_tiles
        behind = tl.maximum(full, aligned) + (index - front_tiles) * BLOCK_E
        begin = tl.where(in_front, first + index * BLOCK_E, behind)
        bound = tl.where(in_front, full, prefix)
    else:
        begin = aligned + index * BLOCK_E
        bound = prefix
    in_prefix = index < front_tiles + tail_tiles
    word = tl.maximum(index - front_tiles - tail_tiles, 0)
    node = word * BLOCK_E + e
    return in_prefix, word, node, tl.where(in_prefix, begin + e, prefix + node), bound


@triton.jit
def cached_pages(pages_ptr, tree_slots_ptr, in_prefix, position, node, needed, prefix, first_row,
                 PAGE_SIZE: tl.constexpr, TREE_SLOTS: tl.constexpr, FRESH: tl.constexpr):  # fmt: skip
    """Page and slot in it of an edge tile's keys in the cache: behind the prefix, or at ``tree_slots``.

    Selects, not branches: a branch holds both sides' blocks in registers (1140 bytes spilled).
    """
    within = position % PAGE_SIZE
    if TREE_SLOTS or FRESH:
        page = table_pages(pages_ptr, position, needed & (position < prefix), PAGE_SIZE)
        if TREE_SLOTS:
            in_tree = needed & (position >= prefix)
            slot = tl.load(tree_slots_ptr + first_row + node, mask=in_tree, other=0).to(tl.int64)
            page = tl.where(in_prefix, page, slot // PAGE_SIZE)
            within = tl.where(in_prefix, within, (slot % PAGE_SIZE).to(within.dtype))
    else:
        page = table_pages(pages_ptr, position, needed, PAGE_SIZE)
    return page, within


@triton.jit
def edge_load(cache_ptr, tree_ptr, page, within, in_prefix, position, node, needed, prefix, first_row, stride_page,
              stride_slot, stride_tree_row, d0, dtype: tl.constexpr, FRESH: tl.constexpr, FP8: tl.constexpr,
              DECODE: tl.constexpr, WIDE: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """K or V of an edge tile's keys, from dim `d0` on: of the cache or, for nodes if FRESH, of the call's own."""
    if WIDE:
        within = within.to(tl.int64)
    if FRESH and FP8 != 0:
        # two types, two loads; one of them reads nothing
        cached = load_tile(cache_ptr + d0, page * stride_page + within * stride_slot, needed & (position < prefix),
                           DIMS, BLOCK, True)  # fmt: skip
        own = load_tile(tree_ptr + d0, (first_row + node).to(tl.int64) * stride_tree_row,
                        needed & (position >= prefix), DIMS, BLOCK, True)  # fmt: skip
        return tl.where(in_prefix, decode(cached, dtype, FP8, DECODE), own)
    elif FRESH:
        base = cache_ptr
        if in_prefix == 0:
            base = tree_ptr
        row = tl.where(in_prefix, page, first_row + node)
        step = tl.where(in_prefix, stride_page, stride_tree_row)
        within = tl.where(in_prefix, within, 0)
        return load_tile(base + d0, row * step + within * stride_slot, needed, DIMS, BLOCK, True)
    else:
        tile = load_tile(cache_ptr + d0, page * stride_page + within * stride_slot, needed, DIMS, BLOCK, True)
        return decode(tile, dtype, FP8, DECODE)


@triton.jit
def load_tile(ptr, offsets, valid, DIMS: tl.constexpr, BLOCK: tl.constexpr, BOUNDED: tl.constexpr):
    """K or V rows ``[keys, BLOCK]``. What is not valid is 0 and never read: a NaN there cannot poison."""
    d = tl.arange(0, BLOCK)
    pointers = ptr + offsets[:, None] + d[None, :]
    if BOUNDED:
        return tl.load(pointers, mask=valid[:, None] & (d < DIMS)[None, :], other=0)
    if BLOCK != DIMS:
        return tl.load(pointers, mask=(d < DIMS)[None, :], other=0)
    return tl.load(pointers)


@triton.jit
def decode(tile, dtype: tl.constexpr, FP8: tl.constexpr, DECODE: tl.constexpr):
    """Numbers of a cache in `dtype`; FP8 arrives as bytes: 1 for e4m3, 2 for e5m2, 0 for no FP8.

    Both formats are the upper bits of a float16, e4m3 one bit lower and with an exponent that is 8 less. DECODE is how:
    0 in Triton's own operations, for the interpreter; 1 four numbers at once by their bits, on any chip; 2 by the
    instruction of chips that know e4m3. Finite numbers only.
    """
    if FP8 == 0:
        return tile
    elif DECODE == 0:
        bits = tile.to(tl.uint16)
        if FP8 == 2:
            return (bits << 8).to(tl.float16, bitcast=True).to(dtype)
        else:
            half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
            return (half.to(tl.float16, bitcast=True) * 256.0).to(dtype)
    else:
        code: tl.constexpr = E5M2_BITS if FP8 == 2 else (E4M3_BITS if DECODE == 1 else E4M3_CONVERT)
        return tl.inline_asm_elementwise(code, "=r,=r,r", [tile], dtype=tl.float16, is_pure=True, pack=4).to(dtype)


@triton.jit
def cache_scale(scale, kv_head, KIND: tl.constexpr):
    """Factor on K or V of a KV head: 0 none, 1 a number, 2 a pointer to one, 3 to one a KV head."""
    if KIND == 0:
        return 1.0
    elif KIND == 1:
        return scale
    elif KIND == 2:
        return tl.load(scale)
    else:
        return tl.load(scale + kv_head)


@triton.jit
def within_int32(position):
    """A position counted from prefix_len, held to what sums of two fit into."""
    return tl.minimum(tl.maximum(position, -0x3FFFFFFF), 0x3FFFFFFF).to(tl.int32)


@triton.jit
def window_rows(positions_ptr, rows, valid, first_row, prefix, prefix_len, window_left, GROUP: tl.constexpr):
    """Where each packed row begins to see, counted as its request's keys are."""
    node = (rows.to(tl.uint32) // GROUP).to(tl.int32)
    at = tl.load(positions_ptr + first_row + node, mask=valid, other=0) - prefix_len
    return prefix + within_int32(at) - window_left


@triton.jit
def bit_or(a, b):
    return a | b


@triton.jit
def tree_words(base, rows, valid, word, num_words, GROUP: tl.constexpr):
    """32-bit mask word number `word` of each packed row; 0 for a row that does not exist."""
    node = (rows.to(tl.uint32) // GROUP).to(tl.int32)
    return tl.load(base + node * num_words + word, mask=valid, other=0)


@triton.jit
def tanh(x):
    """Hyperbolic tangent to float32's precision, near 0 too."""
    square = x * x
    near = x * (1 + square * (-0.33333334 + square * (0.13333334 + square * -0.05396825)))
    far = 1 - 2 / (tl.exp2(x * 2.885390081777927) + 1)
    return tl.where(square < 0.04, near, far)


@triton.jit
def attend(q, q_rest, k, k_rest, v, acc, row_max, row_sum, sees, sm_scale, k_factor, soft_cap, zero,
           MASKED: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, REST: tl.constexpr, APART: tl.constexpr,
           ROW_SCALE: tl.constexpr):  # fmt: skip
    """One KV tile of the online softmax; ``row_max`` is of the scores before ``sm_scale``, which must be positive.

    ``sees`` is read only if MASKED, ``k_factor`` only if SCALED, the dims of ``q_rest`` and ``k_rest`` only if REST. If
    CAPPED, ``row_max`` is of capped scores in base 2 and ``sm_scale`` is inside the cap. ``sm_scale`` is one number, or
    one a row if ROW_SCALE; ``zero`` is 0.
    """
    if REST and APART:
        # A dot whose result goes on into another dot gets all warps along the rows, so that eight warps would compute
        # the scores of 64 rows twice. The compiler does not look through a branch. The smaller dot stays outside: its
        # wait is where the products of V of the tile before end, which otherwise would be before the next copies begin.
        rest = tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
        weights = rest
        new_max = row_max
        decay = tl.zeros_like(row_max)
        if zero == 0:
            # a sum of two dots would be made a dot that accumulates
            scores = tl.fma(rest, 1.0, tl.dot(q, tl.trans(k), input_precision="ieee"))
            weights, new_max, row_sum, decay = soften(scores, row_max, row_sum, sees, sm_scale, k_factor, soft_cap,
                                                      MASKED, SCALED, CAPPED, ROW_SCALE, not MASKED)  # fmt: skip
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST:
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        weights, new_max, row_sum, decay = soften(scores, row_max, row_sum, sees, sm_scale, k_factor, soft_cap, MASKED,
                                                  SCALED, CAPPED, ROW_SCALE, False)  # fmt: skip
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def soften(scores, row_max, row_sum, sees, sm_scale, k_factor, soft_cap, MASKED: tl.constexpr, SCALED: tl.constexpr,
           CAPPED: tl.constexpr, ROW_SCALE: tl.constexpr, SPREAD: tl.constexpr):  # fmt: skip
    """Weights of a KV tile, the rows' new maximum and sum, and what is left of what they had before.

    ``row_sum`` is of sums that have yet to be summed, ``[rows, 2, 4]``, if SPREAD.
    """
    if SCALED:
        scores = scores * k_factor
    scale = sm_scale
    each = sm_scale[:, None] if ROW_SCALE else sm_scale
    if CAPPED:
        scores = tanh(scores * (each * (LN2 / soft_cap))) * (soft_cap / LN2)
        scale = 1.0
        each = 1.0
    if MASKED:
        scores = tl.where(sees, scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    if MASKED:
        # a row that has seen nothing yet keeps -inf as its maximum; -inf - -inf would be NaN
        finite = tl.where(new_max == -float("inf"), 0.0, new_max)
    else:
        finite = new_max
    base = finite * scale
    weights = tl.exp2(scores * each - base[:, None])
    # 1 to the bit where the maximum stays: row_max * scale - base would be fused and leave the rounding of base behind,
    # from every tile anew
    decay = tl.exp2((row_max - finite) * scale)
    if SPREAD:
        # where the matrix unit left them, a thread has all but the axes of 2 and 4: the rest is summed after the loop
        parts = tl.reshape(weights, [weights.shape[0], 2, weights.shape[1] // 16, 4, 2])
        row_sum = row_sum * decay[:, None, None] + tl.sum(tl.sum(parts, 4), 2)
    else:
        row_sum = row_sum * decay + tl.sum(weights, 1)
    return weights, new_max, row_sum, decay


@triton.jit
def add_sinks(acc, lse2, sinks_ptr, kv_head, rows, valid, GROUP: tl.constexpr, IN_LSE: tl.constexpr):
    """Give each row's sink its weight; a row that saw nothing stays 0 and -inf."""
    head = kv_head * GROUP + (rows.to(tl.uint32) % GROUP).to(tl.int32)
    sink = tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32)
    sink2 = tl.minimum(tl.maximum(sink, -1e37), 1e37) / LN2  # inf - inf would be NaN
    top = tl.maximum(lse2, sink2)
    total2 = top + tl.log2(tl.exp2(lse2 - top) + tl.exp2(sink2 - top))
    acc = acc * tl.exp2(lse2 - total2)[:, None]
    if IN_LSE:
        lse2 = tl.where(lse2 == -float("inf"), lse2, total2)
    return acc, lse2


@triton.jit
def normalise(acc, row_max, row_sum):
    """Output and base-2 log-sum-exp of rows; 0 and -inf for a row that saw nothing."""
    seen = row_sum > 0
    total = tl.where(seen, row_sum, 1.0)
    return acc * (1.0 / total)[:, None], tl.where(seen, row_max + tl.log2(total), -float("inf"))


@triton.jit
def store_out(out_base, lse_base, acc, lse2, rows, valid, d, stride_out_row, stride_out_head, stride_lse_row,
              stride_lse_head, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_LSE: tl.constexpr,
              WIDE: tl.constexpr):  # fmt: skip
    """Write finished rows, of which `acc` has the dims `d`, to ``out`` and ``lse``."""
    mask = valid[:, None]
    if d.shape[0] != HEAD_DIM:
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
