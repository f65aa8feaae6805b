"""The wheel: pure Python, complete, typed, with the CUDA sources and the metadata a user's resolver reads.

A wheel with a fat binary is built in tests/compile/test_cuda_wheel.py.
"""

from __future__ import annotations

import email.message
import email.parser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUBPACKAGES = ("adapters", "bench", "demo", "kernels", "testing")


def copy_of_sources(to: Path) -> Path:
    """What a build reads, in a folder that it may write."""
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    for name in ("treeattn", "csrc"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    return to


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built with the setuptools that is here (no network) and no CUDA toolkit in reach, from what an sdist holds."""
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77 or newer")
    source, target = copy_of_sources(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("wheel")
    environment = {name: value for name, value in os.environ.items() if name != "TREEATTN_BUILD_CUDA"}
    environment["CUDA_HOME"] = str(source / "no-toolkit")
    environment["PATH"] = os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if not Path(folder, "nvcc").exists()
    )
    quiet = [sys.executable, "setup.py", "-q"]
    subprocess.run([*quiet, "sdist", "-d", str(target)], cwd=source, env=environment, check=True, capture_output=True)
    (sdist,) = target.glob("*.tar.gz")
    shutil.unpack_archive(sdist, target)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(target))
    unpacked = target / sdist.name.removesuffix(".tar.gz")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", *options, str(unpacked)], check=True, env=environment
    )
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.parser.Parser().parsestr(wheel.read(name).decode())


def test_wheel_is_pure_python(wheel: zipfile.ZipFile) -> None:
    assert Path(str(wheel.filename)).name.endswith("-py3-none-any.whl")
    assert not [name for name in wheel.namelist() if name.endswith((".so", ".cubin", ".fatbin"))]


def test_wheel_holds_every_module_and_no_tests(wheel: zipfile.ZipFile) -> None:
    shipped = {name for name in wheel.namelist() if name.startswith("treeattn/")}
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "treeattn").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert shipped == sources | {f"treeattn/csrc/{path.name}" for path in (ROOT / "csrc").iterdir()}
    for package in SUBPACKAGES:
        assert f"treeattn/{package}/__init__.py" in shipped
    assert "treeattn/py.typed" in shipped
    assert {name.split("/")[0] for name in wheel.namelist()} - {"treeattn"} == {
        name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name
    }


def test_wheel_holds_the_cuda_sources_as_they_are(wheel: zipfile.ZipFile) -> None:
    for path in (ROOT / "csrc").iterdir():
        assert wheel.read(f"treeattn/csrc/{path.name}") == path.read_bytes()


def test_metadata(metadata: email.message.Message) -> None:
    import treeattn

    assert metadata["Name"] == "treeattn"
    assert metadata["Version"] == treeattn.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    extras = set(metadata.get_all("Provides-Extra") or [])
    assert extras == {"bench", "cuda12", "cuda13", "demo", "dev"}


def test_dependencies_put_no_upper_bound_on_torch(metadata: email.message.Message) -> None:
    needed = [need for need in metadata.get_all("Requires-Dist") or [] if "extra ==" not in need]
    assert {need.split(">=")[0] for need in needed} == {"torch", "triton"}
    assert all("<" not in need and "!=" not in need for need in needed)


def test_entry_point(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    assert "treeattn = treeattn.cli:main" in wheel.read(name).decode()
