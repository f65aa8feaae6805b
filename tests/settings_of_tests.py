"""What a shared test body runs on: backend, device, dtypes, and how large its cases may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import settings

from treeattn.testing import Case, Result, StaticRun, build_case, random_case, run_plain, run_static


@dataclass(frozen=True)
class Setting:
    """One backend on one device.

    `small` keeps shapes that Triton's interpreter can afford.
    """

    backend: str
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    small: bool = False

    def case(self, seed: int, dtype: torch.dtype, **pins: Any) -> Case:
        scale = "small" if self.small else "normal"
        return random_case(seed, device=self.device, dtype=dtype, scale=scale, **pins)

    def build(self, *args: Any, **options: Any) -> Case:
        return build_case(*args, device=self.device, **{"dtype": self.dtypes[0], **options})

    def plain(self, case: Case, **options: Any) -> Result:
        return run_plain(case, self.backend, **options)

    def static(self, case: Case) -> Result:
        return run_static(case, self.backend)

    def buffers(self, *cases: Case, spare: int = 2) -> StaticRun:
        return StaticRun.for_cases(list(cases), self.backend, spare)


def examples(share: float) -> int:
    """Share of the Hypothesis profile's number of examples."""
    return max(1, round(share * settings.default.max_examples))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit by bit, NaN included."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(whole), other.contiguous().view(whole))
