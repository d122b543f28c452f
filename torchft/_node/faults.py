"""What the kernel and NVML have recorded of broken hardware."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

# Errors of the driver (XID) that a broken device, connection or driver causes, as NVIDIA's list of them says.
# Programs cause others, such as 13, 31, 43 and 45: those say nothing about the node.
_XIDS = {
    48: "uncorrectable memory error",
    61: "its microcontroller stopped",
    62: "its microcontroller stopped",
    64: "a row of its memory cannot be replaced",
    74: "NVLink error",
    79: "it has fallen off the bus",
    92: "many correctable memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "its system processor does not answer",
    120: "its system processor failed",
    140: "uncorrectable memory error",
}
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")
# Corrected errors have the first mark, too.
_OF_HOST = re.compile(
    r"\[Hardware Error\].*\b(?:uncorrect\w*|fatal)\b|EDAC \S+: \d+ UE\b|Memory failure: 0x", re.IGNORECASE
)
# Some kernels write the caller behind the time.
_LINE = re.compile(r"(?:<\d+>)?\[ *(\d+\.\d+)\](?:\[ *\w+\])? (.*)")
# A node is not bad for what has been repaired: a device may be reset without a start of the host.
_RECENT_SEC = 24 * 3600.0
_DRIVER = "/proc/driver/nvidia"
_READ_ALL, _SIZE_OF_BUFFER = 3, 10  # actions of klogctl
_libc = ctypes.CDLL(None, use_errno=True)


def broken(lines: list[str], now: float) -> list[str]:
    """What a kernel log says about broken hardware in the last day, each once.

    Args:
        lines: those of :func:`kernel_log`; one without a time counts as recent.
        now: seconds since the host was started.
    """
    found: dict[str, None] = {}
    for line in lines:
        timed = _LINE.match(line.strip())
        at, text = (float(timed[1]), timed[2]) if timed else (now, line.strip())
        if now - at > _RECENT_SEC:
            continue
        if (xid := _XID.search(text)) and int(xid[2]) in _XIDS:
            found[f"kernel log: XID {xid[2]} of {xid[1]}: {_XIDS[int(xid[2])]}"] = None
        elif _OF_HOST.search(text):
            found[f"kernel log: {text}"] = None
    return list(found)


def kernel_log() -> list[str]:
    """The lines of the kernel log. OSError: they cannot be read."""
    text = ctypes.create_string_buffer(max(1, _klogctl(_SIZE_OF_BUFFER, None, 0)))
    size = _klogctl(_READ_ALL, text, len(text))
    return text.raw[:size].decode(errors="replace").splitlines()


def _klogctl(action: int, buffer: Any, size: int) -> int:
    if (result := int(_libc.klogctl(action, buffer, size))) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def of_node() -> tuple[list[str], list[str]]:
    """Problems of this node that are on record, and what could not be read."""
    problems, notes = nvml()
    try:
        return [*broken(kernel_log(), time.monotonic()), *problems], notes
    except OSError as error:
        return problems, [*notes, f"the kernel log cannot be read: {error.strerror}"]


def nvml() -> tuple[list[str], list[str]]:
    """Problems of the devices that NVML tells, and what it does not."""
    if not os.path.exists(_DRIVER):
        return [], []
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return [], ["NVML is not asked: Python's package for it, nvidia-ml-py, is not installed"]
    try:
        pynvml.nvmlInit()
        try:
            devices = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            return [problem for i, device in enumerate(devices) for problem in _of(pynvml, i, device)], []
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:  # a device that has fallen off the bus, for example
        return [f"NVML: {error}"], []


def _of(pynvml: Any, number: int, device: Any) -> Iterator[str]:
    refused = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission)
    with suppress(*refused):  # a device without such memory
        uncorrected, volatile = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        if count := pynvml.nvmlDeviceGetTotalEccErrors(device, uncorrected, volatile):
            yield f"NVML: device {number} has had {count} uncorrectable memory errors since it was reset"
    with suppress(*refused):
        _, _, pending, failed = pynvml.nvmlDeviceGetRemappedRows(device)
        if failed:
            yield f"NVML: device {number} could not replace a broken row of its memory"
        elif pending:
            yield f"NVML: device {number} replaces a broken row of its memory when it is reset"
