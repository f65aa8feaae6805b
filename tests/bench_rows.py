"""A row of a result, as `run_workloads` makes it."""

from __future__ import annotations

from typing import Any


def fake_row(provider: str, us: float, **changes: Any) -> dict[str, Any]:
    row = {
        "kind": "gqa", "batch": 1, "q_len": 17, "prefix": 2048, "qo_heads": 32, "kv_heads": 8, "head_dim": 128,
        "page_size": 64, "kv_layout": "NHD", "kv_dtype": "bfloat16", "provider": provider, "us": us, "p20": us - 0.1,
        "p80": us + 0.1, "floor_us": 2.0, "rel_err": 1e-3, "bytes": 8560000, "flop": 1,
    }  # fmt: skip
    return {**row, **changes}
