"""Tolerance as a budget: at most twice the error of plain PyTorch in the same dtype, plus eps terms.

A budget is computed per request, so that short rows do not hide an error in long ones. The lse is bounded apart and
tighter, because it is float32 whatever the dtype of q. Infinities and NaN are compared first, by position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case
from .truth import Truth, plain, truth

__all__ = ["LSE_EPS", "Verdict", "compare", "judge", "out_factor"]

OUT_EPS = 1.5
"""Eps of the dtype times the largest value of the request, on top of twice PyTorch's error."""
SCORE_EPS = 4
"""Eps of float32 times (1 + largest |lse|), relative: a score of size s is known to s * eps, and exp passes that on."""
LSE_EPS = 64
"""Eps of float32 times (1 + largest |lse|): tensor cores add products with a few bits less than float32 has."""


@dataclass(frozen=True)
class Verdict:
    """How far a result is from the truth.

    Attributes
    ----------
    ok : bool
    ratio : float
        Worst error as a share of its budget; above 1 is wrong; infinite when positions or finiteness differ.
    message : str
        What is worst: tensor, request, row, head, dim, the value, the value expected, the budget.
    """

    ok: bool
    ratio: float
    message: str


def judge(case: Case, out: Tensor, lse: Tensor | None = None, expected: Truth | None = None) -> Verdict:
    """Compare a result with the truth of its case.

    Parameters
    ----------
    case : Case
    out : Tensor
        `[total_q, num_qo_heads, head_dim]`, any device.
    lse : Tensor, optional
        `[total_q, num_qo_heads]`.
    expected : Truth, optional
        Saves computing it again.
    """
    expected = expected or truth(case)
    yard = plain(case)
    worst = Verdict(True, 0.0, "nothing to compare")
    eps32 = torch.finfo(torch.float32).eps
    for request, q_len in enumerate(case.q_lens):
        rows = slice(case.starts[request], case.starts[request] + q_len)
        factor = out_factor(case.dtype, expected.lse[rows])
        pairs = [("out", out, expected.out, yard.out, factor, 0.0)]
        if lse is not None:
            pairs.append(("lse", lse, expected.lse, yard.lse, LSE_EPS * eps32, 1.0))
        for name, got, want, reference, factor, floor in pairs:
            verdict = compare(
                name, request, got[rows].detach().cpu().double(), want[rows], reference[rows], factor, floor
            )
            if verdict.ratio >= worst.ratio:
                worst = verdict
    return worst


def out_factor(dtype: torch.dtype, lse: Tensor) -> float:
    """Relative part of an output's budget, given the true lse of the request."""
    finite = torch.where(torch.isfinite(lse), lse.abs(), torch.zeros_like(lse))
    largest = float(finite.max()) if finite.numel() else 0.0
    return OUT_EPS * torch.finfo(dtype).eps + SCORE_EPS * torch.finfo(torch.float32).eps * (1 + largest)


def compare(
    name: str, request: int, got: Tensor, want: Tensor, reference: Tensor, factor: float, floor: float
) -> Verdict:
    """Judge one request's values: error at most ``2 * max|reference - want| + factor * (floor + max|want|)``.

    Parameters
    ----------
    name : str
        Of the tensor, for the message.
    got, want, reference : Tensor
        float64 `[rows, heads(, dim)]`: result, truth, and plain PyTorch in the low dtype.
    """
    if want.numel() == 0:
        return Verdict(True, 0.0, f"{name} of request {request} is empty")
    finite = torch.isfinite(want)
    misplaced = torch.where(finite, ~torch.isfinite(got), got != want)
    if bool(misplaced.any()):
        index = tuple(torch.nonzero(misplaced)[0].tolist())
        count = int(misplaced.sum())
        return Verdict(
            False,
            float("inf"),
            f"{_place(name, request, index)} is {float(got[index])}, must be {float(want[index]):.6g} "
            f"({count} of {want.numel()} values have the wrong Inf or NaN)",
        )
    zero = torch.zeros_like(want)
    error = torch.where(finite, (got - want).abs(), zero)
    largest = float(torch.where(finite, want.abs(), zero).max())
    budget = 2 * float(torch.where(finite, (reference - want).abs(), zero).max()) + factor * (floor + largest) + 1e-30
    flat = int(error.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), want.shape))
    ratio = float(error.reshape(-1)[flat]) / budget
    return Verdict(
        ratio <= 1,
        ratio,
        f"{_place(name, request, index)} is {float(got[index]):.8g}, must be {float(want[index]):.8g}: "
        f"error {float(error[index]):.3g}, budget {budget:.3g} (ratio {ratio:.2f})",
    )


def _place(name: str, request: int, index: tuple[int, ...]) -> str:
    words = ("row", "head", "dim")
    return f"{name} of request {request} " + " ".join(f"{word} {i}" for word, i in zip(words, index, strict=False))
