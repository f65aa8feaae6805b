"""Validation: each thing that only device data tells is found where it enters, and named by request, row and value."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch
from torch import Tensor

import treeattn
from treeattn import PagedKV, StaticBuffers, Step, TreeLayout, validate
from treeattn.layout_input import Kind, MaskForm
from treeattn.status import MESSAGES, Status

PAGE, PAGES, ROWS, DIM = 4, 12, 4, 16
PREFIX = [5, 9]
NODES = [3, 4]
ANYTHING = 10**6  # in entries that nobody needs
T4 = [-1, 0, 0, 1]


def trees(device: torch.device, nodes: list[int] = NODES, prefix: list[int] = PREFIX) -> dict[str, Any]:
    """Two requests of 4 rows, the first with one row of padding."""
    as_tensor = {"prefix_lens": torch.tensor(prefix, device=device), "num_nodes": torch.tensor(nodes, device=device)}
    return {"parents": torch.tensor([T4, T4], device=device)} | as_tensor


def table(device: torch.device) -> Tensor:
    """Pages of both requests: two of the first (8 tokens), four of the second (13)."""
    return torch.tensor([[7, 0, ANYTHING, -1, -1], [3, 9, 11, 2, ANYTHING]], dtype=torch.int32, device=device)


def addresses(device: torch.device, form: str = "table", tree_slots: Tensor | None = None) -> PagedKV:
    rows = table(device)
    if form == "table":
        return PagedKV(page_size=PAGE, block_table=rows, tree_slots=tree_slots)
    indptr = torch.tensor([1, 3, 7], device=device)
    indices = torch.cat([rows[1, 4:], rows[0, :2], rows[1, :4]])
    return PagedKV(page_size=PAGE, kv_indptr=indptr, kv_indices=indices, tree_slots=tree_slots)


def planned(device: torch.device, kv: PagedKV, validate: bool | None = True, **rest: Any) -> Step:
    layout = TreeLayout.from_parents(**trees(device), validate=False)
    return treeattn.plan(layout, kv, 2, 1, DIM, dtype=torch.float32, validate=validate, **rest)


def attend(step: Step, pages: int = PAGES, **rest: Any) -> Tensor:
    device = step.layout.device
    q = torch.ones(2 * ROWS, 2, DIM, device=device)
    cache = torch.ones(pages, PAGE, 1, DIM, device=device)
    return treeattn.tree_attention(q, cache, cache, step, **rest)


def refused(message: str) -> Any:
    return pytest.raises(ValueError, match=message)


# The layout's input.


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([T4, [-1, 2, 0, 0]], "request 1, row 1: parent is 2, which comes after it"),
        ([T4, [-1, 1, 0, 0]], "request 1, row 1: parent is 1, which closes the cycle 1 -> 1"),
        ([[0, 0, 0, 0], T4], "request 0, row 0: parent is 0; row 0 is the root"),
        ([T4, [-1, 0, -2, 0]], "request 1, row 2: parent is -2, an absent node"),
    ],
)
def test_the_order_of_parents(device: torch.device, parents: list[list[int]], message: str) -> None:
    with refused(message):
        TreeLayout.from_parents(torch.tensor(parents, device=device), [1, 1], validate=True)


@pytest.mark.parametrize("form", ["tree", "words"])
def test_bits_beyond_num_nodes(device: torch.device, form: MaskForm) -> None:
    seen = torch.eye(ROWS, dtype=torch.int64, device=device).repeat(2, 1)
    seen[ROWS + 2, 3] = 1
    mask = (seen * torch.tensor([1, 2, 4, 8], device=device)).sum(1, keepdim=True) if form == "words" else seen.bool()
    buffers, _ = made(device)
    arguments: dict[str, Any] = {"prefix_lens": torch.tensor(PREFIX, device=device), "kv": addresses(device)}
    arguments |= {"mask": mask, "form": form, "q_len": ROWS}
    buffers.update_(num_nodes=torch.tensor([3, 4], device=device), **arguments)
    with refused("request 1, row 2: sees node 3, but num_nodes is 3"):
        buffers.update_(num_nodes=torch.tensor([3, 3], device=device), **arguments)


def build(form: MaskForm, elements: int, prefix: list[int], width: int, indptr: list[int], device: Any) -> TreeLayout:
    dtype = torch.float32 if form == "bias" else torch.uint8
    mask = torch.zeros(elements, dtype=dtype, device=device)
    return TreeLayout.from_mask(mask, form, prefix, q_len=width, mask_indptr=indptr, validate=True)


OFFSETS: dict[str, tuple[MaskForm, list[int], str]] = {
    "full": (
        "full", [0, 104, 240],
        r"MASK_INDPTR: request 1 starts at 104, must be 374 = 17\*\(5\+17\); "
        r"104 = 8\*\(5\+8\) is the place for requests of 8 rows, these have 17",
    ),
    "bias": ("bias", [0, 104, 240], r"request 1 starts at 104, must be 374 .* 8\*\(5\+8\) is the place"),
    "tree": ("tree", [0, 64, 128], r"request 1 starts at 64, must be 289 = 17\*17; 64 = 8\*8 .* these have 17"),
    "packed": (
        "packed", [0, 13, 30],
        r"request 1 starts at 13, must be 47 = ceil\(17\*\(5\+17\)/8\); 13 = ceil\(8\*\(5\+8\)/8\) is the place",
    ),
    "the end": (
        "full", [0, 374, 510],
        r"request 1 ends at 510, must be 816 = 17\*\(5\+17\) \+ 17\*\(9\+17\)$",
    ),
    "the start": ("full", [8, 374, 816], "request 0 starts at 8, must be 0$"),
    "another form": ("full", [0, 289, 578], "request 1 starts at 289, must be 374 .*; 289 is the place in form 'tree'"),
    "elements": ("packed", [0, 374, 816], "request 1 starts at 374, must be 47 .*; 374 is the place in form 'full'"),
    "neither": ("full", [0, 105, 816], r"request 1 starts at 105, must be 374 = 17\*\(5\+17\)$"),
}  # fmt: skip


@pytest.mark.parametrize("name", OFFSETS)
def test_a_wrong_offset_says_which_width_it_belongs_to(device: torch.device, name: str) -> None:
    form, indptr, message = OFFSETS[name]
    with refused(message):
        build(form, 816, PREFIX, 17, indptr, device)


def test_a_wrong_size_says_which_width_it_belongs_to(device: torch.device) -> None:
    sizes = {
        240: r"has 816 elements, got 240; 240 = 8\*\(5\+8\) \+ 8\*\(9\+8\) is the place for requests of 8 rows",
        578: "has 816 elements, got 578; 578 is the place in form 'tree'",
        815: "has 816 elements, got 815$",
    }
    for size, message in sizes.items():
        mask = torch.zeros(size, dtype=torch.bool, device=device)
        with refused(message):
            TreeLayout.from_mask(mask, "full", PREFIX, q_len=17, validate=True)
    with refused("has 816 elements, got 815$"):
        build("full", 815, PREFIX, 17, [0, 374, 816], device)


def test_many_requests_are_explained_in_a_line() -> None:
    hint = validate.explain_offset("tree", 4 * 9, [0] * 4, [2, 4, 2, 4])
    assert hint == "; 36 = 3*3 + ... + 3*3 is the place for requests of 3 rows, these have 2/4"
    assert validate.explain_offset(cast(Kind, "full"), 3, [], []) == ""


# Addresses.


@pytest.mark.parametrize("form", ["table", "csr"])
def test_sound_addresses_pass_whatever_unneeded_entries_hold(device: torch.device, form: str) -> None:
    slots = torch.tensor([1, 2, 3, -9, 17, 18, 19, 20], device=device)  # row 3 is padding
    for kv in (addresses(device, form), addresses(device, form, slots)):
        step = planned(device, kv)
        assert torch.allclose(attend(step)[[0, 1, 2, 4, 5, 6, 7]], torch.ones((), device=device))


@pytest.mark.parametrize("form", ["table", "csr"])
def test_a_negative_page_id(device: torch.device, form: str) -> None:
    kv = addresses(device, form)
    kv.pages_of(1)[2] = -5
    with refused("request 1: page id -5 of tokens 8 to 11, must be 0 or more$"):
        planned(device, kv)


@pytest.mark.parametrize("form", ["table", "csr"])
def test_a_page_id_outside_the_cache(device: torch.device, form: str) -> None:
    kv = addresses(device, form)
    kv.pages_of(1)[3] = PAGES
    step = planned(device, kv)
    with refused("request 1: page id 12 of tokens 12 to 12, must be 0 or more and inside the cache of 12 pages of 4$"):
        attend(step)
    attend(step, pages=PAGES + 1)
    fresh = torch.ones(8, 1, DIM, device=device)
    attend(step, k_tree=fresh, v_tree=fresh)  # that page holds nodes only, and nobody reads it


def test_of_a_cache_that_ends_in_a_page_the_rest_counts(device: torch.device) -> None:
    kv = addresses(device)
    step = planned(device, kv)
    q, slots = torch.ones(8, 2, DIM, device=device), torch.ones(45, 1, DIM, device=device)
    kv.pages_of(1)[2:4] = torch.tensor([2, 11])  # of page 11 the cache has the first slot, all that token 12 needs
    treeattn.tree_attention(q, slots, slots, step)
    kv.pages_of(1)[2:4] = torch.tensor([11, 2])
    with refused("request 1: page id 11 of tokens 8 to 11, must be 0 or more and inside the cache of 11 pages of 4$"):
        treeattn.tree_attention(q, slots, slots, step)


def test_tree_slots(device: torch.device) -> None:
    slots = torch.tensor([1, 2, 3, ANYTHING, 17, 18, 19, 48], dtype=torch.int32, device=device)
    step = planned(device, addresses(device, tree_slots=slots))
    with refused("request 1, row 3: tree_slots holds 48, must be 0 or more and inside the cache of 48 token slots$"):
        attend(step)
    fresh = torch.ones(8, 1, DIM, device=device)
    attend(step, k_tree=fresh, v_tree=fresh)  # no slot is read
    slots[1] = -1
    with refused("request 0, row 1: tree_slots holds -1, must be 0 or more$"):
        planned(device, addresses(device, tree_slots=slots))
    planned(device, addresses(device, tree_slots=slots), fresh_tree=True)


@pytest.mark.parametrize(
    ("indptr", "message"),
    [
        ([0, 4, 3], "request 1: kv_indptr goes from 4 to 3; it must be 0 or more, never fall"),
        ([0, 3, 8], "request 1: kv_indptr goes from 3 to 8; .* stay inside the 7 kv_indices"),
        ([-1, 3, 7], "request 0: kv_indptr goes from -1 to 3"),
    ],
)
def test_kv_indptr(device: torch.device, indptr: list[int], message: str) -> None:
    kv = addresses(device, "csr")
    kv = PagedKV(page_size=PAGE, kv_indptr=torch.tensor(indptr, device=device), kv_indices=kv.kv_indices)
    with refused(message):
        planned(device, kv)


def test_lengths_inside_the_table(device: torch.device) -> None:
    narrow = PagedKV(page_size=PAGE, block_table=table(device)[:, :3].contiguous())
    message = "KV_CAPACITY: request 1: needs 13 cache entries, its part of the KV address table has 12"
    with refused(f"{message}: 9 tokens of prefix [+] 4 nodes, in 3 pages of 4"):
        planned(device, narrow)
    planned(device, narrow, fresh_tree=True)  # the prefix alone is in the table


def test_an_empty_request_needs_no_address(device: torch.device) -> None:
    layout = TreeLayout.from_parents(**trees(device, nodes=[0, 4]), validate=False)
    kv = addresses(device)
    kv.pages_of(0).fill_(-1)
    attend(treeattn.plan(layout, kv, 2, 1, DIM, dtype=torch.float32, validate=True))


def test_pages_before_the_window_may_be_gone(device: torch.device) -> None:
    layout = TreeLayout.from_parents(**trees(device))
    step = SimpleNamespace(layout=layout, window_left=3)
    assert validate._first_token(cast(Step, step), slice(4, 8)) == 9 - 3
    assert validate._first_token(cast(Step, step), slice(0, 3)) == 5 - 3
    assert validate._first_token(cast(Step, SimpleNamespace(layout=layout, window_left=-1)), slice(4, 8)) == 0


def test_a_layout_that_was_found_wrong_is_not_planned(device: torch.device) -> None:
    parents = torch.tensor([T4, [-1, 3, 0, 0]], device=device)
    layout = TreeLayout.from_parents(parents, PREFIX, validate=False)
    with refused("PARENT: request 1: row 1 has parent 3"):
        treeattn.plan(layout, addresses(device), 2, 1, DIM, dtype=torch.float32, validate=True)
    step = planned(device, addresses(device))
    step.layout.status.copy_(torch.tensor([int(Status.PARENT), 0, 1, 3]))
    with refused("PARENT: request 0: row 1 has parent 3"):
        attend(step)


# Static buffers.


def made(
    device: torch.device, validate: bool | None = True, form: str = "table", num_pages: int | None = None
) -> tuple[StaticBuffers, Step]:
    buffers = StaticBuffers(3, ROWS, device=device, validate=validate)
    room: dict[str, int] = {"max_pages_per_request": 6} if form == "table" else {"max_pages": 18}
    own = PagedKV.allocate(3, page_size=PAGE, num_pages=num_pages, device=device, **room)  # type: ignore[arg-type]
    return buffers, buffers.add_group(2, 1, DIM, kv=own, dtype=torch.float32)


def test_an_update_checks_the_tree_before_it_writes(device: torch.device) -> None:
    buffers, _ = made(device)
    arguments = trees(device) | {"parents": torch.tensor([T4, [-1, 0, 3, 0]], device=device)}
    with refused("request 1, row 2: parent is 3"):
        buffers.update_(kv=addresses(device), **arguments)
    assert not bool(buffers.layout.qo_indptr.any())


@pytest.mark.parametrize("form", ["table", "csr"])
def test_an_update_checks_the_addresses(device: torch.device, form: str) -> None:
    buffers, group = made(device, form=form)
    buffers.update_(kv=addresses(device, form), **trees(device))
    bad = addresses(device, form)
    bad.pages_of(1)[3] = PAGES
    buffers.update_(kv=bad, **trees(device))  # the cache is not known yet
    with refused("request 1: page id 12 of tokens 12 to 12"):
        attend(group)
    with refused("request 1: page id 12 of tokens 12 to 12, .* inside the cache of 12 pages of 4"):
        made(device, form=form, num_pages=PAGES)[0].update_(kv=bad, **trees(device))
    bad.pages_of(1)[1] = -3
    with refused("request 1: page id -3 of tokens 4 to 7"):
        buffers.update_(kv=bad, **trees(device))
    with refused(r"KV_CAPACITY: request \d: needs 2\d cache entries, its part .* has (8|20)"):
        buffers.update_(kv=addresses(device, form), **trees(device, prefix=[20, 17]))
    buffers.update_(kv=addresses(device, form), **trees(device))  # and nothing is told twice
    attend(group)


def test_stale_offsets_beyond_the_batch_are_nobodys(device: torch.device) -> None:
    buffers = StaticBuffers(3, ROWS, device=device, validate=True)
    rows = addresses(device, "csr")
    assert rows.kv_indices is not None
    borrowed = PagedKV(
        page_size=PAGE, kv_indptr=torch.tensor([1, 3, 7, 2], device=device), kv_indices=rows.kv_indices
    )
    buffers.add_group(2, 1, DIM, kv=borrowed, dtype=torch.float32)
    buffers.update_(**trees(device))


def test_slots_for_fewer_rows_than_a_ragged_step_has(device: torch.device) -> None:
    buffers = StaticBuffers(3, ROWS, device=device, validate=True)
    own = PagedKV.allocate(3, page_size=PAGE, max_pages_per_request=6, max_total_q=12, device=device)
    buffers.add_group(2, 1, DIM, kv=own, dtype=torch.float32)
    few = addresses(device, tree_slots=torch.arange(6, device=device))
    ragged = {"prefix_lens": torch.tensor(PREFIX, device=device), "parents": torch.tensor(T4 + T4, device=device)}
    with refused("kv has 6 tree_slots, the step has 8 query rows"):
        buffers.update_(kv=few, qo_indptr=torch.tensor([0, 4, 8], device=device), **ragged)


def test_rows_of_q_that_a_ragged_step_does_not_have(device: torch.device) -> None:
    buffers, group = made(device)
    flat = {"prefix_lens": torch.tensor(PREFIX, device=device), "parents": torch.tensor(T4 + T4, device=device)}
    buffers.update_(kv=addresses(device), qo_indptr=torch.tensor([0, 4, 8], device=device), **flat)
    q, cache = torch.ones(7, 2, DIM, device=device), torch.ones(PAGES, PAGE, 1, DIM, device=device)
    with refused("q has 7 query rows, the layout's requests have 8"):
        treeattn.tree_attention(q, cache, cache, group)


# On and off.


def test_the_environment_turns_it_on_when_a_step_is_made(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = planned(device, addresses(device), validate=None)
    monkeypatch.setenv("TREEATTN_VALIDATE", "1")
    assert not off.validate
    assert planned(device, addresses(device), validate=None).validate
    assert not planned(device, addresses(device), validate=False).validate
    assert made(device, validate=None)[1].validate
    assert not made(device, validate=False)[1].validate


def test_off_it_does_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TREEATTN_VALIDATE", raising=False)

    def never(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("validation ran")

    hooks = {"plan": "validate_plan", "buffers": "validate_update", "api": "validate_call", "layout": "validate_input"}
    for module, name in hooks.items():
        monkeypatch.setattr(importlib.import_module(f"treeattn.{module}"), name, never)
    step = planned(device, addresses(device), validate=None)
    buffers, group = made(device, validate=None)
    buffers.update_(kv=addresses(device), **trees(device))
    attend(step)
    attend(group)
    with pytest.raises(AssertionError, match="validation ran"):
        buffers.update_(kv=addresses(device), validate=True, **trees(device))


def test_one_update_may_be_validated_or_spared(device: torch.device) -> None:
    wrong = trees(device) | {"parents": torch.tensor([T4, [-1, 0, 3, 0]], device=device)}
    buffers, _ = made(device, validate=False)
    with refused("request 1, row 2: parent is 3"):
        buffers.update_(kv=addresses(device), validate=True, **wrong)
    buffers, _ = made(device, validate=True)
    buffers.update_(kv=addresses(device), validate=False, **wrong)
    with refused("PARENT: request 1: row 2 has parent 3"):
        buffers.check()


def test_a_capture_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="validation of x reads device data, which a CUDA graph capture forbids"):
        validate.refuse_in_capture(torch.device("cuda"), "validation of x")
    validate.refuse_in_capture(torch.device("cpu"), "validation of x")


def test_every_entry_asks_about_a_capture_first(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    step = planned(device, addresses(device))
    buffers, _ = made(device)

    def capturing(_: torch.device, what: str) -> NoReturn:
        raise RuntimeError(what)

    for module in (validate, importlib.import_module("treeattn.buffers")):
        monkeypatch.setattr(module, "refuse_in_capture", capturing)
    with pytest.raises(RuntimeError, match=r"^validation of tree_attention$"):
        attend(step)
    with pytest.raises(RuntimeError, match=r"^validation of a plan$"):
        planned(device, addresses(device))
    with pytest.raises(RuntimeError, match=r"^validation of update_$"):
        buffers.update_(kv=addresses(device), **trees(device))
    assert not bool(buffers.layout.qo_indptr.any())
    with pytest.raises(RuntimeError, match=r"^validation$"):
        TreeLayout.from_parents(**trees(device), validate=True)


@pytest.mark.gpu
def test_a_real_capture_is_refused_and_goes_on(device: torch.device) -> None:
    buffers, group = made(device)
    arguments = trees(device)
    buffers.update_(kv=addresses(device), **arguments)
    q, cache = torch.ones(8, 2, DIM, device=device), torch.ones(PAGES, PAGE, 1, DIM, device=device)
    out = treeattn.tree_attention(q, cache, cache, group)
    plain, spared = made(device, validate=False)
    plain.update_(kv=addresses(device), **arguments)
    treeattn.tree_attention(q, cache, cache, spared, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="validation of update_ reads device data"):
            buffers.update_(**arguments)
        with pytest.raises(RuntimeError, match="validation of tree_attention reads device data"):
            treeattn.tree_attention(q, cache, cache, group, out=out)
        treeattn.tree_attention(q, cache, cache, spared, out=out)
    out.zero_()
    graph.replay()
    assert torch.allclose(out[[0, 1, 2, 4, 5, 6, 7]], torch.ones((), device=device))


# The status word tells the same without a host read.


def flat(device: torch.device, form: MaskForm, mask: list[float], **rest: Any) -> TreeLayout:
    dtype = torch.float32 if form == "bias" else torch.uint8
    return TreeLayout.from_mask(
        torch.tensor(mask, dtype=dtype, device=device), form, rest.pop("prefix", [0]), q_len=2, validate=False, **rest
    )


def too_long(device: torch.device) -> TreeLayout:
    step = planned(device, PagedKV(page_size=PAGE, block_table=table(device)[:, :3].contiguous()), validate=False)
    attend(step)
    return step.layout


def chain(device: torch.device, **rest: Any) -> TreeLayout:
    return TreeLayout.chain(rest.pop("prefix_lens", [0]), device=device, validate=False, **rest)


PROVOKED: dict[Status, tuple[Callable[[torch.device], TreeLayout], str]] = {
    Status.PARENT: (
        lambda d: TreeLayout.from_parents(torch.tensor([[-1, 1]], device=d), [0], validate=False),
        "request 0: row 1 has parent 1",
    ),
    Status.NUM_NODES: (lambda d: chain(d, q_len=2, num_nodes=[3]), "request 0: num_nodes is 3, but its q_len is 2"),
    Status.MASK_HOLE: (
        lambda d: flat(d, "full", [1, 1, 0, 0, 1, 1], prefix=[1]), "request 0: row 1 hides prefix token 0",
    ),
    Status.QO_INDPTR: (
        lambda d: chain(d, qo_indptr=[0, 3], max_q_len=2, total_q=4), "request 0: qo_indptr goes from 0 to 3",
    ),
    Status.KV_CAPACITY: (too_long, "request 1: needs 13 cache entries, its part of the KV address table has 12"),
    Status.PREFIX_LEN: (lambda d: chain(d, prefix_lens=[2**31], q_len=2), "request 0: prefix_len is 2147483647"),
    Status.MASK_SIZE: (
        lambda d: flat(d, "full", [1] * 6, mask_indptr=[3, 7]),
        "request 0: its block of the flat mask ends at 7, the mask has 6 elements",
    ),
    Status.BIAS_VALUE: (lambda d: flat(d, "bias", [0, -1e9, 0, 0.5]), "request 0: row 1 has a bias at key 1"),
}  # fmt: skip
# MASK_INDPTR is told by validation alone: blocks may lie anywhere. WORK is the plan kernel's line (test_plan).
ELSEWHERE = {Status.OK, Status.MASK_INDPTR, Status.WORK}


def test_every_code_has_a_sentence_and_is_provoked() -> None:
    assert set(PROVOKED) | ELSEWHERE == set(Status)
    assert set(MESSAGES) == set(Status) - {Status.OK}


@pytest.mark.parametrize("code", PROVOKED, ids=lambda code: code.name)
def test_a_code_is_set_and_its_request_is_empty(device: torch.device, code: Status) -> None:
    provoke, message = PROVOKED[code]
    layout = provoke(device)
    assert int(layout.status[0]) == code
    if code != Status.KV_CAPACITY:  # which the plan finds, and leaves the layout alone
        assert int(layout.num_nodes[0]) == 0
    with refused(f"{code.name}: {message}"):
        layout.check()
