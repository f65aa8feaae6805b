"""Which backends there are, whether each works here, and which one ``"auto"`` takes."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import NamedTuple

import torch

from .capabilities import Asked, missing, refusal
from .config import KernelConfig

BACKENDS = ("reference", "torch", "triton", "cuda")
INTERPRETER_PROGRAMS = 6  # few, since each costs 10 ms there; items are cut, and 2, 3 and 6 row tiles make lanes
HOPPER = 90
"""Compute capability, times ten, of the chips that the kernels of ``csrc`` are for."""
SHORT_KEYS, SHORTER_KEYS = 24576, 4096
"""Keys of one request up to which Triton's kernels are the faster ones where a step is a single item, or a few."""
ITEM_ROWS, WIDE_ROWS, FEW_ITEMS = 192, 129, 8
"""Packed rows of an item of the CUDA kernels, at most, and of one that takes three warpgroups; items that are a few."""


class Size(NamedTuple):
    """What the host knows of how large a step may become.

    Attributes
    ----------
    requests : int
    max_q_len : int
    room : int
        Keys that the pages of a request may hold.
    """

    requests: int
    max_q_len: int
    room: int


def choose_backend(
    device_type: str, arch: int, asked: Asked, size: Size | None = None, *, cuda_works: bool = True
) -> str:
    """The backend that ``"auto"`` takes; a pure function, of measurements on an H200 in ``benchmarks/results``.

    Parameters
    ----------
    device_type : str
    arch : int
        Compute capability times ten.
    asked : Asked
        What is known before the calls: the geometry.
    size : Size, optional
        Without it a step is not a small one.
    cuda_works : bool
        Whether the kernels of ``csrc`` are there, or a compiler of them.

    Examples
    --------
    >>> from treeattn.geometry import Geometry
    >>> [choose_backend("cuda", arch, Asked(Geometry.of(32, 8, 128))) for arch in (80, 90)]
    ['triton', 'cuda']
    """
    if device_type != "cuda":
        return "torch"
    if arch != HOPPER or not cuda_works or missing("cuda", device_type, asked) is not None:
        return "triton"
    # In the rows of h200-gqa.json, h200-mla.json and h200-fp8.json the CUDA kernels take at most 1.03 of Triton's time,
    # but for three of 136 packed rows: one item, (1, 17, 2048, 8/1) 1.45, 10.5 µs against 7.3, and (1, 17, 16384, 8/1)
    # 1.06; eight items, (1, 17, 2048, 64/8) 1.16. With a prefix of 131072 the one item takes 0.88, with 16384 the eight
    # take 0.80; lines between these cross 1 at 34,000 and 4,900 keys.
    # (Pages of one slot under wide trees, of which a plan's size says nothing, take 1.04: h200-further.json.)
    geometry = asked.geometry
    if size is not None and not geometry.shared_kv and size.requests == 1:
        rows, items = size.max_q_len * geometry.group, geometry.num_kv_heads
        if items == 1 and rows <= ITEM_ROWS and size.room <= SHORT_KEYS:
            return "triton"
        if items <= FEW_ITEMS and WIDE_ROWS <= rows <= ITEM_ROWS and size.room <= SHORTER_KEYS:
            return "triton"
    return "cuda"


def interpreted() -> bool:
    """Whether Triton runs its kernels in the interpreter (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def available_backends(device: torch.device | str = "cuda") -> dict[str, str | None]:
    """Every backend by name, with None if it works on `device`, else the reason why not."""
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        return dict.fromkeys(BACKENDS, "torch sees no CUDA device")
    own = {"triton": _triton_reason(device.type), "cuda": _cuda_reason(device)}
    return {"reference": None, "torch": None, **own}


def _triton_reason(device_type: str) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device_type == "cpu" and not interpreted():
        return "on a CPU Triton runs only in its interpreter: set TRITON_INTERPRET=1 before triton is first imported"
    if device_type not in ("cpu", "cuda"):
        return f"no Triton configuration for device type {device_type!r}"
    return None


def _cuda_reason(device: torch.device) -> str | None:
    """Why the kernels of ``csrc`` do not work on a device."""
    if device.type != "cuda":
        return f"CUDA kernels do not run on device type {device.type!r}"
    if (reason := _triton_reason(device.type)) is not None:
        return f"its plan and its merge are Triton kernels, and {reason}"
    if arch(device) != HOPPER:
        return f"its kernels are for compute capability 9.0 (Hopper), this is {arch(device) / 10}"
    from .cuda.binary import asked_macros, require
    from .cuda.build import BuildError

    try:
        require(asked_macros())
    except BuildError as error:
        return str(error)
    return None


@cache
def _has_cuda_code(device: torch.device, macros: str | None) -> bool:
    """Whether the kernels of ``csrc`` work on a device; a no is remembered too, for what asks in every step."""
    return _cuda_reason(device) is None


def cuda_works_on(chip: int) -> bool:
    """Whether the kernels of ``csrc`` work on chips like this; taken for granted where none is here."""
    here = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    if here is None or arch(here) != chip:
        return chip == HOPPER
    return _has_cuda_code(here, os.environ.get("TREEATTN_CUDA_MACROS"))


def chosen(backend: str, device: torch.device, asked: Asked, size: Size | None = None) -> str:
    """Name of the backend that is meant: `backend` itself, or for "auto" what :func:`choose_backend` takes here."""
    if backend != "auto":
        return backend
    hopper = device.type == "cuda" and arch(device) == HOPPER
    works = hopper and _has_cuda_code(device, os.environ.get("TREEATTN_CUDA_MACROS"))
    return choose_backend(device.type, arch(device), asked, size, cuda_works=works)


def why_not(backend: str, device: torch.device, asked: Asked, size: Size | None = None) -> str | None:
    """Text of the error where a backend (or "auto") cannot do what is asked on a device; None if it can.

    Raises
    ------
    ValueError
        For a name that is no backend.
    """
    return _chosen_or_why_not(backend, device, asked, size)[1]


def resolve(backend: str, device: torch.device, asked: Asked, size: Size | None = None) -> str:
    """Name of the backend to use.

    Raises
    ------
    ValueError
        For a name that is no backend.
    NotImplementedError
        If the backend cannot do what is asked (:mod:`treeattn.capabilities`); "auto" never raises it on a CPU.
    """
    name, words = _chosen_or_why_not(backend, device, asked, size)
    if words is not None:
        raise NotImplementedError(words)
    return name


def _chosen_or_why_not(
    backend: str, device: torch.device, asked: Asked, size: Size | None
) -> tuple[str, str | None]:
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(BACKENDS)}, got {backend!r}")
    name, reason = chosen(backend, device, asked, size), None
    if name == "triton":
        reason = _triton_reason(device.type)
    elif name == "cuda":
        if backend == "auto":  # which is only taken where it works and covers this
            return name, None
        reason = _cuda_reason(device)
    return name, refusal(name, device.type, asked, reason)


@cache
def arch(device: torch.device) -> int:
    """Compute capability times ten; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_programs(device: torch.device, config: KernelConfig) -> int:
    """Programs that share a group's work on a device."""
    if device.type != "cuda":
        return INTERPRETER_PROGRAMS
    return num_sms(device) * config.programs_per_sm
