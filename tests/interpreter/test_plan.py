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
from treeattn.testing import build_case, check_case

EDGE = kernel.BLOCK_E.value
KV_HEADS, DIM = 2, 16


def made(prefixes: list[int], nodes: list[int], q_len: int, group: int, device: torch.device) -> Step:
    layout = TreeLayout.chain(torch.tensor(prefixes, device=device), q_len, torch.tensor(nodes, device=device))
    table = torch.zeros(len(prefixes), max(prefixes) + q_len, dtype=torch.int32, device=device)
    kv = PagedKV(page_size=1, block_table=table)
    return treeattn.plan(layout, kv, group * KV_HEADS, KV_HEADS, DIM, dtype=torch.float32, backend="triton")


def shape(step: Step, prefix: int, nodes: int) -> tuple[int, int]:
    """Row tiles of a request and KV tiles of each."""
    assert step.config is not None
    block = step.config.block_n
    tiles = prefix // block + -(-(prefix % block) // EDGE) + -(-nodes // EDGE)
    return -(-nodes * step.group // step.config.block_m), tiles if nodes else 0


def walk(step: Step, prefixes: list[int], nodes: list[int]) -> Counter[tuple[int, int, int, int]]:
    """How often each (request, KV head, row tile, KV tile) is computed, program by program as the kernel goes."""
    assert step.buffers is not None
    done: Counter[tuple[int, int, int, int]] = Counter()
    for work in step.buffers.work.tolist():
        request, head, row_tile, tile, left = work[:5]
        lane = work[kernel.WORK_LANE.value]
        if left:
            assert work[5:8] == [nodes[request], prefixes[request], int(step.layout.qo_indptr[request])]
        while left:
            row_tiles, tiles = shape(step, prefixes[request], nodes[request])
            if nodes[request]:
                last = min(tiles, tile + left)
                done.update((request, head, row_tile, t) for t in range(tile, last))
                left -= last - tile
                row_tile += 1
                if row_tile == (row_tiles if lane < 0 else lane + 1):
                    row_tile = max(lane, 0)
                    head += 1
            tile = 0
            if head == KV_HEADS or not nodes[request]:
                head = 0
                request += 1
    return done


@given(
    batch=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)), min_size=1, max_size=5),
    alike=st.booleans(),
    group=st.sampled_from((1, 2, 3, 4)),
    aligned=st.booleans(),
)
@example(batch=[(50, 33), (7, 33)], alike=True, group=2, aligned=False)
@example(batch=[(0, 0), (64, 40), (3, 0)], alike=False, group=4, aligned=False)
@example(batch=[(900, 5)], alike=False, group=2, aligned=True)
@example(batch=[(900, 33)], alike=True, group=2, aligned=True)
def test_every_tile_belongs_to_one_program(
    batch: list[tuple[int, int]], alike: bool, group: int, aligned: bool
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prefixes = [prefix for prefix, _ in batch]
    nodes = [batch[0][1] if alike else count for _, count in batch]
    with mock.patch("treeattn.kernels.launch.is_aligned", return_value=aligned):
        step = made(prefixes, nodes, 40, group, device)
    expected = Counter(
        (request, head, row_tile, tile)
        for request, (prefix, count) in enumerate(zip(prefixes, nodes, strict=True))
        for head in range(KV_HEADS)
        for row_tile in range(shape(step, prefix, count)[0])
        for tile in range(shape(step, prefix, count)[1])
    )
    assert walk(step, prefixes, nodes) == expected
    if aligned:
        items_begin_with_programs(step, prefixes, nodes)


def items_begin_with_programs(step: Step, prefixes: list[int], nodes: list[int]) -> None:
    """Or there is no share up to ALIGN_SLACK tiles larger that lets them."""
    assert step.buffers is not None
    assert step.config is not None
    share, lane_programs, lanes, aligned = step.buffers.share.tolist()
    shapes = [shape(step, prefix, count) for prefix, count in zip(prefixes, nodes, strict=True)]
    items = [(KV_HEADS * (min(rows, 1) if lanes > 1 else rows), tiles) for rows, tiles in shapes]
    balanced = max(-(-sum(count * tiles for count, tiles in items) // lane_programs), step.config.min_share)

    def fits(share: int) -> bool:
        return sum(count * -(-tiles // share) for count, tiles in items) <= lane_programs

    allowed = [share for share in range(balanced, balanced + kernel.ALIGN_SLACK.value + 1) if fits(share)]
    assert bool(aligned) == bool(allowed)
    assert share == (allowed[0] if allowed else balanced)
    for work in step.buffers.work.tolist():
        request, tile, left = work[0], work[3], work[4]
        if aligned and left:
            assert tile % share == 0
            assert left == min(shapes[request][1] - tile, share)


@pytest.mark.parametrize(("prefixes", "nodes"), [([900], 5), ([260, 5, 330], 9), ([400, 300], 40)])
def test_attention_over_items_with_room_is_right(prefixes: list[int], nodes: int, device: torch.device) -> None:
    case = build_case([list(range(-1, nodes - 1))] * len(prefixes), prefixes, heads=(4, 1), head_dim=16,
                      dtype=torch.float32, device=device)  # fmt: skip
    with mock.patch("treeattn.kernels.launch.is_aligned", return_value=True):
        for path in ("plain", "static"):
            verdict = check_case(case, "triton", path)
            assert verdict.ok, verdict.message


@pytest.mark.parametrize(("nodes", "lanes"), [([16, 16], 1), ([20, 32], 2), ([33, 16], 1), ([0, 32], 2)])
def test_lanes_where_row_tiles_are_alike(nodes: list[int], lanes: int, device: torch.device) -> None:
    """Tiles of 32 rows in the interpreter: 16 nodes of group 2 make one, 20 and 32 two."""
    if device.type == "cuda":
        pytest.skip("tiles of the interpreter's configuration")
    step = made([20, 70], nodes, 40, 2, device)
    assert step.buffers is not None
    assert step.config is not None
    assert step.config.block_m == 32
    assert step.buffers.share.tolist()[1:3] == [step.num_programs // lanes, lanes]


@pytest.mark.parametrize("nodes", [[32, 20], [40, 17], [0, 32]])
def test_attention_over_lanes_is_right(nodes: list[int], device: torch.device) -> None:
    prefixes, q_len, group = [20, 70], 40, 2
    generator = torch.Generator(device).manual_seed(1)
    step = made(prefixes, nodes, q_len, group, device)
    table = torch.randperm(2 * 110, generator=torch.Generator().manual_seed(2)).view(2, 110).to(device, torch.int32)
    kv = PagedKV(page_size=1, block_table=table)
    q = torch.randn(2 * q_len, group * KV_HEADS, DIM, device=device, generator=generator)
    k, v = (torch.randn(220, KV_HEADS, DIM, device=device, generator=generator) for _ in range(2))
    outs = []
    for backend in ("triton", "reference"):
        one = treeattn.plan(step.layout, kv, group * KV_HEADS, KV_HEADS, DIM, dtype=torch.float32, backend=backend)
        lse = torch.full((2 * q_len, group * KV_HEADS), torch.nan, device=device)
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
