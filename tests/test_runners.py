"""The runners count honestly: a crash, a run without tests and an error in set-up are failures."""

from __future__ import annotations

import importlib.util
import re
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent

CASES = {
    "mixed": (
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip('no')",
        (1, 1, 1),
    ),
    "passing": ("def test_a(): pass", (1, 0, 0)),
    "empty": ("", (0, 1, 0)),
    "crash": ("import os\ndef test_a(): os._exit(3)", (0, 1, 0)),
    "collection error": ("import nothing_of_that_name", (0, 1, 0)),
    "set-up error": ("def test_a(no_such_fixture): pass", (0, 1, 0)),
}


def load(path: str) -> ModuleType:
    name = f"loaded_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, tuple[int, int, int]]:
    source, expected = CASES[request.param]
    file = tmp_path / "test_it.py"
    file.write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    return file, expected


def test_group_counts(case: tuple[Path, tuple[int, int, int]], tmp_path: Path) -> None:
    file, expected = case
    run = load("tests/run.py")
    command = (sys.executable, "-m", "pytest", "-q", "-c", str(tmp_path / "pytest.ini"), str(file))
    count = run.run_group(run.Group("it", command), tmp_path)
    assert (count.passed, count.failed, count.skipped) == expected


def test_plain_command_counts_as_one_check(tmp_path: Path) -> None:
    run = load("tests/run.py")
    for status in (0, 1):
        command = (sys.executable, "-c", f"raise SystemExit({status})")
        count = run.run_group(run.Group("it", command, is_pytest=False), tmp_path)
        assert (count.passed, count.failed) == (1 - status, status)


def test_unknown_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("tests/run.py").main(["no-such-group"]) == 2
    assert "no-such-group" in capsys.readouterr().err


@pytest.mark.parametrize("jobs", [0, 2])
def test_gpu_runner_counts(
    case: tuple[Path, tuple[int, int, int]], jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, expected = case
    gpu_tests = load("benchmarks/gpu_tests.py")
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    outcome = gpu_tests.run_tests([str(file)], jobs, "", 60)
    assert (outcome.passed, outcome.failed, outcome.skipped) == expected


def test_gpu_runner_stops_at_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_tests = load("benchmarks/gpu_tests.py")
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    file = tmp_path / "test_it.py"
    file.write_text("import time\ndef test_a(): time.sleep(60)")
    outcome = gpu_tests.run_tests([str(file)], 0, "", 1)
    assert (outcome.passed, outcome.failed) == (0, 1)
    assert "time limit" in outcome.log


def test_gpu_runner_knows_every_file_that_looks_at_a_device() -> None:
    listed = load("benchmarks/gpu_tests.py").ON_GPU
    for file in sorted(ROOT.glob("tests/**/test_*.py")):
        source, name = file.read_text(), str(file.relative_to(ROOT))
        if name.startswith("tests/adapters/"):
            continue  # frameworks have environments and a runner of their own
        if re.search(r"^def test_\w+\([^)]*\bdevice\b|^pytestmark = pytest.mark.gpu", source, re.MULTILINE):
            assert name.startswith(listed), f"{name} is not in ON_GPU of benchmarks/gpu_tests.py"


def test_the_sweep_knows_every_option_and_pair_of_the_report() -> None:
    from treeattn.testing.counts import Counts
    from treeattn.testing.sweep import draw

    sweep = load("benchmarks/gpu_sweep.py")
    names, pairs = sweep.legal_names()
    counts = Counts()
    counts.add(draw(0))
    drawn = counts.as_json()
    assert set(drawn["options"]) <= names
    assert set(drawn["pairs"]) == pairs
    assert sweep.rarest({"a": 3}, {"a", "b"}) == ("b", 0)


def test_code_made_elsewhere_is_kept_under_the_name_of_this_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treeattn.cuda.binary import cache_name
    from treeattn.cuda.build import source_dir

    cubins = load("benchmarks/gpu_cubins.py")
    source, code = source_dir() / "mla_sm90.cu", tmp_path / "code"
    code.write_bytes(b"as it is in the cache")
    with tarfile.open(tmp_path / cubins.ARCHIVE, "w:xz") as archive:
        for macros in cubins.BUILDS:
            archive.add(code, cache_name(source, macros, "nvcc-13.0.88"))
    monkeypatch.setenv("TREEATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cubins, "first_compiler", lambda: "nvrtc-13.2")
    assert cubins.keep(tmp_path) == len(cubins.BUILDS)
    kept = {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    assert kept == {cache_name(source, macros, "nvrtc-13.2"): code.read_bytes() for macros in cubins.BUILDS}
