"""Building, keeping and finding device code, with a compiler that is a shell script; no GPU, no toolkit."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import treeattn.backends as backends
from treeattn.cli import main
from treeattn.cuda import binary, build, cache, launch, shipped
from treeattn.cuda.build import BuildError
from treeattn.cuda.config import Variant, cuda_config, fp8_tile_rows, merge_of, variant_of
from treeattn.driver import DriverError
from treeattn.geometry import Geometry

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "attention_sm90_d64.cu"
FAKE_NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 99.1, V${FAKE_VERSION:-99.1.2}"; exit 0; fi
echo "$*" >> "$FAKE_LOG"
sleep "${FAKE_SECONDS:-0}"
if [ -n "$FAKE_FAILS" ]; then echo "fatal: no such chip" >&2; exit 1; fi
while [ "$1" != -o ]; do shift; done
echo "code of $(basename "$3")" > "$2"
"""


class Toolkit:
    """A folder with the fake nvcc, and what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.nvcc, self.log = folder / "bin" / "nvcc", folder / "log"
        self.nvcc.parent.mkdir(parents=True)
        self.nvcc.write_text(FAKE_NVCC)
        self.nvcc.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def forget() -> None:
    for remembered in (build.find_compiler, binary.shipped_binary, binary.require, launch.load, launch.module_on):
        remembered.cache_clear()
    binary.refused.clear()


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No compiler in reach and an empty cache, whose folder this is."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "no-toolkit"))
    monkeypatch.setenv("TREEATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TREEATTN_CUDA_MACROS", raising=False)
    monkeypatch.setattr(build, "find_nvcc", lambda: shutil.which("nvcc", path=os.environ["CUDA_HOME"] + "/bin"))
    find_spec = build.importlib.util.find_spec
    monkeypatch.setattr(
        "treeattn.cuda.build.importlib.util.find_spec", lambda name: None if name == "cupy" else find_spec(name)
    )
    forget()
    yield tmp_path / "cache"
    forget()


@pytest.fixture
def toolkit(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolkit:
    made = Toolkit(tmp_path / "toolkit")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setenv("PATH", f"{made.nvcc.parent}:/usr/bin:/bin")  # before one that a distribution may have
    monkeypatch.setenv("FAKE_LOG", str(made.log))
    return made


@pytest.fixture
def installed(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sources of an installed package, where this process looks for them; no fat binary yet."""
    folder = tmp_path / "installed" / "csrc"
    shutil.copytree(ROOT / "csrc", folder)
    monkeypatch.setattr(binary, "source_dir", lambda: folder)
    monkeypatch.setattr(build, "source_dir", lambda: folder)
    return folder


def accept(found: binary.Binary) -> binary.Binary:
    return found


# which kernel


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_number_of_rows_with_an_fp8_cache_has_a_kernel(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    geometry = Geometry.of(4, 4, 128, dtype=dtype, kv_dtype=kv_dtype)
    for rows in (*range(1, 300), 520, 1028, 2056):
        config = cuda_config(geometry, rows)
        variant = variant_of(geometry, config)
        shape = build.kernels_in(variant.source)[variant.name]
        assert shape.consumers * shape.rows == config.block_m
        assert (shape.threads, shape.blocks, shape.keys) == (32 * config.num_warps, config.programs_per_sm, 64)
        capped = variant_of(geometry, config, capped=True)
        assert capped.name in build.kernels_in(capped.source)
        assert (capped == variant) == (rows <= 72)  # those have any option
        assert -(-rows // -(-rows // config.block_m)) <= config.block_m


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_latent_rows_in_fp8_have_a_kernel(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    names = set()
    for cached in (dtype, kv_dtype):
        geometry = Geometry.of(8, 1, 576, head_dim_v=512, shared_kv=True, dtype=dtype, kv_dtype=cached)
        config = cuda_config(geometry, 17)
        variant = variant_of(geometry, config)
        shape = build.kernels_in(variant.source)[variant.name]
        assert (shape.threads, shape.blocks) == (32 * config.num_warps, config.programs_per_sm)
        names.add(variant.name)
    own, plain = sorted(names, key=len, reverse=True)
    assert own.startswith("mla_fp8_sm90_")
    assert plain.startswith("mla_sm90_")
    merge = merge_of(geometry)
    assert merge is not None
    assert merge.name in build.kernels_in(merge.source)


def test_row_tiles_with_an_fp8_cache() -> None:
    chosen = {rows: fp8_tile_rows(rows) for rows in (1, 32, 40, 41, 68, 72, 73, 128, 129, 136, 260, 512, 1028)}
    assert chosen == {
        1: 40, 32: 40, 40: 40, 41: 72, 68: 72, 72: 72, 73: 128, 128: 128, 129: 192, 136: 192, 260: 192, 512: 128,
        1028: 192,
    }  # fmt: skip


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_wide_kernel_for_fp8_caches_is_asked_for(kv_dtype: torch.dtype) -> None:
    seen = set()
    for rows in (80, 136):
        for dtype, fresh in itertools.product((torch.bfloat16, torch.float16), (False, True)):
            for window_left, capped in ((-1, False), (7, False), (7, True)):
                geometry = Geometry.of(1, 1, 128, dtype=dtype, kv_dtype=kv_dtype, window_left=window_left,
                                       fresh_tree=fresh)  # fmt: skip
                seen.add(variant_of(geometry, cuda_config(geometry, rows), capped))
    sources = {variant.source for variant in seen}
    assert {variant.name for variant in seen} == {name for source in sources for name in build.kernels_in(source)}
    assert len(seen) == 18  # bf16 has other kernels where rows are fresh


# the cache


def test_compiled_once_then_from_the_cache(toolkit: Toolkit, bare: Path) -> None:
    first = binary.load_first(SOURCE, (), accept)
    assert first.code == f"code of {SOURCE}\n".encode()
    assert "nvcc 99.1.2" in first.place
    assert binary.load_first(SOURCE, (), accept) == first
    (call,) = toolkit.calls
    assert call.startswith("-std=c++17 -O3 -cubin -gencode=arch=compute_90a,code=sm_90a -o ")
    assert not list(bare.glob("*.tmp"))


def test_a_macro_a_source_and_a_compiler_make_other_code(
    toolkit: Toolkit, installed: Path, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set()
    for change in ("nothing", "macro", "header", "source", "compiler"):
        if change == "header":
            (installed / "ring.cuh").write_text((installed / "ring.cuh").read_text() + "// more\n")
        elif change == "source":
            (installed / SOURCE).write_text((installed / SOURCE).read_text() + "// more\n")
        elif change == "compiler":
            monkeypatch.setenv("FAKE_VERSION", "99.2")
            build.find_compiler.cache_clear()
        binary.load_first(SOURCE, ("A=1",) if change == "macro" else (), accept)
        names.add(frozenset(path.name for path in bare.glob("*.cubin")))
    assert sorted(map(len, names)) == [1, 2, 3, 4, 5]
    assert "-DA=1" in toolkit.calls[1]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "sum alone"])
def test_a_damaged_file_is_made_anew(damage: str, toolkit: Toolkit, bare: Path) -> None:
    sound = binary.load_first(SOURCE, (), accept)
    (path,) = bare.glob("*.cubin")
    content = path.read_bytes()
    flipped = bytes([content[0] ^ 1]) + content[1:]
    damaged = {"truncated": content[:-5], "flipped": flipped, "empty": b"", "sum alone": hashlib.sha256().digest()}
    path.write_bytes(damaged[damage])
    assert binary.load_first(SOURCE, (), accept) == sound
    assert path.read_bytes() == content
    assert len(toolkit.calls) == 2


CHILD = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "treeattn")!r})  # without treeattn, and torch: all of them start at once
from cuda import build, cache
nvcc = build.find_compiler("nvcc")
print(cache.kept("one.cubin", lambda: nvcc.compile(Path({SOURCE!r}), ())).decode(), end="")
"""


def test_processes_that_want_the_same_wait_for_one_compilation(toolkit: Toolkit, tmp_path: Path) -> None:
    environment, command = {**os.environ, "FAKE_SECONDS": "1"}, [sys.executable, "-c", CHILD]
    children = [
        subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(8)
    ]
    for child in children:
        assert child.communicate(timeout=120)[0] == f"code of {SOURCE}\n"
        assert child.returncode == 0
    assert len(toolkit.calls) == 1


def test_threads_wait_too_and_a_failure_leaves_the_lock(bare: Path) -> None:
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        if len(made) == 1:
            raise BuildError("the first one fails")
        return b"code"

    with pytest.raises(BuildError):
        cache.kept("name.cubin", make)
    threads = [threading.Thread(target=cache.kept, args=("name.cubin", make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert len(made) == 2


def test_no_place_to_keep_it(toolkit: Toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a file no folder can be made, for root neither."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TREEATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        assert binary.load_first(SOURCE, (), accept).code == f"code of {SOURCE}\n".encode()
    assert len(toolkit.calls) == 2


def test_a_full_disk_and_a_file_system_without_locks(toolkit: Toolkit, bare: Path, monkeypatch: Any) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(cache.fcntl, "flock", refuse)
    monkeypatch.setattr(Path, "replace", refuse)
    assert binary.load_first(SOURCE, (), accept).code == f"code of {SOURCE}\n".encode()
    assert not list(bare.glob("*.tmp"))


def test_no_home(toolkit: Toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TREEATTN_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert cache.cache_dir() is None
    assert "no home" in binary.expected(SOURCE, ())
    assert binary.load_first(SOURCE, (), accept).code == f"code of {SOURCE}\n".encode()
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert cache.cache_dir() == Path("/some/cache/treeattn")


# the order


def test_the_fat_binary_comes_first_and_fits_only_its_sources(toolkit: Toolkit, installed: Path) -> None:
    shipped.make(installed, str(toolkit.nvcc))
    assert "-fatbin -gencode=arch=compute_90a,code=sm_90a -I" in toolkit.calls[0]
    for name in binary.source_names():
        found = binary.load_first(name, (), accept)
        assert found is binary.shipped_binary()  # so that one module serves all
        assert binary.expected(name, ()).startswith(f"shipped: {installed / shipped.BINARY}, by nvcc 99.1.2 for sm_90a")
    assert found.code == (installed / shipped.BINARY).read_bytes()
    assert len(toolkit.calls) == 1
    assert binary.load_first(SOURCE, ("A=1",), accept).code == f"code of {SOURCE}\n".encode()  # a checked build
    with (installed / "ring.cuh").open("a") as header:
        header.write("// edited\n")
    forget()
    assert binary.load_first(SOURCE, (), accept).code == f"code of {SOURCE}\n".encode()
    assert "other sources or options" in binary.refused[binary.SHIPPED]


@pytest.mark.parametrize("options", [("-fatbin", "sm_90a"), ("-fatbin", "sm_90a", "sm_100a")])
def test_the_fat_binary_fits_only_its_options(
    options: tuple[str, ...], toolkit: Toolkit, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped.make(installed, str(toolkit.nvcc))
    monkeypatch.setattr(shipped, "FATBIN_OPTIONS", build.nvcc_options(*options))
    with pytest.raises(BuildError, match="other sources or options") if len(options) > 2 else contextlib.nullcontext():
        shipped.read(installed)


@pytest.mark.parametrize(
    ("damage", "words"),
    [("code", "is damaged"), ("record", "no readable record"), ("no record", "no readable record"), ("key", "record")],
)
def test_a_damaged_fat_binary_is_not_taken(damage: str, words: str, toolkit: Toolkit, installed: Path) -> None:
    shipped.make(installed, str(toolkit.nvcc))
    record = installed / shipped.RECORD
    if damage == "code":
        (installed / shipped.BINARY).write_bytes(b"half")
    elif damage == "record":
        record.write_text(record.read_text()[:20])
    elif damage == "no record":
        record.unlink()
    else:
        record.write_text(json.dumps({"made_of": 3}))
    with pytest.raises(BuildError, match=words):
        shipped.read(installed)
    assert binary.load_first(SOURCE, (), accept).code == f"code of {SOURCE}\n".encode()


def test_what_the_driver_refuses_is_passed_over_and_said(toolkit: Toolkit, installed: Path) -> None:
    shipped.make(installed, str(toolkit.nvcc))

    def old_driver(found: binary.Binary) -> str:
        if found is binary.shipped_binary():
            raise DriverError("cuModuleLoadData: no kernel image is available (209)")
        return found.place

    assert binary.load_first(SOURCE, (), old_driver) == f"{SOURCE}, compiled by nvcc 99.1.2"
    assert binary.refused == {binary.SHIPPED: "cuModuleLoadData: no kernel image is available (209)"}
    assert binary.expected(SOURCE, ()).startswith("cache: ")


def test_nvrtc_is_asked_where_nvcc_fails(toolkit: Toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    real = build.find_compiler
    nvrtc = build.Compiler("nvrtc", "13.2", "through CuPy", lambda source, macros: b"of NVRTC")
    monkeypatch.setattr(binary, "find_compiler", lambda name: nvrtc if name == "nvrtc" else real(name))
    monkeypatch.setenv("FAKE_FAILS", "1")
    assert binary.load_first(SOURCE, (), accept) == (f"{SOURCE}, compiled by nvrtc 13.2", b"of NVRTC")
    assert "no such chip" in binary.refused["nvcc"]


def test_without_a_compiler_the_cache_serves(toolkit: Toolkit, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in binary.source_names():
        binary.load_first(name, (), accept)
    toolkit.nvcc.unlink()
    forget()
    binary.require(())
    assert binary.load_first(SOURCE, (), accept).code == f"code of {SOURCE}\n".encode()
    for path in bare.glob("*_d128-*.cubin"):
        path.unlink()
    forget()
    with pytest.raises(BuildError, match=r"does not hold attention_sm90_d128\.cu"):
        binary.require(())


def test_where_nothing_works_the_backend_says_what_to_install(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends, "arch", lambda device: 90)
    reason = backends.available_backends("cuda")["cuda"]
    assert reason is not None
    for words in ("no fat binary", "nvcc is neither on PATH nor under CUDA_HOME", "pip install 'treeattn[cuda13]'"):
        assert words in reason
    with pytest.raises(BuildError, match=r"(?s)could be loaded:.*\n  nvcc: .*\n  nvrtc: .*\n  the cache: "):
        binary.load_first(SOURCE, (), accept)


def test_an_nvcc_that_does_not_run_is_no_compiler(toolkit: Toolkit) -> None:
    toolkit.nvcc.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(BuildError, match="does not run"):
        build.find_compiler("nvcc")
    toolkit.nvcc.write_text("#!/bin/sh\necho hello\n")
    with pytest.raises(BuildError, match="says no version"):
        build.find_compiler("nvcc")


def test_cupy_without_nvrtc_is_no_compiler(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cupy" / "cuda").mkdir(parents=True)
    (tmp_path / "cupy" / "__init__.py").write_text("")
    (tmp_path / "cupy" / "cuda" / "__init__.py").write_text("raise OSError('libnvrtc.so.13: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("treeattn.cuda.build.importlib.util.find_spec", lambda name: name)
    with pytest.raises(BuildError, match=r"pip install nvidia-cuda-nvrtc, .*libnvrtc\.so\.13: cannot open"):
        build.find_compiler("nvrtc")
    sys.modules.pop("cupy", None)


# setup.py


def build_py(environment: dict[str, str], to: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(to.parent), "build_py", "--build-lib", str(to)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)


def test_setup_ships_sources_and_what_nvcc_makes_of_them(toolkit: Toolkit, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77 or newer")
    folder, names = tmp_path / "lib" / "treeattn" / "csrc", {path.name for path in (ROOT / "csrc").iterdir()}
    both = {shipped.BINARY, shipped.RECORD}

    def built(expect: int = 0, **environment: str) -> tuple[set[str], str]:
        done = build_py(environment, tmp_path / "lib")
        assert done.returncode == expect, done.stderr
        return {path.name for path in folder.iterdir()}, done.stderr

    assert built()[0] == names | both
    assert shipped.read(folder).compiler == "nvcc 99.1.2"
    calls = len(toolkit.calls)
    assert built(TREEATTN_BUILD_CUDA="0")[0] == names  # what was there before is gone
    assert len(toolkit.calls) == calls
    left, said = built(FAKE_FAILS="1")
    assert left == names
    assert "CUDA kernels will be compiled at first use" in said
    assert "no such chip" in said
    assert "no such chip" in built(expect=1, FAKE_FAILS="1", TREEATTN_BUILD_CUDA="1")[1]
    assert "must be 0, 1 or unset, got 'yes'" in built(expect=1, TREEATTN_BUILD_CUDA="yes")[1]


# loading


class Libcuda:
    """Modules and functions as numbers; knows the device that is current."""

    def __init__(self) -> None:
        self.device, self.modules, self.functions, self.granted = 0, [], [], []  # type: ignore[var-annotated]
        self.refuses: bytes | None = None

    def cuModuleLoadData(self, handle: Any, code: bytes) -> int:
        if code == self.refuses:
            return 209
        self.modules.append((self.device, code))
        handle._obj.value = 100 + len(self.modules)
        return 0

    def cuModuleGetFunction(self, handle: Any, module: Any, name: bytes) -> int:
        self.functions.append((self.device, module.value, name.decode()))
        handle._obj.value = 1000 + len(self.functions)
        return 0

    def cuFuncSetAttribute(self, function: Any, which: int, value: int) -> int:
        self.granted.append((function.value, which, value))
        return 0

    def cuGetErrorString(self, code: int, words: Any) -> int:
        words._obj.value = b"no kernel image is available for execution on the device"
        return 0


@pytest.fixture
def libcuda(monkeypatch: pytest.MonkeyPatch) -> Libcuda:
    fake = Libcuda()

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, fake.device = fake.device, index
        yield
        fake.device = before

    monkeypatch.setattr("treeattn.driver.driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    return fake


def test_each_device_has_its_module_and_both_files_share_the_fat_binary(
    toolkit: Toolkit, installed: Path, libcuda: Libcuda
) -> None:
    shipped.make(installed, str(toolkit.nvcc))
    variants = [Variant("bf16", 64, 2, 64), Variant("fp16", 128, 3, 64)]
    functions = [launch.load(variant, device) for device in (0, 1) for variant in variants]
    code = (installed / shipped.BINARY).read_bytes()
    assert libcuda.modules == [(0, code), (1, code)]
    assert libcuda.functions == [
        (0, 101, variants[0].name), (0, 101, variants[1].name), (1, 102, variants[0].name), (1, 102, variants[1].name)
    ]  # fmt: skip
    assert len({function.handle.value for function in functions}) == 4
    shared = build.kernels_in(SOURCE)[variants[0].name].shared_bytes
    assert (1001, 8, shared) in libcuda.granted
    assert (1003, 8, shared) in libcuda.granted
    assert [launch.load(variant, device) for device in (0, 1) for variant in variants] == functions
    assert len(libcuda.modules) == 2


def test_a_driver_too_old_for_the_fat_binary_gets_compiled_code(
    toolkit: Toolkit, installed: Path, libcuda: Libcuda
) -> None:
    shipped.make(installed, str(toolkit.nvcc))
    libcuda.refuses = (installed / shipped.BINARY).read_bytes()
    for device in (0, 1):
        launch.load(Variant("bf16", 64, 2, 64), device)
    assert libcuda.modules == [(0, f"code of {SOURCE}\n".encode()), (1, f"code of {SOURCE}\n".encode())]
    assert len(toolkit.calls) == 2  # the fat binary and one cubin
    assert "no kernel image" in binary.refused[binary.SHIPPED]


def test_nothing_loads_inside_a_capture(toolkit: Toolkit, libcuda: Libcuda, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = Variant("bf16", 64, 2, 64)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=rf"{variant.name} is not loaded on device 1 .* before the capture"):
        launch.load(variant, 1)
    assert libcuda.modules == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    loaded = launch.load(variant, 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert launch.load(variant, 1) is loaded  # what is loaded may be planned in a capture


# treeattn info


def info(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["cuda"]
    assert main(["info"]) == 0
    return found, capsys.readouterr().out


def test_info_without_a_compiler(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, text = info(capsys)
    assert found["shipped"]["binary"] is None
    assert found["compilers"]["nvcc"]["version"] is None
    assert found["cache_dir"] == str(bare)
    assert found["code"][SOURCE].startswith("none: there is neither code for its kernels nor a compiler: no fat binary")
    assert {kernel["name"]: kernel["shared_bytes"] for kernel in found["kernels"]} == {
        name: shape.shared_bytes for source in binary.source_names() for name, shape in build.kernels_in(source).items()
    }
    assert "nvcc is neither on PATH" in text
    shared = build.kernels_in("attention_sm90_d64.cu")["attention_sm90_bf16_d64_c2_n64"].shared_bytes
    assert f"attention_sm90_bf16_d64_c2_n64: {shared} bytes shared" in text


def test_info_tells_what_would_be_loaded(
    toolkit: Toolkit, installed: Path, bare: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, text = info(capsys)
    assert found["compilers"]["nvcc"] == {"version": "99.1.2", "place": str(toolkit.nvcc), "reason": None}
    assert found["code"][SOURCE].startswith("compiled at first use by nvcc 99.1.2, to be kept as ")
    binary.load_first(SOURCE, (), accept)
    (path,) = bare.glob("*.cubin")
    found, text = info(capsys)
    assert found["code"][SOURCE] == f"cache: {path}"
    assert f"{SOURCE}: cache: {path}" in text
    shipped.make(installed, str(toolkit.nvcc))
    forget()
    found, text = info(capsys)
    assert found["code"][SOURCE].startswith(f"shipped: {installed / shipped.BINARY}")
    assert "by nvcc 99.1.2 for sm_90a" in text
    monkeypatch.setenv("TREEATTN_CUDA_MACROS", "TREEATTN_CANARY=1")
    found, text = info(capsys)
    assert found["macros"] == ["TREEATTN_CANARY=1"]
    assert found["code"][SOURCE].startswith("compiled at first use")
    assert "TREEATTN_CANARY=1 (TREEATTN_CUDA_MACROS)" in text


def test_info_asks_the_driver_where_the_backend_works(
    toolkit: Toolkit, installed: Path, libcuda: Libcuda
) -> None:
    from treeattn.info import cuda_info

    shipped.make(installed, str(toolkit.nvcc))
    assert cuda_info(gpu=True)["code"][SOURCE].startswith("shipped: ")
    assert len(libcuda.modules) == 1
    forget()
    libcuda.refuses = (installed / shipped.BINARY).read_bytes()
    found = cuda_info(gpu=True)
    assert "no kernel image" in found["shipped"]["reason"]
    assert found["code"][SOURCE].startswith("compiled at first use by nvcc")
