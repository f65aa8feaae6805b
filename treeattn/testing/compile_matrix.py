"""Compile a Triton kernel for any chip on a machine without a GPU, and say whether it fits that chip.

Triton asks its active driver two things before it compiles: which target, and which device. A stand-in
driver answers for the chip in question, `kernel.warmup` then goes through the same path as a launch
(argument specialisation, options, every pass, ptxas) and stops before the binary is loaded. Shared memory
comes from the kernel's metadata; registers and spills from ptxas's own report.

What this does not show: that the kernel is right, or fast. It shows that a shipped configuration builds
with the installed Triton, stays inside the chip's shared and tensor memory, and does not spill.

Triton must not have been imported under TRITON_INTERPRET=1, and the process should do nothing else with
Triton: use a process of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treeattn.config import SHARED_PER_SM, SHARED_RESERVED

SHARED_LIMIT_BYTES: dict[int, int] = {chip: total - SHARED_RESERVED for chip, total in SHARED_PER_SM.items()}
"""Shared memory that one block may ask for, by compute capability."""

TENSOR_MEMORY_COLUMNS = 512
"""Columns of tensor memory of an SM of sm_100 and sm_103."""

_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class CompileReport:
    """What one compiled kernel needs of its chip.

    Attributes
    ----------
    arch
        Compute capability, 90 for sm_90.
    shared_bytes
        Dynamic shared memory of a block.
    registers
        Registers of a thread, the most of any function in the binary.
    spill_bytes
        Spill stores plus spill loads, bytes, over all functions of the binary.
    cubin_bytes
        Size of the binary.
    tensor_memory_columns
        Columns of Blackwell tensor memory; 0 elsewhere.
    """

    arch: int
    shared_bytes: int
    registers: int
    spill_bytes: int
    cubin_bytes: int
    tensor_memory_columns: int = 0

    @property
    def shared_limit_bytes(self) -> int:
        """Shared memory that the chip gives one block."""
        return SHARED_LIMIT_BYTES[self.arch]

    @property
    def fits(self) -> bool:
        """Whether a launch of this binary would find the shared and tensor memory it asks for."""
        fits_shared = self.shared_bytes <= self.shared_limit_bytes
        return fits_shared and self.tensor_memory_columns <= TENSOR_MEMORY_COLUMNS


def parse_ptxas_log(log: str) -> tuple[int, int]:
    """Read registers (largest) and spill bytes (stores and loads, summed) from a `ptxas -v` log.

    Raises
    ------
    ValueError
        The log has no register count, so nothing was compiled or ptxas's wording changed.
    """
    registers = [int(count) for count in _REGISTERS.findall(log)]
    spills = [int(stores) + int(loads) for stores, loads in _SPILLS.findall(log)]
    if not registers or not spills:
        raise ValueError(
            f"ptxas log has {len(registers)} register counts and {len(spills)} spill counts, "
            f"expected one of each for every function; it reads: {log[:500]!r}"
        )
    return max(registers), sum(spills)


class _StandInDriver:
    """Answers Triton's questions about the current device as a chip of compute capability `arch` would."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def _compiling_for(arch: int) -> Iterator[None]:
    """Stand-in driver, forced compilation with ptxas's report on stdout, and an empty private cache."""
    from triton.runtime.driver import driver

    with tempfile.TemporaryDirectory(prefix="treeattn-compile-") as cache:
        settings = {
            "TRITON_ALWAYS_COMPILE": "1",
            "TRITON_DUMP_PTXAS_LOG": "1",
            "TRITON_CACHE_DIR": cache,
        }
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        driver.set_active(_StandInDriver(arch))
        try:
            yield
        finally:
            # Not reset_active: that builds the default driver, which fails where there is no GPU.
            driver._active = None
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def compile_for(
    arch: int, jit_fn: Any, args: Sequence[Any] | Mapping[str, Any], /, **options: Any
) -> CompileReport:
    """Compile `jit_fn` for the chip `arch` with the installed Triton, and say what it needs.

    Parameters
    ----------
    arch
        Compute capability: one of `SHARED_LIMIT_BYTES`.
    jit_fn
        A function decorated with `triton.jit`.
    args
        One value for each parameter, in order or by name: a `torch.dtype` stands for a pointer to that type
        (aligned to 16 bytes), a number or None for itself. Numbers are specialised as in a launch: 1
        becomes a constant, multiples of 16 are known to be that.
    **options
        Compile options and constexprs by name: `num_warps`, `num_stages`, `maxnreg`, ...

    Raises
    ------
    ValueError
        `arch` is not a chip whose limits are known here.
    RuntimeError
        Triton runs in its interpreter, which compiles nothing.
    """
    kernel, log = compile_kernel(arch, jit_fn, args, **options)
    registers, spill_bytes = parse_ptxas_log(log)
    return CompileReport(
        arch=arch,
        shared_bytes=kernel.metadata.shared,
        registers=registers,
        spill_bytes=spill_bytes,
        cubin_bytes=len(kernel.asm["cubin"]),
        tensor_memory_columns=getattr(kernel.metadata, "tmem_size", None) or 0,
    )


def compile_kernel(
    arch: int, jit_fn: Any, args: Sequence[Any] | Mapping[str, Any], /, **options: Any
) -> tuple[Any, str]:
    """Triton's compiled kernel, not loaded, and ptxas's log; parameters and errors as for :func:`compile_for`."""
    if arch not in SHARED_LIMIT_BYTES:
        raise ValueError(f"arch must be one of {', '.join(map(str, SHARED_LIMIT_BYTES))}, got {arch}")
    if not hasattr(jit_fn, "device_caches"):
        raise RuntimeError(
            f"{type(jit_fn).__name__} cannot be compiled: Triton was imported with TRITON_INTERPRET=1, "
            "or the function is not decorated with triton.jit"
        )
    from triton.runtime.jit import MockTensor

    positional, named = ((), args) if isinstance(args, Mapping) else (args, {})
    named = {name: MockTensor.wrap_dtype(value) for name, value in named.items()}
    log = io.StringIO()
    with _compiling_for(arch):
        jit_fn.device_caches.pop(arch, None)
        with contextlib.redirect_stdout(log):
            kernel = jit_fn.warmup(*positional, grid=(1,), **named, **options)
        jit_fn.device_caches.pop(arch, None)
    return kernel, log.getvalue()
