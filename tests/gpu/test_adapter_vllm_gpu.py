"""What the vLLM adapter does around a forward, on the device: no vLLM is needed."""

from __future__ import annotations

import pytest
import torch

import treeattn
from treeattn.adapters.vllm import DraftTrees, VerifyStep, accept_trees, depth_positions_

pytestmark = pytest.mark.gpu


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
