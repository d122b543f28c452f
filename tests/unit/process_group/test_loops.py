"""After an abort no event loop of Gloo spins, even if the group is still referenced."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tests.unit.process_group.ranks import TIMEOUT, connect
from torchft.process_group import ProcessGroupGloo
from torchft.process_group._gloo import loops as gloo_loops
from torchft.process_group._gloo import reaper
from torchft.process_group._gloo.loops import _report_changes, watched

WINDOW_S = 0.5
# A waiting loop needs 2 ms of this window; a spinning one gets its share of the machine.
SPINS_MS = 25
DEADLINE_S = 20.0

linux = pytest.mark.skipif(
    not Path("/proc/self/fdinfo").is_dir(), reason="Gloo's loops are looked for in /proc"
)


def loops() -> dict[str, float]:
    """Milliseconds of processor time that each of Gloo's loops has used so far."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        try:
            if (thread / "comm").read_text().strip() == "gloo_tcp_loop":
                found[thread.name] = int((thread / "schedstat").read_text().split()[0]) / 1e6
        except OSError:  # the thread has ended
            continue
    return found


def spins(others: set[str]) -> bool:
    """Whether a loop that is not in `others` runs all the time."""
    before = loops()
    time.sleep(WINDOW_S)
    return any(ms - before.get(name, ms) > SPINS_MS for name, ms in loops().items() if name not in others)


@linux
def test_nothing_spins_after_an_abort(store: TCPStore) -> None:
    """After an aborted receive there is no buffer for the peer's data."""
    others = set(loops())
    groups = [ProcessGroupGloo(timeout=TIMEOUT) for _ in range(2)]
    connect(groups, store)
    lingering = [group.parent for group in groups]
    groups[0].recv([torch.zeros(16)], 1, 0)
    sent = groups[1].send([torch.ones(16)], 0, 0)
    # On a busy machine a spinning loop may get too little of one window.
    if not any(spins(others) for _ in range(10)):
        pytest.skip("this Gloo does not need the workaround")
    for group in groups:
        group.abort()
    deadline = time.monotonic() + DEADLINE_S
    while spins(others):
        assert time.monotonic() < deadline
    # The epoll still works: the group is destroyed as usual.
    del sent
    lingering.clear()
    assert reaper.drain(DEADLINE_S)


@linux
def test_an_epoll_becomes_edge_triggered() -> None:
    reading, writing = os.pipe()
    with select.epoll() as epoll, open(reading, "rb"), open(writing, "wb"):
        assert watched(epoll.fileno()) == []
        epoll.register(reading, select.EPOLLIN)
        os.write(writing, b"x")
        (one,) = watched(epoll.fileno())
        assert one[:2] == (reading, os.fstat(reading).st_ino) and one.data & 0xFFFFFFFF == reading
        assert epoll.poll(0) == epoll.poll(0) == [(reading, select.EPOLLIN)]
        _report_changes(epoll.fileno(), one)
        assert epoll.poll(0) == []
        os.write(writing, b"x")
        epoll.unregister(reading)


# The child process, which waits between its look at an epoll and the change.
PAUSING = """
import importlib.util, os, sys
looked, gate, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
spec = importlib.util.spec_from_file_location("loops", path)
loops = sys.modules["loops"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loops)
watched = loops.watched
def look(epoll):
    found = watched(epoll)
    os.write(looked, b"x")
    os.read(gate, 1)
    return found
loops.watched = look
loops.main(*sys.argv[4:])
"""


@linux
@pytest.mark.parametrize("replaced", ["before the child begins", "after its look", "never"])
def test_a_socket_that_takes_the_number_of_a_cut_one_is_watched_as_before(
    monkeypatch: pytest.MonkeyPatch, replaced: str
) -> None:
    mine, theirs = socket.socketpair()
    other, others = socket.socketpair()
    number, inode = mine.fileno(), os.fstat(mine.fileno()).st_ino
    looked, looks = os.pipe()
    gate, go_on = os.pipe()
    run = subprocess.run

    def replace() -> None:
        epoll.unregister(number)
        os.dup2(other.fileno(), number)  # closes the cut one
        epoll.register(number, select.EPOLLIN)

    def pausing(command: list[str], pass_fds: list[int], **options: Any) -> Any:
        python, *flags, path = command[:4]
        code = ["-c", PAUSING, str(looks), str(gate), path, *command[4:]]
        if replaced == "before the child begins":
            replace()
        return run([python, *flags, *code], pass_fds=[*pass_fds, looks, gate], **options)

    with select.epoll() as epoll, mine, theirs, other, others:
        epoll.register(number, select.EPOLLIN)
        monkeypatch.setattr(gloo_loops, "_CLOSE_SEC", 0)
        monkeypatch.setattr(gloo_loops, "epolls", lambda: iter([epoll.fileno()]))
        monkeypatch.setattr(subprocess, "run", pausing)
        thread = threading.Thread(target=gloo_loops._quiet, args=({number: inode},))
        thread.start()
        assert os.read(looked, 1) == b"x"
        if replaced == "after its look":
            replace()
        os.write(go_on, b"x")
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        (theirs if replaced == "never" else others).send(b"x")
        assert epoll.poll(0) == ([] if replaced == "never" else [(number, select.EPOLLIN)])
    for descriptor in (looked, looks, gate, go_on):
        os.close(descriptor)
