from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, Callable
from unittest.mock import MagicMock
from urllib.parse import urlsplit

import pytest
import torch

from tests.promises import within
from tests.unit.checkpointing.checkpoint_states import assert_same
from tests.unit.waiting import wait_until
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.native import core
from torchft.checkpointing.source import publisher
from torchft.checkpointing.source.publisher import Unavailable
from torchft.checkpointing.transport import CheckpointError

TIMEOUT = timedelta(seconds=20)
SHORT = timedelta(seconds=0.2)
MB = 1 << 20


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


def connect(transport: HTTPTransport[Any]) -> socket.socket:
    return socket.create_connection(("localhost", urlsplit(transport.metadata()).port or 0), timeout=10)


def get(transport: HTTPTransport[Any], path: str, method: str = "GET") -> tuple[int, bytes]:
    with connect(transport) as sock, http.client.HTTPResponse(sock) as response:
        sock.sendall(f"{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n".encode())
        response.begin()
        return response.status, response.read()


def fill(state: dict[str, torch.Tensor], value: float) -> None:
    for tensor in state.values():
        tensor.fill_(value)


def large_state(value: float = 1.0) -> dict[str, torch.Tensor]:
    """A state with tensors that are copied in the background, and with small ones."""
    return {f"w{i}": torch.full((MB,), value) for i in range(4)} | {"mean": torch.full((10,), value)}


# Addresses and settings


def test_the_address(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_HOST", "127.0.0.1")
    transport = make()
    assert transport.metadata() == transport.address()
    parts = urlsplit(transport.metadata())
    assert (parts.scheme, parts.hostname, parts.path) == ("http", "127.0.0.1", "/checkpoint/")

    monkeypatch.setenv("TORCHFT_HOST", "::1")
    transport = make()
    assert transport.metadata().startswith("http://[::1]:")
    transport.send_checkpoint([1], 1, {"a": 1}, TIMEOUT)
    assert make().recv_checkpoint(0, transport.metadata(), 1, TIMEOUT) == {"a": 1}


def test_without_ipv6(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchft.http._has_ipv6", lambda: False)
    monkeypatch.setenv("TORCHFT_HOST", "127.0.0.1")
    transport = make()
    transport.send_checkpoint([1], 1, {"a": 1}, TIMEOUT)
    assert make().recv_checkpoint(0, transport.metadata(), 1, TIMEOUT) == {"a": 1}


@pytest.mark.parametrize(
    ("timeout", "num_chunks", "message"),
    [
        (timedelta(0), 0, "timeout=0s: must be longer than 0s"),
        (timedelta(seconds=-1), 0, "timeout=-1s: must be longer than 0s"),
        (TIMEOUT, -1, "num_chunks is -1: allowed are 0"),
    ],
)
def test_bad_settings(timeout: timedelta, num_chunks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HTTPTransport(timeout, num_chunks)


@pytest.mark.parametrize(
    "metadata", ["", "nonsense", "ftp://a:1/", "http://host/checkpoint/", "http://host:port/"]
)
def test_bad_metadata(make: Any, metadata: str) -> None:
    with pytest.raises(ValueError, match="allowed is http://host:port/checkpoint/"):
        make().recv_checkpoint(0, metadata, 1, TIMEOUT)


# Steps, and waiting requests


def test_a_reason_of_several_lines_ends_no_header(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make()
    reason = "no state:\r\nSet-Cookie: a\n\nb"
    monkeypatch.setattr(source._server.source, "reading", MagicMock(side_effect=Unavailable(reason)))
    with connect(source) as sock, http.client.HTTPResponse(sock) as response:
        sock.sendall(b"GET /checkpoint/1/full HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")
        response.begin()
        assert (response.status, response.reason) == (503, "no state: Set-Cookie: a b")
        assert response.getheader("Set-Cookie") is None and response.read() == reason.encode()


@pytest.mark.parametrize("num_chunks", [0, 2])
def test_a_wrong_step_names_both(make: Any, num_chunks: int) -> None:
    source = make(num_chunks=num_chunks)
    source.send_checkpoint([1], 3, {"a": 1}, TIMEOUT)
    with pytest.raises(CheckpointError, match=r"refused with 400: .* serving step 3 but got step=4") as error:
        make(num_chunks=num_chunks).recv_checkpoint(0, source.metadata(), 4, TIMEOUT)
    assert source.metadata() in str(error.value)
    status, body = get(source, "/checkpoint/4/full")
    assert status == 400 and b"3" in body and b"4" in body


def test_a_request_waits_until_it_is_allowed(make: Any) -> None:
    source, target = make(), make()
    for step in (1, 2):
        got = in_thread(partial(target.recv_checkpoint, 0, source.metadata(), step, TIMEOUT))
        with pytest.raises(TimeoutError):
            got.result(0.1)
        source.send_checkpoint([1], step, {"step": step}, TIMEOUT)
        assert got.result(TIMEOUT.total_seconds()) == {"step": step}
        source.disallow_checkpoint()


def test_allow_offers_the_last_checkpoint_again(make: Any) -> None:
    source, target = make(), make()
    with pytest.raises(RuntimeError, match="send_checkpoint comes first"):
        source.allow_checkpoint(1)
    source.send_checkpoint([1], 1, {"a": 1}, TIMEOUT)
    source.disallow_checkpoint()
    source.disallow_checkpoint()
    with pytest.raises(TimeoutError, match=r"timed out after \d+\.\d seconds"):
        target.recv_checkpoint(0, source.metadata(), 1, SHORT)
    source.allow_checkpoint(2)
    assert target.recv_checkpoint(0, source.metadata(), 2, TIMEOUT) == {"a": 1}


def test_a_request_without_a_checkpoint_ends_with_503(make: Any) -> None:
    source = make(timeout=timedelta(seconds=0.1))
    with pytest.raises(
        CheckpointError, match=r"refused with 503: no checkpoint of step 1: none was allowed for 0.1 s"
    ):
        make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT)


def test_shutdown_ends_all_waits(make: Any) -> None:
    source, target = make(), make()
    got = in_thread(lambda: target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT))
    with pytest.raises(TimeoutError):
        got.result(0.1)
    start = time.monotonic()
    source.shutdown()
    with pytest.raises(CheckpointError):
        got.result(TIMEOUT.total_seconds())
    assert time.monotonic() - start < TIMEOUT.total_seconds() / 2


def test_shutdown_leaves_no_thread_and_no_socket(make: Any) -> None:
    threads, sockets = set(threading.enumerate()), open_sockets()
    source, target = make(), make(num_chunks=3)
    source.send_checkpoint([1], 1, large_state(), TIMEOUT)
    target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    with pytest.raises(CheckpointError):
        target.recv_checkpoint(0, source.metadata(), 2, TIMEOUT)
    idle = connect(source)  # sends nothing
    for transport in (source, target):
        transport.shutdown()
        transport.shutdown()  # a second call has no effect
    with contextlib.suppress(ConnectionResetError):  # the connection may not have been accepted yet
        assert idle.recv(1) == b""
    idle.close()
    # Connections of other tests may begin and end at any time.
    wait_until(lambda: set(threading.enumerate()) <= threads and open_sockets() <= sockets)
    with pytest.raises(CheckpointError, match="ConnectionRefusedError"):
        make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT)


def test_shutdown_without_waiting(make: Any) -> None:
    source = make()
    waiting = in_thread(lambda: get(source, "/checkpoint/1/full"))
    with pytest.raises(TimeoutError):
        waiting.result(0.05)
    source.shutdown(wait=False)
    error = waiting.exception(TIMEOUT.total_seconds())
    if error is None:
        assert waiting.result()[0] == 503  # it was answered just before
    else:
        assert isinstance(error, (ConnectionError, http.client.HTTPException)), error


def open_sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if link.startswith("socket:"):
            found.add(link)
    return found


# The state that is served


def test_small_tensors_are_copied_at_once(make: Any) -> None:
    source = make()
    model = torch.nn.BatchNorm1d(3)
    want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    settings = {"lr": [0.1]}
    source.send_checkpoint([1], 5, {"model": model.state_dict(), "settings": settings}, TIMEOUT)
    model(torch.randn(4, 3))
    settings["lr"][0] = 0.2
    settings["new"] = [1]
    got = make().recv_checkpoint(0, source.metadata(), 5, TIMEOUT)
    assert_same(dict(got["model"]), want)
    assert got["settings"] == {"lr": [0.1]}


def test_heals_while_the_source_trains(make: Any) -> None:
    """Targets read all the time, and the source changes all tensors between disallow and send. No target
    reads a mixture of two steps.
    """
    source, target = make(), make()
    state = large_state(0.0)
    steps = 8
    current = threading.Event()
    done = threading.Event()
    at = [0]

    def read_on() -> int:
        count = 0
        while not done.is_set():
            step = at[0]
            try:
                got = target.recv_checkpoint(0, source.metadata(), step, TIMEOUT)
            except CheckpointError:
                continue  # the source is at a later step
            for tensor in got.values():
                assert bool((tensor == float(step)).all())
            count += 1
            current.set()
        return count

    source.send_checkpoint([1], 0, state, TIMEOUT)
    readers = [in_thread(read_on) for _ in range(3)]
    for step in range(1, steps):
        assert current.wait(TIMEOUT.total_seconds())
        current.clear()
        source.disallow_checkpoint()
        fill(state, float(step))
        source.send_checkpoint([1], step, state, TIMEOUT)
        at[0] = step
    assert current.wait(TIMEOUT.total_seconds())
    done.set()
    source.allow_checkpoint(at[0])
    reads = sum(reader.result(20) for reader in readers)
    assert reads >= steps


def test_a_checkpoint_is_dropped_by_age(make: Any) -> None:
    source = make(timeout=timedelta(seconds=0.3))
    source.send_checkpoint([1], 5, {"a": 1}, TIMEOUT)
    source.disallow_checkpoint()

    def dropped() -> bool:
        source.disallow_checkpoint()  # a training loop does this in every step
        return source._source._offer is None

    wait_until(dropped)


# Memory


def test_no_memory_for_the_copy_of_small_tensors(make: Any, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(torch.Tensor, "clone", MagicMock(side_effect=RuntimeError("not enough memory")))
    source, target, state = make(), make(), {"small": torch.ones(2)}
    source.send_checkpoint([1], 1, state, TIMEOUT)
    assert_same(target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT), state)
    source.disallow_checkpoint()  # the training continues
    assert "small tensor of the state to send could not be copied: not enough memory" in caplog.text
    with pytest.raises(TimeoutError):
        target.recv_checkpoint(0, source.metadata(), 1, SHORT)


def test_the_memory_of_large_tensors_is_not_copied(make: Any, monkeypatch: Any) -> None:
    copied: list[int] = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: copied.append(self.nbytes) or clone(self))
    source, state = make(), {**large_state(), "small": torch.ones(2)}
    source.send_checkpoint([1], 1, state, TIMEOUT)
    assert sorted(copied) == [8, 40]
    assert_same(make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT), state)
    source.disallow_checkpoint()


# Slow readers


def slow_reader(source: HTTPTransport[Any], step: int) -> socket.socket:
    """Requests the state and reads only its beginning."""
    sock = connect(source)
    sock.sendall(f"GET /checkpoint/{step}/full HTTP/1.1\r\nHost: test\r\n\r\n".encode())
    assert sock.recv(20).startswith(b"HTTP/1.1 200")
    return sock


def test_a_reader_that_takes_nothing_is_not_waited_for(make: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(publisher, "_STUCK_SEC", 0.1)
    source = make()
    source.send_checkpoint([1], 1, large_state(), TIMEOUT)
    with slow_reader(source, 1):
        start = time.monotonic()
        source.disallow_checkpoint()
        assert time.monotonic() - start < TIMEOUT.total_seconds() / 2


def test_a_target_that_takes_data_is_waited_for(make: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(publisher, "_STUCK_SEC", 0.5)
    source, target, state = make(bandwidth_limit=16 * MB), make(), large_state()  # for 1 s
    source.send_checkpoint([1], 1, state, TIMEOUT)
    got = in_thread(lambda: target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT))
    wait_until(lambda: source._source._readers > 0)
    source.disallow_checkpoint()
    fill(state, 2.0)
    assert_same(got.result(TIMEOUT.total_seconds()), large_state())


def test_a_slow_reader_is_cut_off(make: Any) -> None:
    source = make(timeout=timedelta(seconds=0.3))
    source.send_checkpoint([1], 1, large_state(), TIMEOUT)
    with slow_reader(source, 1) as sock:
        start = time.monotonic()
        source.disallow_checkpoint()
        assert 0.1 < time.monotonic() - start < within(0.3)
        received = 0
        try:
            while piece := sock.recv(1 << 20):
                received += len(piece)
        except OSError:
            pass
        assert received < sum(t.numel() * 4 for t in large_state().values())


def test_a_slow_reader_does_not_delay_a_target(make: Any) -> None:
    source = make()
    source.send_checkpoint([1], 1, large_state(), TIMEOUT)
    with slow_reader(source, 1):
        got = in_thread(lambda: make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT))
        assert_same(got.result(TIMEOUT.total_seconds()), large_state())


def test_a_target_that_is_cut_off_gets_an_error(make: Any) -> None:
    source, target = make(timeout=timedelta(seconds=0.3), bandwidth_limit=MB), make()
    source.send_checkpoint([1], 1, large_state(), TIMEOUT)  # 16 MB
    got = in_thread(lambda: target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT))
    wait_until(lambda: source._source._readers > 0)
    source.disallow_checkpoint()
    with pytest.raises(CheckpointError, match="no checkpoint of step 1"):
        got.result(TIMEOUT.total_seconds())


# Invalid clients


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff" * 500 + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /checkpoint/1/full HTTP/9.9\r\n\r\n",
        b"GET " + b"a" * 70000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 200 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the start of TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"",
    ],
)
def test_invalid_requests_have_no_effect(make: Any, data: bytes) -> None:
    source = make()
    source.send_checkpoint([1], 1, {"a": 1}, TIMEOUT)
    with connect(source) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        try:
            while sock.recv(4096):
                pass
        except ConnectionError:
            pass
    assert make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT) == {"a": 1}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/checkpoint/", 404),
        ("GET", "/checkpoint/1", 404),
        ("GET", "/checkpoint/x/full", 404),
        ("GET", "/checkpoint/²/full", 404),
        ("GET", "/checkpoint/1/full/more", 404),
        ("GET", "/checkpoint/1/other", 404),
        ("GET", "/checkpoint/1/metadata", 404),
        ("GET", "/checkpoint/1/0", 404),
        ("GET", "/checkpoint/99999999999999999999999/full", 404),
        ("GET", "/checkpoint/-1/full", 400),
        ("POST", "/checkpoint/1/full", 501),
        ("GET", "/checkpoint/1/full", 200),
    ],
)
def test_paths(make: Any, method: str, path: str, status: int) -> None:
    source = make()
    source.send_checkpoint([1], 1, {"a": 1}, TIMEOUT)
    got, body = get(source, path, method)
    assert got == status
    if path == "/checkpoint/1/0":
        assert b"num_chunks=0" in body


def test_many_requests_on_one_connection(make: Any) -> None:
    source = make(num_chunks=2)
    source.send_checkpoint([1], 1, {"a": 1}, TIMEOUT)
    connection = http.client.HTTPConnection("localhost", urlsplit(source.metadata()).port, timeout=10)
    for path, status in (
        ("1/full", 200),
        ("nothing", 404),
        ("2/full", 400),
        ("1/metadata", 200),
        ("1/1", 200),
    ):
        connection.request("GET", f"/checkpoint/{path}")
        response = connection.getresponse()
        assert (response.status, response.version) == (status, 11)
        response.read()
    connection.close()


@pytest.mark.parametrize("version", ["1.1\r\nConnection: close", "1.0"], ids=["header", "HTTP/1.0"])
def test_the_connection_ends_after_the_answer_if_the_client_asks_for_it(make: Any, version: str) -> None:
    # The socket's timeout of 10 s is shorter than the 30 s after which a source closes an idle connection.
    source = make()
    source.send_checkpoint([1], 1, {"a": 1}, TIMEOUT)
    with connect(source) as sock:
        sock.sendall(f"GET /checkpoint/1/full HTTP/{version}\r\nHost: test\r\n\r\n".encode())
        assert sock.recv(9) == b"HTTP/1.1 "
        while sock.recv(4096):
            pass


def test_logs_are_quiet(make: Any, capfd: Any) -> None:
    source = make()
    source.send_checkpoint([1], 1, large_state(), TIMEOUT)
    get(source, "/nothing")
    make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    slow_reader(source, 1).close()
    source.shutdown()
    assert capfd.readouterr() == ("", "")


def test_chunk_numbers_that_differ(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # num_chunks has no effect between two torchft transports, so this test uses the upstream format
    monkeypatch.setattr(core, "native", lambda: None)
    state = {str(i): i for i in range(10)}
    source = make(num_chunks=3)
    source.send_checkpoint([1], 1, state, TIMEOUT)
    for n, error in ((2, "chunk 0 of 2 holds 4 values instead of 5"), (4, "num_chunks=3")):
        with pytest.raises(CheckpointError, match=error):
            make(num_chunks=n).recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    assert make(num_chunks=0).recv_checkpoint(0, source.metadata(), 1, TIMEOUT) == state
