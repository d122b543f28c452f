"""The first operations with new peers: torchft's own, on the thread that connects.

NCCL connects with the peers for an algorithm (tree, ring, NVLink SHARP) when an operation first needs it, and
chooses the algorithm by the number of bytes, the elements and the reduction. The host waits meanwhile:
without these operations the autograd thread, in the first bucket of a quorum. NCCL_RUNTIME_CONNECT=0 would
connect all algorithms when a communicator is made, but also those of the user's own groups. It takes memory
for algorithms that no operation needs, and must be equal in all processes of a communicator, upstream's
included.

So a group records the allreduces that it has run, and announces them in its handle. When all peers announce
some, or none yet, each of them begins the same operations: those that any of them has announced.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch.distributed import ReduceOp, Work
from torch.distributed.distributed_c10d import AllreduceOptions

from torchft.utils import dtype_name, get_stream_context

# Sizes are powers of two, as exponents. A larger operation counts as one of 32 MiB, which bounds the memory.
_MOST = 25
_REDUCTIONS = {"sum": ReduceOp.SUM, "avg": ReduceOp.AVG}
_TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


class AllreduceKind(NamedTuple):
    """Allreduces for which NCCL chooses the same algorithm, or one of two.

    Attributes:
        reduction: "sum" or "avg".
        dtype: name of the type of the elements.
        exponent: the number of bytes is at least 2**exponent, and below twice that.
    """

    reduction: str
    dtype: str
    exponent: int

    def encode(self) -> str:
        return "/".join(map(str, self))

    @classmethod
    def decode(cls, text: str) -> AllreduceKind:
        """Raises ValueError if the text is none of :meth:`encode`."""
        reduction, dtype, exponent = text.split("/")
        if reduction not in _REDUCTIONS or dtype not in _TYPES or not 0 <= int(exponent) <= _MOST:
            raise ValueError(f"{text!r} is no kind of an allreduce")
        return cls(reduction, dtype, int(exponent))


class RecordedAllreduces:
    """The allreduces that a group has run. Used by any thread."""

    def __init__(self) -> None:
        self._kinds: set[AllreduceKind] = set()

    def add(self, tensors: Iterable[torch.Tensor], reduction: object) -> None:
        op = next((name for name, op in _REDUCTIONS.items() if reduction == op), None)
        for tensor in tensors:
            dtype = dtype_name(tensor.dtype)
            if op is not None and dtype in _TYPES and tensor.numel():
                # One call, which other threads see whole.
                self._kinds.add(AllreduceKind(op, dtype, min(tensor.nbytes.bit_length() - 1, _MOST)))

    def encode(self) -> str:
        return ",".join(kind.encode() for kind in sorted(self._kinds.copy()))


def agreed(announced: Sequence[Optional[str]]) -> Optional[list[AllreduceKind]]:
    """The allreduces that any peer has run, equal on all peers; None if a peer announces nothing (None).
    ValueError: a peer announces what this version does not know.
    """
    texts = [text for text in announced if text is not None]
    if len(texts) < len(announced):
        return None
    return sorted({AllreduceKind.decode(part) for text in texts for part in text.split(",") if part})


# The bytes that these operations reduce, and their stream, by device. Never freed, nor those that were too
# few: an aborted operation may still write to them, and PyTorch would give the memory to another user of that
# stream.
_first: dict[torch.device, tuple[torch.Stream, torch.Tensor]] = {}
_outgrown: list[torch.Tensor] = []
_lock = threading.Lock()


def _operand(device: torch.device, size: int) -> tuple[torch.Stream, torch.Tensor]:
    with _lock:
        known = _first.get(device)
        if known is None or known[1].numel() < size:
            stream = torch.Stream(device) if known is None else known[0]
            with get_stream_context(stream):
                made = torch.zeros(size, dtype=torch.uint8, device=device)
            if known is not None:
                _outgrown.append(known[1])
            known = _first[device] = stream, made
        return known


def first_operation(
    group: Any, device: torch.device, count: int = 1, kinds: Sequence[AllreduceKind] = ()
) -> Work:
    """Begins operations of torchft's own, the first ones of a group or a backend with its peers.

    Args:
        count: number of elements of the first one, 0 or 1.
        kinds: further allreduces. Of each kind there is one of the least size and one of twice that, because
            NCCL's choice may change in between.

    Returns:
        The last one, which ends last.
    """
    item = torch.float32.itemsize
    wanted = {("sum", "float32", count * item): None}
    for kind in kinds:
        for exponent in (kind.exponent, min(kind.exponent + 1, _MOST)):
            wanted[kind.reduction, kind.dtype, max(2**exponent, _TYPES[kind.dtype].itemsize)] = None
    stream, operand = _operand(device, max(item, *(size for _, _, size in wanted)))
    work: Optional[Work] = None
    with get_stream_context(stream):
        for reduction, dtype, size in wanted:
            opts = AllreduceOptions()
            opts.reduceOp = _REDUCTIONS[reduction]
            work = group.allreduce([operand[:size].view(_TYPES[dtype])], opts)
    assert work is not None
    return work
