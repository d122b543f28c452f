"""Broken hardware, as the kernel log and NVML report it."""

from __future__ import annotations

import ctypes
import errno
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchft._node import faults

DAY = 24 * 3600


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "<4>[    5.000000] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.",
            "kernel log: XID 79 of PCI:0000:3b:00: it has fallen off the bus",
        ),
        (
            "[    5.000000] NVRM: Xid (PCI:0000:3b:00): 48, pid=1, DBE",
            "kernel log: XID 48 of PCI:0000:3b:00: uncorrectable memory error",
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 74, no time",
            "kernel log: XID 74 of PCI:0000:3b:00: NVLink error",
        ),
        ("<4>[    5.000000] NVRM: Xid (PCI:0000:3b:00): 31, pid=9, name=python, MMU fault", ""),
        ("[    5.000000][  T12] NVRM: Xid (PCI:0000:3b:00): 43, pid=9, name=python", ""),
        (
            "[    5.0] mce: [Hardware Error]: Machine Check: Uncorrected error, Bank 5",
            "kernel log: mce: [Hardware Error]: Machine Check: Uncorrected error, Bank 5",
        ),
        ("[    5.0] mce: [Hardware Error]: Corrected error, no action required.", ""),
        ("[    5.0] EDAC MC0: 1 CE memory read error on CPU_SrcID#0", ""),
        (
            "[    5.0] EDAC MC0: 1 UE memory read error on CPU_SrcID#0",
            "kernel log: EDAC MC0: 1 UE memory read error on CPU_SrcID#0",
        ),
        (
            "[    5.0] Memory failure: 0x1234: recovery action for dirty page: Recovered",
            "kernel log: Memory failure: 0x1234: recovery action for dirty page: Recovered",
        ),
        ("<6>[    5.000000] usb 1-1: new device", ""),
        ("", ""),
    ],
)
def test_a_line_of_the_kernel_log(line: str, found: str) -> None:
    assert faults.broken([line, line], now=10.0) == ([found] if found else [])


@pytest.mark.parametrize("line", ["<4>[    5.000000] {}", "[    5.000000][ C0] {}"])
def test_what_was_logged_long_ago_may_have_been_repaired(line: str) -> None:
    text = line.format("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus")
    assert len(faults.broken([text], now=DAY)) == 1
    assert faults.broken([text], now=DAY + 6) == []


def test_a_log_that_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def klogctl(action: int, buffer: Any, size: int) -> int:
        text = b"<4>[    5.0] one\n<4>[    5.1] two\n"
        if buffer is not None:
            buffer.raw = text.ljust(size, b"\0")
        return len(text)

    monkeypatch.setattr(faults, "_libc", SimpleNamespace(klogctl=klogctl))
    assert faults.kernel_log() == ["<4>[    5.0] one", "<4>[    5.1] two"]


def test_a_log_that_cannot_be_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def klogctl(*_: Any) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(faults, "_libc", SimpleNamespace(klogctl=klogctl))
    monkeypatch.setattr(faults, "nvml", lambda: (["NVML: a problem"], ["NVML: unread"]))
    assert faults.of_node() == (
        ["NVML: a problem"],
        ["NVML: unread", "the kernel log cannot be read: Operation not permitted"],
    )


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Two devices without errors."""

    def no_ecc(*_: Any) -> int:
        raise NVMLError_NotSupported("Not Supported")

    fake = SimpleNamespace(
        NVMLError=NVMLError,
        NVMLError_NotSupported=NVMLError_NotSupported,
        NVMLError_NoPermission=NVMLError_NoPermission,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetTotalEccErrors=no_ecc,
        nvmlDeviceGetRemappedRows=lambda device: (0, 0, 0, 0),
    )
    monkeypatch.setattr(faults, "_DRIVER", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    return fake


def test_devices_without_errors(nvml: SimpleNamespace) -> None:
    assert faults.nvml() == ([], [])


def test_errors_of_devices(nvml: SimpleNamespace) -> None:
    nvml.nvmlDeviceGetTotalEccErrors = lambda device, *_: 3 * device
    nvml.nvmlDeviceGetRemappedRows = lambda device: (0, 1, 1 - device, device)
    assert faults.nvml()[0] == [
        "NVML: device 0 replaces a broken row of its memory when it is reset",
        "NVML: device 1 has had 3 uncorrectable memory errors since it was reset",
        "NVML: device 1 could not replace a broken row of its memory",
    ]


def test_a_device_that_is_lost(nvml: SimpleNamespace) -> None:
    def lost(number: int) -> None:
        raise NVMLError("GPU is lost")

    nvml.nvmlDeviceGetHandleByIndex = lost
    assert faults.nvml() == (["NVML: GPU is lost"], [])


def test_a_driver_without_the_package(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    problems, unknown = faults.nvml()
    assert problems == [] and "nvidia-ml-py, is not installed" in unknown[0]
    monkeypatch.setattr(faults, "_DRIVER", "/nothing")
    assert faults.nvml() == ([], [])
