"""Host-side trees: path lists, checks and drawing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeattn.tree import parents_from_paths, render_tree, validate_parents

# The first choices of a Medusa tree for Vicuna-7B, in its own order.
MEDUSA = [(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0), (2,), (0, 2)]


def test_medusa_paths_by_hand() -> None:
    tree = parents_from_paths(MEDUSA)
    assert tree.paths == [(), (0,), (1,), (2,), (0, 0), (0, 1), (0, 2), (1, 0), (0, 0, 0)]
    assert tree.parents == [-1, 0, 0, 0, 1, 1, 1, 2, 4]
    assert tree.given_rows == [1, 4, 2, 5, 8, 7, 3, 6]


def test_the_root_may_be_in_the_list() -> None:
    assert parents_from_paths([(), (0,)]).parents == [-1, 0]
    assert parents_from_paths([]).parents == [-1]


def test_a_missing_prefix_is_named_or_implied() -> None:
    with pytest.raises(ValueError, match=r"path 1, \[3, 1\], needs its prefix \[3\]"):
        parents_from_paths([(0,), (3, 1)])
    tree = parents_from_paths([(0,), (3, 1)], implied=True)
    assert tree.paths == [(), (0,), (3,), (3, 1)]
    assert tree.parents == [-1, 0, 0, 2]
    assert tree.given_rows == [1, 3]


@pytest.mark.parametrize(
    ("paths", "message"),
    [([(0,), (1,), (0,)], r"path 2, \[0\], is given twice"), ([(0, -1)], r"path 0 is \[0, -1\]")],
)
def test_wrong_paths_are_refused(paths: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parents_from_paths(paths)


@given(st.sets(st.lists(st.integers(0, 3), max_size=5).map(tuple), max_size=20))
def test_every_row_is_the_last_choice_below_its_parent(paths: set[tuple[int, ...]]) -> None:
    tree = parents_from_paths(paths, implied=True)
    validate_parents([tree.parents])
    for row, path in enumerate(tree.paths):
        if path:
            assert tree.paths[tree.parents[row]] == path[:-1]
    for path, row in zip(paths, tree.given_rows, strict=True):
        assert tree.paths[row] == path


@pytest.mark.parametrize(
    ("parents", "num_nodes", "message"),
    [
        ([[-1, 0], [-1, 0, 9, 1]], [2, 4], "request 1, row 2: parent is 9, an absent node"),
        ([[-1, 0, 3, 1]], [3], "request 0, row 2: parent is 3, an absent node; nodes are 0 to 2"),
        ([[-1, 2, 1]], [3], "request 0, row 1: parent is 2, which closes the cycle 1 -> 2 -> 1"),
        ([[-1, 1]], [2], "request 0, row 1: parent is 1, which closes the cycle 1 -> 1"),
        ([[-1, 2, 0]], [3], "request 0, row 1: parent is 2, which comes after it"),
        ([[-1, 0, -1]], [3], "request 0, row 2: parent is -1, a second root"),
        ([[0, -1]], [2], "request 0, row 0: parent is 0; row 0 is the root"),
        ([[-1, -2]], [2], "request 0, row 1: parent is -2, an absent node"),
        ([[-1, 0]], [0], "request 0: num_nodes is 0, must be 1 to its q_len 2"),
        ([[-1, 0]], [3], "request 0: num_nodes is 3, must be 1 to its q_len 2"),
    ],
)
def test_fault_14_names_request_row_and_value(parents: list[list[int]], num_nodes: list[int], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        validate_parents(parents, num_nodes)
    assert message in str(raised.value)


def test_padding_and_empty_slots_are_not_read() -> None:
    validate_parents([[-1, 0, 77, -5], []], [2, 0])


def test_render_by_hand() -> None:
    drawn = render_tree([-1, 0, 0, 1, 1, 2], labels=["the", " cat", " dog", "\n", " sat", "x"], accepted=[0, 1, 4])
    assert drawn.splitlines() == [
        "* the",
        "* ├─  cat",
        "  │  ├─ \\n",
        "* │  └─  sat",
        "  └─  dog",
        "     └─ x",
    ]


def test_render_leaves_out_padding() -> None:
    assert render_tree([-1, 0, 5, 5], num_nodes=2) == "  0\n  └─ 1"
    assert render_tree([]) == ""
