"""The wheel: pure Python, complete, typed, and with the metadata a user's resolver reads."""

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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build from a copy, with the setuptools that is here (no network) and no CUDA toolkit in reach."""
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77 or newer")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "treeattn", source / "treeattn", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA")}
    environment["PATH"] = os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if not Path(folder, "nvcc").exists()
    )
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(target))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", *options, str(source)], check=True, env=environment
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
    assert shipped == sources
    for package in SUBPACKAGES:
        assert f"treeattn/{package}/__init__.py" in shipped
    assert "treeattn/py.typed" in shipped
    assert {name.split("/")[0] for name in wheel.namelist()} - {"treeattn"} == {
        name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name
    }


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
