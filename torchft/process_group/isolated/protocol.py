"""The binary messages between an isolated group and its worker.

Requests go to the worker through a socket that keeps messages apart, answers return through a pipe. Neither contains
tensors or pickles: a tensor is the ref of a registration (see `sharing`), options are their fields. An operation
without its number and marks (`body`) has the same bytes each time it is repeated, so the worker decodes it once.

    request  kind u8, operation u64, rest
    answer   kind u8, operation u64, length of the rest u32, rest
    body     code of the operation u8, then arguments, each a tag u8 and a value in the tag's format
"""

from __future__ import annotations

import operator
import struct
from datetime import timedelta
from typing import Any, Callable, Iterator, NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as c10d

# Kinds of requests
CONFIGURE = 1  # JSON with the arguments of `configure`, and the environment; answered like an operation
RUN = 2  # marks, then a body
NOTIFY = 3  # device, note; perhaps with a file descriptor: see `sharing.Notify`
SET_TIMEOUT = 4  # seconds, f64
PING = 5
CHECK = 6  # answered like an operation: fails with the error of the worker's backend

# Kinds of answers
DONE = 1  # marks
FAILED = 2  # name of the exception's class, a line feed, its text
FATAL = 3  # the same; the worker ends
PONG = 4

# The methods of PyTorch's group that a worker may call, with their arguments: "r" is read by the operation, "w"
# written. A request contains the index in this table. The last integer of send and recv is their timeout in
# milliseconds, 0 for the group's.
_OUT, _IN, _OUT_LISTS, _IN_LISTS = ("tensors", "w"), ("tensors", "r"), ("lists", "w"), ("lists", "r")
_BOTH, _OUT_ONE, _IN_ONE = ("tensors", "rw"), ("tensor", "w"), ("tensor", "r")
OPERATIONS: dict[str, tuple[Any, ...]] = {
    "allgather": (_OUT_LISTS, _IN, c10d.AllgatherOptions),
    "allgather_into_tensor_coalesced": (_OUT, _IN, c10d.AllgatherOptions),
    "allreduce": (_BOTH, c10d.AllreduceOptions),
    "allreduce_coalesced": (_BOTH, c10d.AllreduceCoalescedOptions),
    "alltoall_base": (_OUT_ONE, _IN_ONE, "integers", "integers", c10d.AllToAllOptions),
    "barrier": (c10d.BarrierOptions,),
    "broadcast": (_BOTH, c10d.BroadcastOptions),
    # A message may be shorter than the tensor, whose remaining elements must stay unchanged.
    "recv": (_BOTH, "integer", "integer", "integer"),
    "reduce_scatter": (_OUT, _IN_LISTS, c10d.ReduceScatterOptions),
    "reduce_scatter_tensor_coalesced": (_OUT, _IN, c10d.ReduceScatterOptions),
    "send": (_IN, "integer", "integer", "integer"),
    "reduce": (_BOTH, c10d.ReduceOptions),
    "gather": (_OUT_LISTS, _IN, c10d.GatherOptions),
    "scatter": (_OUT, _IN_LISTS, c10d.ScatterOptions),
    "alltoall": (_OUT, _IN, c10d.AllToAllOptions),
    "allgather_coalesced": (_OUT_LISTS, _IN, c10d.AllgatherOptions),
    "_allgather_base": (_OUT_ONE, _IN_ONE, c10d.AllgatherOptions),
    "all_gather_single": (_OUT_ONE, _IN_ONE, c10d.AllgatherOptions),
    "_reduce_scatter_base": (_OUT_ONE, _IN_ONE, c10d.ReduceScatterOptions),
    "reduce_scatter_single": (_OUT_ONE, _IN_ONE, c10d.ReduceScatterOptions),
}
_NAMES = tuple(OPERATIONS)
_CODES = {name: bytes((code,)) for code, name in enumerate(_NAMES)}

_REQUEST = struct.Struct("<BQ")
_ANSWER = struct.Struct("<BQI")
_ITEM = struct.Struct("<BH")  # device, length
_COUNT = struct.Struct("<BH")  # tag, count
_INT = struct.Struct("<Bq")
_F64 = struct.Struct("<d")

# Answers are written by several threads. A write of up to this size (PIPE_BUF) is never interleaved with another.
_ATOMIC = 4096

# Tags of arguments
_TENSOR, _TENSORS, _LISTS, _INTEGER, _INTEGERS, _OPTIONS = range(6)
_ONE_TENSOR = bytes((_TENSOR,))

# The devices whose tensors can be registered, as numbers in a ref. Tests add their own.
DEVICES = ("cpu", "cuda", "xpu")

# (device, ref or mark)
Item = tuple[int, bytes]


class Request(NamedTuple):
    kind: int
    operation: int
    rest: bytes


class Answer(NamedTuple):
    kind: int
    operation: int
    rest: bytes


def request(kind: int, operation: int = 0, rest: bytes = b"") -> bytes:
    return _REQUEST.pack(kind, operation) + rest


def read_request(data: bytes) -> Request:
    kind, operation = _REQUEST.unpack_from(data)
    return Request(kind, operation, data[_REQUEST.size :])


def answer(kind: int, operation: int = 0, rest: bytes = b"") -> bytes:
    """Encodes one answer, truncated to the size that is written in one piece."""
    rest = rest[: _ATOMIC - _ANSWER.size]
    return _ANSWER.pack(kind, operation, len(rest)) + rest


def read_answers(data: bytes) -> tuple[list[Answer], bytes]:
    """Returns the complete answers in `data`, and the remaining bytes."""
    answers = []
    at = 0
    if len(data) == _ANSWER.size:
        # The most frequent case: a single answer, of an operation that has succeeded.
        kind, operation, length = _ANSWER.unpack(data)
        return ([Answer(kind, operation, b"")], b"") if not length else ([], data)
    while len(data) - at >= _ANSWER.size:
        kind, operation, length = _ANSWER.unpack_from(data, at)
        end = at + _ANSWER.size + length
        if end > len(data):
            break
        answers.append(Answer(kind, operation, data[at + _ANSWER.size : end]))
        at = end
    return answers, data[at:]


def seconds(value: float) -> bytes:
    return _F64.pack(value)


def read_seconds(data: bytes) -> float:
    return _F64.unpack(data)[0]


# Marks


NO_MARKS = b"\0"


def marks(items: Sequence[Item]) -> bytes:
    if not items:
        return NO_MARKS
    return bytes((len(items),)) + b"".join(map(_item, items))


def read_marks(data: bytes) -> tuple[list[Item], bytes]:
    """Decodes the marks at the beginning of `data`. Returns them and the remaining bytes."""
    at = 1
    items = []
    for _ in range(data[0]):
        item, at = _read_item(data, at)
        items.append(item)
    return items, data[at:]


def _item(item: Item) -> bytes:
    return _ITEM.pack(item[0], len(item[1])) + item[1]


def _read_item(data: bytes, at: int) -> tuple[Item, int]:
    device, length = _ITEM.unpack_from(data, at)
    at += _ITEM.size
    return (device, data[at : at + length]), at + length


# Operations


def code(name: str) -> bytes:
    """The beginning of an operation's body. The arguments follow, in the order of PyTorch's method."""
    return _CODES[name]


def tensor(item: Item) -> bytes:
    return _ONE_TENSOR + _item(item)


def tensors(items: Sequence[Item]) -> bytes:
    return _COUNT.pack(_TENSORS, len(items)) + b"".join([_ITEM.pack(device, len(ref)) + ref for device, ref in items])


def lists(several: Sequence[Sequence[Item]]) -> bytes:
    return _COUNT.pack(_LISTS, len(several)) + b"".join(map(tensors, several))


def integer(value: int) -> bytes:
    return _INT.pack(_INTEGER, value)


def integers(values: Sequence[int]) -> bytes:
    return _COUNT.pack(_INTEGERS, len(values)) + struct.pack(f"<{len(values)}q", *values)


def options(opts: Any) -> tuple[bytes, float]:
    """Encodes options. Returns also the timeout that they contain, in seconds; negative if there is none."""
    rest = _SIMPLE.get(type(opts))
    if rest is None:
        return _options(opts)
    # Converted to an int, because Python compares enumerations of C++ slowly.
    reduction = int(opts.reduceOp.op)
    key = type(opts), reduction, rest(opts)
    known = _known.get(key)
    if known is None:
        known = _options(opts)
        # The key does not contain a factor.
        if reduction in _WITHOUT_FACTOR and len(_known) < _REMEMBERED:
            _known[key] = known
    return known


def _options(opts: Any) -> tuple[bytes, float]:
    encoded = encode_options(opts)
    return _COUNT.pack(_OPTIONS, len(encoded)) + encoded, opts.timeout.total_seconds()


def read_body(data: bytes, borrow: Callable[[int, bytes], torch.Tensor]) -> tuple[str, list[Any]]:
    """Decodes the name and arguments of an operation; `borrow` turns (device, ref) into a tensor."""

    def some(count: int) -> list[torch.Tensor]:
        nonlocal at
        out = []
        for _ in range(count):
            item, at = _read_item(data, at)
            out.append(borrow(*item))
        return out

    def arguments() -> Iterator[Any]:
        nonlocal at
        while at < len(data):
            tag = data[at]
            if tag == _TENSOR:
                at += 1
                yield some(1)[0]
                continue
            if tag == _INTEGER:
                yield _INT.unpack_from(data, at)[1]
                at += _INT.size
                continue
            count = _COUNT.unpack_from(data, at)[1]
            at += _COUNT.size
            if tag == _TENSORS:
                yield some(count)
            elif tag == _LISTS:
                several = []
                for _ in range(count):
                    length = _COUNT.unpack_from(data, at)[1]
                    at += _COUNT.size
                    several.append(some(length))
                yield several
            elif tag == _INTEGERS:
                yield list(struct.unpack_from(f"<{count}q", data, at))
                at += 8 * count
            elif tag == _OPTIONS:
                yield decode_options(data[at : at + count])
                at += count
            else:
                raise ValueError(f"unknown tag {tag} of an argument")

    at = 1
    return _NAMES[data[0]], list(arguments())


# Options

_OPTIONS_CLASSES: tuple[type, ...] = (
    c10d.AllgatherOptions,
    c10d.AllreduceOptions,
    c10d.AllreduceCoalescedOptions,
    c10d.AllToAllOptions,
    c10d.BarrierOptions,
    c10d.BroadcastOptions,
    c10d.GatherOptions,
    c10d.ReduceOptions,
    c10d.ReduceScatterOptions,
    c10d.ScatterOptions,
)


_REDUCTION = struct.Struct("<BBd")

# The encodings of reductions without a factor: nearly all have none.
_REDUCTIONS = {
    kind: _REDUCTION.pack(kind.value, False, 0.0)
    for name, kind in ReduceOp.RedOpType.__members__.items()
    if name != "PREMUL_SUM"
}


def _write_reduction(op: Any) -> bytes:
    known = _REDUCTIONS.get(op.op)
    if known is not None:
        return known
    kind, factor = op.__getstate__()
    if isinstance(factor, torch.Tensor):
        raise ValueError("a reduction with a tensor as its factor is not supported in an isolated group: give a number")
    return _REDUCTION.pack(kind.value, factor is not None, factor or 0.0)


def _read_reduction(data: bytes, at: int) -> tuple[Any, int]:
    kind, has_factor, factor = _REDUCTION.unpack_from(data, at)
    op = dist._make_nccl_premul_sum(factor) if has_factor else ReduceOp(ReduceOp.RedOpType(kind))
    return op, at + _REDUCTION.size


def _write_integers(values: Sequence[int]) -> bytes:
    return struct.pack(f"<B{len(values)}q", len(values), *values)


def _read_integers(data: bytes, at: int) -> tuple[list[int], int]:
    return list(struct.unpack_from(f"<{data[at]}q", data, at + 1)), at + 1 + 8 * data[at]


def _write_duration(value: timedelta) -> bytes:
    return _F64.pack(value.total_seconds())


def _read_duration(data: bytes, at: int) -> tuple[timedelta, int]:
    return timedelta(seconds=_F64.unpack_from(data, at)[0]), at + 8


def _write_integer(value: int) -> bytes:
    return struct.pack("<q", value)


def _read_integer(data: bytes, at: int) -> tuple[int, int]:
    return struct.unpack_from("<q", data, at)[0], at + 8


def _write_flag(value: bool) -> bytes:
    return bytes((value,))


def _read_flag(data: bytes, at: int) -> tuple[bool, int]:
    return bool(data[at]), at + 1


def _write_device(value: Optional[torch.device]) -> bytes:
    text = "" if value is None else str(value)
    return bytes((len(text),)) + text.encode()


def _read_device(data: bytes, at: int) -> tuple[Optional[torch.device], int]:
    end = at + 1 + data[at]
    text = data[at + 1 : end].decode()
    return (torch.device(text) if text else None), end


_Field = tuple[str, Callable[[Any], bytes], Callable[[bytes, int], tuple[Any, int]]]

_FIELDS: tuple[_Field, ...] = (
    ("reduceOp", _write_reduction, _read_reduction),
    ("timeout", _write_duration, _read_duration),
    ("rootRank", _write_integer, _read_integer),
    ("rootTensor", _write_integer, _read_integer),
    ("asyncOp", _write_flag, _read_flag),
    ("device_ids", _write_integers, _read_integers),
    ("device", _write_device, _read_device),
)

# The fields of a class depend on the version of PyTorch, which is the same at both ends.
_FIELDS_OF: dict[type, tuple[int, tuple[_Field, ...]]] = {
    kind: (number, tuple(field for field in _FIELDS if hasattr(kind, field[0])))
    for number, kind in enumerate(_OPTIONS_CLASSES)
}


# Each operation has new options, which mostly repeat earlier ones, so those that can be compared quickly
# are encoded once.
_REMEMBERED = 512
_WITHOUT_FACTOR = {kind.value for kind in _REDUCTIONS}
_known: dict[tuple[type, int, Any], tuple[bytes, float]] = {}
_QUICK = {"timeout", "rootRank", "rootTensor", "asyncOp"}
_SIMPLE: dict[type, Callable[[Any], Any]] = {
    kind: operator.attrgetter(*(name for name, _, _ in fields[1:]))
    for kind, (_, fields) in _FIELDS_OF.items()
    if fields[0][0] == "reduceOp" and _QUICK.issuperset(name for name, _, _ in fields[1:])
}


def encode_options(opts: Any) -> bytes:
    """PyTorch's options as bytes.

    Raises:
        TypeError: `opts` is no object of PyTorch's options.
    """
    known = _FIELDS_OF.get(type(opts))
    if known is None:
        raise TypeError(f"{type(opts).__name__}: options of torch.distributed are needed")
    number, fields = known
    return bytes((number,)) + b"".join([write(getattr(opts, name)) for name, write, _ in fields])


def decode_options(data: bytes) -> Any:
    kind = _OPTIONS_CLASSES[data[0]]
    opts = kind()
    at = 1
    for name, _, read in _FIELDS_OF[kind][1]:
        value, at = read(data, at)
        # None is the default of `device`, but cannot be set in all versions.
        if value is not None:
            setattr(opts, name, value)
    return opts


class _PickleSafeOptions:
    """PyTorch's options as an object that can be pickled; the options themselves cannot."""

    def __init__(self, encoded: bytes) -> None:
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


def encode_error(error: BaseException) -> bytes:
    # The text begins with the error and ends with its place in the code; the end is truncated.
    return f"{type(error).__name__}\n{error}".encode(errors="replace")


def decode_error(data: bytes) -> Exception:
    """Returns the worker's error, of the same class if that is one of Python's or torch.distributed's."""
    name, _, text = data.decode(errors="replace").partition("\n")
    kind = _ERRORS.get(name) or getattr(dist, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind, text = RuntimeError, text if name == "RuntimeError" else f"{name}: {text}"
    return kind(text)
