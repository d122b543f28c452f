"""Streams and events of the accelerator of this process; without one they do nothing."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Iterable, Optional, Union, cast

import torch

if TYPE_CHECKING:
    import torch.cuda
    import torch.xpu

__all__ = ["get_stream_context", "record_event", "synchronize"]

# Pauses between two queries of an event by the host: the first one, and the longest.
_PAUSE_SEC = 20e-6
_MAX_PAUSE_SEC = 200e-6

_NOTHING = nullcontext()


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


def on_device(device: Optional[torch.device]) -> ContextManager[object]:
    """A context in which `device` is the current one; None, or the CPU, leaves the current device as it is."""
    if device is None or device.index is None or device.type == "cpu":
        return _NOTHING
    # Unlike set_device_index, it makes no CUDA context on device 0 when a thread returns to that one, its first.
    return torch.get_device_module(device.type).device(device.index)


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
    """Waits until the current device has finished all queued work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def refuse_capture(what: str) -> None:
    """Refuses a capture of the current stream into a graph: its replay would use the communicator of earlier peers.

    Raises:
        RuntimeError: the stream is captured.
    """
    if torch.accelerator.is_available():
        capturing = getattr(torch.get_device_module(), "is_current_stream_capturing", None)
        if capturing is not None and capturing():
            raise RuntimeError(f"{what} cannot be captured into a graph: its peers change. Capture the code around it")


def devices_of(value: object) -> list[torch.device]:
    """The devices, without the CPU, of the tensors in a value: a tensor, or nested lists of tensors."""
    if isinstance(value, torch.Tensor):
        return [] if value.is_cpu or value.is_meta else [value.device]
    if isinstance(value, (list, tuple)):
        return list(dict.fromkeys(device for item in value for device in devices_of(item)))
    return []


class Mark:
    """Events on the current streams of some devices, behind the work queued so far.

    Args:
        devices: devices other than the CPU.
    """

    __slots__ = ("_events",)

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events = [(device, torch.accelerator.current_stream(device).record_event()) for device in devices]

    def follow(self) -> None:
        """Makes the current streams of the devices wait for the events; the host continues."""
        for device, event in self._events:
            torch.accelerator.current_stream(device).wait_event(event)

    def reached(self) -> bool:
        """Whether the devices have reached the events.

        Raises:
            RuntimeError: a device has failed.
        """
        return all(event.query() for _, event in self._events)

    def wait(self, timeout: float) -> bool:
        """Waits on the host; False if the devices do not reach the events within `timeout` seconds.

        Raises:
            RuntimeError: a device has failed.
        """
        return poll(self.reached, timeout)


def poll(done: Callable[[], bool], timeout: float) -> bool:
    """Calls `done` until it returns True; returns False after `timeout` seconds. Sleeps between the calls."""
    deadline = time.monotonic() + timeout
    pause = _PAUSE_SEC
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, _MAX_PAUSE_SEC)
    return True
