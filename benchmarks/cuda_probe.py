"""Where a wrong CUDA kernel is wrong: weights, keys, dims and the lse seen apart, by blocks of rows and columns.

V as a unit matrix makes the output the weights themselves; V that is the number of its dim shows which columns of V
arrive where; a random problem of several tiles shows the rest. What came and what should have come is kept for a look
later.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# head dim, query heads of the one KV head, nodes (a chain), prefix: one and several tiles for each count of warpgroups
SHAPES = {
    "c1": (128, 8, 8, 64), "c1-tiles": (128, 8, 8, 330), "c2": (128, 4, 17, 64), "c2-tiles": (128, 4, 17, 330),
    "c3": (128, 8, 17, 64), "c3-tiles": (128, 8, 17, 330), "d64": (64, 8, 8, 64), "lone": (128, 1, 1, 0),
}  # fmt: skip
WRONG = 0.02


def attend(q: Tensor, k: Tensor, v: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Out and lse of the cuda backend: q `[nodes, heads, dim]`, k and v `[keys, dim]`, pages of 64 in reverse order."""
    import treeattn

    nodes, heads, dim = q.shape
    pages = -(-k.shape[0] // 64)
    table = torch.arange(pages - 1, -1, -1, device="cuda", dtype=torch.int32)[None]
    caches = []
    for rows in (k, v):
        cache = torch.full((pages * 64, dim), float("nan"), device="cuda", dtype=rows.dtype)
        cache[: rows.shape[0]] = rows
        caches.append(cache.view(pages, 64, 1, dim).flip(0).contiguous())
    parents = torch.arange(-1, nodes - 1, device="cuda", dtype=torch.int32)[None]
    layout = treeattn.TreeLayout.from_parents(parents, torch.tensor([prefix], device="cuda", dtype=torch.int32))
    step = treeattn.plan(layout, treeattn.PagedKV(block_table=table, page_size=64), heads, 1, dim, backend="cuda")
    lse = torch.full((nodes, heads), float("nan"), device="cuda")
    out = torch.full_like(q, float("nan"))
    treeattn.tree_attention(q, caches[0], caches[1], step, out=out, lse=lse)
    return out.double().cpu().flatten(0, 1), lse.double().cpu().flatten()


def picture(wrong: Tensor) -> str:
    """Blocks of 8 rows and 8 columns: `.` all right, `x` some wrong, `#` all wrong."""
    lines = []
    for rows in torch.split(wrong.double(), 8):
        blocks = [float(block.mean()) for block in torch.split(rows, 8, 1)]
        lines.append("".join("." if share == 0 else "#" if share == 1 else "x" for share in blocks))
    return " ".join(lines)


def probe(name: str) -> tuple[list[str], dict[str, Any]]:
    """Problems of a shape: a line or three for each; what came and what should have."""
    dim, heads, nodes, prefix = SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    keys = prefix + nodes
    q = torch.randn(nodes, heads, dim, generator=generator)
    k = torch.randn(keys, dim, generator=generator)
    unit = torch.zeros(keys, dim)
    unit[torch.arange(keys), torch.arange(keys) % dim] = 1
    values = {
        "weights": unit, "dims": (torch.arange(dim) / dim).expand(keys, dim),
        "random": torch.randn(keys, dim, generator=generator),
    }  # fmt: skip
    q, k = q.bfloat16(), k.bfloat16()
    scores = (q.double().flatten(0, 1) @ k.double().T) * dim**-0.5
    row_node = torch.arange(nodes).repeat_interleave(heads)
    scores = scores.masked_fill(torch.arange(keys)[None] > prefix + row_node[:, None], float("-inf"))
    lse = scores.logsumexp(1)
    lines: list[str] = []
    kept: dict[str, Any] = {}
    for what, v in values.items():
        v = v.bfloat16()
        want = scores.softmax(1) @ v.double()
        out, got_lse = attend(q.cuda(), k.cuda(), v.cuda(), prefix)
        wrong, wrong_lse = ~((out - want).abs() <= WRONG), ~((got_lse - lse).abs() <= 1e-3)
        kept[what] = {"out": out.float(), "want": want.float(), "lse": got_lse, "want_lse": lse}
        bad, bad_lse = int(wrong.sum()), int(wrong_lse.sum())
        lines.append(f"  {name} {what}: {bad} of {wrong.numel()} wrong; lse {bad_lse} of {lse.numel()}")
        if bad or bad_lse:
            numbers = [
                f"{float(got):.4f} for {float(true):.4f}" for got, true in zip(got_lse[:4], lse[:4], strict=True)
            ]
            lines.append(f"    out by 8 rows (spaces) and 8 dims: {picture(wrong)}")
            lines.append(f"    lse by 8 rows: {picture(wrong_lse[:, None])}; rows 0 to 3: {', '.join(numbers)}")
    return lines, kept
