"""The runner of adapter tests: what it finds, when it makes an environment anew, and that failures count."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The runner over two frameworks in a temporary folder, whose environments are this Python's own packages."""
    spec = importlib.util.spec_from_file_location("adapters_run", ROOT / "tests" / "adapters" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, test in (("good", "def test_it(): pass"), ("bad", "def test_it(): assert 0"), ("empty", "")):
        folder = tmp_path / "adapters" / name
        folder.mkdir(parents=True)
        (folder / "requirements.txt").write_text(f"{name}==1\n")
        (folder / "test_it.py").write_text(test)
    (tmp_path / "adapters" / "no_framework").mkdir()
    monkeypatch.setattr(module, "HERE", tmp_path / "adapters")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "ENVIRONMENTS", tmp_path / "environments")
    commands: list[list[str]] = []
    run = subprocess.run

    def fake(command: list[str], **options: object) -> object:
        commands.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
            (Path(command[-1]) / "bin").mkdir()
            (Path(command[-1]) / "bin" / "python").symlink_to(sys.executable)
            return None
        if "pip" in command:
            return None
        return run([sys.executable, *command[1:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(module.subprocess, "run", fake)
    module.commands = commands  # type: ignore[attr-defined]
    return module


def test_failures_and_empty_runs_count(runner: ModuleType) -> None:
    assert runner.frameworks() == ["bad", "empty", "good"]
    assert runner.main(["good"]) == 0
    assert runner.main(["bad"]) == 1
    assert runner.main(["empty"]) == 1
    assert runner.main(["good", "bad"]) == 1
    assert runner.main([]) == 1


def test_environments_alone(runner: ModuleType) -> None:
    assert runner.main(["--install", "bad", "good"]) == 0
    assert sum("pip" in command for command in runner.commands) == 2
    assert not any("pytest" in command for command in runner.commands)
    assert runner.main(["bad"]) == 1
    assert sum("pip" in command for command in runner.commands) == 2


def test_unknown_framework(runner: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["no_framework"]) == 2
    assert "there are bad, empty, good" in capsys.readouterr().err


def test_environment_is_kept_until_the_requirements_change(runner: ModuleType) -> None:
    def made() -> int:
        return sum("pip" in command for command in runner.commands)

    first = runner.make_environment("good")
    assert runner.make_environment("good") == first
    assert made() == 1
    (runner.HERE / "good" / "requirements.txt").write_text("good==2\n")
    second = runner.make_environment("good")
    assert second != first
    assert not first.exists()
    assert made() == 2
    (second / runner.STAMP).unlink()  # as a broken installation leaves it
    runner.make_environment("good")
    assert made() == 3
    assert "--no-deps" in runner.commands[1]


def test_committed_requirements_are_pinned() -> None:
    for file in (ROOT / "tests" / "adapters").glob("*/requirements.txt"):
        lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
        assert lines[0] == "torch==2.13.0", file
        assert all("==" in line for line in lines), file
