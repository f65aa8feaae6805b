"""Device code of csrc made here, for a machine with a GPU whose minutes are few.

Here, where nvcc is (about ten minutes on two cores)::

    PYTHONPATH=. python benchmarks/gpu_cubins.py make .gpu-cubins

There, before anything loads a kernel::

    PYTHONPATH=. python benchmarks/gpu_cubins.py keep .gpu-cubins

`make` compiles each source file plain, checked, with the canaries of the tests, and as racecheck wants it. `keep` puts
the code into the cache of treeattn, under the name of the compiler that is asked first there, which then has nothing to
do. Code of other sources is never taken: a file's name in the cache tells what it is made of.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from treeattn.cuda import cache
from treeattn.cuda.binary import compiled, source_names
from treeattn.cuda.build import COMPILERS, BuildError, find_compiler

ARCHIVE = "cubins.tar.xz"
CHECKED = ("TREEATTN_TRAP_AFTER=3000000",)
BUILDS = ((), CHECKED, (*CHECKED, "TREEATTN_CANARY=1", "TREEATTN_DELAY=1"), ("TREEATTN_LANES_ARRIVE=1",))
"""Macros as the tests of tests/gpu/test_cuda_gpu.py and racecheck (gpu_two.sh) ask for them."""


def make(folder: Path, jobs: int) -> None:
    """Compile all of csrc into an archive."""
    with tempfile.TemporaryDirectory() as made:
        os.environ["TREEATTN_CACHE_DIR"] = made
        wanted = [(name, macros) for macros in BUILDS for name in source_names()]
        with ThreadPoolExecutor(jobs) as pool:
            for made_now in pool.map(lambda one: compiled(one[0], one[1], "nvcc"), wanted):
                print(made_now.place, flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(folder / ARCHIVE, "w:xz") as archive:
            for path in sorted(Path(made).glob("*.cubin")):
                archive.add(path, path.name)


def first_compiler() -> str:
    """How the cache names the compiler that is asked first here."""
    for name in COMPILERS:
        try:
            found = find_compiler(name)
        except BuildError:
            continue
        return f"{found.name}-{found.version}"
    return "none"


def keep(folder: Path) -> int:
    """Put the code of an archive into the cache of this machine; how many files."""
    place = cache.cache_dir()
    if place is None:
        raise SystemExit("this user has no home for a cache: set TREEATTN_CACHE_DIR")
    place.mkdir(parents=True, exist_ok=True)
    compiler, count = first_compiler(), 0
    with tarfile.open(folder / ARCHIVE) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is None:
                continue
            made_of = member.name.rsplit("-", 2)[0]  # behind it: name and version of the compiler
            (place / f"{made_of}-{compiler}.cubin").write_bytes(content.read())
            count += 1
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "keep"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.what == "make":
        make(options.folder, options.jobs)
    else:
        print(f"{keep(options.folder)} files kept in {cache.cache_dir()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
