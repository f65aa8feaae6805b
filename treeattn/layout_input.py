"""What a layout is built from: host-side checks of the arguments.

Shapes, dtypes, devices and capacities are checked on every call and need no device value. What reads device data is in
`validate`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from treeattn.masks import full_indptr, packed_indptr, tree_indptr

MaskForm = Literal["full", "tree", "packed", "words", "bias"]
Kind = Literal["parents", "chain", "full", "tree", "packed", "words", "bias"]
Ints = Tensor | Sequence[int]

_INTS = (torch.int32, torch.int64)
_FORM_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "full": (torch.bool, torch.uint8, torch.int8),
    "tree": (torch.bool, torch.uint8, torch.int8),
    "packed": (torch.uint8,),
    "words": (torch.int64,),
    "bias": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


@dataclass(frozen=True, eq=False)
class LayoutInput:
    """Checked arguments of one build; tensors are the caller's and only borrowed during it.

    Attributes
    ----------
    kind : str
        "parents", "chain", or the form of the mask.
    data : Tensor or None
        Parents [batch, q_len] or [rows], words [rows, n], or a contiguous flat mask. None for a chain.
    batch : int
        Requests of this step.
    q_len : int or None
        Uniform width; None when `qo_indptr` rules.
    qo_indptr : Tensor or None
        int32 or int64 [>= batch + 1].
    rows : int
        Rows that the data offers (or the layout has, for a chain and for flat masks).
    prefix_lens, num_nodes, positions, mask_indptr : Tensor or None
        int32 or int64, [>= batch], [>= batch], [>= rows of the step], [>= batch + 1].
    exact : bool
        A mask must have exactly the canonical size, not more.
    """

    kind: Kind
    data: Tensor | None
    batch: int
    q_len: int | None
    qo_indptr: Tensor | None
    rows: int
    prefix_lens: Tensor
    num_nodes: Tensor | None
    positions: Tensor | None
    mask_indptr: Tensor | None
    exact: bool


def ints(value: Ints, name: str, device: torch.device) -> Tensor:
    """Return a 1-D int32 or int64 tensor on `device`; sequences are copied, tensors must be there."""
    if not isinstance(value, Tensor):
        try:
            whole = [operator.index(number) for number in value]
        except TypeError as error:
            raise TypeError(f"{name} must hold integers: {error}") from error
        return torch.tensor(whole, dtype=torch.int64, device=device)
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, must be on {device}")
    if value.dtype not in _INTS:
        raise TypeError(f"{name} is {value.dtype}, must be int32 or int64")
    if value.dim() != 1:
        raise ValueError(f"{name} is 1-D, got {tuple(value.shape)}")
    return value


def _at_least(value: Ints, name: str, device: torch.device, length: int) -> Tensor:
    value = ints(value, name, device)
    if value.numel() < length:
        raise ValueError(f"{name} has {value.numel()} entries, this batch needs {length}")
    return value


def check_input(
    *,
    device: torch.device,
    layout_rows: int,
    batch: int,
    prefix_lens: Ints,
    parents: Tensor | None,
    mask: Tensor | None,
    form: MaskForm | None,
    q_len: int | None,
    qo_indptr: Ints | None,
    num_nodes: Ints | None,
    positions: Tensor | None,
    mask_indptr: Ints | None,
    exact: bool,
) -> LayoutInput:
    """Check everything that shapes, dtypes and devices tell, and return it as a `LayoutInput`."""
    if batch < 0:
        raise ValueError(f"batch is {batch}, must be 0 or more")
    if parents is not None and mask is not None:
        raise ValueError("pass parents or mask, not both")
    kind, data = _kind(device, parents, mask, form)
    if kind == "parents" and data is not None and data.dim() == 2:
        if qo_indptr is not None:
            raise ValueError("parents [batch, q_len] have one width; pass flat [total_q] parents with qo_indptr")
        if data.shape[0] < batch:
            raise ValueError(f"parents have {data.shape[0]} requests, the batch is {batch}")
        if q_len is not None and q_len != data.shape[1]:
            raise ValueError(f"parents are {data.shape[1]} wide, q_len is {q_len}")
        q_len = data.shape[1]
    if (q_len is None) == (qo_indptr is None):
        raise ValueError("pass either q_len (one width) or qo_indptr (a width for each request)")
    if q_len is not None and q_len < 0:
        raise ValueError(f"q_len is {q_len}, must be 0 or more")
    rows = layout_rows
    if data is not None and kind in ("parents", "words"):
        rows = data.shape[0] if kind == "words" or data.dim() == 1 else batch * data.shape[1]
    if q_len is not None and batch * q_len > rows:
        what = "the layout has" if rows == layout_rows else f"{kind} have"
        raise ValueError(f"{batch} requests of {q_len} rows are {batch * q_len} rows, {what} {rows}")
    source = LayoutInput(
        kind=kind,
        data=data,
        batch=batch,
        q_len=q_len,
        qo_indptr=None if qo_indptr is None else _at_least(qo_indptr, "qo_indptr", device, batch + 1),
        rows=rows,
        prefix_lens=_at_least(prefix_lens, "prefix_lens", device, batch),
        num_nodes=None if num_nodes is None else _at_least(num_nodes, "num_nodes", device, batch),
        positions=None if positions is None else ints(positions.reshape(-1), "positions", device),
        mask_indptr=None if mask_indptr is None else _at_least(mask_indptr, "mask_indptr", device, batch + 1),
        exact=exact,
    )
    _check_extras(source)
    return source


def _kind(
    device: torch.device, parents: Tensor | None, mask: Tensor | None, form: MaskForm | None
) -> tuple[Kind, Tensor | None]:
    if mask is None:
        if form is not None:
            raise ValueError(f"form {form!r} needs a mask")
        if parents is None:
            return "chain", None
        if parents.device != device:
            raise ValueError(f"parents are on {parents.device}, must be on {device}")
        if parents.dtype not in _INTS:
            raise TypeError(f"parents are {parents.dtype}, must be int32 or int64")
        if parents.dim() not in (1, 2):
            raise ValueError(f"parents are [batch, q_len] or flat [total_q], got {tuple(parents.shape)}")
        return "parents", parents
    if form is None or form not in get_args(MaskForm):
        raise ValueError(f"form must name the mask's form, one of {', '.join(get_args(MaskForm))}; got {form!r}")
    if mask.device != device:
        raise ValueError(f"mask is on {mask.device}, must be on {device}")
    if mask.dtype not in _FORM_DTYPES[form]:
        wanted = " or ".join(str(d) for d in _FORM_DTYPES[form])
        raise TypeError(f"a mask of form {form!r} is {wanted}, got {mask.dtype}")
    if form == "words":
        if mask.dim() != 2:
            raise ValueError(f"words are [total_q, num_words], got {tuple(mask.shape)}")
        return "words", mask
    if not mask.is_contiguous():
        raise ValueError(f"a mask of form {form!r} must be contiguous, got strides {mask.stride()}")
    return cast(Kind, form), mask.reshape(-1)


def _check_extras(source: LayoutInput) -> None:
    if source.mask_indptr is not None and source.kind in ("parents", "chain", "words"):
        raise ValueError(f"mask_indptr belongs to a flat mask, not to {source.kind}")
    if source.positions is not None:
        if source.kind in ("parents", "chain"):
            raise ValueError(f"positions of {source.kind} follow from the tree")
        if not source.positions.is_contiguous():
            raise ValueError(f"positions must be contiguous, got strides {source.positions.stride()}")
        need = source.batch * source.q_len if source.q_len is not None else 0
        if source.positions.numel() < need:
            raise ValueError(f"positions have {source.positions.numel()} entries, the batch has {need} rows")
    if source.kind == "words" and source.data is not None and source.q_len is not None:
        rows, given = source.data.shape
        if given * 64 < source.q_len:
            raise ValueError(f"words have {given} x 64 bits a row, requests of {source.q_len} rows need {source.q_len}")
        if source.exact and rows != source.batch * source.q_len:
            need = source.batch * source.q_len
            raise ValueError(f"words of {source.batch} requests of {source.q_len} rows have {need} rows, got {rows}")
    if source.kind == "tree" and source.q_len is not None and source.mask_indptr is None:
        check_size(source, source.batch * source.q_len**2)


def check_size(source: LayoutInput, canonical: int, hint: str = "") -> None:
    """Raise ValueError, ending in `hint`, unless the mask has `canonical` elements (not `exact`: at least those)."""
    have = 0 if source.data is None else source.data.numel()
    if have == canonical or (have > canonical and not source.exact):
        return
    widths = f"{source.batch} requests of {source.q_len} rows" if source.q_len is not None else "the requests"
    unit = "bytes" if source.kind == "packed" else "elements"
    raise ValueError(f"a mask of form {source.kind!r} for {widths} has {canonical} {unit}, got {have}{hint}")


def canonical_indptr(source: LayoutInput, qo_indptr: Tensor) -> Tensor:
    """Compute where each request's block starts in this form (bytes for "packed"): int64 [batch + 1]."""
    if source.kind == "tree":
        return tree_indptr(qo_indptr)
    full = full_indptr(qo_indptr, source.prefix_lens[: source.batch])
    return packed_indptr(full) if source.kind == "packed" else full
