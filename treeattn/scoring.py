"""How one call turns products into weights: scale, soft cap, sinks, and the scales of an FP8 cache."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .geometry import FP8_DTYPES, Geometry
from .kinds import require_tensor

Scale = float | Tensor
MAX_SCALE = 2.0**127
"""What a scale given as a number may be at most: kernels take it, times log2(e), as a float32."""


class Scoring(NamedTuple):
    """Options of a call beside its tensors.

    Attributes
    ----------
    sm_scale : float
        Factor on ``<q, k>``.
    logits_soft_cap : float
        Scores become ``cap * tanh(score / cap)``; 0 for none.
    sinks : Tensor or None
        ``[num_qo_heads]``: a logit of each head that takes weight and has no value.
    k_scale, v_scale : float or Tensor
        What a number of the cache stands for; a tensor of one number or ``[num_kv_heads]``.
    sinks_in_lse : bool
        The lse counts the sink too.
    """

    sm_scale: float
    logits_soft_cap: float = 0.0
    sinks: Tensor | None = None
    k_scale: Scale = 1.0
    v_scale: Scale = 1.0
    sinks_in_lse: bool = False


def check_scoring(
    geometry: Geometry,
    device: torch.device,
    sm_scale: float | None,
    logits_soft_cap: float,
    sinks: Tensor | None,
    k_scale: Scale | None,
    v_scale: Scale | None,
    sinks_in_lse: bool,
) -> Scoring:
    """The options of a call with their defaults.

    Raises
    ------
    TypeError, ValueError
        If one of them does not fit the geometry.
    """
    if sm_scale is None:
        if geometry.shared_kv:
            raise ValueError("sm_scale must be given with shared_kv: the scale of MLA is not 1 / sqrt(head_dim)")
        sm_scale = 1 / math.sqrt(geometry.head_dim)
    given: dict[str, Any] = {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap}
    for name, number in given.items():
        if isinstance(number, Tensor):  # a call's options are kept, and a tensor may hold another number later
            raise TypeError(f"{name} must be a float, got a tensor")
    if not abs(sm_scale) <= MAX_SCALE:
        raise ValueError(f"sm_scale must be a number within 2^127, got {sm_scale}")
    if not (logits_soft_cap == 0 or 1e-30 <= logits_soft_cap <= 1e30):
        raise ValueError(f"logits_soft_cap must be 0 (none) or 1e-30 to 1e30, got {logits_soft_cap}")
    if sinks is not None:
        require_tensor(sinks, "sinks")
        if sinks.shape != (geometry.num_qo_heads,):
            raise ValueError(f"sinks: expected [query heads] = [{geometry.num_qo_heads}], got {list(sinks.shape)}")
        if sinks.device != device:
            raise ValueError(f"sinks is on {sinks.device}, the step is on {device}")
        if not sinks.dtype.is_floating_point or sinks.dtype in FP8_DTYPES:
            raise TypeError(f"sinks must be float16, bfloat16 or float32, got {sinks.dtype}")
        _check_dense("sinks", sinks)
    elif sinks_in_lse:
        raise ValueError("sinks_in_lse needs sinks")
    if geometry.shared_kv and v_scale is not None:
        raise ValueError("v_scale: with shared_kv V is a part of K, and k_scale holds for both")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        if geometry.kv_dtype not in FP8_DTYPES:
            raise ValueError(f"{name} is for an FP8 cache, the step was planned for {geometry.kv_dtype}")
        if not isinstance(scale, Tensor):
            if not isinstance(scale, (int, float)):
                raise TypeError(f"{name} must be a float or a float32 tensor, got {type(scale).__name__}")
            if not abs(scale) <= MAX_SCALE:
                raise ValueError(f"{name} must be a number within 2^127, got {scale}")
            continue
        if scale.dtype != torch.float32:
            raise TypeError(f"{name} must be a float or a float32 tensor, got {scale.dtype}")
        if scale.device != device:
            raise ValueError(f"{name} is on {scale.device}, the step is on {device}")
        if scale.numel() != 1 and scale.shape != (geometry.num_kv_heads,):
            raise ValueError(
                f"{name}: expected one number or [KV heads] = [{geometry.num_kv_heads}], got {list(scale.shape)}"
            )
        _check_dense(name, scale)
    k_scale = 1.0 if k_scale is None else k_scale if isinstance(k_scale, Tensor) else float(k_scale)
    if geometry.shared_kv:
        v_scale = k_scale
    else:
        v_scale = 1.0 if v_scale is None else v_scale if isinstance(v_scale, Tensor) else float(v_scale)
    return Scoring(float(sm_scale), float(logits_soft_cap), sinks, k_scale, v_scale, sinks_in_lse)


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.numel() > 1 and not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, its stride is {tensor.stride(0)}")


def scale_kind(scale: Scale) -> int:
    """How a scale comes: 0 none, 1 a number, 2 one number on the device, 3 one a KV head."""
    if isinstance(scale, Tensor):
        return 2 if scale.numel() == 1 else 3
    return 0 if scale == 1.0 else 1


def call_kind(scoring: Scoring) -> tuple[Any, ...]:
    """What of a call's options kernels have compiled in."""
    return (
        scoring.sm_scale < 0, scoring.logits_soft_cap > 0, None if scoring.sinks is None else scoring.sinks.dtype,
        scoring.sinks_in_lse, scale_kind(scoring.k_scale), scale_kind(scoring.v_scale),
    )  # fmt: skip
