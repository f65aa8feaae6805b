"""What every layout kernel does alike: row bounds of a request, per-request and per-row fields, the status word.

Each program derives the bounds of its own request, so there is no prefix-sum kernel and no order between programs.
All offsets are 64-bit.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Launch(NamedTuple):
    """One launch: what `kernel[grid](**arguments)` needs, so that compile tests see what is really shipped."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def __call__(self) -> None:
        """Launch on the current stream of the tensors' device, whichever device is current."""
        device = next(value.device for value in self.arguments.values() if isinstance(value, torch.Tensor))
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.kernel[self.grid](**self.arguments)
        else:
            self.kernel[self.grid](**self.arguments)


# Status codes (treeattn.status.Status; jitted code reads only constexpr globals).
NUM_NODES = tl.constexpr(2)
QO_INDPTR = tl.constexpr(4)
PREFIX_LEN = tl.constexpr(6)

MAX_PREFIX = tl.constexpr(2**31 - 1)  # treeattn.masks.MAX_PREFIX


@triton.jit
def sound_prefix(prefix):
    """A prefix length, or 0 for one that is negative or no int32: such a request is empty."""
    return tl.where((prefix < 0) | (prefix > MAX_PREFIX), 0, prefix)


@triton.jit
def report(status_ptr, code, request, row, value):
    """Record the first finding; later ones lose the compare-and-swap."""
    if tl.atomic_cas(status_ptr, 0, code) == 0:
        tl.store(status_ptr + 1, request)
        tl.store(status_ptr + 2, tl.minimum(row.to(tl.int64), 2147483647).to(tl.int32))
        tl.store(status_ptr + 3, tl.minimum(tl.maximum(value.to(tl.int64), -2147483648), 2147483647).to(tl.int32))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def pick(values, index, b):
    return tl.sum(tl.where(index == b, values, 0), 0)


@triton.jit
def row_bounds(qo_ptr, stride_qo, batch, q_len, limit, RAGGED: tl.constexpr, BATCH: tl.constexpr):
    """Bounds of every request's rows, monotone and inside `limit`; requests past `batch` are empty."""
    index = tl.arange(0, BATCH)
    if RAGGED:
        inside = index < batch
        raw_low = tl.load(qo_ptr + index * stride_qo, mask=inside, other=0).to(tl.int64)
        raw_high = tl.load(qo_ptr + (index + 1) * stride_qo, mask=inside, other=0).to(tl.int64)
        first = pick(raw_low, index, 0)
        low = tl.minimum(tl.maximum(tl.associative_scan(raw_low, 0, _larger), 0), limit)
        high = tl.minimum(tl.maximum(tl.maximum(tl.associative_scan(raw_high, 0, _larger), first), 0), limit)
        end = tl.max(tl.where(inside, high, 0), 0)
        low = tl.where(inside, tl.where(index == 0, 0, low), end)
        high = tl.where(inside, high, end)
    else:
        low = tl.minimum(index, batch).to(tl.int64) * q_len
        high = tl.minimum(index + 1, batch).to(tl.int64) * q_len
        raw_low = low
        raw_high = high
    return index, low, high, raw_low, raw_high


@triton.jit
def request_shape(
    b, low, high, raw_low, raw_high, index, prefix_ptr, stride_prefix, nodes_ptr, stride_nodes, batch, q_len,
    max_q_len, RAGGED: tl.constexpr, HAS_NODES: tl.constexpr,
):  # fmt: skip
    """Start, width, prefix and node count of request b; `code` is what is wrong with them, 0 for nothing."""
    if RAGGED:
        start = pick(low, index, b)
        stop = pick(high, index, b)
        raw_start = pick(raw_low, index, b)
        raw_stop = pick(raw_high, index, b)
    else:
        start = tl.minimum(b, batch).to(tl.int64) * q_len
        stop = tl.minimum(b + 1, batch).to(tl.int64) * q_len
        raw_start = start
        raw_stop = stop
    width = (stop - start).to(tl.int32)
    active = b < batch
    prefix = tl.load(prefix_ptr + b * stride_prefix, mask=active, other=0).to(tl.int64)
    given = width.to(tl.int64)
    if HAS_NODES:
        given = tl.load(nodes_ptr + b * stride_nodes, mask=active, other=0).to(tl.int64)
    broken = active & ((raw_start != start) | (raw_stop != stop) | (width > max_q_len))
    sound = sound_prefix(prefix)
    too_many = (given > width) & (prefix == sound)
    too_long = prefix > MAX_PREFIX
    code = tl.where(broken, QO_INDPTR, tl.where(too_long, PREFIX_LEN, tl.where(too_many, NUM_NODES, 0)))
    about_row = tl.where(broken, raw_start, tl.where(too_long, 0, width.to(tl.int64)))
    about_value = tl.where(broken, raw_stop, tl.where(too_long, prefix, given))
    nodes = tl.where((code == 0) & (prefix == sound), tl.maximum(given, 0), 0).to(tl.int32)
    return start, width, sound, nodes, code, about_row, about_value


@triton.jit
def block_sizes(index, low, high, prefix_ptr, stride_prefix, batch, WITH_PREFIX: tl.constexpr):
    """Elements of every request's block in the full form (or the tree form)."""
    widths = high - low
    if WITH_PREFIX:
        prefix = tl.load(prefix_ptr + index * stride_prefix, mask=index < batch, other=0).to(tl.int64)
        return widths * (sound_prefix(prefix) + widths)
    return widths * widths


@triton.jit
def write_request(
    b, capacity, start, width, prefix, nodes, before, size, out_qo_ptr, out_prefix_ptr, out_nodes_ptr,
    out_mask_indptr_ptr
):  # fmt: skip
    """Per-request fields; the last program also closes both indptrs."""
    tl.store(out_qo_ptr + b, start.to(tl.int32))
    tl.store(out_mask_indptr_ptr + b, before)
    tl.store(out_prefix_ptr + b, prefix.to(tl.int32))
    tl.store(out_nodes_ptr + b, nodes)
    if b == capacity - 1:
        tl.store(out_qo_ptr + capacity, (start + width).to(tl.int32))
        tl.store(out_mask_indptr_ptr + capacity, before + size)


@triton.jit
def write_rows(
    rows, inside, parents, depths, positions, request, out_parents_ptr, out_depths_ptr, out_positions_ptr,
    out_request_ptr
):  # fmt: skip
    """Per-row fields beside the words."""
    tl.store(out_parents_ptr + rows, parents.to(tl.int32), mask=inside)
    tl.store(out_depths_ptr + rows, depths.to(tl.int32), mask=inside)
    tl.store(out_positions_ptr + rows, positions.to(tl.int64), mask=inside)
    tl.store(out_request_ptr + rows, request.to(tl.int32), mask=inside)


@triton.jit
def write_tail(
    first, words, end, total_q, out_words_ptr, out_parents_ptr, out_depths_ptr, out_positions_ptr,
    out_request_ptr, NUM_WORDS: tl.constexpr, WITH_FIELDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of no request from `end` on, among ROWS rows from `first`; `words` is the block to write."""
    rows = first + tl.arange(0, ROWS)
    inside = (rows >= end) & (rows < total_q)
    at = rows[:, None] * NUM_WORDS + words[None, :]
    tl.store(out_words_ptr + at, at * 0, mask=inside[:, None] & (words < NUM_WORDS)[None, :])
    if WITH_FIELDS:
        none = tl.full([ROWS], -1, tl.int32)
        write_rows(
            rows, inside, none, none + 1, tl.zeros_like(rows), none, out_parents_ptr, out_depths_ptr,
            out_positions_ptr, out_request_ptr,
        )  # fmt: skip
