"""Attention kernels for tree verify in speculative decoding.

The path of a step: a draft tree's parents become a :class:`TreeLayout`, :func:`plan` divides the work of the layers
that share a geometry, :func:`tree_attention` runs a layer, :func:`accept` walks the verified tokens and
:func:`compact_kv_` moves the accepted K and V into place. :class:`StaticBuffers` holds a step in fixed memory for CUDA
graphs. Importing this package imports neither Triton nor any framework.
"""

from . import ops as ops  # registers what compiled graphs call
from ._version import __version__
from .api import tree_attention
from .backends import available_backends
from .buffers import StaticBuffers
from .config import KernelConfig, select_config
from .kv import PagedKV
from .layout import TreeLayout
from .merge import merge
from .plan import Step, plan
from .verify import Accepted, accept, compact_kv_, global_rows
from .width import VerifyWidth, resolve_verify_width

__all__ = [
    "Accepted",
    "KernelConfig",
    "PagedKV",
    "StaticBuffers",
    "Step",
    "TreeLayout",
    "VerifyWidth",
    "__version__",
    "accept",
    "available_backends",
    "compact_kv_",
    "global_rows",
    "merge",
    "plan",
    "resolve_verify_width",
    "select_config",
    "tree_attention",
]
