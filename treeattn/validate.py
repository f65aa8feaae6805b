"""Validation mode: read device data and check all of it, for whoever can afford the host reads.

``validate=True``, or TREEATTN_VALIDATE=1 where ``validate`` is not given, turns it on for what is built or planned.
Each check stands where its data enters: `validate_input` before a layout is written, `validate_plan` and
`validate_update` when a step is made, `validate_call` in each layer's call, which alone knows the cache. Errors name
request, row and value. With validation off none of this runs, and the status word (:mod:`treeattn.status`) tells what
the device found.

Not here: shapes, dtypes and capacities, which are checked on every call (`layout_input`, `plan`, `api`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treeattn.kv import PagedKV
from treeattn.layout_input import Kind, LayoutInput, canonical_indptr, check_size
from treeattn.masks import MAX_PREFIX, unpack_bytes, unpack_words
from treeattn.status import Status, status_error, status_message
from treeattn.tree import validate_parents

if TYPE_CHECKING:
    from treeattn.layout import TreeLayout
    from treeattn.plan import Step

WIDEST = 4096  # rows of a request up to which a wrong offset is explained by another width


def validation_wanted(validate: bool | None) -> bool:
    """Return `validate`, or what `TREEATTN_VALIDATE=1` in the environment says when it is None."""
    return os.environ.get("TREEATTN_VALIDATE", "0") == "1" if validate is None else validate


def refuse_in_capture(device: torch.device, what: str) -> None:
    """Raise RuntimeError when a CUDA stream is being captured: `what` would have to read device data."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what} reads device data, which a CUDA graph capture forbids; "
            "capture with validate=False (and TREEATTN_VALIDATE unset), then call check() after a replay"
        )


# What a layout is built from.


def validate_input(source: LayoutInput, layout: TreeLayout) -> None:
    """Check offsets, lengths, parents, the mask's size, offsets and bits; nothing has been written yet.

    Raises
    ------
    ValueError
        The first finding.
    RuntimeError
        The stream is being captured.
    """
    refuse_in_capture(layout.device, "validation")
    qo = _validated_qo(source, layout)
    widths = [b - a for a, b in itertools.pairwise(qo)]
    for b, prefix in enumerate(source.prefix_lens[: source.batch].tolist()):
        if not 0 <= prefix <= MAX_PREFIX:
            raise status_error((Status.PREFIX_LEN, b, 0, prefix))
    nodes: list[int] = widths if source.num_nodes is None else source.num_nodes[: source.batch].tolist()
    if source.kind == "parents" and source.data is not None:
        flat = source.data[: source.batch].reshape(-1).tolist() if source.data.dim() == 2 else source.data.tolist()
        validate_parents([flat[a:b] for a, b in itertools.pairwise(qo)], nodes)
    for b, (count, width) in enumerate(zip(nodes, widths, strict=True)):
        if count > width or (count < 1 and width > 0):
            raise ValueError(f"request {b}: num_nodes is {count}, must be 1 to its q_len {width}")
    if source.kind in ("full", "tree", "packed", "bias"):
        _validate_mask_place(source, widths, torch.tensor(qo, device=layout.device))
    if source.kind not in ("parents", "chain"):
        _validate_bits(source, qo, nodes)
    if source.positions is not None and source.positions.numel() < qo[-1]:
        raise ValueError(f"positions have {source.positions.numel()} entries, the batch has {qo[-1]} rows")


def _validated_qo(source: LayoutInput, layout: TreeLayout) -> list[int]:
    if source.qo_indptr is None:
        return [b * int(source.q_len or 0) for b in range(source.batch + 1)]
    qo: list[int] = source.qo_indptr[: source.batch + 1].tolist()
    limit = min(layout.total_q, source.rows)
    for b in range(source.batch):
        low, high = qo[b], qo[b + 1]
        if (b == 0 and low != 0) or high < low or high > limit or high - low > layout.max_q_len:
            raise status_error((Status.QO_INDPTR, b, low, high))
    return qo


def _validate_mask_place(source: LayoutInput, widths: list[int], qo_indptr: Tensor) -> None:
    """Compare the size of a flat mask and a caller's mask_indptr with the canonical ones."""
    canonical: list[int] = canonical_indptr(source, qo_indptr).tolist()
    prefixes: list[int] = source.prefix_lens[: source.batch].tolist()
    have = 0 if source.data is None else source.data.numel()
    if have != canonical[-1] and (source.mask_indptr is None or have < canonical[-1]):
        check_size(source, canonical[-1], explain_offset(source.kind, have, prefixes, widths))
    if source.mask_indptr is None:
        return
    for b, (got, want) in enumerate(zip(source.mask_indptr[: source.batch + 1].tolist(), canonical, strict=True)):
        if got == want:
            continue
        where = f"request {b - 1} ends at {got}, must be {want}"
        if b < source.batch:
            where = status_message((Status.MASK_INDPTR, b, want, got))
        sum_of = _sum_of(source.kind, prefixes[:b], widths[:b])
        raise ValueError(f"{where}{sum_of}{explain_offset(source.kind, got, prefixes[:b], widths[:b])}")


def _block_size(kind: Kind, prefix: int, width: int) -> int:
    """Elements of a request's block in a flat mask, bytes for "packed"."""
    size = width * width if kind == "tree" else width * (prefix + width)
    return (size + 7) // 8 if kind == "packed" else size


def _sum_of(kind: Kind, prefixes: Sequence[int], widths: Sequence[int]) -> str:
    """`` = 17*(5+17) + ...``: the sum that gives an offset, empty for the first."""
    if not widths:
        return ""
    one = {"tree": "{width}*{width}", "packed": "ceil({width}*({prefix}+{width})/8)"}.get(
        kind, "{width}*({prefix}+{width})"
    )
    parts = [one.format(prefix=p, width=w) for p, w in zip(prefixes, widths, strict=True)]
    return f" = {' + '.join(parts) if len(parts) <= 3 else f'{parts[0]} + ... + {parts[-1]}'}"


def explain_offset(kind: Kind, got: int, prefixes: Sequence[int], widths: Sequence[int]) -> str:
    """Say which other width, or which other form, puts the end of these requests' blocks at `got`.

    Parameters
    ----------
    kind : str
        Form of a flat mask.
    got : int
        The wrong offset or size, in elements (bytes for "packed").
    prefixes, widths : sequence of int
        Of the requests before the offset.

    Returns
    -------
    str
        To follow a message; empty where neither explains it.

    Examples
    --------
    >>> explain_offset("full", 104, [5], [17])
    '; 104 = 8*(5+8) is the place for requests of 8 rows, these have 17'
    """
    if not widths:
        return ""
    for width in range(1, WIDEST):
        size = sum(_block_size(kind, prefix, width) for prefix in prefixes)
        if size == got and set(widths) != {width}:
            own = "/".join(map(str, sorted(set(widths))))
            sum_of = _sum_of(kind, prefixes, [width] * len(prefixes))
            return f"; {got}{sum_of} is the place for requests of {width} rows, these have {own}"
        if size >= got:
            break
    others: dict[Kind, str] = {"full": "form 'full'", "tree": "form 'tree'", "packed": "form 'packed' (bytes)"}
    for other, name in others.items():
        if sum(_block_size(other, p, w) for p, w in zip(prefixes, widths, strict=True)) == got:
            return f"; {got} is the place in {name}"
    return ""


def _validate_bits(source: LayoutInput, qo: list[int], nodes: list[int]) -> None:
    """Refuse a real row that sees a node beyond num_nodes; where a mask alone tells the nodes there is none."""
    if source.data is None or (source.num_nodes is None and source.kind not in ("tree", "words")):
        return
    starts: list[int] = []
    if source.kind != "words":
        starts = canonical_indptr(source, torch.tensor(qo, device=source.data.device)).tolist()
    for b, (first, count) in enumerate(zip(qo, nodes, strict=False)):
        width = qo[b + 1] - first
        if source.kind == "words":
            bits = source.data.shape[1] * 64
            if bits < count:
                raise ValueError(f"request {b}: words have {bits} bits a row, num_nodes is {count}")
            seen = unpack_words(source.data[first : first + count], bits)
        else:
            columns = width if source.kind == "tree" else width + int(source.prefix_lens[b])
            seen = _flat_block(source.data, source.kind, starts[b], width, columns)[:count, columns - width :]
        beyond = seen[:, count:].nonzero()
        if beyond.numel():
            row, node = beyond[0].tolist()
            raise ValueError(f"request {b}, row {row}: sees node {count + node}, but num_nodes is {count}")


def _flat_block(data: Tensor, kind: Kind, start: int, rows: int, columns: int) -> Tensor:
    """Read a request's bool [rows, columns] from a flat mask."""
    size = rows * columns
    if kind == "packed":
        return unpack_bytes(data[start : start + (size + 7) // 8], size).view(rows, columns)
    flat = data[start : start + size]
    return (flat == 0 if kind == "bias" else flat != 0).view(rows, columns)


# Where K and V are.


def validate_plan(step: Step) -> None:
    """Check the status word and the addresses of a step that is about to be planned, as far as it needs no cache."""
    refuse_in_capture(step.layout.device, "validation of a plan")
    step.layout.check()
    validate_addresses(step)


def validate_update(layout: TreeLayout, groups: Sequence[Step], kv: PagedKV | None) -> None:
    """Check what static buffers hold after an update.

    What the plans put into the status word is part of this error, and is not told again by a later check().
    """
    rows = int(layout.qo_indptr[-1])
    try:
        if kv is not None and kv.tree_slots is not None and kv.tree_slots.shape[0] < rows:
            raise ValueError(f"kv has {kv.tree_slots.shape[0]} tree_slots, the step has {rows} query rows")
        for step in groups:
            validate_addresses(step)
    except ValueError:
        layout.status.zero_()
        raise
    layout.check()


def validate_call(step: Step, rows: int, cache: Tensor, fresh: bool) -> None:
    """Check a layer's call: the step's addresses against the cache, the layout's rows against `rows`, those of q.

    Parameters
    ----------
    cache : Tensor
        The K cache, for its size.
    fresh : bool
        K and V of the nodes come with the call; no slot of theirs is read.
    """
    refuse_in_capture(step.layout.device, "validation of tree_attention")
    step.layout.check()
    needed = int(step.layout.qo_indptr[-1])
    if needed > rows:
        raise ValueError(f"q has {rows} query rows, the layout's requests have {needed}")
    validate_addresses(step, cache_slots(cache, step.kv.page_size), fresh)
    _validate_planned_pages(step)


def cache_slots(cache: Tensor, page_size: int) -> int:
    """Token slots of a paged cache, whatever its axes."""
    return cache.shape[0] * (1 if cache.ndim == 3 else page_size)


def validate_addresses(step: Step, token_slots: int | None = None, fresh: bool = False) -> None:
    """Check offsets, lengths, page ids and tree_slots of a step's requests; entries that nobody needs hold anything.

    Parameters
    ----------
    step : Step
    token_slots : int, optional
        Size of the cache, else that of ``kv.num_pages``; without both, ids are only held to be 0 or more.
    fresh : bool
        K and V of the nodes come with the call.
    """
    layout, kv = step.layout, step.kv
    if token_slots is None and kv.num_pages is not None:
        token_slots = kv.num_pages * kv.page_size
    batch = layout.batch if step.host is None else step.host.batch
    _validate_kv_indptr(kv, batch)
    rows, prefixes, nodes = layout.qo_indptr.tolist(), layout.prefix_lens.tolist(), layout.num_nodes.tolist()
    for b in range(batch):
        if nodes[b] == 0:
            continue
        own = slice(rows[b], rows[b] + nodes[b])
        behind = nodes[b] if step.nodes_in_table and step.part != "prefix" else 0
        if kv.kv_start is not None and not 0 <= int(kv.kv_start[b]) <= prefixes[b]:
            begins = int(kv.kv_start[b])
            raise ValueError(f"request {b}: kv_start is {begins}, must be 0 to its prefix_len {prefixes[b]}")
        start = kv.start_of(b, prefixes[b])
        held = prefixes[b] - start
        if step.tokens_needed(held, nodes[b]) > 0:
            _validate_room(kv, b, held, behind)
        first = max(_first_token(step, own) - start, 0)
        first = (held if step.part == "tree" else min(first, held)) // kv.page_size
        # with the call's own K and V the nodes' places are not read, though the plan wants room for them
        _validate_pages(kv, b, first, held if fresh else held + behind, token_slots)
        if kv.tree_slots is not None and not step.fresh_tree and not fresh and step.part != "prefix":
            _validate_slots(kv.tree_slots[own].long(), b, token_slots)


def _validate_planned_pages(step: Step) -> None:
    """Check that the page ids which a plan has for csrc's kernels are still the table's."""
    if step.buffers is None or step.config is None:
        return
    from .kernels import launch
    from .kernels import plan as fields

    rows = launch.boxes_of(step)
    if rows == 0:
        return
    size, block, splits = step.kv.page_size, step.config.block_n, max(launch.split_of(step), 1)
    for work in step.buffers.work.tolist():
        b, tile, prefix = (work[field.value] for field in (fields.WORK_REQUEST, fields.WORK_TILE, fields.WORK_PREFIX))
        if work[fields.WORK_LEFT.value] <= 0:
            continue
        seen = -(-work[fields.WORK_FULL.value] // block) if launch.is_ranged(step) else 0
        begin = (seen + tile * splits) * block
        planned = work[fields.WORK_PAGES.value :]
        tokens = range(begin, min(begin + len(planned) * rows, prefix), rows)
        now = step.kv.pages_of(b)[torch.tensor(tokens, dtype=torch.int64, device=step.kv.device) // size].tolist()
        for token, page, was in zip(tokens, now, planned, strict=False):
            if page != was:
                raise ValueError(
                    f"request {b}: the page id of token {token} is {page}, it was {was} when the step was planned; a "
                    "table that has changed needs a new plan (StaticBuffers.update_)"
                )


def _first_token(step: Step, rows: slice) -> int:
    """First logical position that a row of a request may see: a windowed group may have given older pages back."""
    window: int = step.window_left
    return 0 if window < 0 else max(0, int(step.layout.positions[rows].min()) - window)


def _validate_kv_indptr(kv: PagedKV, batch: int) -> None:
    if kv.kv_indptr is None:
        return
    for b, (low, high) in enumerate(itertools.pairwise(kv.kv_indptr[: batch + 1].tolist())):
        if not 0 <= low <= high <= kv.width:
            raise ValueError(
                f"request {b}: kv_indptr goes from {low} to {high}; it must be 0 or more, never fall, and stay inside "
                f"the {kv.width} kv_indices"
            )


def _validate_room(kv: PagedKV, b: int, prefix: int, behind: int) -> None:
    pages = kv.pages_of(b).shape[0]
    room = pages * kv.page_size
    if prefix + behind > room:
        finding = status_message((Status.KV_CAPACITY, b, room, prefix + behind))
        raise ValueError(f"{finding}: {prefix} tokens of prefix + {behind} nodes, in {pages} pages of {kv.page_size}")


def _validate_pages(kv: PagedKV, b: int, first: int, needed: int, token_slots: int | None) -> None:
    """Check the ids of the pages that hold logical positions from that of page `first` to `needed`."""
    size = kv.page_size
    pages = kv.pages_of(b)[first : -(-needed // size)].long()
    begins = torch.arange(first, first + len(pages), device=pages.device) * size
    used = (needed - begins).clamp(max=size)  # of the last page only the part that is needed must be there
    limit = None if token_slots is None else (token_slots - used) // size
    _refuse_outside(
        pages, limit, token_slots, size,
        lambda i: f"request {b}: page id {int(pages[i])} of tokens {int(begins[i])} to {int(begins[i] + used[i]) - 1}",
    )  # fmt: skip


def _validate_slots(slots: Tensor, b: int, token_slots: int | None) -> None:
    """Check the slots of a request's real rows."""
    limit = None if token_slots is None else torch.full_like(slots, token_slots - 1)
    _refuse_outside(slots, limit, token_slots, 1, lambda i: f"request {b}, row {i}: tree_slots holds {int(slots[i])}")


def _refuse_outside(
    ids: Tensor, limit: Tensor | None, token_slots: int | None, size: int, name: Callable[[int], str]
) -> None:
    outside = ids < 0
    if limit is not None:
        outside |= ids > limit
    if not bool(outside.any()):
        return
    message = f"{name(int(outside.nonzero()[0]))}, must be 0 or more"
    if token_slots is not None:
        pool = f"{token_slots} token slots" if size == 1 else f"{token_slots // size} pages of {size}"
        message += f" and inside the cache of {pool}"
    raise ValueError(message)
