"""The V1 runner: chains are verified, and what it cannot do is refused."""

from __future__ import annotations

from typing import Any

import kit
import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from treeattn.adapters.vllm import DraftTrees
from treeattn.adapters.vllm import impl as impl_module

PROMPT, DRAFTS = [3, 5, 7, 11, 2], 4


class V1Server:
    """The runner with one request, whose drafts the test gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.sample.sampler import Sampler
        from vllm.v1.worker import cpu_model_runner

        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        # a compiled operator of vLLM
        monkeypatch.setattr(Sampler, "greedy_sample", staticmethod(lambda logits: logits.argmax(-1)))
        self.config = kit.make_config(DRAFTS, drafter="v1_drafter.NoDrafts")
        assert not self.config.use_v2_model_runner
        self.model = kit.TinyModel(self.config)
        monkeypatch.setattr(cpu_model_runner, "get_model", lambda **_: self.model)
        with set_current_vllm_config(self.config):
            self.runner = cpu_model_runner.CPUModelRunner(self.config, torch.device("cpu"))
            self.runner.load_model()
            self.runner.initialize_kv_cache(kit.cache_config(self.config))

    def step(self, rows: int, **fields: Any) -> list[int]:
        output = SchedulerOutput.make_empty()
        for name, value in fields.items():
            setattr(output, name, value)
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = {"a": rows}, rows
        output.num_common_prefix_blocks = [0]
        with set_current_vllm_config(self.config):
            self.runner.execute_model(output)
            return list(self.runner.sample_tokens(None).sampled_token_ids[0])

    def prefill(self) -> list[int]:
        request = NewRequestData(
            req_id="a", prompt_token_ids=PROMPT, mm_features=[], pooling_params=None, block_ids=([1, 2],),
            sampling_params=SamplingParams(temperature=0.0, max_tokens=64), num_computed_tokens=0, lora_request=None,
        )  # fmt: skip
        return self.step(len(PROMPT), scheduled_new_reqs=[request])

    def verify(self, new: list[int], drafts: list[int]) -> list[int]:
        cached = CachedRequestData.make_empty()
        cached.req_ids, cached.new_token_ids, cached.new_block_ids = ["a"], [[]], [None]
        cached.num_computed_tokens, cached.num_output_tokens = [len(PROMPT) + len(new) - 1], [len(new)]
        return self.step(
            1 + len(drafts), scheduled_cached_reqs=cached, scheduled_spec_decode_tokens={"a": list(drafts)}
        )


def test_chains_are_verified_and_trees_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = impl_module.tree_attention
    monkeypatch.setattr(
        impl_module, "tree_attention", lambda *args, **options: (calls.append(args[3]), real(*args, **options))[1]
    )
    server = V1Server(monkeypatch)
    gold = server.model.greedy(PROMPT, 12)
    new = server.prefill()
    while len(new) < 8:
        right = gold[len(new) : len(new) + 2]
        wrong = [(token + 1) % kit.VOCAB for token in gold[len(new) + 2 : len(new) + 4]]
        yielded = server.verify(new, right + wrong)
        assert len(yielded) == 3
        new += yielded
    assert new == gold[: len(new)]
    assert len(calls) == kit.LAYERS * 4
    DraftTrees(4, 1 + DRAFTS, request_at={0: "a"}.get, device="cpu").install()
    with pytest.raises(NotImplementedError, match="use the V2 model runner"):
        server.verify(new, gold[len(new) : len(new) + 2])
