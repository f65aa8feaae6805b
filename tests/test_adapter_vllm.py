"""The vLLM adapter where vLLM is not installed: it says so, and what needs no vLLM works.

Its other tests are in tests/adapters/vllm, in an environment of their own.
"""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys

import pytest
import torch

from treeattn.adapters.vllm import DraftTrees, plugin
from treeattn.cli import main

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")


def test_the_package_imports_no_vllm() -> None:
    code = "import sys, treeattn.adapters.vllm.plugin; sys.exit('vllm' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_info_says_that_vllm_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--vllm"]) == 2
    assert "vLLM is not installed" in capsys.readouterr().err


def test_register_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm.treeattn"):
        plugin.register()
    assert "treeattn is off" in caplog.text


def test_the_backend_says_what_it_was_made_for() -> None:
    with pytest.raises(ImportError, match=r"made for vLLM 0\.33\.0, and None differs from it"):
        importlib.import_module("treeattn.adapters.vllm.backend")


def test_trees_are_gathered_by_slot_and_cut_to_rows() -> None:
    trees = DraftTrees(4, 5, request_at={2: "a", 0: "b"}.get, device="cpu")
    trees.put([2, 0], ["a", "b"], torch.tensor([[-1, 0, 0, 1], [-1, 0, 0, 0]], dtype=torch.int32))
    taken = trees.take([0, 1, 2], [True, True, True])
    assert taken is not None
    assert taken.tolist() == [0, 4, 2, 4]
    starts = torch.tensor([0, 3, 8, 10, 10], dtype=torch.int32)
    parents, num_nodes = trees.gather(taken, starts, 12)
    assert parents[:10].tolist() == [-1, 0, 0, -1, 0, 1, 2, 3, -1, 0]
    assert num_nodes.tolist() == [3, 5, 2, 0]
