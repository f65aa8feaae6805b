"""Host-side trees: from path lists to `parents`, checking `parents`, drawing them.

Nothing here runs on the serving path; `layout` does the same for a batch on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple


class TreeFromPaths(NamedTuple):
    """A tree in row order.

    Attributes
    ----------
    parents : list of int
        Parent row of each row, root -1 first.
    paths : list of tuple of int
        `paths[row]` is the path of that row; the root's is `()`.
    given_rows : list of int
        `given_rows[k]` is the row of the k-th path that the caller gave.
    """

    parents: list[int]
    paths: list[tuple[int, ...]]
    given_rows: list[int]


def parents_from_paths(paths: Iterable[Sequence[int]], implied: bool = False) -> TreeFromPaths:
    """Build `parents` from a list of paths (Medusa's `medusa_choices`).

    A path is the choice taken at each depth: `(0, 2)` is the third candidate of head 2 after the best
    candidate of head 1. The root (the empty path) is added when it is not given. Rows are ordered by depth,
    then by path, as Medusa's own buffers are.

    Parameters
    ----------
    paths : iterable of sequences of int
        Each path once, in any order.
    implied : bool
        Add prefixes that are missing instead of refusing them.

    Returns
    -------
    TreeFromPaths

    Raises
    ------
    ValueError
        A path occurs twice, has a negative choice, or its prefix is missing and `implied` is false.

    Examples
    --------
    >>> parents_from_paths([(0,), (1,), (0, 0)]).parents
    [-1, 0, 0, 1]
    """
    given = [tuple(int(c) for c in path) for path in paths]
    seen: set[tuple[int, ...]] = {()}
    for k, path in enumerate(given):
        if any(c < 0 for c in path):
            raise ValueError(f"path {k} is {list(path)}; choices are 0 or more")
        if path in seen and path != ():
            raise ValueError(f"path {k}, {list(path)}, is given twice")
        seen.add(path)
    for k, path in enumerate(given):
        for depth in range(1, len(path)):
            if path[:depth] in seen:
                continue
            if not implied:
                raise ValueError(
                    f"path {k}, {list(path)}, needs its prefix {list(path[:depth])}, which is not in "
                    "the list; add it or pass implied=True"
                )
            seen.add(path[:depth])
    ordered = sorted(seen, key=lambda path: (len(path), path))
    row_of = {path: row for row, path in enumerate(ordered)}
    parents = [row_of[path[:-1]] if path else -1 for path in ordered]
    return TreeFromPaths(parents, ordered, [row_of[path] for path in given])


def validate_parents(parents: Sequence[Sequence[int]], num_nodes: Sequence[int] | None = None) -> None:
    """Check every request's `parents`, naming the first request, row and value that is wrong.

    Parameters
    ----------
    parents : sequence over requests of sequences over rows
        `parents[b][i]`, root -1; rows from `num_nodes[b]` on are padding and not read.
    num_nodes : sequence of int, optional
        Real rows of each request; all of them when missing.

    Raises
    ------
    ValueError
        num_nodes is 0 or more than q_len, the root is not row 0, there is a second root, a parent is an
        absent node, or a parent does not come before its child (which is so in every cycle).
    """
    for b, row_parents in enumerate(parents):
        q_len = len(row_parents)
        nodes = q_len if num_nodes is None else int(num_nodes[b])
        if q_len == 0 and nodes == 0:
            continue
        if nodes < 1 or nodes > q_len:
            raise ValueError(f"request {b}: num_nodes is {nodes}, must be 1 to its q_len {q_len}")
        for i in range(nodes):
            _validate_row(b, i, int(row_parents[i]), nodes, row_parents)


def _validate_row(b: int, i: int, parent: int, nodes: int, parents: Sequence[int]) -> None:
    where = f"request {b}, row {i}: parent is {parent}"
    if i == 0:
        if parent != -1:
            raise ValueError(f"{where}; row 0 is the root and has parent -1")
        return
    if parent == -1:
        raise ValueError(f"{where}, a second root; the root is row 0 and no other")
    if parent < 0 or parent >= nodes:
        raise ValueError(f"{where}, an absent node; nodes are 0 to {nodes - 1}")
    if parent >= i:
        cycle = _cycle_from(i, nodes, parents)
        if cycle:
            raise ValueError(f"{where}, which closes the cycle {' -> '.join(map(str, cycle))}")
        raise ValueError(f"{where}, which comes after it; parents come before their children")


def _cycle_from(start: int, nodes: int, parents: Sequence[int]) -> list[int]:
    walk = [start]
    while 0 <= int(parents[walk[-1]]) < nodes and len(walk) <= nodes:
        walk.append(int(parents[walk[-1]]))
        if walk[-1] == start:
            return walk
    return []


def render_tree(
    parents: Sequence[int],
    labels: Sequence[str] | None = None,
    accepted: Collection[int] = (),
    num_nodes: int | None = None,
) -> str:
    """Draw one tree with characters, a line a node, children under their parent in row order.

    Parameters
    ----------
    parents : sequence of int
        Root -1 first, parents before children.
    labels : sequence of str, optional
        Text of each row, row numbers when missing. Control characters are escaped.
    accepted : collection of int
        Rows to mark with `*`.
    num_nodes : int, optional
        Rows beyond are padding and not drawn.

    Returns
    -------
    str
        Lines without a final newline; empty for no node.

    Examples
    --------
    >>> print(render_tree([-1, 0, 0, 1], accepted={0, 2}))
    * 0
      ├─ 1
      │  └─ 3
    * └─ 2
    """
    nodes = len(parents) if num_nodes is None else num_nodes
    validate_parents([parents], [nodes])
    if nodes == 0:
        return ""
    children: list[list[int]] = [[] for _ in range(nodes)]
    for i in range(1, nodes):
        children[int(parents[i])].append(i)
    marked = set(accepted)
    lines = []
    stack: list[tuple[int, str, str]] = [(0, "", "")]
    while stack:
        row, branch, indent = stack.pop()
        text = str(row) if labels is None else str(labels[row]).encode("unicode_escape").decode("ascii")
        if labels is not None and str(labels[row]).isprintable():
            text = str(labels[row])
        lines.append(f"{'*' if row in marked else ' '} {indent}{branch}{text}")
        below = indent + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        for k, child in enumerate(reversed(children[row])):
            stack.append((child, "└─ " if k == 0 else "├─ ", below))
    return "\n".join(lines)
