"""Run a case on one backend, plainly or through StaticBuffers, between guards, and judge it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treeattn.capabilities import Asked
from treeattn.geometry import Geometry

from .build import random_case
from .cases import Case
from .guard import Guarded
from .tolerance import Verdict, judge
from .truth import Truth

__all__ = ["PATHS", "Result", "StaticRun", "asked_of", "check_case", "group_of", "run_plain", "run_static"]


@dataclass(frozen=True)
class Result:
    """`out`, `lse` on the CPU (rows of no request 0 and -inf) and what the guards saw."""

    out: Tensor
    lse: Tensor
    touched: str | None


def group_of(case: Case) -> dict[str, Any]:
    """Arguments of `treeattn.plan` and `StaticBuffers.add_group` that describe the case's geometry."""
    options = case.options
    return {
        "num_qo_heads": case.num_qo_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_dim": case.head_dim,
        "head_dim_v": options.head_dim_v,
        "dtype": case.dtype,
        "kv_dtype": options.kv_dtype,
        "kv_layout": case.placement.kv_layout,
        "fresh_tree": case.placement.tree_kv == "fresh",
        "shared_kv": options.shared_kv,
        "window_left": options.window_left,
        "part": options.part,
        "batch_invariant": options.batch_invariant,
    }


def asked_of(case: Case) -> Asked:
    """What the case asks of a backend."""
    options = case.options
    return Asked(Geometry.of(**group_of(case)), "kv_start" in case.kv_args, options.logits_soft_cap, options.sinks)


def call_of(case: Case) -> dict[str, Any]:
    """Arguments of `treeattn.tree_attention` beside its tensors and its step."""
    options = case.options
    return {
        "sm_scale": case.head_dim**-0.5 if options.shared_kv and case.sm_scale is None else case.sm_scale,
        "logits_soft_cap": options.logits_soft_cap,
        "sinks": case.sinks,
        "sinks_in_lse": options.sinks_in_lse,
        "k_scale": case.k_scale,
        "v_scale": case.v_scale,
    }


def _guards(case: Case, rows: int, seed: int) -> tuple[Guarded, Guarded]:
    owned = case.starts[-1]
    shape = (rows, case.num_qo_heads, case.head_dim_v)
    kind = case.placement.out
    gaps, transposed = (seed % 2, seed // 2 % 2) if kind == "any" else (kind == "gaps", kind == "transposed")
    out = Guarded(shape, case.dtype, case.device, gap=gaps * case.head_dim_v, own_rows=owned)
    lse = Guarded(shape[:2], torch.float32, case.device, transposed=bool(transposed), own_rows=owned)
    return out, lse


def _result(out: Guarded, lse: Guarded, rows: int) -> Result:
    touched = [f"{name}: {guard.touched()}" for name, guard in (("out", out), ("lse", lse)) if guard.touched()]
    row_lse = lse.result()
    row_lse[lse.own_rows :] = float("-inf")
    return Result(out.result()[:rows], row_lse[:rows], "; ".join(touched) or None)


def run_plain(
    case: Case,
    backend: str = "auto",
    *,
    spoil: Callable[[Any], None] | None = None,
    layout: Any = None,
) -> Result:
    """`plan` and `tree_attention` with the caller's guarded `out` and `lse`.

    Parameters
    ----------
    spoil : callable, optional
        Gets the layout before it is used: fault injection.
    layout : TreeLayout, optional
        Instead of the case's own.
    """
    import treeattn

    layout = case.layout() if layout is None else layout
    if spoil is not None:
        spoil(layout)
    step = treeattn.plan(layout, case.kv(), backend=backend, **group_of(case))
    out, lse = _guards(case, case.total_q, case.head_dim + case.total_q)
    returned = treeattn.tree_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        step,
        k_tree=case.k_tree,
        v_tree=case.v_tree,
        out=out.tensor,
        lse=lse.tensor,
        **call_of(case),
    )
    if returned.data_ptr() != out.tensor.data_ptr():
        raise ValueError("tree_attention returned another tensor than the caller's out")
    return _result(out, lse, case.total_q)


class StaticRun:
    """StaticBuffers with one group and the caller's own static tensors, larger than the cases that go through them.

    Parameters
    ----------
    like : Case
        Gives geometry, placement and dtype.
    max_batch, max_q_len, max_total_q : int
        Capacity.
    table_width : int
        Columns of a block table, or entries of `kv_indices` per request.
    backend : str
    """

    def __init__(
        self,
        like: Case,
        max_batch: int,
        max_q_len: int,
        max_total_q: int,
        table_width: int,
        backend: str = "auto",
    ) -> None:
        import treeattn

        self.backend = backend
        self.max_total_q = max_total_q
        place, device = like.placement, like.device
        rng = random.Random(max_total_q)

        def stale(*shape: int) -> Tensor:
            return torch.full(shape, rng.choice((-1, 0, 2**29)), dtype=place.index_dtype, device=device)

        tables: dict[str, Any] = {}
        if place.table == "csr":
            tables["kv_indptr"] = torch.arange(max_batch + 1, dtype=place.index_dtype, device=device) * 10
            tables["kv_indices"] = stale(max(1, max_batch * table_width))
        else:
            tables["block_table"] = stale(max_batch, table_width)
        if place.tree_kv == "slots":
            tables["tree_slots"] = stale(max_total_q)
        self.tables = tables
        self.q = torch.full(
            (max_total_q, like.num_qo_heads, like.head_dim), float("nan"), dtype=like.dtype, device=device
        )
        if like.options.windowed:
            tables["kv_start"] = stale(max_batch)
        self.fresh: tuple[Tensor, Tensor | None] | None = None
        if place.tree_kv == "fresh":
            dims = (like.head_dim, like.head_dim_v)
            k_tree, v_tree = (
                torch.full((max_total_q, like.num_kv_heads, dim), float("nan"), dtype=like.dtype, device=device)
                for dim in dims
            )
            self.fresh = (k_tree, None if like.options.shared_kv else v_tree)
        self.bufs = treeattn.StaticBuffers(max_batch, max_q_len, max_total_q, device=device)
        kv = treeattn.PagedKV(page_size=place.page_size, **tables)
        self.step = self.bufs.add_group(kv=kv, backend=backend, **group_of(like))

    @classmethod
    def for_cases(cls, cases: list[Case], backend: str = "auto", spare: int = 2) -> StaticRun:
        """Buffers that hold each of `cases`, with some room beside them."""
        width = 1
        for case in cases:
            table = case.kv_args.get("block_table")
            if table is not None:
                width = max(width, table.shape[1])
            else:
                width = max(width, -(-case.kv_args["kv_indices"].numel() // max(1, case.batch)))
        batch = max(case.batch for case in cases) + spare
        max_q_len = max(case.max_q_len for case in cases) + spare
        total = max(max(case.total_q for case in cases) + spare, batch)
        return cls(cases[0], batch, max_q_len, total, width + spare, backend)

    def load_(self, case: Case) -> None:
        """Copy a case's tables, q and fresh K/V to the static tensors; what lies beyond them stays as it was."""
        for key, static in self.tables.items():
            new = case.kv_args[key]
            if new.dim() == 2:
                static[: new.shape[0], : new.shape[1]] = new
            else:
                static[: new.numel()] = new
        self.q[: case.total_q] = case.q
        for kept, own in zip(self.fresh or (), (case.k_tree, case.v_tree), strict=False):
            if kept is not None and own is not None:
                kept[: case.total_q] = own

    def update_(self, case: Case) -> None:
        """Layout and plan of a case."""
        args = {key: value for key, value in case.layout_args.items() if key not in ("max_q_len", "total_q")}
        self.bufs.update_(**args, chain=case.source == "chain")

    def attend(self, case: Case, out: Tensor, lse: Tensor) -> None:
        """One attention call over the whole static q."""
        import treeattn

        k_tree, v_tree = (None, None) if self.fresh is None else self.fresh
        treeattn.tree_attention(
            self.q, case.k_cache, case.v_cache, self.step, k_tree=k_tree, v_tree=v_tree, out=out, lse=lse,
            **call_of(case),
        )  # fmt: skip

    def run(self, case: Case) -> Result:
        """Load, update and attend between guards."""
        self.load_(case)
        self.update_(case)
        out, lse = _guards(case, self.max_total_q, case.head_dim + case.total_q)
        self.attend(case, out.tensor, lse.tensor)
        return _result(out, lse, case.total_q)


def previous_of(case: Case, seed: int) -> Case:
    """Another case of the same geometry and placement: what the buffers were used for before."""
    place = case.placement
    width = max((*case.q_lens, 1))
    return random_case(
        seed,
        device=case.device,
        dtype=case.dtype,
        group=case.num_qo_heads // case.num_kv_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        batch=min(case.batch + 1, 6),
        max_width=min(width + 1, 40),
        max_prefix=max((*case.prefixes, 0)) // 2 + 3,
        source="parents",
        page_size=place.page_size,
        table=place.table,
        index_dtype=place.index_dtype,
        tree_kv=place.tree_kv,
        kv_layout=place.kv_layout,
        cache=place.cache,
        poison="noise",
        out=place.out,
        sm_scale=case.sm_scale,
        options=case.options,
    )


def run_static(case: Case, backend: str = "auto") -> Result:
    """Through StaticBuffers larger than the case, after a step of another case in the same buffers."""
    before = previous_of(case, case.total_q + 17 * case.batch)
    static = StaticRun.for_cases([case, before], backend)
    static.run(before)
    return static.run(case)


PATHS: dict[str, Callable[..., Result]] = {"plain": run_plain, "static": run_static}


def check_case(case: Case, backend: str, path: str = "plain", expected: Truth | None = None, **options: Any) -> Verdict:
    """Run a case on one path (``"plain"`` or ``"static"``) and judge out, lse and the guards."""
    result = PATHS[path](case, backend, **options)
    if result.touched:
        return Verdict(False, float("inf"), result.touched)
    return judge(case, result.out, result.lse, expected)
