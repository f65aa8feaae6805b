"""Targets of the 27 GQA and 15 MLA rows on an H200, and the peers measured there, in microseconds per attention call.

Measured 2026-11-29 with torch 2.11.0+cu130, Triton 3.6.0: bf16, head dim 128 (GQA) or 576 and 512 (MLA), random trees,
shuffled pages, cold L2. `chain` is the best causal chain, which takes no tree: FlashAttention-3 for GQA, the better of
FlashMLA and FlashInfer for MLA. `tree` is the best peer that takes a tree. Ratios within one run count: scale a row by
the chain of your own run over `chain`.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GQA_TARGETS", "MLA_TARGETS", "Target"]


class Target(NamedTuple):
    """One row: the shape, then microseconds."""

    batch: int
    q_len: int
    prefix: int
    qo_heads: int
    kv_heads: int
    chain: float
    tree: float
    tree_peer: str
    must: float
    goal: float


GQA_TARGETS = (
    Target(1, 17, 2048, 32, 8, 12.8, 21.2, "fi_xqa_mask_p64", 8.0, 6.5),
    Target(1, 17, 2048, 8, 1, 12.7, 12.4, "fi_xqa_mask_p64", 8.0, 6.5),
    Target(1, 17, 2048, 64, 8, 15.2, 30.3, "fi_xqa_mask_p64", 8.0, 6.8),
    Target(1, 17, 16384, 32, 8, 27.9, 44.7, "fa3_cascade_p64", 24.2, 21.0),
    Target(1, 17, 16384, 8, 1, 17.5, 29.2, "fa3_cascade_p64", 8.0, 6.7),
    Target(1, 17, 16384, 64, 8, 37.9, 55.6, "fa3_cascade_p64", 29.2, 25.4),
    Target(1, 17, 131072, 32, 8, 137.1, 158.4, "fa3_cascade_p64", 139.8, 137.1),
    Target(1, 17, 131072, 8, 1, 43.7, 57.0, "fa3_cascade_p64", 29.0, 25.2),
    Target(1, 17, 131072, 64, 8, 234.4, 266.7, "fa3_cascade_p64", 199.6, 173.5),
    Target(8, 17, 4096, 32, 8, 45.6, 92.7, "fa3_cascade_p64", 44.4, 38.6),
    Target(8, 17, 4096, 8, 1, 20.0, 38.2, "fa3_cascade_p64", 10.9, 9.5),
    Target(8, 17, 4096, 64, 8, 61.4, 114.1, "fa3_cascade_p64", 55.1, 47.9),
    Target(32, 17, 4096, 32, 8, 138.7, 295.6, "fa3_cascade_p64", 141.5, 138.7),
    Target(32, 17, 4096, 8, 1, 40.4, 80.0, "fa3_cascade_p64", 29.9, 26.0),
    Target(32, 17, 4096, 64, 8, 250.2, 413.3, "fa3_cascade_p64", 206.6, 179.7),
    Target(64, 8, 2048, 32, 8, 146.6, 153.9, "fi_xqa_mask_p64", 149.5, 142.1),
    Target(64, 8, 2048, 8, 1, 32.5, 51.6, "fi_xqa_mask_p64", 24.8, 21.5),
    Target(64, 8, 2048, 64, 8, 148.1, 256.5, "fi_xqa_mask_p64", 151.1, 144.2),
    Target(8, 65, 8192, 32, 8, 217.1, 374.0, "fa3_cascade_p64", 144.6, 125.8),
    Target(8, 65, 8192, 8, 1, 45.9, 85.6, "fa3_cascade_p64", 39.6, 34.4),
    Target(8, 65, 8192, 64, 8, 333.9, 494.7, "fa3_cascade_p64", 284.6, 247.5),
    Target(1, 65, 32768, 32, 8, 92.4, 126.2, "fa3_cascade_p64", 74.2, 64.5),
    Target(1, 65, 32768, 8, 1, 30.9, 45.0, "fa3_cascade_p64", 22.0, 19.1),
    Target(1, 65, 32768, 64, 8, 144.9, 184.4, "fa3_cascade_p64", 143.8, 125.0),
    Target(1, 257, 8192, 32, 8, 118.2, 199.3, "fa3_cascade_p64", 75.4, 65.6),
    Target(1, 257, 8192, 8, 1, 28.5, 50.6, "fa3_cascade_p64", 22.3, 19.4),
    Target(1, 257, 8192, 64, 8, 193.2, 297.9, "fa3_cascade_p64", 146.2, 127.1),
)  # fmt: skip

MLA_TARGETS = (
    Target(1, 17, 16384, 8, 1, 28.8, 2276.9, "sglang_extend_tree", 17.2, 15.3),
    Target(1, 17, 16384, 16, 1, 34.9, 2255.1, "sglang_extend_tree", 25.5, 22.8),
    Target(1, 17, 16384, 128, 1, 142.6, 2556.4, "sglang_extend_tree", 145.5, 140.4),
    Target(8, 17, 4096, 8, 1, 34.3, 658.6, "sglang_extend_tree", 27.7, 24.7),
    Target(8, 17, 4096, 16, 1, 47.0, 658.7, "sglang_extend_tree", 44.5, 39.7),
    Target(8, 17, 4096, 128, 1, 288.7, 5199.5, "sglang_extend_tree", 294.5, 275.7),
    Target(1, 17, 131072, 8, 1, 92.9, 21222.8, "sglang_extend_tree", 90.3, 80.6),
    Target(1, 17, 131072, 16, 1, 136.5, 20229.7, "sglang_extend_tree", 136.5, 136.5),
    Target(1, 17, 131072, 128, 1, 1077.8, 20293.0, "sglang_extend_tree", 1099.3, 1077.8),
    Target(32, 17, 4096, 8, 1, 94.8, 1346.9, "sglang_extend_tree", 90.6, 80.9),
    Target(32, 17, 4096, 16, 1, 148.5, 2676.3, "sglang_extend_tree", 148.5, 140.8),
    Target(32, 17, 4096, 128, 1, 1140.3, 20976.8, "sglang_extend_tree", 1163.1, 1084.6),
    Target(8, 65, 8192, 8, 1, 132.7, 2613.9, "sglang_extend_tree", 132.7, 132.7),
    Target(8, 65, 8192, 16, 1, 260.9, 3872.7, "sglang_extend_tree", 260.9, 260.9),
    Target(8, 65, 8192, 128, 1, 1804.5, 30862.1, "sglang_extend_tree", 1840.5, 1804.5),
)  # fmt: skip
