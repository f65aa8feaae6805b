"""The few calls of the CUDA driver that launching needs, through ctypes: no ABI of torch or of the runtime.

Everything happens in the context that is current, which torch has made for its current device.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


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
    pointer = ctypes.c_void_p
    library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    library.cuLaunchKernelEx.argtypes = [pointer, pointer, pointer, pointer]
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
