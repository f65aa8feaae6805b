"""Build a `Case` from a description, and draw descriptions from a seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .cases import Case, Options, Placement, poison_, scale_of, scatter_, tree_mask_of
from .trees import ancestors_or_self, draw_tree

__all__ = ["build_case", "draw_prefix", "random_case", "rebuild"]

GROUPS = (1, 1, 2, 3, 4, 4, 5, 6, 8, 12)
HEAD_DIMS = (16, 32, 64, 64, 80, 96, 128, 128, 192, 256, 40, 72)
BAD_ENTRY = {"zero": 0, "negative": -1, "huge": 2**30}


def build_case(
    parents: Sequence[Sequence[int]],
    prefixes: Sequence[int],
    *,
    q_lens: Sequence[int] | None = None,
    masks: Sequence[Tensor] | None = None,
    source: str = "parents",
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    placement: Placement | None = None,
    max_q_len: int | None = None,
    tail: int = 0,
    sharpness: float = 1.0,
    sm_scale: float | None = None,
    options: Options | None = None,
    positions: Sequence[Tensor] | None = None,
    seed: int = 0,
    name: str | None = None,
) -> Case:
    """A case with the given trees.

    Parameters
    ----------
    parents : sequence of parent lists
        One per request; its length is num_nodes.
    prefixes : sequence of int
        prefix_len per request.
    q_lens : sequence of int, optional
        Rows per request, padding included; default: the number of nodes.
    masks : sequence of Tensor, optional
        Bool `[q_len, q_len]` per request instead of the trees' own (general masks; needs a mask `source`).
    source : {"parents", "chain", "full", "tree"}
        What the layout is built from.
    tail : int
        Rows of q past the last request (ragged only).
    sharpness : float
        Factor on q: larger makes softmax more peaked.
    options : Options, optional
        Default: plain attention.
    positions : sequence of Tensor, optional
        int64 `[q_len]` per request; default: prefix_len + depth, or something random with `masks`.
    seed : int
        Of the numbers and the page order; the same arguments give the same bytes.
    """
    place, options = placement or Placement(), options or Options()
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    nodes = tuple(len(tree) for tree in parents)
    widths = tuple(q_lens) if q_lens is not None else nodes
    tree_masks = tuple(masks) if masks is not None else tuple(map(tree_mask_of, parents, widths))
    lengths = tuple(prefixes)
    uniform = len(set(widths)) == 1 and not tail
    total_q = sum(widths) + tail
    num_qo, num_kv = heads

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen).to(dtype)

    dim_v = options.head_dim_v or head_dim
    general = masks is not None and source in ("full", "tree")
    at = tuple(positions or _positions(parents, widths, lengths, general, random.Random(seed + 1)))
    starts = tuple(
        _kv_start(options, length, rows[:count]) for length, rows, count in zip(lengths, at, nodes, strict=True)
    )
    k_scale, v_scale = _scales(options, num_kv, random.Random(seed + 2))
    plain_k = [numbers(p + n, num_kv, head_dim) for p, n in zip(lengths, nodes, strict=True)]
    plain_v = [numbers(p + n, num_kv, dim_v) for p, n in zip(lengths, nodes, strict=True)]
    content_q = [numbers(n, num_qo, head_dim) for n in nodes]
    held = tuple(length - start for length, start in zip(lengths, starts, strict=True))
    tables, node_slots, pool = _assign_pages(place, held, nodes, rng)
    key_slots = tuple(
        torch.tensor([-1] * start + _slots_of(place, table, prefix, count, own), dtype=torch.int64)
        for start, table, prefix, count, own in zip(starts, tables, held, nodes, node_slots, strict=True)
    )
    content_k = tuple(map(_as_cached, plain_k, key_slots, [options.kv_dtype] * len(nodes), [k_scale] * len(nodes)))
    content_v = tuple(map(_as_cached, plain_v, key_slots, [options.kv_dtype] * len(nodes), [v_scale] * len(nodes)))
    if options.shared_kv:
        content_v = tuple(dense[..., :dim_v] for dense in content_k)
    sinks = torch.randn(num_qo, generator=torch.Generator().manual_seed(seed + 3)) * 2 if options.sinks else None

    q_width = num_qo + 2 * num_kv if place.strided_q else num_qo
    q = poison_(torch.empty(total_q, q_width, head_dim, dtype=dtype), place.poison, gen)[:, :num_qo]
    k_cache, v_cache = _empty_caches(place, pool, num_kv, (head_dim, dim_v), options.kv_dtype or dtype, gen)
    k_tree = v_tree = None
    if place.tree_kv == "fresh":
        gaps = ((0, 0), (0, 0)) if not place.strided_q else ((2, 0), (1, 8))
        k_tree, v_tree = (
            poison_(torch.empty(total_q, num_kv + extra, dim + dims, dtype=dtype), place.poison, gen)[:, :num_kv, :dim]
            for (extra, dims), dim in zip(gaps, (head_dim, dim_v), strict=True)
        )
    first = 0
    for b, width in enumerate(widths):
        q[first : first + nodes[b]] = content_q[b] * sharpness
        cached = key_slots[b] >= 0
        scatter_(k_cache, content_k[b][cached] / scale_of(k_scale), key_slots[b][cached], place)
        if not options.shared_kv:
            scatter_(v_cache, content_v[b][cached] / scale_of(v_scale), key_slots[b][cached], place)
        if k_tree is not None and v_tree is not None:
            k_tree[first : first + nodes[b]] = content_k[b][lengths[b] :]
            v_tree[first : first + nodes[b]] = content_v[b][lengths[b] :]
        first += width

    case = Case(
        name=name or str(seed),
        num_qo_heads=num_qo,
        num_kv_heads=num_kv,
        head_dim=head_dim,
        dtype=dtype,
        placement=place,
        sm_scale=sm_scale,
        source=source,
        q_lens=widths,
        prefixes=lengths,
        nodes=nodes,
        tail=tail,
        parents=tuple(tuple(tree) for tree in parents),
        max_q_len=max_q_len or max(widths, default=1),
        tree_masks=tree_masks,
        content_k=content_k,
        content_v=content_v,
        key_slots=key_slots,
        q=q,
        k_cache=k_cache,
        v_cache=None if options.shared_kv else v_cache,
        k_tree=k_tree,
        v_tree=None if options.shared_kv else v_tree,
        layout_args=_layout_args(
            source, parents, widths, lengths, nodes, tree_masks, uniform, tail, max_q_len, place, rng
        ),
        kv_args=_kv_args(place, tables, node_slots, widths, nodes, tail, pool, rng),
        options=options,
        positions=at,
        kv_starts=starts,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=None if options.shared_kv else v_scale,
    )
    if options.windowed:
        case.kv_args["kv_start"] = torch.tensor(starts, dtype=place.index_dtype)
    if general:
        flat = torch.cat([*at, torch.zeros(tail, dtype=torch.int64)])
        case.layout_args["positions"] = flat.to(place.index_dtype)
    return case.to(device)


def _positions(
    parents: Sequence[Sequence[int]], widths: tuple[int, ...], prefixes: tuple[int, ...], general: bool,
    rng: random.Random,
) -> tuple[Tensor, ...]:  # fmt: skip
    """prefix_len + depth of each row by a naive walk; anything from prefix_len on where masks are general."""
    found = []
    for tree, width, prefix in zip(parents, widths, prefixes, strict=True):
        if general:
            depths = [rng.randint(0, width) for _ in range(width)]
        else:
            depths = [len(ancestors_or_self(tree, node)) - 1 for node in range(len(tree))] + [0] * (width - len(tree))
        found.append(torch.tensor([prefix + depth for depth in depths], dtype=torch.int64))
    return tuple(found)


def _kv_start(options: Options, prefix: int, positions: Tensor) -> int:
    """First token that a windowed cache holds: what the row furthest back still sees."""
    if not options.windowed or options.window_left < 0 or not len(positions):
        return 0
    return min(max(int(positions.min()) - options.window_left, 0), prefix)


def _scales(options: Options, heads: int, rng: random.Random) -> tuple[float | Tensor | None, float | Tensor | None]:
    def one() -> float | Tensor | None:
        if options.scales == "none":
            return None
        if options.scales == "float":
            return rng.uniform(0.3, 2.0)
        if options.scales == "tensor":
            return torch.tensor(rng.uniform(0.3, 2.0))
        return torch.tensor([rng.uniform(0.3, 2.0) for _ in range(heads)])

    return one(), one()


def _as_cached(dense: Tensor, slots: Tensor, kv_dtype: torch.dtype | None, scale: float | Tensor | None) -> Tensor:
    """What attention has for keys whose numbers go through an FP8 cache; the others stay."""
    if kv_dtype is None:
        return dense
    stored = (dense.float() / scale_of(scale)).to(kv_dtype).float() * scale_of(scale)
    return torch.where((slots >= 0)[:, None, None], stored, dense.float())




def rebuild(
    case: Case,
    order: Sequence[int] | None = None,
    *,
    placement: Placement | None = None,
    source: str | None = None,
    seed: int = 0,
) -> Case:
    """Build the same requests elsewhere: the same numbers on other pages, in another order, between other poison.

    Parameters
    ----------
    order : sequence of int, optional
        Which requests, in which order; default: all as they are.
    placement : Placement, optional
        Default: the case's own.
    source : str, optional
        Default: the case's own.
    seed : int
        Of the pages and of what unused memory holds.
    """
    chosen = list(range(case.batch)) if order is None else list(order)
    other = build_case(
        [case.parents[b] for b in chosen],
        [case.prefixes[b] for b in chosen],
        q_lens=[case.q_lens[b] for b in chosen],
        masks=[case.tree_masks[b] for b in chosen],
        source=source or case.source,
        heads=(case.num_qo_heads, case.num_kv_heads),
        head_dim=case.head_dim,
        dtype=case.dtype,
        device=case.device,
        placement=placement or case.placement,
        max_q_len=case.max_q_len,
        tail=case.tail,
        sm_scale=case.sm_scale,
        options=case.options,
        positions=[case.positions[b] for b in chosen],
        seed=seed,
        name=f"{case.name} rebuilt",
    )
    other = dataclasses.replace(other, sinks=case.sinks, k_scale=case.k_scale, v_scale=case.v_scale)
    q = other.q.clone()
    for index, b in enumerate(chosen):
        rows = case.q[case.starts[b] : case.starts[b] + case.nodes[b]]
        q[other.starts[index] : other.starts[index] + case.nodes[b]] = rows
    return other.with_content(
        q=q,
        k=tuple(case.content_k[b] for b in chosen),
        v=tuple(case.content_v[b] for b in chosen),
    )


def _assign_pages(
    place: Placement, prefixes: tuple[int, ...], nodes: tuple[int, ...], rng: random.Random
) -> tuple[list[list[int]], list[list[int]], int]:
    """Page ids per request in logical order, the nodes' own slots, and the size of the pool. Page 0 is nobody's."""
    page = place.page_size
    logical = place.tree_kv == "logical"
    need = [-(-(p + (n if logical else 0)) // page) for p, n in zip(prefixes, nodes, strict=True)]
    own = sum(nodes) if place.tree_kv == "slots" else 0
    pool = sum(need) + -(-own // page) + place.extra_pages + 1
    if place.num_pages is not None:
        if pool > place.num_pages:
            raise ValueError(f"the case needs {pool} pages, num_pages is {place.num_pages}")
        pool = place.num_pages
    ids = list(range(1, pool))
    rng.shuffle(ids)
    tables = [[ids.pop() for _ in range(count)] for count in need]
    node_slots: list[list[int]] = [[] for _ in nodes]
    if place.tree_kv == "slots":
        pages = [ids.pop() for _ in range(-(-own // page))]
        free = [start * page + offset for start in pages for offset in range(page)]
        rng.shuffle(free)
        node_slots = [[free.pop() for _ in range(count)] for count in nodes]
    return tables, node_slots, pool


def _slots_of(place: Placement, table: list[int], prefix: int, nodes: int, own: list[int]) -> list[int]:
    page = place.page_size
    length = prefix + (nodes if place.tree_kv == "logical" else 0)
    slots = [table[p // page] * page + p % page for p in range(length)]
    if place.tree_kv == "slots":
        return slots + own
    return slots + ([-1] * nodes if place.tree_kv == "fresh" else [])


def _empty_caches(
    place: Placement, pages: int, heads: int, dims: tuple[int, int], dtype: torch.dtype, gen: torch.Generator
) -> tuple[Tensor, Tensor]:
    (dim, dim_v), kind = dims, place.cache
    if dim != dim_v and kind in ("interleaved", "packed"):
        kind = "paged"  # K and V of unlike sizes do not share a tensor
    page = place.page_size
    hnd = place.kv_layout == "HND"
    axes = (heads, page) if hnd else (page, heads)

    def bad(*shape: int) -> Tensor:
        return poison_(torch.empty(shape, dtype=dtype), place.poison, gen)

    if kind == "flat":
        return bad(pages * page, heads, dim), bad(pages * page, heads, dim_v)
    if kind == "interleaved":
        both = bad(pages, 2, *axes, dim)
        return both[:, 0], both[:, 1]
    if kind == "packed":
        both = bad(pages, *axes, 2 * dim)
        return both[..., :dim], both[..., dim:]
    if kind in ("strided", "unlike"):
        v_cache = bad(pages, axes[0] + 1, axes[1] + 1, dim_v + 8)[:, : axes[0], : axes[1], :dim_v]
        if kind == "unlike":
            return bad(pages, *axes, dim), v_cache
        return bad(pages, axes[0] + 1, axes[1] + 1, dim + 8)[:, : axes[0], : axes[1], :dim], v_cache
    return bad(pages, *axes, dim), bad(pages, *axes, dim_v)


def _layout_args(
    source: str,
    parents: Sequence[Sequence[int]],
    widths: tuple[int, ...],
    prefixes: tuple[int, ...],
    nodes: tuple[int, ...],
    masks: tuple[Tensor, ...],
    uniform: bool,
    tail: int,
    max_q_len: int | None,
    place: Placement,
    rng: random.Random,
) -> dict[str, Any]:
    index = place.index_dtype
    args: dict[str, Any] = {"prefix_lens": torch.tensor(prefixes, dtype=index)}
    indptr = torch.tensor([sum(widths[:b]) for b in range(len(widths) + 1)], dtype=index)
    if source == "chain":
        return {**args, "q_len": widths[0] if widths else 1}
    if nodes != widths:
        args["num_nodes"] = torch.tensor(nodes, dtype=index)
    if max_q_len is not None:
        args["max_q_len"] = max_q_len
    if source == "parents":
        rows = [[*tree, *(rng.choice((-1, 0, 5555, -9)) for _ in range(width - len(tree)))]
                for tree, width in zip(parents, widths, strict=True)]  # fmt: skip
        if uniform:
            args["parents"] = torch.tensor(rows, dtype=index).reshape(len(widths), widths[0])
        else:
            flat = [parent for row in rows for parent in row] + [7777] * tail
            args.update(parents=torch.tensor(flat, dtype=index), qo_indptr=indptr)
            args.setdefault("max_q_len", max(widths, default=1) or 1)
        return args
    blocks = []
    for width, prefix, count, mask in zip(widths, prefixes, nodes, masks, strict=True):
        real = torch.arange(width) < count
        tree = mask & real[:, None] & real
        ahead = real[:, None].expand(width, prefix if source == "full" else 0)
        blocks.append(torch.cat([ahead, tree], dim=1).reshape(-1))
    args.update(mask=torch.cat([*blocks, torch.zeros(0, dtype=torch.bool)]), form=source)
    args["num_nodes"] = torch.tensor(nodes, dtype=index)
    if uniform:
        args["q_len"] = widths[0]
    else:
        args.update(qo_indptr=indptr, total_q=sum(widths))
        args.setdefault("max_q_len", max(widths, default=1) or 1)
    return args


def _kv_args(
    place: Placement,
    tables: list[list[int]],
    node_slots: list[list[int]],
    widths: tuple[int, ...],
    nodes: tuple[int, ...],
    tail: int,
    pool: int,
    rng: random.Random,
) -> dict[str, Any]:
    index = place.index_dtype

    def unused() -> int:
        return rng.randrange(pool) if place.stale == "valid" else BAD_ENTRY[place.stale]

    args: dict[str, Any] = {"page_size": place.page_size}
    if place.table == "csr":
        padded = [[*table, *(unused() for _ in range(rng.randint(0, 2)))] for table in tables]
        indptr = [0]
        for table in padded:
            indptr.append(indptr[-1] + len(table))
        entries = [entry for table in padded for entry in table] + [unused() for _ in range(3)]
        args.update(kv_indptr=torch.tensor(indptr, dtype=index), kv_indices=torch.tensor(entries, dtype=index))
    else:
        width = max(map(len, tables), default=0) + rng.randint(1, 3)
        rows = [[*table, *(unused() for _ in range(width + 2 - len(table)))] for table in tables]
        args["block_table"] = torch.tensor(rows, dtype=index).reshape(len(tables), width + 2)[:, :width]
    if place.tree_kv == "slots":
        slots = []
        for own, width in zip(node_slots, widths, strict=True):
            slots += [*own, *(-1 if place.stale == "negative" else 0 for _ in range(width - len(own)))]
        args["tree_slots"] = torch.tensor(slots + [-1] * tail, dtype=index)
    return args


def random_case(
    seed: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    scale: str = "normal",
    **pins: Any,
) -> Case:
    """A case drawn from `seed` alone.

    Parameters
    ----------
    seed : int
    device, dtype
        Where the case goes, and its type; the draw does not depend on them.
    scale : {"normal", "small"}
        ``"small"`` keeps shapes that Triton's interpreter can afford.
    **pins
        Values that replace a draw while every other draw stays: any of batch, group, num_kv_heads, head_dim, uniform,
        max_width, max_prefix, tree_kind, padding, empties, source, sharpness, sm_scale, tail, options, or a field of
        `Placement`.

    Returns
    -------
    Case
    """
    rng = random.Random(seed)
    small = scale == "small"
    known = set(_PINS) | {field.name for field in dataclasses.fields(Placement)}
    if unknown := set(pins) - known:
        raise TypeError(f"random_case has no pins {sorted(unknown)}; it has {sorted(known)}")

    def draw(name: str, options: Sequence[Any]) -> Any:
        value = rng.choice(options)
        return pins.get(name, value)

    batch = draw("batch", (0, 1, 2, 3) if small else (0, 1, 1, 2, 3, 4, 5, 6))
    group = draw("group", GROUPS)
    num_kv = draw("num_kv_heads", (1, 2) if small else (1, 1, 2, 3, 4, 8))
    head_dim = draw("head_dim", (16, 32, 64, 40) if small else HEAD_DIMS)
    page = draw("page_size", (1, 1, 2, 5, 8, 16) if small else (1, 1, 2, 5, 16, 16, 32, 64, 128))
    max_prefix = draw("max_prefix", (5, 20, 40) if small else (17, 64, 130, 300, 700))
    max_width = draw("max_width", (1, 5, 8, 9, 17, 20) if small else (1, 4, 8, 9, 17, 33, 65, 70, 129))
    uniform = draw("uniform", (True, True, False))
    padding = draw("padding", (False, True))
    empties = draw("empties", (False, False, True))
    tree_kind = draw("tree_kind", ("any",) * 3 + ("recent", "best_first"))
    source = draw("source", ("parents",) * 6 + ("full", "tree", "general", "chain"))
    placement = Placement(
        page_size=page,
        table=draw("table", ("csr", "block")),
        index_dtype=draw("index_dtype", (torch.int32, torch.int32, torch.int64)),
        tree_kv=draw("tree_kv", ("logical", "logical", "slots", "fresh")),
        kv_layout=draw("kv_layout", ("NHD", "NHD", "HND")),
        cache=draw("cache", ("paged", "paged", "flat", "interleaved", "packed", "strided", "unlike")),
        stale=draw("stale", ("valid", "zero", "negative", "huge")),
        poison=draw("poison", ("nan", "nan", "inf", "mixed", "noise")),
        extra_pages=draw("extra_pages", (0, 2, 9)),
        num_pages=pins.get("num_pages"),
        strided_q=draw("strided_q", (False, False, True)),
        out=pins.get("out", "any"),
    )
    if placement.cache == "flat" and placement.kv_layout == "HND":
        placement = dataclasses.replace(placement, kv_layout="NHD")
    if source == "chain":
        uniform, padding, empties = True, False, False
    tail = 0 if uniform or source != "parents" else draw("tail", (0, 3))

    width = max(1, rng.choice((max_width, max_width, rng.randint(1, max_width))))
    widths = [width if uniform else rng.randint(0 if rng.random() < 0.3 else 1, width) for _ in range(batch)]
    nodes = [rng.randint(1, w) if padding and w and rng.random() < 0.7 else w for w in widths]
    if empties:
        nodes = [0 if rng.random() < 0.25 else n for n in nodes]
    prefixes = [draw_prefix(rng, max_prefix, page, w) for w in widths]
    parents = [draw_tree("chain" if source == "chain" else tree_kind, n, rng) for n in nodes]
    masks = None
    if source == "general":
        gen = torch.Generator().manual_seed(seed)
        masks = [torch.rand(w, w, generator=gen) < rng.choice((0.1, 0.5, 0.9)) for w in widths]
    return build_case(
        parents,
        prefixes,
        q_lens=widths,
        masks=masks,
        source=rng.choice(("full", "tree")) if source == "general" else source,
        heads=(num_kv * group, num_kv),
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        placement=placement,
        max_q_len=width + 5 if source == "parents" and rng.random() < 0.3 else None,
        tail=tail,
        sharpness=draw("sharpness", (1.0, 1.0, 4.0)),
        sm_scale=draw("sm_scale", (None, None, None, 0.3, -0.2)),
        options=pins.get("options"),
        seed=seed,
    )


_PINS = (
    "batch", "group", "num_kv_heads", "head_dim", "uniform", "max_width", "max_prefix", "tree_kind", "padding",
    "empties", "source", "sharpness", "sm_scale", "tail", "options",
)  # fmt: skip


def draw_prefix(rng: random.Random, longest: int, page: int, width: int) -> int:
    """A length up to `longest`, often at a page boundary or a few tokens off it."""
    length = rng.randint(0, longest)
    kind = rng.randrange(6)
    if kind == 0:
        return 0
    if kind in (1, 2):
        length = length // page * page + rng.choice((-1, 0, 0, 1))
    if kind == 3:
        length = length // page * page - width
    return min(max(length, 0), longest)
