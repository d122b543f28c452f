"""Checkpoints over a process group: the source sends to each target, nothing is served."""

from __future__ import annotations

import io
import logging
import math
import struct
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Tuple, TypeVar

import torch
import torch.utils._pytree as pytree

from torchft.checkpointing._encoding import Encoded, decode, dtype_of, is_dtensor, with_flags
from torchft.checkpointing._handshake import pack_structure, parse_structure, read_frame
from torchft.checkpointing._places import tensor_nodes
from torchft.checkpointing._progress import Meter
from torchft.checkpointing._stream import storage_bytes, tensor_memory
from torchft.checkpointing.transport import CheckpointError, CheckpointTransport

if TYPE_CHECKING:
    from torchft.process_group import ProcessGroup

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

_PIECE = 512 << 20  # bytes of the largest message
_MAX_HEADER = 8 << 30  # bytes; more is no header
_MAGIC = 0x746F7263686674  # "torchft"
_ON_CPU, _ON_DEVICE = -1, -2  # in place of a region's number
_STEP = struct.Struct("<q")
_EARLY = 0.01  # seconds
_TAG = 1  # messages between two ranks arrive in order, so one tag will do


class PGTransport(CheckpointTransport[T]):
    """Sends the state over a process group between the replica groups.

    A header with the structure and everything that is not a tensor goes first, then the tensors one by one, DTensors as
    their local part. `send_checkpoint` returns when all targets have everything, so the source waits for them. The
    header is in the safe encoding of `HTTPTransport`.

    Args:
        pg: the process group; replica ranks are its ranks
        timeout: limit for a transfer when the call gives none
        device: where the process group wants its tensors: `cpu` for Gloo, a GPU for NCCL
        state_dict: gives the target's own state. A tensor that is found there under the same path, with the same shape
            and dtype, is received in place; otherwise memory is allocated for it. A transfer that fails leaves such
            tensors half old and half new: they are good again after the next one.

    Raises:
        ValueError: a timeout that is not positive
    """

    def __init__(
        self,
        pg: ProcessGroup,
        timeout: timedelta,
        device: torch.device,
        state_dict: Optional[Callable[[], object]] = None,
    ) -> None:
        if timeout <= timedelta(0):
            raise ValueError(f"timeout is {timeout}: it must be positive")
        self._pg = pg
        self._timeout = timeout
        self._device = torch.device(device)
        self._state_dict = state_dict
        self.in_place = state_dict is not None

    def metadata(self) -> str:
        return "<n/a>"

    def disallow_checkpoint(self) -> None:
        """Nothing to do: when `send_checkpoint` returns, it has read the tensors."""

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: Optional[timedelta] = None
    ) -> None:
        if not dst_ranks:
            return
        channel = _Channel(self._pg, dst_ranks, f"checkpoint of step {step} to {dst_ranks}", timeout or self._timeout)
        header = _Header(state_dict)
        structure = pack_structure([storage.nbytes() for storage in header.storages], header.structure)
        raw = _STEP.pack(step) + structure
        flat = [torch.frombuffer(bytearray(raw), dtype=torch.uint8)]
        body = torch.cat(flat + [storage_bytes(storage).cpu() for storage in header.storages])
        channel.send(torch.tensor([_MAGIC, body.numel()], dtype=torch.int64, device=self._device))
        channel.send(body.to(self._device))
        for tensor in header.tensors:
            channel.send(_as_bytes(tensor.to(self._device)))

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: Optional[timedelta] = None) -> T:
        what = f"checkpoint of step {step} from rank {src_rank}"
        channel = _Channel(self._pg, [src_rank], what, timeout or self._timeout)
        sent, tree, flats = self._recv_header(channel, what)
        if sent != step:
            # The tensors that follow stay unread; the group is of no use any more, and the error says so to Manager.
            raise CheckpointError(f"{what}: the source sends step {sent}")
        own = _tensors_by_path(self._state_dict()) if self._state_dict is not None else {}
        with closing(Meter(what, logger)) as meter:
            channel.meter = meter
            meter.expect(_announced_bytes(tree))
            got = decode(tree, flats, what, lambda path, node: self._recv_tensor(channel, own.get("".join(path)), node))
            meter.done()
        return got

    def _recv_header(self, channel: _Channel, what: str) -> Tuple[int, Any, List[torch.Tensor]]:
        lead = torch.zeros(2, dtype=torch.int64, device=self._device)
        channel.recv(lead)
        magic, length = lead.tolist()
        if magic != _MAGIC or not 0 < length <= _MAX_HEADER:
            raise CheckpointError(f"{what}: no header but {lead.tolist()}; do both groups use this version of torchft?")
        body = _empty(torch.Size([length]), torch.uint8, self._device, what)
        channel.recv(body)
        body = body.cpu()
        raw = io.BytesIO(bytes(tensor_memory(body)))
        step = raw.read(_STEP.size)
        if len(step) < _STEP.size:
            raise CheckpointError(f"{what}: its header is cut short")
        sizes, tree, _ = parse_structure(read_frame(raw, what), what)
        start = raw.tell()
        if start + sum(sizes) != length:
            raise CheckpointError(f"{what}: its header has {length} bytes and announces {start + sum(sizes)}")
        # clones, so that each begins where any dtype may
        return _STEP.unpack(step)[0], tree, [part.clone() for part in body[start:].split(sizes)]

    def _recv_tensor(self, channel: _Channel, mine: Optional[torch.Tensor], node: List[Any]) -> Optional[torch.Tensor]:
        """Receives the tensor that comes next: into the one that is here, if it is alike, else into new memory."""
        of_dtensor = node[0] == "D"
        _, place, dtype_name, _, shape, _, flags = node[1] if of_dtensor else node
        dtype, shape = dtype_of(dtype_name), torch.Size(shape)
        if mine is not None and is_dtensor(mine) == of_dtensor:
            local = _local(mine).detach()
            if local.shape == shape and local.dtype == dtype:
                self._recv_into(channel, local)
                return mine
        if of_dtensor:
            return None  # it is made of its local part, which is asked for next
        device = torch.device("cpu") if place == _ON_CPU else self._device
        fresh = _empty(shape, dtype, device, channel.what)
        self._recv_into(channel, fresh)
        return with_flags(fresh, flags)

    def _recv_into(self, channel: _Channel, tensor: torch.Tensor) -> None:
        direct = tensor.is_contiguous() and tensor.device.type == self._device.type
        buffer = tensor if direct else torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        channel.recv(_as_bytes(buffer))
        if not direct:
            tensor.copy_(buffer)


@dataclass
class _Channel:
    """Messages to some ranks, or from one, all by one deadline."""

    pg: ProcessGroup
    ranks: List[int]
    what: str
    timeout: timedelta
    meter: Optional[Meter] = None  # is told what has arrived

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.timeout.total_seconds()

    def send(self, tensor: torch.Tensor) -> None:
        """Sends a tensor to all."""
        for piece in _pieces(_as_bytes(tensor)):
            self._wait([partial(self.pg.send, [piece], rank, _TAG) for rank in self.ranks])

    def recv(self, tensor: torch.Tensor) -> None:
        """Fills a contiguous tensor."""
        for piece in _pieces(_as_bytes(tensor)):
            self._wait([partial(self.pg.recv, [piece], self.ranks[0], _TAG)])
            if self.meter is not None:
                self.meter.count(piece.numel())

    def _wait(self, operations: List[Callable[[], Any]]) -> None:
        """Starts them all, then waits for them."""
        try:
            for work in [start() for start in operations]:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("no time left")
                if not work.wait(timedelta(seconds=left)):
                    raise RuntimeError("the process group gave up")
        except Exception as error:
            # Gloo counts whole milliseconds, and is a little early
            if time.monotonic() >= self._deadline - _EARLY or isinstance(error, TimeoutError):
                raise TimeoutError(f"{self.what}: not complete after {self.timeout.total_seconds():g} s") from error
            raise CheckpointError(f"{self.what}: {type(error).__name__}: {error}") from error


def _pieces(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, flat.numel(), _PIECE):
        yield flat[start : start + _PIECE]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as a flat one of bytes, of the same memory."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


class _Header(Encoded):
    """A state whose tensors follow one by one, in the order in which they are described."""

    def __init__(self, state: object) -> None:
        self.tensors: List[torch.Tensor] = []
        super().__init__(state)

    def _encode_memory(self, tensor: torch.Tensor, flags: int) -> Any:
        self.tensors.append(tensor.detach())
        place = _ON_CPU if tensor.device.type == "cpu" else _ON_DEVICE
        return ["T", place, str(tensor.dtype).removeprefix("torch."), 0, list(tensor.shape), [], flags]


def _empty(shape: torch.Size, dtype: torch.dtype, device: torch.device, what: str) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        nbytes = math.prod(shape) * dtype.itemsize
        raise CheckpointError(f"{what}: no memory for a tensor of {nbytes} bytes on {device}") from error


def _announced_bytes(tree: Any) -> int:
    """Of the tensors that follow a header. It may be malformed: `decode` says so."""
    nbytes = 0
    for _, node in tensor_nodes(tree, ()):
        _, _, dtype_name, _, shape, _, _ = node[1] if node[0] == "D" else node
        with suppress(ValueError, TypeError):
            nbytes += math.prod(shape) * dtype_of(dtype_name).itemsize
    return nbytes


def _tensors_by_path(state_dict: object) -> Dict[str, torch.Tensor]:
    leaves = pytree.tree_flatten_with_path(state_dict)[0]
    return {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that lies here; any other tensor as it is."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
