"""Device code on disk (``TREEATTN_CACHE_DIR``, by default ``~/.cache/treeattn``), safe among processes.

A file is the code and its SHA-256 behind it. It appears whole or not at all (a rename), the processes that want the
same one wait for each other at a file lock, and one that is damaged is made anew. Where nothing can be kept, nothing
is.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUM_BYTES = hashlib.sha256().digest_size


def cache_dir() -> Path | None:
    """Where code is kept; None where there is no home to keep it in."""
    if named := os.environ.get("TREEATTN_CACHE_DIR"):
        return Path(named)
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "treeattn"
    try:
        return Path.home() / ".cache" / "treeattn"
    except RuntimeError:  # a user without an entry in the password file, as in containers
        return None


def read(path: Path) -> bytes | None:
    """The code of a file; None if it is not there, or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    code = content[:-SUM_BYTES]
    return code if code and hashlib.sha256(code).digest() == content[-SUM_BYTES:] else None


def write(path: Path, code: bytes) -> bool:
    """Keep code, in one stroke; whether that worked."""
    partial = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        partial.write_bytes(code + hashlib.sha256(code).digest())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among processes, where the file system has locks."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_suffix(".lock"), "w")  # noqa: SIM115 (closed below, which releases it)
    except OSError:
        yield
        return
    with lock:
        with suppress(OSError):  # some network file systems have none: the rename keeps files whole
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def kept(name: str, make: Callable[[], bytes]) -> bytes:
    """Code by the name of what it is made of and by: from the cache, or made now and kept."""
    folder = cache_dir()
    if folder is None:
        return make()
    path = folder / name
    if (code := read(path)) is not None:
        return code
    with _locked(path):
        if (code := read(path)) is None:  # another process may have made it meanwhile
            code = make()
            write(path, code)
        return code
