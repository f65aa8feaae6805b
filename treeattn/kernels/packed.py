"""Launching a kernel that Triton has compiled without Triton: its arguments lie ready as the driver reads them.

Triton's launcher takes every argument as a Python object, constants too, and converts what it passes at each launch.
:class:`PackedLaunch` keeps them converted, in one slot of memory each, and a launch writes the few that change: 1.0
instead of 2.3 µs for attention, 75 arguments of which 42 are passed, beside what the driver takes. It relies on how
Triton passes arguments, which no documentation promises; :func:`pack` therefore compares what it would pass with what
the kernel's PTX declares, and gives nothing where the two differ.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Sequence
from functools import partial
from typing import Any

from .. import driver

SLOT = 8  # bytes of an argument, whatever its type
POINTER = ("Q", "[ub]64")
TYPES = {"i32": ("i4x", "[usb]32"), "i64": ("q", "[usb]64"), "fp32": ("f4x", "[fb]32")}
"""How a slot is written, and what PTX calls such a parameter."""

SCRATCH = 2  # pointers behind the arguments, to global and profile scratch: 0 where none is needed
MAX_SHARED = 228 * 1024  # bytes up to which a launch asks the driver for nothing special
PLAIN = {"num_ctas": 1, "launch_cooperative_grid": False, "global_scratch_size": 0, "profile_scratch_size": 0}


class Block:
    """What one launch at a time hands the driver: the configuration, the arguments, and where each of them is.

    Attributes
    ----------
    config : LaunchConfig
        For its stream.
    write : callable
        Takes the leading arguments.
    launch : callable
        Launches with what is written, and returns the driver's code.
    """

    __slots__ = ("config", "launch", "params", "write")

    def __init__(self, config: driver.LaunchConfig, function: int, values: bytes, leading: struct.Struct) -> None:
        slots = ctypes.create_string_buffer(values, len(values))
        start = ctypes.addressof(slots)
        self.params = (ctypes.c_void_p * (len(values) // SLOT))(*range(start, start + len(values), SLOT))
        self.config, self.write = config, partial(leading.pack_into, slots, 0)
        at = ctypes.addressof(config), function, ctypes.addressof(self.params), None
        self.launch = partial(driver.driver().cuLaunchKernelEx, *at)


class PackedLaunch:
    """A compiled kernel, its grid and its arguments, of which a call brings the leading ones.

    Threads may share a launch: each takes a block that no other has, so their arguments do not mix. A list that is
    popped and appended to does it at a fifth of the time of a lock, and nobody waits. The driver call releases the GIL,
    as Triton's and torch's launches do: it waits where the stream's queue is full, and what it waits for may be up to
    another thread.

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
        self.compiled, self.grid, self.device_index = compiled, grid, device_index
        self.formats = {name: slot_of(kind)[0] for name, kind in types.items()}
        self.leading = struct.Struct("=" + "".join(list(self.formats.values())[:num_leading]))
        self.values = bytearray(SLOT * (len(types) + SCRATCH))
        self.free: list[Block] = []
        for name in list(types)[num_leading:]:
            self.replace(name, rest[name])

    def launch(self, stream: int, leading: tuple[float, ...]) -> None:
        """Launch on a stream of the current device, with numbers and addresses.

        Raises
        ------
        DriverError
            In the driver's words.
        """
        free = self.free
        try:
            block = free.pop()
        except IndexError:
            block = self._block()
        block.config.stream = stream
        block.write(*leading)
        code = block.launch()
        if code:
            if code == driver.INVALID_CONTEXT:
                driver.make_current(self.device_index)
                code = block.launch()
            driver.check(f"launch of {self.compiled.name}", code)
        free.append(block)

    def replace(self, name: str, value: float) -> None:
        """Give an argument another value from now on."""
        at = SLOT * list(self.formats).index(name)
        struct.pack_into("=" + self.formats[name], self.values, at, value)
        self.free = []  # blocks in use go back to the list that they are from

    def _block(self) -> Block:
        metadata = self.compiled.metadata
        serialization = driver.LaunchAttribute(driver.PROGRAMMATIC_SERIALIZATION, 1)
        config = driver.LaunchConfig(
            self.grid, (32 * metadata.num_warps, 1, 1), metadata.shared, None, ctypes.pointer(serialization),
            1 if metadata.launch_pdl else 0,
        )  # fmt: skip
        return Block(config, self.compiled.function, bytes(self.values), self.leading)


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
    facts = compiled.metadata._asdict()
    if any(facts.get(name) != value for name, value in PLAIN.items()) or "launch_pdl" not in facts:
        return None
    if tuple(compiled.packed_metadata) != (facts["num_warps"], 1, facts["shared"]):  # what Triton's launcher goes by
        return None
    if facts["shared"] > MAX_SHARED or min(grid) < 1:
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
