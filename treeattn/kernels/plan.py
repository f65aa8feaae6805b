"""The plan: how one group's work is divided over programs, decided on the device.

Work is counted in *tiles*: one row tile of packed query rows against one KV tile. A request with ``n`` real nodes has
``cdiv(n * group, tile_rows)`` row tiles for each KV head, and each of these (an *item*) walks
``prefix_len // BLOCK_N`` full tiles and ``cdiv(prefix_len % BLOCK_N, 32) + cdiv(n, 32)`` edge tiles (no tile straddles
the end of the prefix; a narrow masked tile costs about as much as a full one that is pipelined). With a window the
tiles begin where some row begins to see, and are edge tiles up to where every row sees; see :func:`kv_tiles`.

Items lie side by side on a line and each program gets ``share`` tiles of it: a ragged batch is balanced to within one
tile, and an item is cut only where two programs meet. At most ``num_programs - 1`` items are cut, into at most
``2 * num_programs`` partials.

Requests of the same number of row tiles are a *class*. Each row tile of a class has a line of its own (a *lane*:
request, then KV head), and lanes of a class have equally many programs, numbered side by side. Programs of the same
place in their lanes then walk the same keys at the same time, and what one of them brings from memory the others find
in L2. So that they find it near, they are launched next to each other: a class deals its blocks to its lanes in turn.
The share is one for all, and lanes have whole programs, so that a few may have nothing to do. Where these would be too
many (BUSY), or a request has CLASSES row tiles less than the widest, there is one line for all (request, then KV head,
then row tile).

A *place* is counted in tiles from the first program's first: program number ``p`` is at ``p * share``, and each lane
begins with a program.

Where a few items are long (ALIGNED), all wait for the program that holds the end of one and the beginning of the next:
the second starts anew, with a query tile, page ids and a first tile to wait for. If a share of a few tiles more
(ALIGN_SLACK) lets every item begin with a program of its own, items have so much room on the line.

In batch-invariant mode there is one line, of *splits*: a fixed number of tiles of one item, counted from its first.
None is cut, and each has a partial of its own, so that a row's sums do not depend on what else there is.

Outputs (int32):

``work [num_programs, 16]``
    What a block needs to start after one load, fields in the order of ``WORK_*``: the request, KV head, row tile and
    KV tile where its program's stretch begins, its length in tiles, then of that request its nodes, prefix, first row,
    row tiles and rows of a row tile; the turn behind it, its lane, where it is seen from, its number (in
    batch-invariant mode its place), and the share.
``turns [batch, 8]``
    What a program needs of the request that it goes on to, fields in the order of ``TURN_*``: requests that have work,
    class by class, the widest first, or all in their order where there is one line.
``spans [batch, 8]``
    Of each request, fields in the order of ``SPAN_*``. Counted in tokens from the first one that its pages hold: the
    prefix, where some row begins to see it, from where every row sees it (a multiple of BLOCK_N, or the prefix). The
    nodes to compute: ``num_nodes``, or 0 where there is no key, or the request's addresses cannot hold what the layout
    claims. The place of its first item, how far it is from there to the next row tile and to the next KV head, and the
    share.
``arrivals [num_programs, 4]``
    0: words by which blocks of csrc's kernel find out who is last. But for the fourth, which counts launches and stays.
"""

import triton
import triton.language as tl

from ..config import EDGE_KEYS
from .tiles import within_int32

BLOCK_E = tl.constexpr(EDGE_KEYS)
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
WORK_TURN = tl.constexpr(10)  # of the request that comes next
WORK_LANE = tl.constexpr(11)  # the row tile that this program keeps to; -1 where there is one line for all
WORK_FIRST = tl.constexpr(12)
WORK_FULL = tl.constexpr(13)
WORK_NUMBER = tl.constexpr(14)  # of the program that a block runs; in batch-invariant mode its place
WORK_SHARE = tl.constexpr(15)  # of every program, in tiles
ARRIVAL_FIELDS = tl.constexpr(4)
ARRIVAL_LAUNCHES = tl.constexpr(3)
TURN_FIELDS = tl.constexpr(8)
TURN_REQUEST = tl.constexpr(0)
TURN_NODES = tl.constexpr(1)
TURN_PREFIX = tl.constexpr(2)
TURN_FIRST_ROW = tl.constexpr(3)
TURN_ROW_TILES = tl.constexpr(4)
TURN_TILE_ROWS = tl.constexpr(5)
TURN_FIRST = tl.constexpr(6)
TURN_FULL = tl.constexpr(7)
SPAN_FIELDS = tl.constexpr(8)
SPAN_PREFIX = tl.constexpr(0)
SPAN_FIRST = tl.constexpr(1)
SPAN_FULL = tl.constexpr(2)
SPAN_NODES = tl.constexpr(3)
SPAN_PLACE = tl.constexpr(4)
SPAN_ROW_STEP = tl.constexpr(5)
SPAN_HEAD_STEP = tl.constexpr(6)
SPAN_SHARE = tl.constexpr(7)
MAX_TILES = tl.constexpr(0x3FFFFFFF)  # places are int32, and idle programs have some too
MAX_IDLE = tl.constexpr(63)  # programs that lanes may leave idle, whatever BUSY says
ALIGN_SLACK = tl.constexpr(15)  # tiles, at most; an item that begins inside a program costs about three
ALIGN_PART = tl.constexpr(7)  # and the most programs wait for it: more than three are given if they are so small a part
PART_PREFIX = tl.constexpr(1)
PART_TREE = tl.constexpr(2)


@triton.jit
def pick(mine, values):
    """For each program the value of its request: ``[programs]`` from ``mine [programs, batch]``, ``values [batch]``."""
    return tl.sum(tl.where(mine, values[None, :], 0), 1)


@triton.jit
def kv_tiles(prefix, first, full, nodes, BLOCK_N: tl.constexpr, RANGED: tl.constexpr, PART: tl.constexpr):
    """Tiles of an item: full ones, then edge tiles before them (``first`` to ``full``), behind them, and of the tree.

    Unless RANGED, ``first`` and ``full`` are 0.
    """
    if RANGED:
        full_tiles = tl.maximum(prefix // BLOCK_N - tl.cdiv(full, BLOCK_N), 0)
        front_tiles = tl.cdiv(full - first, BLOCK_E)
        tail_tiles = tl.cdiv(prefix - tl.maximum(full, prefix // BLOCK_N * BLOCK_N), BLOCK_E)
    else:
        full_tiles = prefix // BLOCK_N
        front_tiles = prefix * 0
        tail_tiles = tl.cdiv(prefix % BLOCK_N, BLOCK_E)
    tree_tiles = tl.cdiv(nodes, BLOCK_E)
    if PART == PART_PREFIX:
        tree_tiles = tree_tiles * 0
    return full_tiles, front_tiles, tail_tiles, tree_tiles


@triton.jit
def position_range(positions_ptr, first_row, nodes, prefix, COLUMNS: tl.constexpr):
    """Least and greatest position of each request's nodes, counted from prefix_len."""
    low = nodes * 0 + 0x3FFFFFFF
    high = nodes * 0 - 0x3FFFFFFF
    for begin in range(0, tl.max(nodes, 0), COLUMNS):
        node = begin + tl.arange(0, COLUMNS)
        real = node[None, :] < nodes[:, None]
        at = tl.load(positions_ptr + first_row[:, None] + node[None, :], mask=real, other=0) - prefix[:, None]
        at = within_int32(at)
        low = tl.minimum(low, tl.min(tl.where(real, at, 0x3FFFFFFF), 1))
        high = tl.maximum(high, tl.max(tl.where(real, at, -0x3FFFFFFF), 1))
    return low, high


@triton.jit
def share_of_lanes(
    row_tiles, item_tiles, widest, spread, total, num_programs, min_share,
    KV_HEADS: tl.constexpr, BUSY: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """A small share with which the lanes of all classes find programs, or MAX_TILES where none of those tried will do.

    Tried are those with which all but so many programs would be busy, could the work be dealt in any portions. (Of one
    class the least share that fits is among them.)
    """
    idle = tl.arange(0, MAX_IDLE + 1)
    busy = num_programs - idle
    shares = tl.maximum(tl.cdiv(total, tl.maximum(busy, 1)), min_share)
    programs = idle * 0
    even = programs + min_share  # what a program needs at most, with as many of them
    for below in tl.static_range(CLASSES):
        if below <= spread:
            in_class = (row_tiles == widest - below) & (row_tiles > 0)
            lane_tiles = tl.sum(tl.where(in_class, item_tiles, 0), 0) * KV_HEADS
            lane_programs = tl.cdiv(lane_tiles, shares)
            programs += lane_programs * (widest - below)
            even = tl.maximum(even, tl.cdiv(lane_tiles, tl.maximum(lane_programs, 1)))
    fits = (programs <= num_programs) & (busy * 16 >= num_programs * BUSY) & (spread < CLASSES)
    return tl.min(tl.where(fits, even, MAX_TILES), 0)


@triton.jit(do_not_specialize=["batch", "max_pages", "num_programs", "min_share", "window_left"])
def plan_kernel(
    prefix_lens_ptr,  # int32 [batch]
    num_nodes_ptr,  # int32 [batch]
    qo_indptr_ptr,  # int32 [batch + 1]
    kv_indptr_ptr,  # int32 | int64 [batch + 1] (CSR), else any pointer
    kv_start_ptr,  # int32 | int64 [batch], read if HAS_START
    positions_ptr,  # int64 [total_q], read if WINDOW
    status_ptr,  # int32 [4]
    work_ptr,  # int32 [num_programs, 16]
    turns_ptr,  # int32 [batch, 8]
    spans_ptr,  # int32 [batch, 8]
    arrivals_ptr,  # int32 [num_programs, 4]
    batch,
    max_pages,  # width of the block table; with CSR, the length of kv_indices
    num_programs,
    min_share,
    window_left,
    KV_CAPACITY_CODE: tl.constexpr,
    WORK_CODE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CSR: tl.constexpr,
    NODES_IN_TABLE: tl.constexpr,  # the nodes' K and V are at logical positions behind the prefix
    HAS_START: tl.constexpr,
    WINDOW: tl.constexpr,
    PART: tl.constexpr,
    RANGED: tl.constexpr,  # not every row sees the prefix from its beginning
    SPLIT: tl.constexpr,  # tiles of a split in batch-invariant mode, else 0
    ALIGNED: tl.constexpr,  # let items begin with programs of their own, where that is cheap
    BUSY: tl.constexpr,  # sixteenths of the programs that lanes must keep busy
    CLASSES: tl.constexpr,  # numbers of row tiles that lanes are made for, the most of the batch and below
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
    COLUMNS: tl.constexpr,  # rows of each request that are looked at together for their positions
):
    b = tl.arange(0, BLOCK_B)
    in_batch = b < batch
    prefix = tl.load(prefix_lens_ptr + b, mask=in_batch, other=0)
    nodes = tl.load(num_nodes_ptr + b, mask=in_batch, other=0)
    first_row = tl.load(qo_indptr_ptr + b, mask=in_batch, other=0)
    if CSR:
        first_page = tl.load(kv_indptr_ptr + b, mask=in_batch, other=0).to(tl.int64)
        last_page = tl.load(kv_indptr_ptr + b + 1, mask=in_batch, other=0).to(tl.int64)
        inside = (first_page >= 0) & (last_page <= max_pages)
        pages = tl.where(inside, tl.maximum(last_page - first_page, 0), 0)
    else:
        pages = tl.full([BLOCK_B], 0, tl.int64) + max_pages
    prefix_len = prefix
    if HAS_START:
        gone = tl.load(kv_start_ptr + b, mask=in_batch, other=0).to(tl.int64)
        prefix -= tl.minimum(tl.maximum(gone, 0), tl.maximum(prefix, 0).to(tl.int64)).to(tl.int32)
    needed = prefix.to(tl.int64)
    if NODES_IN_TABLE and PART != PART_PREFIX:
        needed += nodes
    elif PART == PART_TREE:
        needed = needed * 0
    too_long = in_batch & (nodes > 0) & (needed > pages * PAGE_SIZE)
    nodes = tl.where(too_long, 0, nodes)
    if tl.program_id(0) == 0:  # here, so that it need not be held: in wide batches this was spilled
        worst = tl.max(tl.where(too_long, BLOCK_B - b, 0), 0)
        if worst > 0:
            guilty = BLOCK_B - worst
            if tl.atomic_cas(status_ptr, 0, KV_CAPACITY_CODE) == 0:
                value = tl.sum(tl.where(b == guilty, needed, 0), 0)
                room = tl.sum(tl.where(b == guilty, pages * PAGE_SIZE, 0), 0)
                tl.store(status_ptr + 1, guilty)
                tl.store(status_ptr + 2, tl.minimum(room, 0x7FFFFFFF).to(tl.int32))
                tl.store(status_ptr + 3, tl.minimum(value, 0x7FFFFFFF).to(tl.int32))

    first = prefix * 0
    full = prefix * 0
    if WINDOW:
        low, high = position_range(positions_ptr, first_row.to(tl.int64), nodes, prefix_len, COLUMNS)
        first = tl.minimum(tl.maximum(prefix + low - window_left, 0), prefix)
        full = tl.minimum(tl.maximum(prefix + high - window_left, first), prefix)
        full = tl.minimum(tl.cdiv(full, BLOCK_N) * BLOCK_N, prefix)
    if PART == PART_TREE:
        first = prefix
        full = prefix
    full_tiles, front_tiles, tail_tiles, tree_tiles = kv_tiles(prefix, first, full, nodes, BLOCK_N, RANGED, PART)
    item_tiles = full_tiles + front_tiles + tail_tiles + tree_tiles
    # rows without a key are padding: nothing would write them
    nodes = tl.where(item_tiles > 0, nodes, 0)
    if SPLIT > 0:
        # the line is one of splits, which are never cut
        item_tiles = tl.cdiv(item_tiles, SPLIT)
    row_tiles = tl.cdiv(nodes * GROUP, BLOCK_M)
    # 2^30 tiles are days of work, so more of them are a mistake in the lengths
    wide_total = tl.sum((row_tiles * KV_HEADS).to(tl.int64) * item_tiles, 0)
    countable = wide_total <= MAX_TILES
    total = tl.where(countable, wide_total, 0).to(tl.int32)
    nodes = tl.where(countable, nodes, 0)
    row_tiles = tl.where(countable, row_tiles, 0)
    item_tiles = tl.where(countable, item_tiles, 0)
    share = tl.maximum(tl.cdiv(total, num_programs), min_share)
    widest = tl.max(row_tiles, 0)
    spread = share * 0  # classes with lanes, less one
    in_lanes = share < 0
    if SPLIT == 0:
        spread = widest - tl.min(tl.where(row_tiles > 0, row_tiles, widest), 0)
        fitting = share_of_lanes(
            row_tiles, item_tiles, widest, spread, total, num_programs, min_share, KV_HEADS, BUSY, CLASSES
        )
        in_lanes = (fitting < MAX_TILES) & (total > 0)
        share = tl.where(in_lanes, fitting, share)
        spread = tl.where(in_lanes, spread, 0)
    on_line = tl.where(in_lanes, tl.minimum(row_tiles, 1), row_tiles)  # row tiles of a request on one line
    held = item_tiles  # by an item, on the line
    aligned = share * 0
    if ALIGNED:
        slack = tl.arange(0, ALIGN_SLACK + 1)
        parts = tl.cdiv(item_tiles[None, :], share + slack[:, None]) * (row_tiles * KV_HEADS)[None, :]
        few = (slack <= 3) | (slack * ALIGN_PART <= share)
        least = tl.min(tl.where(few & (tl.sum(parts, 1) <= num_programs), slack, ALIGN_SLACK + 1), 0)
        if least <= ALIGN_SLACK:
            aligned += 1
            share += least
            held = tl.cdiv(item_tiles, share) * share
    tiles = on_line * KV_HEADS * held
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    live = p < num_programs
    # a line of each class, behind each other; the upper halves count requests, the lower ones tiles
    counted = tiles.to(tl.int64) + (1 << 32)
    behind = counted * 0
    moved = tiles * 0  # from the line to places
    lane_step = held * 0
    line_begin = tl.sum(behind, 0)
    class_begin = share * 0  # its first program
    my_first = p * 0  # of the class of each block: that, programs a lane, lanes, tiles of a lane, and where they begin
    my_programs = p * 0 + 1
    my_lanes = p * 0 + 1
    my_tiles = p * 0
    my_begin = p * 0
    for below in tl.static_range(CLASSES):
        if below <= spread:
            in_class = ((row_tiles == widest - below) | (in_lanes == 0)) & (row_tiles > 0)
            of_class = tl.where(in_class, counted, 0)
            behind = tl.where(in_class, tl.cumsum(of_class, 0) + line_begin, behind)
            count = tl.sum(of_class, 0)
            lane_tiles = count.to(tl.int32)
            lane_programs = tl.cdiv(lane_tiles, share)
            lanes = tl.where(in_lanes, widest - below, 1)
            moved = tl.where(in_class, class_begin * share - line_begin.to(tl.int32), moved)
            lane_step = tl.where(in_class, lane_programs * share, lane_step)
            mine = p >= class_begin
            my_first = tl.where(mine, class_begin, my_first)
            my_programs = tl.where(mine, tl.maximum(lane_programs, 1), my_programs)
            my_lanes = tl.where(mine, tl.maximum(lanes, 1), my_lanes)
            my_tiles = tl.where(mine, lane_tiles, my_tiles)
            my_begin = tl.where(mine, line_begin.to(tl.int32), my_begin)
            line_begin += count
            class_begin += lane_programs * lanes
    turn = (behind >> 32).to(tl.int32) - 1  # -1 without work
    end = behind.to(tl.int32)

    nth = (p - my_first) // my_lanes  # of its lane
    lane = p - my_first - nth * my_lanes
    on_lane = nth * share
    left = tl.where(p < class_begin, tl.minimum(my_tiles - on_lane, share), 0)
    start = on_lane + my_begin
    before = (end[None, :] <= start[:, None]) & (turn >= 0)[None, :]
    my_turn = tl.sum(before.to(tl.int32), 1)
    mine = turn[None, :] == my_turn[:, None]
    within = start - tl.max(tl.where(before, end[None, :], 0), 1)
    my_held = tl.maximum(pick(mine, held), 1)
    my_nodes = pick(mine, nodes)
    my_row_tiles = tl.maximum(pick(mine, row_tiles), 1)
    my_on_line = tl.where(in_lanes, 1, my_row_tiles)
    item = within // my_held
    tile = within - item * my_held
    if ALIGNED:
        left = tl.where((aligned > 0) & (left > 0), tl.minimum(pick(mine, item_tiles) - tile, share), left)
    kv_head = item // my_on_line
    row = work_ptr + p * WORK_FIELDS
    tl.store(row + WORK_REQUEST, pick(mine, b), mask=live)
    tl.store(row + WORK_KV_HEAD, kv_head, mask=live)
    tl.store(row + WORK_ROW_TILE, tl.where(in_lanes, lane, item - kv_head * my_on_line), mask=live)
    tl.store(row + WORK_LANE, tl.where(in_lanes, lane, -1), mask=live)
    tl.store(row + WORK_TILE, tile, mask=live)
    tl.store(row + WORK_LEFT, left, mask=live)
    tl.store(row + WORK_NODES, my_nodes, mask=live)
    tl.store(row + WORK_PREFIX, pick(mine, prefix), mask=live)
    if RANGED:
        tl.store(row + WORK_FIRST, pick(mine, first), mask=live)
        tl.store(row + WORK_FULL, pick(mine, full), mask=live)
    tl.store(row + WORK_FIRST_ROW, pick(mine, first_row), mask=live)
    tl.store(row + WORK_ROW_TILES, my_row_tiles, mask=live)
    tl.store(row + WORK_TILE_ROWS, tl.cdiv(my_nodes * GROUP, my_row_tiles), mask=live)
    tl.store(row + WORK_TURN, my_turn + 1, mask=live)
    number = my_first + lane * my_programs + nth
    tl.store(row + WORK_NUMBER, p * share if SPLIT > 0 else number, mask=live)
    tl.store(row + WORK_SHARE, p * 0 + share, mask=live)
    for field in tl.static_range(ARRIVAL_LAUNCHES):
        tl.store(arrivals_ptr + p * ARRIVAL_FIELDS + field, p * 0, mask=live)

    if tl.program_id(0) == 0:
        span = spans_ptr + b * SPAN_FIELDS
        tl.store(span + SPAN_PREFIX, prefix, mask=in_batch)
        tl.store(span + SPAN_FIRST, first, mask=in_batch)
        tl.store(span + SPAN_FULL, full, mask=in_batch)
        tl.store(span + SPAN_NODES, nodes, mask=in_batch)
        tl.store(span + SPAN_PLACE, end - tiles + moved, mask=in_batch)
        tl.store(span + SPAN_ROW_STEP, tl.where(in_lanes, lane_step, held), mask=in_batch)
        tl.store(span + SPAN_HEAD_STEP, on_line * held, mask=in_batch)
        tl.store(span + SPAN_SHARE, b * 0 + share, mask=in_batch)
        has_work = turn >= 0
        record = turns_ptr + turn * TURN_FIELDS
        tl.store(record + TURN_REQUEST, b, mask=has_work)
        tl.store(record + TURN_NODES, nodes, mask=has_work)
        tl.store(record + TURN_PREFIX, prefix, mask=has_work)
        tl.store(record + TURN_FIRST_ROW, first_row, mask=has_work)
        tl.store(record + TURN_ROW_TILES, row_tiles, mask=has_work)
        tl.store(record + TURN_TILE_ROWS, tl.cdiv(nodes * GROUP, tl.maximum(row_tiles, 1)), mask=has_work)
        tl.store(record + TURN_FIRST, first, mask=has_work)
        tl.store(record + TURN_FULL, full, mask=has_work)
        if countable == 0:
            if tl.atomic_cas(status_ptr, 0, WORK_CODE) == 0:
                tl.store(status_ptr + 1, 0)
                tl.store(status_ptr + 2, MAX_TILES)
                tl.store(status_ptr + 3, tl.minimum(wide_total >> 10, 0x7FFFFFFF).to(tl.int32))
