"""csrc/isolated.c behaves like the Python implementation in protocol.py and messages.py."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.futures import Future

from torchft.process_group.isolated import _native, messages, protocol

DONE = protocol.answer(protocol.DONE, 7)
MINUTE_MS = 60_000


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def pipe() -> Iterator[tuple[int, int, int]]:
    """Returns the reading and the writing end, and an eventfd."""
    with open(os.eventfd(0, os.EFD_NONBLOCK), "rb", buffering=0) as wake:
        reading, writing = os.pipe()
        with open(reading, "rb", buffering=0), open(writing, "wb", buffering=0):
            yield reading, writing, wake.fileno()


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 20, 1 << 21, (1 << 21) + 63, (1 << 22) + 17])
def test_copy(size: int) -> None:
    """Copies are exact for any start address, also large ones, which are made in whole cache lines."""
    memory = torch.randint(0, 255, (size + 32,), dtype=torch.uint8)
    for at, begin in [(0, 0), (1, 0), (0, 15), (17, 3)]:
        to = torch.full((size + 32,), 255, dtype=torch.uint8)
        _native.copy(to.data_ptr() + at, memory.data_ptr() + begin, size)
        assert torch.equal(to[at : at + size], memory[begin : begin + size])
        assert to[:at].eq(255).all() and to[at + size :].eq(255).all()


def test_a_request_arrives_in_the_format_of_protocol(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    assert _native.send(ours.fileno(), protocol.RUN, 2**62, b"ab", b"", b"c")
    assert protocol.read_request(theirs.recv(100)) == (protocol.RUN, 2**62, b"abc")
    messages.send(ours, protocol.request(protocol.PING, 2**64 - 1, b"rest"))
    assert _native.receive(theirs.fileno()) == (protocol.PING, 2**64 - 1, b"rest", ())


def test_descriptors_and_long_messages_arrive(pair: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    ours, theirs = pair
    (tmp_path / "file").write_text("hello")
    with open(tmp_path / "file") as file:
        messages.send(ours, protocol.request(protocol.NOTIFY, 1, b"note"), (file.fileno(), file.fileno()))
    kind, operation, rest, descriptors = _native.receive(theirs.fileno())
    assert (kind, operation, rest, len(descriptors)) == (protocol.NOTIFY, 1, b"note", 2)
    for descriptor in descriptors:
        assert not os.get_inheritable(descriptor)
        assert os.pread(descriptor, 5, 0) == b"hello"
        os.close(descriptor)
    long = protocol.request(protocol.RUN, 3, bytes(1 << 20))
    messages.send(ours, long)
    kind, operation, rest, descriptors = _native.receive(theirs.fileno())
    assert kind == operation == 0 and rest is not None
    assert messages.unpack(rest, descriptors) == (long, [])


def test_the_end_of_the_other_side(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.close()
    assert _native.receive(theirs.fileno())[2] is None
    with pytest.raises(BrokenPipeError):
        _native.send(theirs.fileno(), protocol.RUN, 1, b"")


def test_messages_that_do_not_fit(pair: tuple[socket.socket, socket.socket]) -> None:
    fd = pair[0].fileno()
    with pytest.raises(ValueError, match="too long"):
        _native.send(fd, protocol.RUN, 1, bytes(1 << 15))
    for _ in range(100_000):
        if not _native.send(fd, protocol.RUN, 1, bytes(1 << 10)):
            break
    else:
        raise AssertionError("a socket without a reader has accepted everything")


def test_answers(pipe: tuple[int, int, int]) -> None:
    reading, writing, wake = pipe
    assert _native.read(reading, wake, 0) is None
    assert _native.read(reading, wake, 10) is None
    os.write(writing, DONE)
    assert _native.read(reading, wake, MINUTE_MS) == 7
    for other in (
        DONE + DONE,
        DONE[:5],
        protocol.answer(protocol.DONE, 7, b"\0"),
        protocol.answer(protocol.FAILED, 7),
        protocol.answer(protocol.PONG, 7),
    ):
        os.write(writing, other)
        assert _native.read(reading, wake, MINUTE_MS) == other
    os.eventfd_write(wake, 1)
    assert _native.read(reading, wake, MINUTE_MS) is None
    assert _native.read(reading, wake, 0) is None
    # Available data is read first.
    os.eventfd_write(wake, 1)
    os.write(writing, DONE)
    assert _native.read(reading, wake, MINUTE_MS) == 7


def test_the_end_of_the_worker(pipe: tuple[int, int, int]) -> None:
    reading, writing, wake = pipe
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), writing)
    assert _native.read(reading, wake, MINUTE_MS) == b""


def test_a_signal_ends_the_wait_if_its_handler_raises(pipe: tuple[int, int, int]) -> None:
    class Signalled(Exception):
        pass

    def raising(*_: object) -> None:
        raise Signalled

    before = signal.signal(signal.SIGUSR1, raising)
    try:
        sender = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))

        def read_until_signalled() -> None:
            sender.start()
            _native.read(pipe[0], pipe[2], MINUTE_MS)

        with pytest.raises(Signalled):
            read_until_signalled()
        sender.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_operation_is_answered_by_its_future(pipe: tuple[int, int, int]) -> None:
    reading, writing, wake = pipe
    failed: list[tuple[int, str]] = []
    in_flight = {7: "allreduce", 8: "allreduce"}
    done: Future[object] = Future()
    wrong: Future[object] = Future()
    for number, future in ((7, done), (8, wrong)):
        _native.answer_when_done(future, writing, number, in_flight, lambda n, e: failed.append((n, str(e))))
    thread = threading.Thread(target=done.set_result, args=([torch.ones(1)],))
    thread.start()
    assert _native.read(reading, wake, MINUTE_MS) == 7
    thread.join()
    assert in_flight == {8: "allreduce"} and not failed
    # pyrefly: ignore [bad-argument-type]  # PyTorch's annotation is the result type
    wrong.set_exception(ValueError("no"))
    assert failed == [(8, "no")]
    assert in_flight == {}
    assert _native.read(reading, wake, 0) is None
