"""Run each framework's adapter tests in an environment of its own, with the real framework installed.

    python tests/adapters/run.py [--install] [NAME ...]

A framework is a folder here with a `requirements.txt`, by default every one. Its packages are pinned whole, and
installed without their dependencies (`pip install --no-deps`): a framework's GPU packages stay away, and stand-ins
for what cannot be installed are in the folder's `stubs/`, which its conftest puts on the path. The environment is
`.venv-adapters/NAME-HASH`, made when the hash of requirements and Python is new, and kept; older ones of that
name are removed. `--install` makes the environments alone. Where the requirements have pytest-xdist,
TREEATTN_TEST_JOBS (default 2) processes share the tests. Pytest's own closing line ends each run. The exit status is 0
only if every framework's tests passed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ENVIRONMENTS = ROOT / ".venv-adapters"
STAMP = "complete"
JOBS = os.environ.get("TREEATTN_TEST_JOBS", "2")


def frameworks() -> list[str]:
    """Names of the folders that have requirements."""
    return sorted(path.parent.name for path in HERE.glob("*/requirements.txt"))


def environment_of(name: str) -> Path:
    """Where the environment of a framework is, or will be; the path stands for its content."""
    text = (HERE / name / "requirements.txt").read_text()
    key = hashlib.sha256(f"{text}\n{sys.version}\n{ENVIRONMENTS}".encode()).hexdigest()[:12]
    return ENVIRONMENTS / f"{name}-{key}"


def make_environment(name: str) -> Path:
    """Make the environment unless it is there; a half-made one is made again."""
    path = environment_of(name)
    if (path / STAMP).exists():
        return path
    start = time.monotonic()
    for old in ENVIRONMENTS.glob(f"{name}-*"):
        shutil.rmtree(old)
    subprocess.run([sys.executable, "-m", "venv", str(path)], check=True)
    pip = [str(path / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    pip.append("--no-compile")  # which takes half of the time, of all files, where the tests import some
    subprocess.run([*pip, "-r", str(HERE / name / "requirements.txt")], check=True)
    (path / STAMP).touch()
    print(f"--- {name}: environment made in {time.monotonic() - start:.0f} s", flush=True)
    return path


def run_framework(name: str) -> int:
    """Run one framework's tests; returns pytest's exit status, which is not 0 where nothing ran."""
    path = make_environment(name)
    start = time.monotonic()
    print(f"--- {name}: {path.relative_to(ROOT)}", flush=True)
    # the conftest above this folder needs packages that only the project's own environment has
    command = [str(path / "bin" / "python"), "-m", "pytest", "-q", f"--confcutdir={HERE}", str(HERE / name)]
    if "pytest-xdist" in (HERE / name / "requirements.txt").read_text():
        command += ["-n", JOBS, "--dist", "worksteal"]
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    print(f"--- {name}: exit status {status} after {time.monotonic() - start:.0f} s", flush=True)
    return status


def main(arguments: list[str]) -> int:
    install, names = "--install" in arguments, [name for name in arguments if name != "--install"]
    known = frameworks()
    if unknown := sorted(set(names) - set(known)):
        print(f"no adapter tests for {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    for name in names or known:
        try:
            if install:
                make_environment(name)
            elif run_framework(name) != 0:
                failed.append(name)
        except subprocess.CalledProcessError as error:
            print(f"--- {name}: no environment: {error}", file=sys.stderr, flush=True)
            failed.append(name)
    return int(bool(failed) or not known)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
