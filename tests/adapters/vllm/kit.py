"""vLLM's V2 runner on a CPU: its own configuration, attention layers, metadata, KV cache and request table.

The model is ours and tiny (two decoder layers around vLLM's `Attention`), since vLLM's own layers need compiled
operators; `TinyModel.greedy` decodes with the same weights in plain attention, as an oracle.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.layers.attention import Attention
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, MAX_LEN, BLOCK = 48, 64, 4, 2, 32, 2, 128, 16
_scratch = tempfile.TemporaryDirectory()


def model_folder() -> str:
    """A folder with the configuration of a small Llama, from which vLLM reads sizes."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "num_hidden_layers": LAYERS, "intermediate_size": 64, "vocab_size": VOCAB, "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    Path(_scratch.name, "config.json").write_text(json.dumps(config))
    return _scratch.name


def make_config(
    drafts: int, max_reqs: int = 4, dtype: str = "float32", cache_dtype: str = "auto", drafter: str | None = None
) -> VllmConfig:
    """A server's configuration; `drafts` is num_speculative_tokens, 0 for no speculative decoding."""
    model = ModelConfig(model=model_folder(), skip_tokenizer_init=True, dtype=dtype, max_model_len=MAX_LEN)
    speculative = None
    if drafts:
        ngram: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        method = {"method": "custom_class", "model": drafter} if drafter else ngram
        speculative = SpeculativeConfig(
            num_speculative_tokens=drafts, target_model_config=model, target_parallel_config=ParallelConfig(), **method
        )
    return VllmConfig(
        model_config=model, device_config=DeviceConfig("cpu"),
        cache_config=CacheConfig(block_size=BLOCK, cache_dtype=cache_dtype),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_reqs, max_num_batched_tokens=256, max_model_len=MAX_LEN, is_encoder_decoder=False
        ),
        speculative_config=speculative,
    )  # fmt: skip


def rope(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = positions[:, None].float() * 0.5 ** torch.arange(half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class TinyModel(nn.Module):
    """Decoder layers of attention alone, with weights large enough that greedy tokens depend on the whole context."""

    def __init__(self, config: VllmConfig, windows: tuple[int | None, ...] = (None, None)) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(rows: int, cols: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, cols, generator=generator) / cols**0.5, requires_grad=False)

        self.embed, self.head = weight(VOCAB, HIDDEN), weight(VOCAB, HIDDEN)
        self.embed.mul_(HIDDEN**0.5)
        self.qkv = nn.ParameterList(weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN) for _ in windows)
        self.o = nn.ParameterList(weight(HIDDEN, HEADS * HEAD_DIM) for _ in windows)
        self.windows = windows
        backend = AttentionBackendEnum.CUSTOM.get_class()
        with set_current_vllm_config(config):
            self.attn = nn.ModuleList(
                Attention(
                    HEADS, HEAD_DIM, HEAD_DIM**-0.5, num_kv_heads=KV_HEADS, cache_config=config.cache_config,
                    per_layer_sliding_window=window, prefix=f"model.layers.{i}.attn", attn_backend=backend,
                )
                for i, window in enumerate(windows)
            )  # fmt: skip

    def forward(self, input_ids: Tensor, positions: Tensor, **_: Any) -> Tensor:
        hidden = self.embed[input_ids.long()]
        for layer, attn in enumerate(self.attn):
            q, k, v = self._project(layer, hidden, positions)
            hidden = hidden + attn(q.flatten(1), k.flatten(1), v.flatten(1)) @ self.o[layer].T
        return hidden

    def _project(self, layer: int, hidden: Tensor, positions: Tensor) -> list[Tensor]:
        normal = hidden / hidden.pow(2).mean(-1, keepdim=True).sqrt()
        q, k, v = (normal @ self.qkv[layer].T).view(len(hidden), -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        return [rope(q, positions), rope(k, positions), v]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head.T

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.embed[input_ids.long()]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Tokens that follow a prompt, by dense attention over the whole text each time."""
        tokens = list(prompt)
        for _ in range(count):
            positions = torch.arange(len(tokens))
            hidden = self.embed[torch.tensor(tokens)]
            for layer, window in enumerate(self.windows):
                q, k, v = self._project(layer, hidden, positions)
                k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
                distance = positions[:, None] - positions
                sees = (distance >= 0) & (distance < (window or len(tokens)))
                scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
                weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
                hidden = hidden + torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ self.o[layer].T
            tokens.append(int(self.compute_logits(hidden[-1]).argmax()))
        return tokens[len(prompt) :]


def make_process_groups() -> None:
    """The groups of one process, which the runner asks for."""
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment

    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        init_distributed_environment(1, 0, f"file://{_scratch.name}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


def cache_config(config: VllmConfig, layout: str = "LBNHC", memory: int = 2**22) -> KVCacheConfig:
    """KV cache groups and their places in memory, as vLLM's engine decides them; the layout "LBNHC" is NHD."""
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    specs = [get_kv_cache_spec(config)]
    config.cache_config.kv_cache_layout = layout
    found = get_kv_cache_configs(config, specs, [memory], get_global_kv_cache_groups(config, specs))[0]
    found.kv_cache_layout = layout
    return found


class Server:
    """The runner with a scheduler of the simplest kind: every request that lives runs in every step."""

    def __init__(self, config: VllmConfig, model: TinyModel, layout: str = "LBNHC") -> None:
        from vllm.v1.worker.cpu.model_runner import CPUModelRunner

        with set_current_vllm_config(config):
            self.runner = CPUModelRunner(config, torch.device("cpu"))
            self.runner.load_model(model=model)
            self.cache = cache_config(config, layout)
            self.runner.initialize_kv_cache(self.cache)
        self.config = config
        # a block belongs to one cache group: the groups' tensors lie over each other
        self.free = list(range(1, self.cache.num_blocks))
        self.tokens: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, int] = {}
        self.drafts: dict[str, int] = {}
        self.finished: set[str] = set()

    def add(self, name: str, prompt: list[int]) -> None:
        self.tokens[name], self.prompts[name] = list(prompt), len(prompt)
        self.computed[name], self.blocks[name] = 0, 0

    def finish(self, name: str) -> None:
        self.finished.add(name)
        for table in (self.tokens, self.prompts, self.computed, self.drafts, self.blocks):
            table.pop(name, None)

    def step(self, chunk: int = 1000, only: set[str] | None = None) -> dict[str, list[int]]:
        """Run one step; returns each request's new tokens. `chunk` is the most prompt tokens of a request."""
        new, cached = [], CachedRequestData.make_empty()
        scheduled, spec = {}, {}
        for name, tokens in self.tokens.items():
            if only is not None and name not in only:
                continue
            rest = len(tokens) - self.computed[name]
            drafts = self.drafts.get(name, 0) if rest == 1 else 0
            scheduled[name] = min(rest, chunk) + drafts
            if drafts:
                spec[name] = [-1] * drafts
            need = max(-(-(self.computed[name] + scheduled[name]) // BLOCK) - self.blocks[name], 0)
            fresh = tuple([self.free.pop() for _ in range(need)] for _ in self.cache.kv_cache_groups)
            first = not self.blocks[name]
            self.blocks[name] += need
            if first:
                new.append(
                    NewRequestData(
                        req_id=name, prompt_token_ids=tokens, mm_features=[],
                        sampling_params=SamplingParams(temperature=0.0, max_tokens=64), pooling_params=None,
                        block_ids=fresh, num_computed_tokens=0, lora_request=None,
                        prefill_token_ids=tokens,
                    )
                )  # fmt: skip
            else:
                cached.req_ids.append(name)
                cached.new_token_ids.append([])
                cached.new_block_ids.append(fresh if need else None)
                cached.num_computed_tokens.append(self.computed[name])
                cached.num_output_tokens.append(len(tokens) - self.prompts[name])
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs, output.scheduled_cached_reqs = new, cached
        output.num_scheduled_tokens = scheduled
        output.total_num_scheduled_tokens = sum(scheduled.values())
        output.scheduled_spec_decode_tokens = spec
        output.num_common_prefix_blocks = [0] * len(self.cache.kv_cache_groups)
        output.finished_req_ids, self.finished = self.finished, set()
        output.num_spec_tokens_to_schedule = self.config.num_speculative_tokens
        with set_current_vllm_config(self.config):
            self.runner.execute_model(output)
            result = self.runner.sample_tokens(None).get_output()
        yielded = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
        for name, count in scheduled.items():
            fresh_tokens = list(yielded[name])
            drafts = len(spec.get(name, ()))
            rejected = drafts + 1 - len(fresh_tokens) if fresh_tokens else 0
            self.computed[name] += count - rejected
            self.tokens[name] += fresh_tokens
            self.drafts[name] = self.config.num_speculative_tokens
        return {name: list(tokens) for name, tokens in yielded.items()}
