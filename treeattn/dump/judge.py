"""Read a dump, judge its layout, its addresses and its output, and say which request, row and offset is wrong.

The output is judged against float64 attention computed from the dump's own mask (or parents), K and V. Where it is
wrong, masks that real integrations have used by mistake are tried, and the one that reproduces the output is named.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import masks
from .values import judge_values

__all__ = ["DUMP_KEYS", "DumpReport", "judge_dump", "load_dump"]

DUMP_KEYS = {
    "q": "[total_q, heads, head_dim], needed",
    "prefix_lens": "[batch] ints, committed tokens per request, needed",
    "qo_indptr": "[batch + 1] ints, or q_len: one int; default: total_q / batch rows each",
    "num_nodes": "[batch] ints, real rows per request; default: up to the last non-zero mask row",
    "parents": "[batch, q_len] or flat [total_q] ints; parents, mask, or both",
    "mask": "flat bool or 0/1 mask, request after request",
    "mask_form": "'full' (rows of prefix_len + q_len, default) or 'tree' (rows of q_len)",
    "mask_indptr": "[batch + 1] ints, your element offsets into mask; judged against the right ones",
    "k_cache, v_cache": "[pages, page_size, kv_heads, head_dim] (NHD), HND, or [slots, kv_heads, head_dim]",
    "kv_layout": "'NHD' (default) or 'HND'",
    "page_size": "int, default 1",
    "block_table": "[batch, width] ints, or kv_indptr [batch + 1] and kv_indices",
    "kv_indptr, kv_indices": "CSR page ids (token slots when page_size is 1)",
    "tree_slots": "[total_q] token slots of the nodes; default: positions prefix_len + row of the table",
    "k_tree, v_tree": "[total_q, kv_heads, head_dim], fresh K and V of the nodes, in place of the cache's",
    "sm_scale": "float, default 1/sqrt(head_dim)",
    "out": "[total_q, heads, head_dim], your output; without it only layout and addresses are judged",
    "lse": "[total_q, heads], natural log; optional",
}


@dataclass
class DumpReport:
    """`findings` are wrong, `notes` explain or say what was not judged; nothing found means right."""

    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.findings


def load_dump(path: str | Path) -> dict[str, Any]:
    """Read a ``torch.save`` dict of tensors and plain values onto the CPU.

    Raises
    ------
    ValueError
        If the file holds no dict or names keys that nobody knows.
    """
    try:
        dump = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch and pickle raise nearly anything for what is not their file
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{path} cannot be read as torch.save's file: {type(error).__name__}: {reason}") from error
    if not isinstance(dump, dict):
        raise ValueError(f"{path} holds a {type(dump).__name__}, must hold a dict of tensors")
    known = {name for names in DUMP_KEYS for name in names.split(", ")} | {"q_len"}
    if unknown := sorted(set(dump) - known):
        raise ValueError(f"unknown keys {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return dump


def _ints(dump: Mapping[str, Any], key: str) -> list[int] | None:
    value = dump.get(key)
    if value is None:
        return None
    return [int(v) for v in (value.reshape(-1).tolist() if isinstance(value, Tensor) else value)]


def judge_dump(dump: Mapping[str, Any]) -> DumpReport:
    """Judge a dump.

    Parameters
    ----------
    dump : mapping
        Tensors and plain values under the names of `DUMP_KEYS`.

    Returns
    -------
    DumpReport

    Raises
    ------
    ValueError
        If a needed key is missing or lengths leave nothing to judge.
    """
    report = DumpReport()
    for key in ("q", "prefix_lens"):
        if key not in dump:
            raise ValueError(f"the dump has no {key}; keys: " + ", ".join(DUMP_KEYS))
    if "mask" not in dump and "parents" not in dump:
        raise ValueError("the dump has neither mask nor parents: one of them says what each row sees")
    prefixes = _ints(dump, "prefix_lens") or []
    starts = _row_starts(dump, len(prefixes), report)
    if starts is None:
        return report
    widths = [stop - start for start, stop in itertools.pairwise(starts)]
    nodes = _ints(dump, "num_nodes")
    if nodes is not None:
        for request, (count, width) in enumerate(zip(nodes, widths, strict=True)):
            if not 0 <= count <= width:
                report.findings.append(f"num_nodes[{request}] = {count}, must be 0 to q_len {width}")
        if report.findings:
            return report

    blocks = _blocks(dump, prefixes, starts, widths, nodes, report)
    if blocks is None:
        report.notes.append("out was not judged: the layout has to be right first")
        return report
    judge_values(dump, report, prefixes, starts, blocks)
    return report


def _row_starts(dump: Mapping[str, Any], batch: int, report: DumpReport) -> list[int] | None:
    total = int(dump["q"].shape[0])
    indptr = _ints(dump, "qo_indptr")
    if indptr is None:
        width = int(dump.get("q_len", total // max(batch, 1)))
        if width * batch != total:
            report.findings.append(f"q has {total} rows, {batch} requests of width {width} have {batch * width}")
            return None
        return [width * request for request in range(batch + 1)]
    if len(indptr) != batch + 1:
        report.findings.append(f"qo_indptr has {len(indptr)} entries, must have {batch + 1} (prefix_lens has {batch})")
        return None
    for index in range(1, len(indptr)):
        if indptr[index] < indptr[index - 1]:
            report.findings.append(
                f"qo_indptr[{index}] = {indptr[index]} is below qo_indptr[{index - 1}] = {indptr[index - 1]}"
            )
            return None
    if indptr[0] != 0 or indptr[-1] > total:
        report.findings.append(
            f"qo_indptr runs from {indptr[0]} to {indptr[-1]}, must run from 0 to at most {total} (rows of q)"
        )
        return None
    return indptr


def _blocks(
    dump: Mapping[str, Any],
    prefixes: Sequence[int],
    starts: Sequence[int],
    widths: Sequence[int],
    nodes: Sequence[int] | None,
    report: DumpReport,
) -> list[Tensor] | None:
    """What each row may see, bool `[q_len, q_len]` per request; None if that cannot be told."""
    from_parents = None
    if "parents" in dump:
        from_parents = _blocks_of_parents(dump["parents"].reshape(-1).tolist(), starts, widths, nodes, report)
    if "mask" not in dump:
        return from_parents
    form = str(dump.get("mask_form", "full"))
    if form not in ("full", "tree"):
        raise ValueError(f"mask_form must be 'full' or 'tree', got {form!r}")
    flat = dump["mask"].reshape(-1) != 0
    indptr = _ints(dump, "mask_indptr")
    if indptr is not None:
        report.findings += masks.judge_indptr(form, indptr, prefixes, widths)
    size = masks.explain_size(form, flat.numel(), prefixes, widths)
    if size is not None:
        report.findings.append(size)
    want = masks.canonical_indptr(form, prefixes, widths)
    blocks: list[Tensor] = []
    trouble = False
    for request, (prefix, width) in enumerate(zip(prefixes, widths, strict=True)):
        ahead = prefix if form == "full" else 0
        count = None if nodes is None else nodes[request]
        if want[request + 1] > flat.numel():
            trouble = True
            report.findings.append(
                f"request {request}: its block ends at {want[request + 1]}, the mask ends at {flat.numel()}"
            )
        else:
            block = flat[want[request] : want[request + 1]].reshape(width, ahead + width)
            found = masks.judge_block(request, block, ahead, count, want[request])
            blocks.append(block[:, ahead:])
            if not found:
                continue
            report.findings += found
            trouble = True
        explanation = masks.explain_block(form, flat, request, prefixes, widths, count)
        if explanation is not None:
            report.notes.append(explanation)
    if from_parents is not None and not trouble:
        _compare_masks(blocks, from_parents, prefixes, report)
        return from_parents
    if from_parents is not None:
        report.notes.append("out is judged against the parents, since the mask is wrong")
        return from_parents
    return None if len(blocks) < len(widths) else blocks


def _blocks_of_parents(
    parents: list[int],
    starts: Sequence[int],
    widths: Sequence[int],
    nodes: Sequence[int] | None,
    report: DumpReport,
) -> list[Tensor] | None:
    blocks = []
    if len(parents) < starts[-1]:
        report.findings.append(f"parents has {len(parents)} entries, the batch has {starts[-1]} rows")
        return None
    for request, width in enumerate(widths):
        count = width if nodes is None else nodes[request]
        seen = torch.zeros(width, width, dtype=torch.bool)
        for row in range(count):
            parent = parents[starts[request] + row]
            if not -1 <= parent < row:
                report.findings.append(
                    f"request {request} row {row}: parent {parent}, must be -1 or a node before it (0 to {row - 1})"
                )
                return None
            if parent >= 0:
                seen[row] = seen[parent]
            seen[row, row] = True
        blocks.append(seen)
    return blocks


def _compare_masks(blocks: list[Tensor], want: list[Tensor], prefixes: Sequence[int], report: DumpReport) -> None:
    for request, (has, must) in enumerate(zip(blocks, want, strict=True)):
        differ = (has != must).nonzero()
        if len(differ):
            row, node = differ[0].tolist()
            report.findings.append(
                f"request {request} row {row} column {prefixes[request] + node} (node {node}): the mask has "
                f"{int(has[row, node])}, the parents say {int(must[row, node])} ({len(differ)} bits differ)"
            )
