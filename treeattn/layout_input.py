"""What a layout is built from: host-side checks of the arguments, and the checks of `validate=True`.

Shapes, dtypes, devices and capacities are checked on every call and need no device value. `validate_input`
reads device data and is only for whoever can afford that.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

import torch
from torch import Tensor

from treeattn.masks import MAX_PREFIX, full_indptr, packed_indptr, tree_indptr, unpack_bytes, unpack_words
from treeattn.status import Status, status_error
from treeattn.tree import validate_parents

if TYPE_CHECKING:
    from treeattn.layout import TreeLayout

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


def validation_wanted(validate: bool | None) -> bool:
    """Return `validate`, or what `TREEATTN_VALIDATE=1` in the environment says when it is None."""
    return os.environ.get("TREEATTN_VALIDATE", "0") == "1" if validate is None else validate


def refuse_in_capture(device: torch.device, what: str) -> None:
    """Raise RuntimeError when a CUDA stream is being captured: `what` would have to read device data."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what} reads device data, which a CUDA graph capture forbids; "
            "capture with validate=False (and TREEATTN_VALIDATE unset), then call check() after a replay"
        )


def ints(value: Ints, name: str, device: torch.device) -> Tensor:
    """Return a 1-D int32 or int64 tensor on `device`; sequences are copied, tensors must be there."""
    if not isinstance(value, Tensor):
        return torch.tensor(list(value), dtype=torch.int64, device=device)
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


def check_size(source: LayoutInput, canonical: int) -> None:
    """Raise ValueError unless the mask has `canonical` elements (or, when not `exact`, at least those)."""
    have = 0 if source.data is None else source.data.numel()
    if have == canonical or (have > canonical and not source.exact):
        return
    widths = f"{source.batch} requests of {source.q_len} rows" if source.q_len is not None else "the requests"
    unit = "bytes" if source.kind == "packed" else "elements"
    raise ValueError(f"a mask of form {source.kind!r} for {widths} has {canonical} {unit}, got {have}")


def canonical_indptr(source: LayoutInput, qo_indptr: Tensor) -> Tensor:
    """Compute where each request's block starts in this form (bytes for "packed"): int64 [batch + 1]."""
    if source.kind == "tree":
        return tree_indptr(qo_indptr)
    full = full_indptr(qo_indptr, source.prefix_lens[: source.batch])
    return packed_indptr(full) if source.kind == "packed" else full


def validate_input(source: LayoutInput, layout: TreeLayout) -> None:
    """Read device data and check it; errors name request, row and value (the contract's validation mode)."""
    refuse_in_capture(layout.device, "validation")
    qo = _validated_qo(source, layout)
    widths = [b - a for a, b in itertools.pairwise(qo)]
    for b, prefix in enumerate(source.prefix_lens[: source.batch].tolist()):
        if not 0 <= prefix <= MAX_PREFIX:
            raise status_error((Status.PREFIX_LEN, b, 0, prefix))
    nodes: list[int] = widths if source.num_nodes is None else source.num_nodes[: source.batch].tolist()
    if source.kind == "parents" and source.data is not None:
        flat = source.data[: source.batch].reshape(-1).tolist() if source.data.dim() == 2 else source.data.tolist()
        validate_parents([flat[a:b] for a, b in itertools.pairwise(qo)], nodes)
    for b, (count, width) in enumerate(zip(nodes, widths, strict=True)):
        if count > width or (count < 1 and width > 0):
            raise ValueError(f"request {b}: num_nodes is {count}, must be 1 to its q_len {width}")
    if source.kind in ("full", "tree", "packed", "bias"):
        _validate_mask_sizes(source, torch.tensor(qo, device=layout.device))
    if source.kind not in ("parents", "chain"):
        _validate_bits(source, qo, nodes)
    if source.positions is not None and source.positions.numel() < qo[-1]:
        raise ValueError(f"positions have {source.positions.numel()} entries, the batch has {qo[-1]} rows")


def _validated_qo(source: LayoutInput, layout: TreeLayout) -> list[int]:
    if source.qo_indptr is None:
        return [b * int(source.q_len or 0) for b in range(source.batch + 1)]
    qo: list[int] = source.qo_indptr[: source.batch + 1].tolist()
    limit = min(layout.total_q, source.rows)
    for b in range(source.batch):
        low, high = qo[b], qo[b + 1]
        if (b == 0 and low != 0) or high < low or high > limit or high - low > layout.max_q_len:
            raise status_error((Status.QO_INDPTR, b, low, high))
    return qo


def _validate_bits(source: LayoutInput, qo: list[int], nodes: list[int]) -> None:
    """Refuse a real row that sees a node beyond num_nodes; where a mask alone tells the nodes there is none."""
    if source.data is None or (source.num_nodes is None and source.kind not in ("tree", "words")):
        return
    starts = canonical_indptr(source, torch.tensor(qo, device=source.data.device)).tolist()
    if source.mask_indptr is not None:
        starts = source.mask_indptr.tolist()
    for b, (first, count) in enumerate(zip(qo, nodes, strict=False)):
        width = qo[b + 1] - first
        if source.kind == "words":
            bits = source.data.shape[1] * 64
            if bits < count:
                raise ValueError(f"request {b}: words have {bits} bits a row, num_nodes is {count}")
            seen = unpack_words(source.data[first : first + count], bits)
        else:
            columns = width if source.kind == "tree" else width + int(source.prefix_lens[b])
            seen = _flat_block(source.data, source.kind, starts[b], width, columns)[:count, columns - width :]
        beyond = seen[:, count:].nonzero()
        if beyond.numel():
            row, node = beyond[0].tolist()
            raise ValueError(f"request {b}, row {row}: sees node {count + node}, but num_nodes is {count}")


def _flat_block(data: Tensor, kind: Kind, start: int, rows: int, columns: int) -> Tensor:
    """Read a request's bool [rows, columns] from a flat mask."""
    size = rows * columns
    if kind == "packed":
        return unpack_bytes(data[start : start + (size + 7) // 8], size).view(rows, columns)
    flat = data[start : start + size]
    return (flat == 0 if kind == "bias" else flat != 0).view(rows, columns)


def _validate_mask_sizes(source: LayoutInput, qo_indptr: Tensor) -> None:
    canonical = canonical_indptr(source, qo_indptr).tolist()
    if source.mask_indptr is None:
        check_size(source, canonical[-1])
        return
    for b, (got, want) in enumerate(zip(source.mask_indptr[: source.batch + 1].tolist(), canonical, strict=True)):
        if got != want and b < source.batch:
            raise status_error((Status.MASK_INDPTR, b, want, got))
        if got != want:
            raise ValueError(f"request {b - 1} ends at {got}, must be {want}")
