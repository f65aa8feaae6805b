"""Shipped kernels, as this Triton compiles them, are launched directly, and the driver gets each argument in its place.

The kernels are real, the driver is not; the class that chooses the way is used as it is.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from fake_driver import FUNCTION, REST, SIGNATURE, FakeDriver, compiled_kernel, passed

from treeattn import driver
from treeattn.kernels import catalogue
from treeattn.kernels.launch import Launch
from treeattn.kernels.packed import pack
from treeattn.testing.compile_matrix import compile_kernel

STREAM = 0x5500000000A0
LEADING = {"attention": 12, "finish": 3, "plan": 0}
"""Arguments that a call brings, as LayerLaunch and launch_plan do."""

CASES = {
    f"sm_{arch}/{case.name}": (arch, case)
    for arch in (90, 120)
    for case in catalogue.compile_cases(arch)
    if case.name in ("plan-csr-64", "finish-items", "finish-gpt-oss") or case.name.endswith(("s3-fp8", "-wide", "-mla"))
}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver(passed(SIGNATURE))
    monkeypatch.setattr(driver, "driver", lambda: fake)
    for name, answer in (("_cuda_getDevice", lambda: 0), ("_cuda_getCurrentRawStream", lambda index: STREAM + index)):
        monkeypatch.setattr(torch._C, name, answer, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return fake


@pytest.mark.parametrize("case_id", CASES)
def test_shipped_kernels_are_launched_directly(case_id: str, fake: FakeDriver) -> None:
    arch, case = CASES[case_id]
    compiled, _ = compile_kernel(arch, case.kernel, case.signature, **case.options)
    compiled.function = FUNCTION
    fake.types = passed(compiled.src.signature)
    numbers = {"*": 2**47, "i32": 1000, "i64": 2**40, "fp32": 0.5}
    values = {name: numbers[kind[0] if kind[0] == "*" else kind] + at
              for at, (name, kind) in enumerate(compiled.src.signature.items()) if kind != "constexpr"}  # fmt: skip
    count = LEADING[case.kernel.__name__.removesuffix("_kernel")]
    names = case.kernel.arg_names
    launch = pack(compiled, (132, 1, 1), 0, names[:count], values)
    assert launch is not None
    launch.launch(STREAM, tuple(values.values())[:count])
    (seen,) = fake.seen
    assert seen.values == [*values.values(), 0, 0]
    assert (seen.grid, seen.stream, seen.function) == ((132, 1, 1), STREAM, FUNCTION)
    warps, _, shared = compiled.packed_metadata  # what Triton's launcher goes by
    assert (seen.block, seen.shared_bytes) == ((32 * warps, 1, 1), shared)
    assert seen.attributes == ([(6, 1)] if compiled.metadata.launch_pdl else [])
    if case.name.startswith("finish") and arch >= 90:
        assert compiled.metadata.launch_pdl


class Kernel:
    """Stands for a jitted function whose compilation gives `compiled`; keeps what it is called with."""

    arg_names = tuple(SIGNATURE)

    def __init__(self, compiled: Any) -> None:
        self.compiled, self.calls = compiled, []
        compiled.run = lambda *args: self.calls.append(args)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(**arguments: Any) -> Any:
            self.calls.append((grid, arguments))
            return self.compiled

        return run


def launch_of(compiled: Any, index: int = 0) -> tuple[Launch, Kernel]:
    kernel = Kernel(compiled)
    return Launch(kernel, (5,), torch.device("cuda", index), dict(REST), {"num_warps": 4}), kernel


def test_the_first_launch_is_by_triton_and_later_ones_are_direct(fake: FakeDriver) -> None:
    launch, kernel = launch_of(compiled_kernel())
    launch("a tensor", 0.25)
    assert kernel.calls == [((5, 1, 1), {"q_ptr": "a tensor", "scale": 0.25, **REST, "num_warps": 4})]
    assert fake.seen == []
    assert launch.direct is None  # a launch that is never repeated has not paid for it
    launch.replace("count", 9)
    launch(64, 0.5)
    assert len(kernel.calls) == 1
    assert fake.seen[0].values == [64, 0.5, 2**47 + 8, 9, 2**40, 0.5, 0, 0]
    assert (fake.seen[0].grid, fake.seen[0].stream) == ((5, 1, 1), STREAM)


def test_a_tensor_among_the_arguments_is_its_address(fake: FakeDriver) -> None:
    launch, _ = launch_of(compiled_kernel())
    launch.arguments["table_ptr"] = table = torch.zeros(3, dtype=torch.int32)
    launch("a tensor", 0.25)
    launch(64, 0.5)
    assert fake.seen[0].values[2] == table.data_ptr()


def test_a_kernel_that_is_not_packed_is_launched_by_triton(fake: FakeDriver) -> None:
    compiled = compiled_kernel(num_ctas=2)
    launch, kernel = launch_of(compiled)
    launch("a tensor", 0.25)
    launch.replace("count", 9)
    launch(64, 0.5)
    assert launch.direct is None
    rest = (None, 2**47 + 8, 9, 1, 2**40, 0.5, True)
    assert kernel.calls[1] == (5, 1, 1, STREAM, FUNCTION, (4, 2, 81920), None, None, None, 64, 0.5, *rest)
    assert fake.seen == []


def test_another_device_is_made_current_for_the_launch(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, _ = launch_of(compiled_kernel(), index=2)
    current = [0]

    @contextlib.contextmanager
    def device(index: Any) -> Any:
        current.append(torch.device("cuda", index).index if isinstance(index, int) else index.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1])
    launch("a tensor", 0.25)
    on: list[int] = []
    fake.on_launch = lambda seen: on.extend((current[-1], seen.stream))
    launch(64, 0.5)
    assert on == [2, STREAM + 2]
    assert current == [0]
