"""TreeLayout: where the rows of each request are, and what each row sees among its request's nodes.

A layout describes one verify step of a batch: request `b` owns rows `qo_indptr[b] .. qo_indptr[b + 1]`, of
which the first `num_nodes[b]` are real (node j is row j) and the rest padding. Every real row sees the whole
committed prefix and the nodes whose bits are set in its `mask_words`; `positions` follow from depth.

Widths belong to the batch, never to a backend: nothing here knows a server-wide draft width.

Worked example, two requests with max_q_len 4: the tree (-1, 0, 0, 1) at prefix 5, and a lone root at prefix 3
with three rows of padding.

    qo_indptr    0 4 8
    mask_indptr  0 36 64                 4 * (5 + 4), then 4 * (3 + 4)
    mask_words   1 3 5 11 | 1 0 0 0      row 3 sees nodes 0, 1, 3: 1 + 2 + 8
    parents      -1 0 0 1 | -1 -1 -1 -1
    depths       0 1 1 2 | 0 0 0 0
    positions    5 6 6 7 | 3 3 3 3

On CUDA a build is kernels only (`kernels/layout.py`): no host read, and no allocation when written in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from treeattn import masks
from treeattn.kinds import require_tensor
from treeattn.layout_input import Ints, LayoutInput, MaskForm, check_input, ints
from treeattn.layout_torch import write_layout_torch_
from treeattn.status import raise_status
from treeattn.validate import refuse_in_capture, validate_input, validation_wanted


@dataclass(frozen=True, eq=False)
class TreeLayout:
    """Rows and visibility of one verify step; all tensors on one device.

    Attributes
    ----------
    qo_indptr : Tensor int32 [batch + 1]
        Row offsets of q and out.
    prefix_lens : Tensor int32 [batch]
        Committed tokens in the cache, an own copy.
    num_nodes : Tensor int32 [batch]
        Real nodes, the root included; 0 for an empty request.
    mask_indptr : Tensor int64 [batch + 1]
        Element offsets of the flat full form: running sums of `q_len * (prefix_len + q_len)`.
    mask_words : Tensor int64 [total_q, num_words]
        Bit `j % 64` of word `j // 64` of a row = it sees node j of its request. Padding rows are 0.
    parents : Tensor int32 [total_q]
        Local parent row, -1 for roots, padding and rows of no request.
    depths : Tensor int32 [total_q]
        Edges from the root, 0 for padding.
    positions : Tensor int64 [total_q]
        prefix_len + depth; prefix_len for padding rows, 0 for rows of no request.
    row_request : Tensor int32 [total_q]
        The request that owns the row, -1 past the last one.
    status : Tensor int32 [4]
        First finding of a kernel since the last `check()`, see `treeattn.status`.
    max_q_len : int
        Widest request that fits; `num_words` follows from it.
    q_len : int or None
        The one width of every request where the host knows it, None for a ragged batch.
    """

    qo_indptr: Tensor
    prefix_lens: Tensor
    num_nodes: Tensor
    mask_indptr: Tensor
    mask_words: Tensor
    parents: Tensor
    depths: Tensor
    positions: Tensor
    row_request: Tensor
    status: Tensor
    max_q_len: int
    q_len: int | None = None

    @property
    def batch(self) -> int:
        """Requests this layout has room for."""
        return self.prefix_lens.shape[0]

    @property
    def total_q(self) -> int:
        """Rows this layout has room for."""
        return self.mask_words.shape[0]

    @property
    def num_words(self) -> int:
        """Words of a mask row, `ceil(max_q_len / 64)`."""
        return self.mask_words.shape[1]

    @property
    def device(self) -> torch.device:
        """Where every tensor of the layout is."""
        return self.mask_words.device

    def flatten(self) -> tuple[list[Tensor], Tensor, int, int | None]:
        """The fields as operators take them: ``TreeLayout(*tensors, *rest)`` of this is the layout again.

        Returns
        -------
        list of Tensor, Tensor, int, int or None
            The tensors that a step only reads, `status`, which it may write, `max_q_len`, `q_len`.
        """
        tensors = [
            self.qo_indptr, self.prefix_lens, self.num_nodes, self.mask_indptr, self.mask_words, self.parents,
            self.depths, self.positions, self.row_request,
        ]  # fmt: skip
        return tensors, self.status, self.max_q_len, self.q_len

    @classmethod
    def allocate(
        cls,
        max_batch: int,
        max_q_len: int,
        max_total_q: int | None = None,
        device: torch.device | str | None = None,
    ) -> TreeLayout:
        """Allocate an empty layout of the given capacity, for `write_layout_`.

        Parameters
        ----------
        max_batch, max_q_len : int
            Most requests, and most rows of one request.
        max_total_q : int, optional
            Most rows of a batch, `max_batch * max_q_len` when missing.
        device : torch.device, optional
            CPU when missing.
        """
        total_q = max_batch * max_q_len if max_total_q is None else max_total_q
        for name, value in (("max_batch", max_batch), ("max_q_len", max_q_len), ("max_total_q", total_q)):
            if value < 0:
                raise ValueError(f"{name} is {value}, must be 0 or more")

        status = torch.zeros(4, dtype=torch.int32, device=device)
        layout = empty_layout(max_batch, max_q_len, total_q, device, status)
        for tensor in (
            layout.qo_indptr, layout.prefix_lens, layout.num_nodes, layout.mask_indptr, layout.mask_words,
            layout.depths, layout.positions,
        ):  # fmt: skip
            tensor.zero_()
        layout.parents.fill_(-1)
        layout.row_request.fill_(-1)
        return layout

    @classmethod
    def from_parents(
        cls,
        parents: Tensor,
        prefix_lens: Ints,
        num_nodes: Ints | None = None,
        qo_indptr: Ints | None = None,
        max_q_len: int | None = None,
        validate: bool | None = None,
    ) -> TreeLayout:
        """Build a layout from the parent of each node.

        Parameters
        ----------
        parents : Tensor int32 or int64, [batch, q_len] or flat [total_q]
            Local parent rows, `parents[i] < i`, root -1 in row 0. What padding rows hold is not read.
        prefix_lens : int32 or int64 [batch]
            Committed tokens of each request.
        num_nodes : int32 or int64 [batch], optional
            Real nodes of each request, all rows when missing. 0 or less is an empty request.
        qo_indptr : int32 or int64 [batch + 1]
            Row offsets; for flat parents, and only for them.
        max_q_len : int, optional
            The widest request. Needed on CUDA with `qo_indptr`, whose widths the host does not know.
        validate : bool, optional
            Read device data and check it. None: what TREEATTN_VALIDATE says; CPU tensors report
            what the build itself finds. False: only the status word tells (see `check`).

        Raises
        ------
        ValueError, TypeError
            Shapes, dtypes, devices or capacities do not fit, or what validation found.
        """
        require_tensor(parents, "parents")
        if parents.dim() == 2:
            batch = parents.shape[0]
            q_len: int | None = parents.shape[1]
        else:
            if qo_indptr is None:
                raise ValueError("flat parents [total_q] need qo_indptr; parents of one width are [batch, q_len]")
            batch, q_len = len(qo_indptr) - 1, None
        return _build(
            device=parents.device,
            batch=batch,
            total_q=parents.numel(),
            parents=parents,
            prefix_lens=prefix_lens,
            num_nodes=num_nodes,
            q_len=q_len,
            qo_indptr=qo_indptr,
            max_q_len=max_q_len,
            validate=validate,
        )

    @classmethod
    def from_mask(
        cls,
        mask: Tensor,
        form: MaskForm,
        prefix_lens: Ints,
        q_len: int | None = None,
        qo_indptr: Ints | None = None,
        num_nodes: Ints | None = None,
        positions: Tensor | None = None,
        mask_indptr: Ints | None = None,
        max_q_len: int | None = None,
        total_q: int | None = None,
        validate: bool | None = None,
    ) -> TreeLayout:
        """Build a layout from a mask in any wire form (`treeattn.masks` describes them).

        Any pattern of node bits is legal. Where they are an ancestor relation, `depths`, `positions` and
        `parents` (the highest visible node below the row) follow from it; for another pattern pass
        `positions` if a window or rotary embedding needs them. With a prefix part ("full", "packed",
        "bias") and no `num_nodes`, trailing all-zero rows are padding; in "tree" and "words" every row is
        real then.

        Parameters
        ----------
        mask : Tensor
            "full" and "tree": bool, uint8 or int8, non-zero = visible. "packed": uint8. "words": int64
            [total_q, num_words]. "bias": floats, 0 = visible, -inf or at most -1e4 = masked.
        form : {"full", "tree", "packed", "words", "bias"}
            Never guessed; the length is checked against it.
        prefix_lens, num_nodes, qo_indptr, max_q_len, validate
            As in `from_parents`. `q_len` instead of `qo_indptr` for one width.
        positions : Tensor int32 or int64 [total_q], optional
            Positions of the rows, within 2^30 of the prefix's length; depths are then `positions - prefix_len`.
        mask_indptr : int32 or int64 [batch + 1], optional
            Where each request's block starts (bytes for "packed"), when not at the canonical place.
            Validation compares it with the canonical one.
        total_q : int, optional
            Rows of the batch; needed on CUDA with `qo_indptr` unless the form is "words".

        Raises
        ------
        ValueError
            The length does not fit the form, or a real row has a hole in its prefix part (on CPU or under
            validation; on CUDA that request is emptied and the status word set).
        """
        require_tensor(mask, "mask")
        if positions is not None:
            require_tensor(positions, "positions")
        batch = len(prefix_lens) if qo_indptr is None else len(qo_indptr) - 1
        if total_q is None:
            if q_len is not None:
                total_q = batch * q_len
            elif form == "words":
                total_q = mask.shape[0]
        return _build(
            device=mask.device,
            batch=batch,
            total_q=total_q,
            mask=mask,
            form=form,
            prefix_lens=prefix_lens,
            num_nodes=num_nodes,
            q_len=q_len,
            qo_indptr=qo_indptr,
            positions=positions,
            mask_indptr=mask_indptr,
            max_q_len=max_q_len,
            validate=validate,
        )

    @classmethod
    def chain(
        cls,
        prefix_lens: Ints,
        q_len: int | None = None,
        num_nodes: Ints | None = None,
        qo_indptr: Ints | None = None,
        max_q_len: int | None = None,
        total_q: int | None = None,
        device: torch.device | str | None = None,
        validate: bool | None = None,
    ) -> TreeLayout:
        """Build a layout of plain causal chains: the parent of row i is row i - 1.

        Parameters as in `from_mask`; `device` is that of `prefix_lens` when this is a tensor, else CPU.
        """
        if device is None:
            device = prefix_lens.device if isinstance(prefix_lens, Tensor) else "cpu"
        batch = len(prefix_lens) if qo_indptr is None else len(qo_indptr) - 1
        if total_q is None and q_len is not None:
            total_q = batch * q_len
        return _build(
            device=torch.device(device),
            batch=batch,
            total_q=total_q,
            prefix_lens=prefix_lens,
            num_nodes=num_nodes,
            q_len=q_len,
            qo_indptr=qo_indptr,
            max_q_len=max_q_len,
            validate=validate,
        )

    def full_mask(self, out: Tensor | None = None, dtype: torch.dtype = torch.bool, total: int | None = None) -> Tensor:
        """Export the flat full form, bool or uint8. On CUDA pass `out` or `total` (elements)."""
        return masks.full_mask(self, out, dtype, total)

    def tree_mask(self, out: Tensor | None = None, dtype: torch.dtype = torch.bool, total: int | None = None) -> Tensor:
        """Export the flat tree form, bool or uint8. On CUDA a ragged layout needs `out` or `total`."""
        return masks.tree_mask(self, out, dtype, total)

    def packed_mask(self, out: Tensor | None = None, total: int | None = None) -> tuple[Tensor, Tensor]:
        """Export the packed form, uint8, and its byte offsets int64 [batch + 1]; sizes as `full_mask`."""
        return masks.packed_mask(self, out, total)

    def bias(self, out: Tensor | None = None, dtype: torch.dtype = torch.float32, total: int | None = None) -> Tensor:
        """Export the flat full form as floats, 0 or -inf. On CUDA pass `out` or `total` (elements)."""
        return masks.bias_mask(self, out, dtype, total)

    def check(self) -> None:
        """Read the status word; raise ValueError for the first finding since the last check, and clear it.

        Raises
        ------
        ValueError
            Names request, row and value.
        RuntimeError
            The stream is being captured.
        """
        refuse_in_capture(self.device, "check()")
        found = self.status.tolist()
        if found[0]:
            self.status.zero_()
        raise_status(found)


def empty_layout(
    max_batch: int, max_q_len: int, total_q: int, device: torch.device | str | None, status: Tensor
) -> TreeLayout:
    """Memory for a layout that is written whole before it is read: uninitialised, but for `status`."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return TreeLayout(
        qo_indptr=empty(max_batch + 1),
        prefix_lens=empty(max_batch),
        num_nodes=empty(max_batch),
        mask_indptr=empty(max_batch + 1, dtype=torch.int64),
        mask_words=empty(total_q, num_words(max_q_len), dtype=torch.int64),
        parents=empty(total_q),
        depths=empty(total_q),
        positions=empty(total_q, dtype=torch.int64),
        row_request=empty(total_q),
        status=status,
        max_q_len=max_q_len,
    )


def num_words(max_q_len: int) -> int:
    """Count the 64-bit words of a mask row, at least one."""
    return max((max_q_len + 63) // 64, 1)


def _build(
    *,
    device: torch.device,
    batch: int,
    total_q: int | None,
    prefix_lens: Ints,
    num_nodes: Ints | None,
    q_len: int | None,
    qo_indptr: Ints | None,
    max_q_len: int | None,
    validate: bool | None,
    parents: Tensor | None = None,
    mask: Tensor | None = None,
    form: MaskForm | None = None,
    positions: Tensor | None = None,
    mask_indptr: Ints | None = None,
) -> TreeLayout:
    """Allocate a layout of exactly this batch and write it."""
    if batch < 0:
        raise ValueError("qo_indptr has batch + 1 entries, got none")
    for name, given in (("prefix_lens", prefix_lens), ("num_nodes", num_nodes)):
        if given is not None and len(given) != batch:
            raise ValueError(f"{name} has {len(given)} entries, the batch has {batch} requests")
    if q_len is None and qo_indptr is not None:
        qo_indptr = ints(qo_indptr, "qo_indptr", device)
        max_q_len, total_q = _ragged_sizes(qo_indptr, max_q_len, total_q)
    if max_q_len is None:
        max_q_len = q_len
    if max_q_len is None or total_q is None:
        raise ValueError("pass q_len (one width), or qo_indptr (a width for each request)")
    if q_len is None:  # check_input knows only what one width needs
        if form == "words" and mask is not None and mask.dim() == 2 and 64 * mask.shape[1] < max_q_len:
            have = f"{mask.shape[1]} x 64 bits a row"
            raise ValueError(f"words have {have}, requests of up to {max_q_len} rows need more")
        if positions is not None and positions.numel() < total_q:
            raise ValueError(f"positions have {positions.numel()} entries, the batch has {total_q} rows")
    layout = replace(TreeLayout.allocate(batch, max_q_len, total_q, device), q_len=q_len)
    write_layout_(
        layout,
        batch=batch,
        prefix_lens=prefix_lens,
        parents=parents,
        mask=mask,
        form=form,
        q_len=q_len,
        qo_indptr=qo_indptr,
        num_nodes=num_nodes,
        positions=positions,
        mask_indptr=mask_indptr,
        exact=True,
        validate=validate,
    )
    if validation_wanted(validate) or (validate is None and device.type == "cpu"):
        layout.check()
    return layout


def _ragged_sizes(qo_indptr: Tensor, max_q_len: int | None, total_q: int | None) -> tuple[int, int]:
    if max_q_len is not None and total_q is not None:
        return max_q_len, total_q
    if qo_indptr.device.type == "cuda":
        missing = "max_q_len" if max_q_len is None else "total_q"
        raise ValueError(f"the widths in qo_indptr are on the device: pass {missing}=")
    widest = int(qo_indptr.diff().max()) if qo_indptr.numel() > 1 else 0
    return (
        max(widest, 0) if max_q_len is None else max_q_len,
        max(int(qo_indptr[-1]), 0) if total_q is None else total_q,
    )


def write_layout_(
    layout: TreeLayout,
    *,
    batch: int,
    prefix_lens: Ints,
    parents: Tensor | None = None,
    mask: Tensor | None = None,
    form: MaskForm | None = None,
    q_len: int | None = None,
    qo_indptr: Ints | None = None,
    num_nodes: Ints | None = None,
    positions: Tensor | None = None,
    mask_indptr: Ints | None = None,
    exact: bool | None = None,
    validate: bool | None = None,
    backend: Literal["torch", "triton"] | None = None,
) -> None:
    """Write a batch into `layout` in place: from `parents`, a `mask` with its `form`, or else as chains.

    Requests from `batch` to the layout's capacity become empty; nothing of the previous step survives. Host
    fields (`max_q_len`, `q_len`) never change. On CUDA: kernels on the current stream, capturable,
    no allocation. The status word is written when something is wrong and otherwise left alone.

    Parameters
    ----------
    layout : TreeLayout
        Written; its capacities bound the batch.
    batch : int
        Requests of this step, at most `layout.batch`.
    q_len, qo_indptr
        One of the two: the uniform width (implied by parents [batch, q_len]), or row offsets.
    exact : bool, optional
        Whether a flat mask must have exactly the canonical size, or at least that (static mask memory, whose
        used part varies). None: exact except on CUDA. On CUDA only a size that the host knows can be refused
        at once, others set the status word.
    backend : {"torch", "triton"}, optional
        Which implementation writes; "triton" on CUDA and "torch" elsewhere when None. For tests.

    Raises
    ------
    ValueError
        The batch exceeds a capacity (both numbers are named), before anything is written.
    """
    if batch > layout.batch:
        raise ValueError(f"the batch has {batch} requests, the layout has room for {layout.batch}")
    width = parents.shape[1] if parents is not None and parents.dim() == 2 else q_len
    if width is not None and width > layout.max_q_len:
        raise ValueError(f"requests of {width} rows, the layout was made for max_q_len {layout.max_q_len}")
    if width is not None and batch * width > layout.total_q:
        raise ValueError(f"{batch} requests x {width} rows = {batch * width} rows, the layout has {layout.total_q}")
    source = check_input(
        device=layout.device,
        layout_rows=layout.total_q,
        batch=batch,
        prefix_lens=prefix_lens,
        parents=parents,
        mask=mask,
        form=form,
        q_len=q_len,
        qo_indptr=qo_indptr,
        num_nodes=num_nodes,
        positions=positions,
        mask_indptr=mask_indptr,
        exact=layout.device.type != "cuda" if exact is None else exact,
    )
    if validation_wanted(validate):
        validate_input(source, layout)
    _writer(layout, backend)(layout, source)
    if validation_wanted(validate):
        layout.check()


def _writer(
    layout: TreeLayout, backend: Literal["torch", "triton"] | None
) -> Callable[[TreeLayout, LayoutInput], None]:
    if backend == "torch" or (backend is None and layout.device.type != "cuda"):
        return write_layout_torch_
    from treeattn.kernels import layout as kernels

    writer: Callable[[TreeLayout, LayoutInput], None] = kernels.write_layout_triton_
    return writer
