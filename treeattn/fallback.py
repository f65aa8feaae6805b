"""Calls that the CUDA kernels cannot do, though "auto" has chosen them for the step: Triton's kernels do them.

A geometry says before the first call which backend covers it. What only the call says is whether rows start at
multiples of 16 bytes, and with MLA whether there is a soft cap. A step keeps the plan of the backend that was chosen;
such a call makes one for Triton's tiles, in memory of its own that the first such call takes. It makes it anew each
time, in a launch ahead of the attention's, from what the layout holds then: no update has to know of it, and a graph
that captured the call is right for every later step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from .kernels.launch import LayerLaunch, launch_plan
from .plan import TWIN, Step, planned_for
from .scoring import Scoring


def triton_twin(step: Step) -> Step:
    """The same step for Triton's kernels, made once; its plan is made by each call."""
    twin: Step | None = step.launches.get(TWIN)
    if twin is None:
        planned = planned_for("triton", step.layout, step.kv, step)
        twin = dataclasses.replace(step, **planned, backend="triton", auto=False, checked={}, launches={}, scored={})
        step.launches[TWIN] = twin
    return twin


class FallbackLaunch:
    """The launches of such a layer call; arguments as of :class:`treeattn.kernels.launch.LayerLaunch`."""

    def __init__(self, step: Step, *tensors: Any, **rest: Any) -> None:
        self.step = triton_twin(step)
        self.layer = LayerLaunch(self.step, *tensors, **rest)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor | None,
        k_tree: Tensor | None,
        v_tree: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
        scoring: Scoring,
    ) -> None:
        """A plan, then attention of one layer, on the current stream."""
        launch_plan(self.step)
        self.layer(q, k_cache, v_cache, k_tree, v_tree, out, lse, scoring)
