"""How many rows a target model verifies, from what a serving framework knows.

The founding bug of this library: buffers, offsets and masks were sized by the draft block size (8) while a
tree method verified budget + 1 = 17 rows. The width of a verify step belongs to the method that verifies,
so it is resolved here once, for one role at a time, and a tree without a budget is an error rather than a
block size.

Two counts are in use, and both have one meaning here: `tree_budget` counts draft nodes, the root excluded
(DDTree, JetSpec), `num_draft_tokens` counts rows, the root included (SGLang's EAGLE and n-gram).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["verify", "draft"]


@dataclass(frozen=True)
class VerifyWidth:
    """Rows of a request, and why.

    Attributes
    ----------
    width : int
        q_len of each request, root included.
    reason : str
        A sentence fit for a log.
    """

    width: int
    reason: str


@dataclass(frozen=True)
class _Method:
    tree: Literal["always", "topk", "never"]
    default: str


# Which methods verify trees, and the budget each takes by itself. "topk": a tree when topk > 1, else a chain.
_METHODS = {
    "ddtree": _Method("always", "ddtree's ports default to 64 nodes, its reference sweeps 16 to 1024"),
    "jetspec": _Method("always", "jetspec's own default is 255 nodes (its README uses 128)"),
    "medusa": _Method("always", "medusa's own tree has 63 nodes"),
    "hydra": _Method("always", "hydra uses medusa's tree of 63 nodes"),
    "sequoia": _Method("always", "sequoia's own trees have 64 or 128 nodes on a GPU"),
    "ngram": _Method("always", "ngram's own default is 12 rows (num_draft_tokens=12, the root included)"),
    "uno": _Method("topk", "uno verifies at most 128 rows and sets no default"),
    "eagle": _Method("topk", "eagle's own default is 8 rows for topk 4 (num_draft_tokens=8, the root included)"),
    "dflash": _Method("topk", "dflash's tree mode runs at 32 nodes"),
    "mtp": _Method("never", ""),
    "chain": _Method("never", ""),
    "dspark": _Method("never", ""),
}
_ALIASES = {
    "eagle2": "eagle", "eagle3": "eagle", "eagle4": "eagle", "standalone": "eagle", "draft_model": "eagle",
    "nextn": "mtp", "suffix": "chain",
}  # fmt: skip


def resolve_verify_width(
    *,
    role: Role = "verify",
    method: str | None = None,
    width: int | None = None,
    block_size: int | None = None,
    tree_budget: int | None = None,
    num_draft_tokens: int | None = None,
    topk: int | None = None,
    num_steps: int | None = None,
) -> VerifyWidth:
    """Resolve the rows per request of one role in one step.

    For the verifier: the explicit `width` of this step, else `tree_budget + 1`, else `num_draft_tokens`,
    else, only when no tree is active, a chain of `num_steps + 1` or `block_size` rows. For the drafter: the
    explicit `width`, else the block size, whatever the tree.

    A tree is active for a tree method ("ddtree", "jetspec", "medusa", "ngram"...), and for any method with
    topk > 1. A drafter that falls short of the budget changes nothing: its missing rows are padding
    (`num_nodes`).

    Parameters
    ----------
    role : {"verify", "draft"}
        Whose width. Both may live in one process; nothing is remembered between calls.
    method : str, optional
        Name of the speculative method, any case. An unknown one needs an explicit count.
    width : int, optional
        What this step was told, if anything.
    block_size : int, optional
        Tokens that a block drafter (DFlash) makes at once, the root included.
    tree_budget : int, optional
        Draft nodes of a tree, the root excluded; 0 verifies the root alone.
    num_draft_tokens : int, optional
        Rows of a verify step, the root included.
    topk : int, optional
        Branches per node; 1 is a chain.
    num_steps : int, optional
        Draft steps of a chain.

    Returns
    -------
    VerifyWidth

    Raises
    ------
    ValueError
        A tree is active and its budget is not given; two counts disagree; a count is out of range; or nothing
        that was given tells the width.

    Examples
    --------
    >>> resolve_verify_width(method="ddtree", block_size=8, tree_budget=16).width
    17
    >>> resolve_verify_width(role="draft", method="ddtree", block_size=8, tree_budget=16).width
    8
    """
    if role not in ("verify", "draft"):
        raise ValueError(f"role is {role!r}, must be 'verify' or 'draft'")
    counts = {"width": (width, 1), "block_size": (block_size, 1), "tree_budget": (tree_budget, 0)}
    counts |= {"num_draft_tokens": (num_draft_tokens, 1), "topk": (topk, 1), "num_steps": (num_steps, 0)}
    for name, (value, low) in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value is not None and value < low:
            raise ValueError(f"{name} is {value}, must be {low} or more")
    if width is not None:
        return VerifyWidth(width, f"{width} rows, given for this step")
    if role == "draft":
        if block_size is None:
            raise ValueError("the width of a drafter is its block size: pass block_size or width")
        return VerifyWidth(block_size, f"{block_size} rows, the block size of the drafter")
    if tree_budget is not None:
        if num_draft_tokens is not None and num_draft_tokens != tree_budget + 1:
            raise ValueError(
                f"tree_budget {tree_budget} verifies {tree_budget + 1} rows, but num_draft_tokens "
                f"(root included) is {num_draft_tokens}"
            )
        return VerifyWidth(tree_budget + 1, f"{tree_budget + 1} rows: {tree_budget} tree nodes and the root")
    if num_draft_tokens is not None:
        return VerifyWidth(num_draft_tokens, f"{num_draft_tokens} rows, num_draft_tokens (root included)")
    return _chain_width(method, block_size, topk, num_steps)


def _chain_width(method: str | None, block_size: int | None, topk: int | None, num_steps: int | None) -> VerifyWidth:
    """Resolve a chain's width once no tree count was given; refuse where a tree is active."""
    key = None if method is None else method.lower().replace("-", "_").replace("_worker", "")
    key = None if key is None else _ALIASES.get(key, key)
    known = None if key is None else _METHODS.get(key)
    if method is not None and known is None:
        raise ValueError(
            f"method {method!r} is not known here ({', '.join(sorted(_METHODS | _ALIASES))}): "
            "pass width, tree_budget or num_draft_tokens"
        )
    branching = topk is not None and topk > 1
    if branching or (known is not None and known.tree == "always"):
        who = f"{method} verifies a tree" if method else f"topk {topk} makes a tree"
        own = f"; {known.default}" if known is not None and known.default else ""
        not_block = f", and the block size {block_size} is not its width" if block_size is not None else ""
        raise ValueError(f"{who} and its budget is not given{not_block}: pass tree_budget (nodes, root excluded){own}")
    if block_size is not None:
        return VerifyWidth(block_size, f"{block_size} rows, a chain of the draft block size")
    if num_steps is not None:
        return VerifyWidth(num_steps + 1, f"{num_steps + 1} rows: a chain of {num_steps} draft steps and the root")
    raise ValueError(
        "nothing tells the verify width: pass width, tree_budget, num_draft_tokens, block_size or num_steps"
    )
