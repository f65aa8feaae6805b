"""How often each option, and each legal pair of options, occurred among the cases of a sweep."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .covering import Axis, Value, pairs_in
from .sweep import AXES, ILLEGAL, Draw, pairs

__all__ = ["Counts"]

NAMES = tuple(axis.name for axis in AXES)
WIDTH = 118


@dataclass
class Counts:
    """Counts of some cases.

    Attributes
    ----------
    cases : int
    options : Counter
        By (axis, value).
    pairs : Counter
        By two of them, in the order of the axes.
    """

    cases: int = 0
    options: Counter[Value] = field(default_factory=Counter)
    pairs: Counter[tuple[Value, Value]] = field(default_factory=Counter)

    def add(self, drawn: Draw) -> None:
        """Count a case."""
        self.cases += 1
        self.options.update(drawn.chosen.items())
        self.pairs.update(pairs_in(drawn.chosen, NAMES))

    @property
    def legal(self) -> list[tuple[Value, Value]]:
        """Every pair that a case may have."""
        return pairs()

    def rarest_pairs(self, number: int) -> list[tuple[int, str]]:
        """The legal pairs that occurred least, with their counts."""
        return sorted((self.pairs[pair], _pair(pair)) for pair in pairs())[:number]

    def option_lines(self) -> list[str]:
        """A line for each axis."""
        return [f"  {axis.name:9} {self._values(axis)}" for axis in AXES]

    def pair_lines(self) -> list[str]:
        """For each option its count with each option of the later axes; "-" where the two are not legal together."""
        lines = []
        for index, axis in enumerate(AXES):
            for one in axis.values if AXES[index + 1 :] else ():
                parts = [self._with(one, other) for other in AXES[index + 1 :]]
                text = f"{_option(one)} ({self.options[one]}) with " + "; ".join(parts)
                lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ")
        return lines

    @staticmethod
    def illegal_lines() -> list[str]:
        """The pairs that no case can have, and why."""
        reasons: dict[str, list[str]] = {}
        for pair, why in ILLEGAL.items():
            reasons.setdefault(why, []).append(" + ".join(sorted(map(_option, pair))))
        lines = []
        for why, found in reasons.items():
            text = f"{', '.join(found)}: {why}"
            lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ")
        return lines

    def _values(self, axis: Axis) -> str:
        return ", ".join(f"{value} {self.options[axis.name, value]}" for _, value in axis.values)

    def _with(self, one: Value, other: Axis) -> str:
        def count(value: Value) -> str:
            return "-" if frozenset((one, value)) in ILLEGAL else str(self.pairs[one, value])

        return f"{other.name}: " + ", ".join(f"{value[1]} {count(value)}" for value in other.values)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "cases": self.cases,
            "options": {_option(value): self.options[value] for axis in AXES for value in axis.values},
            "pairs": {_pair(pair): self.pairs[pair] for pair in pairs()},
        }


def _option(value: Value) -> str:
    return f"{value[0]}={value[1]}"


def _pair(pair: tuple[Value, Value]) -> str:
    return " + ".join(map(_option, pair))
