"""The entry point in ``vllm.general_plugins``: says what ``--attention-backend CUSTOM`` means, and nothing else.

vLLM calls :func:`register` in every process of every server where treeattn is installed, so it imports no kernel,
checks nothing and never raises: a server that does not ask for the backend must not notice. What the backend needs is
checked where vLLM loads it, because it was asked for (:mod:`.backend`).
"""

from __future__ import annotations

import logging

BACKEND = "treeattn.adapters.vllm.backend.TreeAttentionBackend"
_log = logging.getLogger("vllm.treeattn")


def register() -> None:
    """Register the backend as vLLM's ``CUSTOM``, unless another plugin has; may be called again."""
    try:
        from vllm.v1.attention.backends.registry import (  # type: ignore[import-not-found, unused-ignore]
            AttentionBackendEnum,
            register_backend,
        )

        custom = AttentionBackendEnum.CUSTOM
        taken = custom.get_path() if custom.is_overridden() else None
    except (ImportError, AttributeError) as error:
        _log.warning("treeattn is off: this vLLM has no place to register a backend (%s); treeattn info --vllm", error)
        return
    if taken in (None, BACKEND):
        register_backend(custom, BACKEND)
    else:
        _log.warning("treeattn is off: the attention backend CUSTOM belongs to %s", taken)
