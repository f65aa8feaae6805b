"""The CUDA kernels compile with nvcc for sm_90a: no spills, no serialised wgmma; logs registers, shared memory.

A source is compiled once for all that is asked of its machine code.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from treeattn.cuda.build import NVCC_OPTIONS, Fp8Shape, KernelShape, find_nvcc, kernels_in, source_dir

SHARED_LIMIT = 227 * 1024
SHARED_OF_SM, RESERVED = 228 * 1024, 1024
SOURCES = sorted(path.name for path in source_dir().glob("*.cu"))
CANARY = ("TREEATTN_CANARY=1", "TREEATTN_DELAY=1", "TREEATTN_TRAP_AFTER=3000000")
COMPLAINTS = re.compile(r"C75\d\d|setmaxnreg|warning|error", re.IGNORECASE)
"""C7508: setmaxnreg ignored; C7510 to C7520: wgmma serialised, one reason each."""

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")


def kernels_of(log: str) -> dict[str, tuple[int, int]]:
    """Spill bytes (stores and loads) and registers at launch, by kernel."""
    found = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        log,
        re.DOTALL,
    )
    return {name: (int(stores) + int(loads), int(registers)) for name, stores, loads, registers in found}


def compile_without_spills_or_serialised_products(
    source: str, macros: tuple[str, ...], cubin: Path, record: Callable[[str, object], None]
) -> None:
    options = [*NVCC_OPTIONS, "-Xptxas", "-v,-warn-spills,-warn-lmem-usage", *(f"-D{macro}" for macro in macros)]
    command = [str(find_nvcc()), *options, "-o", str(cubin), str(source_dir() / source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    complaints = [line for line in log.splitlines() if COMPLAINTS.search(line)]
    assert not complaints, "\n".join(complaints)
    kernels = kernels_of(log)
    assert sorted(kernels) == sorted(kernels_in(source))
    for name, (spilled, registers) in kernels.items():
        record("kernel", f"{cubin.stem} {name}: {registers} registers at launch, {spilled} bytes spilled")
        assert spilled == 0


@pytest.mark.parametrize("source", SOURCES)
def test_plain_build(source: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    cubin = tmp_path / "plain.cubin"
    compile_without_spills_or_serialised_products(source, (), cubin, record_property)
    if source.startswith(("attention", "fp8_wide")):
        exponentials_run_under_a_product(source, cubin)
    if source == "fp8_sm90_d128.cu":
        numbers_are_widened_under_a_product(source, cubin)


@pytest.mark.parametrize("source", SOURCES)
def test_canary_build(source: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    compile_without_spills_or_serialised_products(source, CANARY, tmp_path / "canary.cubin", record_property)


def disassembled(cubin: Path) -> dict[str, list[tuple[int, str]]]:
    """Machine instructions by kernel, with their addresses."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-sass", str(cubin)], check=True, capture_output=True, text=True).stdout
    kernels: dict[str, list[tuple[int, str]]] = {}
    for line in text.splitlines():
        if named := re.search(r"Function : (\w+)", line):
            code = kernels.setdefault(named[1], [])
        elif found := re.match(r"\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", line):
            code.append((int(found[1], 16), found[2]))
    return kernels


def target_of(instruction: str) -> int | None:
    """Where a branch goes."""
    found = re.search(r"BRA\b.*?0x([0-9a-f]+)", instruction)
    return int(found[1], 16) if found else None


def exponentials_run_under_a_product(source: str, cubin: Path) -> None:
    """Behind the wait for Q K^T, with P V still on its way, come the exponentials of a tile, and a wait for P V only on
    the way that moves the bases, which most tiles jump over."""
    for name, code in disassembled(cubin).items():
        shape = kernels_in(source)[name]
        assert isinstance(shape, KernelShape)
        keys = shape.keys
        begin = next(at for at, (_, line) in enumerate(code) if re.search(r"DEPBAR\.LE gsb0, 0x1", line))
        start = code[begin][0]
        end = next(
            at for at, (address, line) in enumerate(code)
            if at > begin and (target := target_of(line)) is not None and target < start < address
        )  # fmt: skip
        tile = code[begin:end]
        assert sum("MUFU.EX2" in line for _, line in tile) >= keys // 2, name
        for waits in [address for address, line in tile if re.search(r"DEPBAR\.LE gsb0, 0x0", line)]:
            jumps = [(address, target_of(line)) for address, line in tile if address < waits]
            assert any(target is not None and target > waits for _, target in jumps), f"{name}: {waits:#x}"
            behind = [line for address, line in tile if address > waits]
            assert sum("MUFU.EX2" in line for line in behind) >= keys // 2, name


def numbers_are_widened_under_a_product(source: str, cubin: Path) -> None:
    """Of a tile those of K before the wait for the product with V before, those of V before the wait for Q K^T."""
    for name, code in disassembled(cubin).items():
        shape = kernels_in(source)[name]
        assert isinstance(shape, Fp8Shape)
        lines = [line for _, line in code]
        begin = next(at for at, line in enumerate(lines) if "LDSM.16.M88" in line)
        products = [at for at, line in enumerate(lines) if at > begin and "HGMMA" in line]
        waits = [at for at, line in enumerate(lines) if at > begin and re.search(r"DEPBAR\.LE gsb0, 0x0", line)]
        steps = shape.head_dim // 16
        assert waits[0] < products[0] < products[steps - 1] < waits[1] < products[steps], name
        for start, end in ((begin, waits[0]), (products[steps - 1], waits[1])):
            assert sum("F2FP.F16.E4M3" in line for line in lines[start:end]) == 32, name


def test_shared_memory_fits(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """The structs that the kernels lay over shared memory, measured by nvcc's host compiler."""
    shapes = {name: shape for source in SOURCES for name, shape in kernels_in(source).items() if shape.layout}
    lines = []
    for name, shape in shapes.items():
        lines.append(f'  std::printf("{name} %zu\\n", sizeof(treeattn::{shape.layout}::Layout));')
    main = tmp_path / "main.cu"
    names = ("<cstdio>", '"fp8_ring.cuh"', '"fp8_wide_ring.cuh"', '"mla_fp8_ring.cuh"')
    includes = "".join(f"#include {name}\n" for name in names)
    main.write_text(includes + "int main() {\n" + "\n".join(lines) + "\n}\n")
    program = tmp_path / "main"
    subprocess.run(
        [str(find_nvcc()), "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-I", str(source_dir()), "-o",
         str(program), str(main)], check=True, capture_output=True,
    )  # fmt: skip
    for line in subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines():
        name, taken = line.split()
        shape = shapes[name]
        record_property("kernel", f"shared memory {name}: {taken} bytes, {shape.blocks} block(s) an SM")
        assert int(taken) == shape.shared_bytes <= SHARED_LIMIT
        assert shape.blocks * (int(taken) + RESERVED) <= SHARED_OF_SM
