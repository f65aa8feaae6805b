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
from ..cuda import config as cuda
from ..geometry import Geometry, Part
from ..kv import PagedKV, cache_strides
from ..layout import TreeLayout
from ..plan import PlanBuffers, Step
from ..scoring import Scoring
from .launch import Launch, LayerLaunch, finish_leading, plan_launch

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
    offsets inside a request that pass 2^31; ``alike`` are K and V caches of the same strides. The last ones are options
    of attention, ``scaled`` for scales on the device.
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
    head_dim_v: int | None = None
    shared_kv: bool = False
    kv_heads: int = KV_HEADS
    kv_dtype: torch.dtype | None = None
    window_left: int = -1
    part: Part = "all"
    cap: float = 0.0
    sinks: bool = False
    scaled: bool = False
    backend: str = "triton"


SCATTERED = Call()
"""An address for each key, offsets for each node, and a bound on the head dim."""

PAGED = Call(page_size=64, csr=False, tree_kv="fresh", negate=False, unused=0)
"""A page holds a tile; the nodes' K and V come with the call."""


OPTION_CALLS = (
    ("gpt-oss", 64, dataclasses.replace(PAGED, group=8, q_len=17, window_left=128, sinks=True)),
    ("gemma", 256, dataclasses.replace(PAGED, group=2, q_len=17, window_left=1024, cap=50.0, tree_kv="table")),
    ("fp8", 128, dataclasses.replace(PAGED, kv_dtype=torch.float8_e4m3fn, scaled=True, q_len=17)),
    ("fp8-slots", 128, dataclasses.replace(SCATTERED, kv_dtype=torch.float8_e5m2, scaled=True, q_len=17)),
    ("unlike-dims", 192, dataclasses.replace(PAGED, head_dim_v=128, q_len=17)),
    ("tree-part", 128, dataclasses.replace(PAGED, part="tree", q_len=17)),
    ("mla", 576, dataclasses.replace(PAGED, head_dim_v=512, shared_kv=True, group=8, q_len=17)),
    ("mla-fp8", 576, dataclasses.replace(SCATTERED, head_dim_v=512, shared_kv=True, group=16, q_len=17,
                                         kv_dtype=torch.float8_e4m3fn, scaled=True)),
)  # fmt: skip
"""Name, head_dim and options of what models have: a window with sinks, a soft cap, FP8, MLA."""


def compile_cases(arch: int) -> Iterator[Case]:
    """Cases for a chip, by compute capability times ten; names are unique."""
    for dtype in (torch.bfloat16, torch.float32):
        for config in configurations(arch, dtype):
            # a quarter of the dims at most: with half of them the kernel would be that of the next narrower tile
            scattered = dataclasses.replace(SCATTERED, unused=min(SCATTERED.unused, config.block_d // 4))
            yield attention_case(arch, config, dtype, scattered, "scattered")
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
    for name, dim, call in OPTION_CALLS:
        config = select_config(
            arch, torch.bfloat16, call.group, dim, call.q_len, head_dim_v=call.head_dim_v, shared_kv=call.shared_kv,
            kv_dtype=call.kv_dtype,
        )  # fmt: skip
        call = dataclasses.replace(call, unused=config.block_d - dim)
        yield attention_case(arch, config, torch.bfloat16, call, name)
        launch, leading = _layer(arch, config, torch.bfloat16, call)
        yield _case(f"finish-{name}", launch.finish, finish_leading(leading))
        yield _case(f"plan-{name}", plan_launch(_step(config, torch.bfloat16, call)), ())
    for name, batch, csr in (("plan-csr-64", 64, True), ("plan-table-4096", 4096, False)):
        call = dataclasses.replace(PAGED, batch=batch, q_len=17, csr=csr)
        yield _case(name, plan_launch(_step(common, torch.bfloat16, call)), ())
    for part in ("all", "tree"):  # Triton 3.6 had crashed on plans of these, with one KV head alone
        call = dataclasses.replace(PAGED, batch=32, q_len=64, kv_heads=1, tree_kv="table", part=part)
        yield _case(f"plan-one-head-{part}", plan_launch(_step(common, torch.bfloat16, call)), ())
    for name, dtype, dim, batch, q_len in (
        ("finish-items", torch.bfloat16, 128, 1, 17),
        ("finish-boundaries", torch.bfloat16, 128, 64, 65),
        ("finish-256", torch.float32, 256, 64, 65),
    ):
        config = select_config(arch, dtype, 4, dim, q_len)
        launch, leading = _layer(arch, config, dtype, dataclasses.replace(SCATTERED, batch=batch, q_len=q_len))
        yield _case(name, launch.finish, finish_leading(leading))
    if arch == cuda.ARCH:  # plan and merge of the cuda backend
        for name, batch, q_len, kv_dtype in (
            ("items", 1, 17, None), ("boundaries", 64, 65, None), ("fp8", 64, 17, torch.float8_e4m3fn),
        ):  # fmt: skip
            call = dataclasses.replace(PAGED, batch=batch, q_len=q_len, backend="cuda", kv_dtype=kv_dtype)
            geometry = Geometry.of(KV_HEADS * call.group, KV_HEADS, 128, kv_dtype=kv_dtype)
            config = cuda.cuda_config(geometry, q_len)
            launch, leading = _layer(arch, config, torch.bfloat16, call)
            yield _case(f"finish-cuda-{name}", launch.finish, finish_leading(leading))
            yield _case(f"plan-cuda-{name}", plan_launch(_step(config, torch.bfloat16, call)), ())


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
    dim_v = call.head_dim_v or head_dim
    programs = SMS * config.programs_per_sm
    buffers = PlanBuffers.allocate(call.batch, programs, config, dim_v, META)
    heads = 1 if call.shared_kv else call.kv_heads
    return Step(
        num_qo_heads=heads * call.group, num_kv_heads=heads, head_dim=head_dim, head_dim_v=dim_v, dtype=dtype,
        kv_dtype=call.kv_dtype or dtype, fresh_tree=call.tree_kv == "fresh", shared_kv=call.shared_kv,
        window_left=call.window_left, part=call.part, layout=layout, kv=kv, backend=call.backend, config=config,
        num_programs=programs, buffers=buffers,
    )  # fmt: skip


def _layer(arch: int, config: KernelConfig, dtype: torch.dtype, call: Call) -> tuple[LayerLaunch, tuple[Any, ...]]:
    """The launches of a layer call, and the leading arguments of its attention kernel."""
    step = _step(config, dtype, call)
    rows, dim, dim_v, heads = step.layout.total_q, step.head_dim, step.head_dim_v, step.num_qo_heads
    # a row of q that is a slice of something huge
    held = 2**31 // (call.q_len * dim) + 1 if call.wide else heads
    q, out = (_empty(rows, held, d, dtype=dtype)[:, :heads] for d in (dim, dim_v))
    fresh = call.tree_kv == "fresh"
    k_tree, v_tree = (_empty(rows, step.num_kv_heads, d, dtype=dtype) if fresh else None for d in (dim, dim_v))
    k_cache, v_cache = (_empty(64, call.page_size, step.num_kv_heads, d, dtype=step.kv_dtype) for d in (dim, dim_v))
    strides = cache_strides(k_cache, call.page_size, "NHD", "k_cache")
    of_v = strides if call.shared_kv else cache_strides(v_cache, call.page_size, "NHD", "v_cache")
    of_v = of_v if call.alike else tuple(2 * stride for stride in of_v)
    lse = _empty(rows, heads, dtype=torch.float32) if call.lse else None
    scale = _empty(step.num_kv_heads, dtype=torch.float32) if call.scaled else 1.0
    sinks = _empty(heads, dtype=torch.float32) if call.sinks else None
    scoring = Scoring(-1.0 if call.negate else 1.0, call.cap, sinks, scale, scale)
    if call.shared_kv:
        v_cache, v_tree = None, None
    launch = LayerLaunch(
        step, q, k_tree, v_tree, out, lse, scoring, cache_strides=(*strides, *of_v), zero_tail=True, arch=arch
    )
    return launch, launch.leading(q, k_cache, v_cache, k_tree, v_tree, out, lse, scoring)
