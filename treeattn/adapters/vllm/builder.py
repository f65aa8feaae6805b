# mypy: disable-error-code="import-not-found, misc"
"""Once a step for each KV cache group: which requests treeattn serves, their layout, and the plan of their layers.

Requests of at most ``1 + num_speculative_tokens`` query rows come first in vLLM's batch. They are one verify step in
:class:`treeattn.StaticBuffers`, written in place, so that a FULL CUDA graph reads this step's content at each replay:
vLLM ignores what a builder returns then. All lengths are read on the device. The requests behind them are prefills,
whose metadata vLLM's own builder makes.

What graphs bring: padded requests have length 0 and are empty; at capture a context may be negative, and such a request
is empty too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, max_decode_query_len
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata, TritonAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from treeattn import PagedKV, StaticBuffers, Step

from .trees import DraftTrees, current_trees
from .verify import VerifyStep


@dataclass
class TreeAttentionMetadata(TritonAttentionMetadata):
    """vLLM's metadata of the whole batch, and how it is divided.

    Attributes
    ----------
    verify : VerifyStep or None
        The first requests, for treeattn.
    prefill : TritonAttentionMetadata or None
        The requests behind them, for vLLM's kernel; row offsets start at 0.
    """

    verify: VerifyStep | None = None
    prefill: TritonAttentionMetadata | None = None


class TreeAttentionMetadataBuilder(TritonAttentionMetadataBuilder):
    """Builder of one KV cache group of the target model; for a draft model it is vLLM's own.

    FULL graphs hold decode batches, uniform or of any lengths up to the verify width; a batch with prefills takes
    another path on the host, so vLLM runs it piecewise.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    requires_block_table_width: ClassVar[bool] = True
    kernel_backend: ClassVar[str] = "auto"
    """treeattn backend: Triton on a GPU."""

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        block_table_width: int,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if vllm_config.cache_config.kv_sharing_fast_prefill:
            raise NotImplementedError(
                "treeattn's backend does not work with --kv-sharing-fast-prefill, which gives layers unlike rows"
            )
        every = vllm_config.compilation_config.static_forward_context
        layers = {name: every[name] for name in layer_names}
        self.is_draft = all(layer.is_draft_layer for layer in layers.values())
        if self.is_draft:
            return
        # a graph of draft steps would replay without the build that writes the layout
        self.supports_draft_decode_metadata_update = False
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.max_q_len: int = self.reorder_batch_threshold
        max_batch = vllm_config.scheduler_config.max_num_seqs
        self.buffers = StaticBuffers(max_batch, self.max_q_len, device=device)
        # an own table: the runner's is a slice whose address and rows no contract promises
        self.kv = PagedKV.allocate(
            max_batch, page_size=self.block_size, max_pages_per_request=block_table_width, device=device
        )
        self.steps = self._add_groups(layers)

    def _add_groups(self, layers: dict[str, Any]) -> dict[str, Step]:
        """One group for each geometry; layers with unlike windows may share a KV cache group."""
        groups: dict[tuple[Any, ...], Step] = {}
        steps: dict[str, Step] = {}
        for name, layer in layers.items():
            impl = layer.impl
            kv_dtype = impl.fp8_dtype if impl.kv_cache_dtype.startswith("fp8") else layer.kv_cache_torch_dtype
            # vLLM's Triton impl keeps sliding_window - 1, the keys left of a row's own
            key = (impl.num_heads, impl.num_kv_heads, impl.head_size, layer.dtype, kv_dtype, impl.sliding_window[0])
            if key not in groups:
                groups[key] = self.buffers.add_group(
                    impl.num_heads, impl.num_kv_heads, impl.head_size, kv=self.kv, dtype=layer.dtype, kv_dtype=kv_dtype,
                    kv_layout="HND", window_left=impl.sliding_window[0], backend=self.kernel_backend,
                )  # fmt: skip
            steps[name] = groups[key]
        return steps

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """Query rows of a request in a graph of unlike lengths: the verify width."""
        return int(max_decode_query_len(vllm_config))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Metadata of a step; vLLM's own for a draft model and for attention that is not causal."""
        base = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.is_draft or common_attn_metadata.causal is not True:
            return base
        requests, prefills, rows, _ = split_decodes_and_prefills(
            common_attn_metadata, decode_threshold=self.max_q_len
        )
        # asked for in every step: one of prefills alone drops the trees of its requests
        sources = self._sources(common_attn_metadata, requests)
        return TreeAttentionMetadata(
            **{field.name: getattr(base, field.name) for field in fields(base)},
            verify=self._verify(common_attn_metadata, requests, rows, sources) if requests else None,
            prefill=super().build(0, _behind(common_attn_metadata, requests, rows)) if prefills else None,
        )

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        """The metadata of vLLM itself: a drafter takes no trees and has its own steps."""
        return super().build(0, common_attn_metadata, fast_build=True)

    def _verify(self, common: Any, requests: int, rows: int, sources: tuple[DraftTrees, Tensor] | None) -> VerifyStep:
        starts = common.query_start_loc[: requests + 1]
        step = {
            "prefix_lens": common.seq_lens[:requests] - starts.diff(),
            "qo_indptr": starts,
            "kv": PagedKV(block_table=common.block_table_tensor[:requests], page_size=self.block_size),
        }
        if sources is None:
            self.buffers.update_(chain=True, **step)
        else:
            trees, source = sources
            parents, num_nodes = trees.gather(source[:requests], starts, min(rows, self.buffers.layout.total_q))
            self.buffers.update_(parents=parents, num_nodes=num_nodes, **step)
        return VerifyStep(self.buffers.layout, self.kv, self.steps, rows)

    def _sources(self, common: Any, requests: int) -> tuple[DraftTrees, Tensor] | None:
        """The trees of the process and whose each request has; None where all are chains."""
        trees, slots = current_trees(), common.req_idx
        if trees is None:
            return None
        self._check_trees(trees, has_slots=slots is not None)
        verifying = _verifying(common, requests, len(slots))
        if verifying is None:
            return None
        taken = trees.take(slots, verifying)
        return None if taken is None else (trees, taken)

    def _check_trees(self, trees: DraftTrees, has_slots: bool) -> None:
        if trees.max_q_len != self.max_q_len:
            raise ValueError(
                f"DraftTrees was made for {trees.max_q_len} rows a request, vLLM verifies {self.max_q_len} "
                f"(1 + num_speculative_tokens)"
            )
        parallel = self.vllm_config.parallel_config
        if not has_slots:
            raise NotImplementedError("trees without request slots in the metadata (req_idx): use the V2 model runner")
        if parallel.pipeline_parallel_size > 1:
            raise NotImplementedError(
                "trees with pipeline parallelism: the drafter runs on the last rank only, and the layers of the others "
                "would verify a chain"
            )
        if parallel.use_ubatching:
            raise NotImplementedError("trees with microbatches (--enable-dbo): a step has one layout for each of them")


def _verifying(common: Any, requests: int, count: int) -> Sequence[bool] | None:
    """Whether each real request verifies; None for a dummy batch, which no request is in: nobody has a context."""
    prefilling: Sequence[bool] = [False] * count
    if common.is_prefilling is not None:
        prefilling = common.is_prefilling[:count].tolist()
    if common.seq_lens_cpu_upper_bound is not None and not any(prefilling):
        query_lens = common.query_start_loc_cpu[1 : count + 1] - common.query_start_loc_cpu[:count]
        if not bool((common.seq_lens_cpu_upper_bound[:count] > query_lens).any()):
            return None
    return [row < requests and not prefill for row, prefill in enumerate(prefilling)]


def _behind(common: Any, requests: int, rows: int) -> Any:
    """The batch without its first requests."""
    if requests == 0:
        return common
    reqs = slice(requests, None)

    def cut(value: Any) -> Any:
        return None if value is None else value[reqs]

    return common.replace(
        query_start_loc=common.query_start_loc[reqs] - rows,
        query_start_loc_cpu=common.query_start_loc_cpu[reqs] - rows,
        seq_lens=common.seq_lens[reqs],
        num_reqs=common.num_reqs - requests,
        num_actual_tokens=common.num_actual_tokens - rows,
        block_table_tensor=common.block_table_tensor[reqs],
        slot_mapping=common.slot_mapping[rows:],
        positions=None if common.positions is None else common.positions[rows:],
        is_prefilling=cut(common.is_prefilling),
        seq_lens_cpu_upper_bound=cut(common.seq_lens_cpu_upper_bound),
        req_idx=cut(common.req_idx),
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )
