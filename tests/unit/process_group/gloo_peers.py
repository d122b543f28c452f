"""Gloo groups for tests, also with a peer in another process, and bounds for their times."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Callable

import torch
from processes import Job, ours_path
from torch.distributed import ReduceOp, TCPStore

from tests.promises import ABORT_S, within
from tests.unit.process_group.ranks import TIMEOUT, connect, meeting
from torchft.process_group import ProcessGroup, ProcessGroupGloo
from torchft.process_group._gloo.connections import GlooConnections

HERE = Path(__file__).parent
# The promised bound of an abort, without which operations would wait for TIMEOUT.
SOON = within(ABORT_S)
# A bound for durations that are not promised.
DEADLINE_S = 10.0
# Errors of Gloo for a peer that has ended; the kernel decides which of the two occurs.
PEER_ENDED = r"(Connection closed by peer|Read error .*: Connection reset by peer)"


def gloo() -> ProcessGroupGloo:
    return ProcessGroupGloo(timeout=TIMEOUT)


def pair(store: TCPStore) -> list[ProcessGroupGloo]:
    groups = [gloo(), gloo()]
    connect(groups, store)
    return groups


def connections_of(group: ProcessGroupGloo) -> GlooConnections:
    assert group._operations is not None and group._operations.connections is not None
    return group._operations.connections


class Peer:
    """Rank 1 in another process, which joins one allreduce, and no later one."""

    def __init__(self, store: TCPStore, make: Callable[[], ProcessGroup] = gloo) -> None:
        where = meeting(store)
        self._job = Job()
        self._child = self._job.python("peer", HERE / "gloo_peer.py", where, path=ours_path())
        self.group = make()
        self.group.configure(where, "self", 0, 2)
        self.group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
        self._job.wait(lambda: self._child.of("took part"), TIMEOUT.total_seconds(), "the peer takes part")

    def signal(self, number: int) -> None:
        os.kill(self._child.pid, number)

    def close(self) -> None:
        self._job.close()
        self.group.shutdown()


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
