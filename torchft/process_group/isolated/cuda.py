"""CUDA: a worker uses the trainer's device memory directly, and CUDA events order the work that the two
queue.

**Memory.** A storage is shared once in the life of the process, even if several workers follow one another.
It is identified by weak reference, never by address. PyTorch frees shared memory when a counter of its users
reaches 0, which a killed worker would never decrement. So the trainer alone counts. When the user frees a
storage, the trainer asks the worker to drop it. Only after the worker's answer, or its end, is the memory
returned to PyTorch, because CUDA forbids to free memory that another process maps.

**Order.** A mark of the trainer is an interprocess event, recorded on the current stream. An event is reused
only after the device has passed it. So a worker that reads an old mark may wait for a later recording of the
same event: longer than necessary, but safe. There is no deadlock, because the work before a mark never waits
for that mark.

A mark of the worker is a value in the trainer's memory (`values`), for which the trainer's stream waits. A
stream that waits for an event of a killed process never continues (docs/gpu.md). Where the driver refuses
such values, the worker's marks are events as well, and the trainer's host waits for them.

XPU has such events, but PyTorch cannot share XPU memory: its tensors are refused with an error that says so.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import weakref
from collections import deque
from typing import Any, Optional

import torch

from torchft.process_group.isolated import driver
from torchft.process_group.isolated.sharing import Borrowing, Notify, Registration, Sharing
from torchft.process_group.isolated.values import Awaited, Page, Pages, WrittenValues
from torchft.utils import DeviceThread, dtype_name, use_device

_DEVICE = "cuda"

# Notes to the worker: the device to work on, perhaps with the file of a page of values; the exports to drop.
_USE, _DROP = "use", "drop"

# A mark. Event, number of its recordings, the event's handle; or slot, value, b"".
_Mark = tuple[int, int, bytes]

# The number of streams that a worker's operations use in turn; PyTorch's pool has as many.
_STREAMS = 32

# The worker gives PyTorch the name of a counter that does not exist, so that PyTorch counts nothing.
_NO_COUNTER = b"/torchft-counts-itself"


# Storages that this process shares


class _Export:
    """A storage of this process that others may map; `holders` are the ends whose worker may have done so."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.id = next(_ids)
        self.device = storage.device
        self.holders: set[TrainerEnd] = set()
        self.freed = False
        (_, handle, size, offset, counter, counter_offset, _, _) = storage._share_cuda_()
        # Empty for a storage without memory.
        self.handle: bytes = handle or b""
        self.size: int = size
        self.offset: int = offset
        self.counter: Optional[tuple[bytes, int]] = None if counter is None else (counter, counter_offset)

    def release_now(self) -> None:
        """Returns the memory to PyTorch; only the first call does."""
        counter, self.counter = self.counter, None
        if counter is not None:
            torch.UntypedStorage._release_ipc_counter_cuda(*counter)
            # A failed device frees nothing, and reports its error to the next operation.
            with contextlib.suppress(RuntimeError):
                torch.cuda.ipc_collect()


_ids = itertools.count(1)
_lock = threading.Lock()
_exports: weakref.WeakKeyDictionary[torch.UntypedStorage, _Export] = weakref.WeakKeyDictionary()
# Exports whose storage was freed, or which no worker maps any more since then. The garbage collector may put
# one here on any thread, also on one that holds the lock.
_freed: queue.SimpleQueue[_Export] = queue.SimpleQueue()
_returner: Optional[threading.Thread] = None


def _hold(storage: torch.UntypedStorage, holder: TrainerEnd) -> _Export:
    global _returner
    with _lock:
        if _returner is None:
            _returner = DeviceThread(_return_freed, "torchft_shared_memory")
            _returner.start()
        export = _exports.get(storage)
        if export is None:
            export = _exports[storage] = _Export(storage)
            weakref.finalize(storage, _freed.put, export).atexit = False
        export.holders.add(holder)
    return export


def _unhold(exports: list[_Export], holder: TrainerEnd) -> None:
    with _lock:
        for export in exports:
            export.holders.discard(holder)
            if export.freed and not export.holders:
                _freed.put(export)


def _return_freed() -> None:
    while True:
        exports = [_freed.get()]
        while not _freed.empty():
            exports.append(_freed.get())
        _return(exports)
        exports.clear()


def _return(exports: list[_Export]) -> None:
    """Asks the holders of freed storages to drop them, and returns memory without a holder to PyTorch, after
    the device has finished all work queued at this time.

    PyTorch's allocator ignores `record_stream` of a shared storage: it would reuse the memory in the order of
    one stream, while another stream, which the user has recorded, may still read it.
    """
    with _lock:
        for export in exports:
            export.freed = True
            for holder in export.holders:
                holder._freed_exports.append(export)
        idle = [export for export in exports if not export.holders]
    for device in {export.device for export in idle}:
        use_device(device.index)
        # A failed device runs nothing that could use the memory.
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(device)
    for export in idle:
        export.release_now()


def _forget_all() -> None:
    global _lock, _freed, _returner
    _lock, _freed, _returner = threading.Lock(), queue.SimpleQueue(), None
    for export in _exports.values():
        export.counter = None  # it belongs to the parent, which still uses it
    _exports.clear()
    _pages.clear()


os.register_at_fork(after_in_child=_forget_all)


# Order

# The pages of values of this process, by device.
_pages: dict[torch.device, Pages] = {}


def _pages_of(device: torch.device) -> Pages:
    pages = _pages.get(device)
    return _pages.setdefault(device, Pages(lambda: driver.driver_of(device))) if pages is None else pages


class _Marks:
    """The events that this process sends, and those that it receives from the other end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        # Recorded events, the oldest first: number, event, handle, the count of its recordings.
        self._recorded: deque[tuple[int, torch.cuda.Event, bytes, int]] = deque()
        # Events of the other end, by number, with the highest count of recordings seen.
        self._opened: dict[int, tuple[torch.cuda.Event, int]] = {}

    def mark(self, device: torch.device) -> _Mark:
        with self._lock:
            number, event, handle, times = self._next(device)
            event.record(torch.cuda.current_stream(device))
            times += 1
            self._recorded.append((number, event, handle, times))
        return number, times, handle

    def _next(self, device: torch.device) -> tuple[int, torch.cuda.Event, bytes, int]:
        # Only an event that the device has passed is reused: its earlier recordings are then complete.
        if self._recorded and self._recorded[0][1].query():
            return self._recorded.popleft()
        with torch.cuda.device(device):
            event = torch.cuda.Event(interprocess=True)
            self._count += 1
            return self._count, event, event.ipc_handle(), 0

    def event(self, mark: _Mark, device: torch.device) -> Optional[torch.cuda.Event]:
        """The other end's event of a mark; None if the device is known to have passed it."""
        number, times, handle = mark
        with self._lock:
            known = self._opened.get(number)
            event: torch.cuda.Event
            if known is None:
                # pyrefly: ignore [bad-assignment]  # it gives an object of the class it is called on
                event = torch.cuda.Event.from_ipc_handle(device, handle)
            else:
                event, seen = known
                if times < seen:
                    return None
            self._opened[number] = (event, times)
            return event

    def clear(self) -> None:
        with self._lock:
            self._recorded.clear()
            self._opened.clear()


# The two ends


class _Registration(Registration):
    """Keeps a tensor alive until `release`, so that its memory is not reused."""

    def __init__(self, tensor: torch.Tensor, ref: Any, all_: set[_Registration]) -> None:
        super().__init__(ref)
        self._tensor: Optional[torch.Tensor] = tensor
        # The trainer's end refers to the registration too: if a worker was killed, its kernels may still run,
        # so the memory must stay even if the caller drops the registration.
        self._all = all_
        all_.add(self)

    def release(self) -> None:
        self._tensor = None
        self._all.discard(self)


class _Dropped(Registration):
    """Freed storages that the worker was asked to drop: no registration of a tensor, but it ends like one."""

    def __init__(self, exports: list[_Export], holder: TrainerEnd) -> None:
        super().__init__(None)
        self._exports = exports
        self._holder = holder

    def release(self) -> None:
        for export in self._exports:
            self._holder._held.pop(export.id, None)
        _unhold(self._exports, self._holder)


class TrainerEnd(Sharing):
    """The trainer's end. Call `close` only when the worker has been reaped: until then its kernels may still
    write. `notify` sends a note to the worker's end.
    """

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self._marks = _Marks()
        self._awaited: Optional[Awaited] = None
        # The device of the first tensor: a worker uses one device.
        self._device: Optional[torch.device] = None
        self._registrations: set[_Registration] = set()
        self._held: dict[int, _Export] = {}
        self._freed_exports: deque[_Export] = deque()
        # Reentrant: a note to a worker that has ended may call `close`.
        self._lock = threading.RLock()
        self._closed = False

    def register(self, tensor: torch.Tensor, read: bool, write: bool) -> Registration:
        device = _check(tensor)
        with self._lock:
            if self._closed:
                raise RuntimeError("the worker of this group has ended")
            if self._device is None:
                self._use(device)
            if device != self._device:
                raise ValueError(
                    f"tensor on {device}: the other operations of this group were on {self._device}"
                )
            export = _hold(tensor.untyped_storage(), self)
            self._held[export.id] = export
            self._drop()
        return _Registration(tensor, _ref(tensor, export), self._registrations)

    def _use(self, device: torch.device) -> None:
        """Tells the worker its device, and the page of values for it."""
        pages = _pages_of(device)
        with torch.cuda.device(device):  # the driver's calls make it the thread's current device
            page = pages.take(torch.cuda.current_stream(device))
        try:
            self._notify((_USE, device.index or 0), None if page is None else page.descriptor, None)
        except BaseException:
            if page is not None:  # `close` may have been called already
                pages.give_back(page)
            raise
        if page is not None:
            self._awaited = Awaited(page)
        self._device = device

    def _drop(self) -> None:
        """Asks the worker to drop memory that the user has freed."""
        freed: list[_Export] = []
        while self._freed_exports:
            freed.append(self._freed_exports.popleft())
        if freed:
            self._notify((_DROP, *[export.id for export in freed]), None, _Dropped(freed, self))

    def mark(self) -> _Mark:
        return self._marks.mark(self._current())

    def follow(self, mark: _Mark) -> bool:
        slot, value, _ = mark
        if _is_event(mark):
            return False
        assert self._awaited is not None, "the worker writes values into the page that it got"
        device = self._current()
        with torch.cuda.device(device):
            self._awaited.follow(torch.cuda.current_stream(device), slot, value)
        return True

    def reached(self, mark: _Mark) -> bool:
        slot, value, _ = mark
        if self._awaited is not None and not _is_event(mark):
            return self._awaited.reached(slot, value)
        event = self._marks.event(mark, self._current())
        return event is None or event.query()

    def _current(self) -> torch.device:
        return self._device or torch.device(_DEVICE, torch.cuda.current_device())

    def free_streams(self) -> None:
        if self._awaited is not None:
            self._awaited.release()

    def close(self) -> None:
        self.free_streams()
        with self._lock:
            again, self._closed = self._closed, True
            held = list(self._held.values())
            self._held.clear()
            self._freed_exports.clear()
        self._registrations.clear()
        if self._awaited is not None and not again:
            _pages_of(self._current()).give_back(self._awaited.page)
        _unhold(held, self)
        self._marks.clear()


class WorkerEnd(Borrowing):
    """The worker's end. Operations take turns on streams: one that waits for a silent peer delays none."""

    def __init__(self) -> None:
        # Set by the trainer, and kept here because each thread has its own current device.
        self._device = torch.device(_DEVICE, 0)
        self._marks = _Marks()
        self._imports: dict[int, torch.UntypedStorage] = {}
        self._streams: list[torch.cuda.Stream] = []
        self._turn = 0
        self._idle: Optional[torch.cuda.Stream] = None
        self._written: Optional[WrittenValues] = None  # None: marks are events
        self._lock = threading.Lock()

    def borrow(self, ref: tuple[Any, ...]) -> torch.Tensor:
        export, index, dtype, shape, stride, offset, size, at, handle = ref
        device, dtype = torch.device(_DEVICE, index), getattr(torch, dtype)
        if not handle:
            return torch.empty(0, dtype=dtype, device=device).as_strided(shape, stride)
        with self._lock:
            storage = self._imports.get(export)
            if storage is None:
                # No event is passed, because marks order the work.
                storage = torch.UntypedStorage._new_shared_cuda(
                    device.index, handle, size, at, _NO_COUNTER, 0, b"", False
                )
                self._imports[export] = storage
        return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, stride)

    def notified(self, note: tuple[Any, ...], descriptor: Optional[int]) -> None:
        """Reads a note. Storages to drop are unmapped; the trainer names them after their operations' end."""
        kind, *numbers = note
        if kind == _USE:
            torch.cuda.set_device(numbers[0])
            self._device = torch.device(_DEVICE, numbers[0])
            numbers = []
            if descriptor is not None:
                self._write_values(descriptor)
        with self._lock:
            dropped = [self._imports.pop(number, None) for number in numbers]
        if any(storage is not None for storage in dropped):
            # Unmapping waits for the current stream, so it is done on an idle one.
            if self._idle is None:
                self._idle = torch.cuda.Stream(self._device)
            with torch.cuda.stream(self._idle):
                dropped.clear()

    def _write_values(self, descriptor: int) -> None:
        try:
            of_device = driver.driver_of(self._device)
            if of_device is not None:
                self._written = WrittenValues(
                    Page(of_device, torch.cuda.current_stream(self._device), descriptor)
                )
        except (RuntimeError, OSError):  # the driver, or the system, refuses
            pass
        finally:
            os.close(descriptor)

    def mark(self) -> _Mark:
        if self._written is not None:
            slot, value = self._written.mark(torch.cuda.current_stream(self._device))
            return slot, value, b""
        return self._marks.mark(self._device)

    def follow(self, mark: _Mark) -> None:
        """Begins an operation: makes the next stream the current one, which waits for the trainer's mark."""
        if not self._streams:
            self._streams = [torch.cuda.Stream(self._device) for _ in range(_STREAMS)]
        stream = self._streams[self._turn]
        self._turn = (self._turn + 1) % _STREAMS
        torch.cuda.set_stream(stream)
        event = self._marks.event(mark, self._device)
        if event is not None:
            event.wait(stream)


def _is_event(mark: _Mark) -> bool:
    return mark[2] != b""


trainer, worker = TrainerEnd, WorkerEnd


def prepare(device: torch.device) -> None:
    """Worker: makes a device the current one and creates its context, which takes device memory."""
    module: Any = torch.get_device_module(device)
    module.set_device(device)
    torch.empty(1, device=device)


# A tensor as a record


def _check(tensor: torch.Tensor) -> torch.device:
    device = tensor.device
    if device.type != _DEVICE:
        why = f"PyTorch {torch.__version__} cannot share memory of {device.type} between processes"
        raise RuntimeError(f"tensor on {device}: an isolated group shares memory of CUDA; {why}")
    if tensor.layout is not torch.strided:
        raise RuntimeError(f"tensor of layout {tensor.layout}: an isolated group takes dense tensors")
    if tensor.is_conj() or tensor.is_neg():
        raise RuntimeError(
            "tensor with a conjugation or negation pending: call resolve_conj() or resolve_neg() first"
        )
    return device


def _ref(tensor: torch.Tensor, export: _Export) -> tuple[Any, ...]:
    return (
        export.id,
        tensor.device.index or 0,
        dtype_name(tensor.dtype),
        (*tensor.shape,),
        tensor.stride(),
        tensor.storage_offset(),
        export.size,
        export.offset,
        export.handle,
    )
