"""The layout kernels write exactly what the torch path writes, whatever the memory held before.

Kernels run on the test device (in the interpreter on a CPU), the torch path on CPU copies.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from treeattn.kernels.layout import row_splits
from treeattn.layout import TreeLayout, write_layout_

FIELDS = (
    "qo_indptr", "prefix_lens", "num_nodes", "mask_indptr", "mask_words", "parents", "depths", "positions",
    "row_request", "status",
)  # fmt: skip
EXAMPLES = settings(max_examples=25)
GUARD = 77


def guarded(
    max_batch: int, max_q_len: int, total_q: int, device: torch.device | str
) -> tuple[TreeLayout, list[Tensor]]:
    """A layout of stale garbage inside longer memory, and the guard elements after each tensor."""
    plain = TreeLayout.allocate(max_batch, max_q_len, total_q, device)
    values: dict[str, Any] = {"max_q_len": max_q_len, "q_len": None}
    guards = []
    for name in FIELDS:
        like = getattr(plain, name)
        memory = torch.full((like.numel() + 64,), GUARD, dtype=like.dtype, device=device)
        values[name] = memory[: like.numel()].view(like.shape)
        guards.append(memory[like.numel() :])
    values["status"].zero_()
    return TreeLayout(**values), guards


def compare(device: torch.device, capacity: tuple[int, int, int], **step: Any) -> TreeLayout:
    """Write one step both ways and compare every field; returns the kernels' layout."""
    layout, guards = guarded(*capacity, device)
    there = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in step.items()}
    write_layout_(layout, backend="triton", validate=False, **there)
    expected, _ = guarded(*capacity, "cpu")
    write_layout_(expected, backend="torch", validate=False, **step)
    for name in FIELDS:
        got, want = getattr(layout, name).cpu(), getattr(expected, name)
        if name == "status" and int(want[0]):
            # The first finding may be any request's, so only the fact is compared where several are wrong.
            assert int(got[0]) != 0
            continue
        assert torch.equal(got, want), f"{name}: {got.tolist()} != {want.tolist()}"
    for guard in guards:
        assert bool((guard == GUARD).all())
    return layout


@pytest.mark.parametrize("stride", [1, 2])
def test_flat_parents_of_one_width(device: torch.device, stride: int) -> None:
    parents = torch.tensor([-1, 0, 0, 1, -1, 0, 1, 2]).repeat_interleave(stride)[::stride]
    layout = compare(device, (3, 5, 14), batch=2, prefix_lens=torch.tensor([3, 4]), parents=parents, q_len=4)
    assert layout.mask_words[:8].flatten().tolist() == [1, 3, 5, 11, 1, 3, 7, 15]


@pytest.mark.parametrize("prefix", [2**31, 2**32 + 5])
@pytest.mark.parametrize("form", ["parents", "full"])
def test_a_prefix_that_is_no_int32_is_an_empty_request(device: torch.device, prefix: int, form: str) -> None:
    step: dict[str, Any] = {"parents": torch.tensor([[-1, 0], [-1, 0], [-1, 0]])}
    if form == "full":
        visible = [1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1]  # blocks of 2 x 3, 2 x 2 and 2 x 3
        step = {"mask": torch.tensor(visible, dtype=torch.uint8), "form": "full", "q_len": 2}
    layout = compare(device, (3, 2, 6), batch=3, prefix_lens=torch.tensor([1, prefix, 1]), **step)
    assert layout.num_nodes.tolist()[1] == 0
    assert layout.prefix_lens.tolist() == [1, 0, 1]
    assert layout.status.tolist() == [6, 1, 0, 2**31 - 1]
    with pytest.raises(ValueError, match="request 1: prefix_len is 2147483647"):
        layout.check()


@st.composite
def forests(draw: st.DrawFn, max_nodes: int = 20) -> dict[str, Any]:
    """Arguments of a ragged step, some requests malformed, and the capacity around it."""
    flat: list[int] = []
    widths, nodes, prefixes = [], [], []
    for _ in range(draw(st.integers(0, 3))):
        n = draw(st.integers(0, max_nodes))
        tree = [draw(st.integers(0, i - 1)) if i else -1 for i in range(n)]
        if n and draw(st.integers(0, 4)) == 0:
            tree[draw(st.integers(0, n - 1))] = draw(st.sampled_from([-7, -1, 0, n - 1, n, 2**31 - 1]))
        pad = draw(st.integers(0, 2))
        flat += tree + [draw(st.integers(-9, 99))] * pad
        widths.append(n + pad)
        nodes.append(n + draw(st.sampled_from([0, 0, 0, 0, -1, 5])))
        prefixes.append(draw(st.sampled_from([0, 1, 5, 300, -1])))
    batch = len(widths)
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return {
        "batch": batch,
        "parents": torch.tensor(flat, dtype=dtype),
        "qo_indptr": torch.tensor([0, *itertools.accumulate(widths)], dtype=dtype),
        "prefix_lens": torch.tensor(prefixes, dtype=dtype),
        "num_nodes": torch.tensor(nodes, dtype=dtype) if draw(st.booleans()) else None,
        "capacity": (max(batch, 1) + draw(st.integers(0, 2)), max([*widths, 1]) + draw(st.sampled_from([0, 1, 60])),
                     sum(widths) + draw(st.integers(0, 5))),
    }  # fmt: skip


@EXAMPLES
@given(step=forests())
def test_ragged_parents(device: torch.device, step: dict[str, Any]) -> None:
    capacity = step.pop("capacity")
    compare(device, capacity, **step)


@EXAMPLES
@given(step=forests())
def test_ragged_chains(device: torch.device, step: dict[str, Any]) -> None:
    capacity = step.pop("capacity")
    del step["parents"]
    compare(device, capacity, **step)


@pytest.mark.parametrize("width", [1, 7, 8, 9, 16, 17, 63, 64, 65, 129])
@pytest.mark.parametrize("spare", [0, 2])
def test_uniform_widths(device: torch.device, width: int, spare: int) -> None:
    generator = torch.Generator().manual_seed(width)
    parents = torch.stack([(torch.rand(width, generator=generator) * torch.arange(width)).long() for _ in range(3)])
    parents[:, 0] = -1
    nodes = torch.tensor([width, max(width - 3, 1), 1])
    step = {"batch": 3, "prefix_lens": torch.tensor([5, 0, 1000], dtype=torch.int32)}
    capacity = (3 + spare, width + spare, (3 + spare) * (width + spare))
    layout = compare(device, capacity, parents=parents, num_nodes=nodes, **step)
    assert layout.status.tolist() == [0] * 4
    compare(device, capacity, parents=parents.int().t().contiguous().t(), **step)
    compare(device, capacity, q_len=width, num_nodes=nodes, **step)


@pytest.mark.parametrize("shape", ["chain", "star", "random"])
def test_1025_rows(device: torch.device, shape: str) -> None:
    row = torch.arange(1025)
    parents = {"chain": row - 1, "star": row * 0, "random": (torch.rand(1025) * row).long()}[shape]
    parents[0] = -1
    compare(device, (1, 1025, 1025), batch=1, parents=parents[None], prefix_lens=torch.tensor([9]))


@pytest.mark.parametrize(
    "qo_indptr", [[0, 5, 3], [1, 2, 8], [0, 2, 9], [0, 6, 8], [-3, 4, 8], [0, 40, 50], [0, 35, 37], [5, 3, 1]]
)
@pytest.mark.parametrize("kind", ["chain", "tree", "words"])
def test_a_wrong_qo_indptr_stays_in_bounds(device: torch.device, qo_indptr: list[int], kind: str) -> None:
    step: dict[str, Any] = {
        "batch": 2,
        "qo_indptr": torch.tensor(qo_indptr),
        "prefix_lens": torch.tensor([3, 4]),
    }
    if kind == "tree":
        step |= {
            "mask": torch.ones(40, dtype=torch.bool),
            "form": "tree",
            "mask_indptr": torch.tensor([0, 9, 0]),
        }
    if kind == "words":
        step |= {"mask": torch.full((40, 1), 7), "form": "words"}
    layout = compare(device, (3, 5, 40), **step)
    with pytest.raises(ValueError, match="QO_INDPTR"):
        layout.check()


@st.composite
def masks(draw: st.DrawFn) -> dict[str, Any]:
    """A general mask of two or three requests in any form, with holes, short blocks and odd biases."""
    q_len = draw(st.sampled_from([1, 3, 5, 66]))
    batch = draw(st.integers(1, 3 if q_len < 10 else 1))
    prefixes = [draw(st.sampled_from([0, 1, 4, 13])) for _ in range(batch)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    form = draw(st.sampled_from(["full", "tree", "packed", "bias", "words"]))
    blocks = []
    for prefix in prefixes:
        rows = torch.rand(q_len, q_len, generator=generator) < 0.5
        rows[draw(st.integers(0, q_len)) :] = False
        seen = rows.any(1, keepdim=True) | (draw(st.integers(0, 3)) > 0)
        block = torch.cat([seen.expand(q_len, prefix), rows], 1)
        if prefix and draw(st.integers(0, 3)) == 0:
            block[draw(st.integers(0, q_len - 1)), draw(st.integers(0, prefix - 1))] = False
        blocks.append(rows if form == "tree" else block)
    flat = torch.cat([block.reshape(-1) for block in blocks])
    if form == "packed":
        mask = torch.cat([pack(block.reshape(-1)) for block in blocks])
    elif form == "bias":
        mask = torch.zeros(flat.numel(), dtype=draw(st.sampled_from([torch.float32, torch.float16])))
        mask.masked_fill_(~flat, draw(st.sampled_from([float("-inf"), -6e4, -1e4])))
        if draw(st.integers(0, 3)) == 0:
            mask[draw(st.integers(0, mask.numel() - 1))] = draw(st.sampled_from([1.0, -5.0, float("nan")]))
    elif form == "words":
        bound = 2**63 - 1
        mask = torch.randint(
            -bound, bound, (batch * q_len, draw(st.integers((q_len + 63) // 64, 3))), generator=generator
        )
    else:
        mask = flat if draw(st.booleans()) else flat.to(torch.uint8) * 3
    nodes = [draw(st.integers(0, q_len + (draw(st.integers(0, 5)) == 0))) for _ in range(batch)]
    positions = torch.randint(0, 99, (batch * q_len,), generator=generator)
    spare = draw(st.integers(0, 1))
    step = {
        "batch": batch,
        "mask": mask,
        "form": form,
        "prefix_lens": torch.tensor(prefixes),
        "num_nodes": torch.tensor(nodes, dtype=torch.int32) if draw(st.booleans()) else None,
        "positions": positions.to(draw(st.sampled_from([torch.int32, torch.int64]))) if draw(st.booleans()) else None,
        "capacity": (batch + spare, q_len + spare, (batch + spare) * (q_len + spare)),
    }
    if draw(st.booleans()):
        step["q_len"] = q_len
    else:
        step["qo_indptr"] = torch.arange(batch + 1) * q_len
    return step


def pack(bits: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(bits.to(torch.int64), (0, -bits.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8)).sum(1).to(torch.uint8)


@settings(max_examples=40)
@given(step=masks())
def test_every_form(device: torch.device, step: dict[str, Any]) -> None:
    capacity = step.pop("capacity")
    compare(device, capacity, **step)


def test_a_mask_that_ends_early_empties_its_request(device: torch.device) -> None:
    step = {"batch": 2, "q_len": 4, "prefix_lens": torch.tensor([3, 3]), "form": "full"}
    mask = torch.ones(56, dtype=torch.uint8)
    layout = compare(device, (2, 4, 8), mask=mask, mask_indptr=torch.tensor([28, 29, 0]), **step)
    assert layout.num_nodes.tolist() == [4, 0]
    with pytest.raises(ValueError, match="MASK_SIZE: request 1: its block of the flat mask ends at 57"):
        layout.check()
    layout, _ = guarded(2, 4, 8, device)
    step["prefix_lens"] = torch.tensor([3, 3], device=device)
    write_layout_(layout, backend="triton", mask=mask[:40].to(device), exact=False, validate=False, **step)
    assert layout.num_nodes.tolist() == [4, 0]
    layout, _ = guarded(2, 4, 8, device)
    write_layout_(layout, backend="triton", mask=mask[:40].to(device), exact=True, validate=False, **step)
    assert layout.num_nodes.tolist() == [0, 0]


def test_words_that_are_too_narrow_for_a_request_empty_it(device: torch.device) -> None:
    """In static buffers, whose steps may be narrower than they are."""
    words = torch.full((80, 1), -1)
    step = {"batch": 2, "qo_indptr": torch.tensor([0, 10, 80]), "prefix_lens": torch.tensor([3, 3]), "form": "words"}
    layout = compare(device, (2, 70, 80), mask=words, **step)
    assert layout.num_nodes.tolist() == [10, 0]
    with pytest.raises(ValueError, match=r"MASK_SIZE: request 1: .* ends at 70, the mask has 64"):
        layout.check()
    layout = compare(device, (2, 70, 80), mask=words, num_nodes=torch.tensor([10, 64]), **step)
    assert layout.num_nodes.tolist() == [10, 64]
    layout.check()


@pytest.mark.parametrize("form", ["full", "packed", "bias"])
@pytest.mark.parametrize("prefix", [3, 2047, 9001])
def test_long_rows_are_read_by_several_programs(device: torch.device, prefix: int, form: str) -> None:
    """A hole, or a value that is neither, in each stretch and at its ends; the finding names the first column."""
    width, splits = 3, row_splits(3, 3 * (prefix + 3), "full")
    assert splits == {3: 1, 2047: 2, 9001: 4}[prefix]
    ends = {min(split * -(-prefix // splits), prefix - 1) for split in range(splits + 1)}
    truth = TreeLayout.from_parents(torch.tensor([[-1, 0, 0]]), [prefix])
    for row, column in itertools.product(range(width), sorted(ends | {column - 1 for column in ends if column})):
        mask, bias = truth.full_mask(), truth.bias()
        for wrong in (column, prefix - 1):
            mask[row * (prefix + width) + wrong] = False
            bias[row * (prefix + width) + wrong] = -5.0
        given = {"full": mask, "packed": pack(mask.long()), "bias": bias}[form]
        step = {"batch": 1, "q_len": width, "prefix_lens": torch.tensor([prefix]), "form": form}
        layout = compare(device, (1, width, width), mask=given, **step)
        assert layout.status.tolist() == [8 if form == "bias" else 3, 0, row, column]
        assert layout.num_nodes.tolist() == [0]
    mask = truth.full_mask()
    mask[2 * (prefix + width) :] = False  # the last row sees nothing: padding
    layout = compare(device, (1, width, width), mask=mask, **{**step, "form": "full"})
    assert layout.num_nodes.tolist() == [2]
    assert layout.status.tolist() == [0] * 4
    mask[2 * (prefix + width) + prefix] = True  # it sees the root, and none of the prefix
    layout = compare(device, (1, width, width), mask=mask, **{**step, "form": "full"})
    assert layout.status.tolist() == [3, 0, 2, 0]


@pytest.mark.parametrize(
    ("rows", "size", "kind", "splits"),
    [
        (17, 17 * 131089, "full", 4),
        (17, 17 * 2065, "full", 2),
        (17, 17 * 2065 // 8, "packed", 2),
        (257, 257 * 8449, "full", 3),
        (544, 544 * 4113, "full", 1),
        (8, 8 * 100, "bias", 1),
        (8, 1, "full", 1),
        (0, 0, "full", 1),
    ],
)
def test_programs_of_a_row(rows: int, size: int, kind: str, splits: int) -> None:
    assert row_splits(rows, size, kind) == splits


def test_a_larger_mask_memory_is_fine_unless_exact(device: torch.device) -> None:
    truth = TreeLayout.from_parents(torch.tensor([[-1, 0, 0, 1]] * 2), [3, 2])
    memory = torch.ones(90, dtype=torch.bool)
    memory[:52] = truth.full_mask()
    step = {"batch": 2, "q_len": 4, "prefix_lens": torch.tensor([3, 2]), "form": "full"}
    layout = compare(device, (2, 4, 8), mask=memory, exact=False, **step)
    assert torch.equal(layout.mask_words.cpu(), truth.mask_words)


def test_the_founding_bug_reads_someone_elses_bits(device: torch.device) -> None:
    """Offsets of width 8 under a batch of width 17: garbage, which only the canonical offsets avoid."""
    row = torch.arange(17)
    parents = torch.stack([(row - 1) // 2, (row - 1) // 3]).clamp(min=0)
    parents[:, 0] = -1
    truth = TreeLayout.from_parents(parents, [5, 5])
    mask = truth.full_mask()
    step = {"batch": 2, "q_len": 17, "prefix_lens": torch.tensor([5, 5]), "form": "full"}
    right = compare(device, (2, 17, 34), mask=mask, **step)
    assert torch.equal(right.mask_words.cpu(), truth.mask_words)
    wrong = compare(device, (2, 17, 34), mask=mask, mask_indptr=torch.tensor([0, 8 * 13, 16 * 13]), **step)
    assert torch.equal(wrong.mask_words[:17].cpu(), truth.mask_words[:17])
    assert not torch.equal(wrong.mask_words[17:].cpu(), truth.mask_words[17:])
    with pytest.raises(ValueError, match="request 1 starts at 104, must be 374"):
        TreeLayout.from_mask(mask, "full", [5, 5], q_len=17, mask_indptr=[0, 8 * 13, 16 * 13], validate=True)
