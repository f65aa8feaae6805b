"""What vLLM's runner does for chains only: positions by depth, the acceptance walk, and moving accepted K and V.

All three read the layout that the attention of the step used, through the :class:`VerifyStep` in its metadata, so they
cannot disagree with it about what is a tree and what a chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import treeattn
from treeattn import Accepted, PagedKV, Step, TreeLayout

_NO_TOKEN = -2  # no token id and no placeholder of vLLM, whose padding is -1


@dataclass(frozen=True, eq=False)
class VerifyStep:
    """The requests of a step that treeattn serves: the first ones of the batch.

    Attributes
    ----------
    layout : TreeLayout
        Rows and trees, in static memory.
    kv : PagedKV
        The KV addresses of these layers' cache group, in static memory.
    steps : dict of str to Step
        By layer name.
    rows : int
        Query rows of these requests, as the host knows them; padding behind the last request included.
    """

    layout: TreeLayout
    kv: PagedKV
    steps: Mapping[str, Step]
    rows: int


class TreeAcceptance(NamedTuple):
    """What a step yields, in vLLM's form and in treeattn's.

    Attributes
    ----------
    sampled : Tensor int64 [num_reqs, max_q_len]
        New tokens of each request, -1 after the last.
    num_sampled, num_rejected : Tensor int32 [num_reqs]
        How many; logits rows that yielded none.
    accepted : Accepted
        Path of each request of the layout, for :func:`compact_trees_` and :func:`treeattn.global_rows`.
    """

    sampled: Tensor
    num_sampled: Tensor
    num_rejected: Tensor
    accepted: Accepted


def depth_positions_(out: Tensor, positions: Tensor, verify: VerifyStep | None) -> Tensor:
    """Write the positions for RoPE: prefix length + depth for verified rows, vLLM's own for all others.

    Call it after the slot mapping is made: vLLM computes slots from positions, and siblings share a position.

    Parameters
    ----------
    out : Tensor int64 [>= tokens]
        Persistent where CUDA graphs are used: the graph reads it.
    positions : Tensor int64 [tokens]
        vLLM's, ``num_computed_tokens + row``.
    verify : VerifyStep, optional
        None if nothing is verified in this step.

    Returns
    -------
    Tensor int64 [tokens]
        The first rows of `out`.
    """
    if positions.dim() != 1:
        raise NotImplementedError(f"positions of shape {list(positions.shape)}: only RoPE with one position a token")
    if out.shape[0] < positions.shape[0]:
        raise ValueError(f"out has {out.shape[0]} positions, the step has {positions.shape[0]}")
    out = out[: positions.shape[0]]
    out.copy_(positions)
    if verify is not None:
        rows = min(out.shape[0], verify.layout.total_q)
        verified = verify.layout.row_request[:rows] >= 0
        out[:rows] = torch.where(verified, verify.layout.positions[:rows], positions[:rows])
    return out


def accept_trees(
    verify: VerifyStep | None,
    input_ids: Tensor,
    target_tokens: Tensor,
    *,
    logits_indices: Tensor,
    cu_num_logits: Tensor,
) -> TreeAcceptance:
    """Walk each request's tree along the target model's tokens; the batch may hold prefills.

    A request whose rows all have logits is walked. Any other one (a prefill, or draft tokens behind a prompt's tail)
    yields the token of its first logits row, and its drafts count as rejected. A request whose tree is malformed yields
    nothing.

    Parameters
    ----------
    verify : VerifyStep, optional
        None if nothing is verified in this step.
    input_ids : Tensor int32 or int64 [tokens]
        What went into the model.
    target_tokens : Tensor int32 or int64 [num_logits]
        The target's token, greedy or sampled, for each logits row.
    logits_indices : Tensor int64 [num_logits]
        Flat row of each logits row.
    cu_num_logits : Tensor int32 [num_reqs + 1]

    Returns
    -------
    TreeAcceptance
        Chunked prefills are not known here: vLLM's ``get_num_sampled_and_rejected`` sets their counts to 0.
    """
    if target_tokens.shape != logits_indices.shape:
        raise ValueError(f"{target_tokens.shape[0]} target tokens, but {logits_indices.shape[0]} logits rows")
    num_reqs = cu_num_logits.shape[0] - 1
    num_logits = cu_num_logits.diff()
    target = target_tokens.to(torch.int64)
    first = target[cu_num_logits[:-1].long()]
    if verify is None:
        sampled, ones = first.unsqueeze(1), torch.ones_like(num_logits)
        none = first.new_full((0, 1), -1, dtype=torch.int32)
        return TreeAcceptance(sampled, ones, num_logits - ones, Accepted(none, none[:, 0], first[:0]))
    layout = verify.layout
    tokens = max(layout.total_q, input_ids.shape[0])
    after = target.new_full((tokens,), _NO_TOKEN)
    after[logits_indices] = target
    draft = input_ids.new_zeros(tokens)
    draft[: input_ids.shape[0]] = input_ids
    accepted = treeattn.accept(layout, draft, after)
    path = treeattn.global_rows(layout, accepted.rows, accepted.lens)
    shared = min(num_reqs, layout.batch)
    walked = torch.zeros(num_reqs, dtype=torch.bool, device=target.device)
    owns_rows = layout.qo_indptr[: shared + 1].diff()
    walked[:shared] = (owns_rows > 0) & (owns_rows == num_logits[:shared])
    sampled = target.new_full((num_reqs, layout.max_q_len), -1)
    # a child is on the path because its token is what the target said after its parent
    # not torch.where with a number, which copies it to the device and waits for that
    sampled[:shared] = after[path.clamp(min=0)].masked_fill(path < 0, -1)[:shared]
    sampled[:, 0] = torch.where(walked, sampled[:, 0], first)
    num_sampled = torch.ones_like(num_logits)
    num_sampled[:shared] = accepted.lens[:shared].masked_fill(~walked[:shared], 1)
    return TreeAcceptance(sampled, num_sampled, num_logits - num_sampled, accepted)


def compact_trees_(verify: VerifyStep, accepted: Accepted, layers: Mapping[str, Any]) -> None:
    """Move the accepted nodes' K and V to where vLLM expects committed tokens: right behind the prefix, in order.

    Once a step for each KV cache group (each `VerifyStep`), after the walk and before the next forward of the target.

    Parameters
    ----------
    verify : VerifyStep
    accepted : Accepted
        From :func:`accept_trees`.
    layers : mapping
        Attention layers by name (``vllm_config.compilation_config.static_forward_context``); their ``kv_cache`` is
        ``[blocks, kv_heads, block_size, K and V]``. Layers that share a cache are moved once.
    """
    caches = {layers[name].kv_cache.data_ptr(): layers[name].kv_cache for name in verify.steps}
    treeattn.compact_kv_(
        list(caches.values()), verify.kv, verify.layout, accepted.rows, accepted.lens, kv_layout="HND"
    )
