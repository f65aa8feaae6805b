"""FlashAttention-3 over a tree as a cascade: a kernel without masks, two passes and a merge.

One pass lets every row see the prefix (not causal). In the other each node is a request of one row, whose cache is the
slots of its ancestors and itself, as a table of pages of one token. `merge_states` combines them by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..calls import Calls, empty_out
from ..inputs import Inputs, Paged
from .common import import_problem, unsuited_16_bit
from .merge import merge_states

__all__ = ["ancestor_slots", "missing", "unsuited", "variants"]

PAGE_SIZES = 64, 128
"""Of the prefix pass, as of the causal chain beside it."""

unsuited = unsuited_16_bit


def missing() -> str | None:
    """Why `flash_attn_interface` cannot be used, or None."""
    return import_problem("flash_attn_interface")


def ancestor_slots(inputs: Inputs, paged: Paged) -> tuple[Tensor, Tensor]:
    """Token slots that each row sees in the tree.

    Returns
    -------
    slots, counts : Tensor
        int32 ``[total_q, deepest]``, 0 behind the last, and int32 ``[total_q]``: depth + 1.
    """
    found = [inputs.tree_rows(request) for request in range(inputs.workload.batch)]
    counts = torch.cat([seen.sum(dim=1) for seen in found])
    slots = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32, device=inputs.device)
    for request, seen in enumerate(found):
        rows, nodes = torch.nonzero(seen, as_tuple=True)
        places = seen.long().cumsum(dim=1)[rows, nodes] - 1
        positions = inputs.workload.all_prefixes[request] + nodes
        slots[inputs.starts[request] + rows, places] = paged.slots(request, positions).int()
    return slots, counts.int()


def variants(inputs: Inputs) -> list[Calls]:
    """Page 64 and page 128 for the prefix, the scheduler metadata of both passes made ahead."""
    import flash_attn_interface as library

    work = inputs.workload
    q_len = max(work.all_q_lens)
    found = []
    for page_size in PAGE_SIZES:
        paged = inputs.paged(page_size)
        slots, counts = ancestor_slots(inputs, paged)
        # the metadata is made for as many keys as the table holds, since the call counts its splits from the table
        geometry = work.qo_heads, work.kv_heads, work.head_dim
        prefix_args = {
            "cache_seqlens": inputs.prefix_lens, "page_table": paged.table, "cu_seqlens_q": inputs.qo_indptr,
            "max_seqlen_q": q_len,
            "scheduler_metadata": library.get_scheduler_metadata(
                work.batch, q_len, paged.table.shape[1] * page_size, *geometry, inputs.prefix_lens, inputs.dtype,
                cu_seqlens_q=inputs.qo_indptr, page_size=page_size, causal=False,
            ),
        }  # fmt: skip
        tree_args = {
            "cache_seqlens": counts, "page_table": slots,
            "scheduler_metadata": library.get_scheduler_metadata(
                work.total_q, 1, slots.shape[1], *geometry, counts, inputs.dtype, page_size=1, causal=False
            ),
        }  # fmt: skip
        out = empty_out(inputs)
        calls = [
            _call(library, inputs, k, v, prefix_args, tree_args, out) for k, v in zip(paged.k, paged.v, strict=True)
        ]
        found.append(Calls(calls, "tree", paged, page_size, out))
    return found


def _call(
    library: Any,
    inputs: Inputs,
    k: Tensor,
    v: Tensor,
    prefix_args: dict[str, Any],
    tree_args: dict[str, Any],
    out: Tensor,
) -> Callable[[], Tensor]:
    k_tokens, v_tokens = (cache.view(-1, 1, *cache.shape[2:]) for cache in (k, v))
    common = {"softmax_scale": inputs.sm_scale, "causal": False, "return_softmax_lse": True}
    # a node is a request of one row
    q_nodes = inputs.q[:, None]

    def call() -> Tensor:
        # lse [heads, total_q] where rows are packed, [requests, heads, rows] where they are not
        out_prefix, lse_prefix = library.flash_attn_with_kvcache(inputs.q, k, v, **prefix_args, **common)[:2]
        out_tree, lse_tree = library.flash_attn_with_kvcache(q_nodes, k_tokens, v_tokens, **tree_args, **common)[:2]
        return merge_states(out_prefix, lse_prefix.transpose(0, 1), out_tree[:, 0], lse_tree[:, :, 0], out)

    return call
