"""The helpers around the forward: positions, the walk in vLLM's terms, compaction; and what `DraftTrees` refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batch import Batch, Layers

from treeattn.adapters.vllm import DraftTrees, accept_trees, compact_trees_, depth_positions_

TREE = [-1, 0, 0, 1, 1, 4]


@pytest.fixture(scope="module")
def layers() -> Layers:
    return Layers(windows=(None, None))


def prepared(layers: Layers, step: Batch, slots: list[int], tree: list[int] = TREE) -> Any:
    """The verify step of a batch whose requests in `slots` have a tree."""
    trees = DraftTrees(4, 6, request_at=str, device="cpu")
    trees.install()
    trees.put(slots, [str(slot) for slot in slots], torch.tensor([tree] * len(slots), dtype=torch.int32))
    return layers.metadata(step)["model.layers.0.attn"].verify


def test_positions_follow_depth_for_verified_rows_alone(layers: Layers) -> None:
    step = Batch(lens=[6, 1, 9], prefixes=[20, 5, 30], prefilling=[False, False, True], pad_tokens=2)
    verify = prepared(layers, step, [0])
    sequential = torch.tensor([*range(20, 26), 5, *range(30, 39), 77, 78])
    out = torch.full((24,), -9)
    found = depth_positions_(out, sequential, verify)
    assert found.tolist() == [20, 21, 21, 22, 22, 23, 5, *range(30, 39), 77, 78]
    assert found.data_ptr() == out.data_ptr()
    assert out[18:].tolist() == [-9] * 6
    assert depth_positions_(out, sequential, None).tolist() == sequential.tolist()
    with pytest.raises(ValueError, match="out has 4 positions, the step has 18"):
        depth_positions_(out[:4], sequential, verify)
    with pytest.raises(NotImplementedError, match="only RoPE with one position"):
        depth_positions_(out, sequential.expand(3, -1), verify)


def test_the_walk_in_a_batch_of_every_kind(layers: Layers) -> None:
    """A tree, a chain, a decode, a short prompt with one logits row, and a prefill."""
    step = Batch(
        lens=[6, 3, 1, 4, 10], prefixes=[20, 9, 7, 0, 16], slots=[0, 1, 2, 3, 3],
        prefilling=[False, False, False, True, True],
    )  # fmt: skip
    layers_of_five = Layers(max_reqs=5)
    verify = prepared(layers_of_five, step, [0])
    draft = torch.tensor([50, 11, 12, 13, 14, 15, 60, 61, 62, 70, 1, 2, 3, 4, *range(10)], dtype=torch.int32)
    # after root 11, after 11 (row 1) 14, after 14 (row 4) 15, after 15 (row 5) 99
    after = [11, 14, 0, 0, 15, 99, 61, 8, 0, 33, 44, 55]
    logits_rows = [*range(10), 13, 23]
    found = accept_trees(
        verify, draft, torch.tensor(after),
        logits_indices=torch.tensor(logits_rows), cu_num_logits=torch.tensor([0, 6, 9, 10, 11, 12], dtype=torch.int32),
    )  # fmt: skip
    assert found.num_sampled.tolist() == [4, 2, 1, 1, 1]
    assert found.num_rejected.tolist() == [2, 1, 0, 0, 0]
    assert [row[: int(count)].tolist() for row, count in zip(found.sampled, found.num_sampled, strict=True)] == [
        [11, 14, 15, 99], [61, 8], [33], [44], [55],
    ]  # fmt: skip
    assert found.sampled[0].tolist() == [11, 14, 15, 99, -1, -1]
    assert found.accepted.rows[0, :4].tolist() == [0, 1, 4, 5]


def test_drafts_behind_a_prompts_tail_are_rejected(layers: Layers) -> None:
    """Three prompt tokens and two placeholders: the first logits row counts, as after a remote prefill."""
    step = Batch(lens=[5], prefixes=[16], prefilling=[True])
    verify = prepared(layers, step, [0])
    found = accept_trees(
        verify, torch.tensor([4, 5, 6, 21, 22]), torch.tensor([21, 22, 23]),
        logits_indices=torch.tensor([2, 3, 4]),
        cu_num_logits=torch.tensor([0, 3], dtype=torch.int32),
    )  # fmt: skip
    assert (found.sampled[0, 0].item(), found.num_sampled.tolist(), found.num_rejected.tolist()) == (21, [1], [2])


def test_a_malformed_tree_yields_no_token(layers: Layers) -> None:
    step = Batch(lens=[6], prefixes=[20])
    trees = DraftTrees(4, 6, request_at=str, device="cpu")
    trees.install()
    trees.put([0], ["0"], torch.tensor([[-1, 0, 5, 1, 1, 4]]))
    verify = layers.metadata(step)["model.layers.0.attn"].verify
    found = accept_trees(
        verify, torch.zeros(6, dtype=torch.int32), torch.zeros(6, dtype=torch.int64),
        logits_indices=torch.arange(6),
        cu_num_logits=torch.tensor([0, 6], dtype=torch.int32),
    )  # fmt: skip
    assert (found.num_sampled.tolist(), found.num_rejected.tolist()) == ([0], [6])
    with pytest.raises(ValueError, match="row 2 has parent 5"):
        layers.builders[0].buffers.check()


def test_without_a_verify_step_each_request_samples_once() -> None:
    found = accept_trees(
        None, torch.zeros(12, dtype=torch.int32), torch.tensor([7, 8]),
        logits_indices=torch.tensor([8, 11]),
        cu_num_logits=torch.tensor([0, 1, 2], dtype=torch.int32),
    )  # fmt: skip
    assert found.sampled.tolist() == [[7], [8]]
    assert (found.num_sampled.tolist(), found.num_rejected.tolist()) == ([1, 1], [0, 0])


def test_mismatched_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="3 target tokens, but 2 logits rows"):
        accept_trees(
            None, torch.zeros(2), torch.zeros(3),
            logits_indices=torch.arange(2), cu_num_logits=torch.tensor([0, 2]),
        )  # fmt: skip


def test_compaction_moves_accepted_rows_and_nothing_else(layers: Layers) -> None:
    """Across a block border, in every layer, once where layers share a cache: the second time would move what moved."""
    step = Batch(lens=[6, 6], prefixes=[13, 40])
    verify = prepared(layers, step, [0, 1], [-1, 0, 0, 2, 3, 3])
    first, second = layers.layers
    before = first.kv_cache.clone()
    own = second.kv_cache
    second.kv_cache = first.kv_cache  # as a layer with kv_sharing_target_layer_name has it
    try:
        rows = torch.full((4, 6), -1, dtype=torch.int32)
        rows[0, :4] = torch.tensor([0, 2, 3, 4])
        rows[1, :2] = torch.tensor([0, 2])
        accepted = accept_trees(
            verify, torch.arange(12) % 6, torch.tensor([2, 9, 3, 4, 9, 9, 2, 0, 9, 0, 0, 0]),
            logits_indices=torch.arange(12),
            cu_num_logits=torch.tensor([0, 6, 12], dtype=torch.int32),
        ).accepted  # fmt: skip
        assert torch.equal(accepted.rows[:2], rows[:2])
        compact_trees_(verify, accepted, layers.config.compilation_config.static_forward_context)
    finally:
        second.kv_cache = own
    expected = before.clone()
    for request, path, prefix in ((0, [0, 2, 3, 4], 13), (1, [0, 2], 40)):
        table = layers.tables[0][request].long()
        for to, node in enumerate(path):
            source, target = prefix + node, prefix + to
            expected[table[target // 16], :, target % 16] = before[table[source // 16], :, source % 16]
    assert torch.equal(first.kv_cache, expected)
    assert not torch.equal(expected, before)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([0], ["a", "b"], torch.zeros(1, 3, dtype=torch.int32)), ValueError, "1 slots, but 2 requests"),
        (([0], ["a"], torch.zeros(3, dtype=torch.int32)), ValueError, r"parents: expected \[slots, nodes\]"),
        (([0], ["a"], torch.zeros(1, 17, dtype=torch.int32)), ValueError, "trees of 17 nodes .* of 1 to 8 rows"),
        (([4], ["a"], torch.zeros(1, 3, dtype=torch.int32)), ValueError, "slot 4 is outside the 4 slots"),
        (([1, 1], ["a", "b"], torch.zeros(2, 3, dtype=torch.int32)), ValueError, "a slot occurs twice"),
        (([0], ["a"], torch.zeros(1, 3)), TypeError, "parents must be int32 or int64, got torch.float32"),
        (([0], ["a"], torch.zeros(1, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)), ValueError, "num_nodes"),
    ],
)
def test_trees_that_do_not_fit_are_refused_before_anything_is_written(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    trees = DraftTrees(4, 8, request_at={0: "a"}.get, device="cpu")
    before = trees.parents.clone()
    with pytest.raises(error, match=message):
        trees.put(*arguments)
    assert torch.equal(trees.parents, before)
    assert trees.take([0], [True]) is None


def test_capacities_are_positive() -> None:
    with pytest.raises(ValueError, match="max_q_len is 0"):
        DraftTrees(4, 0, request_at={}.get, device="cpu")
