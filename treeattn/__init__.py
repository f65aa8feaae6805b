"""Attention kernels for tree verification in speculative decoding: draft trees in, verified tokens out."""

from treeattn._version import __version__

__all__ = ["__version__"]
