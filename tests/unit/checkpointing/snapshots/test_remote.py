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
from typing import Any, Optional

import pytest
import torch

from tests.unit.waiting import wait_until
from torchft import _keeper
from torchft._torchft import LighthouseServer
from torchft.checkpointing.codec.encoding import Encoded
from torchft.checkpointing.snapshots import gather, remote, slots
from torchft.checkpointing.snapshots.remote import Held
from torchft.checkpointing.snapshots.shares import Share
from torchft.checkpointing.snapshots.slots import Header, SlotError

JOB = "a job/1"

pytestmark = pytest.mark.usefixtures("keepers")


def save(
    step: int,
    group: str = "g",
    size: int = 1000,
    slot: int = 0,
    quorum: int = 7,
    share: Optional[Share] = None,
) -> Path:
    """Writes a slot into this host's memory."""
    folder = slots.folder_of(JOB, group, 0)
    folder.mkdir(parents=True, exist_ok=True)
    header = Header(JOB, group, 0, 1, step, step, quorum, 0.0, share=share)
    state = {name: torch.full((size,), float(step)) for name in "wxyz"[: 1 if share is None else 4]}
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


def test_the_slots_of_two_hosts(
    hosts: Callable[[str], Host], lighthouse: str, memory_of_snapshots: Path
) -> None:
    with hosts("a"):
        save(5)
        save(6, slot=1).write_bytes(bytes(5000))  # torn
        _keeper.ensure(JOB, lighthouse)
    with hosts("b"):
        save(7, group="other")
        _keeper.ensure(JOB, lighthouse)
    found = heard(lighthouse, 2)
    assert [(one.step, one.quorum, one.group, one.rank, one.ranks) for one in found] == [
        (7, 7, "other", 0, 1),
        (5, 7, "g", 0, 1),
    ]
    assert found[0].address != found[1].address
    into = memory_of_snapshots / "fetched"
    slot = remote.fetch(found[:1], into)
    assert not into.exists()
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
        assert [one.step for one in remote.held(lighthouse, JOB, said.append)] == [step, step - 1]
    assert said == []
    host.end()
    # The slot that it has told the lighthouse could not be fetched.
    wait_until(lambda: not remote.held(lighthouse, JOB, said.append))
    assert f"the copies of {socket.gethostname()} are not found, its keeper does not answer" in said[0]


@pytest.mark.parametrize(
    ("told", "listed", "steps"),
    [
        ([], [], []),
        ([], [(0, 5)], [5]),
        ([(0, 5), (1, 6)], [], [5, 6]),  # the keeper knows the lighthouse by another address
        ([(0, 5), (1, 6)], [(0, 7), (1, 6)], [7, 6]),
        ([(0, 5)], [(0, None)], [None]),  # it is being written now
    ],
)
def test_what_a_keeper_lists_is_later_than_its_report(
    told: list[tuple[int, int]], listed: list[tuple[int, int]], steps: list[int]
) -> None:
    def slots_of(these: list[tuple[int, int]]) -> list[dict[str, Any]]:
        return [
            {"job": JOB, "group": "g", "group_rank": 0, "slot": slot, "step": step} for slot, step in these
        ]

    assert [slot["step"] for slot in remote._present(slots_of(told), slots_of(listed))] == steps


def test_the_parts_of_two_hosts(
    hosts: Callable[[str], Host], lighthouse: str, memory_of_snapshots: Path
) -> None:
    for name, share in (("a", Share(0, 3, 2)), ("b", Share(1, 3, 2))):
        with hosts(name):
            path = save(5, group=name, size=300_000, share=share)
            assert path.stat().st_blocks * 512 < 4 * 1_200_000
            _keeper.ensure(JOB, lighthouse)
    found = heard(lighthouse, 2)
    assert sorted(one.share or () for one in found) == [(0, 3, 2), (1, 3, 2)]
    into, sources = memory_of_snapshots / "fetched", [partial(remote.part, one) for one in found]
    slot = gather.gather(sources, into, lambda header: header.step == 5)
    assert not into.exists()
    assert all(w.eq(5).all() and len(w) == 300_000 for w in slot.state().values())
    with pytest.raises(SlotError, match="no copy has region"):
        gather.gather(sources[:1], into, lambda header: header.step == 5)


def test_the_token_of_the_job_is_needed(
    hosts: Callable[[str], Host], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory_of_snapshots: Path
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
    into = memory_of_snapshots / "fetched"
    assert remote.fetch(found, into).header.step == 5
    monkeypatch.setenv("TORCHFT_TOKEN_FILE", str(tmp_path / "wrong"))
    with pytest.raises(SlotError, match="the token is not the job's"):
        remote.fetch(found, into)
    monkeypatch.delenv("TORCHFT_TOKEN_FILE")
    with pytest.raises(SlotError, match="wants the job's token"):
        remote.fetch(found, into)
    assert not into.exists()
    server.shutdown()


Answer = Callable[[BaseHTTPRequestHandler, bytes], None]


@pytest.fixture
def source() -> Generator[Callable[[bytes, Answer], Held]]:
    """Starts a source that answers in its own way."""
    servers = []

    def start(content: bytes, answer: Answer) -> Held:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self, content)

            def log_message(self, *_: object) -> None: ...

        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return Held(f"http://127.0.0.1:{server.server_address[1]}", "h", JOB, "g", 0, 0, 1, 5, 7)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def sends(handler: BaseHTTPRequestHandler, content: bytes, until: int | None = None) -> None:
    """Sends what is asked for, but at most until a position."""
    begin = int((handler.headers["Range"] or "bytes=0-")[6:-1])
    assert handler.headers["If-Match"] == ('"t"' if begin else None)
    handler.send_response(206 if begin else 200)
    handler.send_header("ETag", '"t"')
    handler.send_header("Content-Length", str(len(content) - begin))
    handler.end_headers()
    handler.wfile.write(content[begin:until])


def breaks(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    """Ends each connection after a third of the slot."""
    begin = int((handler.headers["Range"] or "bytes=0-")[6:-1])
    sends(handler, content, begin + len(content) // 3)


def is_overwritten(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    if handler.headers["Range"]:
        handler.send_error(412)
    else:
        sends(handler, content, 100)


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
    handler.wfile.write(content)


def refuses(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    handler.send_response(409)
    handler.end_headers()
    handler.wfile.write(b'{"error": "the slot is not complete: its format has version 2"}')


def test_a_broken_connection_is_made_again(
    source: Callable[[bytes, Answer], Held], memory_of_snapshots: Path
) -> None:
    held = source(save(5).read_bytes(), breaks)
    assert remote.fetch([held], memory_of_snapshots / "fetched").header.step == 5


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (is_overwritten, "was overwritten while it was read"),
        (stalls, "timed out"),
        (flips, "region 0 is damaged"),
        (sends_nothing, "ended the connection"),
        (refuses, "its format has version 2"),
        (is_no_keeper, "is of another version, or no keeper's"),
    ],
)
def test_the_next_source_is_asked(
    answer: Answer,
    cause: str,
    source: Callable[[bytes, Answer], Held],
    memory_of_snapshots: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "_PROGRESS_SEC", 1.0)
    into = memory_of_snapshots / "fetched"
    content = save(5).read_bytes()
    bad, good = source(content, answer), source(content, sends)
    with pytest.raises(SlotError, match=cause):
        remote.fetch([bad], into)
    assert remote.fetch([bad, good], into).header.step == 5
    assert not into.exists()


def test_a_source_that_has_another_step_is_not_taken(
    source: Callable[[bytes, Answer], Held], memory_of_snapshots: Path
) -> None:
    held = source(save(6).read_bytes(), sends)
    with pytest.raises(SlotError, match="has step 6 now"):
        remote.fetch([held], memory_of_snapshots / "fetched")
    with pytest.raises(SlotError, match="there is no source"):
        remote.fetch([], memory_of_snapshots / "fetched")


def test_no_room_is_named(
    source: Callable[[bytes, Answer], Held], memory_of_snapshots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = source(save(5).read_bytes(), sends)
    monkeypatch.setattr(os, "O_NOFOLLOW", 0)
    (memory_of_snapshots / "full").symlink_to("/dev/full")
    with pytest.raises(SlotError, match="no room for a copy of another host: No space left on device"):
        remote.fetch([held], memory_of_snapshots / "full")


def test_a_lighthouse_that_does_not_answer() -> None:
    with pytest.raises(SlotError, match="snapshots on other hosts are not found"):
        remote.held("http://127.0.0.1:9", JOB)


def test_a_keeper_and_a_lighthouse_of_other_versions_are_named(
    lighthouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = {"job": JOB, "group": "g", "group_rank": 0, "slot": 0, "group_world_size": 1, "step": 5}
    keepers = [
        {"address": "http://a:1", "host": "old", "snapshots": [slot]},
        {"address": "http://b:1", "host": "new", "snapshots": [{**slot, "quorum": 7}]},
    ]
    answers = {"/api/v1/keepers": {"keepers": keepers, "listening_ms": 9e9}}
    monkeypatch.setattr(remote.HttpLighthouse, "get", lambda self, path: answers[path])
    monkeypatch.setattr(remote, "_listed", lambda address, lighthouse: [])
    said: list[str] = []
    assert [one.host for one in remote.held(lighthouse, JOB, said.append)] == ["new"]
    assert said == [
        "snapshots on other hosts are not found: the keeper of old is of another version, its answer lacks "
        "'quorum'"
    ]
    answers["/api/v1/keepers"] = {"keepers": keepers}
    with pytest.raises(SlotError, match="lighthouse is of another version, its answer lacks 'listening_ms'"):
        remote.held(lighthouse, JOB)
