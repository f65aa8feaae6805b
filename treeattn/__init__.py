"""Attention kernels for tree verify in speculative decoding.

The path of a step: a draft tree's parents become a :class:`TreeLayout`, :func:`plan` divides the work of the layers
that share a geometry, :func:`tree_attention` runs a layer, :func:`accept` walks the verified tokens and
:func:`compact_kv_` moves the accepted K and V into place. :class:`StaticBuffers` holds a step in fixed memory for CUDA
graphs. Importing this package imports neither Triton nor any framework.
"""

from ._version import __version__
from .api import tree_attention
from .backends import available_backends
from .buffers import StaticBuffers
from .config import KernelConfig, select_config
from .kv import PagedKV
from .layout import TreeLayout
from .plan import Step, plan

__all__ = [
    "KernelConfig",
    "PagedKV",
    "StaticBuffers",
    "Step",
    "TreeLayout",
    "__version__",
    "available_backends",
    "plan",
    "select_config",
    "tree_attention",
]
