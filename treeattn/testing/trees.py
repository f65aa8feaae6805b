"""Draft trees of the shapes that drafting methods make, as parent lists.

Every function returns ``parents``: one int per node, -1 for the root, ``parents[i] < i``. The random ones take a
``random.Random`` so that a seed repeats them. Nothing here is shared with the library's own tree code.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence

__all__ = [
    "KINDS", "T4", "ancestors_or_self", "best_first", "breadth_first", "chain", "depth_of", "draw_tree", "recent",
    "relabel", "star", "uniform",
]  # fmt: skip

T4 = (-1, 0, 0, 1)
"""Four nodes: mask rows 1000, 1100, 1010, 1101 and depths 0, 1, 1, 2."""


def chain(n: int) -> list[int]:
    """A path: node i hangs on node i - 1."""
    return list(range(-1, n - 1))


def star(n: int) -> list[int]:
    """A root and n - 1 leaves."""
    return [-1] + [0] * (n - 1) if n else []


def recent(n: int, rng: random.Random, window: int = 8) -> list[int]:
    """Each node's parent is one of the `window` nodes before it (the trees of the benchmark)."""
    return [rng.randint(max(0, i - window), i - 1) if i else -1 for i in range(n)]


def uniform(n: int, rng: random.Random) -> list[int]:
    """Each node's parent is any node before it: depth grows as log n."""
    return [rng.randrange(i) if i else -1 for i in range(n)]


def best_first(n: int, rng: random.Random) -> list[int]:
    """DDTree-like: nodes leave a heap by path probability, each adds its first child and its next sibling."""
    if n == 0:
        return []
    parents = [-1]
    heap = [(-rng.random(), 0, 0)]  # (-path score, parent, rank among siblings)
    while len(parents) < n:
        score, parent, rank = heapq.heappop(heap)
        node = len(parents)
        parents.append(parent)
        heapq.heappush(heap, (score * rng.uniform(0.3, 1.0), node, 0))
        heapq.heappush(heap, (score * rng.uniform(0.1, 0.7), parent, rank + 1))
    return parents


def breadth_first(n: int, rng: random.Random, top_k: int = 4) -> list[int]:
    """EAGLE-like: level by level, each level hangs on at most `top_k` nodes of the level before."""
    parents = [-1] if n else []
    level = [0]
    while len(parents) < n:
        width = min(n - len(parents), rng.randint(1, top_k * top_k))
        hosts = rng.sample(level, min(len(level), top_k))
        new = sorted(rng.choice(hosts) for _ in range(width))
        level = list(range(len(parents), len(parents) + width))
        parents.extend(new)
    return parents


KINDS: dict[str, Callable[[int, random.Random], list[int]]] = {
    "recent": recent,
    "best_first": best_first,
    "breadth_first": breadth_first,
    "uniform": uniform,
    "chain": lambda n, rng: chain(n),
    "star": lambda n, rng: star(n),
}


def draw_tree(kind: str, n: int, rng: random.Random) -> list[int]:
    """A tree of `n` nodes of the named kind, or of a kind drawn from `rng` for ``"any"``."""
    return KINDS[rng.choice(list(KINDS)) if kind == "any" else kind](n, rng)


def ancestors_or_self(parents: Sequence[int], node: int) -> list[int]:
    """The nodes on the way from `node` up to its root, `node` first."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path


def depth_of(parents: Sequence[int], node: int) -> int:
    """Edges between `node` and its root."""
    return len(ancestors_or_self(parents, node)) - 1


def relabel(parents: Sequence[int], rng: random.Random) -> tuple[list[int], list[int]]:
    """Another topological order of the same tree.

    Returns
    -------
    new_parents, order
        ``order[i]`` is the old name of new node i; ``new_parents`` describes the same tree.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    ready, new_name = list(children.get(-1, [])), {-1: -1}
    order: list[int] = []
    while ready:
        node = ready.pop(rng.randrange(len(ready)))
        new_name[node] = len(order)
        order.append(node)
        ready.extend(children.get(node, []))
    return [new_name[parents[old]] for old in order], order
