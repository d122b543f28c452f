"""The trainer's end of the connection with a worker: a socket for requests, a pipe for answers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import threading
import time
from typing import Optional, Sequence

from torchft.process_group.isolated import _native, protocol
from torchft.process_group.isolated.messages import LONG, send

_ANSWERS_SIZE = 1 << 20  # capacity of the pipe in bytes: the most that an unprivileged process may set
_SEND_SLICE_MS = 100
# The largest request that fits into one message, together with its head.
_SHORT = LONG - 64


class Wire:
    """Sends requests from any thread; one thread reads answers.

    Attributes:
        theirs: the worker's ends for requests and answers; the trainer closes them when the worker has its copies.
    """

    def __init__(self) -> None:
        # Requests use a SEQPACKET socket, which keeps messages apart and carries file descriptors. Answers use a pipe,
        # which is faster than a socket and holds thousands of answers; several threads of the worker write to it, also
        # threads of Gloo.
        self._requests, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._answers, answers = os.pipe()
        self.theirs: tuple[socket.socket, int] = requests, answers
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._answers, fcntl.F_SETPIPE_SZ, _ANSWERS_SIZE)
        self._ready = select.poll()
        self._ready.register(self._answers, select.POLLIN)
        self._requests_fd = self._requests.fileno()
        # Reentrant: a garbage collection may call `close` on a thread that holds this lock.
        self._send_lock = threading.RLock()
        self._rest = b""
        self.closed = False

    def send(self, timeout: float, kind: int, operation: int, *parts: bytes, descriptor: Optional[int] = None) -> None:
        """Sends a request. Waits, at most `timeout` seconds, only if the worker stalls: a healthy worker always reads.

        Raises:
            TimeoutError: the worker does not read.
            OSError: the worker has ended.
        """
        with self._send_lock:
            if self.closed:
                raise BrokenPipeError("the worker has ended")
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

    def read(self, timeout: float) -> Sequence[protocol.Answer]:
        """Waits for answers, `timeout` seconds at most. For one thread.

        Raises:
            EOFError: the worker has ended.
        """
        if not self._ready.poll(1000 * timeout):
            return ()
        found = os.read(self._answers, LONG)
        if not found:
            raise EOFError
        answers, self._rest = protocol.read_answers(self._rest + found)
        return answers

    def hang_up(self) -> None:
        """Ends the connection: further sends fail, and the worker ends."""
        with contextlib.suppress(OSError):
            self._requests.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the descriptors. No thread may be in `read`."""
        with self._send_lock:
            if self.closed:
                return
            self.closed = True
            self._requests.close()
            os.close(self._answers)

    def forget(self) -> None:
        """In a forked child: closes the child's descriptors, so that the worker notices when the parent ends."""
        if self.closed:
            return
        self.closed = True
        for descriptor in (self._requests.detach(), self._answers):
            with contextlib.suppress(OSError):
                os.close(descriptor)
