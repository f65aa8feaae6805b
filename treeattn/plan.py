"""The step: everything a layer's attention needs beside its tensors, made once a step for each group of layers."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from . import backends
from .capabilities import Asked
from .config import EDGE_KEYS, KernelConfig, group_config
from .geometry import Geometry, Part
from .kv import KVLayout, PagedKV
from .layout import TreeLayout
from .validate import validate_plan, validation_wanted

PLANNED = ("triton", "cuda")
"""Backends whose work a plan divides, and which share its buffers and the merge of partials."""
TWIN = "triton"
"""Where in ``Step.launches`` is the step for calls that fell back (:mod:`treeattn.fallback`)."""


@dataclass(frozen=True, eq=False)
class PlanBuffers:
    """Device memory of a plan; see :mod:`treeattn.kernels.plan` for the meaning of each tensor."""

    work: Tensor
    turns: Tensor
    spans: Tensor
    arrivals: Tensor
    partial_out: Tensor
    partial_lse: Tensor

    @staticmethod
    def shapes(
        batch: int, num_programs: int, block_m: int, head_dim: int, slots: int | None = None, tagged: bool = False
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor: the formula behind ``StaticBuffers.nbytes``; two partials a program."""
        slots = 2 * num_programs if slots is None else slots
        lse = (slots, block_m, 2) if tagged else (slots, block_m)
        return {
            "work": ((num_programs, 16), torch.int32),
            "turns": ((max(batch, 1), 8), torch.int32),
            "spans": ((max(batch, 1), 8), torch.int32),
            "arrivals": ((num_programs, 4), torch.int32),
            "partial_out": ((slots, block_m, head_dim), torch.float32),
            "partial_lse": (lse, torch.float32),
        }

    @classmethod
    def allocate(
        cls,
        batch: int,
        num_programs: int,
        config: KernelConfig,
        head_dim: int,
        device: torch.device,
        slots: int | None = None,
        tagged: bool = False,
    ) -> PlanBuffers:
        """Uninitialised memory, which the first launch of the plan fills; zeros where parts are `tagged`.

        Kernels of csrc that merge parts know them by the number of the launch, which they count here
        (``csrc/merge.cuh``): none of another that had this memory before may be left in it.
        """
        shapes = cls.shapes(batch, num_programs, config.block_m, head_dim, slots, tagged)
        make = torch.zeros if tagged else torch.empty
        return cls(**{name: make(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()})


@dataclass(eq=False)
class HostState:
    """What the host knows of the step that static buffers hold now; None where only the device knows."""

    batch: int = 0
    q_len: int | None = None
    rows: int | None = 0


@dataclass(frozen=True, eq=False)
class CheckedCall:
    """What is kept of a layer call's shapes, strides, dtypes and devices once they are checked.

    Attributes
    ----------
    cache_strides : tuple of int
        Page, slot and head stride of the K cache, then of the V cache, in elements.
    launches : dict
        Prepared launches by what the shapes do not tell (alignment, sign of the scale, tail).
    """

    cache_strides: tuple[int, ...]
    launches: dict[Any, Any] = field(default_factory=dict)


_steps: weakref.WeakValueDictionary[int, Step] = weakref.WeakValueDictionary()
# Larger than any size: a graph compiled for dynamic shapes must not take a handle for an equal size, and 0 and 1 are
# always compiled in.
_handles = itertools.count(2**32)


def step_of(handle: int) -> Step:
    """The step of a :attr:`Step.handle`; ValueError if it is gone: the operators keep no step alive."""
    step = _steps.get(handle)
    if step is None:
        raise ValueError(
            f"no Step has the handle {handle}: it was made in another process, or the Step is gone; keep the Step (or "
            "its StaticBuffers) alive as long as anything calls the operator"
        )
    return step


@dataclass(frozen=True, eq=False, kw_only=True)
class Step(Geometry):
    """What one verify step needs beside the layer's tensors: layout, KV addresses, plan. Made by :func:`plan`.

    Used by every layer of one group, on one stream at a time: the layers share the partials' memory.

    Attributes
    ----------
    backend : str
        What its plan is made for, and its calls run with.
    auto : bool
        The backend was chosen, not named: a call that it cannot do goes to another (:mod:`treeattn.fallback`).
    handle : int
        Names this object to the operators of :mod:`treeattn.ops` for as long as it lives (:func:`step_of`).
    """

    layout: TreeLayout
    kv: PagedKV
    backend: str
    config: KernelConfig | None = None
    num_programs: int = 0
    buffers: PlanBuffers | None = None
    host: HostState | None = None
    validate: bool = False
    auto: bool = False
    checked: dict[Any, CheckedCall] = field(default_factory=dict, repr=False)
    launches: dict[str, Any] = field(default_factory=dict, repr=False)
    scored: dict[Any, Any] = field(default_factory=dict, repr=False)  # options of calls that are checked
    handle: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", next(_handles))
        _steps[self.handle] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is a step of its own, with a handle of its own."""
        self.__dict__.update(state)
        self.__post_init__()

    @cached_property
    def words32(self) -> Tensor:
        """The mask words as the kernels read them: int32 ``[total_q, 2 * num_words]``, the same memory."""
        return self.layout.mask_words.view(torch.int32)

    def request_lengths(self, rows: int) -> Iterator[tuple[int, int, int, int, int]]:
        """``request, first_row, q_len, prefix_len, num_nodes`` of each request that has rows (reads the device).

        `rows` is what the caller's q has; a layout of more raises ValueError before anything is yielded. A request
        whose addresses cannot hold its tokens counts as empty, and sets the status word.
        """
        layout = self.layout
        starts = layout.qo_indptr.tolist()
        if starts[-1] > rows:
            raise ValueError(f"q has {rows} query rows, the layout's requests have {starts[-1]}")
        prefixes, nodes = layout.prefix_lens.tolist(), layout.num_nodes.tolist()
        for request in range(layout.batch):
            q_len = starts[request + 1] - starts[request]
            if q_len <= 0:
                continue
            count = nodes[request]
            if count > 0:
                room = self.kv.pages_of(request).shape[0] * self.kv.page_size
                held = prefixes[request] - self.kv.start_of(request, prefixes[request])
                needed = self.tokens_needed(held, count)
                if needed > room:
                    self._report_capacity(request, room, needed)
                    count = 0
            yield request, starts[request], q_len, prefixes[request], count

    def tokens_needed(self, held: int, nodes: int) -> int:
        """Tokens that a request's pages must hold, of a prefix of which they hold `held`."""
        if self.nodes_in_table and self.part != "prefix":
            return held + nodes
        return 0 if self.part == "tree" else held

    @property
    def nodes_in_table(self) -> bool:
        """The nodes' K and V are behind the prefix in the request's own pages."""
        return self.kv.tree_slots is None and not self.fresh_tree

    def _report_capacity(self, request: int, room: int, needed: int) -> None:
        from .status import Status

        if int(self.layout.status[0]) == 0:
            row = [int(Status.KV_CAPACITY), request, min(room, 2**31 - 1), min(needed, 2**31 - 1)]
            self.layout.status.copy_(torch.tensor(row, dtype=torch.int32))


def plan(
    layout: TreeLayout,
    kv: PagedKV,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    kv_layout: KVLayout = "NHD",
    fresh_tree: bool = False,
    shared_kv: bool = False,
    window_left: int = -1,
    part: Part = "all",
    batch_invariant: bool = False,
    backend: str = "auto",
    config: KernelConfig | None = None,
    validate: bool | None = None,
) -> Step:
    """Prepare one verify step for the layers of a group.

    Parameters
    ----------
    layout : TreeLayout
        The batch's trees.
    kv : PagedKV
        Where the batch's K and V are. Borrowed: a later change of its tensors needs a new plan only if lengths change.
    num_qo_heads, num_kv_heads, head_dim : int
        Geometry of the layers (per GPU). The first must be a multiple of the second.
    head_dim_v : int, optional
        Of V and out, `head_dim` by default.
    dtype : torch.dtype
        Of q, K, V and out.
    kv_dtype : torch.dtype, optional
        Of the caches where it is not `dtype`: float8_e4m3fn or float8_e5m2, with scales given to each call.
    kv_layout : {"NHD", "HND"}
        Axis order of 4-D caches: ``[pages, page_size, kv_heads, head_dim]`` or
        ``[pages, kv_heads, page_size, head_dim]``.
    fresh_tree : bool
        The nodes' K and V come with each call as ``k_tree``, ``v_tree``; the request's pages need not hold them.
    shared_kv : bool
        V is the first `head_dim_v` numbers of K (MLA in its absorbed form, 576 and 512): calls give ``v_cache=None``
        and a scale.
    window_left : int
        A row sees keys at positions ``>= its own - window_left``, by ``layout.positions`` (depth, not row); negative
        for no window.
    part : {"all", "prefix", "tree"}
        Only the keys of the prefix, or only nodes: for runs whose states :func:`treeattn.merge` combines.
    batch_invariant : bool
        A row's bits depend on its own request, the geometry and ``max_q_len`` only, not on the rest of the batch, its
        order or any capacity. Costs memory for every split, and balance (:func:`invariant_slots` has the formula).
    backend : {"auto", "reference", "torch", "triton", "cuda"}
        "auto" is what :func:`treeattn.backends.choose_backend` takes: torch on a CPU; on a CUDA device "cuda" where it
        covers the geometry, runs on the chip and has its code or a compiler, else "triton". What "cuda" then cannot do
        of a call, Triton does. A backend named here never falls back to another.
    config : KernelConfig, optional
        Tiles of the Triton or CUDA kernels, :func:`treeattn.select_config` by default: for tuning. With "auto" they
        are Triton's.
    validate : bool, optional
        Read device data and check the addresses, now (page ids where ``kv.num_pages`` is given) and in every call with
        this step, against its cache. None: what TREEATTN_VALIDATE says.

    Returns
    -------
    Step

    Raises
    ------
    ValueError
        If the shapes known to the host disagree (the message names both numbers), or what validation found.
    RuntimeError
        If validation is on and the stream is being captured.
    NotImplementedError
        If the backend cannot do this geometry (the message names one that can).
    """
    geometry = Geometry.of(
        num_qo_heads, num_kv_heads, head_dim, head_dim_v=head_dim_v, dtype=dtype, kv_dtype=kv_dtype,
        kv_layout=kv_layout, fresh_tree=fresh_tree, shared_kv=shared_kv, window_left=window_left, part=part,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    step = prepare_step(layout, kv, geometry, backend=backend, config=config, validate=validation_wanted(validate))
    if step.validate:
        validate_plan(step)
    update_plan_(step)
    return step


def prepare_step(
    layout: TreeLayout,
    kv: PagedKV,
    geometry: Geometry,
    *,
    backend: str,
    host: HostState | None = None,
    config: KernelConfig | None = None,
    validate: bool = False,
) -> Step:
    """A checked step with its memory, its plan not yet made; arguments as in :func:`plan`."""
    if kv.device != layout.device:
        raise ValueError(f"the KV addresses are on {kv.device}, the layout is on {layout.device}")
    if kv.batch < layout.batch:
        raise ValueError(f"the layout has {layout.batch} requests, the KV addresses cover {kv.batch}")
    if kv.tree_slots is not None and kv.tree_slots.shape[0] < layout.total_q:
        raise ValueError(f"tree_slots has {kv.tree_slots.shape[0]} entries, the layout has {layout.total_q} query rows")
    asked = Asked(geometry, windowed_cache=kv.kv_start is not None)
    size = backends.Size(layout.batch, layout.max_q_len, kv.table.shape[-1] * kv.page_size)
    name = backends.resolve(backend, layout.device, asked, size)
    if name == "cuda" and backend == "auto":
        name = "cuda" if config is None and _loads(layout, geometry) else "triton"
    shared = {entry.name: getattr(geometry, entry.name) for entry in fields(Geometry)}
    planned = planned_for(name, layout, kv, geometry, config) if name in PLANNED else {"config": config}
    step = Step(
        **shared, **planned, layout=layout, kv=kv, backend=name, host=host, validate=validate, auto=backend == "auto"
    )
    if name == "cuda":
        from .cuda.launch import prepare

        prepare(step)  # builds and loads now, which a capture could not
    return step


def tags_parts(backend: str, geometry: Geometry) -> bool:
    """Whether parts of rows carry tags: whether kernels of csrc merge them."""
    return backend == "cuda" and not geometry.batch_invariant


def planned_for(
    backend: str, layout: TreeLayout, kv: PagedKV, geometry: Geometry, config: KernelConfig | None = None
) -> dict[str, Any]:
    """What a step of one of the backends `PLANNED` has for its plan: tiles, programs, and memory."""
    config = config or config_of(backend, backends.arch(layout.device), geometry, layout.max_q_len)
    programs = backends.num_programs(layout.device, config)
    slots = None
    if geometry.batch_invariant:
        tokens = kv.table.shape[-1] * kv.page_size
        every = tokens if kv.kv_indptr is not None else layout.batch * tokens
        slots = invariant_slots(geometry, config, layout.batch, layout.max_q_len, every)
    buffers = PlanBuffers.allocate(
        layout.batch, programs, config, geometry.head_dim_v, layout.device, slots, tags_parts(backend, geometry)
    )
    return {"config": config, "num_programs": programs, "buffers": buffers}


def _loads(layout: TreeLayout, geometry: Geometry) -> bool:
    """Whether all kernels that calls of a geometry may take are there, or can be made now."""
    from .cuda.ready import load_every

    config = config_of("cuda", backends.arch(layout.device), geometry, layout.max_q_len)
    return load_every(geometry, config, layout.device)


def config_of(backend: str, arch: int, geometry: Geometry, max_q_len: int) -> KernelConfig:
    """Tiles of a backend on a chip."""
    if backend == "cuda":
        from .cuda.config import cuda_config

        return cuda_config(geometry, max_q_len)
    return group_config(arch, geometry, max_q_len)


def invariant_slots(geometry: Geometry, config: KernelConfig, batch: int, max_q_len: int, kv_tokens: int) -> int:
    """Partials that a batch-invariant group may need: one for each split of each item.

    Parameters
    ----------
    kv_tokens : int
        Tokens that the pages of all requests hold at most.

    Notes
    -----
    With tiles of N keys (32 for all keys of a window), splits of S tiles, ``row_tiles = ceil(max_q_len * group /
    block_m)``: ``num_kv_heads * row_tiles * (kv_tokens / (N * S) + batch * (2 + (N / 32 + 1 + ceil(max_q_len / 32)) /
    S))``, each quotient rounded down but the last, which is rounded up.
    """
    keys = EDGE_KEYS if geometry.window_left >= 0 else config.block_n
    split = config.split_tiles
    row_tiles = -(-max_q_len * geometry.group // config.block_m)
    ends = -(-(config.block_n // EDGE_KEYS + 1 + -(-max_q_len // EDGE_KEYS)) // split)
    return geometry.num_kv_heads * row_tiles * (kv_tokens // (keys * split) + batch * (2 + ends))


def update_plan_(step: Step) -> None:
    """Make a step's plan again from its layout's present content: one launch, no host read, no allocation."""
    if step.backend in PLANNED and step.layout.batch > 0:
        from .kernels.launch import launch_plan

        launch_plan(step)
