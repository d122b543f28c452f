"""A device that two processes share, without a device: it tells who did not wait.

Tensors lie in a file that both processes map. What is queued on a stream runs in order, as soon as the process is not
*held* and everything it waits for has happened: if possible, before the call that queued it returns. A mark is a word
of the file. So the device is as late, and as early, as a test wants it, and no test depends on timing:

- `write` leaves garbage in the memory until its turn comes, as memory is whose kernel has not run;
- freed memory is filled with garbage, and is the next to be handed out;
- a held process stands for a busy device: what it queues waits, what others queue does not.

`trainer` and `worker` make this module a kind of device for isolated groups. What is in `BROKEN` is left out, to show
that the tests would notice.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
import time
import weakref
from collections import deque
from datetime import timedelta
from typing import Callable, Optional, Union

import torch
import torch.distributed as dist
from torch.distributed import Work
from torch.futures import Future

from torchft.process_group.isolated.sharing import Lease, Sharing, Tell

# What a broken Sharing leaves out; sent to the worker with the file.
BROKEN: set[str] = set()
# Whether the trainer waits on the host, as it does with CUDA, instead of making its stream wait.
ON_HOST = False
WORKER_DOES_NOT_FOLLOW = "the worker does not wait for what the trainer has queued"
TRAINER_DOES_NOT_FOLLOW = "the trainer does not wait for what the worker has queued"
FREED_TOO_EARLY = "the trainer does not ask whether the worker's device is done before it frees memory"

TRAINER, WORKER = 0, 1

_BYTES = 1 << 20
_WORDS = 1 << 13  # holds, and marks: each 8 bytes, at the begin of the file
_ALIGN = 64
_GARBAGE = 0xFF  # NaN as a float, -1 as an integer
_HOLD = 0  # word of TRAINER, then of WORKER
_SENT = 2  # likewise: how many marks were made for the other process
_BUSY = 4  # likewise: whether anything is still to be done
_FIRST_MARK = 16
_DEADLINE_SEC = 20.0

_MARK = struct.Struct("<Q")
_REF = struct.Struct("<QQBB")  # where, how many bytes, dtype, dimensions
_DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.bfloat16, torch.uint8]


class Stream:
    """What is queued, in order: things to do, and words to wait for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._queue: deque[Union[int, Callable[[], None]]] = deque()

    def do(self, what: Callable[[], None]) -> None:
        self._add(what)

    def wait(self, word: int) -> None:
        self._add(word)

    def _add(self, item: Union[int, Callable[[], None]]) -> None:
        with self._device.changed:
            self._queue.append(item)
            self.run()
            self._device.note_busy()
            self._device.changed.notify_all()

    def run(self) -> None:
        """Runs what can run; the device's lock is held."""
        while self._queue and not self._device.held(self._device.side):
            item = self._queue[0]
            if isinstance(item, int):
                if not self._device.word(item):
                    return
            else:
                item()
            self._queue.popleft()

    @property
    def idle(self) -> bool:
        return not self._queue


class Device:
    """One process' view of the device.

    Args:
        descriptor: of the file; None makes one.
        side: TRAINER or WORKER.
    """

    def __init__(self, descriptor: Optional[int], side: int) -> None:
        if descriptor is None:
            descriptor, path = tempfile.mkstemp(prefix="simulated-device-")
            os.unlink(path)
            os.truncate(descriptor, _BYTES)
        self.descriptor = descriptor
        self.side = side
        self.memory = mmap.mmap(descriptor, _BYTES)
        self.changed = threading.Condition(threading.RLock())
        self.default = Stream(self)
        self._streams = [self.default]
        self._current = threading.local()
        self._marks = _FIRST_MARK + side * (_WORDS // 2)
        self._free: dict[int, list[int]] = {}
        self._next = 8 * _WORDS
        self._blocks: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._closed = False
        # Looks at what the other process does; what this one can do itself is done at once.
        self._pump = threading.Thread(target=self._run, name="simulated_device", daemon=True)
        self._pump.start()

    # Words

    def word(self, number: int) -> int:
        return struct.unpack_from("<q", self.memory, 8 * number)[0]

    def set_word(self, number: int, value: int) -> None:
        struct.pack_into("<q", self.memory, 8 * number, value)

    def held(self, side: int) -> bool:
        return bool(self.word(_HOLD + side))

    def hold(self, side: int, on: bool = True) -> None:
        """The streams of this process stop, or go on."""
        with self.changed:
            self.set_word(_HOLD + side, on)
            self.changed.notify_all()

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Waits until the other process has done something that shows in the file."""
        end = time.monotonic() + _DEADLINE_SEC
        while not what():
            assert time.monotonic() < end, "the other process never got there"
            time.sleep(0.001)

    # Streams

    def stream(self) -> Stream:
        stream = Stream(self)
        with self.changed:
            self._streams.append(stream)
        return stream

    @property
    def current(self) -> Stream:
        return getattr(self._current, "stream", self.default)

    @current.setter
    def current(self, stream: Stream) -> None:
        self._current.stream = stream

    def mark(self) -> int:
        """A word that is set when the current stream gets there."""
        with self.changed:
            number = self._marks
            self._marks += 1
        self.current.do(lambda: self.set_word(number, 1))
        return number

    def note_busy(self) -> None:
        self.set_word(_BUSY + self.side, not all(stream.idle for stream in self._streams))

    def busy(self, side: int) -> bool:
        return bool(self.word(_BUSY + side))

    def sent(self, side: int) -> int:
        """How many marks the process has made for the other: an operation is queued when the worker's is made."""
        return self.word(_SENT + side)

    def synchronize(self) -> None:
        """Waits until the streams of this process have done everything."""
        with self.changed:
            done = self.changed.wait_for(lambda: all(stream.idle for stream in self._streams), _DEADLINE_SEC)
        assert done, "the device never got there"

    def _run(self) -> None:
        while not self._closed:
            with self.changed:
                for stream in self._streams:
                    stream.run()
                self.note_busy()
                self.changed.notify_all()
                if all(stream.idle for stream in self._streams):
                    self.changed.wait(0.1)
            time.sleep(0.001)

    def close(self) -> None:
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self._pump.join(_DEADLINE_SEC)
        # The memory stays mapped for as long as a tensor is in it.
        os.close(self.descriptor)

    # Memory

    def empty(self, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor in the device's memory, full of garbage; the memory that was freed last is taken first."""
        size = -(-count * dtype.itemsize // _ALIGN) * _ALIGN
        free = self._free.setdefault(size, [])
        if free:
            where = free.pop()
        else:
            where, self._next = self._next, self._next + size
        assert where + size <= _BYTES, "the simulated device is full"
        self._garble(where, size)
        tensor = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=where)
        storage = tensor.untyped_storage()
        weakref.finalize(storage, self._freed, id(storage), where, size).atexit = False
        self._blocks[id(storage)] = (weakref.ref(storage), where)
        return tensor

    def _freed(self, key: int, where: int, size: int) -> None:
        del self._blocks[key]
        self._garble(where, size)
        self._free[size].append(where)

    def _garble(self, where: int, size: int) -> None:
        self.memory[where : where + size] = bytes([_GARBAGE]) * size

    def where(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        known, where = self._blocks.get(id(storage), (None, 0))
        if known is None or known() is not storage:
            raise ValueError("tensor is not in the simulated device's memory")
        return where

    def view(self, where: int, size: int) -> torch.UntypedStorage:
        """Memory of the other process."""
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=where).untyped_storage()

    # Kernels

    def write(self, tensor: torch.Tensor, value: float) -> None:
        """Fills the tensor, when its turn comes; garbage is in it until then."""
        torch.frombuffer(self.memory, dtype=torch.uint8, count=tensor.nbytes, offset=self.where(tensor)).fill_(_GARBAGE)

        def fill() -> None:
            tensor.fill_(value)

        self.current.do(fill)

    def read(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Gets a copy of the tensor as it is when the turn of this comes."""
        result: list[torch.Tensor] = []
        self.current.do(lambda: result.append(tensor.clone()))
        return result


# The seam


class _Lease:
    def __init__(self, tensor: Optional[torch.Tensor], ref: bytes) -> None:
        self.tensor = tensor
        self.ref = ref

    def fetch(self) -> None:
        pass

    def release(self) -> None:
        self.tensor = None


class SimulatedSharing:
    """Either end."""

    def __init__(self, device: Optional[Device], broken: set[str], tell: Optional[Tell] = None) -> None:
        self._device = device
        self._broken = broken
        self._tell = tell

    @property
    def device(self) -> Device:
        assert self._device is not None, "the trainer has not told which file the device is"
        return self._device

    def told(self, note: bytes, descriptor: Optional[int]) -> None:
        if descriptor is None:
            return
        global CURRENT
        self._device = CURRENT = Device(descriptor, WORKER)
        self._broken = set(note.decode().splitlines())

    def lend(self, tensor: torch.Tensor, read: bool, write: bool) -> Lease:
        storage = tensor.untyped_storage()
        head = _REF.pack(self.device.where(tensor), storage.nbytes(), _DTYPES.index(tensor.dtype), tensor.dim())
        layout = struct.pack(f"<{1 + 2 * tensor.dim()}q", tensor.storage_offset(), *tensor.shape, *tensor.stride())
        return _Lease(tensor, head + layout)

    def borrow(self, ref: bytes) -> torch.Tensor:
        where, size, dtype, dimensions = _REF.unpack_from(ref)
        offset, *layout = struct.unpack_from(f"<{1 + 2 * dimensions}q", ref, _REF.size)
        tensor = torch.empty(0, dtype=_DTYPES[dtype])
        return tensor.set_(self.device.view(where, size), offset, layout[:dimensions], layout[dimensions:])

    def mark(self) -> bytes:
        device = self.device
        mark = _MARK.pack(device.mark())
        device.set_word(_SENT + device.side, device.word(_SENT + device.side) + 1)
        return mark

    def follow(self, mark: bytes) -> None:
        device = self.device
        if device.side == WORKER:
            device.current = device.stream()
        elif ON_HOST:
            assert self._tell is not None
            while not self.reached(mark):
                # Fails when the worker is gone.
                self._tell(b"", None)
                time.sleep(0.001)
            return
        if (WORKER_DOES_NOT_FOLLOW, TRAINER_DOES_NOT_FOLLOW)[device.side == TRAINER] not in self._broken:
            device.current.wait(*_MARK.unpack(mark))

    def reached(self, mark: bytes) -> bool:
        return FREED_TOO_EARLY in self._broken or bool(self.device.word(*_MARK.unpack(mark)))

    def close(self) -> None:
        pass


# The device of this process: a test makes the trainer's, the worker is told.
CURRENT: Optional[Device] = None


def trainer(tell: Tell) -> Sharing:
    device = CURRENT
    assert device is not None, "make a Device first, and put it into simulated.CURRENT"
    tell("\n".join(BROKEN).encode(), device.descriptor)
    return SimulatedSharing(device, set(BROKEN), tell)


def worker() -> Sharing:
    return SimulatedSharing(None, set())


# What the worker runs


class _LateWork(Work):
    """Done, for the host, once it is queued; whoever waits has his stream wait."""

    def __init__(self, device: Device, word: int, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._device = device
        self._word = word
        self._tensors = tensors

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        self._device.current.wait(self._word)
        return True

    def is_completed(self) -> bool:
        return bool(self._device.word(self._word))

    def get_future(self) -> Future[list[torch.Tensor]]:
        future: Future[list[torch.Tensor]] = Future()
        future.set_result(self._tensors)
        return future


class LateGroup(dist.ProcessGroup):
    """A group of one whose peers, it pretends, always have the same: a sum is twice as much.

    As with NCCL, an operation runs on a stream of the group's own.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._stream: Optional[Stream] = None

    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> Work:
        device = CURRENT
        assert device is not None, "no operation before a tensor was lent"
        if self._stream is None:
            self._stream = device.stream()
        ready = device.mark()
        self._stream.wait(ready)

        def double() -> None:
            for tensor in tensors:
                tensor.mul_(2)

        self._stream.do(double)
        before, device.current = device.current, self._stream
        done = device.mark()
        device.current = before
        return _LateWork(device, done, tensors)

    def size(self) -> int:
        return 1

    def getBackendName(self) -> str:
        return "late"
