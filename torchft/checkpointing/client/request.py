"""A target's request to a source, over HTTP and within a deadline."""

from __future__ import annotations

import http.client
import io
import logging
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Iterator, Optional, Sequence, Tuple

from torchft.addresses import host_port
from torchft.checkpointing.client.deadline import Deadline
from torchft.checkpointing.codec.handshake import (
    PROTOCOL,
    Structure,
    Ticket,
    parse_structure,
    read_frame,
)
from torchft.checkpointing.codec.requests import read
from torchft.checkpointing.codec.token import checkpoint_token
from torchft.checkpointing.transport import CheckpointError, CheckpointTimeout, Interrupted
from torchft.http import _DeadlineSocket

logger: logging.Logger = logging.getLogger(__name__)

_BUFFER = 64 << 10  # bytes
_NEXT_HOST_AFTER = 3.0  # seconds after which the next address is tried, if there is one
_ERROR_BODY = 2000  # bytes of an error's body that are read
_LONGEST_RETRY_AFTER = 10.0  # seconds


class RequestRefused(CheckpointError):
    """The source refused the request; a retry is useless. `status`: the status of the answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Busy(Interrupted):
    """The source has no room for this connection; it wants to be asked after `retry_after` seconds."""

    def __init__(self, what: str, retry_after: float) -> None:
        super().__init__(f"{what}: the source has too many connections; retry after {retry_after:g} s")
        self.retry_after = retry_after


class Abandon:
    """Aborts a transfer from another thread: a failed source may keep its connections and send nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason: Optional[Exception] = None
        self._socket: Optional[_DeadlineSocket] = None

    def because(self, reason: Exception) -> None:
        with self._lock:
            self._reason = self._reason or reason
            if self._socket is not None:
                self._socket.abort()

    @property
    def reached(self) -> bool:
        """Whether the source was connected."""
        return self._socket is not None

    def connected(self, sock: _DeadlineSocket) -> None:
        with self._lock:
            self._socket = sock
            if self._reason is not None:
                sock.abort()

    def check(self, what: str) -> None:
        """Raises CheckpointError if the transfer was aborted."""
        if self._reason is not None:
            raise CheckpointError(f"{what}: {self._reason}") from self._reason


@dataclass
class Answer:
    """A source's answer: a body, or the handshake of the native data plane."""

    sock: _DeadlineSocket
    body: Optional[io.BufferedReader] = None
    length: Optional[int] = None
    # The open connection, if the source agreed to the native data plane.
    control: Optional[io.BufferedIOBase] = None

    def handshake(self, what: str) -> Tuple[Ticket, Structure]:
        """Reads the two frames of the handshake."""
        assert self.control is not None
        ticket = Ticket.parse(read_frame(self.control, what), what)
        return ticket, parse_structure(read_frame(self.control, what), what)

    def data_address(self, ticket: Ticket) -> str:
        return host_port(str(self.sock.getpeername()[0]), ticket.port)


@dataclass
class Request:
    """A request for `{metadata}{step}/{key}`.
    `deadline` is that of the whole answer, and notes the data that arrives; `abandon` aborts the request, and
    the transfer that follows. For `metadata` and `key` see `codec.requests`.
    """

    metadata: str
    step: int
    key: str
    deadline: Deadline
    abandon: Abandon = field(default_factory=Abandon)

    @property
    def what(self) -> str:
        """Names the transfer in errors and logs."""
        return f"checkpoint of step {self.step} ({self.key}) from {self.metadata}"

    @contextmanager
    def ask(self, upgrade: bool = False) -> Iterator[Answer]:
        """Sends the request, and yields the answer.

        Args:
            upgrade: offer the native data plane

        Raises:
            ValueError: `metadata` is malformed
            Interrupted: the source cannot be reached, or the connection broke
            Busy: the source has no room for this connection
            CheckpointError: the source refuses, or its answer cannot be read
            CheckpointTimeout: the deadline has passed
        """
        hosts, port, path = read(self.metadata)
        headers = {"Connection": "Upgrade", "Upgrade": PROTOCOL} if upgrade else {"Connection": "close"}
        if token := checkpoint_token():
            headers["Authorization"] = f"Bearer {token}"
        deadline = self.deadline
        try:
            with self._connection(hosts, port) as (connection, sock):
                connection.request("GET", f"{path}{self.step}/{self.key}", headers=headers)
                with connection.getresponse() as response:
                    answer = self._answer(response, sock, upgrade)
                    # not earlier: Busy is no progress
                    sock.deadline, sock.arrived = deadline.arrived(), deadline.arrived
                    yield answer
        except TimeoutError as error:
            raise CheckpointTimeout(f"{self.what}: timed out {deadline.passed()}") from error
        except (OSError, http.client.HTTPException) as error:
            raise Interrupted(f"{self.what}: {type(error).__name__}: {error}") from error

    def _answer(self, response: http.client.HTTPResponse, sock: _DeadlineSocket, upgrade: bool) -> Answer:
        what, offered = self.what, response.getheader("Upgrade") == PROTOCOL
        if response.status == http.client.SWITCHING_PROTOCOLS and upgrade and offered:
            return Answer(sock, control=response.fp)
        if response.status == http.client.SWITCHING_PROTOCOLS:
            raise Interrupted(f"{what}: the connection ended during the handshake")
        retry_after = response.getheader("Retry-After") or ""
        if response.status == http.client.SERVICE_UNAVAILABLE and retry_after.isdecimal():
            raise Busy(what, min(float(retry_after), _LONGEST_RETRY_AFTER))
        if response.status != http.client.OK:
            raise RequestRefused(
                f"{what}: refused with {response.status}: {_reason(response)}", response.status
            )
        if upgrade and offered:
            # the source accepts each complete upgrade request, so this one was garbled on its way
            raise Interrupted(f"{what}: the request was garbled on its way")
        body: Any = io.BufferedReader(response, _BUFFER)  # type: ignore[type-var]
        return Answer(sock, body, response.length)

    @contextmanager
    def _connection(
        self, hosts: Sequence[str], port: int
    ) -> Iterator[Tuple[http.client.HTTPConnection, _DeadlineSocket]]:
        # Not urllib, which would use a proxy from the environment between two replica groups.
        limited = _DeadlineSocket.wrap(_connect(hosts, port, self.deadline.at))
        limited.deadline = self.deadline.at
        connection = http.client.HTTPConnection(hosts[0], port)
        connection.sock = limited
        self.abandon.connected(limited)
        try:
            yield connection, limited
        finally:
            connection.close()
            limited.close()


def _connect(hosts: Sequence[str], port: int, deadline: float) -> socket.socket:
    """Connects to the first of the hosts that answers."""
    for i, host in enumerate(hosts):
        left = max(0.001, deadline - time.monotonic())
        last = i + 1 == len(hosts)
        try:
            return socket.create_connection(
                (host, port), timeout=left if last else min(left, _NEXT_HOST_AFTER)
            )
        except OSError as error:
            if last:
                raise
            logger.debug("%s port %d does not answer (%s): trying %s", host, port, error, hosts[i + 1])
    raise ValueError("no host")


def _reason(response: http.client.HTTPResponse) -> str:
    """The source's error text: the body if that is plain text, else (upstream servers) the status line."""
    plain = (response.getheader("Content-Type") or "").startswith("text/plain")
    return (plain and response.read(_ERROR_BODY).decode("utf-8", "replace").strip()) or response.reason
