"""The trainer's end of what connects it with one worker: a socket for requests, a pipe for answers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import threading
import time
from typing import Optional, Sequence

from torchft.process_group.isolated import protocol
from torchft.process_group.isolated.messages import send

_ANSWERS_AT_ONCE = 1 << 14  # bytes
_ANSWERS_SIZE = 1 << 20  # bytes: what an unprivileged process may ask for
_SEND_SLICE_MS = 100


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
        self._poll = select.poll()
        self._poll.register(self._answers, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._send_poll = select.poll()
        self._send_poll.register(self._requests, select.POLLOUT)
        # A garbage collection may close this on a thread that is in here already.
        self._send_lock = threading.RLock()
        # The number of a closed descriptor may be somebody else's at once.
        self._closing = threading.RLock()
        self._rest = b""
        self.closed = False

    def send(self, data: bytes, descriptor: Optional[int], timeout: float) -> None:
        """Waits, `timeout` seconds at most, only while the worker does not read, which it does all the time.

        Raises:
            TimeoutError: it does not read.
            OSError: it is gone.
        """
        deadline = None
        descriptors = () if descriptor is None else (descriptor,)
        with self._send_lock:
            while True:
                try:
                    send(self._requests, data, descriptors)
                    return
                except BlockingIOError:
                    pass
                deadline = deadline or time.monotonic() + timeout
                self._send_poll.poll(_SEND_SLICE_MS)
                if time.monotonic() > deadline:
                    raise TimeoutError

    def read(self, timeout: float) -> Sequence[protocol.Answer]:
        """The answers there are, or come within `timeout` seconds. For one thread at a time.

        Raises:
            EOFError: the worker is gone.
        """
        ready = self._poll.poll(timeout * 1000)
        if not ready:
            return ()
        if len(ready) == 1 and ready[0][0] == self._wake:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            return ()
        data = os.read(self._answers, _ANSWERS_AT_ONCE)
        if not data:
            raise EOFError
        answers, self._rest = protocol.read_answers(self._rest + data if self._rest else data)
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
