"""The time of a rank in a step: its ranges in PyTorch's profiler, and how long it works without waiting for
others, so that the lighthouse finds stragglers (go/quorum/stragglers.go).

The latter is the time from the end of a step to the first reduction of the next one: the optimizer, the data,
the forward pass, and the backward pass up to the first gradients that are reduced. No other group is waited
for in it while the quorum stands. A host that is slow is slow in this part, too. On a device it is the time
between two events. A rank that computes a larger or smaller part of the batch than others reports the time of
the usual part.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Optional, ParamSpec, TypeVar

import torch
from torch.autograd import profiler
from torch.profiler import record_function

# The shortest time between two reports, and between two looks at the host, in seconds.
_REPORT_SEC, _LOOK_SEC = 0.5, 10.0
# At most so many steps are in a report; the lighthouse needs the last ten.
_MOST = 100
# Why NVML lowers the clock of a device, by bits of its mask.
_THROTTLED = {0x4: "power", 0x8: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}

P = ParamSpec("P")
T = TypeVar("T")


def ranged(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Shows calls of a function in the profiler as `torchft::manager::{name}`, as upstream
    does, at the cost of one more Python call.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def in_range(*args: P.args, **kwargs: P.kwargs) -> T:
            if not profiler._is_profiler_enabled:
                return function(*args, **kwargs)
            with record_function(f"torchft::manager::{name}"):
                return function(*args, **kwargs)

        return in_range

    return decorate


class OwnTime:
    """Measures the steps of a rank.

    Args:
        report: sends the own times of some steps, in microseconds, and a line about the host; None: nothing
            is measured.
        device: that of the model, on which the work is queued; None: the CPU.

    Attributes:
        running: a step has begun, and nothing has been reduced in it.
    """

    def __init__(
        self, report: Optional[Callable[[list[int], str], None]], device: Optional[torch.device] = None
    ) -> None:
        self._report = report
        self._device = device
        self.running = False
        self._part = 1.0
        self._began = self._reported = self._looked = 0.0
        self._host = ""
        self._took: list[int] = []
        # On a device: of the beginning and of the first reduction of the last step that was measured.
        self._events: list[torch.Event] = []
        self._pending = False

    def begins(self) -> None:
        """A step has ended, and the next one begins."""
        if self._report is None:
            return
        now = time.monotonic()
        try:
            if self._device is not None:
                self._on_device(self._device)
        except (RuntimeError, NotImplementedError):  # it has no events with a time
            self._report = None
            return
        if self._took and now - self._reported >= _REPORT_SEC:
            if now - self._looked >= _LOOK_SEC:
                self._looked, self._host = now, host(self._device)
            self._reported = now
            self._report(self._took[-_MOST:], self._host)
            self._took = []
        self._began, self.running = now, True

    def _on_device(self, device: torch.device) -> None:
        if not self._events:
            self._events = [torch.Event(device, enable_timing=True) for _ in range(2)]
        begin, end = self._events
        if self._pending and end.query():
            self._took.append(round(begin.elapsed_time(end) * 1000 / self._part))
        self._pending = False
        begin.record(torch.accelerator.current_stream(device))

    def computes(self, part: float) -> None:
        """The step has this part of the usual work of a rank; 0: it is not measured."""
        if part:
            self._part = part
        else:
            self.skip()

    def reduces(self) -> None:
        """The first reduction of the step begins."""
        self.running = False
        if self._device is None:
            self._took.append(round((time.monotonic() - self._began) * 1e6 / self._part))
        else:
            self._events[1].record(torch.accelerator.current_stream(self._device))
            self._pending = True

    def skip(self) -> None:
        """The step is not measured: it waits for a quorum."""
        self.running = self._pending = False


def host(device: Optional[torch.device]) -> str:
    """A line about this host: the load of its processors; clock and temperature of the device, and why its
    clock is lowered, where NVML tells it.
    """
    found = [f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"]
    with suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.stat") as stat:
        throttled = dict(line.split() for line in stat).get("nr_throttled", "0")
        if int(throttled):
            found.append(f"its control group was throttled {throttled} times")
    if device is not None and device.type == "cuda":
        with suppress(Exception):  # without NVML's Python package, or on a device that does not tell it
            found.append(f"{torch.cuda.clock_rate(device)} MHz, {torch.cuda.temperature(device)} °C")
            found += _throttled(device)
    return ", ".join(found)


def _throttled(device: torch.device) -> list[str]:
    pynvml = importlib.import_module("pynvml")  # that torch.cuda needs, too
    handle: Any = torch.cuda._get_pynvml_handler(device)
    mask = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    reasons = sorted({name for bit, name in _THROTTLED.items() if mask & bit})
    return [f"its clock is lowered by {' and '.join(reasons)}"] if reasons else []
