"""What the stages of cuda_first.py share: the macros of checked builds, and the file that results go to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

OUT = Path(os.environ.get("OUT", "benchmarks/results"))
CHECKED = "TREEATTN_TRAP_AFTER_MS=2000"
CANARY = f"{CHECKED} TREEATTN_CANARY=1 TREEATTN_DELAY=1"
WORKERS = 12
"""Processes that share the GPU where Triton's compiler, not the GPU, takes the time."""


def saved() -> dict[str, Any]:
    path = OUT / "cuda-first.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def save(stage: str, result: Any) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    fresh = OUT / "cuda-first.json.new"
    fresh.write_text(json.dumps(saved() | {stage: result}, indent=1, default=str))
    fresh.replace(OUT / "cuda-first.json")
