"""The layout in plain torch: what CPU tensors use, and what the Triton kernels are compared with.

A request's words come from pointer doubling over its parents. With `W[i]` the set of row i itself and its
first `2^k - 1` ancestors and `A[i]` its `2^k`-th ancestor, one round does

    W[i] |= W[A[i]]        A[i] = A[A[i]]

so `ceil(log2(depth + 1))` rounds give every ancestor, and malformed parents cost no more than the rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treeattn.layout_input import LayoutInput, canonical_indptr, check_size
from treeattn.masks import MAX_PREFIX, bias_visible, full_indptr, pack_words, sound_prefix, unpack_bytes, unpack_words
from treeattn.status import Status

if TYPE_CHECKING:
    from treeattn.layout import TreeLayout

Finding = tuple[int, int, int, int]


@dataclass
class _Rows:
    """Where each row of the step belongs. All int64; `request` is -1 and the rest 0 past the last request."""

    qo: Tensor
    request: Tensor
    local: Tensor
    start: Tensor


def write_layout_torch_(layout: TreeLayout, source: LayoutInput) -> None:
    """Write every field of `layout` for `source`; nothing of the previous step survives."""
    findings: list[Finding] = []
    batch = source.batch
    qo, broken = _qo_indptr(layout, source, findings)
    widths = qo.diff()
    raw_prefix = source.prefix_lens[:batch].to(torch.int64)
    prefix = sound_prefix(raw_prefix)
    given = widths if source.num_nodes is None else source.num_nodes[:batch].to(torch.int64)
    too_long = (raw_prefix > MAX_PREFIX) & ~broken
    findings.extend((Status.PREFIX_LEN, b, 0, int(raw_prefix[b])) for b in too_long.nonzero().flatten().tolist())
    too_many = (given > widths) & ~broken & (raw_prefix == prefix)
    findings.extend((Status.NUM_NODES, b, int(widths[b]), int(given[b])) for b in too_many.nonzero().flatten().tolist())
    nodes = given.masked_fill(broken | too_many | (raw_prefix != prefix), 0).clamp(min=0)
    rows = _rows(layout, qo)

    parents = torch.full((layout.total_q,), -1, dtype=torch.int64, device=layout.device)
    if source.kind in ("parents", "chain"):
        _read_parents(source, rows, nodes, parents, findings)
        words, depths = _ancestors(layout, rows, parents)
    else:
        bits = _read_mask(layout, source, qo, prefix, nodes, findings)
        words, depths = _from_words(rows, nodes, bits, parents)
    real = (rows.request >= 0) & (rows.local < _of(nodes, rows.request))
    words.masked_fill_(~real[:, None], 0)
    parents.masked_fill_(~real, -1)
    depths.masked_fill_(~real, 0)
    row_prefix = _of(prefix, rows.request)
    positions = row_prefix + depths
    if source.positions is not None:
        known = min(source.positions.numel(), layout.total_q)
        given_positions = positions.clone()
        given_positions[:known] = source.positions[:known].to(torch.int64)
        positions = torch.where(real, given_positions, row_prefix)
        depths = torch.where(real, positions - row_prefix, depths)

    _copy_padded_(layout.qo_indptr, qo)
    _copy_padded_(layout.mask_indptr, full_indptr(qo, prefix))
    layout.prefix_lens.zero_()[:batch] = prefix.to(torch.int32)
    layout.num_nodes.zero_()[:batch] = nodes.to(torch.int32)
    layout.mask_words.copy_(words)
    layout.parents.copy_(parents)
    layout.depths.copy_(depths)
    layout.positions.copy_(positions)
    layout.row_request.copy_(rows.request)
    if findings and int(layout.status[0]) == Status.OK:
        first = min(findings, key=lambda f: f[1])
        layout.status.copy_(torch.tensor([min(max(x, -(2**31)), 2**31 - 1) for x in first]))


def _copy_padded_(out: Tensor, indptr: Tensor) -> None:
    """Copy an indptr and repeat its last value to the end of `out`."""
    out[: indptr.numel()] = indptr.to(out.dtype)
    out[indptr.numel() :] = indptr[-1].to(out.dtype)


def _of(per_request: Tensor, request: Tensor) -> Tensor:
    """`per_request[request]`, 0 where the request is -1."""
    if per_request.numel() == 0:
        return torch.zeros_like(request)
    return per_request[request.clamp(min=0)].masked_fill(request < 0, 0)


def _qo_indptr(layout: TreeLayout, source: LayoutInput, findings: list[Finding]) -> tuple[Tensor, Tensor]:
    """Make a sound int64 qo_indptr [batch + 1], and which requests had to be emptied for it."""
    if source.qo_indptr is None:
        steps = torch.arange(source.batch + 1, device=layout.device)
        return steps * int(source.q_len or 0), torch.zeros(source.batch, dtype=torch.bool, device=layout.device)
    raw = source.qo_indptr[: source.batch + 1].to(torch.int64)
    qo = raw.cummax(0).values.clamp(0, min(layout.total_q, source.rows))
    qo[0] = 0
    broken = (raw[:-1] != qo[:-1]) | (raw[1:] != qo[1:]) | (qo.diff() > layout.max_q_len)
    findings.extend((Status.QO_INDPTR, b, int(raw[b]), int(raw[b + 1])) for b in broken.nonzero().flatten().tolist())
    return qo, broken


def _rows(layout: TreeLayout, qo: Tensor) -> _Rows:
    index = torch.arange(layout.total_q, device=layout.device)
    request = torch.searchsorted(qo, index, right=True) - 1
    request.masked_fill_(index >= qo[-1], -1)
    start = _of(qo[:-1], request)
    return _Rows(qo, request, (index - start).masked_fill(request < 0, 0), start)


def _read_parents(source: LayoutInput, rows: _Rows, nodes: Tensor, parents: Tensor, findings: list[Finding]) -> None:
    """Fill local `parents` of real rows; empty (in `nodes`) a request that has a wrong one."""
    real = (rows.request >= 0) & (rows.local < _of(nodes, rows.request))
    if source.data is None:
        parents.copy_(rows.local - 1)
        return
    flat = source.data[: source.batch].reshape(-1) if source.data.dim() == 2 else source.data
    known = min(flat.numel(), parents.numel())
    parents[:known] = flat[:known].to(torch.int64)
    sound = torch.where(rows.local == 0, parents == -1, (parents >= 0) & (parents < rows.local))
    for r in (real & ~sound).nonzero().flatten().tolist():
        b = int(rows.request[r])
        if nodes[b] != 0:
            findings.append((Status.PARENT, b, int(rows.local[r]), int(parents[r])))
            nodes[b] = 0
    parents.masked_fill_(~real | (_of(nodes, rows.request) == 0), -1)


def _ancestors(layout: TreeLayout, rows: _Rows, parents: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ancestor-or-self words [total_q, num_words] and depths, by pointer doubling."""
    words = torch.zeros_like(layout.mask_words)
    column = (rows.local // 64).clamp(max=layout.num_words - 1).unsqueeze(1)
    words.scatter_(1, column, (torch.ones_like(rows.local) << (rows.local % 64)).unsqueeze(1))
    depths = (parents >= 0).to(torch.int64)
    ancestor = torch.where(parents >= 0, rows.start + parents, parents)
    while bool((ancestor >= 0).any()):
        has = ancestor >= 0
        safe = ancestor.clamp(min=0)
        words |= words[safe].masked_fill(~has.unsqueeze(1), 0)
        depths += depths[safe].masked_fill(~has, 0)
        ancestor = torch.where(has, ancestor[safe], ancestor)
    return words, depths


def _read_mask(
    layout: TreeLayout,
    source: LayoutInput,
    qo: Tensor,
    prefix: Tensor,
    nodes: Tensor,
    findings: list[Finding],
) -> Tensor:
    """Read words [total_q, num_words] of a mask; lower `nodes` to what it says, 0 where it is bad."""
    words = torch.zeros_like(layout.mask_words)
    data = source.data
    if data is None:
        return words
    if source.kind == "words":
        rows, n = min(data.shape[0], layout.total_q), min(data.shape[1], layout.num_words)
        words[:rows, :n] = data[:rows, :n]
        narrow = nodes > 64 * data.shape[1]
        for b in narrow.nonzero().flatten().tolist():
            findings.append((Status.MASK_SIZE, b, 64 * data.shape[1], int(nodes[b])))
        nodes.masked_fill_(narrow, 0)
        return words
    indptr = canonical_indptr(source, qo)
    if source.mask_indptr is None:
        check_size(source, int(indptr[-1]))
    else:
        indptr = source.mask_indptr[: source.batch + 1].to(torch.int64)
    for b in range(source.batch):
        if nodes[b] == 0:
            continue
        first, width = int(qo[b]), int(qo[b + 1] - qo[b])
        block = _block(source, b, int(indptr[b]), width, 0 if source.kind == "tree" else int(prefix[b]), findings)
        if block is None:
            nodes[b] = 0
            continue
        count = _count_nodes(source, b, block, int(nodes[b]), width, findings)
        nodes[b] = count
        words[first : first + width, : (width + 63) // 64] = pack_words(block[:, block.shape[1] - width :])
    return words


def _block(source: LayoutInput, b: int, start: int, width: int, prefix: int, findings: list[Finding]) -> Tensor | None:
    """Read a request's bool [q_len, (prefix +) q_len]; None where the mask is too short or odd."""
    if source.data is None:
        return None
    shape = (width, prefix + width)
    count = shape[0] * shape[1]
    size = (count + 7) // 8 if source.kind == "packed" else count
    if start < 0 or start + size > source.data.numel():
        findings.append((Status.MASK_SIZE, b, source.data.numel(), start + size))
        return None
    flat = source.data[start : start + size]
    if source.kind == "packed":
        return unpack_bytes(flat, count).view(shape)
    if source.kind != "bias":
        return (flat != 0).view(shape)
    visible, odd = bias_visible(flat)
    rows = width if source.num_nodes is None else min(int(source.num_nodes[b]), width)
    wrong = odd.view(shape)[:rows].nonzero()
    if wrong.numel():
        findings.append((Status.BIAS_VALUE, b, int(wrong[0, 0]), int(wrong[0, 1])))
        return None
    return visible.view(shape)


def _count_nodes(source: LayoutInput, b: int, block: Tensor, nodes: int, width: int, findings: list[Finding]) -> int:
    """Count real nodes of a request by its mask: 0 when a real row has a hole in its prefix part."""
    if source.kind == "tree":
        return nodes
    if source.num_nodes is None:
        real = block.any(1).nonzero()
        nodes = int(real[-1]) + 1 if real.numel() else 0
    holes = (~block[:nodes, : block.shape[1] - width]).nonzero()
    if holes.numel():
        findings.append((Status.MASK_HOLE, b, int(holes[0, 0]), int(holes[0, 1])))
        return 0
    return nodes


def _from_words(rows: _Rows, nodes: Tensor, words: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """Drop bits past `num_nodes`; depths = popcount - 1, parents = highest visible node below the row."""
    limit = _of(nodes, rows.request).unsqueeze(1)
    depths = torch.full_like(parents, -1)
    column = torch.arange(64, device=words.device)
    for w in range(words.shape[1]):
        node = column + 64 * w
        bits = unpack_words(words[:, w : w + 1], 64) & (node < limit)
        words[:, w] = pack_words(bits)[:, 0]
        depths += bits.sum(1)
        below = torch.where(bits & (node < rows.local.unsqueeze(1)), node, -1).amax(1)
        torch.maximum(parents, below, out=parents)
    return words, depths.clamp(min=0)
