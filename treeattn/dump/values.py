"""Judge a dump's addresses and its output, and name the mistake that reproduces a wrong output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .judge import DumpReport

__all__ = ["judge_values"]


def judge_values(
    dump: Mapping[str, Any],
    report: DumpReport,
    prefixes: Sequence[int],
    starts: Sequence[int],
    blocks: list[Tensor],
) -> None:
    """Append to `report` what is wrong with tables, slots, out and lse.

    Parameters
    ----------
    prefixes, starts : sequence of int
        prefix_len per request; first row per request and the end.
    blocks : list of Tensor
        Bool `[q_len, q_len]` per request.
    """
    if "k_cache" not in dump or "v_cache" not in dump:
        report.notes.append("out was not judged: the dump has no k_cache and v_cache")
        return
    for request in range(len(prefixes)):
        slots = _slots(dump, report, request, prefixes[request], starts, blocks[request])
        if slots is None:
            continue
        if "out" in dump or "lse" in dump:
            _judge_request(dump, report, request, prefixes[request], starts, blocks[request], slots)
    if "out" not in dump:
        report.notes.append("no out in the dump: only layout and addresses were judged")


def _slots(
    dump: Mapping[str, Any],
    report: DumpReport,
    request: int,
    prefix: int,
    starts: Sequence[int],
    block: Tensor,
) -> Tensor | None:
    """Token slot of each prefix token and node; -1 for nodes that nobody sees or whose K and V are fresh."""
    page = int(dump.get("page_size", 1))
    cache = dump["k_cache"]
    pool = cache.shape[0] if cache.dim() == 3 else cache.shape[0] * page
    width = block.shape[0]
    in_table = "tree_slots" not in dump and "k_tree" not in dump
    used = block.any(0)
    last = int(used.nonzero().max()) + 1 if bool(used.any()) else 0
    need = prefix + (last if in_table else 0)
    if "block_table" in dump:
        table = dump["block_table"][request]
    elif "kv_indptr" in dump and "kv_indices" in dump:
        first, stop = int(dump["kv_indptr"][request]), int(dump["kv_indptr"][request + 1])
        if not 0 <= first <= stop <= dump["kv_indices"].numel():
            report.findings.append(
                f"kv_indptr[{request}:{request + 2}] = ({first}, {stop}), must rise inside kv_indices "
                f"(0 to {dump['kv_indices'].numel()})"
            )
            return None
        table = dump["kv_indices"][first:stop]
    else:
        raise ValueError("the dump has neither block_table nor kv_indptr and kv_indices")
    if table.numel() * page < need:
        report.findings.append(
            f"request {request}: {need} tokens need {-(-need // page)} pages of {page}, its table has {table.numel()}"
        )
        return None
    positions = torch.arange(need)
    slots = torch.full((prefix + width,), -1, dtype=torch.int64)
    slots[:need] = table.long()[positions // page] * page + positions % page
    if "tree_slots" in dump and "k_tree" not in dump:
        slots[prefix:] = dump["tree_slots"][starts[request] : starts[request] + width].long()
    slots[prefix:][~used] = -1
    checked = slots[: prefix + width] if "k_tree" not in dump else slots[:prefix]
    wanted = torch.cat([torch.ones(prefix, dtype=torch.bool), used])[: len(checked)]
    bad = (((checked < 0) | (checked >= pool)) & wanted).nonzero()
    if len(bad):
        position = int(bad[0])
        report.findings.append(
            f"request {request} position {position}: token slot {int(checked[position])} (page "
            f"{int(checked[position]) // page}), the cache has {pool} slots ({pool // page} pages)"
        )
        return None
    return slots


def _rows_of(dump: Mapping[str, Any], name: str, slots: Tensor, start: int, prefix: int) -> Tensor:
    """`[prefix + q_len, kv_heads, head_dim]`; keys that nobody sees are zero."""
    cache, page = dump[f"{name}_cache"], int(dump.get("page_size", 1))
    known = slots >= 0
    at = slots[known]
    if cache.dim() == 3:
        rows = cache[at]
    elif str(dump.get("kv_layout", "NHD")) == "NHD":
        rows = cache[at // page, at % page]
    else:
        rows = cache[at // page, :, at % page]
    keys = torch.zeros(len(slots), rows.shape[1], rows.shape[2], dtype=cache.dtype)
    keys[known] = rows
    if f"{name}_tree" in dump:
        width = len(slots) - prefix
        keys[prefix:] = dump[f"{name}_tree"][start : start + width]
    return keys


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Head by head, so that a long prefix does not take a copy of K per query head."""
    from ..testing.truth import attend

    group = q.shape[1] // k.shape[1]
    parts = [
        attend(
            q[:, h * group : (h + 1) * group],
            k[:, h : h + 1].to(q.dtype),
            v[:, h : h + 1].to(q.dtype),
            mask,
            scale,
        )
        for h in range(k.shape[1])
    ]
    return torch.cat([out for out, _ in parts], dim=1), torch.cat([lse for _, lse in parts], dim=1)


def _judge_request(
    dump: Mapping[str, Any],
    report: DumpReport,
    request: int,
    prefix: int,
    starts: Sequence[int],
    block: Tensor,
    slots: Tensor,
) -> None:
    from ..testing.tolerance import LSE_EPS, compare, out_factor

    rows = slice(starts[request], starts[request + 1])
    q = dump["q"][rows]
    dtype = q.dtype
    k, v = (_rows_of(dump, name, slots, starts[request], prefix) for name in ("k", "v"))
    real = block.any(1)
    mask = torch.cat([real[:, None].expand(-1, prefix), block], dim=1)
    scale = float(dump.get("sm_scale", q.shape[-1] ** -0.5))
    want, want_lse = _attend(q.double(), k, v, mask, scale)
    plain, _ = _attend(q, k.to(dtype), v.to(dtype), mask, scale)
    _, plain_lse = _attend(q.float(), k, v, mask, scale)
    if "out" in dump:
        got = dump["out"][rows].double()
        factor = out_factor(dtype, want_lse)
        verdict = compare("out", request, got, want, plain.double(), factor, 0.0)
        if not verdict.ok:
            report.findings.append(verdict.message)
            budget = 2 * float((plain.double() - want).abs().max()) + factor * float(want.abs().max())
            named = _name_mistake(dump, got, q.double(), k, v, prefix, block, real, scale, budget)
            if named is not None:
                report.notes.append(f"request {request}: its out is that of {named}")
    if "lse" in dump:
        factor = LSE_EPS * torch.finfo(torch.float32).eps
        got = dump["lse"][rows].double()
        verdict = compare("lse", request, got, want_lse, plain_lse.double(), factor, 1.0)
        if not verdict.ok:
            report.findings.append(verdict.message)
            if compare("lse", request, got * 0.6931471805599453, want_lse, plain_lse.double(), factor, 1.0).ok:
                report.notes.append(f"request {request}: its lse is in base 2, natural log is expected")


def _name_mistake(
    dump: Mapping[str, Any],
    got: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: int,
    block: Tensor,
    real: Tensor,
    scale: float,
    budget: float,
) -> str | None:
    """A known mistake that reproduces `got` in the first head, or None."""
    width = block.shape[0]
    ones = torch.ones(width, width, dtype=torch.bool)
    full = torch.cat([real[:, None].expand(-1, prefix), block], dim=1)
    ahead = torch.ones(width, prefix, dtype=torch.bool)
    guesses: dict[str, tuple[Tensor, float]] = {
        "a causal chain: the tree was not applied": (torch.cat([ahead, ones.tril()], 1), scale),
        "rows that see every node: the tree was not applied": (torch.cat([ahead, ones], 1), scale),
        "rows that see the prefix only": (torch.cat([ahead, ~ones], 1), scale),
        "rows that do not see the prefix": (torch.cat([~ahead, block], 1), scale),
        "the transposed tree mask": (torch.cat([ahead, block.T], 1), scale),
        "sm_scale 1": (full, 1.0),
        "sm_scale 1/sqrt(head_dim)": (full, q.shape[-1] ** -0.5),
        "sm_scale 1/head_dim": (full, 1.0 / q.shape[-1]),
    }
    flat = full.reshape(-1)
    for stride in range(1, 4 * width + 64):
        if stride != width:
            index = torch.arange(width)[:, None] * (prefix + stride) + torch.arange(prefix + width)
            inside = index < flat.numel()
            read = flat[index.clamp(max=max(flat.numel() - 1, 0))] & inside
            guesses[f"mask rows read {prefix} + {stride} elements apart: a stride for width {stride}, not {width}"] = (
                read, scale)  # fmt: skip
    group = q.shape[1] // k.shape[1]
    for name, (mask, factor) in guesses.items():
        tried, _ = _attend(q[:, :group], k[:, :1], v[:, :1], mask, factor)
        rows = real.nonzero().reshape(-1)
        if len(rows) and float((tried - got[:, :group])[rows].abs().max()) <= budget:
            return name
    return None
