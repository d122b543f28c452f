"""Messages with file descriptors over a SOCK_SEQPACKET socket; long ones are sent as shared memory."""

from __future__ import annotations

import array
import os
import socket
from typing import Iterable, Sequence

# A longer message does not fit into a socket.
LONG = 1 << 15
_MEMORY = b"\xff"
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_ANCILLARY = socket.CMSG_SPACE(4 * 4)  # four descriptors


def send(to: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Sends a message, without waiting.

    Raises:
        BlockingIOError: the other end does not read.
        OSError: the other end is closed.
    """
    if len(data) > LONG:
        memory = os.memfd_create("torchft-message", os.MFD_CLOEXEC)
        try:
            os.truncate(memory, len(data))
            os.pwrite(memory, data, 0)
            send(to, _MEMORY, (memory, *descriptors))
        finally:
            os.close(memory)
        return
    if not descriptors:
        to.send(data, _FLAGS)
        return
    to.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))], _FLAGS)


def receive(source: socket.socket) -> tuple[bytes, list[int]]:
    """The next message, b"" when the other end is closed, and the descriptors that came with it."""
    data, ancillary, _, _ = source.recvmsg(LONG, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    return unpack(data, list(_descriptors(ancillary)) if ancillary else [])


def unpack(data: bytes, descriptors: Sequence[int]) -> tuple[bytes, list[int]]:
    """The message that was sent, given the bytes and descriptors from the socket."""
    if data != _MEMORY:
        return data, list(descriptors)
    memory, *rest = descriptors
    try:
        return os.pread(memory, os.fstat(memory).st_size, 0), rest
    finally:
        os.close(memory)


def _descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> Iterable[int]:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            yield from array.array("i", data[: len(data) // 4 * 4])
