"""From the sources of ``csrc`` to a cubin for sm_90a: ``nvcc`` where there is one, else NVRTC through CuPy.

A cubin is kept on disk (``TREEATTN_CACHE_DIR``, by default ``~/.cache/treeattn``) under a key of sources, options and
compiler. Processes that build the same one wait for each other at a file lock, and a file appears whole or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

TARGET = "sm_90a"  # wgmma and setmaxnreg exist for this very chip only
NVCC_OPTIONS = ("-std=c++17", "-O3", "-cubin", "-gencode=arch=compute_90a,code=sm_90a")
ITEMS, CURSOR_BYTES = 4, 128  # of csrc/ring.cuh and csrc/schedule.cuh
ATOM_BYTES = 1024
NVRTC_OPTIONS = ("--std=c++17", f"--gpu-architecture={TARGET}")


class Compiler(NamedTuple):
    """A compiler that was found: its name, its version, and how it makes a cubin of a source file and macros."""

    name: str
    version: str
    compile: Callable[[Path, Sequence[str]], bytes]


class KernelShape(NamedTuple):
    """The arguments of a ``TREEATTN_ATTENTION`` line of a source file, but for the name."""

    dtype: str
    head_dim: int
    consumers: int
    keys: int
    stages: int
    q_steps: int
    blocks: int
    options: int

    @property
    def shared_bytes(self) -> int:
        """Size of ``Shared::Layout`` (csrc/ring.cuh), which a compile test compares with the compiler's."""
        ring = 2 * self.stages * self.keys * self.head_dim * 2
        q = self.consumers * 64 * self.head_dim * 2
        barriers = 4 * self.stages + 2 + 4 * ITEMS
        rest = -(-8 * barriers // 16) * 16 + (1 + ITEMS) * CURSOR_BYTES
        return -(-(ring + q + rest) // ATOM_BYTES) * ATOM_BYTES


class BuildError(RuntimeError):
    """The kernels could not be built; the message says what is missing, or holds the compiler's words."""


def source_dir() -> Path:
    """Where the CUDA sources are: beside the package's modules if installed, at the top of a checkout."""
    package = Path(__file__).resolve().parent.parent
    for place in (package / "csrc", package.parent / "csrc"):
        if (place / "params.h").is_file():
            return place
    raise BuildError(f"the CUDA sources are neither in {package / 'csrc'} nor in {package.parent / 'csrc'}")


def kernels_in(source_name: str) -> dict[str, KernelShape]:
    """The kernels of a source file by name."""
    text = (source_dir() / source_name).read_text()
    found = {}
    for line in re.findall(r"^TREEATTN_ATTENTION\(([^)]*)\)", text, re.MULTILINE):
        name, dtype, *numbers = re.split(r",\s*", line)
        found[name] = KernelShape(dtype, *map(int, numbers))
    return found


def cache_dir() -> Path:
    """Where cubins are kept."""
    named = os.environ.get("TREEATTN_CACHE_DIR")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else home / "treeattn"


def find_nvcc() -> str | None:
    """Path of nvcc: on PATH, under CUDA_HOME, or in its usual place."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))


def _run_nvcc(nvcc: str, source: Path, macros: Sequence[str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        command = [nvcc, *NVCC_OPTIONS, *(f"-D{macro}" for macro in macros), "-o", str(cubin), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return cubin.read_bytes()


def _run_nvrtc(source: Path, macros: Sequence[str]) -> bytes:
    from cupy.cuda import nvrtc

    headers = [path for path in sorted(source.parent.iterdir()) if path.suffix in (".cuh", ".h")]
    texts, names = [path.read_bytes() for path in headers], [path.name.encode() for path in headers]
    program = nvrtc.createProgram(source.read_text(), source.name, texts, names)
    try:
        nvrtc.compileProgram(program, [*NVRTC_OPTIONS, *(f"-D{macro}" for macro in macros)])
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise BuildError(f"NVRTC could not compile {source}: {error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


@cache
def find_compiler(kind: str | None = None) -> Compiler:
    """The compiler to use: "nvcc" or "nvrtc", or the first that is there.

    Raises
    ------
    BuildError
        If there is none; says what was looked for.
    """
    nvcc = find_nvcc() if kind in (None, "nvcc") else None
    if nvcc is not None:
        version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
        return Compiler("nvcc", version, lambda source, macros: _run_nvcc(nvcc, source, macros))
    problem = "the package cupy is not installed (pip install 'treeattn[cuda13]')"
    if kind in (None, "nvrtc") and importlib.util.find_spec("cupy") is not None:
        try:
            from cupy.cuda import nvrtc

            return Compiler("nvrtc", ".".join(map(str, nvrtc.getVersion())), _run_nvrtc)
        except Exception as error:  # CuPy raises what its loader raises
            problem = f"CuPy finds no NVRTC: {error}"
    reasons = {"nvcc": "nvcc is neither on PATH nor under CUDA_HOME or /usr/local/cuda", "nvrtc": problem}
    looked_for = [words for name, words in reasons.items() if kind in (None, name)]
    raise BuildError(f"no CUDA compiler: {', and '.join(looked_for)}")


def cache_key(source: Path, macros: Sequence[str], compiler: Compiler) -> str:
    """Name of a cubin: what it is made of and by."""
    digest = hashlib.sha256()
    for part in (compiler.name, compiler.version, TARGET, *NVCC_OPTIONS, *NVRTC_OPTIONS, *macros, source.name):
        digest.update(f"{part}\0".encode())
    for path in sorted(source.parent.iterdir()):
        if path == source or path.suffix in (".cuh", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{source.stem}-{TARGET}-{digest.hexdigest()[:24]}"


def build(source_name: str, macros: Sequence[str] = (), compiler: str | None = None) -> bytes:
    """The cubin of a source file, from the cache or built now.

    Parameters
    ----------
    source_name : str
        File of ``csrc``.
    macros : sequence of str
        ``NAME=VALUE``.
    compiler : {"nvcc", "nvrtc"}, optional

    Raises
    ------
    BuildError
        If there is no compiler, or it fails.
    """
    source, chosen = source_dir() / source_name, find_compiler(compiler)
    folder = cache_dir()
    cubin = folder / f"{cache_key(source, macros, chosen)}.cubin"
    if cubin.is_file():
        return cubin.read_bytes()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(cubin.with_suffix(".lock"), "w")  # noqa: SIM115 (closed below, which releases it)
    except OSError:
        return chosen.compile(source, macros)  # nowhere to keep it
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not cubin.is_file():
            made = chosen.compile(source, macros)
            partial = cubin.with_suffix(f".{os.getpid()}.tmp")
            partial.write_bytes(made)
            partial.replace(cubin)
        return cubin.read_bytes()
