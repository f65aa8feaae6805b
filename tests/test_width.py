"""The verify width: faults 15 and 16 as arguments."""

import dataclasses
from typing import Any

import pytest

from treeattn.width import resolve_verify_width


@pytest.mark.parametrize(
    ("given", "width"),
    [
        ({"method": "ddtree", "block_size": 8, "tree_budget": 16}, 17),
        ({"method": "DDTREE", "block_size": 8, "tree_budget": 16, "topk": 1}, 17),
        ({"method": "ddtree", "block_size": 8, "tree_budget": 16, "topk": 4}, 17),
        ({"method": "ddtree", "block_size": 8, "tree_budget": 7}, 8),
        ({"method": "ddtree", "block_size": 8, "tree_budget": 8}, 9),
        ({"method": "ddtree", "tree_budget": 0}, 1),
        ({"method": "ddtree", "tree_budget": 1024}, 1025),
        ({"method": "ddtree", "num_draft_tokens": 17, "tree_budget": 16}, 17),
        ({"method": "ddtree", "tree_budget": 16, "width": 9}, 9),
        ({"method": "eagle3", "topk": 4, "num_draft_tokens": 8}, 8),
        ({"method": "eagle", "topk": 1, "num_steps": 3}, 4),
        ({"method": "medusa", "tree_budget": 63}, 64),
        ({"method": "ngram", "num_draft_tokens": 12}, 12),
        ({"method": "dflash", "block_size": 16}, 16),
        ({"method": "dflash", "block_size": 8, "topk": 4, "tree_budget": 32}, 33),
        ({"method": "jetspec", "block_size": 16, "tree_budget": 128}, 129),
        ({"block_size": 8}, 8),
        ({"method": "chain", "num_steps": 4}, 5),
        ({"method": "somebody's own", "tree_budget": 5}, 6),
    ],
)
def test_the_verifier(given: dict[str, Any], width: int) -> None:
    resolved = resolve_verify_width(**given)
    assert resolved.width == width
    assert str(width) in resolved.reason


@pytest.mark.parametrize("method", ["ddtree", "jetspec", "medusa", "ngram", "sequoia", "hydra"])
@pytest.mark.parametrize("block_size", [None, 8])
def test_a_tree_without_a_budget_is_loud(method: str, block_size: int | None) -> None:
    with pytest.raises(ValueError) as raised:
        resolve_verify_width(method=method, block_size=block_size)
    message = str(raised.value)
    assert f"{method} verifies a tree and its budget is not given" in message
    assert method in message.split("excluded); ")[1]
    assert any(c.isdigit() for c in message.split("excluded); ")[1])
    assert (f"the block size {block_size} is not its width" in message) == (block_size is not None)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "dflash", None])
def test_topk_above_one_is_a_tree(method: str | None) -> None:
    with pytest.raises(ValueError, match="its budget is not given"):
        resolve_verify_width(method=method, topk=2, block_size=8, num_steps=3)


def test_a_drafter_keeps_its_block_size_beside_the_verifier() -> None:
    given: dict[str, Any] = {"method": "ddtree", "block_size": 8, "tree_budget": 16}
    widths = [resolve_verify_width(role=role, **given).width for role in ("verify", "draft", "verify", "draft")]
    assert widths == [17, 8, 17, 8]
    assert resolve_verify_width(role="draft", method="ddtree", block_size=8).width == 8
    with pytest.raises(ValueError, match="block_size or width"):
        resolve_verify_width(role="draft", method="ddtree", tree_budget=16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "nothing tells the verify width"),
        ({"method": "chain"}, "nothing tells the verify width"),
        ({"method": "somebody's own", "block_size": 8}, "is not known here"),
        ({"method": "ddtree", "tree_budget": 16, "num_draft_tokens": 16}, "verifies 17 rows"),
        ({"tree_budget": -1}, "tree_budget is -1, must be 0 or more"),
        ({"width": 0}, "width is 0, must be 1 or more"),
        ({"block_size": 0}, "block_size is 0"),
        ({"role": "both", "width": 1}, "role is 'both'"),
    ],
)
def test_errors(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        resolve_verify_width(**given)
    assert message in str(raised.value)


def test_the_result_is_frozen() -> None:
    resolved = resolve_verify_width(width=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.width = 4  # type: ignore[misc]
