"""Which backends there are, whether each works here, and which one ``"auto"`` takes."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

from .capabilities import Asked, refusal
from .config import KernelConfig

BACKENDS = ("reference", "torch", "triton", "cuda")
INTERPRETER_PROGRAMS = 6  # few, since each costs 10 ms there; items are cut, and 2, 3 and 6 row tiles make lanes


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
    if arch(device) != 90:
        return f"its kernels are for compute capability 9.0 (Hopper), this is {arch(device) / 10}"
    from .cuda.binary import asked_macros, require
    from .cuda.build import BuildError

    try:
        require(asked_macros())
    except BuildError as error:
        return str(error)
    return None


def resolve(backend: str, device: torch.device, asked: Asked) -> str:
    """Name of the backend to use.

    Raises
    ------
    ValueError
        For a name that is no backend.
    NotImplementedError
        If the backend cannot do what is asked (:mod:`treeattn.capabilities`); "auto" never raises it on a CPU.
    """
    name = backend
    if backend == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    if name not in BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(BACKENDS)}, got {backend!r}")
    reason = None
    if name == "triton":
        reason = _triton_reason(device.type)
    elif name == "cuda":
        reason = _cuda_reason(device)
    if (words := refusal(name, device.type, asked, reason)) is not None:
        raise NotImplementedError(words)
    return name


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
