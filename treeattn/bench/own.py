"""Workloads from a file of yours: JSON, or TOML where the name ends in .toml.

JSON is a list of objects with the fields of `Workload`, or an object with such a list as "workload"; TOML has tables
``[[workload]]``. Needed are batch, q_len and prefix; of a ragged batch `prefixes` and `q_lens` say them too. Every
error names the file and the entry, and what the field may be.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
from pathlib import Path
from typing import Any

from .workloads import DTYPES, KV_DTYPES, LARGEST_PAGE, Workload

__all__ = ["read_workloads"]

CHOICES: dict[str, tuple[Any, ...]] = {
    "kv_layout": ("NHD", "HND"), "dtype": tuple(DTYPES), "kv_dtype": tuple(KV_DTYPES), "shared_kv": (True, False),
}  # fmt: skip
LEAST = {
    "batch": 1, "q_len": 1, "prefix": 0, "qo_heads": 1, "kv_heads": 1, "head_dim": 1, "head_dim_v": 1, "page_size": 1,
    "nodes": 0, "window_left": -1, "layers": 1,
}  # fmt: skip
LISTS = {"prefixes": 0, "q_lens": 1}
"""Per request, with the least value of each."""


def read_workloads(file: str | Path) -> list[Workload]:
    """Read and check a file.

    Raises
    ------
    ValueError
        If it is not JSON or TOML, has no workload, or an entry is not one.
    OSError
        If it cannot be read.
    """
    entries = _parse(Path(file))
    if isinstance(entries, dict):
        if set(entries) != {"workload"}:
            keys = ", ".join(sorted(entries)) or "none"
            raise ValueError(f"{file}: expected one key, workload, got {keys}")
        entries = entries["workload"]
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{file}: expected a list of workloads with at least one, got {_told(entries)}")
    found = []
    for index, entry in enumerate(entries):
        try:
            found.append(_workload(entry))
        except ValueError as error:
            raise ValueError(f"{file}, entry {index}: {error}") from None
    return found


def _parse(path: Path) -> Any:
    try:
        text = path.read_text()
        if path.suffix == ".toml":
            return _toml().loads(text)
        return json.loads(text)
    except ValueError as error:  # of JSON, of TOML, of UTF-8
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise ValueError(f"{path} is not {kind}: {error}") from None


def _toml() -> Any:
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise NotImplementedError(
        "reading TOML needs Python 3.11 or the package tomli (pip install 'treeattn[bench]'); JSON works everywhere"
    )


def _workload(entry: Any) -> Workload:
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object of fields, got {_told(entry)}")
    known = [field.name for field in dataclasses.fields(Workload)]
    for field in entry:
        if field not in known:
            near = difflib.get_close_matches(str(field), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"no field {field}; {hint}")
    for field, value in entry.items():
        _check_value(field, value)
    fields = {"kind": "own", **entry}
    for field in LISTS:
        if field in fields:
            fields[field] = tuple(fields[field])
    _complete(fields)
    work = Workload(**fields)
    _check_whole(work)
    return work


def _told(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_value(field: str, value: Any) -> None:
    """One value for itself: its type and range."""
    if field in CHOICES:
        # 1 == True: the type counts too
        if not any(type(value) is type(choice) and value == choice for choice in CHOICES[field]):
            raise ValueError(f"{field} is {_told(value)}, must be one of {', '.join(map(_told, CHOICES[field]))}")
    elif field == "kind":
        if not isinstance(value, str) or not value:
            raise ValueError(f"kind is {_told(value)}, must be a word")
    elif field in LISTS:
        least = LISTS[field]
        if not isinstance(value, list) or not value or not all(_is_int(one) and one >= least for one in value):
            raise ValueError(f"{field} is {_told(value)}, must be a list of ints of {least} or more, one a request")
    elif not _is_int(value) or value < LEAST[field]:
        raise ValueError(f"{field} is {_told(value)}, must be an int of {LEAST[field]} or more")


def _complete(fields: dict[str, Any]) -> None:
    """Fill in what a ragged batch says by its lists; what stands there twice must agree."""
    for field, name, said in (
        ("prefixes", "prefix", lambda values: sum(values) // len(values)), ("q_lens", "q_len", max),
    ):  # fmt: skip
        if field not in fields:
            continue
        for key, value in (("batch", len(fields[field])), (name, said(fields[field]))):
            if fields.setdefault(key, value) != value:
                raise ValueError(f"{key} is {fields[key]}, but {field} says {value}")
    if missing := [field for field in ("batch", "q_len", "prefix") if field not in fields]:
        raise ValueError(f"no {', no '.join(missing)}")


def _check_whole(work: Workload) -> None:
    """What several fields say together."""
    if work.qo_heads % work.kv_heads:
        raise ValueError(f"qo_heads is {work.qo_heads}, must be a multiple of kv_heads, {work.kv_heads}")
    if LARGEST_PAGE % work.page_size:
        raise ValueError(f"page_size is {work.page_size}, must divide {LARGEST_PAGE}")
    if work.nodes is not None and work.nodes > work.q_len:
        raise ValueError(f"nodes is {work.nodes}, more than q_len, {work.q_len}")
    if work.shared_kv and work.dim_v > work.head_dim:
        raise ValueError(f"head_dim_v is {work.dim_v}, more than head_dim, {work.head_dim}, of which V is a part")
