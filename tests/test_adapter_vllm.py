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

import treeattn
from treeattn.adapters.vllm import DraftTrees, VerifyStep, accept_trees, depth_positions_, plugin
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


def test_trees_are_gathered_by_slot_and_cut_to_rows(device: torch.device) -> None:
    trees = DraftTrees(4, 5, request_at={2: "a", 0: "b"}.get, device=device)
    trees.put([2, 0], ["a", "b"], torch.tensor([[-1, 0, 0, 1], [-1, 0, 0, 0]], dtype=torch.int32, device=device))
    taken = trees.take([0, 1, 2], [True, True, True])
    assert taken is not None
    assert taken.tolist() == [0, 4, 2, 4]
    starts = torch.tensor([0, 3, 8, 10, 10], dtype=torch.int32, device=device)
    parents, num_nodes = trees.gather(taken, starts, 12)
    assert parents[:10].tolist() == [-1, 0, 0, -1, 0, 1, 2, 3, -1, 0]
    assert num_nodes.tolist() == [3, 5, 2, 0]


@pytest.mark.gpu
def test_a_step_waits_for_nothing(device: torch.device) -> None:
    """Trees, positions and the walk around a forward, without a host sync."""
    trees = DraftTrees(4, 5, request_at={0: "a", 1: "b"}.get, device=device)
    buffers = treeattn.StaticBuffers(4, 5, device=device)
    kv = treeattn.PagedKV.allocate(4, page_size=16, max_pages_per_request=4, device=device)
    step = buffers.add_group(8, 2, 64, kv=kv, dtype=torch.float16)
    verify = VerifyStep(buffers.layout, kv, {"layer": step}, 10)
    parents = torch.tensor([[-1, 0, 0, 1, 1], [-1, 0, 0, 0, 0]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 5, 10], dtype=torch.int32, device=device)
    prefixes = torch.tensor([20, 9], dtype=torch.int32, device=device)
    sequential = torch.arange(10, device=device)
    positions, tokens = torch.zeros_like(sequential), torch.arange(10, device=device) % 5

    def once() -> torch.Tensor:
        trees.put([0, 1], ["a", "b"], parents)
        taken = trees.take([0, 1], [True, True])
        assert taken is not None
        flat, nodes = trees.gather(taken[:2], starts, 10)
        buffers.update_(parents=flat, num_nodes=nodes, prefix_lens=prefixes, qo_indptr=starts)
        depth_positions_(positions, sequential, verify)
        target = torch.full_like(tokens, 1)
        return accept_trees(verify, tokens, target, logits_indices=sequential, cu_num_logits=starts).num_sampled

    once()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampled = once()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert positions.tolist() == [20, 21, 21, 22, 22, 9, 10, 10, 10, 10]
    assert sampled.tolist() == [2, 2]
