"""Checkpoints over a process group: the source sends the state to each target."""

from __future__ import annotations

import io
import logging
import math
import struct
import time
from collections import deque
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple, TypeVar

import torch
from torch.distributed import Work

from torchft._checks import check_positive
from torchft.checkpointing.client.deadline import Deadline
from torchft.checkpointing.client.progress import Meter
from torchft.checkpointing.client.target import CPU, Homes, TargetState
from torchft.checkpointing.codec.encoding import Encoded, Path, decode, dtype_name, dtype_of, is_dtensor, with_flags
from torchft.checkpointing.codec.handshake import Structure, pack_structure, parse_structure, read_frame
from torchft.checkpointing.codec.layout import local_part, tensor_nodes, tensors_by_path
from torchft.checkpointing.codec.memory import HostMemory, reserve_for_state
from torchft.checkpointing.codec.room import Reservation
from torchft.checkpointing.codec.staging import Unloading, copies_for
from torchft.checkpointing.codec.stream import storage_bytes, tensor_memory
from torchft.checkpointing.transport import CheckpointError, CheckpointTimeout, CheckpointTransport, Unsendable
from torchft.process_group._timeout import point_to_point_timeout
from torchft.process_group.accelerator import AcceleratorProcessGroup
from torchft.process_group.native import abort_group, errors_of
from torchft.utils import DeviceEvent, on_device

if TYPE_CHECKING:
    from torchft.process_group import ProcessGroup

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

# Bytes of the largest message, the same on both ends. A tensor that is not received in place is received through one
# buffer of this size or, into host memory, two of them: the only device memory that a transfer allocates.
_PIECE = 32 << 20
_LEAST_PIECE = 256 << 10
_PIECES = 64
_MAX_HEADER = 8 << 30  # bytes; a larger header is refused as malformed
_MAGIC = 0x746F726368667432  # "torchft2"
_REFUSED = 0x746F726368667421  # "torchft!": followed by a text that says why there is no state
_ON_CPU, _ON_DEVICE = -1, -2  # in place of a region's number; a tensor on the k-th device has -2 - k
_MAX_REASON = 10_000  # bytes
_STEP = struct.Struct("<q")
_EARLY = 0.01  # seconds
_TAG = 1  # messages between two ranks arrive in order, so one tag suffices


class PGTransport(CheckpointTransport[T]):
    """Sends the state over a process group between the replica groups.

    A header with the structure and all other values comes first, then the tensors one by one, DTensors as their local
    shard. `send_checkpoint` returns when all targets have everything, so the source waits for them. If the process
    group works on a device, it returns when all sends are queued there, and `disallow_checkpoint` waits for the device.
    The header uses the safe encoding of `HTTPTransport`.

    With a group of torchft that works on a device in this process (NCCL, XCCL), each transfer connects source and
    target by a communicator of its own, which takes some time and device memory: the transfer does not stand before
    gradients.

    Args:
        pg: the process group; replica ranks are its ranks
        timeout: limit if the call has none: at a source for each piece of a state, at a target for the whole transfer,
            unless the other groups wait for it (docs/healing.md); on a device for the whole transfer at both. Both
            replace the process group's own timeout, except with NCCL in another process or in a native group, where
            only the group's timeout applies.
        device: device on which the process group needs tensors: `cpu` for Gloo, a GPU for NCCL
        state_dict: returns the target's own state. A tensor under the same path there, with the same shape and dtype,
            is received in place; otherwise memory is allocated. After a failed transfer, such tensors may be partly
            old and partly new; they are consistent again after the next successful one.

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
        self._sent: Optional[_Queued] = None

    def metadata(self) -> str:
        return "<n/a>"

    def disallow_checkpoint(self) -> None:
        """Waits until the device has read the tensors that `send_checkpoint` has queued.

        Raises:
            CheckpointTimeout: it has not read them in time, for example because a target failed; the tensors
                must not be changed
        """
        sent, self._sent = self._sent, None
        if sent is not None:
            try:
                sent.wait()
            finally:
                sent.close()

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: Optional[timedelta] = None
    ) -> None:
        if not dst_ranks:
            return
        channel = self._channel(dst_ranks, f"checkpoint of step {step} to {dst_ranks}", step, timeout)
        try:
            header = _Header(state_dict)
        except Unsendable as error:
            self._refuse(channel, str(error))
            raise
        sizes = [storage.nbytes() for storage in header.storages]
        raw = _STEP.pack(step) + pack_structure(sizes, header.structure, header.devices)
        body = [torch.frombuffer(bytearray(raw), dtype=torch.uint8)]
        body += [storage_bytes(storage).cpu() for storage in header.storages]
        with self._released(channel, receiving=False):
            self._send_text(channel, _MAGIC, torch.cat(body))
            channel.announced([tensor.numel() * tensor.element_size() for tensor in header.tensors])
            for tensor in header.tensors:
                channel.send(tensor)
        self._sent = channel.queued()

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, reason: str, timeout: timedelta) -> None:
        if dst_ranks:
            what = f"checkpoint of step {step} to {dst_ranks}"
            self._refuse(self._channel(dst_ranks, what, step, timeout), reason)

    def _refuse(self, channel: _Channel, reason: str) -> None:
        text = bytearray(reason.encode()[:_MAX_REASON])
        with self._released(channel, receiving=False):
            self._send_text(channel, _REFUSED, torch.frombuffer(text, dtype=torch.uint8))
        self._sent = channel.queued()

    def _send_text(self, channel: _Channel, magic: int, body: torch.Tensor) -> None:
        channel.send(torch.tensor([magic, body.numel()], dtype=torch.int64))
        channel.send(body)

    def _channel(
        self, ranks: List[int], what: str, step: int, timeout: Optional[timedelta], of_progress: bool = True
    ) -> _Channel:
        pg: Any = self._pg
        timeout = timeout or self._timeout
        if not isinstance(pg, AcceleratorProcessGroup):
            abort = partial(abort_group, pg)
            return _Channel(pg, self._error, abort, ranks, what, timeout, self._device, of_progress)
        try:
            with on_device(self._device):
                pairs = Pairs(pg, ranks, str(step), timeout)
        except Exception as error:
            kind = CheckpointTimeout if isinstance(error, TimeoutError) else CheckpointError
            raise kind(f"{what}: no connection for it: {error}") from error
        return _Channel(pairs, pairs.errored, pairs.abort, ranks, what, timeout, self._device, of_progress)

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
            target: chooses the devices of tensors if this transport has no `state_dict`. Also says whether the timeout
                is one of progress, `TargetState.waited_for`.
        """
        what = f"checkpoint of step {step} from rank {src_rank}"
        channel = self._channel([src_rank], what, step, timeout, target is not None and target.waited_for)
        with closing(channel), self._released(channel, receiving=True):
            sent, structure, flats = self._recv_header(channel)
            with closing(Meter(what, logger)) as meter:
                channel.meter = meter
                sizes = _announced_sizes(structure.tree)
                meter.expect(sum(sizes))
                channel.announced(sizes)
                if sent != step:
                    raise CheckpointError(f"{what}: the source sends step {sent}")
                places = self._places(structure, target)
                got = decode(
                    structure.tree, flats, what, lambda path, node: self._recv_tensor(channel, places, path, node)
                )
                channel.landed()
                if (queued := channel.queued()) is not None:
                    queued.wait()
                meter.done()
        return got

    @contextmanager
    def _released(self, channel: _Channel, receiving: bool) -> Iterator[None]:
        """Notifies the other end if this one fails. Otherwise it would wait until its timeout, and
        all groups with it.
        """
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

    def _places(self, structure: Structure, target: Optional[TargetState]) -> _Places:
        if self._state_dict is None and target is not None:
            devices = {path: _source_device(structure, node) for path, node in tensor_nodes(structure.tree, ())}
            if target.writable:
                own = target.own()
                return _Places(structure, own, Homes(own, devices).of)
            target.devices = {path: device for path, device in devices.items() if device != "cpu"}
            room = reserve_for_state(sum(_announced_sizes(structure.tree)) if target.devices else 0, "the state")
            places = _Places(structure, {}, lambda device: CPU)
            places.room = room  # until everything has arrived
            return places
        own = tensors_by_path(self._state_dict()) if self._state_dict is not None else {}
        return _Places(structure, own, lambda device: CPU if device == "cpu" else self._device)

    def _recv_header(self, channel: _Channel) -> Tuple[int, Structure, List[torch.Tensor]]:
        what = channel.what
        lead = torch.zeros(2, dtype=torch.int64)
        channel.recv(lead)
        channel.landed()
        magic, length = lead.tolist()
        if magic not in (_MAGIC, _REFUSED) or not 0 < length <= _MAX_HEADER:
            raise CheckpointError(f"{what}: no header but {lead.tolist()}; do both groups use this version of torchft?")
        body = _empty(torch.Size([length]), torch.uint8, CPU, what)
        channel.recv(body)
        channel.landed()
        raw = io.BytesIO(bytes(tensor_memory(body)))
        if magic == _REFUSED:
            channel.announced([])
            raise CheckpointError(f"{what}: the source cannot send its state: {raw.read().decode(errors='replace')}")
        step = raw.read(_STEP.size)
        if len(step) < _STEP.size:
            raise CheckpointError(f"{what}: its header is cut short")
        structure = parse_structure(read_frame(raw, what), what)
        start = raw.tell()
        if start + sum(structure.sizes) != length:
            raise CheckpointError(f"{what}: its header has {length} bytes and announces {start + sum(structure.sizes)}")
        # clones, because a view may begin at an address that the dtype does not allow
        return _STEP.unpack(step)[0], structure, [part.clone() for part in body[start:].split(structure.sizes)]

    def _recv_tensor(self, channel: _Channel, places: _Places, path: Path, node: List[Any]) -> Optional[torch.Tensor]:
        """Receives the next tensor: into the local one if it is equal in layout, else into new memory."""
        of_dtensor = node[0] == "D"
        _, _, dtype_name, _, shape, _, flags = node[1] if of_dtensor else node
        dtype, shape = dtype_of(dtype_name), torch.Size(shape)
        mine = places.own.get(path)
        if mine is not None and is_dtensor(mine) == of_dtensor:
            local = local_part(mine)
            if local.shape == shape and local.dtype == dtype:
                channel.recv(local)
                return mine
        if of_dtensor:
            return None  # made from its local part, which comes next
        fresh = places.new(node, channel.what)
        channel.recv(fresh)
        return with_flags(fresh, flags)


class _Places:
    """Chooses the memory for the tensors of one transfer.

    Args:
        structure: the source's description of its state
        own: the local tensors, to be filled
        home: returns the device of other tensors, given their device at the source
    """

    def __init__(
        self, structure: Structure, own: Mapping[Path, torch.Tensor], home: Callable[[str], torch.device]
    ) -> None:
        self.own = own
        self._structure = structure
        self._home = home
        self._memory = HostMemory()
        self.room: Optional[Reservation] = None  # of host memory, while the tensors arrive

    def new(self, node: List[Any], what: str) -> torch.Tensor:
        """Allocates memory for a tensor."""
        _, _, dtype_name, _, shape, _, _ = node
        dtype, home = dtype_of(dtype_name), self._home(_source_device(self._structure, node))
        return _empty(torch.Size(shape), dtype, home, what, self._memory)


@dataclass
class _Channel:
    """Messages to one or more ranks, or from one, with a common deadline. Both ends cut data into the same pieces.

    The deadline moves with each piece, except on a device, where operations are only queued, and at a target for which
    the other groups do not wait. A source goes on as long as its targets do: they abort the transfer at their deadline.
    """

    pg: Any  # the process group, or Pairs
    error: Callable[[], Optional[Exception]]  # returns the error of the process group
    abort: Callable[[], None]  # aborts it
    ranks: List[int]
    what: str
    timeout: timedelta
    device: torch.device  # device on which the process group needs tensors
    of_progress: bool = True  # whether the deadline moves with each piece
    meter: Optional[Meter] = None  # counts the received bytes

    def __post_init__(self) -> None:
        self.of_progress = self.of_progress and self.device.type == "cpu"
        self.deadline = Deadline(self.timeout.total_seconds(), self.of_progress)
        self._piece = _LEAST_PIECE
        self._stage: Optional[torch.Tensor] = None
        self._unloading: Optional[Unloading] = None
        self._left: Optional[deque[int]] = None  # bytes of the tensors still to come; None: not known
        self.broken = False  # set if the other end has an error as well, or has the same deadline

    def announced(self, sizes: List[int]) -> None:
        """Called when the number of bytes is known. A small state is cut into smaller pieces, which
        take little memory.
        """
        self._piece = min(_PIECE, max(_LEAST_PIECE, sum(sizes) // _PIECES))
        self._stage = self._unloading = None
        self._left = deque(sizes)

    def send(self, tensor: torch.Tensor) -> None:
        """Sends a tensor to all ranks."""
        for piece in self._pieces(tensor):
            here = piece.to(self.device)
            self._wait([partial(self.pg.send, [here], rank, _TAG) for rank in self.ranks])

    def recv(self, tensor: torch.Tensor) -> None:
        """Receives into a tensor. One in host memory may be complete only after `landed`."""
        if not tensor.is_contiguous():
            beside = _empty(tensor.shape, tensor.dtype, CPU, self.what)
            self.recv(beside)
            self.landed()
            tensor.copy_(beside)
            return
        unloads = tensor.is_cpu and copies_for(self.device.type) is not None
        for piece in self._pieces(tensor):
            if self._is_here(tensor):
                here = piece
            elif unloads:
                here = self._unloaded(piece)
            else:
                here = self._staged(piece.numel())
            self._wait([partial(self.pg.recv, [here], self.ranks[0], _TAG)])
            if unloads and self._unloading is not None:
                self._unloading.start()
            elif here is not piece:
                piece.copy_(here)
            if self.meter is not None:
                self.meter.count(piece.numel())
        if self._left:
            self._left.popleft()

    def _unloaded(self, piece: torch.Tensor) -> torch.Tensor:
        """Memory on the device for a piece that is copied to the host while the next one is received."""
        if self._unloading is None:
            try:
                self._unloading = Unloading(self.device, self._piece)
            except (RuntimeError, MemoryError) as error:
                raise CheckpointError(
                    f"{self.what}: no memory for two buffers of {self._piece} bytes on {self.device} and the host"
                ) from error
        self._unloaded_in_time(self._unloading.ready_for(piece, self.deadline.left))
        return self._unloading.stage

    def landed(self) -> None:
        """Waits until all that was received into host memory is there.

        Raises:
            CheckpointTimeout: the device has not finished it by the deadline
        """
        if self._unloading is not None:
            self._unloaded_in_time(self._unloading.finish(self.deadline.left))

    def _unloaded_in_time(self, ended: bool) -> None:
        if not ended:
            self.broken = True
            raise self.timed_out(": the device has not ended it")

    def discard(self) -> bool:
        """Receives the rest of the state and discards it, so that the other end does not wait. Returns False if that is
        impossible.
        """
        if self._left is None:
            return False
        try:
            for nbytes in self._left:
                for start in range(0, nbytes, self._piece):
                    piece = self._staged(min(self._piece, nbytes - start))
                    self._wait([partial(self.pg.recv, [piece], self.ranks[0], _TAG)])
            if (queued := self.queued()) is not None:
                queued.wait()  # else closing the connection would abort what the other end still sends
        except Exception as error:
            logger.info("%s: what is left of it cannot be received: %s", self.what, error)
            return self.broken
        return True

    def _pieces(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), self._piece):
            yield flat[start : start + self._piece]

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type and self.device.index in (None, tensor.device.index)

    def _staged(self, nbytes: int) -> torch.Tensor:
        if self._stage is None:
            self._stage = _empty(torch.Size([self._piece]), torch.uint8, self.device, self.what)
        return self._stage[:nbytes]

    def _wait(self, operations: List[Callable[[], Any]]) -> None:
        """Starts all operations, then waits for them."""
        try:
            with point_to_point_timeout(timedelta(seconds=max(_EARLY, self.deadline.left))):
                works = [start() for start in operations]
            for work in works:
                left = self.deadline.left
                if left <= 0:
                    raise TimeoutError("timed out")
                if not work.wait(timedelta(seconds=left)):
                    raise RuntimeError("the process group reported a failure without an error")
            self.deadline.arrived()
        except Exception as error:
            self.broken = True
            # Gloo counts whole milliseconds, and times out a little early.
            if self.deadline.left <= _EARLY or isinstance(error, TimeoutError):
                raise self.timed_out() from error
            raise CheckpointError(f"{self.what}: {type(error).__name__}: {error}") from error

    def timed_out(self, why: str = "") -> CheckpointTimeout:
        how = " without progress" if self.of_progress else ""
        return CheckpointTimeout(f"{self.what}: timed out after {self.timeout.total_seconds():g} seconds{how}{why}")

    def close(self) -> None:
        """Ends the connections of this transfer, once the device has ended it."""
        if isinstance(self.pg, Pairs):
            self.pg.shutdown()

    def queued(self) -> Optional[_Queued]:
        """The operations so far; on a device they may still be queued."""
        return None if self.device.type == "cpu" else _Queued(self)


class Pairs:
    """The connections of one transfer, one with each peer, beside those of the process group.

    Args:
        pg: the process group
        ranks: ranks of the peers
        name: differs from the names of earlier transfers between them
        timeout: of connecting with all of them
    """

    def __init__(self, pg: AcceleratorProcessGroup, ranks: List[int], name: str, timeout: timedelta) -> None:
        self._pairs: Dict[int, AcceleratorProcessGroup] = {}
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            for rank in ranks:
                left = max(_EARLY, deadline - time.monotonic())
                self._pairs[rank] = pg.pair(rank, name, timedelta(seconds=left))
        except BaseException:
            self.shutdown()
            raise

    def send(self, tensors: List[torch.Tensor], rank: int, tag: int) -> Work:
        pair = self._pairs[rank]
        return pair.send(tensors, 1 - pair.rank(), tag)

    def recv(self, tensors: List[torch.Tensor], rank: int, tag: int) -> Work:
        pair = self._pairs[rank]
        return pair.recv(tensors, 1 - pair.rank(), tag)

    def errored(self) -> Optional[Exception]:
        return next((error for pair in self._pairs.values() if (error := pair.errored()) is not None), None)

    def abort(self) -> None:
        for pair in self._pairs.values():
            pair.abort()

    def shutdown(self) -> None:
        for pair in self._pairs.values():
            pair.shutdown()


class _Queued:
    """The end of a channel's operations on its device."""

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel
        self._end = DeviceEvent([channel.device])
        self.close = channel.close

    def wait(self) -> None:
        """Polls until the device has finished the operations, which may never happen if a peer has failed.

        Raises:
            CheckpointTimeout: it has not finished by the deadline
            CheckpointError: the group was aborted in the meantime, so the received data is undefined
        """
        channel = self._channel
        if not self._end.wait(channel.deadline.left):
            raise channel.timed_out(": the device has not ended it")
        error = channel.error()
        if error is not None:
            raise CheckpointError(f"{channel.what}: {error}") from error


class _Header(Encoded):
    """The header of a state, whose tensors follow one by one in the order of their descriptions."""

    def __init__(self, state: object) -> None:
        self.tensors: List[torch.Tensor] = []
        self._devices: Dict[str, int] = {}
        super().__init__(state)

    @property
    def devices(self) -> Dict[int, str]:
        """The devices of the tensors, by number."""
        return {number: device for device, number in self._devices.items()}

    def _encode_memory(self, tensor: torch.Tensor, flags: int) -> Any:
        self.tensors.append(tensor.detach())
        place = _ON_CPU
        if tensor.device.type != "cpu":
            place = _ON_DEVICE - self._devices.setdefault(str(tensor.device), len(self._devices))
        return ["T", place, dtype_name(tensor.dtype), 0, list(tensor.shape), [], flags]


def _source_device(structure: Structure, node: List[Any]) -> str:
    """The source's device for a tensor. For a malformed node this raises nothing: `decode` does."""
    place = (node[1] if node[0] == "D" else node)[1]
    return structure.devices.get(_ON_DEVICE - place, "cpu") if type(place) is int else "cpu"


def _empty(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, what: str, memory: Optional[HostMemory] = None
) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        if device == CPU and memory is not None:
            return memory.take(nbytes).view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        raise CheckpointError(f"{what}: no memory for a tensor of {nbytes} bytes on {device}") from error


def _announced_sizes(tree: Any) -> List[int]:
    """The bytes of each tensor that follows a header, in order. For a malformed header this raises
    nothing: `decode` does.
    """
    sizes = []
    for _, node in tensor_nodes(tree, ()):
        _, _, dtype_name, _, shape, _, _ = node[1] if node[0] == "D" else node
        with suppress(ValueError, TypeError):
            sizes.append(math.prod(shape) * dtype_of(dtype_name).itemsize)
    return sizes
