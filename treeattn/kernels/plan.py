"""The plan: how one group's work is divided over programs, decided on the device.

Work is counted in *tiles*: one row tile of packed query rows against one KV tile. A request with ``n`` real nodes has
``cdiv(n * group, tile_rows)`` row tiles for each KV head, and each of these (an *item*) walks
``prefix_len // BLOCK_N`` full tiles and ``cdiv(prefix_len % BLOCK_N, 32) + cdiv(n, 32)`` edge tiles (no tile straddles
the end of the prefix; a narrow masked tile costs about as much as a full one that is pipelined). Items lie
side by side on one line (request, then KV head, then row tile) and program ``p`` gets the stretch
``[p * share, (p + 1) * share)``: a ragged batch is balanced to within one tile, and an item is cut only where two
programs meet. At most ``num_programs - 1`` items are cut, into at most ``2 * num_programs`` partials.

Where every request has the same number of row tiles, each row tile has a line of its own (a *lane*) and an equal part
of the programs. Programs of the same place in their lanes then walk the same keys at the same time, and what one of
them brings from memory the others find in L2.

Outputs (int32):

``work [num_programs, 16]``
    What a program needs to start after one load, fields in the order of ``WORK_*``: the request, KV head, row tile and
    KV tile where its stretch begins, its length in tiles, then of that request the nodes, prefix_len, first row, row
    tiles and rows of a row tile.
``item_start [batch + 1]``
    Line position (in tiles) at which each request begins; the length of the line last.
``nodes [batch]``
    Nodes to compute: ``num_nodes``, or 0 where the request's addresses cannot hold what the layout claims.
``share [4]``
    Tiles a program, programs a lane, lanes, unused.
"""

import triton
import triton.language as tl

BLOCK_E = tl.constexpr(32)  # keys of an edge tile: one 32-bit mask word a row, and half the registers of a full tile
WORK_FIELDS = tl.constexpr(16)
WORK_REQUEST = tl.constexpr(0)
WORK_KV_HEAD = tl.constexpr(1)
WORK_ROW_TILE = tl.constexpr(2)
WORK_TILE = tl.constexpr(3)
WORK_LEFT = tl.constexpr(4)
WORK_NODES = tl.constexpr(5)
WORK_PREFIX = tl.constexpr(6)
WORK_FIRST_ROW = tl.constexpr(7)
WORK_ROW_TILES = tl.constexpr(8)
WORK_TILE_ROWS = tl.constexpr(9)
WORK_ZERO = tl.constexpr(10)  # always 0: see attention_kernel
WORK_LANE = tl.constexpr(11)  # the row tile that this program keeps to; -1 where there is one line for all


@triton.jit
def pick(mine, values):
    """For each program the value of its request: ``[programs]`` from ``mine [programs, batch]``, ``values [batch]``."""
    return tl.sum(tl.where(mine, values[None, :], 0), 1)


@triton.jit(do_not_specialize=["batch", "max_pages", "num_programs", "min_share"])
def plan_kernel(
    prefix_lens_ptr,  # int32 [batch]
    num_nodes_ptr,  # int32 [batch]
    qo_indptr_ptr,  # int32 [batch + 1]
    kv_indptr_ptr,  # int32 | int64 [batch + 1] (CSR), else any pointer
    status_ptr,  # int32 [4]
    work_ptr,  # int32 [num_programs, 16]
    item_start_ptr,  # int32 [batch + 1]
    nodes_ptr,  # int32 [batch]
    share_ptr,  # int32 [4]
    batch,
    max_pages,  # width of the block table; with CSR, the length of kv_indices
    num_programs,
    min_share,
    KV_CAPACITY_CODE: tl.constexpr,
    WORK_CODE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CSR: tl.constexpr,
    NODES_IN_TABLE: tl.constexpr,  # the nodes' K and V are at logical positions behind the prefix
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    b = tl.arange(0, BLOCK_B)
    in_batch = b < batch
    prefix = tl.load(prefix_lens_ptr + b, mask=in_batch, other=0)
    nodes = tl.load(num_nodes_ptr + b, mask=in_batch, other=0)
    if CSR:
        first_page = tl.load(kv_indptr_ptr + b, mask=in_batch, other=0).to(tl.int64)
        last_page = tl.load(kv_indptr_ptr + b + 1, mask=in_batch, other=0).to(tl.int64)
        inside = (first_page >= 0) & (last_page <= max_pages)
        pages = tl.where(inside, tl.maximum(last_page - first_page, 0), 0)
    else:
        pages = tl.full([BLOCK_B], 0, tl.int64) + max_pages
    needed = prefix.to(tl.int64)
    if NODES_IN_TABLE:
        needed += nodes
    too_long = in_batch & (nodes > 0) & (needed > pages * PAGE_SIZE)
    nodes = tl.where(too_long, 0, nodes)

    kv_tiles = prefix // BLOCK_N + tl.cdiv(prefix % BLOCK_N, BLOCK_E) + tl.cdiv(nodes, BLOCK_E)
    row_tiles = tl.cdiv(nodes * GROUP, BLOCK_M)
    # the line is int32: 2^31 tiles are days of work, so a longer one is a mistake in the lengths
    wide_total = tl.sum((row_tiles * KV_HEADS).to(tl.int64) * kv_tiles, 0)
    if wide_total > 0x7FFFFFFF:
        nodes = nodes * 0
        row_tiles = row_tiles * 0
    lanes = tl.max(row_tiles, 0)
    alike = tl.min(tl.where(row_tiles > 0, row_tiles, lanes), 0) == lanes
    # lanes take the same number of programs each: not if that leaves more than a sixteenth of them idle
    alike = alike & (lanes > 1) & (num_programs // tl.maximum(lanes, 1) * lanes * 16 >= num_programs * 15)
    lanes = tl.where(alike, lanes, 1)
    lane_programs = num_programs // lanes
    on_line = tl.where(lanes > 1, tl.minimum(row_tiles, 1), row_tiles)  # row tiles of a request on one line
    tiles = on_line * KV_HEADS * kv_tiles
    end = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    share = tl.maximum(tl.cdiv(total, lane_programs), min_share)

    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    live = p < num_programs
    lane = p // lane_programs
    place = (p - lane * lane_programs).to(tl.int64) * share
    start = tl.where(lane < lanes, tl.minimum(place, total), total).to(tl.int32)
    before = (end[None, :] <= start[:, None]) & in_batch[None, :]
    request = tl.minimum(tl.sum(before.to(tl.int32), 1), batch - 1)
    mine = b[None, :] == request[:, None]
    within = start - tl.max(tl.where(before, end[None, :], 0), 1)
    my_nodes = pick(mine, nodes)
    my_kv_tiles = tl.maximum(pick(mine, kv_tiles), 1)
    my_row_tiles = tl.maximum(pick(mine, row_tiles), 1)
    my_on_line = tl.maximum(pick(mine, on_line), 1)
    item = within // my_kv_tiles
    kv_head = item // my_on_line
    row = work_ptr + p * WORK_FIELDS
    tl.store(row + WORK_REQUEST, request, mask=live)
    tl.store(row + WORK_KV_HEAD, kv_head, mask=live)
    tl.store(row + WORK_ROW_TILE, tl.where(lanes > 1, lane, item - kv_head * my_on_line), mask=live)
    tl.store(row + WORK_LANE, tl.where(lanes > 1, lane, -1), mask=live)
    tl.store(row + WORK_TILE, within - item * my_kv_tiles, mask=live)
    tl.store(row + WORK_LEFT, tl.minimum(total - start, share), mask=live)
    tl.store(row + WORK_NODES, my_nodes, mask=live)
    tl.store(row + WORK_PREFIX, pick(mine, prefix), mask=live)
    tl.store(row + WORK_FIRST_ROW, tl.load(qo_indptr_ptr + request, mask=live, other=0), mask=live)
    tl.store(row + WORK_ROW_TILES, my_row_tiles, mask=live)
    tl.store(row + WORK_ZERO, p * 0, mask=live)
    tl.store(row + WORK_TILE_ROWS, tl.cdiv(my_nodes * GROUP, my_row_tiles), mask=live)

    if tl.program_id(0) == 0:
        tl.store(nodes_ptr + b, nodes, mask=in_batch)
        tl.store(item_start_ptr + b, end - tiles, mask=in_batch)
        tl.store(item_start_ptr + batch, total)
        tl.store(share_ptr, share)
        tl.store(share_ptr + 1, lane_programs)
        tl.store(share_ptr + 2, lanes)
        if wide_total > 0x7FFFFFFF:
            if tl.atomic_cas(status_ptr, 0, WORK_CODE) == 0:
                tl.store(status_ptr + 1, 0)
                tl.store(status_ptr + 2, 0x7FFFFFFF)
                tl.store(status_ptr + 3, tl.minimum(wide_total >> 10, 0x7FFFFFFF).to(tl.int32))
        worst = tl.max(tl.where(too_long, BLOCK_B - b, 0), 0)
        if worst > 0:
            first = BLOCK_B - worst
            if tl.atomic_cas(status_ptr, 0, KV_CAPACITY_CODE) == 0:
                value = tl.sum(tl.where(b == first, needed, 0), 0)
                room = tl.sum(tl.where(b == first, pages * PAGE_SIZE, 0), 0)
                tl.store(status_ptr + 1, first)
                tl.store(status_ptr + 2, tl.minimum(room, 0x7FFFFFFF).to(tl.int32))
                tl.store(status_ptr + 3, tl.minimum(value, 0x7FFFFFFF).to(tl.int32))
