"""Tree verify inside vLLM: an attention backend, trees per request, and what vLLM lacks around them.

The plugin (:mod:`.plugin`) makes ``--attention-backend CUSTOM`` mean :class:`.backend.TreeAttentionBackend`; a server
that does not say so is as it was. The backend serves every request of at most ``1 + num_speculative_tokens`` query
rows: as a causal chain, or as the draft tree that :class:`DraftTrees` holds for it. Longer requests (prefills) and
draft models stay with vLLM's Triton kernel.

A tree drafter needs three things more, which vLLM 0.33 has for chains only: :func:`depth_positions_`,
:func:`accept_trees` and :func:`compact_trees_`. docs/vllm.md shows where they go.

Importing this package does not import vLLM; its modules `backend`, `builder` and `impl` do.
"""

from .trees import DraftTrees, current_trees
from .verify import TreeAcceptance, VerifyStep, accept_trees, compact_trees_, depth_positions_

__all__ = [
    "DraftTrees",
    "TreeAcceptance",
    "VerifyStep",
    "accept_trees",
    "compact_trees_",
    "current_trees",
    "depth_positions_",
]
