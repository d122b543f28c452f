"""Slots of other hosts: real keepers with folders of their own, and sources that fail."""

from __future__ import annotations

import os
import signal
import socket
import socketserver
import threading
from collections.abc import Callable, Generator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import torch

from tests.unit.waiting import wait_until
from torchft import _keeper
from torchft._torchft import LighthouseServer
from torchft.checkpointing.codec.encoding import Encoded
from torchft.checkpointing.snapshots import reading, remote, slots
from torchft.checkpointing.snapshots.reading import Slot, Source
from torchft.checkpointing.snapshots.remote import Held
from torchft.checkpointing.snapshots.shares import WHOLE, Share
from torchft.checkpointing.snapshots.slots import Header, SlotError, StateKey

JOB = "a job/1"

pytestmark = pytest.mark.usefixtures("keepers")


def save(
    step: int,
    group: str = "g",
    size: int = 1000,
    slot: int = 0,
    quorum: int = 7,
    share: Share = WHOLE,
) -> Path:
    """Writes a slot into this host's memory."""
    folder = slots.folder_of(JOB, group, 0)
    folder.mkdir(parents=True, exist_ok=True)
    header = Header(JOB, group, 0, 1, step, step, quorum, 0.0, share=share)
    state = {name: torch.full((size,), float(step)) for name in "wxyz"[: 1 if share.whole else 4]}
    for _ in slots.write(folder / str(slot), header, Encoded(state)):
        pass
    return folder / str(slot)


class Host:
    """Another host on this machine: a root of its own, with a keeper."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        root.mkdir(mode=0o700)
        self.root = root
        self._monkeypatch = monkeypatch

    def __enter__(self) -> None:
        self._own = os.environ[_keeper.ROOT_ENV]
        self._monkeypatch.setenv(_keeper.ROOT_ENV, str(self.root))

    def __exit__(self, *_: object) -> None:
        self._monkeypatch.setenv(_keeper.ROOT_ENV, self._own)

    def end(self) -> None:
        if _keeper.running(self.root):
            os.kill(int((self.root / "keeper.lock").read_text().split()[1]), signal.SIGKILL)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[[str], Host]]:
    made: list[Host] = []

    def make(name: str) -> Host:
        made.append(Host(tmp_path / name, monkeypatch))
        return made[-1]

    yield make
    for host in made:
        host.end()


@pytest.fixture
def lighthouse() -> Generator[str]:
    server = LighthouseServer("127.0.0.1:0", 1)
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


def heard(lighthouse: str, number: int) -> list[Held]:
    wait_until(lambda: len(remote.held(lighthouse, JOB)) == number)
    return remote.held(lighthouse, JOB)


def fetched(found: list[Held], step: int = 5) -> Slot:
    return reading.read([one.source for one in found], StateKey(step, 7, 0, 1))


def test_the_slots_of_two_hosts(hosts: Callable[[str], Host], lighthouse: str) -> None:
    with hosts("a"):
        save(5)
        save(6, slot=1).write_bytes(bytes(5000))  # torn
        _keeper.ensure(JOB, lighthouse)
    with hosts("b"):
        save(7, group="other")
        _keeper.ensure(JOB, lighthouse)
    found = heard(lighthouse, 2)
    assert [(one.header.state, one.header.group) for one in found] == [
        ((7, 7, 0, 1), "other"),
        ((5, 7, 0, 1), "g"),
    ]
    slot = fetched(found[:1], step=7)
    assert slot.header.step == 7
    assert torch.equal(slot.state()["w"], torch.full((1000,), 7.0))
    assert remote.held(lighthouse, "another job") == []


def test_what_was_written_since_the_last_report_is_found(
    hosts: Callable[[str], Host], lighthouse: str
) -> None:
    host = hosts("a")
    with host:
        save(5)
        _keeper.ensure(JOB, lighthouse)
    heard(lighthouse, 1)
    said: list[str] = []
    for step in range(6, 12):
        with host:
            save(step, slot=(step + 1) % 2)
        assert [one.header.step for one in remote.held(lighthouse, JOB, said.append)] == [step, step - 1]
    assert said == []
    host.end()
    # The slot that it has told the lighthouse could not be fetched.
    wait_until(lambda: not remote.held(lighthouse, JOB, said.append))
    assert f"the copies of {socket.gethostname()} are not found, its keeper does not answer" in said[0]


def test_the_parts_of_two_hosts(hosts: Callable[[str], Host], lighthouse: str) -> None:
    for name, share in (("a", Share(0, 3, 2)), ("b", Share(1, 3, 2))):
        with hosts(name):
            path = save(5, group=name, size=300_000, share=share)
            assert path.stat().st_size < 4 * 1_200_000
            _keeper.ensure(JOB, lighthouse)
    found = heard(lighthouse, 2)
    assert sorted(one.header.share for one in found) == [(0, 3, 2), (1, 3, 2)]
    slot = fetched(found)
    assert all(w.eq(5).all() and len(w) == 300_000 for w in slot.state().values())
    with pytest.raises(SlotError, match="no copy has region"):
        fetched(found[:1])


def test_the_token_of_the_job_is_needed(
    hosts: Callable[[str], Host], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(name)
        (tmp_path / name).chmod(0o600)
    monkeypatch.setenv("TORCHFT_TOKEN_FILE", str(tmp_path / "right"))
    server = LighthouseServer("127.0.0.1:0", 1)
    lighthouse = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    with hosts("a"):
        save(5)
        _keeper.ensure(JOB, lighthouse)
    found = heard(lighthouse, 1)
    assert fetched(found).header.step == 5
    monkeypatch.setenv("TORCHFT_TOKEN_FILE", str(tmp_path / "wrong"))
    with pytest.raises(SlotError, match="the token is not the job's"):
        fetched(found)
    monkeypatch.delenv("TORCHFT_TOKEN_FILE")
    with pytest.raises(SlotError, match="wants the job's token"):
        fetched(found)
    server.shutdown()


Answer = Callable[[BaseHTTPRequestHandler, bytes], None]


@pytest.fixture
def source() -> Generator[Callable[[bytes, Answer], Source]]:
    """Starts a source that answers in its own way."""
    servers = []

    def start(content: bytes, answer: Answer) -> Source:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self, content)

            def log_message(self, *_: object) -> None: ...

        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        return Source(address, partial(remote._opened, address, address))

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def asked(handler: BaseHTTPRequestHandler) -> tuple[int, int]:
    begin, end = handler.headers["Range"].removeprefix("bytes=").split("-")
    return int(begin), int(end) + 1


def sends(handler: BaseHTTPRequestHandler, content: bytes, most: int = 1 << 30) -> None:
    """Sends what is asked for, but at most so many bytes."""
    begin, end = asked(handler)
    handler.send_response(206)
    handler.send_header("Content-Length", str(end - begin))
    handler.end_headers()
    handler.wfile.write(content[begin : min(end, begin + most)])


def breaks(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    """Ends each connection after two pieces."""
    sends(handler, content, 8192)


def is_overwritten(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    begin, _ = asked(handler)
    sends(handler, content if begin != slots.PAGE else bytes(len(content)))


def stalls(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    sends(handler, content, 100)
    handler.rfile.read()  # until the reader gives up


def flips(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    sends(handler, content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])


def sends_nothing(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    sends(handler, content, 0)


def is_no_keeper(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b"hello")


def refuses(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    handler.send_response(404)
    handler.end_headers()
    handler.wfile.write(b'{"error": "this keeper has no such slot"}')


def test_a_broken_connection_is_made_again(
    source: Callable[[bytes, Answer], Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "PIECE", 4096)
    content = save(5, size=10_000).read_bytes()
    assert reading.read([source(content, breaks)], StateKey(5, 7, 0, 1)).state()["w"].eq(5).all()


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (is_overwritten, "region 0 is damaged"),
        (stalls, "timed out"),
        (flips, "region 0 is damaged"),
        (sends_nothing, "ended 4096 bytes early"),
        (refuses, "has no such slot"),
        (is_no_keeper, "ended 4091 bytes early"),
    ],
)
def test_the_next_source_is_asked(
    answer: Answer, cause: str, source: Callable[[bytes, Answer], Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_SILENT_SEC", 1.0)
    content = save(5).read_bytes()
    bad, good = source(content, answer), source(content, sends)
    with pytest.raises(SlotError, match=cause):
        reading.read([bad], StateKey(5, 7, 0, 1))
    assert reading.read([bad, good], StateKey(5, 7, 0, 1)).state()["w"].eq(5).all()


def test_a_source_that_has_another_step_is_not_taken(source: Callable[[bytes, Answer], Source]) -> None:
    other = source(save(6).read_bytes(), sends)
    with pytest.raises(SlotError, match="has step 6 now"):
        reading.read([other], StateKey(5, 7, 0, 1))


def test_a_lighthouse_that_does_not_answer() -> None:
    with pytest.raises(SlotError, match="snapshots on other hosts are not found"):
        remote.held("http://127.0.0.1:9", JOB)


def test_a_keeper_and_a_lighthouse_of_other_versions_are_named(
    lighthouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = {
        "job": JOB,
        "group": "g",
        "group_rank": 0,
        "path": "x",
        "group_world_size": 1,
        "step": 5,
        "saved": 1.0,
    }
    lists = {"http://a:1": [slot], "http://b:1": [{**slot, "quorum": 7}]}
    keepers = [{"address": "http://a:1", "host": "old"}, {"address": "http://b:1", "host": "new"}]
    answers = {"/api/v1/keepers": {"keepers": keepers, "listening_ms": 9e9}}
    monkeypatch.setattr(remote.HttpLighthouse, "get", lambda self, path: answers[path])
    monkeypatch.setattr(remote, "_listed", lambda address: lists[address])
    said: list[str] = []
    assert [one.source.where for one in remote.held(lighthouse, JOB, said.append)] == [
        "http://b:1/snapshots/a%20job%2F1/x"
    ]
    assert said == [
        "the copies of old are not found: its keeper is of another version, its answer lacks 'quorum'"
    ]
    answers["/api/v1/keepers"] = {"keepers": keepers}
    with pytest.raises(SlotError, match="lighthouse is of another version, its answer lacks 'listening_ms'"):
        remote.held(lighthouse, JOB)
