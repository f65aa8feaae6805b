"""The operators behind the public functions, for graphs that ``torch.compile`` captures.

Under Dynamo :func:`treeattn.tree_attention`, :func:`treeattn.accept` and :func:`treeattn.compact_kv_` call these
operators of the namespace ``torch.ops.treeattn``; eager calls do not pass here. A model's code is the same for both.

Each operator returns nothing and writes what its schema declares, so that a graph orders it with what else touches the
caches and `out`. Where the caller gives no `out`, the public function allocates it in the graph, and shapes are known
there without running anything. Checks run with each call of a compiled graph, on the real tensors.

A :class:`treeattn.Step` enters as an integer, its :attr:`~treeattn.Step.handle`: a graph takes integers that change,
and the step keeps what is memoised in it. A :class:`treeattn.TreeLayout` and a :class:`treeattn.PagedKV` are only
tensors and sizes, and enter as these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .api import tree_attention
from .kv import KVLayout, PagedKV
from .layout import TreeLayout
from .plan import step_of
from .verify import Accepted, Backend, accept, compact_kv_

# torch.library.custom_op does the same and costs 36 µs a call; these cost 3 to 4, and 2 to 3
# more where arguments are keyword-only. New arguments come last, with a default: Inductor's caches of compiled graphs
# outlive a release and do not know the schema.
_library: Any = torch.library.Library("treeattn", "DEF")  # type: ignore[no-untyped-call]
_LAYOUT = "Tensor[] layout, {status} status, SymInt max_q_len, SymInt? q_len"


def _define(schema: str, run: Callable[..., None]) -> None:
    """Register an operator that returns nothing; on fake tensors there is then nothing to do."""
    name = schema.partition("(")[0]
    _library.define(f"{schema} -> ()")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"treeattn::{name}", _nothing, lib=_library)


def _nothing(*arguments: Any, **options: Any) -> None:
    pass


def _layout(*fields: Any) -> TreeLayout:
    """The layout of a :meth:`TreeLayout.flatten`."""
    tensors, *rest = fields
    return TreeLayout(*tensors, *rest)


def _tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    step: int,
    out: Tensor,
    k_tree: Tensor | None = None,
    v_tree: Tensor | None = None,
    lse: Tensor | None = None,
    sm_scale: float | None = None,
    zero_tail: bool = False,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    sinks_in_lse: bool = False,
    k_scale: float | None = None,
    v_scale: float | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    tree_attention(
        q, k_cache, v_cache, step_of(step), k_tree=k_tree, v_tree=v_tree, out=out, lse=lse, sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap, sinks=sinks, sinks_in_lse=sinks_in_lse,
        k_scale=k_scale if k_scales is None else k_scales, v_scale=v_scale if v_scales is None else v_scales,
        zero_tail=zero_tail,
    )  # fmt: skip


def _accept(
    layout: list[Tensor],
    status: Tensor,
    max_q_len: int,
    q_len: int | None,
    draft_tokens: Tensor,
    target_tokens: Tensor,
    rows: Tensor,
    lens: Tensor,
    bonus: Tensor,
    backend: Backend = None,
) -> None:
    whole = _layout(layout, status, max_q_len, q_len)
    accept(whole, draft_tokens, target_tokens, Accepted(rows, lens, bonus), backend)


def _compact_kv_(
    caches: list[Tensor],
    page_size: int,
    kv_indptr: Tensor | None,
    kv_indices: Tensor | None,
    block_table: Tensor | None,
    tree_slots: Tensor | None,
    kv_start: Tensor | None,
    layout: list[Tensor],
    status: Tensor,
    max_q_len: int,
    q_len: int | None,
    rows: Tensor,
    lens: Tensor,
    kv_layout: KVLayout = "NHD",
    backend: Backend = None,
    width: int | None = None,
) -> None:
    indices = None if kv_indices is None else kv_indices[:width]  # those in use
    table = None if block_table is None else block_table[:, :width]
    kv = PagedKV(
        page_size=page_size, kv_indptr=kv_indptr, kv_indices=indices, block_table=table, tree_slots=tree_slots,
        kv_start=kv_start,
    )  # fmt: skip
    compact_kv_(caches, kv, _layout(layout, status, max_q_len, q_len), rows, lens, kv_layout, backend)


_define(
    "tree_attention(Tensor q, Tensor k_cache, Tensor? v_cache, SymInt step, Tensor(a!) out, Tensor? k_tree=None, "
    "Tensor? v_tree=None, Tensor(b!)? lse=None, float? sm_scale=None, bool zero_tail=False, float logits_soft_cap=0.0, "
    "Tensor? sinks=None, bool sinks_in_lse=False, float? k_scale=None, float? v_scale=None, Tensor? k_scales=None, "
    "Tensor? v_scales=None)",
    _tree_attention,
)
_define(
    f"accept({_LAYOUT.format(status='Tensor')}, Tensor draft_tokens, Tensor target_tokens, Tensor(a!) rows, "
    "Tensor(b!) lens, Tensor(c!) bonus, str? backend=None)",
    _accept,
)
_define(
    "compact_kv_(Tensor(a!)[] caches, SymInt page_size, Tensor? kv_indptr, Tensor? kv_indices, Tensor? block_table, "
    f"Tensor? tree_slots, Tensor? kv_start, {_LAYOUT.format(status='Tensor(b!)')}, Tensor rows, Tensor lens, "
    "str kv_layout='NHD', str? backend=None, SymInt? width=None)",
    _compact_kv_,
)
