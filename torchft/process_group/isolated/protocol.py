"""The messages between an isolated group, its worker, and the process that forks workers.

A message is one record: a tuple of numbers, texts, bytes and tuples, encoded by `marshal`. Both ends run the
same interpreter, and unlike with pickle, decoding runs no code. A SOCK_SEQPACKET socket keeps the messages
apart and carries file descriptors. (A stream of them, with their lengths, took twice as long on busy
processors.) A record never contains tensors: a tensor is the ref of a registration (see `sharing`).

    request  (RUN, operation, device, mark, call)  of the tensors' device; call: see `encode_call`
             (CONFIGURE, operation, settings)    the arguments of `configure`, and the environment
             (CHECK, operation)                  fails with the error of the worker's backend
             (NOTE, operation, device, note)     perhaps with a file descriptor: see `sharing.Notify`
             (SET_TIMEOUT, seconds)
             (PING,)
    answer   (operation, mark, error)            error: None, or the exception's class and text

Answers without an operation have the number 0: with an error, the worker ends; else it answers a ping. The
worker's first message carries a descriptor of its process.
"""

from __future__ import annotations

import array
import marshal
import operator
import os
import socket
from datetime import timedelta
from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as c10d

RUN, CONFIGURE, CHECK, NOTE, SET_TIMEOUT, PING = "run", "configure", "check", "note", "set timeout", "ping"

# The methods of PyTorch's group that a worker may call, with their arguments: tensors that are read ("r") or
# written ("w"), and integers ("i"), alone or in lists; options. The last integer of send and recv is their
# timeout in milliseconds, 0 for the group's.
OPERATIONS: dict[str, tuple[Any, ...]] = {
    "allgather": ("[[w]]", "[r]", c10d.AllgatherOptions),
    "allgather_into_tensor_coalesced": ("[w]", "[r]", c10d.AllgatherOptions),
    "allreduce": ("[rw]", c10d.AllreduceOptions),
    "allreduce_coalesced": ("[rw]", c10d.AllreduceCoalescedOptions),
    "alltoall_base": ("w", "r", "[i]", "[i]", c10d.AllToAllOptions),
    "barrier": (c10d.BarrierOptions,),
    "broadcast": ("[rw]", c10d.BroadcastOptions),
    # A message may be shorter than the tensor, whose remaining elements must stay unchanged.
    "recv": ("[rw]", "i", "i", "i"),
    "reduce_scatter": ("[w]", "[[r]]", c10d.ReduceScatterOptions),
    "reduce_scatter_tensor_coalesced": ("[w]", "[r]", c10d.ReduceScatterOptions),
    "send": ("[r]", "i", "i", "i"),
    "reduce": ("[rw]", c10d.ReduceOptions),
    "gather": ("[[w]]", "[r]", c10d.GatherOptions),
    "scatter": ("[w]", "[[r]]", c10d.ScatterOptions),
    "alltoall": ("[w]", "[r]", c10d.AllToAllOptions),
    "allgather_coalesced": ("[[w]]", "[r]", c10d.AllgatherOptions),
    "_allgather_base": ("w", "r", c10d.AllgatherOptions),
    "all_gather_single": ("w", "r", c10d.AllgatherOptions),
    "_reduce_scatter_base": ("w", "r", c10d.ReduceScatterOptions),
    "reduce_scatter_single": ("w", "r", c10d.ReduceScatterOptions),
}

# The devices whose tensors can be registered, as numbers in a record. Tests add their own.
DEVICES = ("cpu", "cuda", "xpu")

# A longer message is sent as the descriptor of memory: it does not fit into a socket.
_LONG = 1 << 15
_MEMORY = b"in memory"

_LONGEST_TEXT = 10_000


def send(to: socket.socket, record: Any, descriptors: Sequence[int] = (), flags: int = 0) -> None:
    """Sends a record. Waits while the socket is full because the other end does not read."""
    data = marshal.dumps(record)
    memory = None
    try:
        if len(data) > _LONG:
            memory = os.memfd_create("torchft-message", os.MFD_CLOEXEC)
            os.pwrite(memory, data, 0)
            data, descriptors = _MEMORY, (memory, *descriptors)
        # Not socket.send_fds, which ignores the flags.
        rights = array.array("i", descriptors)
        to.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else [], flags)
    finally:
        if memory is not None:
            os.close(memory)


def receive(source: socket.socket) -> tuple[Any, list[int]]:
    """Waits for a record, and descriptors, which the caller closes. EOFError: the other end is closed."""
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(source, _LONG, 2)
            break
        except ConnectionResetError:
            pass  # reported once if the other end has left messages unread; its own may follow
    if not data:
        raise EOFError
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if data == _MEMORY:
        memory = descriptors.pop(0)
        try:
            data = os.pread(memory, os.fstat(memory).st_size, 0)
        finally:
            os.close(memory)
    return marshal.loads(data), descriptors


# Operations


def encode_call(name: str, arguments: Sequence[Any], register: Callable[[Any, str], Any]) -> bytes:
    """An operation as a record of its own: its name, then its arguments as `OPERATIONS` defines them.
    `register` turns a tensor and its access, such as "rw", into a record.
    """
    record: list[Any] = [name]
    for kind, argument in zip(OPERATIONS[name], arguments):
        if isinstance(kind, type):
            record.append(encode_options(kind() if argument is None else argument))
        elif "i" in kind:
            record.append(each(kind, operator.index, argument))
        else:
            access = kind.strip("[]")
            record.append(each(kind, lambda tensor, access=access: register(tensor, access), argument))
    return marshal.dumps(record)


def decode_call(record: bytes, borrow: Callable[[Any], torch.Tensor]) -> tuple[str, list[Any]]:
    """The name and the arguments of an operation; `borrow` turns what `register` returned into a tensor."""
    name, *arguments = marshal.loads(record)
    for at, kind in enumerate(OPERATIONS[name]):
        if isinstance(kind, type):
            arguments[at] = decode_options(arguments[at])
        elif "i" not in kind:
            arguments[at] = each(kind, borrow, arguments[at])
    return name, arguments


def each(kind: str, function: Callable[[Any], Any], argument: Any) -> Any:
    """Applies a function to each item of an argument of some kind."""
    if kind[0] == "[":
        return [each(kind[1:], function, item) for item in argument]
    return function(argument)


# Options. The fields of a class depend on the version of PyTorch, which is the same at both ends.

_FIELDS = ("reduceOp", "timeout", "rootRank", "rootTensor", "asyncOp", "device_ids", "device")
_CLASSES = {kind.__name__: kind for kinds in OPERATIONS.values() for kind in kinds if isinstance(kind, type)}
_FIELDS_OF = {kind: [name for name in _FIELDS if hasattr(kind, name)] for kind in _CLASSES.values()}


def encode_options(opts: Any) -> tuple[Any, ...]:
    """PyTorch's options as a record: the name of their class, then their fields. TypeError for others."""
    fields = _FIELDS_OF.get(type(opts))
    if fields is None:
        raise TypeError(f"{type(opts).__name__}: options of torch.distributed are needed")
    return type(opts).__name__, *[_encoded_field(name, getattr(opts, name)) for name in fields]


def _encoded_field(name: str, value: Any) -> Any:
    if name == "timeout":
        return value.total_seconds()
    if name == "reduceOp":
        kind, factor = value.__getstate__()
        if isinstance(factor, torch.Tensor):
            raise ValueError(
                "a reduction with a tensor as its factor is not supported in an isolated group: give a number"
            )
        return int(kind), factor
    if name == "device":
        return None if value is None else str(value)
    return tuple(value) if name == "device_ids" else value


def decode_options(record: tuple[Any, ...]) -> Any:
    kind = _CLASSES[record[0]]
    opts: Any = kind()
    for name, value in zip(_FIELDS_OF[kind], record[1:]):
        # None is the default of `device`, but cannot be set in all versions.
        if value is not None:
            setattr(opts, name, _decoded_field(name, value))
    return opts


def _decoded_field(name: str, value: Any) -> Any:
    if name == "timeout":
        return timedelta(seconds=value)
    if name == "reduceOp":
        kind, factor = value
        return ReduceOp(ReduceOp.RedOpType(kind)) if factor is None else dist._make_nccl_premul_sum(factor)
    if name == "device":
        return torch.device(value)
    return list(value) if name == "device_ids" else value


class _PickleSafeOptions:
    """PyTorch's options as an object that can be pickled; the options themselves cannot."""

    def __init__(self, encoded: tuple[Any, ...]) -> None:
        self._encoded = encoded

    @classmethod
    def safe_args(cls, args: Any) -> Any:
        """`args`, a tuple, list or single value, with all options replaced."""
        if isinstance(args, (tuple, list)):
            return type(args)(cls.safe_args(arg) for arg in args)
        return cls.from_torch(args) if type(args) in _FIELDS_OF else args

    @classmethod
    def unsafe_args(cls, args: Any) -> Any:
        """Undoes `safe_args`."""
        if isinstance(args, (tuple, list)):
            return type(args)(cls.unsafe_args(arg) for arg in args)
        return args.to_torch() if isinstance(args, cls) else args

    @classmethod
    def from_torch(cls, opts: object) -> _PickleSafeOptions:
        return cls(encode_options(opts))

    def to_torch(self) -> object:
        return decode_options(self._encoded)


# Errors

_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (TypeError, ValueError, NotImplementedError, AssertionError, ImportError, MemoryError)
}


def encode_error(error: BaseException) -> tuple[str, str]:
    # The text begins with the error and ends with its place in the code; the end is truncated. Characters
    # that cannot be encoded are replaced.
    text = str(error)[:_LONGEST_TEXT].encode(errors="replace").decode()
    return type(error).__name__, text


def decode_error(record: tuple[str, str]) -> Exception:
    """Returns the worker's error, of the same class if that is one of Python's or torch.distributed's."""
    name, text = record
    kind = _ERRORS.get(name) or getattr(dist, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind, text = RuntimeError, text if name == "RuntimeError" else f"{name}: {text}"
    return kind(text)
