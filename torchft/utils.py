"""Streams and events of the accelerator of this process; without one they do nothing."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Callable, Generator, Iterable, Optional, Union, cast

import torch

if TYPE_CHECKING:
    import torch.cuda
    import torch.xpu

__all__ = ["get_stream_context", "record_event", "synchronize"]

# Of the host's look at an event: the first pause, and the longest one.
_PAUSE_SEC = 20e-6
_MAX_PAUSE_SEC = 200e-6


def get_stream_context(
    stream: Optional[torch.Stream],
) -> Union[torch.cuda.StreamContext, torch.xpu.StreamContext, nullcontext[None]]:
    """A context in which `stream` is the current one; None leaves the current stream as it is."""
    if stream is None:
        return nullcontext()
    if torch.cuda.is_available():
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))
    if torch.xpu.is_available():
        return torch.xpu.stream(cast(torch.xpu.Stream, stream))
    return cast(Any, stream) if torch.accelerator.is_available() else nullcontext()


@contextmanager
def on_device(device: Optional[torch.device]) -> Generator[None, None, None]:
    """Within it `device` is the current one; None, or the CPU, leaves the current one as it is."""
    if device is None or device.index is None or device.type == "cpu" or not torch.accelerator.is_available():
        yield
        return
    before = torch.accelerator.current_device_index()
    if device.index == before:
        yield
        return
    torch.accelerator.set_device_index(device.index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def record_event() -> Union[torch.cuda.Event, torch.xpu.Event]:
    """Records an event on the current stream and returns it.

    Raises:
        RuntimeError: there is no accelerator, so there is no stream to record on.
    """
    if torch.cuda.is_available():
        return cast(torch.cuda.Event, torch.cuda.current_stream().record_event())
    if torch.xpu.is_available():
        return cast(torch.xpu.Event, torch.xpu.current_stream().record_event())
    if torch.accelerator.is_available():
        return cast(Any, torch.accelerator.current_stream().record_event())
    raise RuntimeError("record_event needs a CUDA or XPU device, this host has none")


def synchronize() -> None:
    """Waits for everything queued on the current device."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def refuse_capture(what: str) -> None:
    """Raises if the current stream is captured into a graph: a replay would use peers that are gone, unnoticed.

    Raises:
        RuntimeError: it is.
    """
    if torch.accelerator.is_available():
        capturing = getattr(torch.get_device_module(), "is_current_stream_capturing", None)
        if capturing is not None and capturing():
            raise RuntimeError(f"{what} cannot be captured into a graph: its peers change. Capture what is around it")


def devices_of(value: object) -> list[torch.device]:
    """The devices other than the CPU on which the tensors of a value lie: a tensor, or lists of them."""
    if isinstance(value, torch.Tensor):
        return [] if value.is_cpu or value.is_meta else [value.device]
    if isinstance(value, (list, tuple)):
        return list(dict.fromkeys(device for item in value for device in devices_of(item)))
    return []


class Mark:
    """What the current streams of some devices have queued so far.

    Args:
        devices: none of them the CPU.
    """

    __slots__ = ("_events",)

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events = [(device, torch.accelerator.current_stream(device).record_event()) for device in devices]

    def follow(self) -> None:
        """Makes the current streams of the devices wait for it; the host goes on."""
        for device, event in self._events:
            torch.accelerator.current_stream(device).wait_event(event)

    def reached(self) -> bool:
        """Whether the devices have done it.

        Raises:
            RuntimeError: a device has failed.
        """
        return all(event.query() for _, event in self._events)

    def wait(self, timeout: float = math.inf) -> bool:
        """Waits on the host; False when the devices are not there within `timeout` seconds.

        Raises:
            RuntimeError: a device has failed.
        """
        return poll(self.reached, timeout)


def poll(done: Callable[[], bool], timeout: float = math.inf) -> bool:
    """Looks until something is done; False when it is not within `timeout` seconds. Other threads may run meanwhile."""
    deadline = time.monotonic() + timeout
    pause = _PAUSE_SEC
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, _MAX_PAUSE_SEC)
    return True
