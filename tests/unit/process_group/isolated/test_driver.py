"""The calls of CUDA's driver, of which a stand-in for its library records the arguments."""

from __future__ import annotations

import ctypes
from typing import Any
from unittest.mock import patch

import pytest
import torch

from torchft.process_group.isolated import driver
from torchft.process_group.isolated.driver import CudaDriver, driver_of

STREAM = type("Stream", (), {"cuda_stream": 77})()


class Call:
    """A function of the library, which checks the types of its arguments as ctypes does."""

    def __init__(self, library: Library, name: str) -> None:
        self.library, self.name = library, name
        self.argtypes: tuple[Any, ...] = ()
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> int:
        assert len(arguments) == len(self.argtypes) and self.restype is ctypes.c_int
        for kind, argument in zip(self.argtypes, arguments):
            kind.from_param(argument)
        self.library.calls.append((self.name, *[a for a in arguments if isinstance(a, int)]))
        if self.name == "cuMemHostGetDevicePointer_v2":
            arguments[0]._obj.value = arguments[1] + (1 << 40)
        return 801 if self.name == self.library.refuses else 0  # CUDA_ERROR_NOT_SUPPORTED


class Library:
    def __init__(self, refuses: str = "", lacks: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuses, self.lacks = refuses, lacks

    def __getattr__(self, name: str) -> Call:
        if name == self.lacks:
            raise AttributeError(name)
        return Call(self, name)


def test_the_calls_have_the_arguments_of_the_driver() -> None:
    library = Library()
    made = CudaDriver(library, 3)
    assert made.register(4096, 64) == 4096 + (1 << 40)
    made.write(STREAM, 1 << 40, 5)
    made.wait(STREAM, 1 << 40, 6)
    assert [call for call in library.calls if call != ("cuCtxSetCurrent",)] == [
        ("cuDeviceGet", 3),
        ("cuDevicePrimaryCtxRetain",),
        ("cuMemHostRegister_v2", 4096, 64, 3),
        ("cuMemHostGetDevicePointer_v2", 4096, 0),
        ("cuStreamWriteValue32_v2", 77, 1 << 40, 5, 0),
        ("cuStreamWaitValue32_v2", 77, 1 << 40, 6, 0),
    ]
    assert library.calls.count(("cuCtxSetCurrent",)) == 3


@pytest.mark.parametrize("call", ["cuDeviceGet", "cuMemHostRegister_v2"])
def test_a_refusal_is_an_error_that_names_the_call(call: str) -> None:
    with pytest.raises(RuntimeError, match=f"{call} failed with error 801 of CUDA's driver"):
        CudaDriver(Library(refuses=call), 0).register(4096, 64)


@pytest.mark.parametrize("library", [Library(lacks="cuStreamWaitValue32_v2"), OSError("no libcuda.so.1")])
def test_an_older_driver_and_none_have_no_such_calls(library: Any) -> None:
    with (
        patch.object(torch.version, "cuda", "13.2"),
        patch.object(driver.ctypes, "CDLL", side_effect=[library]),
    ):
        assert driver_of(torch.device("cuda", 0)) is None


def test_other_devices_have_no_such_calls() -> None:
    with patch.object(torch.version, "cuda", None):
        assert driver_of(torch.device("cuda", 0)) is None
