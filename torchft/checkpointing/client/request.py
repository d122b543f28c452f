"""The target's side of HTTP: requests a checkpoint from a source, within a deadline."""

from __future__ import annotations

import http.client
import io
import logging
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Optional, Sequence, Tuple

from torchft.checkpointing.client.deadline import Deadline
from torchft.checkpointing.client.progress import Meter
from torchft.checkpointing.codec.handshake import PROTOCOL, Garbled, Structure, Ticket, parse_structure, read_frame
from torchft.checkpointing.codec.requests import read
from torchft.checkpointing.codec.stream import Home, read_object
from torchft.checkpointing.transport import CheckpointError, CheckpointTimeout, Interrupted
from torchft.http import _DeadlineSocket

logger: logging.Logger = logging.getLogger(__name__)

_BUFFER = 64 << 10  # bytes
_NEXT_HOST_AFTER = 3.0  # seconds after which the next address is tried, if there is one
_ERROR_BODY = 2000  # bytes of an error's body that are read
_LONGEST_RETRY_AFTER = 10.0  # seconds


class Refused(CheckpointError):
    """The source refused the request; a retry is useless.

    Attributes:
        status: the status of the answer
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Busy(Interrupted):
    """The source has no room for this connection.

    Attributes:
        retry_after: seconds after which the source wants to be asked again
    """

    def __init__(self, what: str, retry_after: float) -> None:
        super().__init__(f"{what}: the source has too many connections; retry after {retry_after:g} s")
        self.retry_after = retry_after


class Abandon:
    """Aborts a transfer from another thread: a failed source may keep its connections open and send nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason: Optional[Exception] = None
        self._socket: Optional[_DeadlineSocket] = None

    def because(self, reason: Exception) -> None:
        with self._lock:
            self._reason = self._reason or reason
            if self._socket is not None:
                self._socket.abort()

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
    """A source's answer; `control` is the open connection if it agreed to the native data plane."""

    body: Optional[io.BufferedReader] = None
    length: Optional[int] = None
    control: Optional[io.BufferedIOBase] = None
    sock: Optional[_DeadlineSocket] = None
    host: str = ""  # the address that answered


@contextmanager
def ask(
    metadata: str,
    step: int,
    key: str,
    deadline: Deadline,
    token: str = "",
    upgrade: bool = False,
    connected: Callable[[_DeadlineSocket], None] = lambda sock: None,
) -> Iterator[Answer]:
    """Gets `{metadata}{step}/{key}` from a source.

    Args:
        metadata: the source's metadata, see `codec.requests`
        step: the requested step
        key: `full`, `metadata` or the number of a chunk
        deadline: of the whole answer; notes the data that arrives
        token: the job's token, if the source requires one
        upgrade: offer the native data plane
        connected: called with the socket, so that another thread can abort it

    Raises:
        ValueError: `metadata` is malformed
        Interrupted: the source cannot be reached, or the connection broke
        Busy: the source has no room for this connection
        CheckpointError: the source refuses, or its answer cannot be read
        CheckpointTimeout: the deadline has passed
    """
    hosts, port, path = read(metadata)
    what = describe(metadata, step, key)
    headers = {"Connection": "Upgrade", "Upgrade": PROTOCOL} if upgrade else {"Connection": "close"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        with _connection(hosts, port, deadline.at, connected) as (connection, sock):
            connection.request("GET", f"{path}{step}/{key}", headers=headers)
            with connection.getresponse() as response:
                answer = _answer(response, sock, upgrade, what)
                sock.deadline, sock.arrived = deadline.arrived(), deadline.arrived  # not earlier: Busy is no progress
                yield answer
    except TimeoutError as error:
        raise CheckpointTimeout(f"{what}: timed out {deadline.passed()}") from error
    except (OSError, http.client.HTTPException) as error:
        raise Interrupted(f"{what}: {type(error).__name__}: {error}") from error


def _answer(response: http.client.HTTPResponse, sock: _DeadlineSocket, upgrade: bool, what: str) -> Answer:
    offered = response.getheader("Upgrade") == PROTOCOL
    if response.status == http.client.SWITCHING_PROTOCOLS and upgrade and offered:
        return Answer(control=response.fp, sock=sock, host=str(sock.getpeername()[0]))
    if response.status == http.client.SWITCHING_PROTOCOLS:
        raise Garbled(f"{what}: the connection ended during the handshake")
    retry_after = response.getheader("Retry-After") or ""
    if response.status == http.client.SERVICE_UNAVAILABLE and retry_after.isdecimal():
        raise Busy(what, min(float(retry_after), _LONGEST_RETRY_AFTER))
    if response.status != http.client.OK:
        raise Refused(f"{what}: refused with {response.status}: {_reason(response)}", response.status)
    if upgrade and offered:
        # the source accepts each complete upgrade request, so this one was garbled on its way
        raise Garbled(f"{what}: the request was garbled on its way")
    return Answer(body=io.BufferedReader(_Body(response), _BUFFER), length=response.length)


def fetch(metadata: str, step: int, key: str, deadline: Deadline, token: str, meter: Meter, home: Home) -> Any:
    """Gets one stream of the upstream format, and decodes its object. See `ask`."""
    with ask(metadata, step, key, deadline, token) as answer:
        assert answer.body is not None
        return read_object(answer.body, describe(metadata, step, key), answer.length, meter=meter, home=home)


def describe(metadata: str, step: int, key: str) -> str:
    return f"checkpoint of step {step} ({key}) from {metadata}"


class _Body(io.RawIOBase):
    """The body of a response as a raw stream, for any framing."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._response.readinto(buffer)


@contextmanager
def _connection(
    hosts: Sequence[str], port: int, deadline: float, connected: Callable[[_DeadlineSocket], None]
) -> Iterator[Tuple[http.client.HTTPConnection, _DeadlineSocket]]:
    # Not urllib, which would use a proxy from the environment between two replica groups.
    limited = _DeadlineSocket.wrap(_connect(hosts, port, deadline))
    limited.deadline = deadline
    connection = http.client.HTTPConnection(hosts[0], port)
    connection.sock = limited
    connected(limited)
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
            return socket.create_connection((host, port), timeout=left if last else min(left, _NEXT_HOST_AFTER))
        except OSError as error:
            if last:
                raise
            logger.debug("%s port %d does not answer (%s): trying %s", host, port, error, hosts[i + 1])
    raise ValueError("no host")


def _reason(response: http.client.HTTPResponse) -> str:
    """The source's error text: the body if that is plain text, else (upstream servers) the status line."""
    plain = (response.getheader("Content-Type") or "").startswith("text/plain")
    return (plain and response.read(_ERROR_BODY).decode("utf-8", "replace").strip()) or response.reason


def frames(answer: Answer, what: str) -> Tuple[Ticket, Structure]:
    """Reads the two frames of the handshake."""
    assert answer.control is not None
    ticket = Ticket.parse(read_frame(answer.control, what), what)
    return ticket, parse_structure(read_frame(answer.control, what), what)
