"""Launching a kernel that Triton has compiled without Triton: its arguments lie ready as the driver reads them.

Triton's launcher takes every argument as a Python object and converts all of them at each launch, 85 to 97 for a
kernel of attention. :class:`PackedLaunch` keeps them converted, in one slot of memory each, and a launch writes the few
that change. It relies on how Triton passes arguments, which no documentation promises; :func:`pack` therefore compares
what it would pass with what the kernel's PTX declares, and gives nothing where the two differ.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Sequence
from typing import Any

from .. import driver

SLOT = 8  # bytes of an argument, whatever its type
POINTER = ("Q", "[ub]64")
TYPES = {"i32": ("i4x", "[usb]32"), "i64": ("q", "[usb]64"), "fp32": ("f4x", "[fb]32")}
"""How a slot is written, and what PTX calls such a parameter."""

SCRATCH = 2  # pointers behind the arguments, to global and profile scratch: 0 where none is needed
MAX_SHARED = 228 * 1024  # bytes up to which a launch asks the driver for nothing special
PLAIN = {"num_ctas": 1, "launch_cooperative_grid": False, "global_scratch_size": 0, "profile_scratch_size": 0}


class PackedLaunch:
    """A compiled kernel, its grid and its arguments, of which a call brings the leading ones.

    A lock makes writing and launching one step: threads that share a launch would mix their arguments otherwise. The
    driver call releases the GIL, as Triton's and torch's launches do: it waits where the stream's queue is full, and
    what it waits for may be up to another thread.

    Parameters
    ----------
    compiled : triton.compiler.CompiledKernel
        Kept alive: Triton 3.9 unloads its code with it.
    grid : tuple of int
    device_index : int
        CUDA device that it was loaded on.
    types : dict
        Triton's type of every argument that is passed, in order.
    num_leading : int
        How many of them a call brings.
    rest : dict
        Values of the others, numbers and addresses; names that are not passed are ignored.
    """

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, ...],
        device_index: int,
        types: dict[str, str],
        num_leading: int,
        rest: dict[str, Any],
    ) -> None:
        self.compiled, self.function, self.device_index = compiled, compiled.function, device_index
        self.formats = {name: slot_of(kind)[0] for name, kind in types.items()}
        self.block = ctypes.create_string_buffer(SLOT * (len(types) + SCRATCH))
        slots = range(ctypes.addressof(self.block), ctypes.addressof(self.block) + len(self.block), SLOT)
        self.params = (ctypes.c_void_p * len(slots))(*slots)
        metadata = compiled.metadata
        self.serialization = driver.LaunchAttribute(driver.PROGRAMMATIC_SERIALIZATION, 1)
        self.config = driver.LaunchConfig(
            grid, (32 * metadata.num_warps, 1, 1), metadata.shared, None, ctypes.pointer(self.serialization),
            1 if metadata.launch_pdl else 0,
        )  # fmt: skip
        self.config_at, self.params_at = ctypes.addressof(self.config), ctypes.addressof(self.params)
        self.write = struct.Struct("=" + "".join(list(self.formats.values())[:num_leading])).pack_into
        self.launch = driver.driver().cuLaunchKernelEx
        self.lock = threading.Lock()
        for name in list(types)[num_leading:]:
            self.replace(name, rest[name])

    def __call__(self, stream: int, *leading: float) -> None:
        """Launch on a stream of the current device, with numbers and addresses.

        Raises
        ------
        DriverError
            In the driver's words.
        """
        with self.lock:
            self.config.stream = stream
            self.write(self.block, 0, *leading)
            code = self.launch(self.config_at, self.function, self.params_at, None)
            if code == driver.INVALID_CONTEXT:
                driver.make_current(self.device_index)
                code = self.launch(self.config_at, self.function, self.params_at, None)
        if code:
            driver.check(f"launch of {self.compiled.name}", code)

    def replace(self, name: str, value: float) -> None:
        """Give an argument another value from now on."""
        at = SLOT * list(self.formats).index(name)
        with self.lock:
            struct.pack_into("=" + self.formats[name], self.block, at, value)


def pack(
    compiled: Any, grid: tuple[int, ...], device_index: int, leading: Sequence[str], rest: dict[str, Any]
) -> PackedLaunch | None:
    """A compiled kernel made ready, or None if it has, or might have, anything that is not passed here.

    Parameters
    ----------
    compiled, grid, device_index, rest
        As :class:`PackedLaunch` has them.
    leading : sequence of str
        Names of the arguments that a call brings: the kernel's first ones.
    """
    metadata = compiled.metadata
    if any(getattr(metadata, name, None) != value for name, value in PLAIN.items()):
        return None
    if not all(hasattr(metadata, name) for name in ("num_warps", "shared", "launch_pdl")):
        return None
    if metadata.shared > MAX_SHARED or min(grid) < 1:
        return None
    types = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
    slots = [slot_of(kind) for kind in types.values()]
    if None in slots or list(types)[: len(leading)] != list(leading):
        return None
    expected = [kind for _, kind in slots] + [POINTER[1]] * SCRATCH
    if not re.fullmatch(" ".join(expected), " ".join(parameters(compiled.asm.get("ptx", ""), compiled.name))):
        return None
    return PackedLaunch(compiled, grid, device_index, types, len(leading), rest)


def slot_of(kind: Any) -> tuple[str, str] | None:
    """The entry of :data:`TYPES` for a type of Triton's, None where there is none."""
    return POINTER if str(kind).startswith("*") else TYPES.get(kind)


def parameters(ptx: str, name: str) -> list[str]:
    """What PTX calls the parameters of a kernel, in order, such as u64 and f32; empty where the kernel is not found."""
    entry = re.search(rf"\.entry\s+{re.escape(name)}\s*\(([^)]*)\)", ptx)
    return re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", entry[1]) if entry else []
