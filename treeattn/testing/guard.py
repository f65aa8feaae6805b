"""Tensors between guard regions: a write outside the tensor, or into rows nobody owns, is seen."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["Guarded"]

SENTINEL = -777.0
GUARD = 512


class Guarded:
    """A tensor with guard regions before and after it and, if asked, gaps inside.

    Parameters
    ----------
    shape : tuple of int
    dtype, device
    gap : int
        Elements between rows of the first axis that no write may touch.
    transposed : bool
        For two axes: the second is the slow one in memory.
    own_rows : int or None
        Rows from here on belong to nobody: they hold the sentinel and must keep it. The rows before start as NaN.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        gap: int = 0,
        transposed: bool = False,
        own_rows: int | None = None,
    ) -> None:
        inner = math.prod(shape[1:])
        if transposed:
            strides: tuple[int, ...] = (1, shape[0])
            size = shape[0] * shape[1]
        else:
            row = inner + gap
            strides = (row, *(math.prod(shape[axis + 1 :]) for axis in range(1, len(shape))))
            size = shape[0] * row
        self.memory = torch.full((size + 2 * GUARD,), SENTINEL, dtype=dtype, device=device)
        self.tensor = self.memory.as_strided(shape, strides, GUARD)
        self.own_rows = shape[0] if own_rows is None else own_rows
        self.tensor[: self.own_rows] = float("nan")

    def touched(self) -> str | None:
        """Where something outside the owned rows was written, or None."""
        copy = self.memory.clone()
        copy.as_strided(self.tensor.shape, self.tensor.stride(), GUARD)[: self.own_rows] = SENTINEL
        wrong = torch.nonzero(copy != SENTINEL)
        if len(wrong) == 0:
            return None
        first = int(wrong[0]) - GUARD
        return f"{len(wrong)} elements outside the {self.own_rows} owned rows were written, the first at offset {first}"

    def result(self) -> Tensor:
        """A copy of the owned rows in full shape; the others as 0."""
        out = torch.zeros(self.tensor.shape, dtype=self.tensor.dtype)
        out[: self.own_rows] = self.tensor[: self.own_rows].cpu()
        return out
