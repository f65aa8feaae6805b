"""Every attention, plan and finish kernel that ships, as it is launched, for tests that compile it for absent chips.

A case is taken from the launch code itself: a step and a layer call are made of tensors on the meta device, and the
arguments of their launches become the signature. Which tiles there are is asked of :func:`treeattn.select_config` over
all geometries, so a new branch there is a new case here. A distinct configuration appears once a chip with the options
that cost it most registers, those of head dims 64 and 128 twice; the other options appear once a chip. The layout and
verify kernels, whose blocks do not depend on the chip, have their own list in ``tests/compile``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import KernelConfig, select_config
from ..kv import PagedKV, cache_strides
from ..layout import TreeLayout
from ..plan import PlanBuffers, Step
from .launch import Launch, LayerLaunch, plan_launch

META = torch.device("meta")
SMS = 132
KV_HEADS = 8
HEAD_DIMS = (16, 32, 64, 128, 256)
Q_LENS = tuple(2**k + one for k in range(11) for one in (0, 1))  # with a group of 1: both sides of any power of two


class Case(NamedTuple):
    """A kernel in one configuration: what ``compile_for`` takes, and how many such programs share a multiprocessor."""

    name: str
    kernel: Any
    signature: dict[str, Any]
    options: dict[str, Any]
    programs_per_sm: int = 1


@dataclasses.dataclass(frozen=True)
class Call:
    """What the kernels compile in of a step and a layer call, beside their configuration.

    ``unused`` is how far ``head_dim`` is below ``block_d``; ``tree_kv`` where the nodes' K and V are; ``wide`` asks for
    offsets inside a request that pass 2^31; ``alike`` are K and V caches of the same strides.
    """

    page_size: int = 1
    csr: bool = True
    tree_kv: str = "slots"
    lse: bool = True
    negate: bool = True
    unused: int = 16
    wide: bool = False
    alike: bool = True
    group: int = 4
    batch: int = 64
    q_len: int = 65


SCATTERED = Call()
"""An address for each key, offsets for each node, and a bound on the head dim."""

PAGED = Call(page_size=64, csr=False, tree_kv="fresh", negate=False, unused=0)
"""A page holds a tile; the nodes' K and V come with the call."""


def compile_cases(arch: int) -> Iterator[Case]:
    """Cases for a chip, by compute capability times ten; names are unique."""
    for dtype in (torch.bfloat16, torch.float32):
        for config in configurations(arch, dtype):
            yield attention_case(arch, config, dtype, SCATTERED, "scattered")
            if dtype == torch.bfloat16 and config.block_d in (64, 128):
                yield attention_case(arch, config, dtype, PAGED, "paged")
    common = select_config(arch, torch.bfloat16, 4, 128, 16)
    for name, call in {
        "wide": Call(wide=True, unused=0),
        "unlike-strides": dataclasses.replace(PAGED, alike=False),
        "group-3": Call(group=3, page_size=16, csr=False, tree_kv="table", lse=False),
    }.items():
        yield attention_case(arch, common, torch.bfloat16, call, name)
    yield attention_case(arch, common, torch.float16, PAGED, "float16")
    for name, batch, csr in (("plan-csr-64", 64, True), ("plan-table-4096", 4096, False)):
        call = dataclasses.replace(PAGED, batch=batch, q_len=17, csr=csr)
        yield _case(name, plan_launch(_step(common, torch.bfloat16, call)), ())
    for name, dtype, dim, batch, q_len in (
        ("finish-items", torch.bfloat16, 128, 1, 17),
        ("finish-boundaries", torch.bfloat16, 128, 64, 65),
        ("finish-256", torch.float32, 256, 64, 65),
    ):
        config = select_config(arch, dtype, 4, dim, q_len)
        launch, leading = _layer(arch, config, dtype, dataclasses.replace(SCATTERED, batch=batch, q_len=q_len))
        yield _case(name, launch.finish, leading[5:7])


def configurations(arch: int, dtype: torch.dtype) -> list[KernelConfig]:
    """Each configuration that `select_config` has for a chip and a dtype, once whatever the reason."""
    found = (select_config(arch, dtype, 1, dim, q_len) for dim in HEAD_DIMS for q_len in Q_LENS)
    return list(dict.fromkeys(dataclasses.replace(config, reason="") for config in found))


def attention_case(arch: int, config: KernelConfig, dtype: torch.dtype, call: Call, what: str) -> Case:
    """The attention kernel of a configuration, named by its tile and launch shape."""
    shape = f"d{config.block_d}-m{config.block_m}-n{config.block_n}-w{config.num_warps}-s{config.num_stages}"
    kind = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    launch, leading = _layer(arch, config, dtype, call)
    case = _case(f"attention-{kind}-{shape}-{what}", launch.attention, leading)
    return case._replace(programs_per_sm=config.programs_per_sm)


def _case(name: str, launch: Launch, leading: tuple[Any, ...]) -> Case:
    given = dict(zip(launch.kernel.arg_names, leading, strict=False)) | launch.arguments
    signature = {key: value.dtype if isinstance(value, Tensor) else value for key, value in given.items()}
    return Case(name, launch.kernel, signature, launch.options)


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _step(config: KernelConfig, dtype: torch.dtype, call: Call) -> Step:
    """A step as `prepare_step` makes it, of a chip with :data:`SMS` multiprocessors."""
    layout = TreeLayout.allocate(call.batch, call.q_len, device=META)
    slots = _empty(layout.total_q) if call.tree_kv == "slots" else None
    if call.csr:
        addresses = {"kv_indptr": _empty(call.batch + 1), "kv_indices": _empty(4096)}
    else:
        addresses = {"block_table": _empty(call.batch, 1024)}
    kv = PagedKV(page_size=call.page_size, tree_slots=slots, **addresses)
    head_dim = max(config.block_d - call.unused, 16)
    programs = SMS * config.programs_per_sm
    buffers = PlanBuffers.allocate(call.batch, programs, config, head_dim, META)
    geometry = {"num_qo_heads": KV_HEADS * call.group, "num_kv_heads": KV_HEADS, "head_dim": head_dim}
    return Step(
        **geometry, head_dim_v=head_dim, dtype=dtype, kv_dtype=dtype, fresh_tree=call.tree_kv == "fresh", layout=layout,
        kv=kv, backend="triton", config=config, num_programs=programs, buffers=buffers,
    )  # fmt: skip


def _layer(arch: int, config: KernelConfig, dtype: torch.dtype, call: Call) -> tuple[LayerLaunch, tuple[Any, ...]]:
    """The launches of a layer call, and the leading arguments of its attention kernel."""
    step = _step(config, dtype, call)
    rows, dim, heads = step.layout.total_q, step.head_dim, step.num_qo_heads
    # a row of q that is a slice of something huge
    held = 2**31 // (call.q_len * dim) + 1 if call.wide else heads
    q, out = (_empty(rows, held, dim, dtype=dtype)[:, :heads] for _ in range(2))
    fresh = call.tree_kv == "fresh"
    k_tree, v_tree = (_empty(rows, KV_HEADS, dim, dtype=dtype) if fresh else None for _ in range(2))
    cache = _empty(64, call.page_size, KV_HEADS, dim, dtype=dtype)
    strides = cache_strides(cache, call.page_size, "NHD", "k_cache")
    of_v = strides if call.alike else tuple(2 * stride for stride in strides)
    lse = _empty(rows, heads, dtype=torch.float32) if call.lse else None
    launch = LayerLaunch(
        step, q, k_tree, v_tree, out, lse, cache_strides=(*strides, *of_v), negate=call.negate, zero_tail=True,
        arch=arch,
    )  # fmt: skip
    return launch, launch.leading(q, cache, cache, k_tree, v_tree, out, lse, 1.0)
