"""The steps of a backend: what SGLang says of a verify batch, made into a layout and a plan for each group.

A backend sees two kinds of steps. *Eager* ones get a layout and plans of their own. *Static* ones, for CUDA graphs, are
written into one :class:`treeattn.StaticBuffers` whose groups borrow SGLang's persistent addresses. Groups are known
from the model's layers, or learned from the first call of a layer; every later step plans them before its layers run.

Masks come as SGLang's FULL form (a row is ``prefix + width`` bytes) or its QLEN_ONLY form (``width`` bytes). Width and
form are settled here, once a step, from what the step itself says.

Not here: anything that imports SGLang (:mod:`.backend`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import treeattn
from treeattn import PagedKV, StaticBuffers, Step, TreeLayout, VerifyWidth, resolve_verify_width

from .extend_call import GroupKey

_BUDGETS = ("ddtree_budget", "tree_budget", "speculative_ddtree_budget", "speculative_tree_budget")
"""Attributes in which forks keep the nodes of a tree, the root excluded."""

Form = Literal["full", "tree"]


def verify_width(spec_info: Any, resolve: Callable[[], int | None], fork: Any = None) -> VerifyWidth:
    """Rows of each request in a verify step, from SGLang's own words.

    Parameters
    ----------
    spec_info
        The step's speculative input: its ``num_tokens_per_req``, else its ``draft_token_num``, where positive.
    resolve : callable
        What SGLang resolved for the server; asked where the step does not say.
    fork
        An object with a fork's budget attribute (`spec_info` is looked at too); asked last.

    Raises
    ------
    ValueError
        If nothing tells the width.
    """
    for name in ("num_tokens_per_req", "draft_token_num"):
        told = getattr(spec_info, name, None)
        if told is not None and told > 0:
            return resolve_verify_width(width=int(told))
    if (resolved := resolve()) is not None and resolved > 0:
        return resolve_verify_width(num_draft_tokens=int(resolved))
    budgets = (getattr(owner, name, None) for owner in (spec_info, fork) for name in _BUDGETS)
    return resolve_verify_width(tree_budget=next((b for b in budgets if b is not None), None))


def count_requests(
    spec_info: Any, width: VerifyWidth, batch: int, query_rows: int | None, exact: bool, padding: int = 0
) -> int:
    """Real requests of a step, after its width is held against every count of rows that the step carries.

    Parameters
    ----------
    batch : int
        Requests of the batch, those included that pad it (CUDA graphs, data parallelism).
    query_rows : int, optional
        Rows of the batch, the same padding included; None where unknown.
    exact : bool
        Whether the rows are just those of `batch` requests; data parallelism may add a few that are nobody's.
    padding : int
        Requests that pad the batch, where SGLang says so: for steps without draft tokens.

    Raises
    ------
    ValueError
        If the rows are another width's; names both.
    """
    needed = batch * width.width
    if query_rows is not None and (query_rows < needed or (exact and query_rows > needed)):
        raise _width_error(width, query_rows, batch, "query rows")
    tree = getattr(spec_info, "retrieve_index", None)
    if tree is not None and tree.ndim == 2 and tree.shape[0] and tree.shape[1] != width.width:
        raise _width_error(width, tree.numel(), tree.shape[0], "tree nodes")
    tokens = getattr(spec_info, "draft_token", None)
    if tokens is None:
        return batch - padding
    rows: int = tokens.numel()
    requests, rest = divmod(rows, width.width)
    if rest or requests > batch:
        raise _width_error(width, rows, batch, "draft tokens")
    return requests


def _width_error(width: VerifyWidth, rows: int, batch: int, what: str) -> ValueError:
    each = f", {rows // batch} each" if batch and rows % batch == 0 else ""
    return ValueError(
        f"SGLang says a verify width of {width.width} ({width.reason}), but the step has {rows} {what} for "
        f"{batch} requests{each}: whoever sized this step took another width than its tree has"
    )


@dataclass(frozen=True, eq=False)
class VerifyStep:
    """One verify step, as the layout needs it.

    Attributes
    ----------
    requests, width : int
        Real requests, and the rows of each.
    prefix_lens : Tensor
        int32 or int64 ``[requests]``.
    mask : Tensor or None
        Flat, bool or uint8; None for causal chains.
    form : {"full", "tree"}
        Of the mask.
    """

    requests: int
    width: int
    prefix_lens: Tensor
    mask: Tensor | None
    form: Form

    def arguments(self) -> dict[str, Any]:
        """For :meth:`treeattn.StaticBuffers.update_`; a mask longer than the step is cut where the host knows it."""
        words: dict[str, Any] = {"prefix_lens": self.prefix_lens, "q_len": self.width}
        if self.mask is None:
            return {**words, "chain": True}
        mask = self.mask
        if self.form == "tree":
            mask = mask[: self.requests * self.width**2]
        elif mask.device.type == "cpu":
            mask = mask[: self.width * (int(self.prefix_lens.sum()) + self.requests * self.width)]
        return {**words, "mask": mask, "form": self.form}

    def layout(self) -> TreeLayout:
        """A layout of this step alone."""
        words = self.arguments()
        if words.pop("chain", False):
            return TreeLayout.chain(**words)
        return TreeLayout.from_mask(words.pop("mask"), **words)


def mask_form(mask: Tensor, requests: int, width: int, own: Tensor | None) -> Form:
    """Which form a mask has: the backend's own buffer holds trees, and so does one of exactly their size.

    A full mask of the same real requests is longer than that by their prefixes; without prefixes both forms are one.
    """
    if own is not None and mask.data_ptr() == own.data_ptr() and own.numel():
        return "tree"
    return "tree" if mask.numel() == requests * width**2 else "full"


class VerifySteps:
    """Layouts, groups and plans of one backend.

    Parameters
    ----------
    keys : iterable of GroupKey
        Groups that are known beforehand.
    backend : str
        Of :func:`treeattn.plan`.
    batch_invariant : bool
        For SGLang's deterministic mode.

    Attributes
    ----------
    keys : list of GroupKey
        Known groups, in order of appearance.
    buffers : StaticBuffers or None
        For static steps, after :meth:`allocate`.
    """

    def __init__(self, keys: Iterable[GroupKey] = (), backend: str = "auto", batch_invariant: bool = False) -> None:
        self.keys = list(dict.fromkeys(keys))
        self.backend, self.batch_invariant = backend, batch_invariant
        self.buffers: StaticBuffers | None = None
        self._static_kv: dict[bool, PagedKV] = {}
        self._static: dict[GroupKey, Step] = {}
        self._layout: TreeLayout | None = None
        self._kv: dict[bool, PagedKV] = {}
        self._eager: dict[GroupKey, Step] = {}
        self._parent_mask: Tensor | None = None
        self._full_bytes = 0
        self.is_static = False

    def allocate(
        self, max_batch: int, max_width: int, max_context: int, kv: PagedKV, window_kv: PagedKV | None = None
    ) -> StaticBuffers:
        """Take the memory of static steps, and return it.

        Parameters
        ----------
        max_batch, max_width : int
            Requests, and rows of one, at most.
        max_context : int
            Prefix of one request at most, for :meth:`full_mask`.
        kv, window_kv : PagedKV
            SGLang's persistent addresses, of all tokens and of those inside the window.
        """
        self.buffers = StaticBuffers(max_batch, max_width, device=kv.device)
        self._static_kv = {False: kv} if window_kv is None else {False: kv, True: window_kv}
        self._static.clear()
        self._parent_mask = None
        self._full_bytes = max_batch * max_width * (max_context + max_width)
        for key in self.keys:
            self._add_static(key)
        return self.buffers

    def write_static(self, step: VerifyStep) -> None:
        """Write a step into the static memory: one launch for the layout and one a group.

        Raises
        ------
        ValueError
            If the step exceeds a capacity; names what was asked and what there is.
        RuntimeError
            Before :meth:`allocate`.
        """
        if self.buffers is None:
            raise RuntimeError("a step for CUDA graphs before init_cuda_graph_state")
        self.buffers.update_(**step.arguments())
        self.is_static = True
        if self._parent_mask is not None:
            self.buffers.layout.full_mask(out=self._parent_mask)

    def make_eager(self, step: VerifyStep, kv: PagedKV, window_kv: PagedKV | None = None) -> None:
        """Make a step of its own layout, and the plans of all known groups."""
        self._layout = step.layout()
        self._kv = {False: kv} if window_kv is None else {False: kv, True: window_kv}
        self._full_bytes = step.requests * step.width * step.width + step.width * kv.width
        self._eager = {key: self._plan(key) for key in self.keys}
        self.is_static = False

    def step_for(self, key: GroupKey) -> Step:
        """The present step of a layer's group.

        A group that no layer had before is learned here, and planned with every later step.

        Raises
        ------
        RuntimeError
            If it is first met while a CUDA graph is captured.
        """
        found = (self._static if self.is_static else self._eager).get(key)
        if found is not None:
            return found
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{key} is first met inside a graph capture: run the model once before it is captured")
        if key not in self.keys:
            self.keys.append(key)
        if self.is_static:
            return self._add_static(key)
        self._eager[key] = self._plan(key)
        return self._eager[key]

    def rows(self) -> int:
        """Query rows of the present step that layers may hand in at most."""
        layout = self._present()
        return layout.total_q

    def full_mask(self) -> tuple[Tensor, Tensor]:
        """The present trees in SGLang's FULL form, uint8, and its offsets: for a layer that stays with the parent.

        Static memory is taken by the first call and written with every later step.
        """
        layout = self._present()
        if not self.is_static:
            return layout.full_mask(dtype=torch.uint8, total=self._full_bytes), layout.mask_indptr
        if self._parent_mask is None:
            self._parent_mask = torch.zeros(self._full_bytes, dtype=torch.uint8, device=layout.device)
            layout.full_mask(out=self._parent_mask)
        return self._parent_mask, layout.mask_indptr

    def check(self) -> None:
        """Raise ValueError for what the device found wrong in the present step (waits for the stream)."""
        self._present().check()

    def _present(self) -> TreeLayout:
        layout = self.buffers.layout if self.is_static and self.buffers is not None else self._layout
        if layout is None:
            raise RuntimeError("no verify step has been made yet")
        return layout

    def _add_static(self, key: GroupKey) -> Step:
        if self.buffers is None:
            raise RuntimeError("a group for CUDA graphs before init_cuda_graph_state")
        kv = self._rail(self._static_kv, key)
        self._static[key] = self.buffers.add_group(
            **key._asdict(), kv=kv, fresh_tree=True, batch_invariant=self.batch_invariant, backend=self.backend
        )
        return self._static[key]

    def _plan(self, key: GroupKey) -> Step:
        layout = self._present() if self._layout is None else self._layout
        return treeattn.plan(
            layout, self._rail(self._kv, key), **key._asdict(), fresh_tree=True,
            batch_invariant=self.batch_invariant, backend=self.backend,
        )  # fmt: skip

    @staticmethod
    def _rail(kv: dict[bool, PagedKV], key: GroupKey) -> PagedKV:
        if key.windowed not in kv:
            raise ValueError(f"a layer has a window of {key.window_left}, SGLang has no addresses for windows")
        return kv[key.windowed]
