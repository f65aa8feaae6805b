"""A stand-in for libcuda that reads what a launch hands over, and a kernel as Triton leaves it compiled."""

from __future__ import annotations

import ctypes
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

CTYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float, "*": ctypes.c_uint64}
PTX = {"i32": ".u32", "i64": ".u64", "fp32": ".f32", "*": ".u64 .ptr .global .align 1"}
FUNCTION = 0x7F0000001230

SIGNATURE = {
    "q_ptr": "*bf16", "scale": "fp32", "BEFORE": "constexpr", "table_ptr": "*i32", "count": "i32",
    "one": "constexpr", "stride": "i64", "eps": "fp32", "AFTER": "constexpr",
}  # fmt: skip
REST = {"BEFORE": None, "table_ptr": 2**47 + 8, "count": -5, "one": 1, "stride": 2**40, "eps": 0.5, "AFTER": True}


class Words(ctypes.Structure):
    """CUlaunchConfig as 32-bit words, apart from its two pointers: written out here once more, by hand."""

    _fields_ = (("words", ctypes.c_uint32 * 8), ("stream", ctypes.c_uint64), ("attributes", ctypes.c_uint64),
                ("num_attributes", ctypes.c_uint32))  # fmt: skip


@dataclass
class Seen:
    """One launch as the driver sees it."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    attributes: list[tuple[int, int]]
    function: int
    values: list[Any]


@dataclass
class FakeDriver:
    """Keeps every launch, whose parameters have these types of Triton's, and answers with the next of `codes`.

    `meanwhile` is called once, between a launch's arrival and the reading of its parameters.
    """

    types: Sequence[str]
    codes: list[int] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    current: list[int] = field(default_factory=list)
    meanwhile: Callable[[], None] | None = None
    on_launch: Callable[[Seen], None] | None = None

    def __post_init__(self) -> None:
        pointer = ctypes.c_void_p
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)(self._launch)

    def _launch(self, config_at: int, function: int, params_at: int, extra: int | None) -> int:
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        config = Words.from_address(config_at)
        params = (ctypes.c_uint64 * len(self.types)).from_address(params_at)
        attributes = [
            tuple((ctypes.c_uint32 * 18).from_address(config.attributes + 72 * at)[0:3:2])
            for at in range(config.num_attributes)
        ]
        values = [CTYPES[kind].from_address(at).value for kind, at in zip(self.types, params, strict=True)]
        words = tuple(config.words)
        seen = Seen(words[:3], words[3:6], words[6], config.stream, attributes, function, values)
        assert extra is None
        if self.on_launch is None:
            self.seen.append(seen)
        else:
            self.on_launch(seen)
        return self.codes.pop(0) if self.codes else 0

    def cuGetErrorString(self, code: int, words: Any) -> int:
        words._obj.value = b"an illegal memory access was encountered"
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 1000 + device.value
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.current.append(context.value)
        return 0


def passed(signature: dict[str, str]) -> list[str]:
    """Types of what a launch passes, the two scratch pointers included."""
    return ["*" if kind.startswith("*") else kind for kind in signature.values() if kind != "constexpr"] + ["*", "*"]


def ptx_of(signature: dict[str, str], name: str = "some_kernel") -> str:
    params = ",\n".join(
        f"\t.param {PTX.get(kind, '.u32')} {name}_param_{at}" for at, kind in enumerate(passed(signature))
    )
    return f"// @{name}\n.visible .entry {name}(\n{params}\n)\n.reqntid 128\n{{\n\tret;\n}}\n"


def compiled_kernel(signature: dict[str, str] = SIGNATURE, ptx: str | None = None, **metadata: Any) -> Any:
    """What `pack` reads of a compiled kernel; metadata that is None is left out."""
    facts = {
        "num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0,
        "profile_scratch_size": 0, "num_warps": 4, "shared": 81920, **metadata,
    }  # fmt: skip
    facts = {name: value for name, value in facts.items() if value is not None}
    return SimpleNamespace(
        name="some_kernel", function=FUNCTION, src=SimpleNamespace(signature=signature),
        asm={"ptx": ptx_of(signature) if ptx is None else ptx},
        metadata=namedtuple("KernelMetadata", facts)(**facts),
        packed_metadata=(facts["num_warps"], facts["num_ctas"], facts["shared"]),
    )  # fmt: skip
