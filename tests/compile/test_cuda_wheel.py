"""The wheel as setup.py makes it with the real nvcc: its fat binary holds every kernel, without spills, and is found.

One test, because the workers of a run would each build a wheel for theirs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from treeattn.cuda import shipped
from treeattn.cuda.build import find_nvcc, kernels_in

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = sorted(name for source in (ROOT / "csrc").glob("*.cu") for name in kernels_in(source.name))



def build_wheel(source: Path, target: Path) -> Path:
    """A wheel of a copy of the sources."""
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("treeattn", "csrc"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(target))
    environment = {**os.environ, "TREEATTN_BUILD_CUDA": "1"}
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", *options, str(source)], check=True, env=environment)
    (wheel,) = target.glob("*.whl")
    return wheel


def cuobjdump(option: str, binary: Path) -> str:
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, str(binary)], check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_wheel_with_a_fat_binary(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77 or newer")
    wheel = build_wheel(tmp_path / "source", tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")  # the code is data for the GPU: see setup.py
    installed = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)

    usage = cuobjdump("-res-usage", installed / "treeattn" / "csrc" / shipped.BINARY)
    assert re.findall(r"^arch = (\w+)$", usage, re.MULTILINE) == ["sm_90a"]
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert sorted(name for name, *_ in found) == NAMES
    for name, registers, stack, local in found:
        record_property("kernel", f"fat binary {name}: {registers} registers at launch, {stack} bytes of stack")
        assert int(stack) == int(local) == 0, name

    found = shipped.read(installed / "treeattn" / "csrc")
    assert found.targets == ("sm_90a",)
    assert found.compiler.startswith("nvcc ")
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    environment.pop("TREEATTN_CUDA_MACROS", None)
    command = [sys.executable, "-m", "treeattn", "info", "--json"]
    done = subprocess.run(command, cwd=installed, env=environment, check=True, capture_output=True, text=True)
    cuda = json.loads(done.stdout)["cuda"]
    assert cuda["sources"] == str(installed / "treeattn" / "csrc")
    assert all(code.startswith(f"shipped: {found.path}") for code in cuda["code"].values())
    assert sorted(kernel["name"] for kernel in cuda["kernels"]) == NAMES
