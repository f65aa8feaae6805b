"""Static buffers: memory taken once, so that a CUDA graph captured once is right for every later step.

Addresses never change; what a step means is written into them by :meth:`StaticBuffers.update_`, which leaves nothing
of the step before: requests beyond the batch become empty, tails of indptrs are rewritten. One object serves one
stream order at a time; draft and target workers own separate ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .backends import Size, choose_backend, cuda_works_on
from .capabilities import Asked
from .geometry import Geometry, Part
from .kv import KVLayout, PagedKV
from .layout import TreeLayout, write_layout_
from .layout_input import MaskForm
from .plan import (
    PLANNED,
    TWIN,
    HostState,
    PlanBuffers,
    Step,
    config_of,
    invariant_slots,
    prepare_step,
    tags_parts,
    update_plan_,
)
from .validate import refuse_in_capture, validate_update, validation_wanted


def tensors_of(owner: Any) -> dict[str, Tensor]:
    """Tensor fields of a dataclass by name."""
    fields = ((field.name, getattr(owner, field.name)) for field in dataclasses.fields(owner))
    return {name: value for name, value in fields if isinstance(value, Tensor)}


class StaticBuffers:
    """Layout and plans in memory of fixed addresses and capacity.

    Parameters
    ----------
    max_batch : int
        Requests at most.
    max_q_len : int
        Query rows of one request at most; also the stride of the mask words.
    max_total_q : int, optional
        Query rows of a batch at most, ``max_batch * max_q_len`` by default.
    device : torch.device or str
    validate : bool, optional
        Read device data and check it, in every update and every call of a group: not for capture. None: what
        TREEATTN_VALIDATE says now.

    Examples
    --------
    >>> kv = PagedKV(page_size=1, block_table=torch.zeros(8, 64, dtype=torch.int32))
    >>> buffers = StaticBuffers(max_batch=8, max_q_len=17, device="cpu")
    >>> group = buffers.add_group(32, 8, 128, kv=kv, dtype=torch.float32)
    >>> buffers.update_(parents=torch.tensor([[-1, 0, 0, 1]]), prefix_lens=torch.tensor([5]))
    >>> # out = tree_attention(q, k_cache, v_cache, group, out=out): capture this once, replay after any update_
    """

    def __init__(
        self,
        max_batch: int,
        max_q_len: int,
        max_total_q: int | None = None,
        *,
        device: torch.device | str = "cuda",
        validate: bool | None = None,
    ) -> None:
        self.layout = TreeLayout.allocate(max_batch, max_q_len, max_total_q, device=torch.device(device))
        self.host = HostState()
        self.groups: list[Step] = []
        self.validate = validation_wanted(validate)

    def add_group(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        kv: PagedKV,
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
    ) -> Step:
        """Add the layers of one geometry; arguments as in :func:`treeattn.plan`.

        `kv` holds tensors whose addresses stay: the framework's own persistent ones, or :meth:`PagedKV.allocate`. They
        must cover ``max_batch`` requests. Compiles and loads the kernels of the plan, so that none loads in a capture.

        Returns
        -------
        Step
            For :func:`treeattn.tree_attention`; its plan is made again by each :meth:`update_`.
        """
        geometry = Geometry.of(
            num_qo_heads, num_kv_heads, head_dim, head_dim_v=head_dim_v, dtype=dtype, kv_dtype=kv_dtype,
            kv_layout=kv_layout, fresh_tree=fresh_tree, shared_kv=shared_kv, window_left=window_left, part=part,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        step = prepare_step(self.layout, kv, geometry, backend=backend, host=self.host, validate=self.validate)
        update_plan_(step)
        self.groups.append(step)
        return step

    def update_(
        self,
        *,
        prefix_lens: Tensor,
        parents: Tensor | None = None,
        mask: Tensor | None = None,
        form: MaskForm | None = None,
        chain: bool = False,
        q_len: int | None = None,
        num_nodes: Tensor | None = None,
        qo_indptr: Tensor | None = None,
        positions: Tensor | None = None,
        mask_indptr: Tensor | None = None,
        kv: PagedKV | None = None,
        validate: bool | None = None,
    ) -> None:
        """Write a step: the layout, then the plan of every group.

        One launch for the layout and one a group, on the current stream; no allocation, no host read, so it may itself
        be captured. Give one of `parents`, `mask` (with `form`) or ``chain=True``; arguments as in
        :meth:`TreeLayout.from_parents`, :meth:`TreeLayout.from_mask` and :meth:`TreeLayout.chain`.

        Parameters
        ----------
        prefix_lens : Tensor
            ``[batch]`` with ``batch <= max_batch``; slots beyond become empty requests.
        kv : PagedKV, optional
            Addresses to copy into the own ones of every group (:meth:`PagedKV.copy_`), which must have the same form.
            Not needed where the groups borrow the framework's persistent tensors, or are copied to one by one.
        validate : bool, optional
            Whether this update is validated, for buffers that otherwise are not (or are). Trees and masks are checked
            before anything is written, the addresses once the step is whole: ids against the ``num_pages`` of the
            group's addresses, where given.

        Raises
        ------
        ValueError
            If the step exceeds a capacity; names what was asked and what there is, and nothing has been written.
            Or what validation found.
        RuntimeError
            Where ``torch.compile`` would capture it; ``torch.compiler.disable(buffers.update_)`` may be called there.
            If validation is on and the stream is being captured.
        """
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError("update_ writes what a compiled graph reads by its step: call it outside")
        validate = self.validate if validate is None else validate
        if validate:
            refuse_in_capture(self.layout.device, "validation of update_")
        if (parents is not None) + (mask is not None) + chain != 1:
            raise ValueError("give one of parents, mask (with form) or chain=True")
        batch, width, rows = self._check_capacity(prefix_lens, parents, qo_indptr, q_len)
        owned = {id(group.kv): group.kv for group in self.groups}.values() if kv is not None else ()
        if kv is not None:
            if kv.batch < batch:
                raise ValueError(f"kv covers {kv.batch} requests, the step has {batch}")
            offered = rows if rows is not None or parents is None else parents.numel()
            if kv.tree_slots is not None and offered is not None and kv.tree_slots.shape[0] < offered:
                raise ValueError(f"kv has {kv.tree_slots.shape[0]} tree_slots, the step has {offered} query rows")
            for own in owned:
                own.check_fits(kv)
        # its checks come before it writes, so addresses are copied after it
        write_layout_(
            self.layout, parents=parents, mask=mask, form=form, prefix_lens=prefix_lens,
            num_nodes=num_nodes, qo_indptr=qo_indptr, q_len=width, positions=positions, mask_indptr=mask_indptr,
            batch=batch, validate=validate,
        )  # fmt: skip
        if kv is not None:
            for own in owned:
                own.copy_(kv)
        self.host.batch, self.host.q_len, self.host.rows = batch, width, rows
        for group in self.groups:
            update_plan_(group)
        if validate:
            validate_update(self.layout, self.groups, kv)

    def _check_capacity(
        self, prefix_lens: Tensor, parents: Tensor | None, qo_indptr: Tensor | None, q_len: int | None
    ) -> tuple[int, int | None, int | None]:
        """``batch``, uniform width and rows of a step, as far as the host knows them, within capacity."""
        layout = self.layout
        if not isinstance(prefix_lens, Tensor):
            raise TypeError(f"prefix_lens must be a tensor on {layout.device}, got {type(prefix_lens).__name__}")
        if prefix_lens.ndim != 1:
            raise ValueError(f"prefix_lens is [batch], got {tuple(prefix_lens.shape)}")
        batch = prefix_lens.shape[0]
        if parents is not None and parents.ndim == 2 and parents.shape[0] != batch:
            raise ValueError(f"parents has {parents.shape[0]} requests, prefix_lens has {batch}")
        if batch > layout.batch:
            raise ValueError(f"{batch} requests exceed max_batch {layout.batch}")
        width = q_len
        if parents is not None and parents.ndim == 2:
            width = parents.shape[1]
            if q_len is not None and q_len != width:
                raise ValueError(f"parents has width {width}, q_len says {q_len}")
        if qo_indptr is not None:
            flat = None if parents is None else parents.numel()
            if flat is not None and flat > layout.total_q:
                raise ValueError(f"{flat} query rows exceed max_total_q {layout.total_q}")
            return batch, width, None  # of the two the layout wants one
        if width is None:
            raise ValueError("the width is not known: give parents [batch, q_len], q_len or qo_indptr")
        if width > layout.max_q_len:
            raise ValueError(
                f"a verify width of {width} exceeds these buffers' max_q_len {layout.max_q_len} "
                f"({batch} requests x {width} rows): make StaticBuffers for max_q_len={width}"
            )
        if batch * width > layout.total_q:
            raise ValueError(
                f"{batch} requests x {width} rows = {batch * width} query rows exceed max_total_q {layout.total_q}"
            )
        return batch, width, batch * width

    def check(self) -> None:
        """Read the device's status word and raise what it says (see :meth:`TreeLayout.check`); waits for the stream."""
        self.layout.check()

    @property
    def allocated_bytes(self) -> int:
        """Bytes that this object holds now, those for calls that fell back included (:mod:`treeattn.fallback`)."""
        steps = [*self.groups, *(group.launches[TWIN] for group in self.groups if TWIN in group.launches)]
        owners = [self.layout, *(step.buffers for step in steps if step.buffers is not None)]
        return sum(tensor.nbytes for owner in owners for tensor in tensors_of(owner).values())

    @staticmethod
    def nbytes(
        max_batch: int,
        max_q_len: int,
        max_total_q: int | None = None,
        *,
        groups: list[dict[str, Any]] | None = None,
        arch: int = 90,
        num_sms: int = 132,
    ) -> int:
        """Bytes that such buffers will take, before anything is allocated.

        Parameters
        ----------
        groups : list of dict
            Per group the arguments of :meth:`add_group` that describe it: ``num_qo_heads``, ``num_kv_heads``,
            ``head_dim`` and what is not the default; with ``batch_invariant`` also ``max_kv_tokens``, what the pages of
            all requests hold at most.
        arch, num_sms : int
            Chip: compute capability times ten and multiprocessors (an H200 by default).

        Notes
        -----
        With W = ceil(max_q_len / 64) and T = max_total_q, the layout takes ``T * (8 * W + 20) + 20 * max_batch + 28``
        bytes. A Triton or CUDA group with P programs and row tiles of R takes
        ``8 * P * R * (head_dim_v + 1) + 80 * P + 64 * max_batch``: two float32 partials (out and lse) a program.
        A CUDA one that is not batch-invariant has a tag behind each lse, ``8 * P * R`` more.
        Groups of the other backends take nothing. A batch-invariant one has
        ``4 * R * (head_dim_v + 1)`` for each of :func:`treeattn.plan.invariant_slots`
        in place of the first term. With "auto" P and R are those of the backend that it takes, the CUDA kernels taken
        for granted on sm_90 unless a GPU here says otherwise; where that hangs on the room for keys, the larger sum.
        """
        meta = torch.device("meta")
        layout = TreeLayout.allocate(max_batch, max_q_len, max_total_q, device=meta)
        total = sum(tensor.nbytes for tensor in tensors_of(layout).values())
        for options in groups or []:
            options = dict(options)
            kv_tokens = options.pop("max_kv_tokens", None)
            options.pop("kv", None)
            backend = options.pop("backend", "auto")
            group = Geometry.of(**options)
            if group.batch_invariant and kv_tokens is None:
                raise ValueError("a batch_invariant group needs max_kv_tokens: it has memory for every split")
            sizes = []
            for name in _backends_of(backend, arch, group, max_batch, max_q_len):
                if name not in PLANNED:
                    sizes.append(0)
                    continue
                config = config_of(name, arch, group, max_q_len)
                programs = num_sms * config.programs_per_sm
                slots = None
                if group.batch_invariant:
                    slots = invariant_slots(group, config, max_batch, max_q_len, kv_tokens)
                own = PlanBuffers.allocate(
                    max_batch, programs, config, group.head_dim_v, meta, slots, tags_parts(name, group)
                )
                sizes.append(sum(tensor.nbytes for tensor in tensors_of(own).values()))
            total += max(sizes)
        return total


def _backends_of(backend: str, arch: int, group: Geometry, max_batch: int, max_q_len: int) -> set[str]:
    """The backends that a group may have on a chip, whatever its pages hold."""
    if backend != "auto":
        return {backend}
    works = cuda_works_on(arch)
    sizes = (None, Size(max_batch, max_q_len, 0))
    return {choose_backend("cuda", arch, Asked(group), size, cuda_works=works) for size in sizes}
