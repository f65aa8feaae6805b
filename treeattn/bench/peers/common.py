"""What several peers ask of a workload, and how a library is looked for."""

from __future__ import annotations

import importlib
from types import ModuleType

from ..workloads import Workload

__all__ = ["import_first", "import_problem", "unsuited_16_bit"]


def unsuited_16_bit(work: Workload) -> str | None:
    """Why a workload is not for a plain kernel: 16 bits, K and V of one head dim, every row sees the prefix."""
    if work.fp8:
        return "it takes no FP8 cache beside a q of 16 bits"
    if work.shared_kv or work.dim_v != work.head_dim:
        return "it is given K and V of one head dim here"
    if work.dtype == "float32":
        return "it takes 16 bits only"
    if work.nodes is not None:
        return "its padding rows see the prefix"
    return "its window counts rows, not depth" if work.window_left >= 0 else None


def import_first(*names: str) -> ModuleType:
    """The first of some modules that imports.

    Raises
    ------
    ImportError
        If none does; the message has what each of them said.
    """
    said = []
    for name in names:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            said.append(f"{name} does not import: {type(error).__name__}: {error}")
    raise ImportError("; ".join(said))


def import_problem(*names: str) -> str | None:
    """Why none of some modules can be used, or None."""
    try:
        import_first(*names)
    except ImportError as error:
        return str(error)
    return None
