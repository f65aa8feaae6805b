"""The backend in vLLM's attention layer: its numbers, padded batches, prefills beside verifies, capture, drafts."""

from __future__ import annotations

from typing import Any

import batch as batches
import pytest
import torch
from batch import HEAD_DIM, HEADS, Batch, Layers, assert_close
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl, TritonAttentionMetadata

from treeattn.adapters.vllm import DraftTrees
from treeattn.adapters.vllm import impl as impl_module
from treeattn.adapters.vllm.builder import TreeAttentionMetadata, TreeAttentionMetadataBuilder

TOLERANCE = {"float32": 2e-6, "float16": 2e-3}
TREE = [-1, 0, 0, 1, 1, 4]


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that a GPU runs, in the interpreter."""
    monkeypatch.setattr(TreeAttentionMetadataBuilder, "kernel_backend", "triton")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Steps with which treeattn was called."""
    seen: list[Any] = []
    real = impl_module.tree_attention

    def counted(q: Any, k: Any, v: Any, step: Any, **options: Any) -> Any:
        seen.append(step)
        return real(q, k, v, step, **options)

    monkeypatch.setattr(impl_module, "tree_attention", counted)
    return seen


def vllm_output(layers: Layers, layer: Any, metadata: Any, q: torch.Tensor) -> torch.Tensor:
    """What vLLM's own Triton impl (unified_attention) makes of a batch of chains."""
    out = torch.zeros(len(q), HEADS, HEAD_DIM, dtype=q.dtype)
    plain = TritonAttentionMetadata(
        **{name: getattr(metadata, name) for name in TritonAttentionMetadata.__dataclass_fields__}
    )
    return TritonAttentionImpl.forward(
        layer.impl, layer, q.view(-1, HEADS, HEAD_DIM), None, None, layer.kv_cache, plain, out
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float16"},
        {"layout": "LBHNC"},
        {"layout": "BLNHC", "windows": (None, None)},
        {"windows": (20,)},
        {"logits_soft_cap": 5.0},
        {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
        {"dtype": "float16", "layout": "LBHNC", "windows": (9,), "logits_soft_cap": 7.0},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_chains_in_a_padded_batch_equal_unified_attention(options: dict[str, Any], calls: list[Any]) -> None:
    layers = Layers(**options)
    layer = layers.layers[0]
    step = Batch(lens=[6, 4], prefixes=[37, 16], pad_reqs=2, pad_tokens=3)
    metadata = layers.metadata(step)
    inputs = layers.inputs(step)
    out = layers.forward(layer, step, metadata, inputs)
    assert len(calls) == 1
    tolerance = TOLERANCE[options.get("dtype", "float32")]
    theirs = vllm_output(layers, layer, metadata[layer.layer_name], inputs[0])
    assert_close(out[: step.rows], theirs[: step.rows].double(), 2 * tolerance)
    assert_close(out, layers.truth(layer, step, inputs[0]), tolerance)
    assert torch.equal(out[step.rows :], torch.zeros_like(out[step.rows :]))


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_fp8_cache_with_scales(layout: str) -> None:
    layers = Layers(dtype="float16", cache_dtype="fp8", layout=layout)
    layer = layers.layers[0]
    layer._k_scale.fill_(0.5)
    layer._v_scale.fill_(1.75)
    assert not layer.impl.supports_quant_query_input
    assert layer.query_quant is None
    step = Batch(lens=[6, 3], prefixes=[21, 40], pad_reqs=1, pad_tokens=2, parents={0: TREE})
    trees(layers, {0: TREE})
    metadata = layers.metadata(step)
    inputs = layers.inputs(step)
    out = layers.forward(layer, step, metadata, inputs)
    assert_close(out, layers.truth(layer, step, inputs[0]), 4e-3)


def test_fp8_prefills_beside_verifies() -> None:
    layers = Layers(dtype="float16", cache_dtype="fp8")
    layer = layers.layers[0]
    layer._k_scale.fill_(0.5)
    layer._v_scale.fill_(1.75)
    step = Batch(lens=[6, 11], prefixes=[21, 5], prefilling=[False, True])
    inputs = layers.inputs(step, extra=1)
    out = layers.forward(layer, step, layers.metadata(step), inputs)
    assert_close(out[:6], layers.truth(layer, step, inputs[0])[:6], 4e-3)
    assert_close(out[6:], layers.truth(layer, step, inputs[0])[6:], 2e-2)  # vLLM's kernel rounds what it dequantises


def trees(layers: Layers, of_slot: dict[int, list[int]], requests: dict[int, str] | None = None) -> DraftTrees:
    """Trees handed over for slots; the runner's table is `requests`."""
    table = requests or {slot: f"request-{slot}" for slot in range(8)}
    width = layers.builders[0].max_q_len
    found = DraftTrees(4, width, request_at=table.get, device="cpu")
    found.install()
    for slot, parents in of_slot.items():
        found.put([slot], [f"request-{slot}"], torch.tensor([parents], dtype=torch.int32))
    return found


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_trees_of_each_request(
    backend: str, window: int | None, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three shapes in one padded batch, rows in another order than slots."""
    monkeypatch.setattr(TreeAttentionMetadataBuilder, "kernel_backend", backend)
    layers = Layers(windows=(window, window))
    shapes = {3: TREE, 0: [-1, 0, 0, 0, 0, 0]}
    trees(layers, shapes)
    step = Batch(
        lens=[6, 6, 5], prefixes=[37, 16, 3], slots=[3, 1, 0], pad_reqs=1, pad_tokens=6,
        parents={0: TREE, 2: [-1, 0, 0, 0, 0]},
    )  # fmt: skip
    metadata = layers.metadata(step)
    for layer in layers.layers:
        inputs = layers.inputs(step)
        out = layers.forward(layer, step, metadata, inputs)
        truth = layers.truth(layer, step, inputs[0])
        assert_close(out, truth, TOLERANCE["float32"])
        chain = layers.truth(layer, Batch(step.lens, step.prefixes), inputs[0])
        assert float((chain - truth).abs().max()) > 0.01
    assert len(calls) == len(layers.layers)


def test_the_device_knows_the_rows_of_a_request_and_the_host_does_not() -> None:
    """Adaptive verification divides the drafts among the requests on the device; only the total is the host's."""
    layers = Layers()
    layer = layers.layers[0]
    trees(layers, {0: TREE, 1: TREE})
    step = Batch(lens=[2, 6], prefixes=[37, 16], pad_reqs=1, parents={0: TREE[:2], 1: TREE})
    metadata = layers.metadata(step, query_start_loc_cpu=torch.tensor([0, 4, 8, 8], dtype=torch.int32))
    inputs = layers.inputs(step)
    out = layers.forward(layer, step, metadata, inputs)
    assert_close(out, layers.truth(layer, step, inputs[0]), TOLERANCE["float32"])


@pytest.mark.parametrize("keys", [19, 20, 21])
def test_exact_edge_of_the_window(keys: int) -> None:
    """vLLM's window of 20 keeps a row's own key and 19 before it, by position: q = 0 weighs each the same."""
    layers = Layers(windows=(20,))
    layer = layers.layers[0]
    trees(layers, {0: TREE})
    step = Batch(lens=[6], prefixes=[30], parents={0: TREE})
    metadata = layers.metadata(step)
    layer.kv_cache.zero_()
    # V is 1 for one key of the prefix alone: position `30 + depth - (keys - 1)` counts from each row's own
    depth = torch.tensor([0, 1, 1, 2, 2, 3])
    q, k, v = (torch.zeros_like(x) for x in layers.inputs(step))
    at = 30 - (keys - 1)
    layer.kv_cache[layers.tables[0][0, at // 16], :, at % 16, HEAD_DIM:] = 1.0
    out = layers.forward(layer, step, metadata, (q, k, v))
    # the row of depth d is d further from that key
    seen = (keys - 1 + depth) < 20
    expected = torch.where(seen, 1 / 20, 0.0)
    assert_close(out, expected[:, None, None].expand(6, HEADS, HEAD_DIM).double(), 1e-6)


def test_two_windows_in_a_model_are_two_steps(calls: list[Any]) -> None:
    layers = Layers(windows=(None, 12, None, 12))
    trees(layers, {0: TREE})
    step = Batch(lens=[6, 2], prefixes=[44, 25], parents={0: TREE})
    metadata = layers.metadata(step)
    for layer in layers.layers:
        inputs = layers.inputs(step)
        out = layers.forward(layer, step, metadata, inputs)
        assert_close(out, layers.truth(layer, step, inputs[0]), TOLERANCE["float32"])
    assert [one.window_left for one in calls] == [-1, 11, -1, 11]


def test_layers_of_one_cache_group_may_have_unlike_windows() -> None:
    """Without vLLM's hybrid cache manager every layer is in one group."""
    layers = Layers(windows=(None, 12, 12))
    of_group = layers.builders[0]
    names = [layer.layer_name for layer in layers.layers]
    builder = type(of_group)(of_group.kv_cache_spec, names, layers.config, torch.device("cpu"), 8)
    assert [builder.steps[name].window_left for name in names] == [-1, 11, 11]
    assert len(builder.buffers.groups) == 2


def test_prefills_go_to_vllm_beside_verifies(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Layers()
    layer = layers.layers[0]
    theirs: list[int] = []
    real = TritonAttentionImpl.forward

    def watched(self: Any, of: Any, query: Any, *rest: Any) -> Any:
        theirs.append(len(query))
        return real(self, of, query, *rest)

    monkeypatch.setattr(TritonAttentionImpl, "forward", watched)
    trees(layers, {0: TREE})
    step = Batch(
        lens=[6, 1, 17, 30], prefixes=[33, 20, 0, 9], prefilling=[False, False, True, True], parents={0: TREE}
    )
    metadata = layers.metadata(step)
    inputs = layers.inputs(step, extra=2)  # a PIECEWISE graph pads the tensors and not the metadata
    out = layers.forward(layer, step, metadata, inputs)
    assert_close(out, layers.truth(layer, step, inputs[0]), TOLERANCE["float32"])
    assert theirs == [47]
    assert len(calls) == 1
    assert torch.equal(out[step.rows :], torch.zeros(2, HEADS, HEAD_DIM))

    alone = Batch(lens=[40], prefixes=[11], prefilling=[True])
    metadata = layers.metadata(alone)
    inputs = layers.inputs(alone, extra=3)
    out = layers.forward(layer, alone, metadata, inputs)
    assert_close(out, layers.truth(layer, alone, inputs[0]), TOLERANCE["float32"])
    assert len(calls) == 1


def test_without_speculative_decoding_it_decodes() -> None:
    layers = Layers(drafts=0)
    layer = layers.layers[0]
    assert layers.builders[0].max_q_len == 1
    step = Batch(lens=[1, 1, 9], prefixes=[20, 5, 3], prefilling=[False, False, True])
    inputs = layers.inputs(step)
    out = layers.forward(layer, step, layers.metadata(step), inputs)
    assert_close(out, layers.truth(layer, step, inputs[0]), TOLERANCE["float32"])


def test_more_rows_than_the_buffers_hold_are_zero() -> None:
    """Data-parallel ranks pad to the largest batch of any."""
    layers = Layers(max_reqs=2)
    layer = layers.layers[0]
    step = Batch(lens=[6, 6], prefixes=[20, 5])
    inputs = layers.inputs(step, extra=40)
    out = layers.forward(layer, step, layers.metadata(step), inputs)
    assert_close(out[:12], layers.truth(layer, step, inputs[0])[:12], TOLERANCE["float32"])
    assert torch.equal(out[12:], torch.zeros(40, HEADS, HEAD_DIM))


def test_every_row_of_the_output_is_written() -> None:
    """The layer's output is uninitialised memory; NaN in it, and in q of rows of no request, must not survive."""
    layers = Layers()
    layer = layers.layers[0]
    step = Batch(lens=[5, 2], prefixes=[20, 5], pad_reqs=2, pad_tokens=9)
    metadata = layers.metadata(step)[layer.layer_name]
    q = layers.inputs(step)[0].view(-1, HEADS, HEAD_DIM)
    out = torch.full_like(q, torch.nan)
    layer.impl.forward(layer, q, None, None, layer.kv_cache, metadata, out)
    assert torch.isfinite(out).all()


def test_negative_contexts_at_capture_are_empty_requests() -> None:
    layers = Layers()
    builder = layers.builders[0]
    step = Batch(lens=[6, 6], prefixes=[0, 0])
    layer = layers.layers[0]
    metadata = layers.metadata(step, capture=True)[layer.layer_name]
    assert metadata.seq_lens.tolist() == [1, 1]  # as vLLM's builder leaves them for the capture
    layer.kv_cache.fill_(torch.nan)
    shrunk = Batch(lens=[6, 6], prefixes=[-5, -5])
    metadata = layers.metadata(shrunk)[layer.layer_name]
    q = torch.randn(12, HEADS, HEAD_DIM)
    out = torch.full_like(q, torch.nan)
    layer.impl.forward(layer, q, None, None, layer.kv_cache, metadata, out)
    assert torch.equal(out, torch.zeros_like(out))
    builder.buffers.check()  # nothing to report


def test_a_captured_step_reads_what_the_next_build_wrote() -> None:
    """In a FULL graph vLLM ignores the metadata of later steps: the first one's must show the new content."""
    layers = Layers()
    layer = layers.layers[0]
    first = Batch(lens=[6, 6], prefixes=[20, 30], pad_reqs=2)
    captured = layers.metadata(first)
    before = captured[layer.layer_name].verify
    trees(layers, {1: TREE})
    second = Batch(lens=[6, 6, 6, 2], prefixes=[50, 7, 33, 1], parents={1: TREE})
    after = layers.metadata(second)[layer.layer_name].verify
    assert (after.layout, after.kv) == (before.layout, before.kv)
    assert after.steps[layer.layer_name] is before.steps[layer.layer_name]
    inputs = layers.inputs(second)
    out = layers.forward(layer, second, captured, inputs)
    assert_close(out, layers.truth(layer, second, inputs[0]), TOLERANCE["float32"])


def test_a_corrupted_output_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of these tests is not blind: one number of one row is enough."""
    layers = Layers()
    layer = layers.layers[0]
    real = impl_module.tree_attention

    def corrupted(*args: Any, out: torch.Tensor, **options: Any) -> torch.Tensor:
        real(*args, out=out, **options)
        out[4, 1, 3] += 1e-4
        return out

    monkeypatch.setattr(impl_module, "tree_attention", corrupted)
    step = Batch(lens=[6], prefixes=[20])
    inputs = layers.inputs(step)
    out = layers.forward(layer, step, layers.metadata(step), inputs)
    with pytest.raises(AssertionError, match=r"row 4: off by 0\.0001"):
        assert_close(out, layers.truth(layer, step, inputs[0]), TOLERANCE["float32"])


def test_draft_layers_and_other_masks_stay_with_vllm(calls: list[Any]) -> None:
    layers = Layers()
    layer = layers.layers[0]
    step = Batch(lens=[6, 3], prefixes=[20, 9])
    metadata = layers.metadata(step, causal=False)[layer.layer_name]
    assert type(metadata) is TritonAttentionMetadata
    builder = layers.builders[0]
    layer.is_draft_layer = True
    args = (builder.kv_cache_spec, [layer.layer_name], layers.config, torch.device("cpu"), 8)
    layers.groups[0][0].metadata_builders[0] = TreeAttentionMetadataBuilder(*args)
    metadata = layers.metadata(step)
    assert type(metadata[layer.layer_name]) is TritonAttentionMetadata
    inputs = layers.inputs(step)
    out = layers.forward(layer, step, metadata, inputs)
    assert_close(out[: step.rows], layers.truth(layer, step, inputs[0])[: step.rows], TOLERANCE["float32"])
    assert not calls


def test_profiling_run_and_quantised_output() -> None:
    layers = Layers()
    layer = layers.layers[0]
    q = torch.randn(3, HEADS, HEAD_DIM)
    out = torch.full_like(q, torch.nan)
    layer.impl.forward(layer, q, None, None, layer.kv_cache, None, out)
    assert torch.equal(out, torch.zeros_like(out))
    step = Batch(lens=[3], prefixes=[20])
    metadata = layers.metadata(step)[layer.layer_name]
    assert isinstance(metadata, TreeAttentionMetadata)
    assert not layer.impl.fused_output_quant_supported(None)
    with pytest.raises(NotImplementedError, match="quantised output"):
        layer.impl.forward(layer, q, None, None, layer.kv_cache, metadata, out, torch.ones(1))


def test_graph_support_and_memory() -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    layers = Layers(drafts=5)
    assert layers.graphs.min_cg_support is AttentionCGSupport.UNIFORM_BATCH
    builder = layers.builders[0]
    assert builder.get_varlen_cudagraph_max_query_len(layers.config, builder.kv_cache_spec) == 6
    assert builder.reorder_batch_threshold == 6
    assert builder.buffers.layout.total_q == 24
    assert builder.kv.page_size == batches.BLOCK
