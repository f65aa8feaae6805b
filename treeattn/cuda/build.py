"""From the sources of ``csrc`` to device code: ``nvcc`` where there is one, else NVRTC through CuPy.

What is done with the code is elsewhere: the order in which places are asked in ``binary.py``, the cache in
``cache.py``, the fat binary of a wheel in ``shipped.py``. ``setup.py`` reads this where no torch is: it imports nothing
but the standard library.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple

TARGETS = {"sm_90a": "*_sm90*.cu"}
"""What is compiled, and for which chips; wgmma and setmaxnreg exist for this very chip only."""
ITEMS, CURSOR_BYTES, PART_BYTES = 4, 128, 28  # of csrc/ring.cuh and csrc/schedule.cuh
ATOM_BYTES = 1024
SUFFIXES = (".cu", ".cuh", ".h")


def nvcc_options(output: str, *targets: str) -> tuple[str, ...]:
    """What nvcc is told, but for macros and files.

    >>> nvcc_options("-cubin", "sm_90a")[-1]
    '-gencode=arch=compute_90a,code=sm_90a'
    """
    chips = (target.removeprefix("sm_") for target in targets)
    return ("-std=c++17", "-O3", output, *(f"-gencode=arch=compute_{chip},code=sm_{chip}" for chip in chips))


NVCC_OPTIONS = nvcc_options("-cubin", "sm_90a")
FATBIN_OPTIONS = nvcc_options("-fatbin", *TARGETS)
NVRTC_OPTIONS = ("--std=c++17", "--gpu-architecture=sm_90a")


class Compiler(NamedTuple):
    """A compiler that was found: name, version, where it is, and how it makes a cubin of a source file and macros."""

    name: str
    version: str
    place: str
    compile: Callable[[Path, Sequence[str]], bytes]


def _handed_bytes(stages: int) -> int:
    """What ``Shared::Layout`` (csrc/ring.cuh) has behind Q: barriers, items, and parts of items that are cut."""
    barriers = 4 * stages + 2 + 4 * ITEMS
    return -(-8 * barriers // 16) * 16 + (1 + ITEMS) * CURSOR_BYTES + 2 * PART_BYTES + 5 * 4


def _atoms(count: int) -> int:
    """Bytes in whole atoms of the swizzle."""
    return -(-count // ATOM_BYTES) * ATOM_BYTES


@dataclass(frozen=True)
class KernelShape:
    """The arguments of a ``TREEATTN_ATTENTION`` line of a source file, but for the name."""

    dtype: str
    head_dim: int
    consumers: int
    keys: int
    stages: int
    q_steps: int
    blocks: int
    options: int

    rows: ClassVar[int] = 64
    """Of a consumer."""

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * (self.consumers + 1)

    @property
    def layout(self) -> str:
        """The template of csrc that lies over shared memory."""
        return f"Shared<{self.head_dim}, {self.consumers}, {self.keys}, {self.stages}, {self.q_steps}>"

    @property
    def shared_bytes(self) -> int:
        """Size of ``Shared::Layout`` (csrc/ring.cuh), which a compile test compares with the compiler's."""
        ring = 2 * self.stages * self.keys * self.head_dim * 2
        q = self.consumers * self.rows * self.head_dim * 2
        return _atoms(ring + q + _handed_bytes(self.stages))


@dataclass(frozen=True)
class Fp8WideShape(KernelShape):
    """The same of a ``TREEATTN_FP8_WIDE`` line."""

    products: str
    format: str
    staged: int

    @property
    def layout(self) -> str:
        """The template of csrc that lies over shared memory."""
        ring = f"{self.head_dim}, {self.consumers}, {self.keys}, {self.stages}"
        return f"Fp8WideShared<{ring}, {self.staged}, {self.q_steps}>"

    @property
    def shared_bytes(self) -> int:
        """Size of ``Fp8WideShared::Layout`` (csrc/fp8_wide_ring.cuh), compared with the compiler's by a test."""
        return _atoms(super().shared_bytes + self.staged * (2 * self.keys * self.head_dim + 2 * 8))


@dataclass(frozen=True)
class Fp8Shape:
    """The same of a ``TREEATTN_FP8`` line."""

    dtype: str
    head_dim: int
    rows: int
    keys: int
    stages: int
    blocks: int
    format: str

    consumers: ClassVar[int] = 1
    threads: ClassVar[int] = 256

    @property
    def layout(self) -> str:
        """The template of csrc that lies over shared memory."""
        return f"Fp8Shared<{self.head_dim}, {self.rows}, {self.keys}, {self.stages}>"

    @property
    def shared_bytes(self) -> int:
        """Size of ``Fp8Shared::Layout`` (csrc/fp8_ring.cuh), which a compile test compares with the compiler's."""
        ring = 2 * self.stages * self.keys * self.head_dim
        q = self.rows * self.head_dim * 2
        weights = 2 * self.rows * self.keys * 2
        exchange = self.rows * (4 * 4 + 4 * 4 + 8 + 2 * 2 * 4)
        return _atoms(_atoms(ring + q + _handed_bytes(self.stages)) + weights + exchange)


@dataclass(frozen=True)
class MlaShape:
    """The same of a ``TREEATTN_MLA`` line."""

    dtype: str
    q_steps: int
    latents: int
    ropes: int

    blocks: ClassVar[int] = 1
    threads: ClassVar[int] = 512

    @property
    def layout(self) -> str:
        """The template of csrc that lies over shared memory."""
        return f"MlaShared<{self.q_steps}, {self.latents}, {self.ropes}>"

    @property
    def shared_bytes(self) -> int:
        """Size of ``MlaShared::Layout`` (csrc/mla_ring.cuh), which a compile test compares with the compiler's."""
        kept = 9 - self.q_steps // 4
        panels = 4 * self.latents + self.ropes + kept + 2
        handed = 2 * (64 + 64 + 4) * 4
        barriers = 4 * self.latents + 2 * self.ropes + 4 + 2 * ITEMS
        rest = -(-(handed + 8 * barriers) // 16) * 16 + (1 + ITEMS) * CURSOR_BYTES + 4
        return _atoms(panels * 64 * 128 + rest)


@dataclass(frozen=True)
class MlaFp8Shape(MlaShape):
    """The same of a ``TREEATTN_MLA_FP8`` line."""

    format: str

    @property
    def layout(self) -> str:
        """The template of csrc that lies over shared memory."""
        return f"MlaFp8Shared<{self.q_steps}, {self.latents}, {self.ropes}>"

    @property
    def shared_bytes(self) -> int:
        """Size of ``MlaFp8Shared::Layout`` (csrc/mla_fp8_ring.cuh): six panels of the cache more than `MlaShape`."""
        return super().shared_bytes + 6 * 64 * 64


@dataclass(frozen=True)
class MlaMergeShape:
    """The same of a ``TREEATTN_MLA_MERGE`` line."""

    dtype: str

    blocks: ClassVar[int] = 4
    threads: ClassVar[int] = 128
    layout: ClassVar[str] = ""
    shared_bytes: ClassVar[int] = 0


class BuildError(RuntimeError):
    """The kernels could not be built; the message says what is missing, or holds the compiler's words."""


def source_dir() -> Path:
    """Where the CUDA sources are: beside the package's modules if installed, at the top of a checkout."""
    package = Path(__file__).resolve().parent.parent
    for place in (package / "csrc", package.parent / "csrc"):
        if (place / "params.h").is_file():
            return place
    raise BuildError(f"the CUDA sources are neither in {package / 'csrc'} nor in {package.parent / 'csrc'}")


Shape = KernelShape | Fp8Shape | MlaShape | MlaMergeShape
SHAPES: dict[str, Callable[..., Shape]] = {
    "ATTENTION": KernelShape, "FP8": Fp8Shape, "FP8_WIDE": Fp8WideShape, "MLA": MlaShape, "MLA_FP8": MlaFp8Shape,
    "MLA_MERGE": MlaMergeShape,
}  # fmt: skip


def kernels_in(source_name: str) -> dict[str, Shape]:
    """The kernels of a source file by name."""
    text = (source_dir() / source_name).read_text()
    found: dict[str, Shape] = {}
    for macro, line in re.findall(rf"^TREEATTN_({'|'.join(SHAPES)})\(([^)]*)\)", text, re.MULTILINE):
        name, *arguments = re.split(r",\s*", line)
        found[name] = SHAPES[macro](*(int(word) if word.isdecimal() else word for word in arguments))
    return found


def find_nvcc() -> str | None:
    """Path of nvcc: on PATH, under CUDA_HOME, or in its usual place."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))


def _run_nvcc(nvcc: str, options: Sequence[str], source: Path) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels"
        command = [nvcc, *options, "-o", str(out), str(source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return out.read_bytes()
            words = f"{done.stdout}{done.stderr}"
        except OSError as error:
            words = str(error)
        raise BuildError(f"{' '.join(command)} failed:\n{words}")


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


def _nvcc() -> Compiler:
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError("nvcc is neither on PATH nor under CUDA_HOME or /usr/local/cuda")

    def compile_one(source: Path, macros: Sequence[str]) -> bytes:
        return _run_nvcc(nvcc, [*NVCC_OPTIONS, *(f"-D{macro}" for macro in macros)], source)

    return Compiler("nvcc", nvcc_version(nvcc), nvcc, compile_one)


def _nvrtc() -> Compiler:
    if importlib.util.find_spec("cupy") is None:
        raise BuildError(
            "the package cupy, which brings NVRTC, is not installed "
            "(pip install 'treeattn[cuda13]', or [cuda12] beside a torch for CUDA 12)"
        )
    try:
        from cupy.cuda import nvrtc

        return Compiler("nvrtc", ".".join(map(str, nvrtc.getVersion())), "through CuPy", _run_nvrtc)
    except Exception as error:  # CuPy raises what its loader raises
        missing = "CuPy finds no NVRTC (pip install nvidia-cuda-nvrtc, or nvidia-cuda-nvrtc-cu12 for CUDA 12)"
        raise BuildError(f"{missing}: {error}") from error


@cache
def find_compiler(name: str) -> Compiler:
    """A compiler by name, one of `COMPILERS`.

    Raises
    ------
    BuildError
        If it is not there; says what was looked for.
    """
    return {"nvcc": _nvcc, "nvrtc": _nvrtc}[name]()


COMPILERS = ("nvcc", "nvrtc")
"""In the order in which they are tried."""


def nvcc_version(nvcc: str) -> str:
    """Version of an nvcc.

    Raises
    ------
    BuildError
        If it does not run.
    """
    try:
        words = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{nvcc} does not run: {error}") from error
    found = re.search(r"\bV(\d+[.\d]*)", words)
    if found is None:
        raise BuildError(f"{nvcc} --version says no version: {words[:200]!r}")
    return found[1]


def target_of(source_name: str) -> str:
    """What a source file is compiled for, by its name."""
    for target, pattern in TARGETS.items():
        if fnmatch(source_name, pattern):
            return target
    raise BuildError(f"{source_name} names no target: there are {', '.join(TARGETS.values())}")


def build_fatbin(sources: Path, nvcc: str) -> bytes:
    """One fat binary of all kernels: for each target an image with its source files as one unit.

    A fat binary has room for one image of a chip, so the files cannot be compiled apart.

    Raises
    ------
    BuildError
        If nvcc fails.
    """
    lines = []
    for target, pattern in TARGETS.items():
        lines.append(f"#if __CUDA_ARCH__ == {int(re.sub('[^0-9]', '', target)) * 10}")
        lines += [f'#include "{path.name}"' for path in sorted(sources.glob(pattern))]
        lines.append("#endif")
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder) / "all_kernels.cu"
        unit.write_text("\n".join(lines) + "\n")
        return _run_nvcc(nvcc, [*FATBIN_OPTIONS, "-I", str(sources)], unit)


def digest_of(paths: Sequence[Path], options: Sequence[str]) -> str:
    """SHA-256 in hex over files (names and bytes) and options: what code is made of."""
    digest = hashlib.sha256()
    for part in (*options, "files"):
        digest.update(f"{part}\0".encode())
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
