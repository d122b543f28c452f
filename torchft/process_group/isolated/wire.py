"""The trainer's end of the connection with a worker: a socket for requests, a pipe for answers."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import socket
import threading
import time
from typing import Optional, Sequence, Union

from torchft.process_group.isolated import _native, protocol
from torchft.process_group.isolated.messages import LONG, send

_ANSWERS_SIZE = 1 << 20  # bytes: what an unprivileged process may ask for
_SEND_SLICE_MS = 100
# A request of so many bytes fits into a message, with its head.
_SHORT = LONG - 64


class Wire:
    """Sends requests from any thread, and reads answers for one at a time.

    Attributes:
        theirs: the worker's ends, of requests and answers, to be closed here when it has them.
    """

    def __init__(self) -> None:
        # SEQPACKET keeps the messages apart, and carries file descriptors. Answers are written by several threads
        # of the worker, some of Gloo's: a pipe is faster, and holds thousands of them.
        self._requests, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._answers, answers = os.pipe()
        self.theirs: tuple[socket.socket, int] = requests, answers
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._answers, fcntl.F_SETPIPE_SZ, _ANSWERS_SIZE)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._requests_fd = self._requests.fileno()
        # A garbage collection may close this on a thread that is in here already.
        self._send_lock = threading.RLock()
        # The number of a closed descriptor may be somebody else's at once.
        self._closing = threading.RLock()
        self._rest = b""
        self.closed = False

    def send(self, timeout: float, kind: int, operation: int, *parts: bytes, descriptor: Optional[int] = None) -> None:
        """Waits, `timeout` seconds at most, only while the worker does not read, which it does all the time.

        Raises:
            TimeoutError: it does not read.
            OSError: it is gone.
        """
        with self._send_lock:
            if self.closed:
                raise BrokenPipeError("the worker is gone")
            if descriptor is None and sum(map(len, parts)) < _SHORT:
                if not _native.send(self._requests_fd, kind, operation, *parts):
                    self._send_later(timeout, protocol.request(kind, operation, b"".join(parts)), None)
            else:
                self._send_later(timeout, protocol.request(kind, operation, b"".join(parts)), descriptor)

    def _send_later(self, timeout: float, data: bytes, descriptor: Optional[int]) -> None:
        deadline = time.monotonic() + timeout
        poll = select.poll()
        poll.register(self._requests, select.POLLOUT)
        while True:
            try:
                send(self._requests, data, () if descriptor is None else (descriptor,))
                return
            except BlockingIOError:
                poll.poll(_SEND_SLICE_MS)
            if time.monotonic() > deadline:
                raise TimeoutError

    def read(self, timeout: float) -> Union[int, Sequence[protocol.Answer]]:
        """Waits for answers, `timeout` seconds at most. For one thread at a time.

        Returns:
            The number of an operation that is done, which is what comes most of the time; else the answers.

        Raises:
            EOFError: the worker is gone.
        """
        # An answer is written in one piece: where there is a part of one, there is the rest.
        found = (
            os.read(self._answers, LONG)
            if self._rest
            else _native.read(self._answers, self._wake, math.ceil(1000 * timeout))
        )
        if found is None:
            return ()
        if isinstance(found, int):
            return found
        if not found:
            raise EOFError
        answers, self._rest = protocol.read_answers(self._rest + found)
        return answers

    def wake(self) -> None:
        """Ends the wait of whoever reads."""
        with self._closing:
            if not self.closed:
                os.eventfd_write(self._wake, 1)

    def hang_up(self) -> None:
        """Whoever sends gets an error from now on, and the worker ends."""
        with contextlib.suppress(OSError):
            self._requests.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """To be called when nobody reads any more."""
        with self._send_lock, self._closing:
            if self.closed:
                return
            self.closed = True
            self._requests.close()
            os.close(self._answers)
            os.close(self._wake)

    def forget(self) -> None:
        """In a forked child: it is the parent's."""
        if self.closed:
            return
        self.closed = True
        for descriptor in (self._requests.detach(), self._answers, self._wake):
            with contextlib.suppress(OSError):
                os.close(descriptor)
