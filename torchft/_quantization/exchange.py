"""The exchange of quantized codes between ranks: an all-to-all and, in an allreduce, an all-gather.

On a device (NCCL, XCCL) collectives are queued on a stream: both exchanges are queued at once, and the host
continues.

With Gloo the host waits for the first exchange before it starts the second one. It does so on a separate
thread, while the training thread may start other collectives. Gloo matches the collectives of the ranks by
the order in which each rank starts them, and with two threads that order would be undefined. So the separate
thread only sends and receives, with tags that nothing else uses.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import weakref
from datetime import timedelta
from typing import Any, Callable, Optional, Sequence

import torch
from torch.distributed import ProcessGroup as BaseProcessGroup
from torch.distributed import Work
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions
from torch.futures import Future

from torchft._agreement import difference
from torchft.utils import DeviceEvent, DeviceThread, dtype_name, get_stream_context
from torchft.work import _DummyWork, _OrderedByWait, _PendingWork

# Tags of sends and receives; large, so that they differ from those of other users of the group.
_DESCRIPTION_TAG = 0x71F7_0001
_SCATTER_TAG = 0x71F7_0002
_GATHER_TAG = 0x71F7_0003

_DESCRIPTION_BYTES = 512


def _peers_of(pg: BaseProcessGroup) -> Any:
    """The object that is replaced when the group gets new peers: its innermost group, or its worker process.
    A group of PyTorch or of another project keeps them.
    """
    return getattr(pg, "_peers_now", lambda: pg)()


def _on_host(pg: BaseProcessGroup) -> bool:
    """Whether the backend is Gloo, or a wrapper of it."""
    return "gloo" in (pg.getBackendName() if hasattr(pg, "getBackendName") else pg.name()).lower()


class Exchange:
    """Two exchanges of a buffer with a slice for each rank, among the present peers of a group."""

    def __init__(self, pg: BaseProcessGroup) -> None:
        self._pg: Any = pg
        self._peers = weakref.ref(_peers_of(pg))
        self.rank: int = pg.rank()
        self.ranks: int = pg.size()

    def has_other_peers(self) -> bool:
        """Whether the group got new peers since. An error of the group says that it has none."""
        return _peers_of(self._pg) is not self._peers()

    def scatter(self, buffer: torch.Tensor) -> torch.Tensor:
        """All to all: slice i of the result is the slice for this rank in the buffer of rank i."""
        raise NotImplementedError

    def gather(self, buffer: torch.Tensor) -> torch.Tensor:
        """All gather: slice i of the result is slice i of the buffer of rank i."""
        raise NotImplementedError


def start(
    run: Callable[[Exchange], None],
    what: str,
    tensors: Sequence[torch.Tensor],
    result: object,
    process_group: BaseProcessGroup,
    stream: Optional[torch.Stream],
) -> Work:
    """Runs a function that exchanges buffers among the ranks of a group, without waiting for it.

    Args:
        what: a description of the operation, which must be equal on all ranks, as the tensors' shapes.
        tensors: the tensors that ``run`` reads and writes.
        result: the value of the work's future.
        stream: the stream for the work on a device; None: one that all operations on this device share.
    """
    if not any(tensor.numel() for tensor in tensors):
        return _DummyWork(result)
    device = tensors[0].device
    if device.type == "cpu" or _on_host(process_group):
        kinds = ", ".join(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" for tensor in tensors)
        return _start_on_host(run, f"{what}: {kinds}", device, result, process_group, stream)
    return _StreamWork(run, tensors, result, process_group, stream)


@functools.cache
def _own_stream(device: torch.device) -> torch.Stream:
    """The stream of the operations on a device. PyTorch's allocator keeps free memory for each stream: with a
    new stream for each operation, it would keep memory for all streams of PyTorch's pool.
    """
    return torch.Stream(device)


# On a device


class _StreamExchange(Exchange):
    def scatter(self, buffer: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(buffer)
        self._pg.alltoall_base(received, buffer, [], [], AllToAllOptions()).wait()
        return received

    def gather(self, buffer: torch.Tensor) -> torch.Tensor:
        mine = buffer.view(self.ranks, -1)[self.rank].clone()
        self._pg.allgather_into_tensor_coalesced([buffer], [mine], AllgatherOptions()).wait()
        return buffer


class _StreamWork(_OrderedByWait):
    """Queues both exchanges at once; `wait` orders the current stream behind them."""

    def __init__(
        self,
        run: Callable[[Exchange], None],
        tensors: Sequence[torch.Tensor],
        result: object,
        pg: BaseProcessGroup,
        stream: Optional[torch.Stream],
    ) -> None:
        super().__init__()
        self._result = result
        self._exchange = _StreamExchange(pg)
        device = tensors[0].device
        before = DeviceEvent([device])
        own = _own_stream(device) if stream is None else stream
        with get_stream_context(own):
            before.follow()
            run(self._exchange)
            for tensor in tensors:
                tensor.record_stream(own)
            self._end = DeviceEvent([device])
            self._future: Future[object] = Future(devices=[device])
            self._future.set_result(result)  # sets the result now: callers' streams wait for this stream

    def _over(self) -> bool:
        """Whether the group was aborted, or got new peers, since: then the outputs are undefined."""
        try:
            return self._exchange.has_other_peers()
        except (AssertionError, RuntimeError):
            return True

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        """Makes the current stream wait for the end of this work; the host continues. RuntimeError: the group
        was aborted, or got new peers, since this work began.
        """
        if self._over():
            raise RuntimeError(
                "a quantized collective ended with its group, which was aborted or has new peers"
            )
        self._end.follow()
        return True

    def get_future(self) -> Future[object]:
        return self._future

    def is_completed(self) -> bool:
        return self._end.reached()

    def is_success(self) -> bool:
        return self._end.reached() and not self._over()

    def result(self) -> Any:
        return self._result


# On the host


class _HostExchange(Exchange):
    def __init__(self, pg: BaseProcessGroup, what: str, device: torch.device) -> None:
        super().__init__(pg)
        self._what = what
        self._device = device

    def scatter(self, buffer: torch.Tensor) -> torch.Tensor:
        self._compare()
        mine = buffer.cpu().view(self.ranks, -1)
        received = torch.empty_like(mine)
        received[self.rank] = mine[self.rank]
        self._swap(_SCATTER_TAG, lambda peer: mine[peer], lambda peer: received[peer])
        return received.view(-1).to(self._device)

    def gather(self, buffer: torch.Tensor) -> torch.Tensor:
        all = buffer.cpu().view(self.ranks, -1)
        self._swap(_GATHER_TAG, lambda peer: all[self.rank], lambda peer: all[peer])
        return all.view(-1).to(self._device)

    def _swap(
        self, tag: int, sent: Callable[[int], torch.Tensor], received: Callable[[int], torch.Tensor]
    ) -> None:
        """Exchanges a tensor with every peer, and waits for all of them."""
        other_peers = "the process group got other peers in the middle of a quantized collective"
        others = [peer for peer in range(self.ranks) if peer != self.rank]
        try:
            if self.has_other_peers():
                raise RuntimeError(other_peers)
            works = [self._pg.recv([received(peer)], peer, tag) for peer in others]
            works += [self._pg.send([sent(peer)], peer, tag) for peer in others]
        except AssertionError as e:  # the group has no peers while another thread reconfigures it
            raise RuntimeError(other_peers) from e
        for work in works:
            work.wait()

    def _compare(self) -> None:
        """Raises if a peer runs another operation, whose buffers would have other sizes."""
        all = torch.zeros(self.ranks, _DESCRIPTION_BYTES, dtype=torch.uint8)
        all[self.rank] = _encode(self._what)
        self._swap(_DESCRIPTION_TAG, lambda peer: all[self.rank], lambda peer: all[peer])
        for peer in range(self.ranks):
            if not torch.equal(all[peer], all[self.rank]):
                here, there = repr(_decode(all[self.rank])), repr(_decode(all[peer]))
                allowed = (
                    "the same shapes, dtypes, order, reduction and TORCHFT_QUANTIZATION_FORMAT in all groups"
                )
                raise ValueError(difference("a quantized collective", here, f"rank {peer}", there, allowed))


def _encode(what: str) -> torch.Tensor:
    """Pads a text to a fixed length. A longer text is cut, and ends with a digest of the whole text."""
    text = what.encode()
    if len(text) > _DESCRIPTION_BYTES:
        digest = hashlib.blake2b(text, digest_size=8).hexdigest().encode()
        text = text[: _DESCRIPTION_BYTES - 32] + b" ... " + digest
    return torch.frombuffer(bytearray(text.ljust(_DESCRIPTION_BYTES)), dtype=torch.uint8)


def _decode(text: torch.Tensor) -> str:
    return bytes(text.tolist()).decode(errors="replace").rstrip()


# For each set of peers, the work that was started last. Works among the same peers run one after the other,
# because they use the same tags.
_last: weakref.WeakKeyDictionary[Any, _HostWork] = weakref.WeakKeyDictionary()
_last_lock = threading.Lock()


def _on_stream(
    run: Callable[[Exchange], None], device: torch.device, stream: Optional[torch.Stream]
) -> Callable[[Exchange], None]:
    """Wraps `run`: it begins behind the current stream's work, and returns when the device is finished."""
    before = DeviceEvent([device])
    own = _own_stream(device) if stream is None else stream

    def run_there(exchange: Exchange) -> None:
        with get_stream_context(own):
            before.follow()
            run(exchange)
            own.record_event().synchronize()  # not all of the stream, which works among other peers share

    return run_there


def _start_on_host(
    run: Callable[[Exchange], None],
    what: str,
    device: torch.device,
    result: object,
    pg: BaseProcessGroup,
    stream: Optional[torch.Stream],
) -> _HostWork:
    """Runs `run` on a thread, after the previous work among the same peers."""
    exchange = _HostExchange(pg, what, device)
    if device.type != "cpu":
        run = _on_stream(run, device, stream)
    work = _HostWork(result, [] if device.type == "cpu" else [device])
    peers = _peers_of(pg)
    with _last_lock:
        previous, _last[peers] = _last.get(peers), work
    if previous is not None and previous._ended.is_set():
        previous = None
    DeviceThread(target=work.run, args=(run, exchange, previous), name="torchft_quantized").start()
    return work


class _HostWork(_PendingWork):
    """The work of a thread of its own, which exchanges and computes, and then ends."""

    def run(self, run: Callable[[Exchange], None], exchange: Exchange, previous: Optional[_HostWork]) -> None:
        """The function of the thread: waits for the previous work, then does this work."""
        try:
            if previous is not None:
                previous._ended.wait()  # returns in time, because its sends and receives have deadlines
                if previous._error is not None:
                    raise previous._error
            with torch.no_grad():
                run(exchange)
        except Exception as e:
            self.end(e)
        else:
            self.end(None)

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        """Waits until the result is available; TimeoutError if it is late, or the error of the work."""
        seconds = None if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
        if not self._ended.wait(seconds):
            raise TimeoutError(f"timed out: a quantized collective did not complete within {seconds} s")
        if self._error is not None:
            raise self._error
        return True
