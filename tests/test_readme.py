"""The README's example runs and prints what it says, and its table of times is what the results say."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from treeattn.capabilities import support_table

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def readme_table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "benchmarks/readme_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def example() -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    return code


def test_example_is_short() -> None:
    assert sum(bool(line.strip()) for line in example().splitlines()) <= 20


def test_example_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(compile(example(), "README.md", "exec"), names)
    (promised,) = re.findall(r"^print\(.*?\)  # (.*)$", example(), flags=re.MULTILINE)
    assert capsys.readouterr().out.strip() == promised
    out, k_cache = names["out"], names["k_cache"]
    assert torch.isfinite(out).all()
    # Row 7 is padding. Rows 0 and 1 of the first tree are different queries, so their outputs differ.
    assert (out[7] == 0).all()
    assert not torch.equal(out[0], out[1])
    # Node 3 of the first tree, at position 24, moved to position 23; both are in page 0.
    assert torch.equal(k_cache[0, 7], k_cache[0, 8])


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


def results() -> dict[str, Any]:
    geometry = {"kind": "gqa", "batch": 1, "q_len": 17, "prefix": 2048, "qo_heads": 32, "kv_heads": 8}
    base = {**geometry, "page_size": 64, "kv_dtype": "bf16", "floor_us": 2.0}
    rows = [
        {**base, "provider": "treeattn_triton", "us": 8.0},
        {**base, "provider": "fa3_causal", "us": 16.0},
        {**base, "provider": "fa3_causal", "page_size": 128, "us": 12.8},
        {**base, "provider": "treeattn_triton", "kv_dtype": "e4m3", "us": 1.0},
    ]
    return {"env": {"gpu": "H200", "torch": "2.11", "triton": "3.6"}, "rows": rows}


def test_table_takes_the_best_page_size_of_each_provider(readme_table: ModuleType) -> None:
    table = readme_table.render(results())
    assert "| 1 | 17 | 2048 | 32/8 | 2.0 | 8.0 | 25% | 12.8 |" in table
    assert "a tree costs 0.62x (0.62x to 0.62x) with the Triton kernels, in geometric mean over 1 rows" in table
    assert table.count("32/8") == 1


def test_both_kernels_stand_beside_each_other(readme_table: ModuleType) -> None:
    both = results()
    both["rows"].append({**both["rows"][0], "provider": "treeattn_cuda", "us": 6.4})
    table = readme_table.render(both)
    assert "| floor | treeattn CUDA | treeattn Triton | share of floor |" in table
    assert "| 1 | 17 | 2048 | 32/8 | 2.0 | 6.4 | 8.0 | 31% | 12.8 |" in table
    words = "a tree costs 0.50x (0.50x to 0.50x) with the CUDA kernels and 0.62x (0.62x to 0.62x) with the Triton"
    assert words in table


def test_table_goes_between_the_marks_and_nowhere_else(readme_table: ModuleType) -> None:
    text = f"a\n{readme_table.BEGIN}\nold\n{readme_table.END}\nb"
    assert readme_table.insert(text, "new") == text.replace("old", "new")
    with pytest.raises(ValueError, match="once each"):
        readme_table.insert("no marks", "new")


def test_table_of_this_readme_is_what_the_results_say(readme_table: ModuleType) -> None:
    assert readme_table.insert(README, readme_table.table_of(readme_table.RESULTS)) == README


def test_support_matrix_of_this_readme_is_what_the_code_says(readme_table: ModuleType) -> None:
    assert readme_table.insert(README, support_table(), readme_table.SUPPORT) == README


def test_table_comes_from_the_file_and_says_when_there_is_none(readme_table: ModuleType, tmp_path: Path) -> None:
    assert readme_table.table_of(tmp_path / "missing.json") == readme_table.NO_RESULTS
    path = tmp_path / "h200-gqa.json"
    path.write_text(json.dumps(results()))
    assert readme_table.table_of(path) == readme_table.render(results())


def test_results_of_mla_beside_it_give_a_second_table(readme_table: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "h200-gqa.json"
    path.write_text(json.dumps(results()))
    geometry = {"kind": "mla", "batch": 1, "q_len": 17, "prefix": 16384, "qo_heads": 8, "kv_heads": 1}
    base = {**geometry, "page_size": 64, "kv_dtype": "bfloat16", "floor_us": 6.2}
    rows = [{**base, "provider": "treeattn_triton", "us": 20.0}, {**base, "provider": "flashmla_causal", "us": 28.8}]
    (tmp_path / "h200-mla.json").write_text(json.dumps({"env": results()["env"], "rows": rows}))
    first, second = readme_table.table_of(path).split("\n\n| batch")
    assert first == readme_table.render(results())
    assert "FlashMLA causal chain" in second
    assert "| 1 | 17 | 16384 | 8/1 | 6.2 | 20.0 | 31% | 28.8 | 2276.9 (SGLang Triton) |" in second
    assert "Against FlashMLA's causal chain, which takes no tree, a tree costs 0.69x (0.69x to 0.69x)" in second


def test_table_of_nothing_is_refused(readme_table: ModuleType) -> None:
    with pytest.raises(ValueError, match="no bf16 GQA row"):
        readme_table.render({"env": {}, "rows": []})
