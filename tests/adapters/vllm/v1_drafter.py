"""A drafter for vLLM's V1 runner, which takes one by name only: it proposes nothing."""

from __future__ import annotations

from typing import Any


class NoDrafts:
    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, target_model: Any) -> None:
        pass

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]
