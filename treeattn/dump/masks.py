"""Find what is wrong in a flat mask: its length, its offsets, its rows; and say how it was laid out instead.

A full-form mask holds, request after request, ``q_len`` rows of ``prefix_len + q_len`` elements. A backend that sizes
its mask by another width than the batch's own writes or reads other elements: that width is searched for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["block_size", "canonical_indptr", "explain_block", "explain_size", "judge_block", "judge_indptr"]

WIDEST = 2048


def block_size(form: str, prefix: int, width: int) -> int:
    """Elements of a request's block in the form ``"full"`` or ``"tree"``."""
    return width * (prefix + width) if form == "full" else width * width


def canonical_indptr(form: str, prefixes: Sequence[int], widths: Sequence[int]) -> list[int]:
    """Element offsets of the blocks, one more than there are requests."""
    offsets = [0]
    for prefix, width in zip(prefixes, widths, strict=True):
        offsets.append(offsets[-1] + block_size(form, prefix, width))
    return offsets


def _formula(form: str, prefix: int, width: int) -> str:
    return f"{width}*({prefix}+{width})" if form == "full" else f"{width}*{width}"


def judge_indptr(form: str, got: Sequence[int], prefixes: Sequence[int], widths: Sequence[int]) -> list[str]:
    """Each entry of a caller's mask_indptr that is not the canonical one."""
    want = canonical_indptr(form, prefixes, widths)
    if len(got) != len(want):
        return [f"mask_indptr has {len(got)} entries, must have {len(want)} (batch {len(widths)} + 1)"]
    findings = []
    for index, (has, must) in enumerate(zip(got, want, strict=True)):
        if has == must:
            continue
        if index == 0:
            findings.append(f"mask_indptr[0] = {has}, must be 0")
            continue
        parts = [_formula(form, p, w) for p, w in zip(prefixes[:index], widths[:index], strict=True)]
        sum_of = " + ".join(parts) if len(parts) <= 3 else f"{parts[0]} + ... + {parts[-1]}"
        width = _width_with(form, has, prefixes[:index], widths[index - 1])
        hint = "" if width is None else f"; it is what width {width} gives, this batch is {widths[index - 1]} wide"
        findings.append(f"mask_indptr[{index}] = {has}, must be {sum_of} = {must}{hint}")
    return findings


def _width_with(form: str, total: int, prefixes: Sequence[int], own: int) -> int | None:
    for width in range(1, WIDEST):
        size = sum(block_size(form, prefix, width) for prefix in prefixes)
        if size == total and width != own:
            return width
        if size > total:
            return None
    return None


def explain_size(form: str, elements: int, prefixes: Sequence[int], widths: Sequence[int]) -> str | None:
    """Why a flat mask has the wrong number of elements, or None if the number is right."""
    want = canonical_indptr(form, prefixes, widths)[-1]
    if elements == want:
        return None
    other = "tree" if form == "full" else "full"
    text = f"the mask has {elements} elements, the {form} form needs {want}"
    if elements == canonical_indptr(other, prefixes, widths)[-1]:
        return f"{text}; it has the size of the {other} form"
    width = _width_with(form, elements, prefixes, widths[0] if widths else 0)
    if width is not None:
        return f"{text}; it was laid out for width {width}, the batch is {_brief(widths)} wide"
    if elements == sum(widths) * max((*prefixes, 0)):
        return f"{text}; it was sized tokens * context = {sum(widths)}*{max(prefixes)}, without the nodes themselves"
    return text


def _brief(widths: Iterable[int]) -> str:
    distinct = sorted(set(widths))
    return "/".join(map(str, distinct[:4])) + ("/..." if len(distinct) > 4 else "")


def judge_block(request: int, block: Tensor, prefix: int, nodes: int | None, start: int) -> list[str]:
    """What keeps one request's block from being the rows of a tree; at most a handful of findings.

    Parameters
    ----------
    block : Tensor
        Bool `[q_len, prefix + q_len]`.
    prefix : int
        Columns of the prefix; 0 for the tree-only form.
    nodes : int or None
        Real rows; None if all rows but trailing zero ones are.
    start : int
        Offset of the block in the flat mask, for the messages.
    """
    stride = block.shape[1]
    real = int(block.any(1).nonzero().max()) + 1 if bool(block.any()) else 0
    count = real if nodes is None else nodes
    findings = []

    def say(row: int, column: int, what: str) -> None:
        findings.append(f"request {request} row {row} column {column} (offset {start + row * stride + column}): {what}")

    for row in range(min(count, block.shape[0])):
        holes = (~block[row, :prefix]).nonzero()
        if len(holes):
            say(
                row,
                int(holes[0]),
                f"0 in the prefix part ({len(holes)} of {prefix} columns), every row sees the prefix",
            )
        tree = block[row, prefix:]
        if not bool(tree[row]):
            say(row, prefix + row, "0, but a node sees itself")
        elif row and not bool(tree[0]):
            say(row, prefix, "0, but every node sees the root, node 0")
        later = tree[row + 1 :].nonzero()
        if len(later):
            column = row + 1 + int(later[0])
            what = "a padding row" if column >= count else "a later node: parents come before children"
            say(row, prefix + column, f"1, but node {column} is {what}")
        for seen in tree[:row].nonzero().reshape(-1).tolist():
            missing = (block[seen, prefix : prefix + row] & ~tree[:row]).nonzero()
            if len(missing):
                above = int(missing[0])
                say(row, prefix + above, f"0, but row {row} sees node {seen}, which sees node {above}")
                break
        ancestors = tree[:row].nonzero().reshape(-1).tolist()
        if ancestors and not bool(torch.equal(block[ancestors[-1], prefix : prefix + row], tree[:row])):
            nearest = ancestors[-1]
            extra = (tree[:row] & ~block[nearest, prefix : prefix + row]).nonzero()
            if len(extra):
                odd = int(extra[0])
                say(
                    row,
                    prefix + odd,
                    f"1, but its nearest ancestor {nearest} does not see node {odd}: two branches",
                )
        if len(findings) >= 4:
            break
    for row in range(count, block.shape[0]):
        ones = block[row].nonzero()
        if len(ones):
            say(row, int(ones[0]), f"1, but row {row} is padding (num_nodes {count})")
            break
    return findings


def explain_block(
    form: str, flat: Tensor, request: int, prefixes: Sequence[int], widths: Sequence[int], nodes: int | None
) -> str | None:
    """Another width, form or row stride under which the request's block does hold the rows of a tree."""
    prefix, own = prefixes[request], widths[request]
    ahead = prefix if form == "full" else 0
    for width in range(1, min(WIDEST, 4 * own + 64)):
        start = sum(block_size(form, p, width) for p in prefixes[:request])
        if width == own and start == canonical_indptr(form, prefixes, widths)[request]:
            continue
        rows = min(width, own)
        if rows < 2 or start + width * (ahead + width) > flat.numel():
            continue
        block = flat[start : start + width * (ahead + width)].reshape(width, ahead + width)
        if _is_tree(request, block, ahead, nodes):
            return (
                f"request {request} holds a tree at offset {start} with rows of {ahead + width} elements: "
                f"the mask was laid out for width {width}, the batch is {own} wide"
            )
    if form == "full":
        start = canonical_indptr("tree", prefixes, widths)[request]
        if start + own * own <= flat.numel():
            block = flat[start : start + own * own].reshape(own, own)
            if own > 1 and _is_tree(request, block, 0, nodes):
                return (
                    f"request {request} holds a tree at offset {start} with rows of {own}: this is the tree-only form"
                )
    return None


def _is_tree(request: int, block: Tensor, prefix: int, nodes: int | None) -> bool:
    count = None if nodes is None else min(nodes, block.shape[0])
    return bool(block[:, prefix:].any()) and not judge_block(request, block, prefix, count, 0)
