"""The call that a layer makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .capabilities import Asked, missing, refusal
from .kv import cache_strides
from .plan import PLANNED, CheckedCall, Step
from .scoring import Scale, Scoring, call_kind, check_scoring
from .validate import validate_call


def _check_rows(name: str, tensor: Tensor, step: Step, heads: int, dim: int) -> None:
    if tensor.ndim != 3 or tensor.shape[1:] != (heads, dim):
        raise ValueError(
            f"{name}: expected [query rows, heads, head_dim] = [{step.layout.total_q}, {heads}, {dim}], "
            f"got {list(tensor.shape)}"
        )
    _check_row_count(name, tensor.shape[0], step)
    if tensor.stride(2) != 1 and tensor.shape[2] > 1:
        raise ValueError(f"{name}: the last axis (head_dim) must be contiguous, its stride is {tensor.stride(2)}")


def _check_row_count(name: str, rows: int, step: Step) -> None:
    """The founding bug is caught here: rows for one width handed to a layout of another."""
    present, capacity = step.host, step.layout.total_q
    needed = capacity if present is None else present.rows
    if present is None and rows == needed:
        return
    if present is not None and (needed is None or needed <= rows) and rows <= capacity:
        return
    batch = step.layout.batch if present is None else present.batch
    q_len = step.layout.q_len if present is None else present.q_len
    message = f"{name} has {rows} query rows, the layout has {needed}"
    if present is not None and rows > capacity:
        message = f"{name} has {rows} query rows, the buffers hold {capacity} (max_q_len {step.layout.max_q_len})"
    if q_len is not None and batch and rows % batch == 0:
        message += f": {batch} requests of width {q_len}, but {name} holds rows for width {rows // batch}"
    raise ValueError(message)


def _check_call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    step: Step,
    k_tree: Tensor | None,
    v_tree: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[int, ...]:
    """What the host knows of a call, checked; returns the cache strides (page, slot, head of K, then of V)."""
    device = step.layout.device
    named = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k_tree": k_tree, "v_tree": v_tree, "out": out, "lse": lse}
    for name, tensor in named.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, the step is on {device}")
    for name, tensor in named.items():
        wanted = step.kv_dtype if name.endswith("_cache") else step.dtype
        if name != "lse" and tensor is not None and tensor.dtype != wanted:
            raise TypeError(f"{name} is {tensor.dtype}, the step was planned for {wanted}")
    _check_rows("q", q, step, step.num_qo_heads, step.head_dim)
    _check_pairs(step, v_cache, k_tree, v_tree)
    if k_tree is not None:
        _check_rows("k_tree", k_tree, step, step.num_kv_heads, step.head_dim)
    if v_tree is not None:
        _check_rows("v_tree", v_tree, step, step.num_kv_heads, step.head_dim_v)
    if out is not None:
        _check_rows("out", out, step, step.num_qo_heads, step.head_dim_v)
    for name in ("k_tree", "v_tree", "out"):
        tensor = named[name]
        if tensor is not None and tensor.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has {tensor.shape[0]} rows, q has {q.shape[0]}")
    if lse is not None:
        if lse.dtype != torch.float32:
            raise TypeError(f"lse must be float32, got {lse.dtype}")
        if lse.shape != (q.shape[0], step.num_qo_heads):
            raise ValueError(
                f"lse: expected [query rows, heads] = [{q.shape[0]}, {step.num_qo_heads}], got {list(lse.shape)}"
            )
    for name in ("out", "lse"):
        tensor = named[name]
        if tensor is not None and any(size > 1 and tensor.stride(axis) == 0 for axis, size in enumerate(tensor.shape)):
            raise ValueError(f"{name} is written: its elements must not share memory (strides {tensor.stride()})")
    return _check_caches(step, k_cache, v_cache)


def _check_pairs(step: Step, v_cache: Tensor | None, k_tree: Tensor | None, v_tree: Tensor | None) -> None:
    """K comes with V, unless V is a part of K."""
    if step.shared_kv and (v_cache is not None or v_tree is not None):
        raise ValueError("the step was planned with shared_kv=True, V is a part of K: give v_cache=None, v_tree=None")
    if not step.shared_kv:
        if v_cache is None:
            raise ValueError("v_cache=None is for a step planned with shared_kv=True (MLA)")
        if (k_tree is None) != (v_tree is None):
            raise ValueError("give k_tree and v_tree together, or neither")
    if step.fresh_tree and k_tree is None:
        wanted = "k_tree is" if step.shared_kv else "k_tree and v_tree are"
        raise ValueError(f"the step was planned with fresh_tree=True: {wanted} missing")


def _check_caches(step: Step, k_cache: Tensor, v_cache: Tensor | None) -> tuple[int, ...]:
    strides: list[int] = []
    caches = [("k_cache", k_cache, step.head_dim)]
    if v_cache is not None:
        caches.append(("v_cache", v_cache, step.head_dim_v))
    for name, cache, dim in caches:
        strides.extend(cache_strides(cache, step.kv.page_size, step.kv_layout, name))
        head_axis = 1 if cache.ndim == 3 or step.kv_layout == "HND" else 2
        if cache.shape[head_axis] != step.num_kv_heads or cache.shape[-1] != dim:
            raise ValueError(
                f"{name} has {cache.shape[head_axis]} heads of {cache.shape[-1]} in {list(cache.shape)}, "
                f"the step was planned for {step.num_kv_heads} heads of {dim}"
            )
    if v_cache is not None and k_cache.shape[0] != v_cache.shape[0]:
        what = "token slots" if k_cache.ndim == 3 else "pages"
        sizes = f"k_cache has {k_cache.shape[0]} {what}, v_cache has {v_cache.shape[0]}"
        raise ValueError(f"{sizes}: one table addresses both")
    return tuple(strides) if v_cache is not None else (*strides, *strides)


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    step: Step,
    *,
    k_tree: Tensor | None = None,
    v_tree: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    sinks_in_lse: bool = False,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    zero_tail: bool = False,
) -> Tensor:
    """Attention of a batch of draft trees over their prefixes and themselves.

    Parameters
    ----------
    q : Tensor
        ``[total_q, num_qo_heads, head_dim]``, rows of request b at ``qo_indptr[b]``; padding rows may hold anything.
    k_cache, v_cache : Tensor
        Paged caches, ``[pages, page_size, kv_heads, head_dim]`` ("NHD"), ``[pages, kv_heads, page_size, head_dim]``
        ("HND") or ``[token_slots, kv_heads, head_dim]``; any strides with the last axis contiguous. `v_cache` has
        `head_dim_v`, and is None for a step with ``shared_kv``: V is then the first `head_dim_v` numbers of K.
    step : Step
        From :func:`treeattn.plan`, or a group of :class:`treeattn.StaticBuffers`.
    k_tree, v_tree : Tensor, optional
        ``[total_q, kv_heads, head_dim]``: the nodes' own K and V, used in place of what the cache holds for them.
    out : Tensor, optional
        ``[total_q, num_qo_heads, head_dim_v]``, written in place. Rows past ``qo_indptr[batch]`` are not touched.
    lse : Tensor, optional
        ``float32 [total_q, num_qo_heads]``, either stride order: log-sum-exp of the scores (natural log).
    sm_scale : float, optional
        Factor on the scores, ``1 / sqrt(head_dim)`` by default; mandatory with ``shared_kv``.
    logits_soft_cap : float
        Scores become ``cap * tanh(score / cap)``; 0 for none.
    sinks : Tensor, optional
        ``[num_qo_heads]``: a logit of each head that takes weight and has no value (gpt-oss).
    sinks_in_lse : bool
        The lse counts the sinks; by default it does not, so that :func:`treeattn.merge` can add them once.
    k_scale, v_scale : float or Tensor, optional
        What a number of an FP8 cache stands for: one number, or float32 ``[num_kv_heads]``. Not for `k_tree`, `v_tree`.
    zero_tail : bool
        Also write 0 (lse -inf) to the rows past ``qo_indptr[batch]``, which are otherwise left as they are.

    Returns
    -------
    Tensor
        ``out``. Padding rows and rows without a visible key are 0, their lse is -inf.

    Raises
    ------
    TypeError, ValueError
        If a dtype or shape disagrees with the step, or what validation found; nothing has been written then.
    NotImplementedError
        If the step's backend was named and cannot do what the call asks (no soft cap, no sinks, or rows at odd
        addresses); the message names one that can. What "auto" has chosen never raises it.
    RuntimeError
        If the step was planned with validation and the stream is being captured.
    """
    if torch.compiler.is_dynamo_compiling():  # false where the operator itself comes here, at run time (ops.py)
        if out is None:
            out = q.new_empty(q.shape[0], step.num_qo_heads, step.head_dim_v)
        # a scale is a number or a tensor, and an operator's argument one of the two
        scales = ((None, scale) if isinstance(scale, Tensor) else (scale, None) for scale in (k_scale, v_scale))
        (k_number, k_scales), (v_number, v_scales) = scales
        torch.ops.treeattn.tree_attention(
            q, k_cache, v_cache, step.handle, out, k_tree, v_tree, lse, sm_scale, zero_tail, logits_soft_cap, sinks,
            sinks_in_lse, k_number, v_number, k_scales, v_scales,
        )  # fmt: skip
        return out
    host = step.host
    key = (
        q.device, k_cache.device, q.shape, q.stride(), q.dtype, k_cache.shape, k_cache.stride(), k_cache.dtype,
        None if v_cache is None else (v_cache.shape, v_cache.stride(), v_cache.dtype, v_cache.device),
        None if k_tree is None else (k_tree.shape, k_tree.stride(), k_tree.dtype, k_tree.device),
        None if v_tree is None else (v_tree.shape, v_tree.stride(), v_tree.dtype, v_tree.device),
        None if out is None else (out.shape, out.stride(), out.dtype, out.device),
        None if lse is None else (lse.shape, lse.stride(), lse.dtype, lse.device), None if host is None else host.rows,
    )  # fmt: skip
    checked = step.checked.get(key)
    if checked is None:
        strides = _check_call(q, k_cache, v_cache, step, k_tree, v_tree, out, lse)
        checked = step.checked[key] = CheckedCall(strides)
    bare = sinks is None and k_scale is None and v_scale is None and not sinks_in_lse
    known = step.scored.get((sm_scale, logits_soft_cap)) if bare else None
    if known is None:
        scoring = check_scoring(step, q.device, sm_scale, logits_soft_cap, sinks, k_scale, v_scale, sinks_in_lse)
        known = (scoring, _kind_of(step, scoring))
        if bare:
            step.scored[sm_scale, logits_soft_cap] = known
    scoring, kind = known
    if step.validate:
        validate_call(step, q.shape[0], k_cache, fresh=k_tree is not None)
    if out is None:
        out = q.new_empty(q.shape[0], step.num_qo_heads, step.head_dim_v)
    if step.backend in PLANNED:
        _run_kernels(q, k_cache, v_cache, step, k_tree, v_tree, out, lse, scoring, kind, zero_tail, checked)
        return out
    if step.backend == "reference":
        from .reference import tree_attention_reference as run
    else:
        from .torch_backend import tree_attention_torch as run
    run(q, k_cache, v_cache, step, scoring, k_tree=k_tree, v_tree=v_tree, out=out, lse=lse)
    if zero_tail:
        tail = slice(int(step.layout.qo_indptr[-1]), None)
        out[tail] = 0
        if lse is not None:
            lse[tail] = -torch.inf
    return out


def asked_of(step: Step, scoring: Scoring) -> Asked:
    """What a call asks of its backend."""
    return Asked(step, step.kv.kv_start is not None, scoring.logits_soft_cap, scoring.sinks is not None)


def _kind_of(step: Step, scoring: Scoring) -> tuple[Any, ...]:
    """What of a call's options is compiled in; NotImplementedError if the backend lacks one of them."""
    kind = call_kind(scoring)
    if (scoring.logits_soft_cap or scoring.sinks is not None) and kind not in step.scored:
        asked = asked_of(step, scoring)
        words = refusal(step.backend, step.layout.device.type, asked)
        another = step.auto and step.backend == "cuda" and missing("triton", step.layout.device.type, asked) is None
        if words is not None and not another:
            raise NotImplementedError(words)
        step.scored[kind] = True
    return kind


def _run_kernels(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    step: Step,
    k_tree: Tensor | None,
    v_tree: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    scoring: Scoring,
    kind: tuple[Any, ...],
    zero_tail: bool,
    checked: CheckedCall,
) -> None:
    """Launch the kernels compiled for these shapes, strides and alignments; the first such call prepares them."""
    if step.layout.batch == 0 or q.shape[0] == 0:
        if zero_tail:
            out.zero_()
            if lse is not None:
                lse.fill_(-torch.inf)
        return
    tensors = (q, k_cache, v_cache, k_tree, v_tree, out, lse, scoring.sinks)
    low_bits = 0
    for tensor in tensors:
        if tensor is not None:
            low_bits |= tensor.data_ptr()
    # the cuda backend writes out four bytes at a time
    key = (low_bits % 16 == 0 or (low_bits % 4, *_alignments(*tensors)), zero_tail, kind)
    launch = checked.launches.get(key)
    if launch is None:
        make: Callable[..., Any]
        if step.backend == "cuda":
            make = _cuda_launch(q, k_cache, v_cache, step, k_tree, v_tree, out, scoring, checked.cache_strides)
        else:
            from .kernels.launch import LayerLaunch

            make = LayerLaunch
        launch = checked.launches[key] = make(
            step, q, k_tree, v_tree, out, lse, scoring, cache_strides=checked.cache_strides, zero_tail=zero_tail
        )
    launch(q, k_cache, v_cache, k_tree, v_tree, out, lse, scoring)


def _cuda_launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    step: Step,
    k_tree: Tensor | None,
    v_tree: Tensor | None,
    out: Tensor,
    scoring: Scoring,
    strides: tuple[int, ...],
) -> Callable[..., Any]:
    """What makes the launch of a call with a step of the CUDA backend, or of one that its kernels cannot do."""
    from .cuda.launch import CudaLayerLaunch, unaligned

    reason = missing("cuda", step.layout.device.type, asked_of(step, scoring)) or unaligned(
        strides, q=q, k_cache=k_cache, v_cache=v_cache, k_tree=k_tree, v_tree=v_tree, out=out
    )
    if reason is None:
        return CudaLayerLaunch
    if not step.auto:
        raise NotImplementedError(f"backend 'cuda' cannot do this: {reason}; backend='triton' can")
    from .fallback import FallbackLaunch

    return FallbackLaunch


def _alignments(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Whether each tensor starts at a multiple of 16 bytes, which Triton compiles in."""
    return tuple(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)
