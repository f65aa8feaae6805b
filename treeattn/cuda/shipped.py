"""The fat binary that ``setup.py`` puts beside the sources of a wheel, where there is an nvcc, and its record.

It is taken only if the record says that it was made of the very sources and options that are here, and if it is whole.
``setup.py`` reads this where no torch is.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from .build import FATBIN_OPTIONS, SUFFIXES, TARGETS, BuildError, build_fatbin, digest_of, nvcc_version

BINARY, RECORD = "treeattn.fatbin", "treeattn.json"


class Shipped(NamedTuple):
    """A fat binary that fits: its file, the compiler that made it, the chips that it is for, its content."""

    path: Path
    compiler: str
    targets: tuple[str, ...]
    code: bytes


def files_of(sources: Path) -> list[Path]:
    """The source files of a folder: what a wheel holds, and what its fat binary is made of."""
    return sorted(path for path in sources.iterdir() if path.suffix in SUFFIXES)


def made_of(sources: Path) -> str:
    """What a fat binary of a folder's sources is made of."""
    return digest_of(files_of(sources), FATBIN_OPTIONS)


def make(sources: Path, nvcc: str) -> None:
    """Compile a folder's sources, and put fat binary and record beside them.

    Raises
    ------
    BuildError
        If nvcc fails; nothing is written then.
    """
    version, code = nvcc_version(nvcc), build_fatbin(sources, nvcc)
    record = {
        "made_of": made_of(sources),
        "compiler": f"nvcc {version}",
        "targets": list(TARGETS),
        "sha256": hashlib.sha256(code).hexdigest(),
    }
    (sources / BINARY).write_bytes(code)
    (sources / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def read(sources: Path) -> Shipped:
    """The fat binary beside a folder's sources.

    Raises
    ------
    BuildError
        If there is none, or it does not fit; says why.
    """
    binary = sources / BINARY
    if not binary.is_file():
        raise BuildError(f"no fat binary was built with this installation ({binary} is not there)")
    try:
        record = json.loads((sources / RECORD).read_text())
        code = binary.read_bytes()
        stated = record["made_of"], record["sha256"]
        compiler, targets = str(record["compiler"]), tuple(map(str, record["targets"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(f"the fat binary {binary} has no readable record beside it: {error!r}") from error
    if stated[0] != made_of(sources):
        raise BuildError(f"the fat binary {binary} was made of other sources or options")
    if stated[1] != hashlib.sha256(code).hexdigest():
        raise BuildError(f"the fat binary {binary} is damaged")
    return Shipped(binary, compiler, targets, code)
