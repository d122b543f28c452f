"""Moves device memory through two blocks of host memory: one is filled while the other is emptied."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Generator, Iterator, List, Optional, Type

import torch

from torchft.utils import free_stream, poll

BLOCK = 32 << 20  # bytes; holds several of the blocks that are sent over the network
# Blocks per device type kept for the next reader: page-locked memory is slow to allocate, and scarce.
_KEPT = 4

Wait = Callable[[], None]


class StreamCopies:
    """Copies from and to one device on a separate stream, in the order in which they are queued, and behind
    the work that was queued on the device before. For CUDA and backends with the same interface.
    """

    def __init__(self, device: torch.device) -> None:
        self._backend: Any = getattr(torch, device.type)
        before = self._backend.Event()
        before.record(self._backend.current_stream(device))
        self._stream = free_stream(device)
        self._stream.wait_event(before)

    def block(self, nbytes: int) -> torch.Tensor:
        """Allocates host memory that the device reads and writes directly (page-locked)."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        """Queues a copy between device and block. Returns a function that waits until it has ended."""
        with self._backend.stream(self._stream):
            target.copy_(source, non_blocking=True)
            ended = self._backend.Event()
            ended.record(self._stream)
        return ended.synchronize


def copies_for(kind: str) -> Optional[Type[StreamCopies]]:
    """Returns the class of copies for a device type, such as "cuda"; None for a type that is not tested."""
    # an accelerator that registers itself has CUDA's interface
    registered = kind == torch._C._get_privateuse1_backend_name() and hasattr(
        getattr(torch, kind, None), "Stream"
    )
    return StreamCopies if registered or kind in ("cuda", "xpu") else None


_lock = threading.Lock()
_free: Dict[str, List[torch.Tensor]] = {}


@contextmanager
def two_blocks(kind: str, copies: StreamCopies, nbytes: int = 0) -> Iterator[List[torch.Tensor]]:
    """Two blocks of at least `nbytes` and `BLOCK` for one reader. No copy may be in progress at the end."""
    with _lock:
        kept = _free.setdefault(kind, [])
        blocks = [kept.pop() for _ in range(min(2, len(kept)) if nbytes <= BLOCK else 0)]
    blocks += [copies.block(max(BLOCK, nbytes)) for _ in range(2 - len(blocks))]
    try:
        yield blocks
    finally:
        with _lock:
            kept += [block for block in blocks if block.numel() == BLOCK][: max(0, _KEPT - len(kept))]


class Staged:
    """The bytes of some device memory, a flat tensor, block by block, for any number of readers."""

    def __init__(self, source: torch.Tensor, copies: StreamCopies) -> None:
        self._source = source
        self._copies = copies
        self._lock = threading.Lock()
        self._under_way: List[Wait] = []
        self._closed = False

    def close(self, wait: bool = True) -> None:
        """Begins no further copy. After this call the device memory is not read any more.

        Args:
            wait: whether to wait for the copies in progress; if not, these still read it.
        """
        with self._lock:
            self._closed = True
            under_way = list(self._under_way) if wait else []
        for wait_for in under_way:
            wait_for()

    def read(self, start: int) -> Generator[torch.Tensor, None, None]:
        """Yields the bytes from an offset on, in blocks, each valid until the next. `close` ends it early."""
        turn = 0
        with two_blocks(self._source.device.type, self._copies) as blocks:
            ahead = self._start(blocks[0], start)
            try:
                while ahead is not None:
                    now, wait = ahead
                    start += now.numel()
                    turn += 1
                    ahead = self._start(blocks[turn % 2], start)
                    self._end(wait)
                    yield now
            finally:
                if ahead is not None:
                    self._end(ahead[1])

    def _start(self, block: torch.Tensor, start: int) -> Optional[tuple[torch.Tensor, Wait]]:
        source = self._source[start : start + BLOCK]
        with self._lock:
            if self._closed or source.numel() == 0:
                return None
            target = block[: source.numel()]
            wait = self._copies.start(target, source)
            self._under_way.append(wait)
            return target, wait

    def _end(self, wait: Wait) -> None:
        wait()
        with self._lock:
            self._under_way.remove(wait)


class Uploads:
    """Copies host memory to a device, without a wait for each copy: while the device empties one page-locked
    block, the host fills the other. A copy from other host memory waits on the host.

    The copies are queued on the current stream: they follow the work that was queued there, and precede later
    work. As a context manager it waits at its end until the device has all data.

    Args:
        timeout: seconds within which the device must have emptied a block
    """

    def __init__(self, device: torch.device, timeout: float) -> None:
        copies = copies_for(device.type)
        assert copies is not None
        self._device = device
        self._timeout = timeout
        self._until_closed = ExitStack()
        self._blocks = self._until_closed.enter_context(two_blocks(device.type, copies(device)))
        self._events: List[Any] = [None, None]  # behind the last copy from each block
        self._turn = self._used = 0

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._next_block()
                self._await(self._events[1 - self._turn])
                return
        except BaseException:
            kind = True
            raise
        finally:
            if kind is not None:
                self._blocks.clear()  # nobody else gets them, because the device may still read them
            self._until_closed.close()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy of a tensor in host memory to a contiguous one of its shape and dtype on the device.
        The source may be changed when this returns. TimeoutError: the device has not emptied a block in time.
        """
        into, data = (t.reshape(-1).view(torch.uint8) for t in (target, source))
        start = 0
        while start < data.numel():
            if self._used == BLOCK:
                self._next_block()
            end = min(data.numel(), start + BLOCK - self._used)
            block = self._blocks[self._turn][self._used : self._used + end - start]
            block.copy_(data[start:end])
            into[start:end].copy_(block, non_blocking=True)
            # the next tensor begins at a multiple of 64 bytes, since copies between other addresses are slow
            self._used, start = min(BLOCK, -(-(self._used + end - start) // 64) * 64), end

    def _next_block(self) -> None:
        self._events[self._turn] = torch.accelerator.current_stream(self._device).record_event()
        self._turn, self._used = 1 - self._turn, 0
        self._await(self._events[self._turn])

    def _await(self, event: Any) -> None:
        if event is not None and not poll(event.query, self._timeout):
            raise TimeoutError(
                f"timed out: {self._device} did not take a part of a state within {self._timeout:g} s"
            )


class Unloading:
    """Copies received pieces from device memory to host memory: while one is received, the one before is
    copied.

    It has two pieces of device memory, and two of page-locked host memory, since a copy from a device to
    other host memory waits on the host. After a failed transfer a copy may still be queued; PyTorch's
    allocator of page-locked memory does not use that memory again before the copy's end.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._backend: Any = getattr(torch, device.type)
        self._device = device
        self._stream = free_stream(device)
        self._stages = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._blocks = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        # Of each stage the piece in host memory, and the event behind the copy; None: there is no copy.
        self._pieces: List[Optional[torch.Tensor]] = [None, None]
        self._events: List[Any] = [None, None]
        self._turn = 0

    def ready_for(self, piece: torch.Tensor, timeout: float) -> bool:
        """Takes the next stage for a piece, after the copy from it; False: not within `timeout` seconds."""
        self._turn = 1 - self._turn
        if not self._finish(self._turn, timeout):
            return False
        self._pieces[self._turn] = piece
        return True

    @property
    def stage(self) -> torch.Tensor:
        """Device memory for the present piece."""
        piece = self._pieces[self._turn]
        assert piece is not None
        return self._stages[self._turn][: piece.numel()]

    def start(self) -> None:
        """Queues the copy of the present piece behind the work on the current stream, which receives it."""
        stage = self.stage
        before = self._backend.Event()
        before.record(self._backend.current_stream(self._device))
        self._stream.wait_event(before)
        with self._backend.stream(self._stream):
            self._blocks[self._turn][: stage.numel()].copy_(stage, non_blocking=True)
            ended = self._backend.Event()
            ended.record(self._stream)
        self._events[self._turn] = ended

    def finish(self, timeout: float) -> bool:
        """Waits for all copies; False if they do not end within `timeout` seconds."""
        until = time.monotonic() + timeout
        # The older one first: its memory is written while the device still copies the other one.
        return all(self._finish(turn, until - time.monotonic()) for turn in (1 - self._turn, self._turn))

    def _finish(self, turn: int, timeout: float) -> bool:
        piece, event = self._pieces[turn], self._events[turn]
        if event is None or piece is None:
            return True
        if not poll(event.query, timeout):
            return False
        piece.copy_(self._blocks[turn][: piece.numel()])
        self._pieces[turn] = self._events[turn] = None
        return True
