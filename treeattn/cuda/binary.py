"""Which device code a kernel is loaded from: the wheel's fat binary, else compiled code, from the cache or made now.

Compilers are asked in order, nvcc and then NVRTC, each for what it left in the cache first; code that another compiler
left there comes last. What cannot be had, or what the driver does not take, is passed over, and the reason kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..driver import DriverError
from . import cache as disk
from . import shipped
from .build import (
    COMPILERS,
    NVCC_OPTIONS,
    NVRTC_OPTIONS,
    SUFFIXES,
    BuildError,
    Compiler,
    digest_of,
    find_compiler,
    source_dir,
    target_of,
)

T = TypeVar("T")

SHIPPED = "the fat binary of the wheel"
refused: dict[str, str] = {}
"""Why a place whose code was asked for did not serve, by place; such as a driver too old for the wheel's compiler."""


class Binary(NamedTuple):
    """Code for the driver, and where it is from, in words."""

    place: str
    code: bytes


def source_names() -> tuple[str, ...]:
    """The files that kernels are in."""
    return tuple(sorted(path.name for path in source_dir().glob("*.cu")))


@cache
def shipped_binary() -> Binary:
    """The wheel's fat binary; BuildError where there is none that fits."""
    found = shipped.read(source_dir())
    return Binary(f"{found.path}, by {found.compiler} for {', '.join(found.targets)}", found.code)


def cache_name(source: Path, macros: Sequence[str], compiler: str = "*") -> str:
    """File of a cubin in the cache: what it is made of, and by which compiler (by default a pattern for any)."""
    headers = [path for path in source.parent.iterdir() if path.suffix in SUFFIXES[1:]]
    made_of = digest_of([source, *headers], (*NVCC_OPTIONS, *NVRTC_OPTIONS, *macros))
    return f"{source.stem}-{target_of(source.name)}-{made_of[:24]}-{compiler}.cubin"


def _name_of(source: Path, macros: Sequence[str], compiler: Compiler) -> str:
    return cache_name(source, macros, f"{compiler.name}-{compiler.version}")


def compiled(source_name: str, macros: Sequence[str], compiler: str) -> Binary:
    """The cubin of a source file by a compiler, from the cache or made now.

    Parameters
    ----------
    source_name : str
        File of ``csrc``.
    macros : sequence of str
        ``NAME=VALUE``.
    compiler : {"nvcc", "nvrtc"}

    Raises
    ------
    BuildError
        If the compiler is not there, or fails.
    """
    source, chosen = source_dir() / source_name, find_compiler(compiler)
    code = disk.kept(_name_of(source, macros, chosen), lambda: chosen.compile(source, macros))
    return Binary(f"{source_name}, compiled by {chosen.name} {chosen.version}", code)


def cached(source_name: str, macros: Sequence[str]) -> Binary:
    """The cubin of a source file that some compiler left in the cache; BuildError if none did."""
    source, folder = source_dir() / source_name, disk.cache_dir()
    if folder is not None:
        for path in sorted(folder.glob(cache_name(source, macros))):
            if (code := disk.read(path)) is not None:
                return Binary(str(path), code)
    raise BuildError(f"the cache ({folder or 'there is none: this user has no home'}) does not hold {source_name}")


def asked_macros() -> tuple[str, ...]:
    """Macros of a checked build, from ``TREEATTN_CUDA_MACROS``; the wheel's fat binary has none."""
    return tuple(os.environ.get("TREEATTN_CUDA_MACROS", "").split())


def candidates(source_name: str, macros: Sequence[str]) -> Iterator[tuple[str, Callable[[], Binary]]]:
    """Where code for a source file may come from, in order: a place, and what gets it or raises BuildError."""
    if not macros:
        yield SHIPPED, shipped_binary
    for name in COMPILERS:
        yield name, partial(compiled, source_name, macros, name)
    yield "the cache", partial(cached, source_name, macros)


def load_first(source_name: str, macros: Sequence[str], load: Callable[[Binary], T]) -> T:
    """What `load` makes of the first code of a source file that can be had and that the driver takes.

    Raises
    ------
    BuildError
        If there is none; says why for each place.
    """
    reasons = {}
    for place, get in candidates(source_name, macros):
        try:
            return load(get())
        except (BuildError, DriverError) as error:
            reasons[place] = refused[place] = str(error)
    listed = "".join(f"\n  {place}: {reason}" for place, reason in reasons.items())
    raise BuildError(f"no device code for {source_name} could be loaded:{listed}")


def expected(source_name: str, macros: Sequence[str]) -> str:
    """Which code of a source file would be loaded, in words; nothing is compiled.

    Raises
    ------
    BuildError
        If there is none and no compiler either: says what is missing, and what to install.
    """
    reasons = []
    if not macros:
        try:
            if SHIPPED not in refused:
                return f"shipped: {shipped_binary().place}"
            reasons.append(refused[SHIPPED])
        except BuildError as error:
            reasons.append(str(error))
    source, folder = source_dir() / source_name, disk.cache_dir()
    for name in COMPILERS:
        try:
            chosen = find_compiler(name)
        except BuildError as error:
            reasons.append(str(error))
            continue
        by = f"by {chosen.name} {chosen.version}"
        if folder is None:
            return f"compiled at set-up {by}, every time: this user has no home for a cache"
        path = folder / _name_of(source, macros, chosen)
        return f"cache: {path}" if disk.read(path) is not None else f"compiled at first use {by}, to be kept as {path}"
    try:
        return f"cache: {cached(source_name, macros).place}"
    except BuildError as error:
        reasons.append(str(error))
    raise BuildError(f"there is neither code for its kernels nor a compiler: {'; '.join(reasons)}")


@cache
def require(macros: tuple[str, ...]) -> None:
    """Raise the BuildError of :func:`expected` if it has one for some source file; a success is remembered."""
    for source_name in source_names():
        expected(source_name, macros)
