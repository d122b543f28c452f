"""Calls of CUDA's driver that PyTorch lacks: streams that write a value to memory, or wait for one."""

from __future__ import annotations

import ctypes
from typing import Any, Callable, Optional

import torch

_REGISTER_FLAGS = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: (int32_t)(*address - value) >= 0
# CU_STREAM_WRITE_VALUE_DEFAULT: all that the stream wrote before is visible to others first.
_WITH_BARRIER = 0

_pointer, _integer = ctypes.c_void_p, ctypes.c_uint
# CUDA 11.7 made the second versions of the stream's calls. The first ones are disabled by default.
_CALLS: dict[str, tuple[Any, ...]] = {
    "cuDeviceGet": (_pointer, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_pointer, ctypes.c_int),
    "cuCtxSetCurrent": (_pointer,),
    "cuMemHostRegister_v2": (_pointer, ctypes.c_size_t, _integer),
    "cuMemHostGetDevicePointer_v2": (_pointer, _pointer, _integer),
    "cuStreamWriteValue32_v2": (_pointer, ctypes.c_uint64, ctypes.c_uint32, _integer),
    "cuStreamWaitValue32_v2": (_pointer, ctypes.c_uint64, ctypes.c_uint32, _integer),
}


def driver_of(device: torch.device) -> Optional[CudaDriver]:
    """The driver of a CUDA device; None if it lacks one of the calls, or the device is of another kind."""
    if torch.version.cuda is None:
        return None
    try:
        return CudaDriver(ctypes.CDLL("libcuda.so.1"), device.index or 0)
    except (OSError, AttributeError):
        return None


class CudaDriver:
    """The calls for one device of this process, which has a context on it already. Each raises a RuntimeError
    if the driver refuses.
    """

    def __init__(self, library: Any, device: int) -> None:
        self._calls: dict[str, Callable[..., int]] = {}
        for name, arguments in _CALLS.items():
            call = getattr(library, name)
            call.argtypes, call.restype = arguments, ctypes.c_int
            self._calls[name] = call
        number, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)

    def _call(self, name: str, *arguments: Any) -> None:
        error = self._calls[name](*arguments)
        if error != 0:
            raise RuntimeError(f"{name} failed with error {error} of CUDA's driver")

    def _use(self) -> None:
        # CUDA's runtime makes the context current on a thread with its first call, the driver does not.
        self._call("cuCtxSetCurrent", self._context)

    def register(self, address: int, size: int) -> int:
        """Lets the device use memory of the host, for good; returns its address on the device."""
        self._use()
        self._call("cuMemHostRegister_v2", address, size, _REGISTER_FLAGS)
        found = ctypes.c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), address, 0)
        return found.value

    def write(self, stream: Any, address: int, value: int) -> None:
        """The stream writes a value of 32 bits when it has done the work queued so far."""
        self._use()
        self._call("cuStreamWriteValue32_v2", stream.cuda_stream, address, value, _WITH_BARRIER)

    def wait(self, stream: Any, address: int, value: int) -> None:
        """The stream waits until the value in memory has reached `value`; see `values.reached`."""
        self._use()
        self._call("cuStreamWaitValue32_v2", stream.cuda_stream, address, value, _AT_LEAST)
