"""Rows that hold every legal pair of values: few kernels or batches stand in for all combinations.

An *axis* has a name and values, a row takes one value of each axis, and some pairs of values are illegal. Greedy: each
row takes, axis by axis, the value with the most pairs that no row has yet; once every pair is there, rows go by the
shares that the values should have.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Axis", "Value", "covering_rows", "legal_pairs", "pairs_in"]

Value = tuple[str, str]
"""Axis and value."""
Row = dict[str, str]
MOST_TRIES = 1000


class Axis(NamedTuple):
    """Name, and values with their shares (relative to each other) where pairs do not decide."""

    name: str
    shares: Mapping[str, float]

    @property
    def values(self) -> list[Value]:
        """Its values, named."""
        return [(self.name, value) for value in self.shares]


def pairs_in(row: Mapping[str, str], axes: Sequence[str]) -> list[tuple[Value, Value]]:
    """Pairs of values in a row, each once, in the order of `axes`."""
    return list(itertools.combinations([(name, row[name]) for name in axes], 2))


def legal_pairs(axes: Sequence[Axis], illegal: Mapping[frozenset[Value], str]) -> list[tuple[Value, Value]]:
    """Every pair of values of two axes that is not in `illegal`, in the order of `axes`."""
    found = []
    for one, other in itertools.combinations(axes, 2):
        found += [(a, b) for a in one.values for b in other.values if frozenset((a, b)) not in illegal]
    return found


def covering_rows(
    axes: Sequence[Axis],
    illegal: Mapping[frozenset[Value], str],
    count: int,
    seed: int,
    fewest: int = 1,
    only: Sequence[str] | None = None,
) -> list[Row]:
    """`count` legal rows in which each legal pair occurs, and each value `fewest` times or more.

    Parameters
    ----------
    only : sequence of str, optional
        Names of axes: just the pairs with one of them need occur.

    Raises
    ------
    ValueError
        If that many rows do not hold them; more rows, or another seed, may.
    """
    rng = random.Random(seed)
    pairs = legal_pairs(axes, illegal)
    missing = {frozenset(pair) for pair in pairs if only is None or {pair[0][0], pair[1][0]} & set(only)}
    shares = {(axis.name, value): share / sum(axis.shares.values()) for axis in axes
              for value, share in axis.shares.items()}  # fmt: skip
    used: Counter[Value] = Counter()
    rows: list[Row] = []
    while len(rows) < count:
        row = _next_row(axes, illegal, missing, used, shares, fewest, rng)
        rows.append(row)
        values = list(row.items())
        used.update(values)
        missing -= {frozenset(pair) for pair in itertools.combinations(values, 2)}
    rare = [value for value in shares if used[value] < fewest]
    if missing or rare:
        raise ValueError(f"{count} rows leave out {len(missing)} pairs, and {len(rare)} values are rarer than {fewest}")
    rng.shuffle(rows)
    return rows


def _next_row(
    axes: Sequence[Axis],
    illegal: Mapping[frozenset[Value], str],
    missing: set[frozenset[Value]],
    used: Counter[Value],
    shares: Mapping[Value, float],
    fewest: int,
    rng: random.Random,
) -> Row:
    for _ in range(MOST_TRIES):
        row: Row = {}
        order = rng.sample(list(axes), len(axes))
        if missing:  # start from a pair that no row has
            first = dict(rng.choice(sorted(map(sorted, missing))))
            row.update(first)
            order = [axis for axis in order if axis.name not in row]
        for axis in order:
            chosen = list(row.items())
            legal = [value for value in axis.values if not any(frozenset((value, one)) in illegal for one in chosen)]
            if not legal:
                break
            best = max(
                legal,
                key=lambda value: (
                    sum(frozenset((value, one)) in missing for one in chosen),
                    used[value] < fewest,
                    -(used[value] + rng.random()) / shares[value],
                ),
            )
            row[axis.name] = best[1]
        else:
            return row
    raise ValueError(f"no legal row found in {MOST_TRIES} tries")
