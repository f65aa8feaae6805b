"""The command line: exit status, what it prints, what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import treeattn
from treeattn.cli import main


def run(*argv: str) -> int:
    """Exit status of a command line, argparse's own exits included."""
    try:
        return main(argv)
    except SystemExit as stop:
        return int(stop.code or 0)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"treeattn {treeattn.__version__}\n"
    assert run() == 2
    assert "examples:" in capsys.readouterr().out
    for command in ("info", "check", "bench"):
        assert run(command, "--help") == 0
        text = capsys.readouterr().out
        assert "example" in text
    assert run("no-such-command") == 2
    assert run("info", "--no-such-option") == 2


def test_module_and_lazy_imports() -> None:
    code = (
        "import sys; from treeattn.cli import main; main(['info', '--json']); main(['check', '--list'])\n"
        "heavy = {'matplotlib', 'transformers', 'cupy', 'rich', 'treeattn.bench'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([sys.executable, "-m", "treeattn", "--version"], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("treeattn ")


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", "--geometry", "32/8/128", "--geometry", "9/3/64", "--q-len", "65", "--arch", "90", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] == torch.__version__
    assert found["backends"]["cpu"]["torch"] is None
    assert [one["geometry"] for one in found["geometries"]] == ["32/8/128", "9/3/64"]
    assert found["geometries"][0]["packed_rows"] == 260
    config = treeattn.select_config(90, torch.bfloat16, 4, 128, 65)
    assert found["geometries"][0]["tile"]["block_n"] == config.block_n
    assert run("info") == 0
    text = capsys.readouterr().out
    for word in ("backends on cpu", "tile:", "split:", "merge:", "reference"):
        assert word in text
    assert run("info", "--geometry", "32/7/128") == 2
    assert "multiple of 7" in capsys.readouterr().err


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("check", "--backend", "torch", "--dtype", "float32", "--quiet")
    assert run(*common, "--cases", "2") == 0
    text = capsys.readouterr().out
    assert "all right" in text
    assert "repeat: treeattn check --device cpu --backend torch --dtype float32 --case " in text
    repeat = text.split("repeat: treeattn ")[1].splitlines()[0].split()
    assert run(*repeat, "--quiet") == 0
    capsys.readouterr()
    assert run(*common, "--case", "short-drafter", "--inject-fault") == 1
    text = capsys.readouterr().out
    assert "injected fault caught" in text
    assert "WRONG torch mask bits: request" in text
    assert "--inject-fault" in text.split("repeat: ")[1].splitlines()[0]
    assert run("check", "--case", "nothing") == 2
    assert run("check", "--list") == 0
    assert "word-stride" in capsys.readouterr().out


def test_check_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "counts.json"
    common = ("check", "--backend", "torch", "--quiet", "--cases", "12", "--seed", "5")
    assert run(*common, "--pairs", "--json", str(path)) == 0
    text = capsys.readouterr().out
    assert "options of 12 random cases from seed 5:" in text
    assert "not legal together:" in text
    assert "kv_dtype=same + scales=heads" in text
    assert "path static: " in text
    found = json.loads(path.read_text())
    assert found["ok"]
    assert found["failures"] == []
    assert found["drawn"] == found["backends"]["torch"]["ran"]
    for axis in ("window", "mask", "kv_dtype"):
        assert sum(count for name, count in found["drawn"]["options"].items() if name.split("=")[0] == axis) == 12
    assert "window=window + soft_cap=cap" in found["drawn"]["pairs"]
    assert run(*common) == 0
    assert "not legal together:" not in capsys.readouterr().out
    assert run(*common, "--json", str(tmp_path / "absent" / "counts.json")) == 2


def test_check_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "mine.pt")
    dump = {
        "q": torch.zeros(4, 2, 8),
        "k_cache": torch.zeros(16, 2, 8),
        "v_cache": torch.ones(16, 2, 8),
        "kv_indptr": torch.tensor([0, 9]),
        "kv_indices": torch.arange(9),
        "prefix_lens": torch.tensor([5]),
        "parents": torch.tensor([-1, 0, 0, 1]),
        "out": torch.ones(4, 2, 8),
    }
    torch.save(dump, path)
    assert run("check", "--dump", path) == 0
    assert "all right" in capsys.readouterr().out
    torch.save({**dump, "mask_indptr": torch.tensor([0, 40]), "mask": torch.ones(36)}, path)
    assert run("check", "--dump", path) == 1
    assert "mask_indptr[1] = 40, must be 4*(5+4) = 36" in capsys.readouterr().out
    assert run("check", "--dump", str(tmp_path / "absent.pt")) == 2


def test_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, own = tmp_path / "result.json", tmp_path / "own.json"
    shape = {"q_len": 5, "prefix": 20, "qo_heads": 4, "kv_heads": 2, "dtype": "float32"}
    own.write_text(json.dumps([{"batch": 2, **shape}, {"q_lens": [5, 2], "prefix": 20, "dtype": "float32"}]))
    common = ("bench", "--device", "cpu", "--providers", "treeattn_torch", "sdpa", "fa3_cascade", "--quiet")
    assert run(*common, "--file", str(own), "--out", str(path)) == 0
    text = capsys.readouterr().out
    assert "GB/s" in text
    assert "left out: fa3_cascade: FlashAttention-3 needs a Hopper GPU" in text
    assert "not for sdpa: 1 of 2 workloads: it takes no requests of different lengths" in text
    result = json.loads(path.read_text())
    assert [row["provider"] for row in result["rows"]] == ["treeattn_torch", "sdpa", "treeattn_torch"]
    assert run("bench", "compare", str(path), str(path)) == 0
    assert "x1.000" in capsys.readouterr().out
    assert run("bench", "plot", str(path), "--out", str(tmp_path / "plots")) == 0
    assert "not drawn: result-prefix.png: no two rows of a shape differ in prefix" in capsys.readouterr().out
    assert (tmp_path / "plots/result-rows.png").read_bytes()[:4] == b"\x89PNG"
    assert run("bench", "no-such-set", "--device", "cpu") == 2
    assert run("bench", "--providers", "magic") == 2
    assert run("bench", "--page-size", "48") == 2
    assert "page_size must divide 128, got 48" in capsys.readouterr().err
    assert run("bench", "compare", str(path)) == 2
    assert run("bench", "plot", str(tmp_path / "none.json")) == 2


def test_bench_ends_with_1_where_a_provider_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(inputs: object) -> list[object]:
        raise RuntimeError("no kernel image is available")

    path = tmp_path / "result.json"
    words = ("bench", "--device", "cpu", "--providers", "wrong", "sdpa", "--quiet", "--out", str(path))
    with mock.patch.dict("treeattn.bench.providers.PROVIDERS", {"wrong": broken}):
        assert run(*words, "--page-size", "32") == 1
    text = capsys.readouterr().out
    assert "FAILED RuntimeError: no kernel image is available" in text
    assert "WRONG 3 failed" in text
    result = json.loads(path.read_text())
    assert [row["error"] for row in result["failed"]] == ["RuntimeError: no kernel image is available"] * 3
    assert [row["provider"] for row in result["rows"]] == ["sdpa", "sdpa"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("check --device foo", "'foo' is no device; take cpu, cuda or cuda:N"),
        ("check --cases -1", "-1 is too small, must be 0 or more"),
        ("check --jobs 0", "0 is too small, must be 1 or more"),
        ("info --q-len 0", "0 is too small, must be 1 or more"),
        ("info --arch 5", "5 is too small, must be 80 or more"),
        ("bench --device cuda:x", "'cuda:x' is no device"),
        ("bench --no-such-option", "unrecognized arguments: --no-such-option"),
        ("bench plot", "the following arguments are required: RESULT.json"),
    ],
)
def test_arguments_that_mean_nothing(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words.split()) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "junk.pt"
    path.write_text("junk")
    assert run("check", "--dump", str(path)) == 2
    assert "cannot be read as torch.save's file" in capsys.readouterr().err
