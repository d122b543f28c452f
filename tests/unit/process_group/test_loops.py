"""After an abort no event loop of Gloo spins, even if the group is still referenced."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from tests.unit.process_group.ranks import TIMEOUT, connect
from torchft.process_group import ProcessGroupGloo
from torchft.process_group._gloo import reaper
from torchft.process_group._gloo.loops import _report_changes, watched

WINDOW_S = 0.5
# A waiting loop needs 2 ms of this window; a spinning one gets its share of the machine.
SPINS_MS = 25
DEADLINE_S = 20.0

linux = pytest.mark.skipif(not Path("/proc/self/fdinfo").is_dir(), reason="Gloo's loops are looked for in /proc")


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
