"""Launching the Hopper kernels. The plan is Triton's, and so is the merge of MLA and in batch-invariant mode.

A call costs one driver call: the params struct is kept, and only addresses, scale and cap are written anew.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..driver import (
    BFLOAT16,
    FLOAT16,
    INVALID_CONTEXT,
    PROGRAMMATIC_SERIALIZATION,
    UINT8,
    Function,
    LaunchAttribute,
    LaunchConfig,
    Module,
    check,
    driver,
    encode_tensor_map,
    make_current,
)
from ..kernels.launch import LOG2_E, PARTS, Launch, LayerLaunch, finish_leading, is_ranged, split_of, window_of
from ..plan import Step, tags_parts
from ..scoring import Scale, Scoring, scale_kind
from .binary import Binary, asked_macros, load_first
from .build import kernels_in
from .config import KEYS, MERGE_BLOCKS, Variant, merge_of, variant_of
from .params import Q_SIGNS, AttentionParams, TensorMap, division

ROW_BYTES = 16
"""What a copy moves at once: rows of q, K and V start at multiples of it."""
BOX_BYTES = 128
"""Of a row of a tensor copy's box, and of the swizzle."""
GROUP = 8
"""Rows of 128 bytes that are the period of the swizzle."""
MAX_STRIDE = 2**40
"""What a tensor map's strides, in bytes, must stay below."""
MAX_EXTENT = 2**31
"""Of an axis of a tensor map, whose coordinates are int32."""
MOST_MAPS = 1024
"""Pairs of caches whose tensor maps a launch keeps: more than a model has layers."""
ADDRESSES, ADDRESSES_AT = struct.Struct("=10Q"), AttentionParams.q.offset
SCALES, SCALES_AT = struct.Struct("=fIffff"), AttentionParams.scale.offset
"""How, and where in the params struct, a call's addresses, scales and cap are written."""
SINKS_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
NO_SCALE = (0, 1.0)
LARGEST = 3e38
"""Of a float32, and less than inf: 0 times it is 0."""


class NotLoadedError(RuntimeError):
    """A kernel is not loaded yet, and a graph capture cannot load it."""


@cache
def module_on(binary: Binary, device_index: int) -> Module:
    """Code loaded on a device, once."""
    with torch.cuda.device(device_index):
        torch.cuda.current_stream().synchronize()  # makes the context
        return Module(binary.code)


@cache
def load(variant: Variant, device_index: int, macros: tuple[str, ...] = ()) -> Function:
    """A kernel on a device, built, loaded and with its shared memory granted: for set-up, not inside a capture."""
    with torch.cuda.device(device_index):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise NotLoadedError(
            f"the CUDA kernel {variant.name} is not loaded on device {device_index} yet, and a graph capture cannot "
            "load it: plan such a step, make StaticBuffers with this group, or run such a call (a soft cap has a "
            "kernel of its own), before the capture"
        )
    shape = kernels_in(variant.source).get(variant.name)
    if shape is None:
        raise NotImplementedError(f"backend 'cuda' has no kernel {variant.name}; backend='triton' takes any tile")

    def function_of(binary: Binary) -> Function:
        module = module_on(binary, device_index)
        with torch.cuda.device(device_index):
            return module.function(variant.name, shape.shared_bytes)

    return load_first(variant.source, macros, function_of)


def index_of(device: torch.device) -> int:
    """Number of a CUDA device."""
    return torch.cuda.current_device() if device.index is None else device.index


def prepare(step: Step, capped: bool = False, fresh: bool | None = None) -> Function:
    """Load the kernel of a step, for calls with a soft cap or without, once; see :func:`load`. And its merge.

    And with fresh rows or without: both, where `fresh` is not known yet, as a capture loads none.
    """
    if step.config is None:
        raise ValueError("a step of the cuda backend has a configuration")
    if fresh is None:
        prepare(step, capped, not step.fresh_tree)
        fresh = step.fresh_tree
    merge = merge_of(step)
    if merge is not None:
        loaded(step, merge)
    return loaded(step, variant_of(step, step.config, capped, fresh))  # most geometries have one for both


def loaded(step: Step, variant: Variant) -> Function:
    """A kernel on the device of a step, which keeps it."""
    function: Function | None = step.launches.get(variant.name)
    if function is None:
        function = load(variant, index_of(step.layout.device), asked_macros())
        step.launches[variant.name] = function
    return function


def unaligned(cache_strides: tuple[int, ...], **tensors: Tensor | None) -> str | None:
    """What is wrong where rows of q, K and V do not start at multiples of 16 bytes, and pairs of out at 4."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        strides = cache_strides if name.endswith("_cache") else tensor.stride()[:2]
        unit = 4 if name == "out" else ROW_BYTES
        if tensor.data_ptr() % unit or any(stride * tensor.element_size() % unit for stride in strides):
            return (
                f"it needs rows of {name} at multiples of {unit} bytes, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(strides)}"
            )
    return None


def params_of(
    step: Step,
    q: Tensor,
    k_tree: Tensor | None,
    v_tree: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    scoring: Scoring,
    cache_strides: tuple[int, ...],
    zero_tail: bool,
) -> AttentionParams:
    """What of the params struct stays from call to call; the tensors are read for their shapes and strides."""
    layout, kv, buffers = step.layout, step.kv, step.buffers
    if buffers is None:
        raise ValueError("a step of the cuda backend has buffers")
    magic, shift = division(kv.page_size)
    windowed = step.window_left >= 0
    params = AttentionParams(
        partial_out=buffers.partial_out.data_ptr(),
        partial_lse=buffers.partial_lse.data_ptr(),
        work=buffers.work.data_ptr(),
        turns=buffers.turns.data_ptr(),
        spans=buffers.spans.data_ptr(),
        arrivals=buffers.arrivals.data_ptr(),
        row_request=layout.row_request.data_ptr(),
        qo_indptr=layout.qo_indptr.data_ptr(),
        mask_words=step.words32.data_ptr(),
        kv_indptr=_address(kv.kv_indptr),
        table=kv.table.data_ptr(),
        tree_slots=_address(kv.tree_slots),
        prefix_lens=layout.prefix_lens.data_ptr() if windowed else 0,
        positions=layout.positions.data_ptr() if windowed else 0,
        stride_table_request=kv.table.stride(0),
        total_q=q.shape[0],
        num_words=2 * layout.num_words,
        group=step.group,
        group_magic=-(-(2**31) // step.group),
        zero_tail=zero_tail,
        kv_heads=step.num_kv_heads,
        page_size=kv.page_size,
        page_magic=magic,
        page_shift=shift,
        wide_table=kv.table.dtype == torch.int64,
        wide_indptr=kv.kv_indptr is not None and kv.kv_indptr.dtype == torch.int64,
        wide_slots=kv.tree_slots is not None and kv.tree_slots.dtype == torch.int64,
        window_left=window_of(step),
        ranged=is_ranged(step),
        part=PARTS[step.part],
        split=split_of(step),
        sinks_type=0 if scoring.sinks is None else SINKS_TYPES[scoring.sinks.dtype],
        sinks_in_lse=scoring.sinks_in_lse,
        stride_k_scale=scale_kind(scoring.k_scale) == 3,
        stride_v_scale=scale_kind(scoring.v_scale) == 3,
    )
    names = ("k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head")
    for name, stride in zip(names, cache_strides, strict=True):
        setattr(params, f"stride_{name}", stride)
    for name, tensor in (("q", q), ("k_tree", k_tree), ("v_tree", v_tree), ("out", out), ("lse", lse)):
        if tensor is not None:
            setattr(params, f"stride_{name}_row", tensor.stride(0))
            setattr(params, f"stride_{name}_head", tensor.stride(1))
    return params


def box_rows(page_size: int) -> int:
    """Slots of a page that a tensor copy brings at once; 0 where there is none: 8 rows are the period of the swizzle.

    >>> box_rows(16), box_rows(48), box_rows(256), box_rows(1)
    (16, 16, 64, 0)
    """
    rows = math.gcd(page_size, KEYS)
    return rows if rows >= GROUP else 0


class CacheMaps:
    """Tensor maps of the K and V caches of a step's layers, made once for each pair of them.

    A box has all panels of its slots, 128 bytes each, side by side for each 8 slots (csrc/ring.cuh). A map has at most
    five axes: KV heads share that of the panels, so where they are not whole panels apart there is no map. Boxes of
    MLA's latent rows have one panel, and their maps an axis of heads.
    """

    def __init__(self, step: Step, cache_strides: tuple[int, ...]) -> None:
        self.page_size, self.kv_heads, self.head_dim = step.kv.page_size, step.num_kv_heads, step.head_dim
        self.shared_kv = step.shared_kv
        self.dtype = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}.get(step.kv_dtype, UINT8)
        self.dims = BOX_BYTES // step.kv_dtype.itemsize  # of a box
        self.strides = [step.kv_dtype.itemsize * stride for stride in cache_strides]  # page, slot, head: of K, of V
        usable = all(0 < stride < MAX_STRIDE for stride in self.strides)
        if not step.shared_kv:
            slots, heads = self.strides[1::3], self.strides[2::3]
            usable &= all(GROUP * slot < MAX_STRIDE for slot in slots)
            usable &= all(self._panels(head) < MAX_EXTENT for head in heads)
            usable &= self.kv_heads == 1 or all(head % BOX_BYTES == 0 for head in heads)
        widened = step.shared_kv and self.dtype == UINT8  # on the way to shared memory: no box is copied as it is
        self.rows = box_rows(self.page_size) if usable and not widened else 0
        self.made: dict[tuple[int, int, int], bytes] = {}

    def of(self, k: int, v: int, num_pages: int) -> bytes:
        """The maps of caches at these addresses, as the params struct begins; empty where it needs none."""
        if self.rows == 0:
            return b""
        maps = self.made.get((k, v, num_pages))
        if maps is None:
            if len(self.made) >= MOST_MAPS:
                self.made.clear()
            pair = ((k, self.strides[:3]), (v, self.strides[3:]))
            # without V, which is a part of K then, there is one
            made = (self._encode(address, max(num_pages, 1), strides) for address, strides in pair if address)
            maps = b"".join(made)
            self.made[k, v, num_pages] = maps
        return maps

    def _encode(self, address: int, num_pages: int, strides: Sequence[int]) -> bytes:
        page, slot, head = strides
        shape: Sequence[int] = (self.dims, GROUP, self._panels(head), self.page_size // GROUP, num_pages)
        byte_strides: Sequence[int] = (slot, BOX_BYTES, GROUP * slot, page)
        box: Sequence[int] = (self.dims, GROUP, self.head_dim // self.dims, self.rows // GROUP, 1)
        if self.shared_kv:
            shape, byte_strides = (self.head_dim, self.page_size, self.kv_heads, num_pages), (slot, head, page)
            box = (self.dims, self.rows, 1, 1)
        made = TensorMap()
        encode_tensor_map(made, self.dtype, address, shape, byte_strides, box)
        return bytes(made)

    def _panels(self, head_stride: int) -> int:
        """Of the cache, from the first of the first KV head to the last of the last."""
        return (self.kv_heads - 1) * head_stride // BOX_BYTES + self.head_dim // self.dims


def fill(
    params: memoryview,
    maps: bytes,
    q: int,
    k: int,
    v: int,
    k_tree: int,
    v_tree: int,
    out: int,
    lse: int,
    sinks: int,
    scale: float,
    cap: float,
    k_scale: tuple[int, float] = NO_SCALE,
    v_scale: tuple[int, float] = NO_SCALE,
) -> None:
    """Write the maps, the addresses (0 for what there is not), the scale (times log2(e)) and the cap of a call.

    `k_scale` and `v_scale` of an FP8 cache are addresses, or 0 and a number.
    """
    params[: len(maps)] = maps
    ADDRESSES.pack_into(params, ADDRESSES_AT, q, k, v, k_tree, v_tree, out, lse, sinks, k_scale[0], v_scale[0])
    # maxima are taken before the scale, which must be positive then (and 0 * -inf must not be NaN)
    size, sign = max(abs(scale), 1e-30), Q_SIGNS if scale < 0 else 0
    cap_in = min(size / (cap * LOG2_E), LARGEST) if cap else 0.0
    SCALES.pack_into(params, SCALES_AT, size, sign, cap_in, cap * LOG2_E, k_scale[1], v_scale[1])


class Grid(NamedTuple):
    """A kernel, with how many blocks of how many threads it is launched."""

    function: Function
    blocks: int
    threads: int


class Block:
    """What the launches of one call at a time hand the driver.

    Attributes
    ----------
    params : memoryview
        Of the params struct, which all kernels of a call read.
    launches : list of (LaunchConfig, callable)
        In their order. The one takes the stream; the other launches with what is written and returns the driver's code.
    """

    __slots__ = ("launches", "params")

    def __init__(self, template: AttentionParams, grids: Sequence[Grid]) -> None:
        params = AttentionParams.from_buffer_copy(template)
        self.params = memoryview(params).cast("B")
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self.launches = []
        for function, blocks, threads in grids:
            # its prologue may run while what is before it in the stream still does
            early = ctypes.pointer(LaunchAttribute(PROGRAMMATIC_SERIALIZATION, 1))
            config = LaunchConfig((blocks, 1, 1), (threads, 1, 1), function.shared_bytes, None, early, 1)
            at = ctypes.addressof(config), function.handle, arguments, None
            self.launches.append((config, partial(driver().cuLaunchKernelEx, *at)))


class AttentionLaunch:
    """The attention kernel of a step, and the merge of MLA's.

    Threads may share a launch: each takes a block that no other has (:class:`treeattn.kernels.packed.PackedLaunch`).
    """

    def __init__(
        self,
        step: Step,
        q: Tensor,
        k_tree: Tensor | None,
        v_tree: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
        scoring: Scoring,
        cache_strides: tuple[int, ...],
        zero_tail: bool,
    ) -> None:
        if step.config is None:
            raise ValueError("a step of the cuda backend has a configuration")
        self.device_index = index_of(step.layout.device)
        function, merge = prepare(step, scoring.logits_soft_cap > 0, k_tree is not None), merge_of(step)
        self.grids = [Grid(function, step.num_programs, 32 * step.config.num_warps)]
        if merge is not None:
            threads = kernels_in(merge.source)[merge.name].threads
            self.grids.append(Grid(loaded(step, merge), MERGE_BLOCKS * step.num_programs, threads))
        self.kept = (step.buffers, step.layout, step.kv, step.words32)  # their addresses are in the struct
        self.maps = CacheMaps(step, cache_strides)
        self.template = params_of(step, q, k_tree, v_tree, out, lse, scoring, cache_strides, zero_tail)
        self.template.page_rows = self.maps.rows
        self.free: list[Block] = []

    def __call__(
        self,
        num_pages: int,
        q: int,
        k: int,
        v: int,
        k_tree: int,
        v_tree: int,
        out: int,
        lse: int,
        sinks: int,
        scale: float,
        cap: float,
        k_scale: tuple[int, float] = NO_SCALE,
        v_scale: tuple[int, float] = NO_SCALE,
    ) -> None:
        """Launch on its device's current stream, with addresses."""
        # torch.cuda.current_device() is the same behind a check that CUDA is initialised, and 0.5 µs
        if torch._C._cuda_getDevice() != self.device_index:
            with torch.cuda.device(self.device_index):
                self(num_pages, q, k, v, k_tree, v_tree, out, lse, sinks, scale, cap, k_scale, v_scale)
            return
        try:
            block = self.free.pop()
        except IndexError:
            block = Block(self.template, self.grids)
        maps = self.maps.of(k, v, num_pages)
        fill(block.params, maps, q, k, v, k_tree, v_tree, out, lse, sinks, scale, cap, k_scale, v_scale)
        stream = torch._C._cuda_getCurrentRawStream(self.device_index)
        for number, (config, launch) in enumerate(block.launches):
            config.stream = stream
            code = launch()
            if code:
                if code == INVALID_CONTEXT:
                    make_current(self.device_index)
                    code = launch()
                check(f"launch of {self.grids[number].function.name}", code)
        self.free.append(block)


def scale_at(scale: Scale) -> tuple[int, float]:
    """A scale of an FP8 cache as a call takes it: where it is on the device, or 0 and the number."""
    return (scale.data_ptr(), 1.0) if isinstance(scale, Tensor) else (0, scale)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class CudaLayerLaunch:
    """The launches of a layer call, in batch-invariant mode with Triton's merge; arguments: `LayerLaunch`."""

    def __init__(
        self,
        step: Step,
        q: Tensor,
        k_tree: Tensor | None,
        v_tree: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
        scoring: Scoring,
        *,
        cache_strides: tuple[int, ...],
        zero_tail: bool,
    ) -> None:
        self.attention = AttentionLaunch(step, q, k_tree, v_tree, out, lse, scoring, cache_strides, zero_tail)
        self.finish: Launch | None = None
        if not tags_parts("cuda", step):
            self.finish = LayerLaunch(
                step, q, k_tree, v_tree, out, lse, scoring, cache_strides=cache_strides, zero_tail=zero_tail
            ).finish

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor | None,
        k_tree: Tensor | None,
        v_tree: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
        scoring: Scoring,
    ) -> None:
        """Attention of one layer on the current stream."""
        out_at, lse_at, sinks_at = out.data_ptr(), _address(lse), _address(scoring.sinks)
        self.attention(
            k_cache.shape[0], q.data_ptr(), k_cache.data_ptr(), _address(v_cache), _address(k_tree), _address(v_tree),
            out_at, lse_at, sinks_at, scoring.sm_scale * LOG2_E, scoring.logits_soft_cap, scale_at(scoring.k_scale),
            scale_at(scoring.v_scale),
        )  # fmt: skip
        if self.finish is None:
            return
        if self.finish.compiled is None:
            leading = LayerLaunch.leading(q, k_cache, v_cache, k_tree, v_tree, out, lse, scoring)
            self.finish.first(*finish_leading(leading))
        else:
            self.finish(out_at, lse_at, sinks_at)
