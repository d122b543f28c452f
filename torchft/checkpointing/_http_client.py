"""Fetches one stream of a checkpoint over HTTP, by a deadline."""

from __future__ import annotations

import http.client
import io
import socket
import time
from contextlib import contextmanager
from typing import Any, Iterator, Tuple
from urllib.parse import urlsplit

from torchft.checkpointing._stream import read_object
from torchft.checkpointing.transport import CheckpointError
from torchft.http import _DeadlineSocket

_BUFFER = 64 << 10  # bytes
_ERROR_BODY = 2000  # bytes of an error's body that are worth reading


def fetch(metadata: str, step: int, key: str, deadline: float) -> Any:
    """Gets `{metadata}{step}/{key}` and reads the object in it.

    Args:
        metadata: the source's `http://{host}:{port}/checkpoint/`
        step: the step asked for
        key: `full`, `metadata` or the number of a chunk
        deadline: when to give up, by time.monotonic()

    Raises:
        ValueError: `metadata` is no such address
        CheckpointError: the source cannot be reached, refuses, or sends something that cannot be read
        TimeoutError: the deadline has passed
    """
    host, port, path = _split(metadata)
    what = f"checkpoint of step {step} ({key}) from {metadata}"
    start = time.monotonic()
    try:
        with _connection(host, port, deadline) as connection:
            connection.request("GET", f"{path}{step}/{key}", headers={"Connection": "close"})
            with connection.getresponse() as response:
                if response.status != http.client.OK:
                    raise CheckpointError(f"{what}: refused with {response.status}: {_reason(response)}")
                return read_object(io.BufferedReader(_Body(response), _BUFFER), what, response.length)
    except TimeoutError as error:
        raise TimeoutError(f"{what}: not complete after {time.monotonic() - start:.1f} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error


class _Body(io.RawIOBase):
    """The body of a response, whatever its framing, as a raw stream."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._response.readinto(buffer)


def _split(metadata: str) -> Tuple[str, int, str]:
    try:
        parts = urlsplit(metadata)
        if parts.scheme == "http" and parts.hostname is not None and parts.port is not None:
            return parts.hostname, parts.port, parts.path
    except ValueError:
        pass
    raise ValueError(f"checkpoint metadata is {metadata!r}: allowed is http://host:port/checkpoint/")


@contextmanager
def _connection(host: str, port: int, deadline: float) -> Iterator[http.client.HTTPConnection]:
    # not urllib: a proxy from the environment has no business between two replica groups
    connection = http.client.HTTPConnection(host, port)
    sock = socket.create_connection((host, port), timeout=max(0.001, deadline - time.monotonic()))
    connection.sock = limited = _DeadlineSocket.wrap(sock)
    limited.deadline = deadline
    try:
        yield connection
    finally:
        connection.close()
        limited.close()


def _reason(response: http.client.HTTPResponse) -> str:
    """What the source says: in the body if that is plain text, else in the status line, as stock servers do."""
    plain = (response.getheader("Content-Type") or "").startswith("text/plain")
    return (plain and response.read(_ERROR_BODY).decode("utf-8", "replace").strip()) or response.reason
