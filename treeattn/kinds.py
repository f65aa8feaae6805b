"""Kinds of arguments that are looked at before anything else of them."""

from __future__ import annotations

from torch import Tensor


def require_tensor(value: object, name: str) -> None:
    """Raise TypeError unless `value` is a tensor: what is read in place cannot be a list.

    >>> require_tensor([1], "sinks")
    Traceback (most recent call last):
    TypeError: sinks must be a tensor, got list
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
