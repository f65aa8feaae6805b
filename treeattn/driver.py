"""The few calls of the CUDA driver that loading and launching need, through ctypes: no ABI of torch or of the runtime.

Everything happens in the context that is current, which torch has made for its current device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SHARED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
LOCAL_BYTES = 3  # CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
UINT8, FLOAT16, BFLOAT16 = 0, 6, 9  # CU_TENSOR_MAP_DATA_TYPE_*
NO_INTERLEAVE, SWIZZLE_128B, FILL_ZERO = 0, 3, 0  # CU_TENSOR_MAP_*
PROMOTE_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


class DriverError(RuntimeError):
    """A driver call failed; the message has its name and the driver's words."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a union of 64 bytes that starts with the number."""

    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint64), ("rest_of_union", ctypes.c_uint64 * 7))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: blocks of the grid, threads of a block, dynamic shared memory in bytes, stream, attributes."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


@cache
def driver() -> Any:
    """Libcuda with the types of what is used.

    Raises
    ------
    DriverError
        If there is none.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"no CUDA driver: {error}") from error
    pointer, unsigned = ctypes.c_void_p, ctypes.c_uint
    library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    library.cuLaunchKernelEx.argtypes = [pointer, pointer, pointer, pointer]
    library.cuModuleLoadData.argtypes = [ctypes.POINTER(pointer), ctypes.c_char_p]
    library.cuModuleGetFunction.argtypes = [ctypes.POINTER(pointer), pointer, ctypes.c_char_p]
    library.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    library.cuFuncGetAttribute.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int, pointer]
    library.cuOccupancyMaxActiveBlocksPerMultiprocessor.argtypes = [
        ctypes.POINTER(ctypes.c_int), pointer, ctypes.c_int, ctypes.c_size_t,
    ]  # fmt: skip
    library.cuTensorMapEncodeTiled.argtypes = [
        pointer, ctypes.c_int, unsigned, pointer, *[ctypes.c_void_p] * 4, *[ctypes.c_int] * 4,
    ]  # fmt: skip
    library.cuDeviceGet.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int]
    library.cuDevicePrimaryCtxRetain.argtypes = [ctypes.POINTER(pointer), ctypes.c_int]
    library.cuCtxSetCurrent.argtypes = [pointer]
    return library


def check(name: str, code: int) -> None:
    """Raise what a driver call said."""
    if code != 0:
        words = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(words))
        raise DriverError(f"{name}: {(words.value or b'unknown error').decode()} ({code})")


@cache
def _primary_context(device_index: int) -> ctypes.c_void_p:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check("cuDeviceGet", driver().cuDeviceGet(ctypes.byref(device), device_index))
    check("cuDevicePrimaryCtxRetain", driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    return context


def make_current(device_index: int) -> None:
    """Give this thread the context that torch uses: a thread whose first CUDA call is a launch of ours has none."""
    check("cuCtxSetCurrent", driver().cuCtxSetCurrent(_primary_context(device_index)))


def encode_tensor_map(
    to: Any, dtype: int, address: int, shape: Sequence[int], byte_strides: Sequence[int], box: Sequence[int]
) -> None:
    """Write the tensor map of a tensor to `to`, for boxes of it in the 128-byte swizzle; out of bounds is 0.

    Parameters
    ----------
    to : ctypes structure of 128 bytes, at a multiple of 64
    dtype : int
        `UINT8`, `FLOAT16` or `BFLOAT16`.
    address : int
        Multiple of 16.
    shape, box : sequence of int
        The innermost axis first.
    byte_strides : sequence of int
        Of all axes but the innermost; multiples of 16.
    """
    rank = len(shape)
    check(
        "cuTensorMapEncodeTiled",
        driver().cuTensorMapEncodeTiled(
            ctypes.byref(to), dtype, rank, address, (ctypes.c_uint64 * rank)(*shape),
            (ctypes.c_uint64 * (rank - 1))(*byte_strides), (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank), NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_128B, FILL_ZERO,
        ),
    )  # fmt: skip


class Module:
    """A cubin, loaded in the current context for as long as the process lives."""

    def __init__(self, cubin: bytes) -> None:
        self.handle = ctypes.c_void_p()
        check("cuModuleLoadData", driver().cuModuleLoadData(ctypes.byref(self.handle), cubin))

    def function(self, name: str, shared_bytes: int) -> Function:
        """A kernel, ready to launch."""
        return Function(self, name, shared_bytes)


class Function:
    """A kernel of a module, with so much dynamic shared memory."""

    def __init__(self, module: Module, name: str, shared_bytes: int) -> None:
        self.name, self.shared_bytes, self.handle = name, shared_bytes, ctypes.c_void_p()
        check(
            f"cuModuleGetFunction({name})",
            driver().cuModuleGetFunction(ctypes.byref(self.handle), module.handle, name.encode()),
        )
        check(
            f"{shared_bytes} bytes of shared memory for {name}",
            driver().cuFuncSetAttribute(self.handle, MAX_DYNAMIC_SHARED, shared_bytes),
        )
        # two blocks of 113 KiB need all 228 KiB of a multiprocessor
        check(f"the carveout of {name}", driver().cuFuncSetAttribute(self.handle, SHARED_CARVEOUT, 100))

    def attribute(self, which: int) -> int:
        """Such as `LOCAL_BYTES`."""
        value = ctypes.c_int()
        check("cuFuncGetAttribute", driver().cuFuncGetAttribute(ctypes.byref(value), which, self.handle))
        return value.value

    def blocks_per_sm(self, threads: int) -> int:
        """Blocks of so many threads that run on a multiprocessor at once."""
        count, occupancy = ctypes.c_int(), driver().cuOccupancyMaxActiveBlocksPerMultiprocessor
        check("cuOccupancy", occupancy(ctypes.byref(count), self.handle, threads, self.shared_bytes))
        return count.value
