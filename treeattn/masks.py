"""Bits and wire forms of tree masks: packing into words, and the flat forms that frameworks exchange.

`mask_words` is little-endian: bit `j % 64` of word `j // 64` of row `i` is set when row `i` sees node `j`
of its request. For the tree with parents (-1, 0, 0, 1):

    row  sees      bits (node 0 first)  word
    0    0         1000                 0b0001 = 1
    1    0 1       1100                 0b0011 = 3
    2    0 2       1010                 0b0101 = 5
    3    0 1 3     1101                 0b1011 = 11

Flat forms concatenate one block a request. With `kv = prefix_len + q_len`:

    full    q_len x kv elements, element `i * kv + c` = row i sees key c (prefix tokens first, then nodes)
    tree    q_len x q_len elements, the node part alone
    packed  the full block's elements as bits, first element in bit 0 of the first byte, each request starting
            at a byte boundary (FlashInfer's `segment_packbits(..., bitorder="little")`)
    bias    the full block as floats, 0 = visible and -inf = masked

The tree above at prefix 2 has the full block 111000 111100 111010 111101, packed to the bytes
0xc7, 0x73, 0xbd (24 bits, so no padding bits). Padding rows are all zero in every form.

Nothing here reads a device value on the host, except a total that was neither given nor implied by `out`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from treeattn.layout import TreeLayout

# Elements handled at a time by the exports: bounds their int64 temporaries to some tens of megabytes.
_CHUNK = 1 << 20


def pack_words(bits: Tensor) -> Tensor:
    """Pack a boolean tensor's last axis into int64 words.

    Parameters
    ----------
    bits : Tensor [..., n]
        Any dtype; non-zero = set.

    Returns
    -------
    Tensor int64 [..., ceil(n / 64)]
        Bit `j % 64` of word `j // 64` is `bits[..., j]`; unused high bits are zero.

    Examples
    --------
    >>> pack_words(torch.tensor([[1, 1, 0, 1]])).tolist()
    [[11]]
    """
    n = bits.shape[-1]
    num_words = (n + 63) // 64
    padded = torch.nn.functional.pad((bits != 0).to(torch.int64), (0, num_words * 64 - n))
    shifts = torch.arange(64, device=bits.device)
    return torch.sum(padded.view(*bits.shape[:-1], num_words, 64) << shifts, -1)


def unpack_words(words: Tensor, n: int) -> Tensor:
    """Undo `pack_words`: bool [..., n] from int64 [..., num_words], `n <= 64 * num_words`."""
    shifts = torch.arange(64, device=words.device)
    bits = (words.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(-2)[..., :n] != 0


def unpack_bytes(packed: Tensor, n: int) -> Tensor:
    """Unpack bool [n] from uint8 bytes, first element in bit 0 of the first byte."""
    shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten()[:n] != 0


def bias_visible(bias: Tensor) -> tuple[Tensor, Tensor]:
    """Tell which elements of an additive bias are visible, and which are neither visible nor masked.

    0 is visible; -inf, the dtype's lowest number and everything down from `BIAS_MASKED` is masked; any
    other number would change scores, which a mask cannot express.

    Returns
    -------
    visible, odd : Tensor bool, shaped like `bias`
    """
    visible = bias == 0
    return visible, ~visible & ~(bias <= BIAS_MASKED)


# Frameworks mask with -inf, finfo.min (float16: -65504) or -1e4; real score biases stay far above.
BIAS_MASKED = -1e4


def _indptr(sizes: Tensor) -> Tensor:
    return torch.nn.functional.pad(sizes.cumsum(0), (1, 0))


MAX_PREFIX = 2**31 - 1  # lengths are int32 in the kernels


def sound_prefix(prefix_lens: Tensor) -> Tensor:
    """Prefix lengths as int64; 0 for one that is negative or no int32: such a request is empty."""
    prefix = prefix_lens.to(torch.int64)
    return prefix.masked_fill((prefix < 0) | (prefix > MAX_PREFIX), 0)


def tree_indptr(qo_indptr: Tensor) -> Tensor:
    """Compute element offsets int64 [batch + 1] of the tree form: running sums of `q_len * q_len`."""
    q_lens = qo_indptr.diff().to(torch.int64)
    return _indptr(q_lens * q_lens)


def full_indptr(qo_indptr: Tensor, prefix_lens: Tensor) -> Tensor:
    """Compute element offsets int64 [batch + 1] of the full form: sums of `q_len * (prefix_len + q_len)`."""
    q_lens = qo_indptr.diff().to(torch.int64)
    return _indptr(q_lens * (sound_prefix(prefix_lens) + q_lens))


def packed_indptr(mask_indptr: Tensor) -> Tensor:
    """Compute byte offsets int64 [batch + 1] of the packed form from the full form's element offsets."""
    return _indptr((mask_indptr.diff() + 7) // 8)


def _visible(layout: TreeLayout, request: Tensor, row: Tensor, column: Tensor, prefix: Tensor) -> Tensor:
    """Tell whether local `row` of `request` sees key `column` (prefix first); all shaped alike, int64."""
    node = column - prefix
    nodes = layout.num_nodes[request]
    flat_row = (layout.qo_indptr[request] + row).clamp(max=max(layout.total_q - 1, 0))
    safe = node.clamp(min=0, max=layout.num_words * 64 - 1)
    bit = (layout.mask_words[flat_row, safe // 64] >> (safe % 64)) & 1
    return (row < nodes) & ((node < 0) | (bit != 0))


def _elements(layout: TreeLayout, indptr: Tensor, index: Tensor, with_prefix: bool) -> Tensor:
    """Look up elements `index` (int64) of a flat form; False past its end."""
    if layout.batch == 0 or layout.total_q == 0:
        return torch.zeros_like(index, dtype=torch.bool)
    request = torch.searchsorted(indptr, index, right=True) - 1
    inside = request < layout.batch
    request = request.clamp(max=layout.batch - 1)
    return inside & _local_elements(layout, request, index - indptr[request], with_prefix)


def _local_elements(layout: TreeLayout, request: Tensor, local: Tensor, with_prefix: bool) -> Tensor:
    q_len = (layout.qo_indptr[request + 1] - layout.qo_indptr[request]).to(torch.int64)
    prefix = layout.prefix_lens[request].to(torch.int64) * int(with_prefix)
    width = (prefix + q_len).clamp(min=1)
    row, column = local // width, local % width
    return (row < q_len) & _visible(layout, request, row, column, prefix)


def _sized(layout: TreeLayout, indptr: Tensor, total: int | None, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    if out is not None:
        if out.dim() != 1 or out.device != layout.device:
            raise ValueError(f"out must be 1-D on {layout.device}, got {tuple(out.shape)} on {out.device}")
        need = total if total is not None else (int(indptr[-1]) if layout.device.type != "cuda" else 0)
        if out.numel() < need:
            raise ValueError(f"out has {out.numel()} elements, this mask needs {need}")
        return out
    if total is None:
        if layout.device.type == "cuda":
            raise ValueError(
                "the size of this form depends on lengths on the device: pass out=, or total=, its number of elements"
            )
        total = int(indptr[-1])
    return torch.empty(total, dtype=dtype, device=layout.device)


def _export_(layout: TreeLayout, indptr: Tensor, out: Tensor, with_prefix: bool, masked: float) -> Tensor:
    for begin in range(0, out.numel(), _CHUNK):
        part = out[begin : begin + _CHUNK]
        index = torch.arange(begin, begin + part.numel(), device=out.device)
        visible = _elements(layout, indptr, index, with_prefix)
        if out.dtype.is_floating_point:
            part.copy_(torch.zeros((), dtype=out.dtype, device=out.device).masked_fill(~visible, masked))
        else:
            part.copy_(visible)
    return out


def full_mask(
    layout: TreeLayout, out: Tensor | None = None, dtype: torch.dtype = torch.bool, total: int | None = None
) -> Tensor:
    """Export the flat full form, bool or uint8. Elements of `out` past its end get 0."""
    _check_mask_dtype(dtype if out is None else out.dtype)
    out = _sized(layout, layout.mask_indptr, total, out, dtype)
    return _export_(layout, layout.mask_indptr, out, True, 0.0)


def tree_mask(
    layout: TreeLayout, out: Tensor | None = None, dtype: torch.dtype = torch.bool, total: int | None = None
) -> Tensor:
    """Export the flat tree form, bool or uint8. A uniform layout knows its size without `out` or `total`."""
    _check_mask_dtype(dtype if out is None else out.dtype)
    indptr = tree_indptr(layout.qo_indptr)
    if total is None and layout.q_len is not None and layout.batch * layout.q_len == layout.total_q:
        total = layout.batch * layout.q_len**2
    return _export_(layout, indptr, _sized(layout, indptr, total, out, dtype), False, 0.0)


def bias_mask(
    layout: TreeLayout,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    total: int | None = None,
) -> Tensor:
    """Export the flat full form as an additive bias: 0 = visible, -inf = masked; -inf past its end."""
    dtype = dtype if out is None else out.dtype
    if not dtype.is_floating_point:
        raise TypeError(f"a bias is floating point, got {dtype}")
    out = _sized(layout, layout.mask_indptr, total, out, dtype)
    return _export_(layout, layout.mask_indptr, out, True, float("-inf"))


def packed_mask(layout: TreeLayout, out: Tensor | None = None, total: int | None = None) -> tuple[Tensor, Tensor]:
    """Export the packed form: uint8 bytes and their int64 offsets [batch + 1]. Bytes past its end get 0."""
    indptr = packed_indptr(layout.mask_indptr)
    if out is not None and out.dtype != torch.uint8:
        raise TypeError(f"packed bits are uint8, got {out.dtype}")
    out = _sized(layout, indptr, total, out, torch.uint8)
    if layout.batch == 0 or layout.total_q == 0:
        return out.zero_(), indptr
    eight = torch.arange(8, device=out.device)
    for begin in range(0, out.numel(), _CHUNK // 8):
        part = out[begin : begin + _CHUNK // 8]
        index = torch.arange(begin, begin + part.numel(), device=out.device)
        request = torch.searchsorted(indptr, index, right=True) - 1
        inside = (request < layout.batch).unsqueeze(-1)
        request = request.clamp(max=layout.batch - 1)
        local = (index - indptr[request]).unsqueeze(-1) * 8 + eight
        bits = inside & _local_elements(layout, request.unsqueeze(-1).expand_as(local), local, True)
        part.copy_((bits.to(torch.int64) << eight).sum(-1))
    return out, indptr


def _check_mask_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"this form is bool or uint8, got {dtype}")
