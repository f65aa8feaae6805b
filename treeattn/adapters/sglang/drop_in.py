"""SGLang's ``extend_attention_fwd`` with its own signature, for releases and forks that the plugin does not know.

Stateless: a call makes its layout and its plan, and nothing is remembered by pointer, so it costs more than the
plugin's path, which makes them once a step. No host read, so a call may be captured in a CUDA graph once a call of the
same shapes has compiled its kernels.

Where a fork imports the function, hand over this one::

    from treeattn.adapters.sglang import drop_in
    self.extend_attention_fwd = drop_in.wrap(extend_attention_fwd)  # theirs stays for what treeattn does not do

What stays per process is one status word a device, for :func:`check`: the mask of a request that has a hole in its
prefix part, or that ends too early, counts as no node at all, and the word says so. ``TREEATTN_VALIDATE=1`` finds it
where it happens.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

import treeattn
from treeattn import TreeLayout
from treeattn.layout import empty_layout, write_layout_
from treeattn.status import raise_status

from .extend_call import ExtendCall, attend, call_refusal, geometry_refusal, group_key

Form = Literal["full", "tree"]

logger = logging.getLogger("treeattn.sglang")
_status: dict[torch.device, Tensor] = {}


def extend_attention_fwd(*args: Any, mask_form: Form = "full", backend: str = "auto", **kwargs: Any) -> None:
    """Attend over prefixes and nodes; writes ``o_extend`` and, where given, ``lse_extend``.

    Parameters
    ----------
    *args, **kwargs
        SGLang's, by position or name: :class:`.extend_call.ExtendCall`.
    mask_form : {"full", "tree"}
        Whether a row of ``custom_mask`` has ``prefix + q_len`` bytes (SGLang's FULL, whose prefix part must be ones) or
        ``q_len`` (its QLEN_ONLY). ``mask_indptr`` counts in that form; None for back to back.
    backend : str
        Of :func:`treeattn.plan`.

    Raises
    ------
    NotImplementedError
        For what treeattn does not do: score_mod, xai temperature, 4-D pools, and what a backend lacks.
    TypeError, ValueError
        Where shapes or dtypes disagree, or what validation found.
    """
    call = ExtendCall(*args, **kwargs)
    if (reason := refusal(call, backend)) is not None:
        raise NotImplementedError(f"treeattn's extend_attention_fwd does not do {reason}; drop_in.wrap(original) can")
    _run(call, mask_form, backend)


def wrap(
    original: Callable[..., Any], *, mask_form: Form = "full", most_rows: int = 128, backend: str = "auto"
) -> Callable[..., Any]:
    """A function that serves verify calls and leaves the rest to `original`, with one log line a reason.

    Parameters
    ----------
    original : callable
        SGLang's function, of the same signature.
    mask_form, backend
        As in :func:`extend_attention_fwd`. A mask that `original` gets must be of the form that it reads.
    most_rows : int
        Calls without a mask and with more query rows a request are prefill, which is not treeattn's: they go to
        `original` too, silently.
    """
    told: set[str] = set()

    @functools.wraps(original)
    def extend(*args: Any, **kwargs: Any) -> Any:
        call = ExtendCall(*args, **kwargs)
        if call.custom_mask is None and call.max_len_extend > most_rows:
            return original(*args, **kwargs)
        if (reason := refusal(call, backend)) is None:
            return _run(call, mask_form, backend)
        if reason not in told:
            told.add(reason)
            logger.warning("treeattn's drop-in leaves calls to SGLang's kernel: they ask for %s", reason)
        return original(*args, **kwargs)

    return extend


def refusal(call: ExtendCall, backend: str = "auto") -> str | None:
    """What a call asks that treeattn does not do, or None."""
    return call_refusal(call) or geometry_refusal(group_key(call), call.q_extend.device, backend, call.part)


def check(device: torch.device | str) -> None:
    """Raise ValueError for the first thing that a call on `device` found wrong since the last check (waits for it)."""
    status = _status.get(torch.empty(0, device=device).device)  # "cuda" is the current one of several
    if status is None:
        return
    found = status.tolist()
    status.zero_()
    raise_status(found)


def _run(call: ExtendCall, mask_form: Form, backend: str) -> None:
    layout = _layout(call, mask_form)
    if layout.device.type == "cpu":
        check(layout.device)
    step = treeattn.plan(
        layout, call.kv(), **group_key(call)._asdict(), fresh_tree=True, part=call.part, backend=backend
    )
    attend(call, step)


def _layout(call: ExtendCall, form: Form) -> TreeLayout:
    batch, device = call.batch, call.q_extend.device
    # zeros would cost a launch for each tensor
    layout = empty_layout(batch, call.max_len_extend, call.q_extend.shape[0], device, _status_of(device))
    prefix_lens = call.kv_indptr[1 : batch + 1] - call.kv_indptr[:batch]
    if call.window_kv_offsets is not None:
        prefix_lens = prefix_lens + call.window_kv_offsets[:batch]
    masked = call.custom_mask is not None
    starts = call.mask_indptr[: batch + 1] if masked and call.mask_indptr is not None else None
    write_layout_(
        layout, batch=batch, prefix_lens=prefix_lens, qo_indptr=call.qo_indptr, mask=call.custom_mask,
        form=form if masked else None, mask_indptr=starts, exact=False,
    )  # fmt: skip
    return layout


def _status_of(device: torch.device) -> Tensor:
    if (status := _status.get(device)) is None:
        status = _status[device] = torch.zeros(4, dtype=torch.int32, device=device)
    return status
