"""Checkpoints over a process group: the source sends to each target, nothing is served."""

from __future__ import annotations

import io
import logging
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Tuple, TypeVar

import torch
import torch.utils._pytree as pytree

from torchft.checkpointing._stream import pickle_object, read_object, storage_bytes, tensor_memory
from torchft.checkpointing.transport import CheckpointError, CheckpointTransport

if TYPE_CHECKING:
    from torchft.process_group import ProcessGroup

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

_PIECE = 512 << 20  # bytes of the largest message
_MAX_HEADER = 8 << 30  # bytes; more is no header
_MAGIC = 0x746F7263686674  # "torchft"
_TENSOR, _DTENSOR, _VALUE = "tensor", "dtensor", "value"
_TAG = 1  # messages between two ranks arrive in order, so one tag will do


class PGTransport(CheckpointTransport[T]):
    """Sends the state over a process group between the replica groups.

    A header with the structure and everything that is not a tensor goes first, then the tensors one by one, DTensors as
    their local part. `send_checkpoint` returns when all targets have everything, so the source waits for them. The
    header is read by PyTorch's restricted unpickler.

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
        leaves, tensors = _describe(state_dict)
        header = pickle_object({"step": step, "leaves": leaves, "spec": pytree.tree_structure(state_dict)})
        flat = [torch.frombuffer(bytearray(header.prefix), dtype=torch.uint8)]
        body = torch.cat(flat + [storage_bytes(storage).cpu() for storage in header.storages])
        channel.send(torch.tensor([_MAGIC, body.numel()], dtype=torch.int64, device=self._device))
        channel.send(body.to(self._device))
        for tensor in tensors:
            channel.send(_as_bytes(tensor.to(self._device)))

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: Optional[timedelta] = None) -> T:
        what = f"checkpoint of step {step} from rank {src_rank}"
        channel = _Channel(self._pg, [src_rank], what, timeout or self._timeout)
        header = self._recv_header(channel, what)
        if header["step"] != step:
            # The tensors that follow stay unread; the group is of no use any more, and the error says so to Manager.
            raise CheckpointError(f"{what}: the source sends step {header['step']}")
        own = _tensors_by_path(self._state_dict()) if self._state_dict is not None else {}
        leaves = [self._recv_leaf(channel, leaf, own) for leaf in header["leaves"]]
        return pytree.tree_unflatten(leaves, header["spec"])

    def _recv_header(self, channel: _Channel, what: str) -> Dict[str, Any]:
        lead = torch.zeros(2, dtype=torch.int64, device=self._device)
        channel.recv(lead)
        magic, length = lead.tolist()
        if magic != _MAGIC or not 0 < length <= _MAX_HEADER:
            raise CheckpointError(f"{what}: no header but {lead.tolist()}; do both groups use this version of torchft?")
        body = torch.empty(length, dtype=torch.uint8, device=self._device)
        channel.recv(body)
        raw = io.BytesIO(bytes(tensor_memory(body.cpu())))
        header = read_object(raw, what, length)
        if not (
            isinstance(header, dict)
            and isinstance(header.get("step"), int)
            and isinstance(header.get("leaves"), list)
            and all(isinstance(leaf, tuple) and leaf for leaf in header["leaves"])
            and isinstance(header.get("spec"), pytree.TreeSpec)
            and header["spec"].num_leaves == len(header["leaves"])
        ):
            raise CheckpointError(f"{what}: its header lacks step, leaves or spec")
        return header

    def _recv_leaf(self, channel: _Channel, leaf: Tuple[Any, ...], own: Dict[str, torch.Tensor]) -> object:
        if leaf[0] == _VALUE:
            return leaf[1]
        kind, path, shape, dtype, on_cpu, is_parameter, requires_grad, dtensor_spec = leaf
        mine = own.get(path)
        local = None if mine is None else _local(mine).detach()
        if mine is not None and _is_dtensor(mine) == (kind == _DTENSOR):
            assert local is not None
            if tuple(local.shape) == tuple(shape) and local.dtype == dtype:
                self._recv_into(channel, local)
                return mine
        device = torch.device("cpu") if on_cpu else self._device
        fresh = torch.empty(shape, dtype=dtype, device=device)
        self._recv_into(channel, fresh)
        result = fresh
        if kind == _DTENSOR:
            from torch.distributed.tensor import DTensor

            result = DTensor(fresh, dtensor_spec, requires_grad=False)
        return torch.nn.Parameter(result, requires_grad) if is_parameter else result.requires_grad_(requires_grad)

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
            if time.monotonic() >= self._deadline or isinstance(error, TimeoutError):
                raise TimeoutError(f"{self.what}: not complete after {self.timeout.total_seconds():g} s") from error
            raise CheckpointError(f"{self.what}: {type(error).__name__}: {error}") from error


def _pieces(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, flat.numel(), _PIECE):
        yield flat[start : start + _PIECE]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as a flat one of bytes, of the same memory."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _describe(state_dict: object) -> Tuple[List[Tuple[Any, ...]], List[torch.Tensor]]:
    """What the header says of each leaf, and the tensors in their order."""
    described: List[Tuple[Any, ...]] = []
    tensors: List[torch.Tensor] = []
    for path, leaf in pytree.tree_flatten_with_path(state_dict)[0]:
        if not _is_plain(leaf):
            described.append((_VALUE, leaf))
            continue
        is_dtensor = _is_dtensor(leaf)
        local = _local(leaf).detach()
        tensors.append(local)
        described.append(
            (
                _DTENSOR if is_dtensor else _TENSOR,
                pytree.keystr(path),
                tuple(local.shape),
                local.dtype,
                local.device.type == "cpu",
                isinstance(leaf, torch.nn.Parameter),
                leaf.requires_grad,
                leaf._spec if is_dtensor else None,  # type: ignore[attr-defined]
            )
        )
    return described, tensors


def _tensors_by_path(state_dict: object) -> Dict[str, torch.Tensor]:
    leaves = pytree.tree_flatten_with_path(state_dict)[0]
    return {pytree.keystr(path): leaf for path, leaf in leaves if _is_plain(leaf)}


def _is_plain(leaf: object) -> bool:
    """Whether a leaf goes as bare memory; other kinds of tensors (sparse, quantized) travel in the header."""
    if not isinstance(leaf, torch.Tensor):
        return False
    local = _local(leaf)
    if local.layout != torch.strided or local.is_quantized:
        return False
    return type(local) in (torch.Tensor, torch.nn.Parameter)


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "_spec")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that lies here; any other tensor as it is."""
    return tensor._local_tensor if _is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
