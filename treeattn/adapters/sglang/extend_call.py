"""One call of SGLang's ``extend_attention_fwd`` in treeattn's words.

SGLang's terms and ours: its prefix is ``kv_indptr``'s part of ``kv_indices`` (token slots), its "extend" rows are the
nodes, whose K and V come fresh with the call; ``sliding_window_size`` W is ``window_left`` W, by depth here and by row
there; the scales belong to what is read from the cache; the lse counts the sinks. MLA is a V buffer that is a view of
the K buffer.

Not here: layouts and plans (:mod:`.verify`, :mod:`.drop_in`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import treeattn
from treeattn import PagedKV, Step
from treeattn.backends import why_not
from treeattn.capabilities import Asked
from treeattn.geometry import FP8_DTYPES, Geometry, Part


@dataclass(frozen=True, eq=False)
class ExtendCall:
    """Arguments of ``extend_attention_fwd`` of SGLang 0.5.23, under its names and in its order.

    Attributes
    ----------
    q_extend, o_extend : Tensor
        ``[rows, query heads, head_dim]`` and ``[rows, query heads, head_dim_v]``.
    k_extend, v_extend : Tensor
        ``[rows, KV heads, head_dim]`` and ``[rows, KV heads, head_dim_v]``.
    k_buffer, v_buffer : Tensor
        ``[token slots, KV heads, head_dim]`` and ``[token slots, KV heads, head_dim_v]``.
    qo_indptr, kv_indptr : Tensor
        int32 or int64 ``[batch + 1]``; the second one counts prefix tokens, inside the window where there is one.
    kv_indices : Tensor
        int32 or int64 token slots.
    custom_mask : Tensor or None
        bool or uint8, flat; None for causal chains.
    mask_indptr : Tensor or None
        int32 or int64 ``[batch + 1]``, where the mask of each request starts.
    max_len_extend : int
        Query rows of a request at most.
    window_kv_offsets : Tensor or None
        int32 or int64 ``[batch]``: the position of the first token that ``kv_indices`` has.
    """

    q_extend: Tensor
    k_extend: Tensor
    v_extend: Tensor
    o_extend: Tensor
    k_buffer: Tensor
    v_buffer: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    custom_mask: Tensor | None
    is_causal: bool
    mask_indptr: Tensor | None
    max_len_extend: int
    k_scale: float
    v_scale: float
    sm_scale: float | None = None
    logit_cap: float = 0.0
    skip_prefix_custom_mask: bool = True
    sliding_window_size: int = -1
    sinks: Tensor | None = None
    window_kv_offsets: Tensor | None = None
    xai_temperature_len: float = -1
    lse_extend: Tensor | None = None
    skip_prefix: bool = False
    skip_extend: bool = False
    page_size: int = 1
    score_mod: Any = None
    aux_tensors: Any = None
    extend_seq_lens_cpu: Any = None
    identity_kv_indices: bool = False

    @property
    def batch(self) -> int:
        """Requests of the call."""
        return self.qo_indptr.shape[0] - 1

    @property
    def shared_kv(self) -> bool:
        """Whether V is a part of K in the cache."""
        k, v = self.k_buffer, self.v_buffer
        # the stride of an axis of one says nothing
        steps = zip(k.shape, k.stride(), v.stride(), strict=True)
        alike = all(k_stride == v_stride for size, k_stride, v_stride in steps if size > 1)
        return k.data_ptr() == v.data_ptr() and alike and v.shape[-1] <= k.shape[-1]

    @property
    def part(self) -> Part:
        """Which keys count."""
        return "tree" if self.skip_prefix else "prefix" if self.skip_extend else "all"

    def kv(self) -> PagedKV:
        """The addresses of the prefixes, borrowed."""
        batch, offsets = self.batch, self.window_kv_offsets
        return PagedKV(
            page_size=1,
            kv_indptr=self.kv_indptr[: batch + 1],
            kv_indices=self.kv_indices,
            kv_start=None if offsets is None else offsets[:batch],
        )


PARAMETERS = tuple(field.name for field in dataclasses.fields(ExtendCall))
"""Names of SGLang's parameters, in order."""


class GroupKey(NamedTuple):
    """What tells the layers of one group from others: everything that a plan depends on beside the step."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    shared_kv: bool
    window_left: int

    @property
    def windowed(self) -> bool:
        """Whether the layers read the addresses that keep a window."""
        return self.window_left >= 0


def group_key(call: ExtendCall) -> GroupKey:
    """The group that a layer's call belongs to."""
    return GroupKey(
        call.q_extend.shape[1],
        call.k_buffer.shape[1],
        call.q_extend.shape[-1],
        call.v_buffer.shape[-1],
        call.q_extend.dtype,
        call.k_buffer.dtype,
        call.shared_kv,
        call.sliding_window_size if call.sliding_window_size > 0 else -1,
    )


def geometry_refusal(key: GroupKey, device: torch.device, backend: str = "auto", part: Part = "all") -> str | None:
    """Why treeattn does not do a geometry on a device, or None."""
    try:
        geometry = Geometry.of(**key._asdict(), fresh_tree=True, part=part)
        return why_not(backend, device, Asked(geometry, windowed_cache=key.windowed))
    except (TypeError, ValueError) as error:
        return str(error)


def call_refusal(call: ExtendCall) -> str | None:
    """What a call asks that treeattn does not do, beside its geometry; None if it does it all."""
    asked = {
        "score_mod": call.score_mod is not None or call.aux_tensors is not None,
        "an xai temperature": call.xai_temperature_len > 0,
        f"pools of {call.k_buffer.ndim} axes": call.k_buffer.ndim != 3 or call.v_buffer.ndim != 3,
        "identity_kv_indices": call.identity_kv_indices,
        "attention that is not causal": not call.is_causal and call.custom_mask is None,
        "a mask over the prefix (skip_prefix_custom_mask=False)": (
            call.custom_mask is not None and not call.skip_prefix_custom_mask
        ),
        "neither prefix nor nodes": call.skip_prefix and call.skip_extend,
        f"scales of a {call.k_buffer.dtype} cache": (
            call.k_buffer.dtype not in FP8_DTYPES and (call.k_scale != 1.0 or call.v_scale != 1.0)
        ),
    }
    return next((words for words, wanted in asked.items() if wanted), None)


def attend(call: ExtendCall, step: Step, *, zero_tail: bool = False) -> None:
    """Run a call with a prepared step and write ``o_extend`` (and ``lse_extend``)."""
    shared, fp8 = step.shared_kv, step.kv_dtype in FP8_DTYPES
    treeattn.tree_attention(
        call.q_extend,
        call.k_buffer,
        None if shared else call.v_buffer,
        step,
        k_tree=call.k_extend,
        v_tree=None if shared else call.v_extend,
        out=call.o_extend,
        lse=call.lse_extend,
        sm_scale=call.sm_scale or call.q_extend.shape[-1] ** -0.5,
        logits_soft_cap=max(call.logit_cap, 0.0),
        sinks=call.sinks,
        sinks_in_lse=call.sinks is not None and call.lse_extend is not None,
        k_scale=call.k_scale if fp8 else None,
        v_scale=call.v_scale if fp8 and not shared else None,
        zero_tail=zero_tail,
    )
