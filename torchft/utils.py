"""Streams and events of the accelerator of this process; without one they do nothing."""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import time
import types
import weakref
from contextlib import nullcontext, suppress
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

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_OF_CAPTURE = "captur"  # in the texts of all CUDA errors that a capture causes, 900 to 908, and in no other


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


# So many streams that one of them is free: a process has one training thread and few communicators.
_STREAMS = 4
_turns = itertools.count()


@functools.cache
def _own_streams(device: torch.device) -> list[torch.Stream]:
    return [torch.get_device_module(device.type).Stream(device) for _ in range(_STREAMS)]


def free_stream(device: torch.device, trains: Optional[torch.Stream] = None) -> torch.Stream:
    """A stream without pending work. PyTorch's pool has 32 streams, and hands them out to users and
    communicators too. Work on one of theirs may wait for a collective, whose peer may wait for that work.

    Args:
        trains: the stream of the training thread, which is not returned; None: the current one.
    """
    trains = torch.accelerator.current_stream(device) if trains is None else trains
    own, first = _own_streams(device), next(_turns)
    # In turn: a stream without work yet may have been returned just before.
    streams = [own[(first + i) % _STREAMS] for i in range(_STREAMS)]
    streams = [stream for stream in streams if stream != trains]
    return next((stream for stream in streams if stream.query()), streams[0])


def dtype_name(dtype: torch.dtype) -> str:
    """The name by which ``torch`` has a dtype."""
    return str(dtype).removeprefix("torch.")


def on_device(device: Optional[torch.device]) -> ContextManager[object]:
    """A context in which `device` is the current one; None, or the CPU, leaves the current device."""
    if device is None or device.index is None or device.type == "cpu":
        return _NOTHING
    # Unlike set_device_index, it makes no CUDA context on device 0 when a thread returns to that one.
    return torch.get_device_module(device.type).device(device.index)


def current_device() -> Optional[int]:
    """The index of this thread's current device; None in a process that does not use its accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    in_use = getattr(torch.get_device_module(accelerator), "is_initialized", None)  # MPS has none
    return torch.accelerator.current_device_index() if in_use is not None and in_use() else None


def use_device(index: Optional[int]) -> None:
    """Makes a device the current one of this thread, for good; None leaves the thread as it is.

    Each thread of torchft's own that may touch a device calls this first, most of them as a
    :class:`DeviceThread`. A thread begins on device 0. If it stayed there, an event that it queries or
    destroys, or a stream that it leaves, would make a context on device 0, which takes hundreds of MB from
    another rank. Not for a thread of the user's: :func:`on_device`.
    """
    if index is not None:
        with suppress(RuntimeError):  # the device has failed; the thread has to end waits all the same
            torch.accelerator.set_device_index(index)
        exchange = _exchange_capture_mode()
        if exchange is not None:
            exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


@functools.cache
def _exchange_capture_mode() -> Optional[Callable[[object], object]]:
    """Sets the mode in which this thread meets the captures of graphs; None without CUDA.

    In the first mode of a thread, a query of an event while any thread captures a graph is an error, and
    makes that graph invalid. In the thread-local mode only captures by the thread itself count. PyTorch has
    this for C++ only.
    """
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # a driver without the call: such queries raise, and are repeated
        return None


class DeviceThread(threading.Thread):
    """A daemon thread whose current device is that of the thread which makes it."""

    def __init__(self, target: Callable[..., object], name: str, args: Iterable[Any] = ()) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._device = current_device()

    def run(self) -> None:
        use_device(self._device)
        super().run()


def out_of_memory(error: Optional[BaseException]) -> bool:
    """Whether an operation failed because a device has too little memory, for PyTorch or for NCCL."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return True
        error = error.__cause__
    return False


def device_name() -> str:
    """The current device of this thread, for errors."""
    return f"{torch.accelerator.current_accelerator()}:{current_device()}"


def device_uuid(index: int) -> Optional[str]:
    """Names a device, whatever its number in this process; None if it has no name of its own."""
    about: Any = getattr(torch.get_device_module(), "get_device_properties", lambda _: None)(index)
    if "MIG" in getattr(about, "name", ""):  # the slices of a device may have its UUID
        return None
    uuid = getattr(about, "uuid", None)
    return None if uuid is None else str(uuid)


def device_pci_address() -> Optional[str]:
    """This thread's current device as its PCI address `0000:17:00.0`; None without one, or if not in use."""
    index = current_device()
    if index is None:
        return None
    about: Any = getattr(torch.get_device_module(), "get_device_properties", lambda _: None)(index)
    parts = [getattr(about, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return None if None in parts else "{:04x}:{:02x}:{:02x}.0".format(*parts)


def empty_cache() -> None:
    """Returns memory that PyTorch keeps for later tensors to the device: NCCL allocates from the device."""
    index = current_device()
    if index is not None:
        with suppress(RuntimeError):
            torch.get_device_module().empty_cache()


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
    """Refuses a capture of the current stream into a graph: its replay would use the communicator of earlier
    peers.

    Raises:
        RuntimeError: the stream is captured.
    """
    if torch.accelerator.is_available():
        capturing = getattr(torch.get_device_module(), "is_current_stream_capturing", None)
        if capturing is not None and capturing():
            raise RuntimeError(
                f"{what} cannot be captured into a graph: its peers change. Capture the code around it"
            )


def devices_of(value: object) -> list[torch.device]:
    """The devices, without the CPU, of the tensors in a value: a tensor, or nested lists of tensors."""
    if isinstance(value, torch.Tensor):
        return [] if value.is_cpu or value.is_meta else [value.device]
    if isinstance(value, (list, tuple)):
        return list(dict.fromkeys(device for item in value for device in devices_of(item)))
    return []


class DeviceEvent:
    """Events on the current streams of some devices, behind the work queued so far.

    Args:
        devices: devices other than the CPU.
    """

    __slots__ = ("_events",)

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events = [
            (device, torch.accelerator.current_stream(device).record_event()) for device in devices
        ]

    def follow(self) -> None:
        """Makes the current streams of the devices wait for the events; the host continues."""
        for device, event in self._events:
            torch.accelerator.current_stream(device).wait_event(event)

    def known(self) -> Optional[bool]:
        """Whether the devices have reached the events; None while the capture of a graph forbids the query.

        Raises:
            RuntimeError: a device has failed.
        """
        exchange = _exchange_capture_mode()
        mode = ctypes.c_int(_THREAD_LOCAL)
        if exchange is not None:
            exchange(ctypes.byref(mode))  # also on a thread of the user's, which gets its own mode back
        try:
            return all(event.query() for _, event in self._events)
        except RuntimeError as e:
            if _OF_CAPTURE in str(e):
                return None
            raise
        finally:
            if exchange is not None:
                exchange(ctypes.byref(mode))

    def reached(self) -> bool:
        """Whether the devices are known to have reached the events.

        Raises:
            RuntimeError: a device has failed.
        """
        return self.known() is True

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


def weakly(call: Callable[..., Any]) -> Callable[[], Optional[Callable[..., Any]]]:
    """A function that returns ``call``; None once that is a method of an object which is gone."""
    return weakref.WeakMethod(call) if isinstance(call, types.MethodType) else lambda: call
