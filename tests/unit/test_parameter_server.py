from __future__ import annotations

import gc
import http.client
import json
import socket
import threading
import urllib.parse
from datetime import timedelta
from pathlib import Path
from typing import Iterator

import pytest
import torch
from processes import START_TIMEOUT_S, Job
from torch.distributed import ReduceOp, TCPStore

from tests.unit.waiting import wait_until
from torchft.parameter_server import ParameterServer
from torchft.process_group import ProcessGroup, ProcessGroupGloo
from torchft.process_group.reconfigure import create_store_client

ROOT = Path(__file__).resolve().parents[2]


class Sums(ParameterServer):
    """Adds up what its clients push, and returns the sum."""

    timeout = timedelta(seconds=30)

    def __init__(self) -> None:
        super().__init__(port=0)
        self.total = torch.zeros(3)
        self.served: list[str] = []
        self.errors: list[Exception] = []

    @classmethod
    def new_process_group(cls) -> ProcessGroup:
        return ProcessGroupGloo(timeout=cls.timeout)

    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        assert pg.rank() == 0 and pg.size() == 2
        self.served.append(session_id)
        try:
            while True:
                pushed = torch.zeros(3)
                pg.allreduce([pushed], ReduceOp.SUM).wait()
                self.total += pushed
                pg.broadcast_one(self.total, 0).wait()
        except Exception as e:
            self.errors.append(e)
            raise


def push(pg: ProcessGroup, value: float) -> list[float]:
    tensor = torch.full((3,), value)
    pg.allreduce([tensor], ReduceOp.SUM).wait()
    pg.broadcast_one(tensor, 0).wait()
    return tensor.tolist()


@pytest.fixture
def server() -> Iterator[Sums]:
    built = Sums()
    yield built
    built.shutdown()
    built.shutdown()
    assert built.sessions() == []


def session_threads() -> list[str]:
    return [
        t.name for t in threading.enumerate() if t.name in ("torchft_session_watch", "torchft-http-request")
    ]


def connecting() -> bool:
    return any(t.name == "torchft_connect" for t in threading.enumerate())


def test_each_client_has_its_own_session(server: Sums) -> None:
    first, second = Sums.new_session(server.address()), Sums.new_session(server.address())
    assert first.rank() == 1 and first.size() == 2
    assert push(first, 1.0) == [1.0] * 3
    assert push(second, 2.0) == [3.0] * 3
    assert push(first, 4.0) == [7.0] * 3
    assert len(set(server.served)) == 2 and sorted(server.sessions()) == sorted(server.served)
    first.shutdown()
    wait_until(lambda: len(server.sessions()) == 1)
    assert push(second, 1.0) == [8.0] * 3
    second.shutdown()
    wait_until(lambda: server.sessions() == [] and session_threads() == [])


def test_session_ends_when_its_client_drops_the_process_group(server: Sums) -> None:
    pg = Sums.new_session(server.address())
    push(pg, 1.0)
    del pg
    gc.collect()
    # Forward was waiting in an allreduce.
    wait_until(lambda: server.sessions() == [] and len(server.errors) == 1)
    wait_until(lambda: session_threads() == [])


CLIENT = f"""
import sys
sys.path.append({str(ROOT / "tests" / "process")!r})
from tests.unit.test_parameter_server import Sums, push
pg = Sums.new_session(sys.argv[1])
push(pg, 1.0)
print('{{"event": "pushed"}}', flush=True)
sys.stdin.read()
"""


def test_session_whose_client_fails_ends(server: Sums, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(CLIENT)
    with Job() as job:
        client = job.python("client", tmp_path / "client.py", server.address(), path=ROOT)
        job.wait(lambda: client.of("pushed"), START_TIMEOUT_S, "it has pushed")
        assert len(server.sessions()) == 1
        client.kill()
        wait_until(lambda: server.sessions() == [] and len(server.errors) == 1)


def test_session_of_a_client_that_never_connects_ends(server: Sums) -> None:
    """The client requests a session and disconnects. The server, which waits in configure, notices at
    once.
    """
    parts = urllib.parse.urlsplit(server.address())
    connection = http.client.HTTPConnection("localhost", parts.port or 0, timeout=10)
    connection.request("POST", parts.path)
    asked = json.loads(connection.getresponse().read())
    address = f"{asked['store_addr']}/session/{asked['session_id']}"
    store = create_store_client(address, timedelta(seconds=60))
    # The server's address: Gloo waits for the client's; an abort before that ends the connecting.
    store.wait(["0/0"])
    connection.close()
    wait_until(lambda: server.sessions() == [])
    assert server.served == []
    assert connecting()  # PyTorch still waits for the client, so the session has not ended by its timeout
    # The client connects late, so that this wait ends before the process does.
    client = Sums.new_process_group()
    client.configure(address, "client", 1, 2)
    wait_until(lambda: not connecting())
    client.shutdown()


def test_forward_that_raises_ends_only_its_own_session(server: Sums, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Sums.new_session(server.address())
    push(other, 1.0)

    def fail(session_id: str, pg: ProcessGroup) -> None:
        raise KeyError("a mistake in forward")

    monkeypatch.setattr(server, "forward", fail)
    pg = Sums.new_session(server.address())
    with pytest.raises(RuntimeError):
        push(pg, 1.0)
    assert push(other, 1.0) == [2.0] * 3


def test_shutdown_ends_sessions(server: Sums) -> None:
    pg = Sums.new_session(server.address())
    push(pg, 1.0)
    server.shutdown()
    with pytest.raises(RuntimeError):
        push(pg, 1.0)
    with pytest.raises(RuntimeError, match="no session from http"):
        Sums.new_session(server.address())
    wait_until(lambda: session_threads() == [])


def test_shutdown_closes_the_store(server: Sums) -> None:
    """A server that is made in the place of this one may have to listen on the same port."""
    port = server._store_port
    socket.create_connection(("localhost", port), timeout=10).close()
    server.shutdown()
    TCPStore("localhost", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


def test_bad_input(server: Sums) -> None:
    for name in ("port", "store_port"):
        for port in (70000, -1, "29600"):
            with pytest.raises(ValueError, match=f"{name}={port!r}: allowed are 0"):
                ParameterServer.__init__(server, **{"port": 0, name: port})  # type: ignore[arg-type]
    for address in ("localhost:1", "ftp://localhost:1/new_session", "http://localhost/new_session"):
        with pytest.raises(ValueError, match="is needed"):
            Sums.new_session(address)
    with pytest.raises(RuntimeError, match="404"):
        Sums.new_session(server.address() + "s")


def test_browsers_get_no_session(server: Sums) -> None:
    parts = urllib.parse.urlsplit(server.address())
    connection = http.client.HTTPConnection("localhost", parts.port or 0, timeout=10)
    connection.request("POST", parts.path, headers={"Origin": "http://somewhere"})
    assert connection.getresponse().status == 403
    connection.close()
    assert server.served == []
