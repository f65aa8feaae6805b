"""A verify step as a test case: geometry, trees, prefixes, addresses, poisoned memory; repeatable from a seed.

A `Case` keeps its content (q, and each request's K and V by logical position) apart from its placement (pages, slots,
strides, tables), so that `truth` can work from the content alone and never touch an address. Everything that no row
may see is filled with NaN or Inf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .trees import ancestors_or_self

__all__ = ["Case", "Options", "Placement", "poison_"]

_POISON = (float("nan"), float("inf"), float("-inf"))


@dataclass(frozen=True)
class Placement:
    """Where a case puts its keys and how it hands over its addresses.

    Attributes
    ----------
    page_size : int
    table : {"csr", "block"}
    index_dtype : torch.dtype
        int32 or int64, of every index tensor.
    tree_kv : {"logical", "slots", "fresh"}
        The nodes' K and V stand at position prefix_len + row, at `tree_slots`, or in `k_tree`, `v_tree`.
    kv_layout : {"NHD", "HND"}
    cache : {"paged", "flat", "interleaved", "packed", "strided", "unlike"}
        `[pages, page, heads, dim]`, `[slots, heads, dim]`, K and V as two halves of each page, K and V side by side in
        the last axis, rows with gaps, or V with other strides than K.
    stale : {"valid", "zero", "negative", "huge"}
        What unused table entries hold.
    poison : {"nan", "inf", "mixed", "noise"}
    extra_pages : int
        Pages that nobody owns.
    num_pages : int or None
        Pool size; None means as many as needed.
    strided_q : bool
        q, `k_tree` and `v_tree` are slices of wider tensors, each with strides of its own.
    out : {"any", "dense", "gaps", "transposed"}
        Strides of the caller's out and lse: out with gaps between rows, or lse with its heads apart; "any" goes by the
        case's size.
    """

    page_size: int = 1
    table: str = "csr"
    index_dtype: torch.dtype = torch.int32
    tree_kv: str = "logical"
    kv_layout: str = "NHD"
    cache: str = "paged"
    stale: str = "valid"
    poison: str = "nan"
    extra_pages: int = 2
    num_pages: int | None = None
    strided_q: bool = False
    out: str = "any"


@dataclass(frozen=True)
class Options:
    """What a case asks of attention beside its geometry; the defaults ask for nothing.

    Attributes
    ----------
    head_dim_v : int or None
        None for the head_dim of K.
    kv_dtype : torch.dtype or None
        FP8 type of the caches; None for the case's dtype.
    scales : {"none", "float", "tensor", "heads"}
        How `k_scale` and `v_scale` are given, for an FP8 cache.
    shared_kv : bool
        V is the first `head_dim_v` numbers of K.
    window_left : int
    windowed : bool
        The caches hold only what the window of some row needs (`kv_start`).
    part : {"all", "prefix", "tree"}
    logits_soft_cap : float
    sinks, sinks_in_lse : bool
    batch_invariant : bool
    """

    head_dim_v: int | None = None
    kv_dtype: torch.dtype | None = None
    scales: str = "none"
    shared_kv: bool = False
    window_left: int = -1
    windowed: bool = False
    part: str = "all"
    logits_soft_cap: float = 0.0
    sinks: bool = False
    sinks_in_lse: bool = False
    batch_invariant: bool = False


def poison_(tensor: Tensor, kind: str, generator: torch.Generator | None = None) -> Tensor:
    """Fill `tensor` in place with what must not be read."""
    if tensor.dtype.itemsize == 1:  # FP8: what float16 holds, rounded
        return tensor.copy_(poison_(torch.empty(tensor.shape, dtype=torch.float16), kind, generator).to(tensor.dtype))
    if kind == "nan":
        return tensor.fill_(float("nan"))
    if kind == "inf":
        return tensor.fill_(float("inf"))
    if kind == "mixed":
        pick = torch.randint(0, 3, tensor.shape, generator=generator)
        return tensor.copy_(torch.tensor(_POISON)[pick])
    return tensor.copy_(torch.randn(tensor.shape, generator=generator) * 50)


@dataclass(frozen=True, eq=False)
class Case:
    """One verify step with its addresses, ready for `treeattn.plan` and `treeattn.tree_attention`.

    Attributes
    ----------
    name : str
        Seed or name that repeats the case.
    num_qo_heads, num_kv_heads, head_dim : int
    dtype : torch.dtype
    placement : Placement
    sm_scale : float or None
    source : {"parents", "chain", "full", "tree"}
        Which builder of `TreeLayout` gets the trees; `layout_args` are its arguments.
    q_lens, prefixes, nodes : tuple of int
        Per request. `nodes[b] <= q_lens[b]`; 0 nodes is an empty request.
    parents : tuple of tuple of int
        Per request; not what its rows see where the masks are general.
    tail : int
        Rows of q past the last request.
    max_q_len : int
        As declared to the layout.
    tree_masks : tuple of Tensor
        Bool `[q_len, q_len]` per request on the CPU, from a naive walk up the parents (or general bits).
    content_k, content_v : tuple of Tensor
        `[prefix_len + nodes, num_kv_heads, head_dim]` per request on the CPU.
        What attention should take them for: dequantised where the caches are FP8.
    key_slots : tuple of Tensor
        Token slot of each of these keys in the cache; -1 where the cache has none: fresh nodes, and tokens before what
        the pages hold.
    q, k_cache, v_cache, k_tree, v_tree : Tensor
        What the attention call gets; `k_tree`, `v_tree` are None unless fresh.
    kv_args : dict
        Arguments of `treeattn.PagedKV`.
    options : Options
    positions : tuple of Tensor
        int64 `[q_len]` per request on the CPU.
    kv_starts : tuple of int
        Position of the first token that the pages of each request hold.
    sinks, k_scale, v_scale
        As `treeattn.tree_attention` gets them.
    """

    name: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    placement: Placement
    sm_scale: float | None
    source: str
    q_lens: tuple[int, ...]
    prefixes: tuple[int, ...]
    nodes: tuple[int, ...]
    parents: tuple[tuple[int, ...], ...]
    tail: int
    max_q_len: int
    tree_masks: tuple[Tensor, ...]
    content_k: tuple[Tensor, ...]
    content_v: tuple[Tensor, ...]
    key_slots: tuple[Tensor, ...]
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor | None
    k_tree: Tensor | None
    v_tree: Tensor | None
    layout_args: dict[str, Any]
    kv_args: dict[str, Any]
    options: Options = Options()
    positions: tuple[Tensor, ...] = ()
    kv_starts: tuple[int, ...] = ()
    sinks: Tensor | None = None
    k_scale: float | Tensor | None = None
    v_scale: float | Tensor | None = None

    @property
    def head_dim_v(self) -> int:
        """Of V and out."""
        return self.options.head_dim_v or self.head_dim

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.q_lens)

    @property
    def device(self) -> torch.device:
        """Where q, caches and addresses are."""
        return self.q.device

    @property
    def starts(self) -> tuple[int, ...]:
        """First flat row of each request, and one past the last row."""
        starts = [0]
        for q_len in self.q_lens:
            starts.append(starts[-1] + q_len)
        return tuple(starts)

    @property
    def total_q(self) -> int:
        """Rows of q, the tail that belongs to no request included."""
        return int(self.q.shape[0])

    def visible(self, request: int) -> Tensor:
        """Bool `[q_len, prefix_len + nodes]` on the CPU: what each row of the request sees."""
        q_len, nodes, prefix = self.q_lens[request], self.nodes[request], self.prefixes[request]
        seen = torch.zeros(q_len, prefix + nodes, dtype=torch.bool)
        window, part = self.options.window_left, self.options.part
        at = self.positions[request]
        keys = torch.cat([torch.arange(prefix), at[:nodes]])
        held = torch.arange(prefix + nodes) >= self.kv_starts[request]
        for row in range(nodes):
            seen[row, :prefix] = part != "tree"
            seen[row, prefix:] = self.tree_masks[request][row, :nodes] & torch.tensor(part != "prefix")
            seen[row] &= held
            if window >= 0:
                seen[row] &= keys >= at[row] - window
        return seen

    def layout(self, **overrides: Any) -> Any:
        """The case's `treeattn.TreeLayout`."""
        import treeattn

        builder = {"parents": "from_parents", "chain": "chain"}.get(self.source, "from_mask")
        return getattr(treeattn.TreeLayout, builder)(**{**self.layout_args, **overrides})

    def kv(self, **overrides: Any) -> Any:
        """The case's `treeattn.PagedKV`."""
        import treeattn

        return treeattn.PagedKV(**{**self.kv_args, **overrides})

    def to(self, device: torch.device | str) -> Case:
        """The same case on a device; strides and gaps are kept, content and masks stay on the CPU."""

        def moved(value: Any) -> Any:
            return _move(value, device) if isinstance(value, Tensor) else value

        return dataclasses.replace(
            self,
            q=moved(self.q),
            k_cache=moved(self.k_cache),
            v_cache=moved(self.v_cache),
            k_tree=moved(self.k_tree),
            v_tree=moved(self.v_tree),
            sinks=moved(self.sinks),
            k_scale=moved(self.k_scale),
            v_scale=moved(self.v_scale),
            layout_args={key: moved(value) for key, value in self.layout_args.items()},
            kv_args={key: moved(value) for key, value in self.kv_args.items()},
        )

    def with_content(
        self,
        q: Tensor | None = None,
        k: tuple[Tensor, ...] | None = None,
        v: tuple[Tensor, ...] | None = None,
        name: str | None = None,
    ) -> Case:
        """The same placement with other numbers in it; what is not given stays. q is `[total_q, heads, dim]`."""
        new_k, new_v = self.k_cache, self.v_cache
        tree_k, tree_v = self.k_tree, self.v_tree
        if k is not None:
            new_k, tree_k = self._refilled(self.k_cache, self.k_tree, k, self.k_scale)
        if v is not None and self.v_cache is not None:
            new_v, tree_v = self._refilled(self.v_cache, self.v_tree, v, self.v_scale)
        new_q = self.q
        if q is not None:
            new_q = _move(self.q, self.device)
            new_q.copy_(q)
        return dataclasses.replace(
            self,
            name=name or self.name,
            q=new_q,
            k_cache=new_k,
            v_cache=new_v,
            k_tree=tree_k,
            v_tree=tree_v,
            content_k=k if k is not None else self.content_k,
            content_v=v if v is not None else self.content_v,
        )

    def _refilled(
        self, cache: Tensor, fresh: Tensor | None, content: tuple[Tensor, ...], scale: float | Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        cache = _move(cache, cache.device)
        fresh = None if fresh is None else _move(fresh, fresh.device)
        for request, dense in enumerate(content):
            slots = self.key_slots[request]
            cached = slots >= 0
            scatter_(cache, dense[cached] / scale_of(scale), slots[cached], self.placement)
            if fresh is not None:
                first, prefix = self.starts[request], self.prefixes[request]
                fresh[first : first + self.nodes[request]] = dense[prefix:].to(fresh.device, fresh.dtype)
        return cache, fresh

    def describe(self) -> str:
        """The case in one line."""
        place = self.placement

        def brief(numbers: tuple[int, ...]) -> str:
            return str(numbers[0]) if len(set(numbers)) == 1 else ",".join(map(str, numbers)) or "-"

        return (
            f"case {self.name}: batch {self.batch}, q_len {brief(self.q_lens)} (+{self.tail}), "
            f"nodes {brief(self.nodes)}, "
            f"prefix {brief(self.prefixes)}, heads {self.num_qo_heads}/{self.num_kv_heads}, dim {self.head_dim}, "
            f"{str(self.dtype)[6:]}, {self.source}, {place.table} {str(place.index_dtype)[6:]} page {place.page_size}, "
            f"tree K/V {place.tree_kv}, {place.cache} {place.kv_layout}, unused {place.poison}/{place.stale}"
            + "".join(
                f", {entry.name} {getattr(self.options, entry.name)}"
                for entry in dataclasses.fields(Options)
                if getattr(self.options, entry.name) != entry.default
            )
        )


def tree_mask_of(parents: Sequence[int], q_len: int) -> Tensor:
    """Bool `[q_len, q_len]`: each node sees itself and the nodes above it; rows past the nodes see nothing."""
    mask = torch.zeros(q_len, q_len, dtype=torch.bool)
    for node in range(len(parents)):
        mask[node, ancestors_or_self(parents, node)] = True
    return mask


def scale_of(scale: float | Tensor | None) -> Tensor:
    """A scale on the CPU that multiplies `[keys, heads, dim]`."""
    return torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32).cpu().reshape(-1, 1)


def scatter_(cache: Tensor, dense: Tensor, slots: Tensor, placement: Placement) -> None:
    """Write `dense [n, heads, dim]`, rounded to the cache's type, to token slots of a cache."""
    slots = slots.to(cache.device)
    dense = dense.to(cache.dtype).to(cache.device)
    if cache.dtype.itemsize == 1:  # FP8 has no indexing: its bytes have
        cache, dense = cache.view(torch.uint8), dense.view(torch.uint8)
    page, offset = slots // placement.page_size, slots % placement.page_size
    if cache.dim() == 3:
        cache[slots] = dense
    elif placement.kv_layout == "NHD":
        cache[page, offset] = dense
    else:
        cache[page, :, offset] = dense


def _move(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy on `device` with the same strides and the same bytes in its gaps."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    copy = whole.clone() if whole.device == torch.device(device) else whole.to(device)
    return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
