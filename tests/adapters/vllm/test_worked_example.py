"""The example of docs/vllm.md, word for word, in vLLM's V2 runner: decoding with trees equals plain greedy decoding.

The model's own dense attention says what greedy decoding is. The drafter knows it, and hides the right tokens behind
wrong siblings, so that a step yields several tokens only if masks, positions, the walk and the compaction all work.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit
import pytest
import torch

from treeattn.adapters.vllm import impl as impl_module
from treeattn.adapters.vllm.builder import TreeAttentionMetadataBuilder

DOCS = Path(__file__).resolve().parents[3] / "docs" / "vllm.md"
PROMPTS = {"a": [3, 5, 7, 11, 2], "b": [9, 9, 4, 1, 30, 22, 17, 5, 40, 41, 8, 2, 19, 3, 3, 25, 6], "c": [12, 40]}
COUNT = 14
# node 2 is right, 4 is right under it, 5 under that: never the first rows, never the first child
TREE = [-1, 0, 0, 1, 2, 4]
WRONG, RIGHT = (1, 3), (2, 4, 5)


def example() -> dict[str, Any]:
    """The code block of the docs, run; vLLM's `init_speculator` is patched by it."""
    code = re.search(r"```python\n(import torch\n.*?)```", DOCS.read_text(), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(compile(code[1], str(DOCS), "exec"), names)
    return names


class Run:
    """A server with the example's classes and a drafter that knows the answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, windows: tuple[int | None, ...] = (None, None)) -> None:
        from vllm.v1.worker.gpu import model_runner

        monkeypatch.setattr(model_runner, "init_speculator", model_runner.init_speculator)  # restored afterwards
        self.names = names = example()
        config = kit.make_config(len(TREE) - 1)
        model = kit.TinyModel(config, windows)
        model.get_model_state_cls = lambda: names["TreeModelState"]
        self.gold = {name: model.greedy(prompt, 4 * COUNT) for name, prompt in PROMPTS.items()}
        run = self

        class Drafter(names["TreeSpeculator"]):
            """Right tokens from the answer; `of_step` lets a test give less."""

            def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
                self.sampled = dict(zip(input_batch.req_ids, args[4].tolist(), strict=True))
                return super().propose(input_batch, *args, **kwargs)

            def draft(self, input_batch: Any, last_sampled: Any) -> Any:
                tokens = []
                for name in input_batch.req_ids:
                    at = len(run.server.tokens[name]) - len(PROMPTS[name]) + self.sampled[name]
                    answer = [*run.gold[name][at : at + len(RIGHT)], *[0] * len(RIGHT)]
                    of_node = {node: (answer[0] + node) % kit.VOCAB for node in WRONG}
                    of_node |= dict(zip(RIGHT, answer, strict=False))
                    tokens.append([of_node[node] for node in range(1, len(TREE))])
                count = len(tokens)
                parents = torch.tensor(TREE, dtype=torch.int32).repeat(count, 1)
                return torch.tensor(tokens), parents, torch.full((count,), run.nodes, dtype=torch.int32)

        self.nodes = len(TREE)
        monkeypatch.setattr(model_runner, "init_speculator", Drafter)
        self.server = kit.Server(config, model)
        self.steps = 0

    def decode(self, names: str = "abc", chunk: int = 1000) -> None:
        """Every named request to COUNT tokens."""
        for name in names:
            self.server.add(name, PROMPTS[name])
        while any(len(self.new(name)) < COUNT for name in names):
            self.server.step(chunk)
            self.steps += 1
            assert self.steps < 3 * COUNT

    def new(self, name: str) -> list[int]:
        return self.server.tokens[name][len(PROMPTS[name]) :]

    def check(self, names: str = "abc") -> None:
        for name in names:
            assert self.new(name) == self.gold[name][: len(self.new(name))], f"request {name} is not what greedy says"


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(TreeAttentionMetadataBuilder, "kernel_backend", request.param)
    return str(request.param)


def test_decoding_with_trees_is_greedy_decoding(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = impl_module.tree_attention
    monkeypatch.setattr(
        impl_module, "tree_attention", lambda *args, **options: (calls.append(args[3]), real(*args, **options))[1]
    )
    run = Run(monkeypatch)
    run.decode()
    run.check()
    # the prompt's step, then four tokens in each: the right path is three nodes, and the bonus
    assert run.steps == 1 + -(-(COUNT - 1) // 4)
    # treeattn served every layer of every step: the two short prompts of the first, and all verifies
    assert len(calls) == kit.LAYERS * run.steps


def test_window_groups_have_blocks_and_positions_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, windows=(None, 12))
    assert len(run.server.cache.kv_cache_groups) == 2
    run.decode()
    run.check()
    assert run.steps == 1 + -(-(COUNT - 1) // 4)


def test_prompts_in_chunks_beside_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request decodes while another's prompt comes in pieces, shorter than a tree and longer."""
    run = Run(monkeypatch)
    run.server.add("a", PROMPTS["a"])
    run.server.step()
    for chunk, steps in ((8, 4), (4, 6)):
        run.server.add("b", PROMPTS["b"])
        for _ in range(steps):
            run.server.step(chunk)
        run.check("ab")
        assert len(run.new("b")) > 1
        run.server.finish("b")
    assert len(run.new("a")) == 1 + 4 * 10


def test_a_request_that_gets_the_slot_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.decode("a")
    run.server.finish("a")
    run.decode("c")
    run.check("c")


def test_a_drafter_that_falls_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of six rows are nodes: the right child of the root is there, the rest is padding."""
    run = Run(monkeypatch)
    run.nodes = 3
    run.decode()
    run.check()
    assert run.steps == 1 + -(-(COUNT - 1) // 2)


def test_lost_trees_cost_speed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    put = run.server.runner.speculator.trees.put
    turns = iter(range(1000))
    monkeypatch.setattr(
        run.server.runner.speculator.trees, "put", lambda *args: put(*args) if next(turns) % 2 else None
    )
    run.decode()
    run.check()
    assert run.steps > 1 + -(-(COUNT - 1) // 4)


def without_compaction(run: Run) -> None:
    run.names["compact_trees_"] = lambda *_: None


def without_depth_positions(run: Run) -> None:
    run.names["depth_positions_"] = lambda out, positions, verify: out[: len(positions)].copy_(positions)


def with_a_corrupted_row(run: Run) -> None:
    real = impl_module.tree_attention

    def corrupted(*args: Any, out: Any, **options: Any) -> Any:
        real(*args, out=out, **options)
        out[2] = out[2].flip(0)
        return out

    impl_module.tree_attention = corrupted


@pytest.mark.parametrize("broken", [without_compaction, without_depth_positions, with_a_corrupted_row])
def test_a_part_that_is_missing_or_wrong_is_noticed(broken: Callable[[Run], None], monkeypatch: Any) -> None:
    monkeypatch.setattr(impl_module, "tree_attention", impl_module.tree_attention)
    run = Run(monkeypatch)
    broken(run)
    run.decode("ab")
    with pytest.raises(AssertionError, match="is not what greedy says"):
        run.check("ab")
