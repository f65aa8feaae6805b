"""The plan on the device: every tile of every item belongs to exactly one program, on one line or in lanes."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import treeattn
from treeattn import PagedKV, Step, TreeLayout
from treeattn.kernels import plan as kernel
from treeattn.kernels.launch import busy_of
from treeattn.testing import build_case, check_case

EDGE = kernel.BLOCK_E.value
KV_HEADS, DIM = 2, 16


def made(prefixes: list[int], nodes: list[int], q_len: int, group: int, device: torch.device) -> Step:
    layout = TreeLayout.chain(torch.tensor(prefixes, device=device), q_len, torch.tensor(nodes, device=device))
    kv = PagedKV(page_size=2**26, block_table=torch.zeros(len(prefixes), 1, dtype=torch.int32, device=device))
    return treeattn.plan(layout, kv, group * KV_HEADS, KV_HEADS, DIM, dtype=torch.float32, backend="triton")


def shape(step: Step, prefix: int, nodes: int) -> tuple[int, int]:
    """Row tiles of a request and KV tiles of each."""
    assert step.config is not None
    block = step.config.block_n
    tiles = prefix // block + -(-(prefix % block) // EDGE) + -(-nodes // EDGE)
    return -(-nodes * step.group // step.config.block_m), tiles if nodes else 0


def record(step: Step, name: str) -> list[list[int]]:
    assert step.buffers is not None
    return getattr(step.buffers, name).tolist()


def walk(step: Step, prefixes: list[int], nodes: list[int]) -> dict[tuple[int, int, int], list[tuple[int, int, int]]]:
    """Of each (request, KV head, row tile) the programs that have a part of it, with the part's first KV tile and the
    one behind its last, program by program as the kernel goes."""
    done: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    turns = record(step, "turns")
    works = [work for work in record(step, "work") if work[kernel.WORK_LEFT.value]]
    for work in sorted(works, key=lambda work: work[kernel.WORK_NUMBER.value]):
        program = work[kernel.WORK_NUMBER.value]
        request, head, row_tile, tile, left = work[:5]
        turn, lane = work[kernel.WORK_TURN.value], work[kernel.WORK_LANE.value]
        known = work[:1] + work[5:10] + [0, 0]
        while left:
            row_tiles, tiles = shape(step, prefixes[request], nodes[request])
            first_row = int(step.layout.qo_indptr[request])
            rows = -(-nodes[request] * step.group // row_tiles)
            assert known == [request, nodes[request], prefixes[request], first_row, row_tiles, rows, 0, 0]
            last = min(tiles, tile + left)
            done.setdefault((request, head, row_tile), []).append((program, tile, last))
            left -= last - tile
            tile = 0
            row_tile += 1
            if row_tile == (row_tiles if lane < 0 else lane + 1):
                row_tile = max(lane, 0)
                head += 1
            if head == KV_HEADS and left:
                head = 0
                known = turns[turn]
                request = known[0]
                turn += 1
    return done


def share_and_lanes(step: Step, prefixes: list[int], nodes: list[int]) -> tuple[int, bool]:
    """The share without room for items, and whether there are lanes, by the plan's rule."""
    assert step.config is not None
    line: Counter[int] = Counter()
    for prefix, count in zip(prefixes, nodes, strict=True):
        row_tiles, tiles = shape(step, prefix, count)
        line[row_tiles] += KV_HEADS * tiles
    total, programs = sum(width * tiles for width, tiles in line.items()), step.num_programs
    for idle in range(programs * (16 - busy_of(step)) // 16 + 1):
        share = max(-(-total // (programs - idle)), step.config.min_share)
        lanes = {width: -(-tiles // share) for width, tiles in line.items() if tiles}
        if sum(width * count for width, count in lanes.items()) <= programs:
            least = max((-(-line[width] // count) for width, count in lanes.items()), default=0)
            return max(least, step.config.min_share), bool(lanes)
    return max(-(-total // programs), step.config.min_share), False


BATCHES = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 90), st.integers(0, 4000), st.integers(0, 2**25)),
        st.one_of(st.integers(0, 40), st.sampled_from((0, 1, 40))),
    ),
    min_size=1,
    max_size=20,
)


@given(
    batch=BATCHES,
    alike=st.booleans(),
    group=st.sampled_from((1, 2, 3, 4)),
    programs=st.sampled_from((6, 40, 132)),
    aligned=st.booleans(),
)
@example(batch=[(50, 33), (7, 33)], alike=True, group=2, programs=6, aligned=False)
@example(batch=[(0, 0), (64, 40), (3, 0)], alike=False, group=4, programs=6, aligned=False)
@example(batch=[(900, 5)], alike=False, group=2, programs=6, aligned=True)
@example(batch=[(900, 33)], alike=True, group=2, programs=6, aligned=True)
@example(batch=[(0, 40), (2, 3), (1, 40), (0, 20)], alike=False, group=4, programs=132, aligned=False)
@example(batch=[(900, 40), (0, 0), (500, 3), (700, 40), (100, 3)], alike=False, group=4, programs=132, aligned=False)
@example(batch=[(2**25, 40), (2**24, 3), (2**25, 9)], alike=False, group=4, programs=132, aligned=False)
@example(batch=[(900, 40), (500, 3)] * 8, alike=False, group=4, programs=40, aligned=False)
@example(batch=[(0, 0), (5, 0)], alike=False, group=1, programs=40, aligned=True)
def test_every_tile_belongs_to_one_program(
    batch: list[tuple[int, int]], alike: bool, group: int, programs: int, aligned: bool
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prefixes = [prefix for prefix, _ in batch]
    nodes = [batch[0][1] if alike else count for _, count in batch]
    with (
        mock.patch("treeattn.kernels.launch.is_aligned", return_value=aligned),
        mock.patch("treeattn.backends.INTERPRETER_PROGRAMS", programs),
    ):
        step = made(prefixes, nodes, 40, group, device)
    expected = {
        (request, head, row_tile): shape(step, prefix, count)[1]
        for request, (prefix, count) in enumerate(zip(prefixes, nodes, strict=True))
        for head in range(KV_HEADS)
        for row_tile in range(shape(step, prefix, count)[0])
    }
    done = walk(step, prefixes, nodes)
    assert done.keys() == expected.keys()
    share = record(step, "work")[0][kernel.WORK_SHARE.value]
    for item, parts in done.items():
        ends = [0] + [last for _, _, last in parts]
        assert [first for _, first, _ in parts] == ends[:-1]
        assert ends[-1] == expected[item]
        place, row_step, head_step, of_span = record(step, "spans")[item[0]][4:]
        begin = place + item[1] * head_step + item[2] * row_step
        assert of_span == share
        assert [program for program, _, _ in parts] == list(
            range(begin // share, (begin + expected[item] - 1) // share + 1)
        )
    lanes_take_turns(step, prefixes, nodes, aligned)


def lanes_take_turns(step: Step, prefixes: list[int], nodes: list[int], aligned: bool) -> None:
    """A class deals its blocks to its row tiles in turn, whose programs are numbered side by side; and the share is as
    small as lanes let it be, or as room for every item does."""
    balanced, lanes = share_and_lanes(step, prefixes, nodes)
    works = record(step, "work")
    share = works[0][kernel.WORK_SHARE.value]
    shapes = [shape(step, prefix, count) for prefix, count in zip(prefixes, nodes, strict=True)]
    allowed = []
    if aligned:
        for larger in range(balanced, balanced + kernel.ALIGN_SLACK.value + 1):
            slack = larger - balanced
            if slack > 3 and slack * kernel.ALIGN_PART.value > balanced:
                continue
            if sum(KV_HEADS * rows * -(-tiles // larger) for rows, tiles in shapes) <= step.num_programs:
                allowed.append(larger)
    assert share == (allowed[0] if allowed else balanced)
    classes: dict[int, list[list[int]]] = {}
    for work in works:
        request, tile, left, row_tiles = work[0], work[3], work[4], work[kernel.WORK_ROW_TILES.value]
        if not left:
            continue
        assert (work[kernel.WORK_LANE.value] >= 0) == lanes
        if allowed:
            assert tile % share == 0
            assert left == min(shapes[request][1] - tile, share)
        classes.setdefault(row_tiles, []).append(work)
    for row_tiles, of_class in classes.items():
        if lanes:
            assert len(of_class) % row_tiles == 0
            numbers = [work[kernel.WORK_NUMBER.value] for work in of_class]
            of_lane = numbers[row_tiles - 1] - numbers[0]  # times row tiles but one
            for block, work in enumerate(of_class):
                lane = block % row_tiles
                first = of_class[block - lane]
                assert work[2] == work[kernel.WORK_LANE.value] == lane
                assert (work[:2], work[3:11]) == (first[:2], first[3:11])
                assert (numbers[block] - numbers[0] - block // row_tiles) * (row_tiles - 1) == lane * of_lane
        else:
            assert all(block == work[kernel.WORK_NUMBER.value] for block, work in enumerate(works) if work[4])


@pytest.mark.parametrize(("prefixes", "nodes"), [([900], 5), ([260, 5, 330], 9), ([400, 300], 40)])
def test_attention_over_items_with_room_is_right(prefixes: list[int], nodes: int, device: torch.device) -> None:
    case = build_case([list(range(-1, nodes - 1))] * len(prefixes), prefixes, heads=(4, 1), head_dim=16,
                      dtype=torch.float32, device=device)  # fmt: skip
    with mock.patch("treeattn.kernels.launch.is_aligned", return_value=True):
        for path in ("plain", "static"):
            verdict = check_case(case, "triton", path)
            assert verdict.ok, verdict.message


def lanes_of(step: Step) -> list[int]:
    """The lane of each block, -1 where there is one line for all; programs without work left out."""
    return [work[kernel.WORK_LANE.value] for work in record(step, "work") if work[kernel.WORK_LEFT.value]]


@pytest.mark.parametrize(
    ("prefixes", "nodes", "lanes"),
    [
        ([20, 70], [16, 16], [0] * 6),
        ([20, 70], [20, 32], [0, 1] * 3),
        ([20, 70], [0, 32], [0, 1] * 3),
        ([64, 64], [32, 16], [0, 1, 0, 1, 0, 0]),
        ([64, 0, 64], [16, 0, 32], [0, 1, 0, 1, 0, 0]),
        ([64, 64, 64], [16, 16, 32], [-1] * 6),
    ],
)
def test_lanes_of_six_programs(prefixes: list[int], nodes: list[int], lanes: list[int], device: torch.device) -> None:
    """Tiles of 32 rows in the interpreter: 16 nodes of group 2 make one, 20 and 32 two. No program may be idle."""
    if device.type == "cuda":
        pytest.skip("tiles of the interpreter's configuration")
    step = made(prefixes, nodes, 40, 2, device)
    assert step.config is not None
    assert step.config.block_m == 32
    assert lanes_of(step) == lanes


@pytest.mark.parametrize("programs", [6, 12, 31])
@pytest.mark.parametrize("nodes", [[32, 20], [40, 17], [0, 32], [40, 16, 0, 25, 7], [3, 40, 20, 40, 3]])
def test_attention_over_lanes_is_right(nodes: list[int], programs: int, device: torch.device) -> None:
    """With 31 programs the merge goes by items where there are few of them, with 6 always by boundaries."""
    batch, q_len, group = len(nodes), 40, 2
    prefixes = [20, 70, 33, 131, 0][:batch]
    layout = TreeLayout.chain(torch.tensor(prefixes, device=device), q_len, torch.tensor(nodes, device=device))
    generator = torch.Generator(device).manual_seed(1)
    table = torch.randperm(batch * 171, generator=torch.Generator().manual_seed(2)).view(batch, 171)
    kv = PagedKV(page_size=1, block_table=table.to(device, torch.int32))
    q = torch.randn(batch * q_len, group * KV_HEADS, DIM, device=device, generator=generator)
    k, v = (torch.randn(batch * 171, KV_HEADS, DIM, device=device, generator=generator) for _ in range(2))
    outs = []
    for backend in ("triton", "reference"):
        with (
            mock.patch("treeattn.backends.INTERPRETER_PROGRAMS", programs),
            mock.patch("treeattn.kernels.launch.busy_of", return_value=1),
        ):
            one = treeattn.plan(layout, kv, group * KV_HEADS, KV_HEADS, DIM, dtype=torch.float32, backend=backend)
        if backend == "triton" and device.type == "cpu" and programs > 6:
            assert -1 not in lanes_of(one)
        lse = torch.full((batch * q_len, group * KV_HEADS), torch.nan, device=device)
        out = torch.full_like(q, torch.nan)
        outs.append((treeattn.tree_attention(q, k, v, one, out=out, lse=lse), lse))
    assert torch.allclose(outs[0][0], outs[1][0], atol=1e-5)
    assert torch.allclose(outs[0][1], outs[1][1], atol=1e-5)


def test_a_narrower_table_has_no_page_behind_it(device: torch.device) -> None:
    """The plan counts the pages that were copied, not those that there is room for."""
    buffers = treeattn.StaticBuffers(2, 4, device=device)
    own = PagedKV.allocate(2, page_size=4, max_pages_per_request=4, device=device)
    group = buffers.add_group(KV_HEADS, KV_HEADS, DIM, kv=own, dtype=torch.float32, fresh_tree=True, backend="triton")
    prefix_lens = torch.tensor([3, 9], device=device)
    parents = torch.tensor([[-1, 0, 0, 1]] * 2, dtype=torch.int32, device=device)
    q = torch.ones(8, KV_HEADS, DIM, device=device)
    cache = torch.ones(2, 4, KV_HEADS, DIM, device=device)
    for count in (4, 2, 1, 3):
        table = torch.ones(2, count, dtype=torch.int32, device=device)
        buffers.update_(parents=parents, prefix_lens=prefix_lens, kv=PagedKV(page_size=4, block_table=table))
        out = treeattn.tree_attention(q, cache, cache, group, k_tree=q, v_tree=q)
        assert bool((out[:4] != 0).all())
        assert bool((out[4:] != 0).all()) == (count > 2)
        if count > 2:
            buffers.check()
        else:
            with pytest.raises(ValueError, match=f"KV_CAPACITY: request 1: needs 9 cache entries, .* has {4 * count}"):
                buffers.check()


def test_what_validation_told_of_a_plan_is_not_told_again(device: torch.device) -> None:
    buffers = treeattn.StaticBuffers(1, 4, device=device, validate=True)
    own = PagedKV.allocate(1, page_size=4, max_pages_per_request=4, device=device)
    buffers.add_group(KV_HEADS, KV_HEADS, DIM, kv=own, dtype=torch.float32, backend="triton")
    with pytest.raises(ValueError, match=r"KV_CAPACITY: request 0: needs 17 .* 13 tokens of prefix \+ 4 nodes, in 4"):
        buffers.update_(chain=True, q_len=4, prefix_lens=torch.tensor([13], device=device))
    buffers.update_(chain=True, q_len=4, prefix_lens=torch.tensor([12], device=device))


def test_more_work_than_the_line_can_count(device: torch.device) -> None:
    layout = TreeLayout.chain(torch.tensor([2**31 - 1], device=device), 4, validate=False)
    kv = PagedKV(page_size=2**30, block_table=torch.zeros(1, 2, dtype=torch.int32, device=device))
    heads = 512
    step = treeattn.plan(layout, kv, heads, heads, DIM, dtype=torch.float32, backend="triton", fresh_tree=True)
    with pytest.raises(ValueError, match=r"WORK: the batch's lengths add up to \d+ x 1024 tiles of work, .*"):
        layout.check()
    assert step.buffers is not None
    assert step.buffers.spans[:, 3].tolist() == [0]
