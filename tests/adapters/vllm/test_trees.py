"""Whose tree a request verifies: used once, never another request's, cut and padded to the query rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batch import Batch, Layers, assert_close

from treeattn.adapters.vllm import DraftTrees, current_trees

TREE = [-1, 0, 0, 1, 1, 4]
CHAIN = [-1, 0, 1, 2, 3, 4]


class Table:
    """The runner's request table, and the trees that a drafter hands over."""

    def __init__(self, layers: Layers, **requests: int) -> None:
        self.layers = layers
        self.ids = {slot: name for name, slot in requests.items()}
        width = layers.builders[0].max_q_len
        self.trees = DraftTrees(4, width, request_at=lambda slot: self.ids.get(slot), device="cpu")
        self.trees.install()

    def put(self, name: str, parents: list[int], num_nodes: int | None = None) -> None:
        slot = next(slot for slot, held in self.ids.items() if held == name)
        nodes = None if num_nodes is None else torch.tensor([num_nodes])
        self.trees.put([slot], [name], torch.tensor([parents], dtype=torch.int32), nodes)

    def parents(self, step: Batch, group: int = 0) -> list[list[int]]:
        """Parents that each real request verifies in a step."""
        self.layers.metadata(step)
        layout = self.layers.builders[group].buffers.layout
        flat, starts, nodes = layout.parents.tolist(), layout.qo_indptr.tolist(), layout.num_nodes.tolist()
        return [flat[starts[b] : starts[b] + nodes[b]] for b in range(len(step.lens))]


@pytest.fixture(scope="module")
def layers() -> Layers:
    return Layers()


def test_no_drafter_and_no_entry_are_chains(layers: Layers) -> None:
    step = Batch(lens=[6, 4], prefixes=[20, 5])
    assert current_trees() is None
    layers.metadata(step)
    assert layers.builders[0].buffers.layout.parents[:10].tolist() == CHAIN + CHAIN[:4]
    table = Table(layers, a=0, b=1)
    assert table.parents(step) == [CHAIN, CHAIN[:4]]
    table.put("b", [-1, 0, 0, 0])
    assert table.parents(step) == [CHAIN, [-1, 0, 0, 0]]


def test_a_tree_is_used_once(layers: Layers) -> None:
    table = Table(layers, a=2)
    table.put("a", TREE)
    step = Batch(lens=[6], prefixes=[20], slots=[2])
    assert table.parents(step) == [TREE]
    assert table.parents(step) == [CHAIN]


def test_a_slot_that_another_request_got_is_a_chain(layers: Layers) -> None:
    table = Table(layers, a=2)
    table.put("a", TREE)
    table.ids[2] = "b"
    step = Batch(lens=[6], prefixes=[20], slots=[2])
    assert table.parents(step) == [CHAIN]
    # and it does not come back with its request
    table.ids[2] = "a"
    assert table.parents(step) == [CHAIN]


def test_an_empty_slot_is_a_chain(layers: Layers) -> None:
    table = Table(layers, a=2)
    table.put("a", TREE)
    del table.ids[2]
    assert table.parents(Batch(lens=[6], prefixes=[20], slots=[2])) == [CHAIN]


def test_a_request_that_was_not_in_a_step_keeps_its_tree(layers: Layers) -> None:
    table = Table(layers, a=2, b=0)
    table.put("a", TREE)
    assert table.parents(Batch(lens=[6], prefixes=[20], slots=[0])) == [CHAIN]
    assert table.parents(Batch(lens=[6], prefixes=[20], slots=[2])) == [TREE]


@pytest.mark.parametrize("rows", [4, 40])
def test_a_prefill_drops_the_tree(layers: Layers, rows: int) -> None:
    """A preempted request comes back with a prompt; the tree from before must not mask it, short or long."""
    table = Table(layers, a=1)
    table.put("a", TREE)
    prompt = Batch(lens=[rows], prefixes=[16], slots=[1], prefilling=[True])
    if rows <= 6:
        assert table.parents(prompt) == [CHAIN[:rows]]
    else:
        layers.metadata(prompt)
    assert table.parents(Batch(lens=[6], prefixes=[56], slots=[1])) == [CHAIN]


def test_a_verify_behind_a_prefill_drops_the_tree(layers: Layers) -> None:
    """vLLM sorts verifies first; were one not, it would be a chain of the other kernel."""
    table = Table(layers, a=0, b=1)
    table.put("b", TREE)
    layers.metadata(Batch(lens=[30, 6], prefixes=[0, 20], prefilling=[True, False]))
    assert table.parents(Batch(lens=[6], prefixes=[20], slots=[1])) == [CHAIN]


def test_a_dummy_batch_uses_nothing_up(layers: Layers) -> None:
    """A data-parallel rank without work, or a capture, runs slots 0, 1, ... without any context."""
    table = Table(layers, a=0)
    table.put("a", TREE)
    assert table.parents(Batch(lens=[6, 6], prefixes=[0, 0])) == [CHAIN, CHAIN]
    layers.metadata(Batch(lens=[6, 6], prefixes=[0, 0]), capture=True)
    assert table.parents(Batch(lens=[6], prefixes=[20])) == [TREE]


def test_fewer_rows_than_nodes_cut_the_tree(layers: Layers) -> None:
    table = Table(layers, a=0, b=1, c=2)
    for name in "abc":
        table.put(name, TREE)
    assert table.parents(Batch(lens=[6, 4, 1], prefixes=[20, 9, 3])) == [TREE, TREE[:4], [-1]]


def test_more_rows_than_nodes_are_padding(layers: Layers) -> None:
    table = Table(layers, a=0, b=1, c=2)
    table.put("a", TREE, num_nodes=4)
    table.put("b", [-1, 0])
    table.put("c", TREE, num_nodes=0)  # a drafter that found nothing: the root is still there
    step = Batch(lens=[6, 5, 3], prefixes=[20, 9, 30], parents={0: TREE[:4], 1: [-1, 0], 2: [-1]})
    assert table.parents(step) == [TREE[:4], [-1, 0], [-1]]
    layer = layers.layers[0]
    for name, parents, nodes in (("a", TREE, 4), ("b", [-1, 0], 2), ("c", TREE, 0)):
        table.put(name, parents, nodes)
    metadata, inputs = layers.metadata(step), layers.inputs(step)
    out = layers.forward(layer, step, metadata, inputs)
    assert_close(out, layers.truth(layer, step, inputs[0]), 2e-6)  # rows of padding are 0


def test_a_later_tree_replaces_one_that_was_not_used(layers: Layers) -> None:
    table = Table(layers, a=0)
    table.put("a", TREE)
    table.put("a", [-1, 0, 1, 0, 3, 0])
    assert table.parents(Batch(lens=[6], prefixes=[20])) == [[-1, 0, 1, 0, 3, 0]]


def test_rows_follow_slots_and_not_the_order_of_the_batch(layers: Layers) -> None:
    table = Table(layers, a=3, b=0, c=1)
    table.put("a", TREE)
    table.put("c", [-1, 0, 0, 0, 0, 0])
    step = Batch(lens=[6, 6, 5], prefixes=[20, 9, 1], slots=[1, 0, 3], pad_reqs=1, pad_tokens=6)
    assert table.parents(step) == [[-1, 0, 0, 0, 0, 0], CHAIN, TREE[:5]]


def test_all_cache_groups_of_a_step_have_the_same_trees() -> None:
    layers = Layers(windows=(None, 12))
    assert len(layers.builders) == 2
    table = Table(layers, a=0)
    table.put("a", TREE)
    step = Batch(lens=[6], prefixes=[20])
    assert table.parents(step, group=0) == [TREE]
    layout = layers.builders[1].buffers.layout
    assert layout.parents[:6].tolist() == TREE
    assert table.parents(step, group=1) == [CHAIN]


def test_a_malformed_tree_hurts_its_request_alone(layers: Layers) -> None:
    table = Table(layers, a=0, b=1)
    table.put("a", [-1, 0, 5, 1, 1, 4])
    table.put("b", TREE)
    step = Batch(lens=[6, 6], prefixes=[20, 9])
    assert table.parents(step) == [[], TREE]
    with pytest.raises(ValueError, match="request 0: row 2 has parent 5"):
        layers.builders[0].buffers.check()


def test_another_width_is_refused_by_name(layers: Layers) -> None:
    DraftTrees(4, 17, request_at={}.get, device="cpu").install()
    with pytest.raises(ValueError, match="made for 17 rows a request, vLLM verifies 6"):
        layers.metadata(Batch(lens=[6], prefixes=[20]))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("pipeline_parallel_size", 2, "pipeline parallelism"), ("enable_dbo", True, "microbatches")],
)
def test_trees_are_refused_where_they_cannot_be_whole(
    layers: Layers, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, message: str
) -> None:
    step = Batch(lens=[6], prefixes=[20])
    monkeypatch.setattr(layers.config.parallel_config, name, value)
    layers.metadata(step)  # chains work
    Table(layers, a=0)
    with pytest.raises(NotImplementedError, match=message):
        layers.metadata(step)


def test_metadata_without_request_slots_has_chains_and_refuses_trees(layers: Layers) -> None:
    """The V1 runner says no `req_idx`."""
    builder = layers.builders[0]
    real = builder.build
    builder.build = lambda prefix, common, fast=False: real(prefix, common.replace(req_idx=None), fast)
    try:
        step = Batch(lens=[6], prefixes=[20])
        layers.metadata(step)
        assert builder.buffers.layout.parents[:6].tolist() == CHAIN
        table = Table(layers, a=0)
        with pytest.raises(NotImplementedError, match="use the V2 model runner"):
            table.parents(step)
    finally:
        del builder.build
