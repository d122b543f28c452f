"""What the kernel and NVML have recorded of broken hardware."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Optional

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
_OF_KMSG, _OF_DMESG = re.compile(r"\d+,\d+,(\d+),[^;]*;(.*)"), re.compile(r"\[ *(\d+\.\d+)\] (.*)")
# A node is not bad for what has been repaired: a device may be reset without a start of the host.
_RECENT_SEC = 24 * 3600.0
_KMSG, _DRIVER = "/dev/kmsg", "/proc/driver/nvidia"
_DMESG_SEC = 5.0


def broken(lines: Iterator[str] | list[str], now: float) -> list[str]:
    """What a kernel log says about broken hardware in the last day, each once.

    Args:
        lines: records of /dev/kmsg, or lines of dmesg; of one without a time it counts as recent.
        now: seconds since the host was started.
    """
    found: dict[str, None] = {}
    for line in lines:
        text = line.strip()
        if kmsg := _OF_KMSG.match(text):
            at, text = int(kmsg[1]) / 1e6, kmsg[2]
        elif dmesg := _OF_DMESG.match(text):
            at, text = float(dmesg[1]), dmesg[2]
        else:
            at = now
        if now - at > _RECENT_SEC:
            continue
        if (xid := _XID.search(text)) and int(xid[2]) in _XIDS:
            found[f"kernel log: XID {xid[2]} of {xid[1]}: {_XIDS[int(xid[2])]}"] = None
        elif _OF_HOST.search(text):
            found[f"kernel log: {text}"] = None
    return list(found)


def kernel_log(path: str = _KMSG) -> tuple[Optional[list[str]], str]:
    """The lines of the kernel log, and why they cannot be read where they are None."""
    try:
        return _kmsg(path), ""
    except OSError as error:
        why = f"{path}: {error.strerror}"
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=_DMESG_SEC)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{why}; dmesg: {error}"
    if done.returncode:
        return None, f"{why}; {done.stderr.strip()}"
    return done.stdout.splitlines(), ""


def _kmsg(path: str) -> list[str]:
    lines = []
    log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(log, 8192)  # a read gives one record
            except BlockingIOError:  # that was the last one
                return lines
            except BrokenPipeError:  # the record was overwritten meanwhile; the next read gives the next one
                continue
            if not record:  # the end of a saved log
                return lines
            lines += record.decode(errors="replace").splitlines()
    finally:
        os.close(log)


def of_node() -> tuple[list[str], list[str]]:
    """Problems of this node that are on record, and what could not be read."""
    lines, why = kernel_log()
    problems, notes = nvml()
    if lines is None:
        return problems, [*notes, f"the kernel log cannot be read: {why}"]
    return [*broken(lines, time.monotonic()), *problems], notes


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
