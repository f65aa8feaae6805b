"""One step of a batch through vLLM's attention layers: its metadata, its KV cache, and dense attention as the truth."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import kit
import numpy as np
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, init_attn_backend, init_kv_cache

HEADS, KV_HEADS, HEAD_DIM, BLOCK = kit.HEADS, kit.KV_HEADS, kit.HEAD_DIM, kit.BLOCK


@dataclass
class Batch:
    """What vLLM's runner knows of a step.

    `lens` and `prefixes` are of real requests; `pad_reqs` requests of length 0 and `pad_tokens` rows follow, as a FULL
    graph has them.
    """

    lens: list[int]
    prefixes: list[int]
    pad_reqs: int = 0
    pad_tokens: int = 0
    slots: list[int] | None = None
    prefilling: list[bool] | None = None
    parents: dict[int, list[int]] = field(default_factory=dict)  # of requests that verify a tree

    @property
    def starts(self) -> list[int]:
        return [0, *np.cumsum(self.lens).tolist()]

    @property
    def rows(self) -> int:
        return self.starts[-1]


class Layers:
    """Attention layers of a configuration, their KV cache full of random numbers, and their metadata builders."""

    def __init__(
        self,
        drafts: int = 5,
        windows: tuple[int | None, ...] = (None,),
        *,
        dtype: str = "float32",
        cache_dtype: str = "auto",
        layout: str = "LBNHC",
        max_reqs: int = 4,
        backend: Any = None,
        **impl: Any,
    ) -> None:
        self.config = kit.make_config(drafts, max_reqs, dtype, cache_dtype)
        self.dtype = getattr(torch, dtype)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with set_current_vllm_config(self.config):
                self.layers = [
                    Attention(
                        HEADS, HEAD_DIM, HEAD_DIM**-0.5, num_kv_heads=KV_HEADS, cache_config=self.config.cache_config,
                        per_layer_sliding_window=window, prefix=f"model.layers.{i}.attn",
                        attn_backend=backend or AttentionBackendEnum.CUSTOM.get_class(), **impl,
                    )
                    for i, window in enumerate(windows)
                ]  # fmt: skip
        finally:
            torch.set_default_dtype(before)
        self.windows = windows
        self.cache = kit.cache_config(self.config, layout)
        with set_current_vllm_config(self.config):
            self.groups, self.graphs, sizes = init_attn_backend(self.cache, self.config, torch.device("cpu"))
            context = self.config.compilation_config.static_forward_context
            init_kv_cache(context, self.cache, torch.device("cpu"), sizes, self.config)
        self.generator = torch.Generator().manual_seed(0)
        for layer in self.layers:
            held = torch.randn(layer.kv_cache.shape, generator=self.generator)
            fp8 = layer.impl.kv_cache_dtype.startswith("fp8")
            layer.kv_cache.copy_(held.to(torch.float8_e4m3fn).view(layer.kv_cache.dtype) if fp8 else held)
        width = -(-kit.MAX_LEN // BLOCK)
        # every request and group has blocks of its own; block 0 is vLLM's null block
        ids = torch.randperm(self.cache.num_blocks - 1, generator=self.generator) + 1
        wanted = len(self.groups) * max_reqs * width
        assert len(ids) >= wanted
        self.tables = [
            table.contiguous() for table in ids[:wanted].to(torch.int32).view(len(self.groups), max_reqs, width)
        ]

    @property
    def builders(self) -> list[Any]:
        return [groups[0].get_metadata_builder(0) for groups in self.groups]

    def group_of(self, layer: Attention) -> int:
        names = [group.layer_names for group in self.cache.kv_cache_groups]
        return next(i for i, of_group in enumerate(names) if layer.layer_name in of_group)

    def slot_mapping(self, batch: Batch, group: int) -> Tensor:
        mapping = torch.full((batch.rows + batch.pad_tokens,), -1, dtype=torch.int64)
        for b, (start, rows, prefix) in enumerate(zip(batch.starts, batch.lens, batch.prefixes, strict=False)):
            at = torch.arange(prefix, prefix + rows)
            mapping[start : start + rows] = self.tables[group][b, at // BLOCK].long() * BLOCK + at % BLOCK
        return mapping

    def metadata(self, batch: Batch, capture: bool = False, **more: Any) -> dict[str, Any]:
        """Each layer's metadata, by vLLM's own function of the V2 runner."""
        reqs = len(batch.lens)
        starts = torch.tensor(batch.starts + [batch.rows] * batch.pad_reqs, dtype=torch.int32)
        lens = [prefix + rows for prefix, rows in zip(batch.prefixes, batch.lens, strict=True)] + [0] * batch.pad_reqs
        tables = []
        for table in self.tables:
            padded = torch.zeros(reqs + batch.pad_reqs, table.shape[1], dtype=torch.int32)
            padded[:reqs] = table[:reqs]
            tables.append(padded)
        prefilling = batch.prefilling or [False] * reqs
        arguments: dict[str, Any] = {
            "attn_groups": self.groups, "num_reqs": reqs + batch.pad_reqs, "num_tokens": batch.rows + batch.pad_tokens,
            "query_start_loc_gpu": starts, "query_start_loc_cpu": starts.clone(), "max_query_len": max(batch.lens),
            "seq_lens": torch.tensor(lens, dtype=torch.int32), "max_seq_len": max(lens), "block_tables": tables,
            "slot_mappings": torch.stack([self.slot_mapping(batch, g) for g in range(len(self.groups))]),
            "kv_cache_config": self.cache, "seq_lens_cpu_upper_bound": torch.tensor(lens, dtype=torch.int32),
            "is_prefilling": torch.tensor(prefilling), "for_cudagraph_capture": capture,
            "req_idx": np.array(batch.slots or range(reqs), dtype=np.intp),
        }  # fmt: skip
        with set_current_vllm_config(self.config):
            return build_attn_metadata(**{**arguments, **more})

    def inputs(self, batch: Batch, extra: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of every row; those of no request are NaN."""
        rows = batch.rows + batch.pad_tokens + extra
        made = []
        for heads in (HEADS, KV_HEADS, KV_HEADS):
            x = torch.randn(rows, heads * HEAD_DIM, generator=self.generator).to(self.dtype)
            x[batch.rows :] = torch.nan
            made.append(x)
        return made[0], made[1], made[2]

    def forward(self, layer: Attention, batch: Batch, metadata: dict[str, Any], inputs: tuple[Tensor, ...]) -> Tensor:
        """The layer's own forward, K and V written first."""
        mapping = self.slot_mapping(batch, self.group_of(layer))
        with set_current_vllm_config(self.config), set_forward_context(
            metadata, self.config, slot_mapping={layer.layer_name: mapping}
        ):
            out: Tensor = layer(*inputs)
        return out.view(-1, HEADS, HEAD_DIM)

    def truth(self, layer: Attention, batch: Batch, q: Tensor) -> Tensor:
        """Dense attention in float64 over what the cache holds now: causal, or along `batch.parents`."""
        window = self.windows[self.layers.index(layer)]
        held = layer.kv_cache
        if layer.impl.kv_cache_dtype.startswith("fp8"):
            held = held.view(torch.float8_e4m3fn).float()
        k_all, v_all = held.double().split(HEAD_DIM, dim=-1)
        if layer.impl.kv_cache_dtype.startswith("fp8"):
            k_all, v_all = k_all * float(layer._k_scale), v_all * float(layer._v_scale)
        out = torch.zeros(len(q), HEADS, HEAD_DIM, dtype=torch.float64)
        table = self.tables[self.group_of(layer)]
        for b, (start, rows, prefix) in enumerate(zip(batch.starts, batch.lens, batch.prefixes, strict=False)):
            parents = batch.parents.get(b, list(range(-1, rows - 1)))[:rows]
            nodes = len(parents)
            seen = torch.zeros(nodes, nodes, dtype=torch.bool)
            for i, parent in enumerate(parents):
                seen[i, i] = True
                if parent >= 0:
                    seen[i] |= seen[parent]
            position = prefix + seen.sum(1) - 1
            at = torch.arange(prefix + nodes)
            key_position = torch.cat([at[:prefix], position])
            sees = torch.cat([torch.ones(nodes, prefix, dtype=torch.bool), seen], dim=1)
            if window is not None:
                sees &= position[:, None] - key_position < window
            block, offset = table[b, at // BLOCK].long(), at % BLOCK
            k, v = (x[block, :, offset].repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k_all, v_all))
            mine = q[start : start + nodes].double().view(nodes, HEADS, HEAD_DIM)
            scores = torch.einsum("qhd,khd->hqk", mine, k) * layer.impl.scale
            cap = layer.impl.logits_soft_cap
            if cap:
                scores = cap * torch.tanh(scores / cap)
            scores = scores.masked_fill(~sees, -torch.inf)
            if layer.impl.sinks is not None:
                sink = layer.impl.sinks.double()[:, None, None].expand(HEADS, nodes, 1)
                scores = torch.cat([scores, sink], dim=-1)
            weights = scores.softmax(-1)[..., : prefix + nodes]
            out[start : start + nodes] = torch.einsum("hqk,khd->qhd", weights, v)
        return out


def assert_close(out: Tensor, truth: Tensor, tolerance: float) -> None:
    """Worst error of any number within `tolerance`; names the row."""
    error = (out.double() - truth).abs().nan_to_num(torch.inf).flatten(1).amax(1)
    worst = int(error.argmax())
    assert float(error[worst]) <= tolerance, f"row {worst}: off by {float(error[worst]):.3g}"
