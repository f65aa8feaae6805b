"""TreeLayout against trees written by hand, and against a plain walk up the parents."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from treeattn.kv import PagedKV
from treeattn.layout import TreeLayout, write_layout_
from treeattn.layout_input import MaskForm
from treeattn.masks import pack_words, unpack_words
from treeattn.tree import parents_from_paths
from treeattn.verify import accept

FIELDS = (
    "qo_indptr", "prefix_lens", "num_nodes", "mask_indptr", "mask_words", "parents", "depths", "positions",
    "row_request",
)  # fmt: skip
T4 = [-1, 0, 0, 1]
# Two binary levels under the root, breadth first.
SEVEN = [-1, 0, 0, 1, 1, 2, 2]
SEVEN_ROWS = ["1000000", "1100000", "1010000", "1101000", "1100100", "1010010", "1010001"]


def same(a: TreeLayout, b: TreeLayout, but: tuple[str, ...] = ()) -> None:
    for name in FIELDS:
        if name not in but:
            assert torch.equal(getattr(a, name), getattr(b, name)), name


def seen(layout: TreeLayout) -> list[str]:
    width = int(layout.qo_indptr.diff().max())
    return ["".join(map(str, row)) for row in unpack_words(layout.mask_words, width).int().tolist()]


def dirty(max_batch: int, max_q_len: int, max_total_q: int | None, device: torch.device | str = "cpu") -> TreeLayout:
    """A layout whose memory holds what no step may leave behind."""
    layout = TreeLayout.allocate(max_batch, max_q_len, max_total_q, device)
    for name in FIELDS:
        getattr(layout, name).fill_(77)
    return layout


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 70) -> list[int]:
    n = draw(st.integers(1, max_nodes))
    reach = draw(st.sampled_from([1, 3, max_nodes]))
    return [-1] + [draw(st.integers(max(0, i - reach), i - 1)) for i in range(1, n)]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int]]:
    """(trees, widths >= nodes, prefixes)."""
    forest = draw(st.lists(trees(), min_size=1, max_size=4))
    widths = [len(tree) + draw(st.integers(0, 3)) for tree in forest]
    prefixes = [draw(st.integers(0, 9)) for _ in forest]
    return forest, widths, prefixes


def from_forest(forest: list[list[int]], widths: list[int], prefixes: list[int], **kwargs: Any) -> TreeLayout:
    flat = [p for tree, width in zip(forest, widths, strict=True) for p in tree + [99] * (width - len(tree))]
    return TreeLayout.from_parents(
        torch.tensor(flat), prefixes, num_nodes=[len(tree) for tree in forest],
        qo_indptr=torch.tensor([0, *itertools.accumulate(widths)]), **kwargs,
    )  # fmt: skip


def ancestors(tree: list[int], i: int) -> list[int]:
    path = [i]
    while tree[path[-1]] >= 0:
        path.append(tree[path[-1]])
    return path


def test_t4_by_hand(device: torch.device) -> None:
    parents = torch.tensor([T4], dtype=torch.int32, device=device)
    layout = TreeLayout.from_parents(parents, torch.tensor([5], device=device))
    assert seen(layout) == ["1000", "1100", "1010", "1101"]
    assert layout.mask_words.tolist() == [[1], [3], [5], [11]]
    assert layout.depths.tolist() == [0, 1, 1, 2]
    assert layout.positions.tolist() == [5, 6, 6, 7]  # fault 9
    assert layout.qo_indptr.tolist() == [0, 4]
    assert layout.mask_indptr.tolist() == [0, 36]
    assert layout.row_request.tolist() == [0] * 4
    assert (layout.q_len, layout.max_q_len, layout.batch, layout.total_q, layout.num_words) == (4, 4, 1, 4, 1)
    dtypes = [getattr(layout, name).dtype for name in FIELDS]
    assert dtypes == [torch.int32] * 3 + [torch.int64] * 2 + [torch.int32] * 2 + [torch.int64, torch.int32]


def test_seven_nodes_by_hand(device: torch.device) -> None:
    layout = TreeLayout.from_parents(torch.tensor([SEVEN], device=device), [0])
    assert seen(layout) == SEVEN_ROWS
    assert layout.depths.tolist() == [0, 1, 1, 2, 2, 2, 2]


def test_medusa_paths(device: torch.device) -> None:
    tree = parents_from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
    layout = TreeLayout.from_parents(torch.tensor([tree.parents], device=device), [3])
    assert seen(layout) == ["100000", "110000", "101000", "110100", "110010", "110101"]
    assert layout.depths.tolist() == [len(path) for path in tree.paths]


def test_order_need_not_be_by_depth(device: torch.device) -> None:
    layout = TreeLayout.from_parents(torch.tensor([[-1, 0, 1, 2, 0, 4]], device=device), [0])
    assert layout.depths.tolist() == [0, 1, 2, 3, 1, 2]


def test_padding_and_an_empty_request(device: torch.device) -> None:
    parents = torch.tensor([[-1, 0, 9, 9], [-1, -1, -1, -1], T4], device=device)
    layout = TreeLayout.from_parents(parents, [5, 3, 0], num_nodes=[2, 0, 4])
    assert layout.mask_words[:, 0].tolist() == [1, 3, 0, 0, 0, 0, 0, 0, 1, 3, 5, 11]
    assert layout.positions.tolist() == [5, 6, 5, 5, 3, 3, 3, 3, 0, 1, 1, 2]
    assert layout.parents.tolist() == [-1, 0, -1, -1, -1, -1, -1, -1, *T4]
    assert layout.num_nodes.tolist() == [2, 0, 4]
    layout.check()


@pytest.mark.parametrize("lengths", [(-1, 4), (5, -3)])
def test_lengths_below_zero_are_an_empty_request(device: torch.device, lengths: tuple[int, int]) -> None:
    prefix, nodes = lengths
    parents = torch.tensor([T4, T4], device=device)
    layout = TreeLayout.from_parents(parents, [prefix, 2], num_nodes=[nodes, 4])
    layout.check()
    assert layout.num_nodes.tolist() == [0, 4]
    assert layout.prefix_lens.tolist() == [max(prefix, 0), 2]


def test_prefix_lens_is_an_own_copy(device: torch.device) -> None:
    given = torch.tensor([5], dtype=torch.int32, device=device)
    layout = TreeLayout.from_parents(torch.tensor([T4], device=device), given)
    given.fill_(9)
    assert layout.prefix_lens.tolist() == [5]


@pytest.mark.parametrize("n", [1, 63, 64, 65, 129, 1025])
def test_wide_chains_and_stars(device: torch.device, n: int) -> None:
    chain = TreeLayout.chain([3], n, device=device)
    line = TreeLayout.from_parents(torch.arange(-1, n - 1, device=device)[None], [3])
    same(chain, line)
    triangle = torch.ones(n, n, dtype=torch.bool).tril()
    assert torch.equal(chain.mask_words.cpu(), pack_words(triangle))
    assert chain.positions.tolist() == list(range(3, 3 + n))
    star = torch.zeros(1, n, dtype=torch.int64, device=device)
    star[0, 0] = -1
    layout = TreeLayout.from_parents(star, [0])
    expected = torch.eye(n, dtype=torch.bool)
    expected[:, 0] = True
    assert torch.equal(layout.mask_words.cpu(), pack_words(expected))


def test_fault_1_padded_batch(device: torch.device) -> None:
    layout = dirty(4, 4, 16, device)
    parents = torch.tensor([T4, T4], device=device)
    write_layout_(layout, batch=2, parents=parents, prefix_lens=torch.tensor([5, 3], device=device))
    assert layout.mask_indptr.tolist() == [0, 36, 64, 64, 64]
    assert layout.qo_indptr.tolist() == [0, 4, 8, 8, 8]
    assert layout.row_request.tolist() == [0] * 4 + [1] * 4 + [-1] * 8
    assert layout.prefix_lens.tolist() == [5, 3, 0, 0]
    assert layout.num_nodes.tolist() == [4, 4, 0, 0]
    out = torch.full((104,), 7, dtype=torch.uint8, device=device)
    assert int((layout.full_mask(out=out)[64:] != 0).sum()) == 0


def test_fault_2_word_stride_is_the_batchs(device: torch.device) -> None:
    layout = TreeLayout.from_parents(
        torch.tensor([[-1, *range(39)], [-1, 0, 0, 1, 1, 2, *[0] * 34]], device=device), [0, 0],
        num_nodes=[40, 6], max_q_len=70,
    )  # fmt: skip
    assert layout.mask_words.shape == (80, 2)
    rows = unpack_words(layout.mask_words[40:46], 6).int().tolist()
    assert ["".join(map(str, row)) for row in rows[1:4]] == ["110000", "101000", "110100"]


def test_fault_5_nothing_of_the_previous_step_survives(device: torch.device) -> None:
    layout = TreeLayout.allocate(4, 70, 160, device)
    generator = torch.Generator().manual_seed(3)
    for batch, width in ((4, 40), (2, 3), (0, 5), (1, 70), (3, 1)):
        parents = torch.tensor(
            [[int(torch.randint(0, i, (), generator=generator)) if i else -1 for i in range(width)]] * batch,
            dtype=torch.int64,
        ).reshape(batch, width)
        prefixes = torch.arange(batch) * 10 + 50
        write_layout_(layout, batch=batch, parents=parents.to(device), prefix_lens=prefixes.to(device))
        fresh = dirty(4, 70, 160, device)
        write_layout_(fresh, batch=batch, parents=parents.to(device), prefix_lens=prefixes.to(device))
        same(layout, fresh)
        sizes = [width * (50 + 10 * b + width) for b in range(batch)]
        expected = [0, *itertools.accumulate(sizes)]
        assert layout.mask_indptr.tolist() == expected + [expected[-1]] * (4 - batch)


def test_faults_15_and_16_width_is_checked_by_name() -> None:
    for batch, width in itertools.product((1, 3), (7, 8, 9)):
        layout = TreeLayout.allocate(8, 8)
        kwargs: dict[str, Any] = {"batch": batch, "prefix_lens": [5] * batch, "q_len": width}
        if width <= 8:
            write_layout_(layout, **kwargs)
            continue
        with pytest.raises(ValueError, match="requests of 9 rows, the layout was made for max_q_len 8"):
            write_layout_(layout, **kwargs)
    layout = dirty(8, 8, None)
    with pytest.raises(ValueError, match="of 17 rows, the layout was made for max_q_len 8"):
        write_layout_(layout, batch=8, parents=torch.zeros(8, 17, dtype=torch.int64), prefix_lens=[1] * 8)
    assert int((layout.mask_words != 77).sum()) == 0
    with pytest.raises(ValueError, match="9 requests, the layout has room for 8"):
        write_layout_(layout, batch=9, q_len=8, prefix_lens=[1] * 9)
    with pytest.raises(ValueError, match="3 requests x 8 rows = 24 rows, the layout has 20"):
        write_layout_(TreeLayout.allocate(4, 8, 20), batch=3, q_len=8, prefix_lens=[1] * 3)


def test_fault_15_a_short_drafter_beside_a_full_one(device: torch.device) -> None:
    short = [-1, *range(7), *[0] * 9]
    full = [-1, *[0] * 4, *[1] * 4, *[2] * 4, *[5] * 4]
    layout = TreeLayout.from_parents(torch.tensor([short, full], device=device), [11, 4], num_nodes=[8, 17])
    assert layout.depths[:17].tolist() == [*range(8), *[0] * 9]
    assert layout.mask_words[8:17, 0].tolist() == [0] * 9
    assert layout.mask_words[33, 0] == 0b1_0000_0000_0010_0011
    assert layout.mask_indptr.tolist() == [0, 17 * 28, 17 * 28 + 17 * 21]


def test_fault_13_two_flat_layouts(device: torch.device) -> None:
    truth = TreeLayout.from_parents(torch.tensor([T4], device=device), [3])
    full, tree = truth.full_mask(total=28), truth.tree_mask()
    same(truth, TreeLayout.from_mask(full, "full", [3], q_len=4))
    same(truth, TreeLayout.from_mask(tree, "tree", [3], q_len=4))
    with pytest.raises(ValueError, match=r"form 'tree' for 1 requests of 4 rows has 16 elements, got 28"):
        TreeLayout.from_mask(full, "tree", [3], q_len=4)
    with pytest.raises(ValueError, match=r"form 'full' for 1 requests of 4 rows has 28 elements, got 16"):
        TreeLayout.from_mask(tree, "full", [3], q_len=4, validate=True)


@pytest.mark.parametrize(
    ("parents", "nodes", "message"),
    [
        ([[-1, 0, 9, 1]], [4], "request 0, row 2: parent is 9"),
        ([[-1, 0, 0], [-1, 2, 1]], [3, 3], "request 1, row 1: parent is 2, which closes the cycle"),
        ([[0, -1, 0]], [3], "request 0, row 0: parent is 0; row 0 is the root"),
        ([[-1, -1, 0]], [3], "request 0, row 1: parent is -1, a second root"),
        ([[-1, 0], [-1, 0]], [2, 0], "request 1: num_nodes is 0, must be 1 to its q_len 2"),
        ([[-1, 0], [-1, 0]], [2, 3], "request 1: num_nodes is 3, must be 1 to its q_len 2"),
    ],
)
def test_fault_14_malformed_trees(
    device: torch.device, parents: list[list[int]], nodes: list[int], message: str
) -> None:
    given = torch.tensor(parents, device=device)
    with pytest.raises(ValueError) as raised:
        TreeLayout.from_parents(given, [1] * len(parents), num_nodes=nodes, validate=True)
    assert message in str(raised.value)


def test_fault_14_without_validation_neighbours_are_unchanged(device: torch.device) -> None:
    good = TreeLayout.from_parents(torch.tensor([T4, T4, T4], device=device), [1, 2, 3])
    parents = torch.tensor([T4, [-1, 2, 1, 0], T4], device=device)
    layout = TreeLayout.from_parents(parents, [1, 2, 3], validate=False)
    assert layout.num_nodes.tolist() == [4, 0, 4]
    for name in ("mask_words", "positions", "parents", "depths"):
        a, b = getattr(layout, name), getattr(good, name)
        assert torch.equal(a[:4], b[:4])
        assert torch.equal(a[8:], b[8:])
    assert layout.mask_words[4:8].tolist() == [[0]] * 4
    with pytest.raises(ValueError, match="PARENT: request 1: row 1 has parent 2"):
        layout.check()
    layout.check()


def test_the_status_word_is_sticky(device: torch.device) -> None:
    layout = TreeLayout.allocate(2, 4, device=device)
    bad = torch.tensor([[-1, 3, 0, 0]], device=device)
    write_layout_(layout, batch=1, parents=bad, prefix_lens=[0], validate=False)
    write_layout_(layout, batch=1, parents=torch.tensor([[-1, 0, 7, 0]], device=device), prefix_lens=[0])
    write_layout_(layout, batch=1, parents=torch.tensor([T4], device=device), prefix_lens=[0])
    with pytest.raises(ValueError, match="row 1 has parent 3"):
        layout.check()


def test_environment_turns_validation_on(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    parents = torch.tensor([[-1, 0]], device=device)
    TreeLayout.from_parents(parents, [1], num_nodes=[0])
    monkeypatch.setenv("TREEATTN_VALIDATE", "1")
    with pytest.raises(ValueError, match="num_nodes is 0"):
        TreeLayout.from_parents(parents, [1], num_nodes=[0])
    TreeLayout.from_parents(parents, [1], num_nodes=[0], validate=False)


@pytest.mark.parametrize(
    ("qo_indptr", "message"),
    [
        ([0, 5, 3], "request 1: qo_indptr goes from 5 to 3"),
        ([1, 2, 8], "request 0: qo_indptr goes from 1 to 2"),
        ([0, 2, 9], "request 1: qo_indptr goes from 2 to 9"),
        ([0, 6, 8], "request 0: qo_indptr goes from 0 to 6"),
    ],
)
@pytest.mark.parametrize("validate", [False, True])
def test_a_wrong_qo_indptr(device: torch.device, qo_indptr: list[int], message: str, validate: bool) -> None:
    parents = torch.zeros(8, dtype=torch.int64, device=device)
    parents[0] = parents[qo_indptr[1]] = -1  # so that nothing but the offsets is wrong

    def build() -> TreeLayout:
        return TreeLayout.from_parents(
            parents, [0, 0], qo_indptr=torch.tensor(qo_indptr, device=device), max_q_len=5, validate=validate
        )

    if validate:
        with pytest.raises(ValueError) as raised:
            build().check()
        assert message in str(raised.value)
    else:
        layout = build()
        ends = layout.qo_indptr.tolist()
        assert 0 == ends[0] <= ends[1] <= ends[2] <= layout.total_q
        with pytest.raises(ValueError, match="QO_INDPTR"):
            layout.check()


def test_a_wrong_mask_indptr_names_both_offsets(device: torch.device) -> None:
    """The founding bug as an offset: blocks laid out for width 8, read at width 17."""
    layout = TreeLayout.chain([5, 5], 17, device=device)
    mask = torch.zeros(layout.mask_words.shape[0] * 22, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match="request 1 starts at 104, must be 374"):
        TreeLayout.from_mask(mask, "full", [5, 5], q_len=17, mask_indptr=[0, 8 * 13, 16 * 13], validate=True)


def test_blocks_may_lie_elsewhere(device: torch.device) -> None:
    truth = TreeLayout.from_parents(torch.tensor([T4, T4], device=device), [1, 2])
    full = truth.full_mask(total=44)
    moved = torch.zeros(60, dtype=torch.bool, device=device)
    moved[30:50], moved[3:27] = full[:20], full[20:]
    same(truth, TreeLayout.from_mask(moved, "full", [1, 2], q_len=4, mask_indptr=[30, 3, 0]))
    layout = TreeLayout.from_mask(moved, "full", [1, 2], q_len=4, mask_indptr=[30, 40, 0], validate=False)
    assert layout.num_nodes.tolist() == [4, 0]
    with pytest.raises(ValueError, match="request 1: its block of the flat mask ends at 64, the mask has 60"):
        layout.check()


def test_a_hole_in_the_prefix_is_never_taken_as_ones(device: torch.device) -> None:
    truth = TreeLayout.from_parents(torch.tensor([T4, T4], device=device), [3, 3])
    full = truth.full_mask(total=56)
    full[28 + 2 * 7 + 1] = False
    with pytest.raises(ValueError, match="MASK_HOLE: request 1: row 2 hides prefix token 1"):
        TreeLayout.from_mask(full, "full", [3, 3], q_len=4, validate=True)
    layout = TreeLayout.from_mask(full, "full", [3, 3], q_len=4, validate=False)
    assert layout.num_nodes.tolist() == [4, 0]
    assert torch.equal(layout.mask_words[:4], truth.mask_words[:4])
    assert int(layout.mask_words[4:].sum()) == 0
    # A row that sees nothing in the middle is a hole too; the same row at the end is padding.
    full = truth.full_mask(total=56)
    full[7:14] = False
    with pytest.raises(ValueError, match="request 0: row 1 hides prefix token 0"):
        TreeLayout.from_mask(full, "full", [3, 3], q_len=4, validate=True)
    full = truth.full_mask(total=56)
    full[21:28] = False
    assert TreeLayout.from_mask(full, "full", [3, 3], q_len=4).num_nodes.tolist() == [3, 4]


def test_fault_6_a_middle_row_without_any_key_is_legal_at_prefix_0(device: torch.device) -> None:
    mask = torch.eye(4, dtype=torch.bool, device=device)
    mask[1] = False
    layout = TreeLayout.from_mask(mask, "full", [0], q_len=4, validate=True)
    assert layout.num_nodes.tolist() == [4]
    assert layout.mask_words[:, 0].tolist() == [1, 0, 4, 8]


def test_general_masks_and_given_positions(device: torch.device) -> None:
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 0]], dtype=torch.uint8, device=device) * 255
    positions = torch.tensor([9, 4, 6], dtype=torch.int32, device=device)
    layout = TreeLayout.from_mask(mask, "tree", [4], q_len=3, positions=positions)
    assert layout.mask_words[:, 0].tolist() == [0b011, 0b110, 0b001]
    assert layout.positions.tolist() == [9, 4, 6]
    assert layout.depths.tolist() == [5, 0, 2]
    assert layout.parents.tolist() == [-1, -1, 0]


def test_a_bias_may_use_finfo_min_but_not_scores(device: torch.device) -> None:
    truth = TreeLayout.from_parents(torch.tensor([T4], device=device), [3])
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        bias = truth.bias(dtype=dtype, total=28).clamp(min=torch.finfo(dtype).min)
        same(truth, TreeLayout.from_mask(bias, "bias", [3], q_len=4))
        bias[9] = 0.5
        with pytest.raises(ValueError, match="BIAS_VALUE: request 0: row 1 has a bias at key 2"):
            TreeLayout.from_mask(bias, "bias", [3], q_len=4, validate=True)


def test_host_errors() -> None:
    parents = torch.tensor([T4])
    with pytest.raises(ValueError, match="prefix_lens has 2 entries, the batch has 1"):
        TreeLayout.from_parents(parents, [1, 2])
    with pytest.raises(ValueError, match="need qo_indptr"):
        TreeLayout.from_parents(parents[0], [1])
    with pytest.raises(ValueError, match="pass flat"):
        TreeLayout.from_parents(parents, [1], qo_indptr=[0, 4])
    with pytest.raises(TypeError, match=r"parents are torch\.float32"):
        TreeLayout.from_parents(parents.float(), [1])
    with pytest.raises(TypeError, match=r"prefix_lens is torch\.int16"):
        TreeLayout.from_parents(parents, torch.tensor([1], dtype=torch.int16))
    with pytest.raises(ValueError, match="form must name"):
        TreeLayout.from_mask(parents, "auto", [1], q_len=4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"form 'words' is torch\.int64, got torch\.bool"):
        TreeLayout.from_mask(parents > 0, "words", [1], q_len=4)
    with pytest.raises(ValueError, match="must be contiguous"):
        TreeLayout.from_mask(torch.ones(4, 8, dtype=torch.bool)[:, ::2], "tree", [1], q_len=4)
    with pytest.raises(ValueError, match="q_len"):
        TreeLayout.chain([1])


def test_words_have_a_bit_for_every_row_and_a_row_for_every_row(device: torch.device) -> None:
    words = torch.ones(34, 1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="words of 2 requests of 8 rows have 16 rows, got 34"):
        TreeLayout.from_mask(words, "words", [3, 3], q_len=8)
    with pytest.raises(ValueError, match="words have 1 x 64 bits a row, requests of 65 rows need 65"):
        TreeLayout.from_mask(words.new_ones(65, 1), "words", [3], q_len=65)


@pytest.mark.parametrize("form", ["tree", "full", "packed", "bias", "words"])
def test_validation_finds_bits_beyond_num_nodes(device: torch.device, form: MaskForm) -> None:
    causal = torch.ones(4, 4, device=device).tril()
    sees = causal.clone()
    sees[1, 2] = 1
    full = torch.cat([torch.cat([torch.ones(4, 3, device=device), one], 1).reshape(-1) for one in (causal, sees)])
    eight = 2 ** torch.arange(8, device=device)
    mask = {
        "tree": torch.stack([causal, sees]).reshape(-1).to(torch.uint8),
        "full": full.to(torch.uint8),
        "packed": (torch.nn.functional.pad(full.view(2, 28), (0, 4)).view(-1, 8) * eight).sum(1).to(torch.uint8),
        "bias": torch.zeros(56, device=device).masked_fill(full == 0, -torch.inf),
        "words": (torch.cat([causal, sees]) * eight[:4]).sum(1, keepdim=True).to(torch.int64),
    }[form]
    layout = TreeLayout.from_mask(mask, form, [3, 3], q_len=4, num_nodes=[4, 4], validate=True)
    assert layout.num_nodes.tolist() == [4, 4]
    with pytest.raises(ValueError, match="request 1, row 1: sees node 2, but num_nodes is 2"):
        TreeLayout.from_mask(mask, form, [3, 3], q_len=4, num_nodes=[4, 2], validate=True)
    layout = TreeLayout.from_mask(mask, form, [3, 3], q_len=4, num_nodes=[4, 2], validate=False)
    assert layout.mask_words.flatten().tolist() == [1, 3, 7, 15, 1, 3, 0, 0]


@pytest.mark.gpu
def test_validation_in_a_capture_is_refused(device: torch.device) -> None:
    parents = torch.tensor([T4], device=device)
    prefix = torch.tensor([1], device=device)
    layout = TreeLayout.allocate(1, 4, device=device)
    write_layout_(layout, batch=1, parents=parents, prefix_lens=prefix)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="capture"):
            write_layout_(layout, batch=1, parents=parents, prefix_lens=prefix, validate=True)
        with pytest.raises(RuntimeError, match="capture"):
            layout.check()
        write_layout_(layout, batch=1, parents=parents, prefix_lens=prefix)
    parents.copy_(torch.tensor([[-1, 0, 1, 2]]))
    prefix.fill_(8)
    graph.replay()
    assert layout.mask_words[:, 0].tolist() == [1, 3, 7, 15]
    assert layout.positions.tolist() == [8, 9, 10, 11]


@given(batches())
def test_rows_are_the_walk_to_the_root(batch: tuple[list[list[int]], list[int], list[int]]) -> None:
    forest, widths, prefixes = batch
    layout = from_forest(forest, widths, prefixes)
    layout.check()
    rows = unpack_words(layout.mask_words, layout.max_q_len)
    at = 0
    for b, (tree, width) in enumerate(zip(forest, widths, strict=True)):
        for i in range(width):
            path = sorted(ancestors(tree, i)) if i < len(tree) else []
            assert rows[at].nonzero().flatten().tolist() == path
            depth = max(len(path) - 1, 0)
            assert int(layout.depths[at]) == depth  # depth = popcount - 1
            assert int(layout.positions[at]) == prefixes[b] + depth
            assert int(layout.row_request[at]) == b
            at += 1


@given(trees())
def test_a_row_is_its_parents_row_and_itself(tree: list[int]) -> None:
    rows = unpack_words(TreeLayout.from_parents(torch.tensor([tree]), [0]).mask_words, len(tree))
    for i, parent in enumerate(tree):
        expected = rows[parent].clone() if parent >= 0 else torch.zeros(len(tree), dtype=torch.bool)
        expected[i] = True
        assert torch.equal(rows[i], expected)


@given(trees(max_nodes=20), st.randoms())
def test_relabelling_permutes_rows_and_columns(tree: list[int], random: Any) -> None:
    n = len(tree)
    order: list[int] = []
    while len(order) < n:
        ready = [i for i in range(n) if i not in order and (tree[i] in order or tree[i] < 0)]
        order.append(random.choice(ready))
    place = {old: new for new, old in enumerate(order)}
    relabelled = [place[tree[old]] if tree[old] >= 0 else -1 for old in order]
    a = unpack_words(TreeLayout.from_parents(torch.tensor([tree]), [0]).mask_words, n)
    b = unpack_words(TreeLayout.from_parents(torch.tensor([relabelled]), [0]).mask_words, n)
    assert torch.equal(b, a[order][:, order])


@given(batches(), st.booleans())
def test_every_form_gives_one_layout(batch: tuple[list[list[int]], list[int], list[int]], name_nodes: bool) -> None:
    forest, widths, prefixes = batch
    truth = from_forest(forest, widths, prefixes)
    nodes = truth.num_nodes if name_nodes else None
    forms: list[tuple[Any, Tensor]] = [
        ("full", truth.full_mask()), ("full", truth.full_mask(dtype=torch.uint8) * 255),
        ("packed", truth.packed_mask()[0]), ("bias", truth.bias()), ("tree", truth.tree_mask()),
        ("words", truth.mask_words),
    ]  # fmt: skip
    for form, mask in forms:
        again = TreeLayout.from_mask(
            mask, form, truth.prefix_lens, qo_indptr=truth.qo_indptr,
            num_nodes=truth.num_nodes if form in ("tree", "words") else nodes, validate=True,
        )  # fmt: skip
        same(truth, again)


@given(batches())
def test_int32_int64_views_and_lists_are_alike(batch: tuple[list[list[int]], list[int], list[int]]) -> None:
    forest, widths, prefixes = batch
    truth = from_forest(forest, widths, prefixes)
    flat = truth.parents.masked_fill(truth.row_request < 0, 5)
    for dtype in (torch.int32, torch.int64):
        strided = torch.stack([flat, flat + 9], 1).to(dtype)[:, 0]
        again = TreeLayout.from_parents(
            strided, truth.prefix_lens.to(dtype), truth.num_nodes.to(dtype), truth.qo_indptr.to(dtype)
        )
        same(truth, again)


@given(batches())
def test_a_request_does_not_depend_on_its_neighbours(
    batch: tuple[list[list[int]], list[int], list[int]],
) -> None:
    forest, widths, prefixes = batch
    together = from_forest(forest, widths, prefixes, max_q_len=80)
    for b, tree in enumerate(forest):
        alone = from_forest([tree], [widths[b]], [prefixes[b]], max_q_len=80)
        rows = slice(int(together.qo_indptr[b]), int(together.qo_indptr[b + 1]))
        for name in ("mask_words", "parents", "depths", "positions"):
            assert torch.equal(getattr(together, name)[rows], getattr(alone, name)), name


def test_the_object_is_frozen() -> None:
    layout = TreeLayout.chain([1], 2)
    with pytest.raises(AttributeError):
        layout.q_len = 3  # type: ignore[misc]
    assert replace(layout, q_len=None).mask_words is layout.mask_words


def test_a_ragged_mask_of_words_has_words_for_its_widest_request(device: torch.device) -> None:
    words = torch.full((70, 1), -1, device=device)
    sizes = {"qo_indptr": torch.tensor([0, 70], device=device), "max_q_len": 70, "total_q": 70}
    prefix = torch.tensor([0], device=device)
    with pytest.raises(ValueError, match="words have 1 x 64 bits a row, requests of up to 70 rows need more"):
        TreeLayout.from_mask(words, "words", prefix, **sizes)
    positions = torch.tensor([4, 5], device=device)
    with pytest.raises(ValueError, match="positions have 2 entries, the batch has 70 rows"):
        TreeLayout.from_mask(words.repeat(1, 2), "words", prefix, positions=positions, **sizes)


def test_what_is_read_in_place_is_a_tensor() -> None:
    kinds: list[Any] = [
        ("parents", lambda: TreeLayout.from_parents([[-1, 0]], [3])),
        ("mask", lambda: TreeLayout.from_mask([1, 1], "tree", [3], q_len=1)),
        ("positions", lambda: TreeLayout.from_mask(torch.ones(1, dtype=torch.bool), "tree", [3], 1, positions=[4])),
        ("block_table", lambda: PagedKV(block_table=[[0]])),
        ("draft_tokens", lambda: accept(TreeLayout.chain([3], 1), [1], [2])),
    ]
    for name, make in kinds:
        with pytest.raises(TypeError, match=f"{name} must be a tensor, got list"):
            make()


def test_lengths_are_integers() -> None:
    with pytest.raises(TypeError, match="prefix_lens must hold integers: 'float'"):
        TreeLayout.chain([5.5], q_len=2)
    with pytest.raises(ValueError, match=r"qo_indptr has batch \+ 1 entries, got none"):
        TreeLayout.chain([], qo_indptr=[])
