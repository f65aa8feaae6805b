"""SGLang's Triton attention backend, with target verify served by treeattn.

The class keeps its parent's name: SGLang looks some backends up by it. Where the parent makes its metadata (eager, and
outside the graph for capture and replay) it also makes the step: layout and plans. Layer calls only run it. K and V are
written, scales and windows chosen by the parent as ever; of it only the kernel is replaced, for target verify alone.
Draft workers and every other mode stay with it, and so does what treeattn does not do, with one line in the log.

The tree-only mask takes the place of the full one, so that SGLang neither allocates nor fills a byte a cached token.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend as SGLangTritonAttnBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.runtime_context import get_exec, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch import Tensor

from treeattn import PagedKV

from .extend_call import ExtendCall, GroupKey, attend, call_refusal, geometry_refusal, group_key
from .verify import VerifyStep, VerifySteps, count_requests, mask_form, verify_width

KERNELS = "TREEATTN_SGLANG_KERNELS"
"""Environment variable: the backend of treeattn, "auto" by default."""

logger = logging.getLogger("treeattn.sglang")


@dataclass(frozen=True, eq=False)
class _Verify:
    """A layer call of target verify, while it runs."""

    k: Tensor | None
    v: Tensor | None


class TritonAttnBackend(SGLangTritonAttnBackend):  # type: ignore[misc]
    """See the module. Arguments as its parent's.

    Attributes
    ----------
    treeattn_off : str or None
        Why this backend leaves everything to its parent; None where it serves target verify.
    treeattn_calls : int
        Layer calls that treeattn has served; a graph's replays do not count.
    """

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, *args, **kwargs)
        self.treeattn_calls = 0
        self._resolve_width = model_runner.decode_num_tokens_per_req
        self._call: _Verify | None = None
        self._told: set[str] = set()
        self._is_verify = False
        self._last_static: VerifyStep | None = None
        self._kernels = os.environ.get(KERNELS, "auto")
        self._device = torch.device(self.device)
        self.treeattn_off, keys = self._role_refusal(), []
        if self.treeattn_off is None:
            self._refuse_two_batch_overlap()
            layers = self._layers(getattr(model_runner, "model", None))
            self.treeattn_off = self._refusal(layers, model_runner.dtype)
            if self.treeattn_off is None:
                keys = [self._layer_key(layer, model_runner.dtype) for layer in layers]
        self._steps = VerifySteps(keys, self._kernels, self.enable_deterministic)
        if self.treeattn_off is not None:
            logger.info("treeattn leaves this backend to SGLang: %s", self.treeattn_off)
        else:
            logger.info(
                "treeattn serves target verify: %d groups among the model's layers%s",
                len(self._steps.keys), ", batch-invariant" if self.enable_deterministic else "",
            )  # fmt: skip

    def _role_refusal(self) -> str | None:
        """Why this backend verifies nothing that treeattn could serve."""
        reasons = {
            "no speculative decoding": not self.num_draft_tokens,
            "this is a draft worker's backend": self.is_draft_runner or self.skip_prefill,
            f"decode context parallelism of {self.dcp_size}": self.dcp_size > 1,
            "a diffusion model's canvas": self.dllm_attention is not None,
            f"a GPU that is not NVIDIA's ({torch.version.hip})": torch.version.hip is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _layers(self, model: Any) -> list[RadixAttention]:
        """The attention layers that verify; of an MLA model those that read latent rows.

        A layer that the pool does not know by its number reads another's: its group is learned from its first call.
        """
        if model is None:
            return []
        layers = []
        for module in model.modules():
            if not isinstance(module, RadixAttention):
                continue
            try:
                pool = self._key_pool(module)
            except (IndexError, KeyError, ValueError):
                continue
            if not self.use_mla or module.qk_head_dim == pool.shape[-1]:
                layers.append(module)
        return layers

    def _key_pool(self, layer: RadixAttention) -> Tensor:
        pool: Tensor = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        return pool

    def _layer_key(self, layer: RadixAttention, dtype: torch.dtype) -> GroupKey:
        k = self._key_pool(layer)
        window = layer.sliding_window_size
        return GroupKey(
            layer.tp_q_head_num, k.shape[1], layer.qk_head_dim, layer.v_head_dim, dtype, k.dtype, self.use_mla,
            window if window is not None and window > 0 else -1,
        )  # fmt: skip

    def _refusal(self, layers: list[RadixAttention], dtype: torch.dtype) -> str | None:
        """What some layer asks for that treeattn does not do."""
        for layer in layers:
            if layer.xai_temperature_len > 0:
                return f"layer {layer.layer_id} has an xai temperature"
            if layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY:
                return f"layer {layer.layer_id} is no causal self-attention"
            axes = self._key_pool(layer).ndim
            if axes != 3:
                return f"layer {layer.layer_id} has a pool of {axes} axes"
            if (reason := geometry_refusal(self._layer_key(layer, dtype), self._device, self._kernels)) is not None:
                return f"layer {layer.layer_id}: {reason}"
        return None

    def _refuse_two_batch_overlap(self) -> None:
        if get_exec().overlap.enable_two_batch_overlap:
            raise NotImplementedError(
                "treeattn does not serve two-batch overlap, which cuts a verify mask at the offsets of the full form: "
                "start the server without --enable-two-batch-overlap, or without TREEATTN_SGLANG"
            )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Take static memory; the verify mask is the tree-only one, of which the parent is kept from its own."""
        if self.treeattn_off is not None:
            super().init_cuda_graph_state(max_bs, max_num_tokens, *args, **kwargs)
            return
        self.is_draft_runner = True  # the parent makes no mask for such: it would take a byte a token and row
        try:
            super().init_cuda_graph_state(max_bs, max_num_tokens, *args, **kwargs)
        finally:
            self.is_draft_runner = False
        width = max(max_num_tokens // max(max_bs, 1), self.num_draft_tokens)
        self._verify_mask = VerifyMask(
            buffer=torch.zeros(max_bs * width**2, dtype=torch.uint8, device=self.device),
            mode=TreeMaskMode.QLEN_ONLY,
            max_bs=max_bs,
            is_read=True,
        )
        # the addresses of max_bs requests, and no more: a batch-invariant plan has memory for each of them
        indices = self.cuda_graph_kv_indices[: max_bs * self.max_context_len]
        kv = PagedKV(kv_indptr=self.kv_indptr[: max_bs + 1], kv_indices=indices)
        window = None
        if self._has_window():
            window = PagedKV(
                kv_indptr=self.window_kv_indptr[: max_bs + 1],
                kv_indices=self.cuda_graph_window_kv_indices,
                kv_start=self.cuda_graph_window_kv_offsets,
            )
        buffers = self._steps.allocate(max_bs, width, self.max_context_len, kv, window)
        logger.info(
            "treeattn takes memory for graphs of up to %d requests of %d rows: %d groups, %.1f MB; "
            "tree-only mask of %d bytes in place of %d",
            max_bs, width, len(self._steps.keys), buffers.allocated_bytes / 1e6,
            self._verify_mask.buffer.numel(), max_bs * width * (self.max_context_len + width),
        )  # fmt: skip

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Eager: the parent's metadata, then the step."""
        super().init_forward_metadata(forward_batch)
        self._is_verify = self._serves(forward_batch)
        if self._is_verify:
            found = self.forward_metadata
            window = None
            if self._has_window():
                window = PagedKV(
                    kv_indptr=found.window_kv_indptr,
                    kv_indices=found.window_kv_indices,
                    kv_start=found.window_kv_offsets,
                )
            step = self._step(forward_batch, static=False)
            self._steps.make_eager(step, PagedKV(kv_indptr=found.kv_indptr, kv_indices=found.kv_indices), window)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """For graphs: the parent's buffers, then the step in static memory."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        self._is_verify = self._serves(forward_batch)
        if self._is_verify:
            self._last_static = self._step(forward_batch, static=True)
            self._steps.write_static(self._last_static)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Write the step again: where SGLang plans ahead on another stream, its mask is final only now."""
        super().update_verify_buffers_to_fill_after_draft(spec_info, cuda_graph_bs)
        if self._last_static is not None and self._steps.is_static and cuda_graph_bs is not None:
            self._steps.write_static(self._last_static)

    def _update_target_verify_buffers(
        self, plan: Any, bs: int, seq_lens: Tensor, spec_info: Any, req_pool_indices: Tensor
    ) -> Any:
        """The parent's, without its copy of the mask, which has no room for the full form."""
        if self.treeattn_off is None:
            width = self._width(spec_info).width
            spec_info = SimpleNamespace(num_tokens_per_req=width, custom_mask=None)
        return super()._update_target_verify_buffers(plan, bs, seq_lens, spec_info, req_pool_indices)

    def _has_window(self) -> bool:
        return self.sliding_window_size is not None and self.sliding_window_size > 0

    def _serves(self, forward_batch: Any) -> bool:
        return self.treeattn_off is None and bool(forward_batch.forward_mode.is_target_verify())

    def _width(self, spec_info: Any) -> Any:
        return verify_width(spec_info, self._resolve_width, get_spec())

    def _step(self, forward_batch: Any, *, static: bool) -> VerifyStep:
        spec_info, batch = forward_batch.spec_info, len(forward_batch.req_pool_indices)
        width = self._width(spec_info)
        positions = getattr(forward_batch, "positions", None)
        rows = None if positions is None else positions.shape[0]
        exact = static or getattr(spec_info, "draft_token", None) is None
        padding = getattr(forward_batch, "num_padding", None) or 0
        requests = count_requests(spec_info, width, batch, rows, exact, padding)
        mask = getattr(spec_info, "custom_mask", None)
        own = self._verify_mask.buffer if self._verify_mask is not None else None
        form = "full" if mask is None else mask_form(mask, requests, width.width, own)
        return VerifyStep(requests, width.width, forward_batch.seq_lens[:requests], mask, form)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """The parent's, which comes back to the kernel below."""
        if not (self._is_verify and self._serves(forward_batch)):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        self._call = _Verify(k, v)
        try:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        finally:
            self._call = None

    def _forward_extend_kernel(self, layer: RadixAttention, *args: Any, **kwargs: Any) -> Any:
        if self._call is None:
            return super()._forward_extend_kernel(layer, *args, **kwargs)
        call = ExtendCall(*args, **kwargs)
        if (reason := self._call_refusal(call)) is None:
            return self._attend(call)
        self._tell(layer, reason)
        if call.custom_mask is not None:
            mask, starts = self._steps.full_mask()
            call = replace(call, custom_mask=mask, mask_indptr=starts)
        given = {name: value for name, value in vars(call).items() if name in kwargs}
        return super()._forward_extend_kernel(layer, *list(vars(call).values())[: len(args)], **given)

    def _forward_extend_unified(
        self,
        q: Tensor,
        o: Tensor,
        layer: RadixAttention,
        forward_batch: Any,
        causal: bool,
        logits_soft_cap: float,
        sinks: Tensor | None,
        score_mod: Any = None,
        aux_tensors: Any = None,
    ) -> Any:
        """Deterministic mode: the batch-invariant groups."""
        verify = self._call
        if verify is not None and verify.k is not None and verify.v is not None:
            call = ExtendCall(
                q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
                verify.k,
                verify.v,
                o.view(-1, layer.tp_q_head_num, layer.v_head_dim),
                **self._unified_arguments(layer),
                is_causal=causal,
                logit_cap=logits_soft_cap,
                sinks=sinks,
                score_mod=score_mod,
                aux_tensors=aux_tensors,
            )
            if (reason := self._call_refusal(call)) is None:
                self._attend(call)
                return o
            self._tell(layer, reason)
        found = self.forward_metadata
        if verify is not None and found.custom_mask is not None:
            mask, starts = self._steps.full_mask()
            self.forward_metadata: Any = replace(found, custom_mask=mask, mask_indptr=starts)
        return super()._forward_extend_unified(
            q, o, layer, forward_batch, causal, logits_soft_cap, sinks, score_mod=score_mod, aux_tensors=aux_tensors
        )

    def _unified_arguments(self, layer: RadixAttention) -> dict[str, Any]:
        """What the parent would hand to its two-stage kernel, were this not the deterministic mode."""
        found, window = self.forward_metadata, layer.sliding_window_size
        windowed = window is not None and window > -1
        scaled = layer.k_scale is not None and layer.v_scale is not None
        return {
            "k_buffer": self._key_pool(layer),
            "v_buffer": self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            "qo_indptr": found.qo_indptr,
            "kv_indptr": found.window_kv_indptr if windowed else found.kv_indptr,
            "kv_indices": found.window_kv_indices if windowed else found.kv_indices,
            "custom_mask": found.custom_mask,
            "mask_indptr": found.mask_indptr,
            "max_len_extend": found.max_extend_len,
            "k_scale": layer.k_scale_float if scaled else 1.0,
            "v_scale": layer.v_scale_float if scaled else 1.0,
            "sm_scale": layer.scaling,
            "sliding_window_size": window if windowed else -1,
            "window_kv_offsets": found.window_kv_offsets if windowed else None,
            "xai_temperature_len": layer.xai_temperature_len,
            "page_size": self.page_size,
        }

    def _call_refusal(self, call: ExtendCall) -> str | None:
        if (reason := call_refusal(call)) is not None:
            return reason
        key = group_key(call)
        return None if key in self._steps.keys else geometry_refusal(key, call.q_extend.device, self._kernels)

    def _attend(self, call: ExtendCall) -> None:
        step, rows = self._steps.step_for(group_key(call)), self._steps.rows()
        if not self._steps.is_static and call.q_extend.shape[0] > rows:
            tail = {name: getattr(call, name) for name in ("q_extend", "k_extend", "v_extend", "o_extend")}
            tail["o_extend"][rows:].zero_()
            call = replace(call, **{name: tensor[:rows] for name, tensor in tail.items()})
        attend(call, step, zero_tail=self._steps.is_static)
        self.treeattn_calls += 1

    def _tell(self, layer: RadixAttention, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("treeattn leaves layer %d to SGLang's kernel: it asks for %s", layer.layer_id, reason)
