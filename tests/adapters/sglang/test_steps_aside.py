"""What treeattn leaves to SGLang, and what it refuses."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention import triton_backend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend as Original
from sglang_bodies import Graph, Step, World, random_tree


def make_step(world: World) -> Step:
    return Step(world, [random_tree(17, seed) for seed in range(3)], [5, 30, 0])


def test_name_and_kind(served: list, device: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "treeattn.sglang"):
        backend = World(device=device, layers_known=True).backend
    assert caplog.messages == ["treeattn serves target verify: 1 groups among the model's layers"]
    assert isinstance(backend, Original)
    assert type(backend).__name__ == "TritonAttnBackend"


@pytest.mark.parametrize("deterministic", [False, True], ids=["two stages", "deterministic"])
@pytest.mark.parametrize("form", ["full", "tree"])
def test_temperature_of_a_layer_that_was_not_known(
    served: list, form: str, deterministic: bool, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The parent gets a mask in the form that it reads, whatever form the step came in, and the same answer as ever."""
    from treeattn.adapters.sglang import backend

    world = World(device=device, deterministic=deterministic)
    world.layer.xai_temperature_len = 4
    step = make_step(world)
    with caplog.at_level(logging.WARNING, "treeattn.sglang"):
        outs = [step.eager(step.full_mask() if form == "full" else step.tree_mask()).clone() for _ in range(2)]
    assert world.backend.treeattn_calls == 0
    asked = [record.getMessage() for record in caplog.records if "temperature" in record.getMessage()]
    assert asked == ["treeattn leaves layer 0 to SGLang's kernel: it asks for an xai temperature"]
    world.backend = Original(world.runner)
    world.backend.enable_deterministic = deterministic
    expected = step.eager(step.full_mask())
    assert not isinstance(world.backend, backend.TritonAttnBackend)
    for out in outs:
        assert torch.equal(out[: step.rows], expected[: step.rows])
    assert float((expected.double() - step.expected()).abs().max()) > 1e-3  # the temperature does something


def test_temperature_in_a_graph(served: list, device: str) -> None:
    world = World(device=device)
    world.layer.xai_temperature_len = 4
    graph, step = Graph(world, 17), make_step(world)
    first = Step(world, [random_tree(17, 9)] * 3, [1, 2, 3])
    graph.replay(first, first.tree_mask(), own=True)
    out = graph.replay(step, step.tree_mask(), own=True).clone()
    assert world.backend.treeattn_calls == 0
    world.backend = Original(world.runner)
    assert torch.equal(out[: step.rows], step.eager(step.full_mask())[: step.rows])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer.xai_temperature_len": 4}, "layer 0 has an xai temperature"),
        ({"layer.is_cross_attention": True}, "layer 0 is no causal self-attention"),
        (
            {"layer.qk_head_dim": 300},
            "layer 0: backend 'triton' cannot do this: it covers head_dim up to 256, got 300; backend='torch' can",
        ),
        ({"runner.is_draft_worker": True}, "this is a draft worker's backend"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_known_beforehand(
    served: list, change: dict, reason: str, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The backend is its parent then: full mask, full answer."""
    world = World(device=device, layers_known=True)
    for name, value in change.items():
        owner, attribute = name.split(".")
        setattr(getattr(world, owner), attribute, value)
    with caplog.at_level(logging.INFO, "treeattn.sglang"):
        world.backend = type(world.backend)(world.runner)
    assert world.backend.treeattn_off == reason
    assert caplog.messages == [f"treeattn leaves this backend to SGLang: {reason}"]
    world.backend.init_cuda_graph_state(3, 3 * 17)
    if not world.runner.is_draft_worker:
        assert world.backend.verify_mask.mode.name == "FULL_MASK"
    world.layer.xai_temperature_len, world.layer.qk_head_dim, world.layer.is_cross_attention = -1, 16, False
    step = make_step(world)
    step.check(step.eager(), budget=1e-5)
    assert world.backend.treeattn_calls == 0


def test_pools_of_four_axes(served: list, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(device=device, layers_known=True)
    pool = world.runner.token_to_kv_pool
    paged = pool.get_key_buffer(0)[None]
    monkeypatch.setattr(pool, "get_key_buffer", lambda layer: paged)
    world.backend = type(world.backend)(world.runner)
    assert world.backend.treeattn_off == "layer 0 has a pool of 4 axes"


def test_context_parallelism(served: list, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(device=device)
    two = SimpleNamespace(attn_tp_size=2, attn_dcp_size=2, attn_dcp_rank=0)
    monkeypatch.setattr(triton_backend, "get_parallel", lambda: two)
    backend = type(world.backend)(world.runner)
    assert backend.treeattn_off == "decode context parallelism of 2"


def test_two_batch_overlap_is_refused(served: list, device: str) -> None:
    from sglang.srt.runtime_context import get_exec

    world = World(device=device)
    with (
        get_exec().overlap.override(enable_two_batch_overlap=True),
        pytest.raises(NotImplementedError, match="start the server without --enable-two-batch-overlap"),
    ):
        type(world.backend)(world.runner)


def test_image_masks_of_extend(served: list, device: str) -> None:
    """A mask in a prefill (gemma's images) is the parent's, with its int32 offsets."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    world = World(device=device)
    step = make_step(world)
    step.eager()
    assert world.backend.treeattn_calls == 1
    batch = step.forward_batch(step.spec_info(step.full_mask()))
    batch.forward_mode, batch.extend_prefix_lens = ForwardMode.EXTEND, batch.seq_lens
    batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = [5, 30, 0], [17, 17, 17]
    batch.extend_seq_lens = torch.tensor([17, 17, 17], dtype=torch.int32, device=device)
    world.backend.init_forward_metadata(batch)
    metadata = world.backend.forward_metadata
    metadata.custom_mask = step.full_mask()
    metadata.mask_indptr = torch.tensor([0, 17 * 22, 17 * 69, 17 * 86], dtype=torch.int32, device=device)
    step.check(step.call(batch))
    assert world.backend.treeattn_calls == 1
