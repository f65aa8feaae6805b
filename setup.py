"""Build script: the CUDA sources go into the wheel, and a fat binary of them where there is an nvcc.

All metadata is in pyproject.toml. TREEATTN_BUILD_CUDA=0 builds no fat binary; =1 makes it an error if none can be
built. By default a missing nvcc is no matter and a failing one a warning: the sources are compiled at first use then.

The wheel's tag stays py3-none-any with a fat binary in it. The tag is about the machine's Python, ABI and processor,
and the fat binary is data for the GPU's driver, the same on every one of them; on another GPU it is not looked at.
"""

import importlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError

ROOT = Path(__file__).resolve().parent


def cuda_module(name: str) -> ModuleType:
    """A module of treeattn/cuda without treeattn itself, which imports torch: a build environment has none."""
    folder = ROOT / "treeattn" / "cuda"
    spec = importlib.util.spec_from_file_location(
        "treeattn_cuda", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules.setdefault("treeattn_cuda", importlib.util.module_from_spec(spec))
    return importlib.import_module(f"treeattn_cuda.{name}")


class BuildPy(build_py):
    """Copies csrc into the package; an editable install finds it in the checkout and compiles at first use."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.add_cuda()

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, *map(str, sorted(self.cuda_folder.glob("*")))]

    @property
    def cuda_folder(self) -> Path:
        return Path(self.build_lib) / "treeattn" / "csrc"

    def add_cuda(self) -> None:
        asked = os.environ.get("TREEATTN_BUILD_CUDA", "")
        if asked not in ("", "0", "1"):
            raise BaseError(f"TREEATTN_BUILD_CUDA must be 0, 1 or unset, got {asked!r}")
        build, shipped = cuda_module("build"), cuda_module("shipped")
        shutil.rmtree(self.cuda_folder, ignore_errors=True)  # what an earlier build left
        self.cuda_folder.mkdir(parents=True)
        for path in shipped.files_of(ROOT / "csrc"):
            shutil.copyfile(path, self.cuda_folder / path.name)
        if asked == "0":
            return
        try:
            nvcc = build.find_nvcc()
            if nvcc is not None:
                shipped.make(self.cuda_folder, nvcc)
            elif asked == "1":
                raise build.BuildError("TREEATTN_BUILD_CUDA=1, but there is no nvcc on PATH or under CUDA_HOME")
        except build.BuildError as error:
            if asked == "1":
                raise BaseError(str(error)) from error
            self.warn(f"no fat binary: CUDA kernels will be compiled at first use. {error}")


setup(cmdclass={"build_py": BuildPy})
