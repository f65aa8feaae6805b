"""Pack SGLang's attention for a machine with a GPU and no network: .sglang-gpu/site.tar.xz, which git ignores.

Where SGLang is installed (`make test-adapters ADAPTERS=sglang` makes an environment that has it), with the Python of
the machine with the GPU::

    PYTHONPATH=. .venv-adapters/sglang-*/bin/python benchmarks/sglang_pack.py .sglang-gpu --python 3.12

There, beside its own torch, Triton, numpy and pytest, tests/gpu/test_sglang_backend_gpu.py finds it, and::

    python3 benchmarks/sglang_pack.py .sglang-gpu --unpack SITE
    python3 benchmarks/sglang_rows.py --source SITE ...

Packed are the modules of SGLang that its Triton backend and our tests of it load, and the few other packages that must
be real. The rest is stood in for (tests/adapters/sglang/stand_ins.py): it has nothing to do with attention, or is
compiled for one Python.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from treeattn.adapters.sglang.hooks import sglang_root

ARCHIVE = "site.tar.xz"
ROOTS = (
    "sglang.kernels.ops.attention.extend_attention",
    "sglang.kernels.ops.attention.verify_mla",
    "sglang.kernels.ops.attention.verify_splitkv",
    "sglang.kernels.ops.speculative.eagle",
    "sglang.kernels.ops.speculative.spec_tree",
    "sglang.srt.layers.attention.attention_registry",
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.model_executor.runner",
    "sglang.srt.plugins",
    "sglang.srt.speculative.eagle_info",
    "sglang.test.kits.attention_unittest.attention_methods.mla_attention",
    "sglang.test.kits.attention_unittest.runner_modes.speculative_target_verify_runner",
)
LATER = ("kernels/ops/*/__init__.py", "srt/arg_groups/*.py", "srt/mem_cache/*.py")
"""Files that functions of these import."""

PURE = ("dill", "einops", "partial_json_parser", "tqdm")
COMPILED = ("msgspec",)
"""Distributions with a binary for each Python: SGLang's structs are msgspec's."""


def imported(path: Path, module: str) -> Iterator[str]:
    """Modules, or names in modules, that a file imports when it is loaded: not in functions, nor for types alone."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        pending += ast.iter_child_nodes(node)


def file_of(root: Path, module: str) -> Path | None:
    """The file of a module of SGLang, or None where the name is none."""
    path = root.joinpath(*module.split(".")[1:])
    found = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((candidate for candidate in found if candidate.is_file()), None)


def closure(root: Path) -> set[Path]:
    """Files of all modules that loading :data:`ROOTS` may load, packages above them included, but for the topmost."""
    pending = list(ROOTS)
    for pattern in LATER:
        pending += [
            ".".join(("sglang", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
            for path in root.glob(pattern)
        ]
    files: dict[str, Path | None] = {"sglang": None}
    while pending:
        module = pending.pop()
        if module in files or module.partition(".")[0] != "sglang":
            continue
        path = files[module] = file_of(root, module)
        pending.append(module.rpartition(".")[0])
        if path is not None:
            pending += imported(path, module)
    return {path for path in files.values() if path is not None}


def collect(site: Path, python: str) -> None:
    """Write what is packed into a folder, for a version of Python."""
    root = sglang_root()
    if root is None:
        raise SystemExit("SGLang is not installed in this Python; make test-adapters makes an environment that has it")
    for path in closure(root):
        target = site / "sglang" / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for name in ("csrc", "include"):  # sources of what cannot be compiled there, whose folders SGLang looks for
        (site / "sglang" / "kernels" / "jit" / name).mkdir()
    (site / "sglang" / "__init__.py").write_text('"""Without the interface of the server, which loads all of it."""\n')
    version = importlib.metadata.version("sglang")
    metadata = site / f"sglang-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    for name in PURE:
        shutil.copytree(root.parent / name, site / name, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--no-compile"]
    command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", "--target", str(site)]
    for platform in ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64"):
        command += ["--platform", platform]
    wanted = [f"{name}=={importlib.metadata.version(name)}" for name in COMPILED]
    subprocess.run([*command, *wanted], check=True)


def pack(folder: Path, python: str) -> None:
    """Write the archive."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        collect(Path(scratch), python)
        with tarfile.open(folder / ARCHIVE, "w:xz", preset=6) as archive:
            archive.add(scratch, arcname=".")
    print(f"{folder / ARCHIVE}: {(folder / ARCHIVE).stat().st_size / 1e6:.1f} MB")


def unpack(folder: Path, site: Path) -> None:
    """Read the archive into a new folder."""
    if not (folder / ARCHIVE).is_file():
        raise SystemExit(f"{folder / ARCHIVE} is missing: pack it where SGLang is installed")
    shutil.unpack_archive(folder / ARCHIVE, site)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the archive")
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU (default %(default)s)")
    parser.add_argument("--unpack", type=Path, metavar="SITE", help="read the archive in place of writing it")
    args = parser.parse_args()
    if args.unpack is None:
        pack(args.folder, args.python)
    else:
        unpack(args.folder, args.unpack)


if __name__ == "__main__":
    main()
