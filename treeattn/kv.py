"""Where a request's K and V are: pages of a cache, addressed through CSR lists or a block table.

The cache belongs to the caller. :class:`PagedKV` holds addresses only, as the framework has them: nothing is copied
or cast per step. A *token slot* is ``page * page_size + offset``; the *logical position* ``p`` of a request is in page
``table[p // page_size]`` at offset ``p % page_size``. The committed prefix lies at logical positions
``0 .. prefix_len - 1``. The nodes of the draft tree lie at ``tree_slots`` where the caller gives them, else at logical
positions ``prefix_len + row``. Where the cache keeps only a window, ``kv_start`` says which position its pages begin
with.

Not here: reading K and V (kernels), moving them (verify).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .kinds import require_tensor

KVLayout = Literal["NHD", "HND"]
_INDEX_DTYPES = (torch.int32, torch.int64)


class CacheStrides(NamedTuple):
    """Element strides of a cache tensor by named axis; the head_dim axis has stride 1."""

    page: int
    slot: int
    head: int


def cache_strides(cache: Tensor, page_size: int, kv_layout: KVLayout = "NHD", name: str = "k_cache") -> CacheStrides:
    """Strides of a paged cache.

    Parameters
    ----------
    cache : Tensor
        ``[pages, page_size, kv_heads, head_dim]`` (``kv_layout="NHD"``), ``[pages, kv_heads, page_size, head_dim]``
        (``"HND"``), or ``[token_slots, kv_heads, head_dim]`` (either). Any strides with the last axis contiguous, so
        that a half of an interleaved K/V tensor is a valid cache.
    page_size : int
        Tokens per page.
    """
    if cache.stride(-1) != 1 and cache.shape[-1] != 1:
        raise ValueError(f"{name}: the last axis (head_dim) must be contiguous, its stride is {cache.stride(-1)}")
    if cache.ndim == 3:
        return CacheStrides(page_size * cache.stride(0), cache.stride(0), cache.stride(1))
    if cache.ndim != 4:
        raise ValueError(
            f"{name}: expected [pages, page_size, kv_heads, head_dim] (or HND, or [token_slots, kv_heads, head_dim]), "
            f"got {cache.ndim} axes {tuple(cache.shape)}"
        )
    slot_axis, head_axis = (1, 2) if kv_layout == "NHD" else (2, 1)
    if cache.shape[slot_axis] != page_size:
        raise ValueError(
            f"{name}: axis {slot_axis} is the page in {kv_layout} and must have page_size {page_size} slots, "
            f"got {cache.shape[slot_axis]} in {tuple(cache.shape)}"
        )
    return CacheStrides(cache.stride(0), cache.stride(slot_axis), cache.stride(head_axis))


def gather_cache(cache: Tensor, slots: Tensor, page_size: int, kv_layout: KVLayout = "NHD") -> Tensor:
    """Rows of a cache at token slots: ``[len(slots), kv_heads, head_dim]``."""
    slots = slots.long()
    if cache.ndim == 3:
        return cache[slots]
    page, offset = slots // page_size, slots % page_size
    return cache[page, offset] if kv_layout == "NHD" else cache[page, :, offset]


@dataclass(eq=False)
class HostWidth:
    """Entries of a table's last axis that hold the present step's page ids; the host knows it from their shape."""

    entries: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class PagedKV:
    """Addresses of a batch's K and V, borrowed from the caller.

    Give ``kv_indptr`` and ``kv_indices`` (CSR), or ``block_table``.

    Parameters
    ----------
    page_size : int
        Tokens per page, 1 for token slots.
    kv_indptr : Tensor, optional
        ``[batch + 1]`` int32 or int64, offsets into `kv_indices`.
    kv_indices : Tensor, optional
        ``[n]`` int32 or int64 page ids (token slots when ``page_size == 1``).
    block_table : Tensor, optional
        ``[batch, width]`` int32 or int64 page ids, rows of any stride. Entries that no visible position needs may
        hold anything.
    tree_slots : Tensor, optional
        ``[total_q]`` int32 or int64: the token slot of each row's K and V. Entries of padding rows may hold anything.
    kv_start : Tensor, optional
        ``[batch]`` int32 or int64: the position of the first token that the pages hold, 0 by default. For a cache that
        keeps only a window: what lies before is gone, and no row sees it. Held to 0 .. prefix_len; validation says so.
    num_pages : int, optional
        Pages of the cache, for validation where no cache is at hand (a step whose layers are replayed by a graph).

    Examples
    --------
    Two requests with 3 and 5 tokens in pages of 2, nodes in the slots that follow:

    >>> kv = PagedKV(page_size=2, block_table=torch.tensor([[4, 0, 9], [7, 1, 2]], dtype=torch.int32))
    """

    page_size: int = 1
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None
    block_table: Tensor | None = None
    tree_slots: Tensor | None = None
    kv_start: Tensor | None = None
    num_pages: int | None = None
    _width: HostWidth = field(default_factory=HostWidth, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.page_size, (int, torch.SymInt)):
            raise TypeError(f"page_size must be an int, got {self.page_size!r}")
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {self.page_size}")
        csr = (self.kv_indptr is not None) + (self.kv_indices is not None)
        if (self.block_table is not None) == (csr > 0) or csr == 1:
            raise ValueError("give kv_indptr with kv_indices, or block_table: one of the two, and whole")
        for name, axes in (("kv_indptr", 1), ("kv_indices", 1), ("block_table", 2), ("tree_slots", 1),
                           ("kv_start", 1)):  # fmt: skip
            tensor = getattr(self, name)
            if tensor is None:
                continue
            require_tensor(tensor, name)
            if tensor.dtype not in _INDEX_DTYPES:
                raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
            if tensor.ndim != axes:
                raise ValueError(f"{name} must have {axes} axes, got shape {tuple(tensor.shape)}")
            if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                raise ValueError(f"{name} must be contiguous along its last axis, its stride is {tensor.stride(-1)}")
            if tensor.device != self.device:
                raise ValueError(f"{name} is on {tensor.device}, the page ids are on {self.device}")
        if self.kv_indptr is not None and self.kv_indptr.shape[0] == 0:
            raise ValueError("kv_indptr must have batch + 1 entries, got 0")
        if self.kv_start is not None and self.kv_start.shape[0] < self.batch:
            entries = self.kv_start.shape[0]
            raise ValueError(f"kv_start has {entries} entries, the addresses cover {self.batch} requests")
        self._width.entries = self.table.shape[-1]

    @property
    def batch(self) -> int:
        """Requests that the addresses cover."""
        if self.block_table is not None:
            return self.block_table.shape[0]
        return 0 if self.kv_indptr is None else self.kv_indptr.shape[0] - 1

    @property
    def table(self) -> Tensor:
        """The page ids: `block_table` or `kv_indices`."""
        table = self.block_table if self.block_table is not None else self.kv_indices
        if table is None:
            raise ValueError("PagedKV holds no table")
        return table

    @property
    def width(self) -> int:
        """Page ids in use: of each row of `block_table`, or of `kv_indices`. Less than there is room after `copy_`."""
        return self._width.entries

    @property
    def launch_width(self) -> int:
        """What a launch is given as the width: a graph keeps that of its capture, and tables may be copied in later."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return self.table.shape[-1] if capturing else self.width

    @property
    def device(self) -> torch.device:
        """Device of the page ids."""
        return self.table.device

    def pages_of(self, request: int) -> Tensor:
        """Page ids of a request (host read of ``kv_indptr`` in the CSR form); none where its range is not inside."""
        if self.block_table is not None:
            return self.block_table[request, : self.width]
        if self.kv_indptr is None or self.kv_indices is None:
            raise ValueError("PagedKV holds no table")
        start, end = int(self.kv_indptr[request]), int(self.kv_indptr[request + 1])
        if not 0 <= start <= end <= self.width:
            return self.kv_indices[:0]
        return self.kv_indices[start:end]

    def start_of(self, request: int, prefix_len: int) -> int:
        """Position of the first token that a request's pages hold, at most `prefix_len` (a host read)."""
        return 0 if self.kv_start is None else min(max(int(self.kv_start[request]), 0), prefix_len)

    def slots_of(self, request: int, positions: Tensor) -> Tensor:
        """Token slots of a request's tokens, counted from the first one that its pages hold: int64, like `positions`.

        For the CPU: reads ``kv_indptr``.
        """
        positions = positions.long()
        pages = self.pages_of(request)[positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size

    def node_slots(self, request: int, first_row: int, prefix_len: int, num_nodes: int) -> Tensor:
        """Token slots of a request's nodes, int64 ``[num_nodes]``; `first_row` is ``qo_indptr[request]``."""
        if self.tree_slots is not None:
            return self.tree_slots[first_row : first_row + num_nodes].long()
        first = prefix_len - self.start_of(request, prefix_len)
        return self.slots_of(request, torch.arange(first, first + num_nodes, device=self.device))

    @classmethod
    def allocate(
        cls,
        max_batch: int,
        *,
        page_size: int,
        max_pages: int | None = None,
        max_pages_per_request: int | None = None,
        max_total_q: int | None = None,
        windowed: bool = False,
        num_pages: int | None = None,
        dtype: torch.dtype = torch.int32,
        device: torch.device | str = "cuda",
    ) -> PagedKV:
        """Persistent addresses for static buffers, where the framework has none of its own.

        Parameters
        ----------
        max_pages : int, optional
            Pages of the whole batch at most: the CSR form.
        max_pages_per_request : int, optional
            Width of a block table instead.
        max_total_q : int, optional
            Room for `tree_slots` of this many rows.
        windowed : bool
            With a `kv_start`.
        num_pages : int, optional
            Pages of the cache, for validation.
        """
        if (max_pages is None) == (max_pages_per_request is None):
            raise ValueError("give max_pages (CSR) or max_pages_per_request (block table)")

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        more = {
            "tree_slots": None if max_total_q is None else zeros(max_total_q),
            "kv_start": zeros(max_batch) if windowed else None,
        }
        if max_pages is not None:
            indptr, indices = zeros(max_batch + 1), zeros(max_pages)
            return cls(page_size=page_size, kv_indptr=indptr, kv_indices=indices, num_pages=num_pages, **more)
        table = zeros(max_batch, max_pages_per_request or 0)
        return cls(page_size=page_size, block_table=table, num_pages=num_pages, **more)

    def copy_(self, source: PagedKV) -> None:
        """Copy a step's addresses into this object's memory; nothing of the step before is left.

        The tail of ``kv_indptr`` repeats its last entry, rows of a block table narrower than the room end in 0, and
        :attr:`width` is that of `source`: a request that needs more is found by the plan, in place of reading page 0.
        Nothing is copied where `source` has the same memory. No host read; capturable, the width with it.

        Raises
        ------
        ValueError
            If the forms differ or the source exceeds this object's capacity; nothing has been written then.
        """
        for own, new in self.check_fits(source):
            own[tuple(slice(0, size) for size in new.shape)].copy_(new)
            if own is self.kv_indptr:
                own[len(new) :].copy_(new[-1:].expand(len(own) - len(new)))
            if own is self.block_table:
                own[: new.shape[0], new.shape[1] :].zero_()
        self._width.entries = source.width

    def check_fits(self, source: PagedKV) -> list[tuple[Tensor, Tensor]]:
        """Raise ValueError unless :meth:`copy_` can take `source`; returns what is to be copied, (own, new)."""
        if source.page_size != self.page_size:
            raise ValueError(f"page_size is {source.page_size}, these addresses were made for {self.page_size}")
        pairs: list[tuple[Tensor, Tensor]] = []
        for name in ("kv_indptr", "kv_indices", "block_table", "tree_slots", "kv_start"):
            own, new = getattr(self, name), getattr(source, name)
            if (own is None) != (new is None):
                state = "missing" if new is None else "given"
                raise ValueError(f"{name} is {state}, the addresses here have it otherwise")
            if own is None or own.data_ptr() == new.data_ptr():
                continue
            if any(size > room for size, room in zip(new.shape, own.shape, strict=True)):
                raise ValueError(f"{name} of shape {tuple(new.shape)} exceeds the capacity {tuple(own.shape)}")
            pairs.append((own, new))
        return pairs
