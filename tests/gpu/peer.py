"""The worker's end of `torchft.process_group.isolated.cuda`, in a separate process."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any, Optional

import torch

from tests.gpu.device import busy
from torchft.process_group.isolated import cuda


def run(connection: Connection) -> None:
    """Runs commands until it receives None: ("note", record, file or None), or ("double", seconds, mark,
    refs).
    """
    torch.cuda.set_device(0)
    end = cuda.worker()
    connection.send("up")
    while (message := connection.recv()) is not None:
        kind, *rest = message
        connection.send(_HANDLERS[kind](end, *rest))


def _note(end: Any, note: Any, file: Optional[str]) -> int:
    end.notified(note, None if file is None else os.open(file, os.O_RDWR))
    return len(end._imports)


def _double(end: Any, seconds: float, mark: Any, refs: list[Any]) -> Any:
    """Reads and writes the tensors, as a collective does, behind `seconds` of other work on the device."""
    end.follow(mark)
    tensors = [end.borrow(ref) for ref in refs]
    busy(seconds)
    for tensor in tensors:
        tensor.mul_(2)
    return end.mark()


_HANDLERS = {"note": _note, "double": _double}
