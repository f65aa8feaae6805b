"""Faults from the field as cases: inputs on which public serving systems went wrong.

`ADVERSARIAL` maps a name to a function that builds the case; `treeattn check` and the tests run all of them on every
path, by value against float64 and by mask bit with `exact`. What is no attention input (capacities, compaction, errors)
is in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .build import build_case
from .cases import Case, Placement
from .trees import T4, chain, star

__all__ = ["ADVERSARIAL", "adversarial_case"]

SIX = (-1, 0, 0, 1, 1, 2)


def _padded_batch(**to: Any) -> Case:
    """Two live requests and two empty slots of a graph captured for four."""
    return build_case([T4, T4, (), ()], [5, 3, 0, 0], q_lens=[4] * 4, **to)


def _word_stride(**to: Any) -> Case:
    """max_q_len 40 fixes the word stride; the request of 6 nodes must not compute its own."""
    return build_case([SIX, star(40), SIX], [4, 9, 0], max_q_len=70, **to)


def _star_below_diagonal(**to: Any) -> Case:
    """A star of 40 after 7 prefix tokens: the last row sees 9 keys, not the 47 that a causal tile would show."""
    return build_case([star(40)], [7], **to)


def _blind_row(**to: Any) -> Case:
    """Prefix 0 and one row that sees nothing: out 0, lse -inf, never NaN."""
    mask = torch.eye(4, dtype=torch.bool)
    mask[2, 2] = False
    return build_case([T4], [0], masks=[mask], source="tree", **to)


def _very_negative(**to: Any) -> Case:
    """One visible key whose score is -524288 is a visible key: out = its V."""
    case = build_case([(-1,)], [0], heads=(2, 2), head_dim=16, sm_scale=1.0, **to)
    key = torch.full_like(case.content_k[0], 256.0)
    return case.with_content(q=torch.full_like(case.q, -128.0), k=(key,))


def _blind_split(**to: Any) -> Case:
    """A long prefix that is cut into splits, beside rows whose only keys lie in the last tile."""
    width = 129
    mask = torch.zeros(width, width, dtype=torch.bool)
    mask[:, 100] = True
    mask[::2, 128] = True
    return build_case([chain(width), chain(width)], [0, 300], masks=[mask, mask], source="tree", heads=(2, 1), **to)


def _null_pages(**to: Any) -> Case:
    """Unused table entries point to page 0, which holds NaN, and so does the rest of each last page."""
    place = Placement(page_size=16, table="block", stale="zero", poison="nan")
    return build_case([T4, star(9)], [5, 16], q_lens=[9, 9], placement=place, **to)


def _bad_entries(**to: Any) -> Case:
    """Unused table entries are -1, padding rows have slot -1."""
    place = Placement(page_size=4, table="block", stale="negative", poison="mixed", tree_kv="slots")
    return build_case([T4, star(9)], [5, 16], q_lens=[9, 9], placement=place, **to)


def _many_requests(**to: Any) -> Case:
    """33 requests of 2 rows: scratch is per row, and no multiple of 64."""
    return build_case([chain(2)] * 33, list(range(33)), heads=(2, 1), **to)


def _short_drafter(**to: Any) -> Case:
    """Budget 16: one request drafts 7 nodes and pads to 17 rows, one fills all 17."""
    return build_case([chain(8), star(17)], [30, 11], q_lens=[17, 17], **to)


def _wide(**to: Any) -> Case:
    """More than two mask words, with a node whose parent is far below the word boundary."""
    parents = [*star(64), 0, 64, 1, 63, 65, *[5] * 70]
    return build_case([parents], [33], **to)


def _widths(width: int, batch: int) -> Callable[..., Case]:
    def build(**to: Any) -> Case:
        """The founding bug around block size 8: width, not block size, strides the mask."""
        trees = [[-1, *((i * 7 + b) % (i + 1) for i in range(width - 1))] for b in range(batch)]
        return build_case(trees, [13 * b + 6 for b in range(batch)], **to)

    return build


ADVERSARIAL: dict[str, Callable[..., Case]] = {
    "padded-batch": _padded_batch,
    "word-stride": _word_stride,
    "star-below-diagonal": _star_below_diagonal,
    "blind-row": _blind_row,
    "very-negative-score": _very_negative,
    "blind-split": _blind_split,
    "null-pages": _null_pages,
    "bad-entries": _bad_entries,
    "many-requests": _many_requests,
    "short-drafter": _short_drafter,
    "wide-tree": _wide,
    **{f"width-{width}-batch-{batch}": _widths(width, batch) for width in (7, 8, 9, 17) for batch in (1, 3)},
    "lone-root": lambda **to: build_case([(-1,)], [0], **to),
    "empty-batch": lambda **to: build_case([], [], **to),
    "page-boundaries": lambda **to: build_case(
        [T4, T4, T4, T4], [15, 16, 17, 12], placement=Placement(page_size=16, table="csr"), **to
    ),
}


def adversarial_case(
    name: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> Case:
    """Build one of `ADVERSARIAL` by name."""
    if name not in ADVERSARIAL:
        raise ValueError(f"no adversarial case {name!r}; there are {', '.join(ADVERSARIAL)}")
    return ADVERSARIAL[name](dtype=dtype, device=device, seed=seed, name=name)
