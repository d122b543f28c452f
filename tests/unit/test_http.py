from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler
from typing import Any, Iterator

import pytest

from tests.promises import within
from torchft import http
from torchft.http import _DeadlineSocket, _IPv6HTTPServer


class Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/broken":
            raise ValueError("broken handler")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_IPv6HTTPServer]:
    with _IPv6HTTPServer(("", 0), Hello) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join(30)


def has_ipv6() -> bool:
    return http._has_ipv6()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_it_is_reached_over_both_families(server: _IPv6HTTPServer, host: str) -> None:
    if ":" in host and not has_ipv6():
        pytest.skip("this host has no IPv6")
    with urllib.request.urlopen(f"http://{host}:{server.server_port}/", timeout=30) as response:
        assert response.read() == b"hello"


def test_ipv4_alone_where_there_is_no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_has_ipv6", lambda: False)
    with _IPv6HTTPServer(("", 0), Hello) as server:
        assert server.socket.family == socket.AF_INET


def test_a_failing_handler_is_logged_and_the_server_continues(server: _IPv6HTTPServer, caplog: Any) -> None:
    with socket.create_connection(("localhost", server.server_port), timeout=30) as sock:
        sock.sendall(b"GET /broken HTTP/1.0\r\n\r\n")
        assert sock.recv(100) == b""
    assert "broken handler" in caplog.text
    with urllib.request.urlopen(f"http://localhost:{server.server_port}/", timeout=30) as response:
        assert response.read() == b"hello"


def test_close_cuts_idle_connections() -> None:
    before = set(threading.enumerate())
    server = _IPv6HTTPServer(("", 0), Hello)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    with socket.create_connection(("localhost", server.server_port), timeout=30) as idle:
        idle.sendall(b"GET / HT")
        while not server._connections:
            time.sleep(0.001)
        server.shutdown()
        server.server_close()
        assert idle.recv(1) == b""
    thread.join(30)
    assert set(threading.enumerate()) <= before


FORKING_SERVER = """
import os, sys, threading, time, warnings
from http.server import BaseHTTPRequestHandler
from torchft.http import _IPv6HTTPServer

warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads
server = _IPv6HTTPServer(("", 0), BaseHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
while not server._connections:
    time.sleep(0.001)
if os.fork():
    time.sleep(60)
os.write(1, b"child\\n")
os.read(0, 1)  # lives until stdin is closed
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_does_not_keep_the_port_and_connections_of_a_server_that_ended() -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-c", FORKING_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            port = int(process.stdout.readline())
            with socket.create_connection(("localhost", port), timeout=30) as waiting:
                assert process.stdout.readline() == "child\n"
                process.kill()
                process.wait(10)
                assert waiting.recv(1) == b""
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("localhost", port), timeout=30)
        finally:
            process.kill()
            process.stdin.close()


@pytest.fixture
def ends() -> Iterator[tuple[_DeadlineSocket, socket.socket]]:
    left, right = socket.socketpair()
    limited = _DeadlineSocket.wrap(left)
    with limited, right:
        yield limited, right


def test_a_read_ends_at_the_deadline_although_bytes_arrive_slowly(ends: Any) -> None:
    limited, peer = ends
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.01):
            peer.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    start = time.monotonic()
    limited.deadline = start + 0.2
    with pytest.raises(TimeoutError), limited.makefile("rb") as file:
        file.read(1 << 20)
    assert 0.15 < time.monotonic() - start < within(0.2)
    stop.set()
    thread.join(30)


def test_a_write_ends_at_the_deadline_though_the_peer_reads_a_little(ends: Any) -> None:
    limited, peer = ends
    stop = threading.Event()

    def sip() -> None:
        while not stop.wait(0.01):
            peer.recv(1000)

    thread = threading.Thread(target=sip)
    thread.start()
    start = time.monotonic()
    limited.deadline = start + 0.2
    with pytest.raises(TimeoutError):
        limited.sendall(bytes(50 << 20))
    assert 0.15 < time.monotonic() - start < within(0.2)
    stop.set()
    thread.join(30)


def test_a_large_read_is_one_call_and_a_cut_one_is_short(ends: Any) -> None:
    limited, peer = ends
    limited.deadline = time.monotonic() + 10
    data = bytes(range(256)) * 20_000
    for sent, last in ((data, False), (data[:-1000], True)):

        def send(sent: bytes = sent, last: bool = last) -> None:
            peer.sendall(sent)
            if last:
                peer.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)
        thread.start()
        buffer = bytearray(len(data))
        assert limited.recv_into(buffer) == len(sent)
        assert buffer[: len(sent)] == sent
        thread.join(30)


def test_a_deadline_that_has_passed(ends: Any) -> None:
    limited, _ = ends
    limited.deadline = time.monotonic() - 1
    with pytest.raises(TimeoutError):
        limited.recv_into(bytearray(1))
    with pytest.raises(TimeoutError):
        limited.sendall(b"x")


def test_abort_wakes_a_reader(ends: Any) -> None:
    limited, _ = ends
    threading.Timer(0.05, limited.abort).start()
    assert limited.recv_into(bytearray(1)) == 0
    limited.abort()
