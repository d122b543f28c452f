"""A target's reading of answers that are correct, cut short, malformed or slow."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from tests.promises import within
from tests.unit.checkpointing.forged_source import server_that_sends
from torchft.checkpointing.codec.stream import pickle_object
from torchft.checkpointing.transport import CheckpointError

TIMEOUT = timedelta(seconds=20)
BODY = pickle_object({"a": 1}).prefix
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (OK + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY[:-5], "cut short"),
        (OK + b"\r\n" + BODY[:-5], "cut short"),
        (
            OK + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY[:-5],
            "cut short|IncompleteRead",
        ),
        (OK + b"Content-Length: %d\r\n\r\n" % (len(BODY) - 5) + BODY, "announces|cut short"),
        (OK + b"Content-Length: %d\r\n\r\n" % (len(BODY) + 1) + BODY + b"x", "goes on after its last record"),
        (OK + b"Content-Length: 5\r\n\r\nhello", "cannot be read"),
        (OK[:-4], "BadStatusLine|RemoteDisconnected|LineTooLong|cannot be read|cut short|EOF"),
        (b"", "RemoteDisconnected"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "BadStatusLine"),
        (b"HTTP/1.0 500 out of luck\r\n\r\n<html>no</html>", "refused with 500: out of luck"),
    ],
)
@pytest.mark.usefixtures("at_once_again")
def test_errors_of_bad_sources(make: Any, answer: bytes, error: str) -> None:
    with server_that_sends(answer) as metadata:
        with pytest.raises(CheckpointError, match=error) as raised:
            make().recv_checkpoint(0, metadata, 7, TIMEOUT)
        assert metadata in str(raised.value) and "step 7" in str(raised.value)


@pytest.mark.parametrize(
    "head",
    [
        OK + b"\r\n",
        OK + b"Content-Length: %d\r\n\r\n" % len(BODY),
        OK + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY),
    ],
)
def test_every_framing_is_read(make: Any, head: bytes) -> None:
    with server_that_sends(head + BODY + (b"\r\n0\r\n\r\n" if b"chunked" in head else b"")) as metadata:
        assert make().recv_checkpoint(0, metadata, 7, TIMEOUT) == {"a": 1}


def test_a_slow_answer_ends_at_the_deadline(make: Any) -> None:
    listener = socket.create_server(("localhost", 0))
    stop = threading.Event()

    def drip() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(OK + b"\r\n")
            for byte in BODY:
                if stop.wait(0.02):
                    return
                sock.sendall(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    start = time.monotonic()
    metadata = f"http://localhost:{listener.getsockname()[1]}/checkpoint/"
    with pytest.raises(TimeoutError, match=r"step 7 .* timed out after \d+\.\d seconds"):
        make().recv_checkpoint(0, metadata, 7, timedelta(seconds=0.3))
    assert time.monotonic() - start < within(0.3)
    stop.set()
    thread.join(30)
    listener.close()
