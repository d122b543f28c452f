"""Checkpoints over a process group: the source sends the state to each target."""

from __future__ import annotations

import io
import logging
import struct
import time
from collections import deque
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Iterator, List, Optional, Sequence, Tuple, TypeVar

import torch

from torchft._checks import check_positive
from torchft.checkpointing.client.deadline import Deadline
from torchft.checkpointing.client.places import Destination
from torchft.checkpointing.client.progress import TransferProgress
from torchft.checkpointing.client.target import CPU, TargetState
from torchft.checkpointing.codec.handshake import Structure, parse_structure, read_frame
from torchft.checkpointing.codec.stream import storage_bytes, tensor_memory
from torchft.checkpointing.memory.host import HostMemory, flat_storage
from torchft.checkpointing.memory.staging import copies_for, page_locked
from torchft.checkpointing.source.checkpoint import Checkpoint
from torchft.checkpointing.transport import (
    CheckpointError,
    CheckpointTimeout,
    CheckpointTransport,
    Unsendable,
)
from torchft.process_group._timeout import point_to_point_timeout
from torchft.process_group.accelerator import AcceleratorProcessGroup
from torchft.process_group.native import abort_group, errors_of
from torchft.utils import DeviceEvent, on_device

if TYPE_CHECKING:
    from torchft.process_group import ProcessGroup

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

# Bytes of the largest message, the same on both ends. A tensor that is not received in place is received
# through one buffer of this size: the only device memory that a transfer allocates.
_PIECE = 32 << 20
_LEAST_PIECE = 256 << 10
_PIECES = 64
_MAX_HEADER = 8 << 30  # bytes; a larger header is refused as malformed
_MAGIC = 0x746F726368667433  # "torchft3"
_REFUSED = 0x746F726368667421  # "torchft!": followed by a text that says why there is no state
_MAX_REASON = 10_000  # bytes
_LEAD = struct.Struct("<qqq")  # magic, step, and the length of what follows
_EARLY = 0.01  # seconds
_AHEAD = 4  # pieces that are queued on a device behind the one that it moves
_TAG = 1  # messages between two ranks arrive in order, so one tag suffices


class PGTransport(CheckpointTransport[T]):
    """Sends the state over a process group between the replica groups.

    A header with the structure and all other values comes first, then the storages of the tensors, of
    DTensors those of the local shards: each once and whole, also for a tensor that is a part of one.
    `send_checkpoint` returns when everything is sent to all targets, so the source waits for them. The header
    uses the safe encoding of `HTTPTransport`.

    With a group of torchft that works on a device in this process (NCCL, XCCL), each transfer connects source
    and target by a communicator of its own, which takes some time and device memory: the transfer does not
    stand before gradients.

    Args:
        pg: the process group; replica ranks are its ranks
        timeout: limit if the call has none: at a source for each piece of a state, at a target for the whole
            transfer, unless the other groups wait for it (docs/healing.md). Both replace the process group's
            own timeout, except with NCCL in another process or in a native group, where only the group's
            timeout applies.
        device: device on which the process group needs tensors: `cpu` for Gloo, a GPU for NCCL
        state_dict: returns the target's own state. A tensor under the same path there, with the same shape
            and dtype, is received in place; otherwise memory is allocated. After a failed transfer, such
            tensors may be partly old and partly new; they are consistent again after the next successful one.

    Raises:
        ValueError: a timeout that is not positive
    """

    takes_target = True

    def __init__(
        self,
        pg: ProcessGroup,
        timeout: timedelta,
        device: torch.device,
        state_dict: Optional[Callable[[], object]] = None,
    ) -> None:
        check_positive("timeout", timeout)
        self._pg = pg
        self._error = errors_of(pg)
        self._timeout = timeout
        self._device = torch.device(device)
        self._state_dict = state_dict
        self.in_place = state_dict is not None
        self._sent: Optional[_Channel] = None

    def metadata(self) -> str:
        return "<n/a>"

    def disallow_checkpoint(self) -> None:
        """Closes the connections of the last transfer. Not earlier: NCCL may still send from its own buffers
        when the device has read the tensors.
        """
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.close()

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: Optional[timedelta] = None
    ) -> None:
        if not dst_ranks:
            return
        channel = self._channel(dst_ranks, f"checkpoint of step {step} to {dst_ranks}", step, timeout)
        try:
            checkpoint = Checkpoint(state_dict)
        except Unsendable as error:
            self._refuse(channel, step, str(error))
            raise
        storages = checkpoint.encoded.storages
        with self._released(channel, receiving=False):
            self._send_header(channel, _MAGIC, step, checkpoint.structure_frame())
            channel.announced([storage.nbytes() for storage in storages])
            for storage in storages:
                channel.send(storage_bytes(storage))
            channel.wait()
        self._sent = channel

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, reason: str, timeout: timedelta) -> None:
        if dst_ranks:
            what = f"checkpoint of step {step} to {dst_ranks}"
            self._refuse(self._channel(dst_ranks, what, step, timeout), step, reason)

    def _refuse(self, channel: _Channel, step: int, reason: str) -> None:
        with self._released(channel, receiving=False):
            self._send_header(channel, _REFUSED, step, reason.encode()[:_MAX_REASON])
            channel.wait()
        self._sent = channel

    def _send_header(self, channel: _Channel, magic: int, step: int, body: bytes) -> None:
        for data in (_LEAD.pack(magic, step, len(body)), body):
            channel.send(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _channel(
        self, ranks: List[int], what: str, step: int, timeout: Optional[timedelta], of_progress: bool = True
    ) -> _Channel:
        pg: Any = self._pg
        timeout = timeout or self._timeout
        if not isinstance(pg, AcceleratorProcessGroup):
            peers = [(pg, rank) for rank in ranks]
            return _Channel(peers, [self._error], what, timeout, self._device, of_progress)
        try:
            with on_device(self._device):
                pairs = connected(pg, ranks, str(step), timeout)
        except Exception as error:
            kind = CheckpointTimeout if isinstance(error, TimeoutError) else CheckpointError
            raise kind(f"{what}: no connection for it: {error}") from error
        peers = [(pair, 1 - pair.rank()) for pair in pairs]
        errors = [pair.errored for pair in pairs]
        return _Channel(peers, errors, what, timeout, self._device, of_progress)

    def recv_checkpoint(
        self,
        src_rank: int,
        metadata: str,
        step: int,
        timeout: Optional[timedelta] = None,
        target: Optional[TargetState] = None,
    ) -> T:
        """See `CheckpointTransport.recv_checkpoint`.

        Args:
            target: chooses the devices of tensors if this transport has no `state_dict`. Also says whether
                the timeout is one of progress, `TargetState.waited_for`.
        """
        what = f"checkpoint of step {step} from rank {src_rank}"
        waited_for = target is not None and target.waited_for
        if self._state_dict is not None:
            target = TargetState(self._state_dict, writable=True)
        channel = self._channel([src_rank], what, step, timeout, waited_for)
        with closing(channel), self._released(channel, receiving=True):
            sent, structure = self._recv_header(channel)
            progress = channel.progress = TransferProgress(what, logger)
            progress.expect(structure.nbytes)
            channel.announced([region.nbytes for region in structure.regions])
            if sent != step:
                raise CheckpointError(f"{what}: the source sends step {sent}")
            with closing(Destination(structure, target, what, self._home)) as destination:
                for region in destination.regions:
                    channel.recv(region)
                channel.wait()
                progress.done()
                return destination.state()

    def _home(self, device: str) -> torch.device:
        return CPU if device == "cpu" else self._device

    @contextmanager
    def _released(self, channel: _Channel, receiving: bool) -> Iterator[None]:
        """Notifies the other end if this one fails: it, and all groups, would wait until its timeout."""
        try:
            yield
        except Exception:
            if not channel.broken and not (receiving and channel.discard()):
                logger.info("%s: the process group is aborted in the middle of it", channel.what)
                with suppress(Exception):  # the error in progress is the one to report
                    channel.abort()
            if not receiving:
                channel.close()
            raise

    def _recv_header(self, channel: _Channel) -> Tuple[int, Structure]:
        what = channel.what
        magic, step, length = _LEAD.unpack(channel.recv_bytes(_LEAD.size))
        if magic not in (_MAGIC, _REFUSED) or not 0 < length <= _MAX_HEADER:
            raise CheckpointError(
                f"{what}: no header but {[magic, length]}; do both groups use this version of torchft?"
            )
        body = channel.recv_bytes(length)
        if magic == _REFUSED:
            channel.announced([])
            raise CheckpointError(
                f"{what}: the source cannot send its state: {body.decode(errors='replace')}"
            )
        return step, parse_structure(read_frame(io.BytesIO(body), what), what)


@dataclass
class _Channel:
    """Messages to one or more ranks, or from one, with a common deadline. Both ends cut data into the same
    pieces.

    The deadline moves with each piece, except at a target for which the other groups do not wait. A source
    goes on as long as its targets do: they abort the transfer at their deadline. On a device operations are
    only queued, so the host queues few pieces ahead, and waits until the device has ended the first of them.
    """

    peers: List[Tuple[Any, int]]  # the process group of each peer, and its rank there
    errors: Sequence[Callable[[], Optional[Exception]]]  # return the errors of the process groups
    what: str
    timeout: timedelta
    device: torch.device  # device on which the process group needs tensors
    of_progress: bool = True  # whether the deadline moves with each piece
    progress: Optional[TransferProgress] = None  # counts the received bytes

    def __post_init__(self) -> None:
        self.deadline = Deadline(self.timeout.total_seconds(), self.of_progress)
        self._piece = _LEAST_PIECE
        self._stage: Optional[torch.Tensor] = None
        self._left: Optional[deque[int]] = None  # bytes of the regions still to come; None: not known
        self._devices = [] if self.device.type == "cpu" else [self.device]
        # The end of each piece in progress, and its bytes.
        self._queued: deque[Tuple[DeviceEvent, int]] = deque()
        self.broken = False  # set if the other end has an error as well, or has the same deadline

    def announced(self, sizes: List[int]) -> None:
        """Takes over the sizes. A small state is cut into smaller pieces, which take little memory."""
        self._piece = min(_PIECE, max(_LEAST_PIECE, sum(sizes) // _PIECES))
        self._stage = None
        self._left = deque(sizes)

    def send(self, flat: torch.Tensor) -> None:
        """Sends a flat tensor of bytes to all ranks."""
        for piece in flat.split(self._piece) if flat.numel() else ():
            here = piece.to(self.device)
            self._send(here)
            self._mark()

    def recv(self, flat: torch.Tensor) -> None:
        """Receives into a flat tensor of bytes, which is complete after `wait`."""
        for piece in flat.split(self._piece) if flat.numel() else ():
            here = piece if self._is_here(flat) else self._staged(piece.numel())
            self._recv(here)
            if here is not piece and piece.is_cpu and copies_for(self.device.type) is not None:
                # Through page-locked memory, since another copy waits for the device without a deadline.
                staged, here = here, page_locked(piece.numel())
                here.copy_(staged, non_blocking=True)
            self._mark(piece.numel())
            if here is not piece:
                self._wait(ahead=0)
                piece.copy_(here)
        if self._left:
            self._left.popleft()

    def _send(self, piece: torch.Tensor) -> None:
        self._start([partial(pg.send, [piece], rank, _TAG) for pg, rank in self.peers])

    def _recv(self, piece: torch.Tensor) -> None:
        pg, rank = self.peers[0]
        self._start([partial(pg.recv, [piece], rank, _TAG)])

    def recv_bytes(self, length: int) -> bytes:
        flat = flat_storage(length, self.what, CPU, HostMemory())
        self.recv(flat)
        self.wait()
        return bytes(tensor_memory(flat))

    def discard(self) -> bool:
        """Receives and drops the rest, so that the other end does not wait; False if that is impossible."""
        if self._left is None:
            return False
        self.progress = None
        try:
            for nbytes in self._left:
                for start in range(0, nbytes, self._piece):
                    piece = self._staged(min(self._piece, nbytes - start))
                    self._recv(piece)
                    self._mark()
            self.wait()  # else closing the connection would abort what the other end still sends
        except Exception as error:
            logger.info("%s: what is left of it cannot be received: %s", self.what, error)
            return self.broken
        return True

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type and self.device.index in (None, tensor.device.index)

    def _staged(self, nbytes: int) -> torch.Tensor:
        if self._stage is None:
            self._stage = flat_storage(self._piece, self.what, self.device, HostMemory())
        return self._stage[:nbytes]

    def _start(self, operations: List[Callable[[], Any]]) -> None:
        """Starts all operations, then waits for them, or makes the device wait."""
        try:
            with point_to_point_timeout(timedelta(seconds=max(_EARLY, self.deadline.left))):
                works = [start() for start in operations]
            # Pieces that are queued before may take the timeout each.
            before = len(self._queued) * self.timeout.total_seconds() if self.of_progress else 0
            for work in works:
                left = self.deadline.left + before
                if left <= 0:
                    raise TimeoutError("timed out")
                if not work.wait(timedelta(seconds=left)):
                    raise RuntimeError("the process group reported a failure without an error")
        except Exception as error:
            self.broken = True
            # Gloo counts whole milliseconds, and times out a little early.
            if self.deadline.left <= _EARLY or isinstance(error, TimeoutError):
                raise self.timed_out() from error
            raise CheckpointError(f"{self.what}: {type(error).__name__}: {error}") from error

    def timed_out(self, why: str = "") -> CheckpointTimeout:
        how = " without progress" if self.of_progress else ""
        return CheckpointTimeout(
            f"{self.what}: timed out after {self.timeout.total_seconds():g} seconds{how}{why}"
        )

    def abort(self) -> None:
        for pg in {id(pg): pg for pg, _ in self.peers}.values():
            abort_group(pg)

    def close(self) -> None:
        """Ends the connections of this transfer, once the device has ended it."""
        for pg, _ in self.peers:
            if isinstance(pg, AcceleratorProcessGroup):
                pg.shutdown()

    def wait(self) -> None:
        """Waits until all pieces are sent, or received and in their place.

        Raises:
            CheckpointTimeout: the device has not ended them by the deadline, for example because a peer has
                failed
            CheckpointError: the group was aborted in the meantime, so the received data is undefined
        """
        self._wait(ahead=0)
        for error in (errored() for errored in self.errors if self._devices):
            if error is not None:
                raise CheckpointError(f"{self.what}: {error}") from error

    def _mark(self, nbytes: int = 0) -> None:
        """Marks the end of a piece behind the work queued so far. Its bytes count when it is reached."""
        self._queued.append((DeviceEvent(self._devices), nbytes))
        self._wait(_AHEAD)

    def _wait(self, ahead: int) -> None:
        """Waits until at most `ahead` pieces are in progress. Each one that ends moves the deadline."""
        while self._queued and (len(self._queued) > ahead or self._queued[0][0].reached()):
            if not self._queued[0][0].wait(self.deadline.left):
                self._left = None  # nothing can be received behind a piece that does not end
                raise self.timed_out(": the device has not ended it")
            _, nbytes = self._queued.popleft()
            self.deadline.arrived()
            if self.progress is not None:
                self.progress.count(nbytes)


def connected(
    pg: AcceleratorProcessGroup, ranks: List[int], name: str, timeout: timedelta
) -> List[AcceleratorProcessGroup]:
    """Connects with each of the ranks, within a timeout in all, by a connection beside those of the group.

    Args:
        name: differs from the names of earlier transfers between them
    """
    pairs: List[AcceleratorProcessGroup] = []
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        for rank in ranks:
            left = max(_EARLY, deadline - time.monotonic())
            pairs.append(pg.pair(rank, name, timedelta(seconds=left)))
    except BaseException:
        for pair in pairs:
            pair.shutdown()
        raise
    return pairs
