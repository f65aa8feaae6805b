"""A small SGLang model runner with one attention layer, and verify steps of any trees through its metadata path."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.test.kits.attention_unittest.attention_methods import dense_attention, mla_attention
from torch import Tensor


def random_tree(nodes: int, seed: int) -> list[int]:
    """Parents of a random tree; depth is not monotone."""
    draw = random.Random(seed)
    return [-1] + [draw.randrange(row) for row in range(1, nodes)]


def ancestors(parents: list[int]) -> Tensor:
    """Bool ``[nodes, nodes]``: row i sees itself and its ancestors."""
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row] = seen[parent]
        seen[row, row] = True
    return seen


@dataclass
class World:
    """One layer of a model, its pool and its backend.

    `draft_tokens` is what the server was told; the width of a step is its trees'. Of MLA's `dim`, `rope` are the key's
    alone.
    """

    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page_size: int = 1
    window: int | None = None
    mla: bool = False
    max_batch: int = 3
    draft_tokens: int = 8
    logit_cap: float = 0.0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    deterministic: bool = False
    fp8: bool = False
    layers_known: bool = False
    context: int = 96
    rope: int = 8
    runner: Any = field(init=False)
    backend: Any = field(init=False)
    layer: RadixAttention = field(init=False)

    @property
    def dim_v(self) -> int:
        return self.dim - self.rope if self.mla else self.dim

    def __post_init__(self) -> None:
        common = {
            "name": "world", "backend": "triton", "forward_mode": ForwardMode.TARGET_VERIFY, "num_heads": self.heads,
            "page_size": self.page_size, "prefix_lens": (4,) * self.max_batch,
            "extend_lens": (self.draft_tokens,) * self.max_batch,
        }  # fmt: skip
        shape = {"hidden_size": 64, "context_len": self.context}
        made = {"dtype": self.dtype, "device": self.device, "max_context_len": self.context}
        made["disable_cuda_graph"] = False
        if self.mla:
            latent = {"kv_lora_rank": self.dim_v, "qk_rope_head_dim": self.rope}
            self.runner = mla_attention.MockMLAModelRunner(
                case=mla_attention.MLAAttentionCase(**common),
                model_config=mla_attention.TinyMLAModelConfig(num_heads=self.heads, **latent, **shape),
                **latent, **made, fp8_kv_cache=self.fp8,
            )  # fmt: skip
        else:
            self.runner = dense_attention.MockModelRunner(
                case=dense_attention.DenseAttentionCase(
                    **common, num_kv_heads=self.kv_heads, sliding_window_size=self.window
                ),
                model_config=dense_attention.TinyModelConfig(
                    num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.dim,
                    sliding_window_size=self.window, **shape,
                ),
                **made, head_dim=self.dim,
            )  # fmt: skip
        self.layer = RadixAttention(
            self.heads, self.dim, self.dim**-0.5, 1 if self.mla else self.kv_heads, 0, logit_cap=self.logit_cap,
            v_head_dim=self.dim_v, sliding_window_size=-1 if self.window is None else self.window,
        )  # fmt: skip
        if self.layers_known:
            stray = RadixAttention(self.heads, 48, 1.0, self.heads, 7)  # a number that the pool does not have
            self.runner.model = torch.nn.ModuleList([self.layer, stray])
            if self.mla:  # what such a model also has: the same layer as its prefill sees it, over other head dims
                self.runner.model.append(RadixAttention(self.heads, 24, 24**-0.5, self.heads, 0, v_head_dim=16))
        if self.deterministic:
            from sglang.srt.runtime_context import get_exec

            with get_exec().deterministic.override(enable_deterministic_inference=True):
                self.backend = ATTENTION_BACKENDS["triton"](self.runner)
        else:
            self.backend = ATTENTION_BACKENDS["triton"](self.runner)
        self.poison()

    @property
    def pools(self) -> tuple[Tensor, Tensor]:
        pool = self.runner.token_to_kv_pool
        return pool.get_key_buffer(0), pool.get_value_buffer(0)

    def poison(self) -> None:
        """NaN in every slot: whatever a step does not write nobody may see."""
        for pool in self.pools:
            pool.fill_(float("nan"))

    def slot(self, request: int, position: int) -> int:
        """Token slots of a request: pages in descending order."""
        pages = self.context // self.page_size
        page = pages - 1 - position // self.page_size
        return self.page_size + request * self.context + page * self.page_size + position % self.page_size


@dataclass
class Step:
    """Trees and prefixes of a batch with random q, K and V.

    `trees` are as wide as each other; `padding` requests follow them, as SGLang pads a graph's batch.
    """

    world: World
    trees: list[list[int]]
    prefixes: list[int]
    padding: int = 0
    seed: int = 0
    chain: bool = False

    def __post_init__(self) -> None:
        world, draw = self.world, torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(world.dtype).to(world.device)

        self.width = len(self.trees[0])
        rows = (len(self.trees) + self.padding) * self.width
        kv_heads = 1 if world.mla else world.kv_heads
        self.q = normal(rows, world.heads, world.dim)
        self.k = normal(rows, kv_heads, world.dim)
        self.v = self.k[..., : world.dim_v].contiguous() if world.mla else normal(rows, kv_heads, world.dim)
        self.prefix_k = [normal(length, kv_heads, world.dim) for length in self.prefixes]
        self.prefix_v = [normal(length, kv_heads, world.dim) for length in self.prefixes]

    @property
    def batch(self) -> int:
        return len(self.trees) + self.padding

    @property
    def rows(self) -> int:
        """Rows of real requests."""
        return len(self.trees) * self.width

    def full_mask(self) -> Tensor:
        """SGLang's FULL form of the real requests."""
        parts = []
        for parents, prefix in zip(self.trees, self.prefixes, strict=True):
            seen = ancestors(parents)
            parts.append(torch.cat([torch.ones(self.width, prefix, dtype=torch.bool), seen], dim=1).flatten())
        return torch.cat(parts).to(self.world.device)

    def tree_mask(self) -> Tensor:
        """SGLang's QLEN_ONLY form of the real requests."""
        return torch.cat([ancestors(parents).flatten() for parents in self.trees]).to(self.world.device)

    def spec_info(self, mask: Tensor | None, width: int | None = None) -> EagleVerifyInput:
        device = self.world.device
        tree = torch.arange(self.rows, device=device).view(len(self.trees), self.width)
        return EagleVerifyInput(
            draft_token=torch.zeros(self.rows, dtype=torch.int64, device=device), custom_mask=mask, positions=None,
            retrieve_index=tree, retrieve_next_token=tree, retrieve_next_sibling=tree, retrieve_cum_len=None,
            spec_steps=4, topk=4, draft_token_num=self.width if width is None else width,
            capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=None, seq_lens_cpu=None,
        )  # fmt: skip

    def forward_batch(self, spec_info: Any) -> ForwardBatch:
        """As SGLang makes it: padded requests have length 1, slot 0 and pool index 0."""
        world, device = self.world, self.world.device
        table = world.runner.req_to_token_pool.req_to_token
        k_pool, v_pool = world.pools
        locations, positions = [], []
        for request, (parents, prefix) in enumerate(zip(self.trees, self.prefixes, strict=True)):
            slots = [world.slot(request, position) for position in range(prefix + self.width)]
            table[request, : len(slots)] = torch.tensor(slots, dtype=table.dtype)
            k_pool[slots[:prefix]] = self.prefix_k[request].to(k_pool.dtype)
            if not world.mla:
                v_pool[slots[:prefix]] = self.prefix_v[request].to(v_pool.dtype)
            locations += slots[prefix:]
            positions += [prefix + depth - 1 for depth in ancestors(parents).sum(1).tolist()]
        pads = self.padding * self.width
        seq_lens = torch.tensor(self.prefixes + [1] * self.padding, dtype=torch.int32, device=device)
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY, batch_size=self.batch,
            input_ids=torch.zeros(self.batch * self.width, dtype=torch.int64, device=device),
            req_pool_indices=torch.tensor([*range(len(self.trees)), *[0] * self.padding], device=device),
            seq_lens=seq_lens, seq_lens_cpu=seq_lens.cpu(), seq_lens_sum=int(seq_lens.sum()),
            out_cache_loc=torch.tensor(locations + [0] * pads, dtype=torch.int64, device=device),
            positions=torch.tensor(positions + [0] * pads, dtype=torch.int64, device=device),
            spec_info=spec_info,
        )  # fmt: skip
        world.runner.kv_index_translator.bind_own_plan(batch)
        return batch

    def call(self, batch: ForwardBatch, **options: Any) -> Tensor:
        """The layer's call: ``[rows, heads, dim_v]``, padding included."""
        world = self.world
        with forward_context(ForwardContext(attn_backend=world.backend)):
            out = world.backend.forward_extend(
                self.q.reshape(self.q.shape[0], -1), self.k, self.v, world.layer, batch, **options
            )
        return out.view(-1, world.heads, world.dim_v)

    def eager(self, mask: Tensor | None = None, width: int | None = None, **options: Any) -> Tensor:
        """Metadata and layer call without a graph."""
        if mask is None and not self.chain:
            mask = self.full_mask()
        batch = self.forward_batch(self.spec_info(mask, width))
        self.world.backend.init_forward_metadata(batch)
        return self.call(batch, **options)

    def expected(self, window: int | None = None, sinks: Tensor | None = None) -> Tensor:
        """float64 ``[rows, heads, dim_v]`` of the real requests, windows by depth."""
        world, outs = self.world, []
        window = world.window if window is None else window
        group = world.heads // (1 if world.mla else world.kv_heads)
        for request, (parents, prefix) in enumerate(zip(self.trees, self.prefixes, strict=True)):
            rows = slice(request * self.width, (request + 1) * self.width)
            prefix_v = self.prefix_k[request][..., : world.dim_v] if world.mla else self.prefix_v[request]
            k = torch.cat([self.prefix_k[request], self.k[rows]]).double().repeat_interleave(group, 1)
            v = torch.cat([prefix_v, self.v[rows]]).double().repeat_interleave(group, 1)
            own = ancestors(parents).to(world.device)
            seen = torch.cat([torch.ones(self.width, prefix, dtype=torch.bool, device=world.device), own], dim=1)
            if window is not None:
                positions = prefix + own.sum(1) - 1
                keys = torch.cat([torch.arange(prefix, device=world.device), positions])
                seen &= keys >= positions[:, None] - window
            scores = torch.einsum("ihd,khd->hik", self.q[rows].double(), k) * world.dim**-0.5
            if world.logit_cap:
                scores = world.logit_cap * torch.tanh(scores / world.logit_cap)
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                extra = sinks.double()[:, None, None].expand(-1, self.width, 1)
                weights = torch.softmax(torch.cat([scores, extra], dim=2), dim=2)[..., :-1]
            else:
                weights = torch.softmax(scores, dim=2)
            outs.append(torch.einsum("hik,khd->ihd", weights, v))
        return torch.cat(outs)

    def check(self, out: Tensor, budget: float = 1e-5, **options: Any) -> None:
        """Real rows are right, padded rows finite."""
        assert bool(torch.isfinite(out).all()), "padding is not finite"
        off = (out[: self.rows].double() - self.expected(**options)).abs()
        assert float(off.max()) <= budget, f"off by {float(off.max()):.2e} at {torch.nonzero(off == off.max())[0]}"


@dataclass
class Graph:
    """A captured layer call: a CUDA graph on a GPU; on a CPU the same call on the same static tensors."""

    world: World
    width: int

    def __post_init__(self) -> None:
        world = self.world
        world.backend.init_cuda_graph_state(world.max_batch, world.max_batch * self.width)
        chain = [list(range(-1, self.width - 1))] * world.max_batch
        self.step = Step(world, chain, [1] * world.max_batch)
        self.batch = self.step.forward_batch(self.step.spec_info(self._dummy_mask()))
        world.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        self.metadata = world.backend.forward_metadata
        self.out = torch.zeros(world.max_batch * self.width, world.heads, world.dim_v, device=world.device)
        self.graph = None
        self._run()
        if world.device == "cuda":
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._run()

    def _dummy_mask(self) -> Tensor:
        """What SGLang's graph runner captures with: ones of the full form at length 1."""
        size = self.world.max_batch * self.width * (self.width + 1)
        return torch.ones(size, dtype=torch.bool, device=self.world.device)

    def _run(self) -> None:
        self.out.copy_(self.step.call(self.batch))

    def replay(self, step: Step, mask: Tensor | None, own: bool = False, width: int | None = None) -> Tensor:
        """Prepare `step` (padded to the captured batch) and replay; `own` writes the mask into the backend's buffer."""
        backend = self.world.backend
        if own:
            buffer = backend.verify_mask.buffer
            buffer.fill_(1)
            buffer[: mask.numel()] = mask
            mask = buffer
        view = step.forward_batch(step.spec_info(mask, width))
        for name in ("q", "k", "v"):
            getattr(self.step, name).copy_(getattr(step, name))
        self.batch.out_cache_loc.copy_(view.out_cache_loc)
        backend.init_forward_metadata_out_graph(view)
        self.run()
        return self.out

    def run(self) -> None:
        """Replay with the step that was prepared last."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self.world.backend.forward_metadata = self.metadata  # whose tensors a graph has in it
            self._run()
