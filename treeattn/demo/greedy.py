"""Plain greedy decoding by transformers, and the comparison with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Greedy:
    """Plain greedy output of one prompt.

    Attributes
    ----------
    tokens : list of int
    margins : list of float
        Logit of each token minus the next best logit.
    """

    tokens: list[int]
    margins: list[float]


@torch.inference_mode()
def greedy_decode(model: Any, prompt: Sequence[int], max_new_tokens: int, eos: int | None = None) -> Greedy:
    """Decode one prompt with transformers' ``generate``, its own attention and its own cache."""
    from transformers import GenerationConfig

    ids = torch.tensor([list(prompt)], dtype=torch.int64, device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            eos_token_id=eos,
            pad_token_id=0 if eos is None else eos,
            return_dict_in_generate=True,
            output_logits=True,
        ),
    )
    top = torch.stack([logits[0].float().topk(2).values for logits in output.logits])
    return Greedy(output.sequences[0, len(prompt) :].tolist(), (top[:, 0] - top[:, 1]).tolist())


@dataclass(frozen=True)
class Divergence:
    """First place where a tree run's output is not plain greedy's.

    Attributes
    ----------
    prompt, index : int
        Which output, and which of its new tokens.
    expected, got : int or None
        The two tokens; None where an output had ended.
    margin : float or None
        Plain greedy's top-2 logit margin there. A margin near the rounding of the dtype is a tie that any
        change of shape can turn; it counts as a divergence all the same.
    """

    prompt: int
    index: int
    expected: int | None
    got: int | None
    margin: float | None


def first_divergence(greedy: Sequence[Greedy], outputs: Sequence[Sequence[int]]) -> Divergence | None:
    """Compare token for token, lengths included; None when all are equal."""
    found = []
    for prompt, (plain, output) in enumerate(zip(greedy, outputs, strict=True)):
        for index in range(max(len(plain.tokens), len(output))):
            expected = plain.tokens[index] if index < len(plain.tokens) else None
            got = output[index] if index < len(output) else None
            if expected != got:
                margin = plain.margins[index] if expected is not None else None
                found.append(Divergence(prompt, index, expected, got, margin))
                break
    return min(found, key=lambda d: d.index, default=None)
