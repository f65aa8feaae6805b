"""What each backend covers: one table, from which refusals, the sweep of ``treeattn check`` and the README are made.

Pure data and pure functions of it. Whether a package or a chip is there is :mod:`treeattn.backends`; whether arguments
fit each other is :mod:`treeattn.geometry` and :mod:`treeattn.scoring`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .geometry import FP8_DTYPES, Geometry

_HALVES_AND_SINGLE = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Asked:
    """What a step, and the calls with it, ask of a backend.

    Attributes
    ----------
    geometry : Geometry
    windowed_cache : bool
        The addresses have a ``kv_start``.
    logits_soft_cap : float
    sinks : bool
    """

    geometry: Geometry
    windowed_cache: bool = False
    logits_soft_cap: float = 0.0
    sinks: bool = False


class Option(NamedTuple):
    """An option of attention that a backend has or lacks.

    Attributes
    ----------
    title : str
        For the README; Markdown.
    asked : callable
        What is asked of it, in the words of the caller's arguments; None where it is not asked for.
    """

    title: str
    asked: Callable[[Asked], str | None]


def _fp8(dtype: torch.dtype) -> Callable[[Asked], str | None]:
    return lambda asked: f"kv_dtype {dtype}" if asked.geometry.kv_dtype == dtype else None


def _unlike_dims(asked: Asked) -> str | None:
    geometry = asked.geometry
    if geometry.shared_kv or geometry.head_dim_v == geometry.head_dim:
        return None
    return f"head_dim_v {geometry.head_dim_v} beside head_dim {geometry.head_dim}"


def _window(asked: Asked) -> str | None:
    return f"window_left {asked.geometry.window_left}" if asked.geometry.window_left >= 0 else None


OPTIONS: dict[str, Option] = {
    "fresh_tree": Option(
        "fresh K and V of the nodes (`k_tree`, `v_tree`)",
        lambda asked: "fresh_tree" if asked.geometry.fresh_tree else None,
    ),
    "fp8_e4m3": Option("FP8 caches, e4m3 (a scale per tensor or head)", _fp8(torch.float8_e4m3fn)),
    "fp8_e5m2": Option("FP8 caches, e5m2 (a scale per tensor or head)", _fp8(torch.float8_e5m2)),
    "unlike_dims": Option("V of another head dim (`head_dim_v`)", _unlike_dims),
    "shared_kv": Option(
        "V as a part of K: MLA (`shared_kv`)",
        lambda asked: "shared_kv" if asked.geometry.shared_kv else None,
    ),
    "window": Option("sliding window (`window_left`)", _window),
    "windowed_cache": Option(
        "caches that keep a window (`kv_start`)",
        lambda asked: "kv_start" if asked.windowed_cache else None,
    ),
    "part": Option(
        "prefix or tree alone, to merge (`part`)",
        lambda asked: f"part {asked.geometry.part!r}" if asked.geometry.part != "all" else None,
    ),
    "soft_cap": Option(
        "soft cap (`logits_soft_cap`)",
        lambda asked: f"logits_soft_cap {asked.logits_soft_cap}" if asked.logits_soft_cap else None,
    ),
    "sinks": Option(
        "attention sinks (`sinks`, `sinks_in_lse`)",
        lambda asked: "sinks" if asked.sinks else None,
    ),
    "batch_invariant": Option(
        "bits that do not depend on the batch (`batch_invariant`)",
        lambda asked: "batch_invariant" if asked.geometry.batch_invariant else None,
    ),
}
"""Every option that some backend may lack, by name."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What one backend covers.

    Attributes
    ----------
    devices : dict of str to str
        By device type, where it runs, in words.
    dtypes : tuple of torch.dtype
        Of q and out.
    max_head_dim : int or None
        Largest head_dim and head_dim_v; None for any.
    head_dims : tuple of int or None
        The head dims that it covers, where these are a few; None for all up to `max_head_dim`.
    max_shared_dims : tuple of int or None
        Largest head_dim and head_dim_v with ``shared_kv``, where they differ from `max_head_dim`.
    shared_dims : tuple of int or None
        head_dim and head_dim_v with ``shared_kv``, where it covers one pair.
    fp8_dims : tuple of int or None
        The head dims that it covers with an FP8 cache, where these are fewer; `shared_dims` it covers with one too.
    options : frozenset of str
        Keys of :data:`OPTIONS`.
    not_together : tuple of (str, str)
        Pairs of these that it has apart only.
    lacks_on : dict of (str, torch.dtype) to str
        Device types on which a dtype does not work, and why.
    numbers, purpose : str
        For the README: how it computes, and what for.
    """

    devices: dict[str, str]
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int | None = None
    head_dims: tuple[int, ...] | None = None
    max_shared_dims: tuple[int, int] | None = None
    shared_dims: tuple[int, int] | None = None
    fp8_dims: tuple[int, ...] | None = None
    options: frozenset[str] = frozenset(OPTIONS)
    not_together: tuple[tuple[str, str], ...] = ()
    lacks_on: dict[tuple[str, torch.dtype], str] = field(default_factory=dict)
    numbers: str
    purpose: str


CAPABILITIES: dict[str, Capabilities] = {
    "triton": Capabilities(
        devices={
            "cuda": "NVIDIA GPU, compute capability 8.0 or newer",
            "cpu": "CPU in Triton's interpreter (`TRITON_INTERPRET=1`), for tests",
        },
        dtypes=_HALVES_AND_SINGLE,
        max_head_dim=256,
        max_shared_dims=(576, 512),
        lacks_on={("cpu", torch.bfloat16): "Triton's interpreter computes bfloat16 products wrongly"},
        numbers="accumulates in float32; float32 has true float32 products",
        purpose="serving; `auto` on other GPUs, and for what `cuda` lacks",
    ),
    "torch": Capabilities(
        devices={"cpu": "CPU", "cuda": "GPU"},
        dtypes=(*_HALVES_AND_SINGLE, torch.float64),
        numbers="computes in float32 (float64 for float64)",
        purpose="`auto` on a CPU",
    ),
    "reference": Capabilities(
        devices={"cpu": "CPU", "cuda": "GPU"},
        dtypes=(*_HALVES_AND_SINGLE, torch.float64),
        numbers="computes in float32 (float64 for float64)",
        purpose="reading and checking",
    ),
    "cuda": Capabilities(
        devices={"cuda": "NVIDIA GPU of compute capability 9.0 (Hopper)"},
        dtypes=(torch.float16, torch.bfloat16),
        head_dims=(64, 128, 256),
        shared_dims=(576, 512),
        fp8_dims=(128,),
        options=frozenset(OPTIONS) - {"unlike_dims"},
        not_together=(("shared_kv", "window"), ("shared_kv", "soft_cap")),
        numbers="accumulates in float32",
        purpose="serving; `auto` on Hopper",
    ),
}
"""By backend, in the order in which a refusal names another: cuda, which covers the least, stands last."""


def missing(backend: str, device_type: str, asked: Asked) -> str | None:
    """What a backend lacks of what is asked, in words; None if it covers it."""
    covers, geometry = CAPABILITIES[backend], asked.geometry
    if device_type not in covers.devices:
        return f"it runs on {' and '.join(covers.devices)}, not on {device_type}"
    if geometry.dtype not in covers.dtypes:
        return f"it computes {_names(covers.dtypes)}, not {_name(geometry.dtype)}"
    if (reason := covers.lacks_on.get((device_type, geometry.dtype))) is not None:
        return reason
    wanted = {name: words for name, option in OPTIONS.items() if (words := option.asked(asked)) is not None}
    for name, words in wanted.items():
        if name not in covers.options:
            return f"it lacks {OPTIONS[name].title.split(' (')[0]}, asked for with {words}"
    for one, other in covers.not_together:
        if one in wanted and other in wanted:
            return f"it has {wanted[one]} and {wanted[other]} apart only"
    return _too_wide(covers, geometry)


def _too_wide(covers: Capabilities, geometry: Geometry) -> str | None:
    if geometry.shared_kv and covers.shared_dims is not None:
        dims = (geometry.head_dim, geometry.head_dim_v)
        wanted = "with shared_kv it covers head_dim {} and head_dim_v {}, got {} and {}"
        return None if dims == covers.shared_dims else wanted.format(*covers.shared_dims, *dims)
    if covers.head_dims is not None and geometry.head_dim not in covers.head_dims:
        return f"it covers head_dim {_either(covers.head_dims)}, got {geometry.head_dim}"
    if covers.fp8_dims is not None and geometry.kv_dtype in FP8_DTYPES and geometry.head_dim not in covers.fp8_dims:
        return f"with an FP8 cache it covers head_dim {_either(covers.fp8_dims)}, got {geometry.head_dim}"
    most = (covers.max_head_dim, covers.max_head_dim)
    if geometry.shared_kv and covers.max_shared_dims is not None:
        most = covers.max_shared_dims
    for name, limit in zip(("head_dim", "head_dim_v"), most, strict=True):
        if limit is not None and getattr(geometry, name) > limit:
            return f"it covers {name} up to {limit}, got {getattr(geometry, name)}"
    return None


def nearest(device_type: str, asked: Asked, but: str) -> str | None:
    """Another backend that covers what is asked on this device, the preferred one first; None if there is none."""
    others = (name for name in CAPABILITIES if name != but)
    return next((name for name in others if missing(name, device_type, asked) is None), None)


def refusal(backend: str, device_type: str, asked: Asked, reason: str | None = None) -> str | None:
    """Text of the error where a backend cannot do what is asked, with the nearest one that can; None if it can.

    Parameters
    ----------
    reason : str, optional
        Why it does not work here at all, whatever is asked.
    """
    reason = reason or missing(backend, device_type, asked)
    if reason is None:
        return None
    other = nearest(device_type, asked, but=backend)
    return f"backend {backend!r} cannot do this: {reason}" + (f"; backend={other!r} can" if other else "")


def support_table() -> str:
    """The table as Markdown: a row for each capability, a column for each backend."""
    rows: list[tuple[str, ...]] = [
        ("", *(f"`{name}`" for name in CAPABILITIES)),
        ("---", *(":-:" for _ in CAPABILITIES)),
        ("for", *(covers.purpose for covers in CAPABILITIES.values())),
        ("device", *("; ".join(covers.devices.values()) for covers in CAPABILITIES.values())),
        ("dtypes", *(_names(covers.dtypes) for covers in CAPABILITIES.values())),
        ("numbers", *(covers.numbers for covers in CAPABILITIES.values())),
        ("head dims", *map(_dims, CAPABILITIES.values())),
    ]
    for name, option in OPTIONS.items():
        rows.append((option.title, *(_cell(covers, name) for covers in CAPABILITIES.values())))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _either(numbers: tuple[int, ...]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def _dims(covers: Capabilities) -> str:
    if covers.head_dims is not None:
        mla = "" if covers.shared_dims is None else "; MLA {} and {}".format(*covers.shared_dims)
        fp8 = "" if covers.fp8_dims is None else f" (FP8 {_either(covers.fp8_dims)})"
        return _either(covers.head_dims) + fp8 + mla
    if covers.max_head_dim is None:
        return "any"
    text = f"1 to {covers.max_head_dim}"
    if covers.max_shared_dims is not None and "shared_kv" in covers.options:
        text += f"; MLA to {covers.max_shared_dims[0]} and {covers.max_shared_dims[1]}"
    return text


def _cell(covers: Capabilities, name: str) -> str:
    if name not in covers.options:
        return "no"
    partners = [other for pair in covers.not_together if name in pair for other in pair if other != name]
    return "yes" + (f", not with {', '.join(f'`{other}`' for other in partners)}" if partners else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(map(_name, dtypes))
