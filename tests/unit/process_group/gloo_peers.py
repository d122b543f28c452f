"""Gloo groups for tests, also with a peer in another process, and how long they may take."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Callable

import torch
from torch.distributed import ReduceOp, TCPStore

from tests.promises import ABORT_S, within
from tests.unit.process_group.ranks import TIMEOUT, connect, meeting
from torchft.process_group import ProcessGroup, ProcessGroupGloo
from torchft.process_group._gloo.connections import Connections

# What an abort promises; the operations would otherwise wait for TIMEOUT.
SOON = within(ABORT_S)
# For what nothing is promised.
DEADLINE_S = 10.0
# What Gloo says of a peer that is gone; which of the two is the kernel's choice.
GONE = r"(Connection closed by peer|Read error .*: Connection reset by peer)"


def gloo() -> ProcessGroupGloo:
    return ProcessGroupGloo(timeout=TIMEOUT)


def pair(store: TCPStore) -> list[ProcessGroupGloo]:
    groups = [gloo(), gloo()]
    connect(groups, store)
    return groups


def connections_of(group: ProcessGroupGloo) -> Connections:
    assert group._operations is not None and group._operations.connections is not None
    return group._operations.connections


def _take_part_once(where: str, ready: Connection) -> None:
    group = gloo()
    group.configure(where, "peer", 1, 2)
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    ready.send(None)
    ready.recv()


class Peer:
    """Rank 1 in another process, which takes part in one allreduce and in nothing after it."""

    def __init__(self, store: TCPStore, make: Callable[[], ProcessGroup] = gloo) -> None:
        # A server that has imported PyTorch: each child costs milliseconds instead of seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torchft.process_group"])
        where = meeting(store)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_take_part_once, args=(where, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.group = make()
        self.group.configure(where, "self", 0, 2)
        self.group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
        assert self._pipe.poll(TIMEOUT.total_seconds())
        self._pipe.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join(TIMEOUT.total_seconds())
        self._pipe.close()
        self.group.shutdown()


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
