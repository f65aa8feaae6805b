"""A packed launch hands the driver what Triton's launcher would, and there is none where it might not."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from fake_driver import FUNCTION, REST, SIGNATURE, FakeDriver, Seen, compiled_kernel, passed, ptx_of

from treeattn import driver
from treeattn.kernels.packed import PackedLaunch, pack, parameters

GRID, LEADING, STREAM = (132, 2, 3), ["q_ptr", "scale"], 0x5500000000A0
DEVICE = 3


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver(passed(SIGNATURE))
    monkeypatch.setattr(driver, "driver", lambda: fake)
    driver._primary_context.cache_clear()
    return fake


def packed(compiled: Any = None, grid: tuple[int, ...] = GRID, leading: list[str] = LEADING) -> PackedLaunch | None:
    return pack(compiled or compiled_kernel(), grid, DEVICE, leading, REST)


def test_the_driver_gets_every_argument_in_its_place(fake: FakeDriver) -> None:
    launch = packed()
    assert launch is not None
    launch.launch(STREAM, (2**47 + 16, 0.25))
    assert fake.seen == [
        Seen(
            grid=(132, 2, 3), block=(128, 1, 1), shared_bytes=81920, stream=STREAM, attributes=[], function=FUNCTION,
            values=[2**47 + 16, 0.25, 2**47 + 8, -5, 2**40, 0.5, 0, 0],
        )
    ]  # fmt: skip
    launch.launch(0, (0, -1.5))  # the default stream, and a tensor that there is not
    assert (fake.seen[1].stream, fake.seen[1].values[:3]) == (0, [0, -1.5, 2**47 + 8])


def test_pdl_is_an_attribute_of_the_launch(fake: FakeDriver) -> None:
    launch = packed(compiled_kernel(launch_pdl=True, num_warps=1))
    assert launch is not None
    launch.launch(STREAM, (0, 0.0))
    assert fake.seen[0].attributes == [(6, 1)]
    assert fake.seen[0].block == (32, 1, 1)


def test_a_replaced_number_stays(fake: FakeDriver) -> None:
    launch = packed()
    assert launch is not None
    launch.replace("count", 7)
    for _ in range(2):
        launch.launch(STREAM, (1, 1.0))
        assert fake.seen.pop().values == [1, 1.0, 2**47 + 8, 7, 2**40, 0.5, 0, 0]


SCRATCHLESS = ptx_of(SIGNATURE).rsplit(",", 1)[0] + "\n)\n{}"
NOT_DIRECT = {
    "clusters": compiled_kernel(num_ctas=2),
    "cooperative": compiled_kernel(launch_cooperative_grid=True),
    "global-scratch": compiled_kernel(global_scratch_size=128),
    "profile-scratch": compiled_kernel(profile_scratch_size=128),
    "oversized-shared": compiled_kernel(shared=228 * 1024 + 1),
    "unknown-metadata": compiled_kernel(launch_pdl=None),
    "other-scratch-abi": compiled_kernel(profile_scratch_size=None),
    "a-launcher-that-goes-by-more": compiled_kernel(),
    "bool": compiled_kernel(SIGNATURE | {"eps": "i1"}),
    "descriptor": compiled_kernel(SIGNATURE | {"eps": "tensordesc<fp16[16, 16]>"}),
    "tuple": compiled_kernel(ptx=ptx_of(SIGNATURE)),
    "no-ptx": compiled_kernel(ptx=""),
    "another-kernel": compiled_kernel(ptx=ptx_of(SIGNATURE, "some_kernel_2")),
    "one-scratch-pointer": compiled_kernel(ptx=SCRATCHLESS),
    "one-parameter-more": compiled_kernel(ptx=ptx_of({**SIGNATURE, "more": "i32"})),
    "32-bit-for-64": compiled_kernel(ptx=ptx_of(SIGNATURE | {"stride": "i32"})),
    "float-for-integer": compiled_kernel(ptx=ptx_of(SIGNATURE | {"count": "fp32"})),
    "aggregate": compiled_kernel(ptx=ptx_of(SIGNATURE).replace(".param .f32", ".param .align 4 .b8", 1)),
}
NOT_DIRECT["a-launcher-that-goes-by-more"].packed_metadata += (1, 1, 1)
NOT_DIRECT["tuple"].src.signature = SIGNATURE | {"eps": ("fp32", "i32")}


@pytest.mark.parametrize("name", NOT_DIRECT)
def test_what_is_not_passed_for_sure_is_left_to_triton(name: str, fake: FakeDriver) -> None:
    assert packed(NOT_DIRECT[name]) is None


def test_an_empty_grid_and_a_constant_that_a_call_brings_are_left_to_triton(fake: FakeDriver) -> None:
    assert packed(grid=(132, 0, 1)) is None
    assert packed(leading=["q_ptr", "scale", "BEFORE"]) is None


@pytest.mark.parametrize(
    ("old", "new"), [(" .ptr .global .align 1", ""), (".global ", ""), (".u", ".b"), (".u32", ".s32"), (".f32", ".b32")]
)
def test_other_words_of_ptx_for_the_same(old: str, new: str, fake: FakeDriver) -> None:
    assert packed(compiled_kernel(ptx=ptx_of(SIGNATURE).replace(old, new))) is not None


def test_parameters_are_those_of_the_named_entry() -> None:
    ptx = ".visible .entry ab(.param .u64 x)\n{}\n.visible .entry a(\n.param .u32 y,\n.param .align 8 .f64 z\n)\n{}"
    assert parameters(ptx, "a") == ["u32", "f64"]
    assert parameters(ptx, "b") == []


def test_the_words_of_the_driver_are_raised(fake: FakeDriver) -> None:
    launch = packed()
    assert launch is not None
    fake.codes = [700]
    with pytest.raises(driver.DriverError, match=r"launch of some_kernel: an illegal memory access .* \(700\)"):
        launch.launch(STREAM, (1, 1.0))
    launch.launch(STREAM, (1, 1.0))


def test_a_thread_without_a_context_gets_that_of_the_device(fake: FakeDriver) -> None:
    launch = packed()
    assert launch is not None
    fake.codes = [driver.INVALID_CONTEXT]
    launch.launch(STREAM, (1, 1.0))
    assert fake.current == [1000 + DEVICE]
    assert fake.seen[0] == fake.seen[1]


def test_a_launch_during_a_launch_has_arguments_of_its_own(fake: FakeDriver) -> None:
    launch = packed()
    assert launch is not None

    def other_thread() -> None:
        thread = threading.Thread(target=launch.launch, args=(2, (2, 2.0)))
        thread.start()
        thread.join()

    launch.launch(3, (3, 3.0))
    fake.meanwhile = other_thread
    launch.launch(1, (1, 1.0))
    assert [(seen.stream, *seen.values[:3]) for seen in fake.seen] == [
        (3, 3, 3.0, 2**47 + 8), (2, 2, 2.0, 2**47 + 8), (1, 1, 1.0, 2**47 + 8)
    ]  # fmt: skip


def test_a_number_replaced_during_a_launch_holds_for_the_next(fake: FakeDriver) -> None:
    launch = packed()
    assert launch is not None
    fake.meanwhile = lambda: launch.replace("count", 7)
    launch.launch(1, (1, 1.0))
    launch.launch(1, (1, 1.0))
    assert [seen.values[3] for seen in fake.seen] == [-5, 7]


def test_threads_that_share_a_launch_do_not_mix_their_arguments(fake: FakeDriver) -> None:
    launch = packed()
    assert launch is not None
    mixed, calls = [], 1000

    def compare(seen: Seen) -> None:
        if not seen.stream == seen.values[0] == seen.values[1]:
            mixed.append(seen)

    def call(number: int) -> None:
        for _ in range(calls):
            launch.launch(number, (number, float(number)))

    fake.on_launch = compare
    threads = [threading.Thread(target=call, args=(number,)) for number in range(1, 9)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert mixed == []
