"""The params struct of ``csrc/params.h``, field for field."""

from __future__ import annotations

import ctypes

POINTERS = (
    "q", "k", "v", "k_tree", "v_tree", "out", "lse", "sinks", "k_scales", "v_scales", "partial_out", "partial_lse",
    "work", "turns", "spans", "arrivals", "row_request", "qo_indptr", "mask_words", "kv_indptr", "table",
    "tree_slots", "prefix_lens", "positions",
)  # fmt: skip
STRIDES = (
    "table_request", "q_row", "q_head", "k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head", "k_tree_row",
    "k_tree_head", "v_tree_row", "v_tree_head", "out_row", "out_head", "lse_row", "lse_head",
)  # fmt: skip
NUMBERS = (
    ("scale", ctypes.c_float),
    ("q_sign", ctypes.c_uint32),
    ("cap_in", ctypes.c_float),
    ("cap_out", ctypes.c_float),
    ("k_scale", ctypes.c_float),
    ("v_scale", ctypes.c_float),
    ("total_q", ctypes.c_int32),
    ("num_words", ctypes.c_int32),
    ("group", ctypes.c_int32),
    ("group_magic", ctypes.c_uint32),
    ("kv_heads", ctypes.c_int32),
    ("page_size", ctypes.c_int32),
    ("page_magic", ctypes.c_uint32),
    ("page_shift", ctypes.c_int32),
    ("zero_tail", ctypes.c_int32),
    ("wide_table", ctypes.c_int32),
    ("wide_indptr", ctypes.c_int32),
    ("wide_slots", ctypes.c_int32),
    ("window_left", ctypes.c_int32),
    ("ranged", ctypes.c_int32),
    ("part", ctypes.c_int32),
    ("split", ctypes.c_int32),
    ("sinks_type", ctypes.c_int32),
    ("sinks_in_lse", ctypes.c_int32),
    ("stride_k_scale", ctypes.c_int32),
    ("stride_v_scale", ctypes.c_int32),
    ("page_rows", ctypes.c_int32),
)
ALIGNMENT = 64
"""Of the struct, for its tensor maps: its size is a multiple."""
Q_SIGNS = 0x80008000
"""The sign bits of two 16-bit numbers."""


class TensorMap(ctypes.Structure):
    """A ``CUtensorMap``: what the driver makes of a tensor's address, shape and strides, for tensor copies."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


class AttentionParams(ctypes.Structure):
    """``treeattn::AttentionParams``; see ``csrc/params.h`` for shapes."""

    _fields_ = [
        ("k_map", TensorMap),
        ("v_map", TensorMap),
        *((name, ctypes.c_uint64) for name in POINTERS),
        *((f"stride_{name}", ctypes.c_int64) for name in STRIDES),
        *NUMBERS,
        ("padding", ctypes.c_uint8 * (-(8 * len(POINTERS + STRIDES) + 4 * len(NUMBERS)) % ALIGNMENT)),
    ]


def division(page_size: int) -> tuple[int, int]:
    """``magic, shift`` with ``n // page_size == n * magic >> shift`` for ``0 <= n < 2**31``.

    >>> magic, shift = division(48)
    >>> 1000 * magic >> shift
    20
    """
    shift = 31 + (page_size - 1).bit_length()
    return -(-(1 << shift) // page_size), shift
