"""After the logits: which path of the tree the target model agrees with, and moving its K and V into place.

`accept` walks each tree from the root. `global_rows` turns its local rows into rows of q, out or hidden
states. `compact_kv_` moves the accepted nodes' K and V to where committed tokens belong; positions were
taken by depth, so nothing needs rotating again. Sampling is not here: `target_tokens` may be greedy or
sampled, and following sampled ids loses nothing either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from treeattn.kinds import require_tensor
from treeattn.kv import KVLayout, PagedKV, cache_strides
from treeattn.layout import TreeLayout
from treeattn.status import Status, status_error

Backend = Literal["torch", "triton"] | None
_INTS = (torch.int32, torch.int64)
_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Accepted(NamedTuple):
    """The accepted path of each request.

    Attributes
    ----------
    rows : Tensor int32 [batch, max_q_len]
        Accepted local rows in path order, the root (0) first, -1 after the path. Strictly ascending.
    lens : Tensor int32 [batch]
        Rows of the path, the root included: 1 or more, 0 for an empty request.
    bonus : Tensor int64 [batch]
        The target's token after the last accepted row, -1 for an empty request. A step yields the tokens of
        `rows[1:]` and then this one.
    """

    rows: Tensor
    lens: Tensor
    bonus: Tensor

    @classmethod
    def allocate(cls, batch: int, max_q_len: int, device: torch.device | str | None = None) -> Accepted:
        """Allocate an uninitialised result for `accept(..., out=)`."""
        return cls(
            torch.empty(batch, max_q_len, dtype=torch.int32, device=device),
            torch.empty(batch, dtype=torch.int32, device=device),
            torch.empty(batch, dtype=torch.int64, device=device),
        )


def accept(
    layout: TreeLayout,
    draft_tokens: Tensor,
    target_tokens: Tensor,
    out: Accepted | None = None,
    backend: Backend = None,
) -> Accepted:
    """Walk each request's tree along the target model's tokens.

    From row i the walk goes to the lowest child row whose draft token equals `target_tokens[i]`, and stops
    where there is none. One launch on CUDA, no host read; capturable with `out`.

    Parameters
    ----------
    layout : TreeLayout
        Its `parents` give the children.
    draft_tokens : Tensor int32 or int64 [>= total_q], contiguous
        Token of each flat row. The root's and those of padding rows are not used.
    target_tokens : Tensor int32 or int64 [>= total_q], contiguous
        The target's token after each flat row.
    out : Accepted, optional
        Where to write; all of it is overwritten.
    backend : {"torch", "triton"}, optional
        Triton on CUDA and torch elsewhere when None.

    Returns
    -------
    Accepted
        `out` when given.

    Examples
    --------
    Parents (-1, 0, 0, 1), draft tokens (9, 5, 7, 6); the target says 5 after the root, 6 after row 1, 8
    after row 3: rows (0, 1, 3), lens 3, bonus 8.
    """
    if torch.compiler.is_dynamo_compiling():
        if out is None:
            out = Accepted.allocate(layout.batch, layout.max_q_len, layout.device)
        torch.ops.treeattn.accept(*layout.flatten(), draft_tokens, target_tokens, *out, backend)
        return out
    draft = _tokens(layout, draft_tokens, "draft_tokens")
    target = _tokens(layout, target_tokens, "target_tokens")
    if out is None:
        out = Accepted.allocate(layout.batch, layout.max_q_len, layout.device)
    _check_out(out.rows, "out.rows", torch.int32, (layout.batch, layout.max_q_len), layout)
    _check_out(out.lens, "out.lens", torch.int32, (layout.batch,), layout)
    _check_out(out.bonus, "out.bonus", torch.int64, (layout.batch,), layout)
    if _use_triton(layout, backend):
        from treeattn.kernels import verify as kernels

        kernels.accept_triton_(layout, draft, target, out)
    else:
        _accept_torch_(layout, draft, target, out)
    return out


def _accept_torch_(layout: TreeLayout, draft: Tensor, target: Tensor, out: Accepted) -> None:
    none = layout.total_q
    start = layout.qo_indptr[:-1].to(torch.int64)
    row = torch.arange(layout.total_q, device=layout.device)
    owner = layout.row_request.to(torch.int64)
    held = owner >= 0
    owner = owner.clamp(min=0)
    draft, target = draft[: layout.total_q].to(torch.int64), target[: layout.total_q].to(torch.int64)
    out.rows.fill_(-1)
    out.lens.copy_(layout.num_nodes > 0)
    out.bonus.fill_(-1)
    if layout.total_q == 0 or layout.batch == 0:
        return
    local = row - start[owner]
    held &= local < layout.num_nodes[owner]
    alive = layout.num_nodes > 0
    current = torch.zeros(layout.batch, dtype=torch.int64, device=layout.device)
    out.rows[alive, 0] = 0
    while bool(alive.any()):
        at = (start + current).clamp(max=none - 1)
        wanted = target[at]
        out.bonus.copy_(torch.where(alive, wanted, out.bonus))
        fits = held & alive[owner] & (layout.parents == current[owner]) & (draft == wanted[owner])
        best = torch.full_like(current, none).scatter_reduce(0, owner[fits], local[fits], "amin")
        alive = best < none
        current = torch.where(alive, best, current)
        live = alive.nonzero().flatten()
        out.rows[live, out.lens[live].to(torch.int64)] = best[live].to(torch.int32)
        out.lens.add_(alive.to(torch.int32))


def global_rows(
    layout: TreeLayout,
    rows: Tensor,
    lens: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Turn local rows of each request into flat rows, to index q, out or hidden states.

    Parameters
    ----------
    layout : TreeLayout
    rows : Tensor int32 [batch, n]
        Local rows, negative = none (`Accepted.rows`).
    lens : Tensor int32 [batch], optional
        Use only the first `lens[b]` of each.
    out : Tensor int64 [batch, n], optional

    Returns
    -------
    Tensor int64 [batch, n]
        `qo_indptr[b] + rows[b, i]`, -1 where there is none.
    """
    if backend is None and torch.compiler.is_dynamo_compiling():
        backend = "torch"  # elementwise: Inductor fuses it
    _check_rows(layout, rows, lens)
    if out is None:
        out = torch.empty(rows.shape, dtype=torch.int64, device=rows.device)
    _check_out(out, "out", torch.int64, tuple(rows.shape), layout)
    if _use_triton(layout, backend):
        from treeattn.kernels import verify as kernels

        kernels.global_rows_triton_(layout, rows, lens, out)
        return out
    flat = layout.qo_indptr[: rows.shape[0]].to(torch.int64).unsqueeze(1) + rows
    none = rows < 0
    if lens is not None:
        none |= torch.arange(rows.shape[1], device=rows.device) >= lens.unsqueeze(1)
    out.copy_(flat.masked_fill(none, -1))
    return out


def compact_kv_(
    caches: Tensor | Sequence[Tensor],
    kv: PagedKV,
    layout: TreeLayout,
    rows: Tensor,
    lens: Tensor,
    kv_layout: KVLayout = "NHD",
    backend: Backend = None,
) -> None:
    """Move the K and V of accepted rows to the places of rows 0, 1, 2, ... of their request, in place.

    The place of row i is `kv.tree_slots[qo_indptr[b] + i]`, or logical position `prefix_len + i` through
    the table. `rows[b]` ascends (`rows[b, i] >= i`), so moving in order never overwrites what is still to
    be read. Nothing else changes. Bytes are moved, whatever the dtype.

    Parameters
    ----------
    caches : Tensor or sequence of Tensor
        K and V caches of any layers: `[pages, page_size, kv_heads, head_dim]` ("NHD"), `[pages, kv_heads,
        page_size, head_dim]` ("HND") or `[token_slots, kv_heads, head_dim]`, last axis contiguous. Caches
        of one shape, dtype and strides share a launch on CUDA.
    kv : PagedKV
        Addresses of this step.
    layout : TreeLayout
        The layout that was verified, not yet advanced.
    rows : Tensor int32 [batch, n]
        Accepted local rows, the root first (`Accepted.rows`).
    lens : Tensor int32 [batch]
        How many of them; 0 moves nothing.
    kv_layout : {"NHD", "HND"}
    backend : {"torch", "triton"}, optional

    Raises
    ------
    ValueError
        Shapes or devices do not fit; on CPU also a row that does not ascend.
    RuntimeError
        A set of caches is met for the first time during a graph capture (its pointer table is made once,
        eagerly).

    Notes
    -----
    On CUDA a place outside the request's table sets the layout's status word and is not moved; elsewhere it is a
    ValueError and nothing is moved.

    Examples
    --------
    8 nodes at slots 100 to 107, accepted rows 0, 2, 3: slots 101 and 102 get what 102 and 103 held.
    """
    many = [caches] if isinstance(caches, Tensor) else list(caches)
    if torch.compiler.is_dynamo_compiling():
        torch.ops.treeattn.compact_kv_(
            many, kv.page_size, kv.kv_indptr, kv.kv_indices, kv.block_table, kv.tree_slots, kv.kv_start,
            *layout.flatten(), rows, lens, kv_layout, backend, kv.width,
        )  # fmt: skip
        return
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout must be 'NHD' or 'HND', got {kv_layout!r}")
    _check_rows(layout, rows, lens)
    for k, cache in enumerate(many):
        name = f"caches[{k}]"
        if cache.device != layout.device:
            raise ValueError(f"{name} is on {cache.device}, the layout on {layout.device}")
        cache_strides(cache, kv.page_size, kv_layout, name)
    if not many or rows.shape[0] == 0:
        return
    if kv.device != layout.device:
        raise ValueError(f"the KV addresses are on {kv.device}, the layout on {layout.device}")
    if kv.tree_slots is None and kv.batch < rows.shape[0]:
        raise ValueError(f"the addresses cover {kv.batch} requests, rows has {rows.shape[0]}")
    if kv.tree_slots is not None and kv.tree_slots.shape[0] < layout.total_q:
        raise ValueError(f"tree_slots has {kv.tree_slots.shape[0]} entries, the layout has {layout.total_q} rows")
    if _use_triton(layout, backend):
        from treeattn.kernels import verify as kernels

        kernels.compact_kv_triton_(many, kv, layout, rows, lens, kv_layout)
    else:
        _compact_torch_(many, kv, layout, rows, lens, kv_layout)


def _compact_torch_(
    caches: list[Tensor], kv: PagedKV, layout: TreeLayout, rows: Tensor, lens: Tensor, kv_layout: KVLayout
) -> None:
    source, target = [], []
    for b, count in enumerate(lens.tolist()):
        nodes = int(layout.num_nodes[b])
        count = min(count, nodes)
        if count <= 0:
            continue
        if count > rows.shape[1]:
            raise ValueError(f"request {b}: lens is {count}, but rows has {rows.shape[1]} columns")
        path = rows[b, :count].to(torch.int64)
        _check_path(b, path.tolist(), nodes)
        slots = _places(b, kv, layout, int(path[-1]) + 1)
        moved = path != torch.arange(count, device=path.device)
        for row in torch.cat([path[moved], moved.nonzero().flatten()]).tolist():
            if slots[row] < 0:
                raise ValueError(f"request {b}: row {row} is at token slot {int(slots[row])}, must be 0 or more")
        source.append(slots[path][moved])
        target.append(slots[:count][moved])
    if not source:
        return
    read, write = torch.cat(source), torch.cat(target)
    for cache in caches:
        raw = cache.view(_BYTES[cache.element_size()]) if cache.element_size() in _BYTES else cache
        if raw.ndim == 3:
            raw[write] = raw[read]
            continue
        paged = raw if kv_layout == "NHD" else raw.transpose(1, 2)
        size = kv.page_size
        paged[write // size, write % size] = paged[read // size, read % size]


def _check_path(b: int, path: list[int], nodes: int) -> None:
    for i, row in enumerate(path):
        if row < i or row >= nodes or (i > 0 and row <= path[i - 1]):
            raise ValueError(
                f"request {b}: accepted row {i} is {row}; rows ascend from the root, below num_nodes {nodes}"
            )


def _places(b: int, kv: PagedKV, layout: TreeLayout, count: int) -> Tensor:
    """Token slots of the first `count` nodes of request b; raises unless the addresses hold them."""
    prefix = int(layout.prefix_lens[b])
    if kv.tree_slots is None:
        room = kv.pages_of(b).shape[0] * kv.page_size
        needed = prefix - kv.start_of(b, prefix) + count
        if needed > room:
            raise status_error((Status.KV_CAPACITY, b, room, needed))
    return kv.node_slots(b, int(layout.qo_indptr[b]), prefix, count)


def _use_triton(layout: TreeLayout, backend: Backend) -> bool:
    if backend not in (None, "torch", "triton"):
        raise ValueError(f"backend must be None, 'torch' or 'triton', got {backend!r}")
    return layout.device.type == "cuda" if backend is None else backend == "triton"


def _tokens(layout: TreeLayout, tokens: Tensor, name: str) -> Tensor:
    require_tensor(tokens, name)
    if tokens.device != layout.device:
        raise ValueError(f"{name} is on {tokens.device}, the layout on {layout.device}")
    if tokens.dtype not in _INTS:
        raise TypeError(f"{name} is {tokens.dtype}, must be int32 or int64")
    if not tokens.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tokens.stride()}")
    need = layout.total_q
    if layout.q_len is not None:
        need = min(need, layout.batch * layout.q_len)
    if tokens.numel() < need:
        raise ValueError(f"{name} has {tokens.numel()} tokens, the layout has {need} rows")
    return tokens.view(-1)


def _check_out(tensor: Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...], layout: TreeLayout) -> None:
    if tensor.device != layout.device:
        raise ValueError(f"{name} is on {tensor.device}, the layout on {layout.device}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}, must be {dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tuple(tensor.shape)}, must be {shape}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def _check_rows(layout: TreeLayout, rows: Tensor, lens: Tensor | None) -> None:
    if rows.dim() != 2 or rows.shape[0] > layout.batch:
        raise ValueError(f"rows are [batch, n] with batch at most {layout.batch}, got {tuple(rows.shape)}")
    if lens is not None and tuple(lens.shape) != (rows.shape[0],):
        raise ValueError(f"lens has shape {tuple(lens.shape)}, must be ({rows.shape[0]},)")
    for name, tensor in (("rows", rows), ("lens", lens)):
        if tensor is None:
            continue
        if tensor.device != layout.device:
            raise ValueError(f"{name} is on {tensor.device}, the layout on {layout.device}")
        if tensor.dtype not in _INTS:
            raise TypeError(f"{name} is {tensor.dtype}, must be int32 or int64")
