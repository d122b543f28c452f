"""A job in one process: a real lighthouse, and a thread for each rank of the replica groups.

All is as in production (sockets, Gloo, HTTP), except for a "crash": a rank closes its servers and connections
without notifying any other process.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Optional, TypeVar

import torch
from torch.distributed import TCPStore

from torchft.coordination import LighthouseServer
from torchft.manager import Manager
from torchft.process_group import ProcessGroup, ProcessGroupGloo

T = TypeVar("T")

DEADLINE = timedelta(seconds=30)


@dataclass
class Rank:
    """One rank of one replica group; the argument of a test's loop."""

    cluster: Cluster
    group: int
    rank: int
    world_size: int
    store: TCPStore
    pg: ProcessGroup
    manager: Optional[Manager] = None
    crashed: bool = False

    def start_manager(self, **settings: Any) -> Manager:
        defaults: dict[str, Any] = dict(
            pg=self.pg,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=1,
            timeout=DEADLINE,
            quorum_timeout=DEADLINE,
            connect_timeout=DEADLINE,
            rank=self.rank,
            world_size=self.world_size,
            store_addr="localhost",
            store_port=self.store.port,
            lighthouse_addr=self.cluster.lighthouse.address(),
            replica_id=f"group_{self.group}",
            heartbeat_interval=timedelta(milliseconds=50),
        )
        self.manager = Manager(**{**defaults, **settings})
        return self.manager

    def crash(self) -> None:
        """Closes all servers and connections of this rank; the end of its process has the same effect."""
        self.crashed = True
        self.pg.abort()
        assert self.manager is not None
        self.manager.shutdown(wait=False)

    def close(self) -> None:
        if self.manager is not None:
            self.manager.shutdown()
        self.pg.shutdown()


@dataclass
class Cluster:
    """Starts groups as threads, and ends them all."""

    # Long, because heartbeats may be late on a busy machine; a crash is detected by its broken connection.
    join_timeout_ms: int = 30_000
    heartbeat_timeout_ms: int = 10_000
    min_replicas: int = 1
    max_replicas: int = 0
    make_pg: Callable[[int], ProcessGroup] = lambda group: ProcessGroupGloo(timeout=DEADLINE)
    ranks: list[Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lighthouse = LighthouseServer(
            # Only of other hosts' lighthouses are keepers of snapshots awaited.
            bind="127.0.0.1:0",
            min_replicas=self.min_replicas,
            join_timeout_ms=self.join_timeout_ms,
            heartbeat_timeout_ms=self.heartbeat_timeout_ms,
            max_replicas=self.max_replicas,
        )
        self._loops: list[Future[Any]] = []
        self._threads = ThreadPoolExecutor(max_workers=16, thread_name_prefix="rank")

    def start(self, loop: Callable[[Rank], T], group: int, world_size: int = 1) -> list[Future[T]]:
        """Runs ``loop(rank)`` for every rank of a group, each on a separate thread."""
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        ranks = [Rank(self, group, i, world_size, store, self.make_pg(group)) for i in range(world_size)]
        self.ranks += ranks
        loops = [self._threads.submit(_run, loop, rank) for rank in ranks]
        self._loops += loops
        return loops

    def wait(self, gate: Gate) -> None:
        """Waits until a loop opens the gate. Raises the error of a loop that fails before."""
        for future in self._loops:
            future.add_done_callback(lambda _: gate.open())
        gate.wait()
        for future in self._loops:
            if future.done():
                future.result()

    def status(self) -> dict[str, Any]:
        """The lighthouse's status: the healthy members, and the waiting ones."""
        with urllib.request.urlopen(f"{self.lighthouse.address()}/status", timeout=10) as response:
            return json.load(response)

    def wait_for_waiters(self, count: int) -> None:
        """Waits until this number of groups wait for a quorum. Groups whose quorum stands wait for none."""
        self._poll(f"{count} waiters", lambda now: now["waiters"] >= count)

    def wait_for_waiter(self, group: int) -> None:
        """Waits until this group waits for a quorum; others may wait for one, too."""
        name = f"group_{group}:"
        self._poll(
            f"waiting {name}",
            lambda now: any(m["waiting"] and name in m["replica_id"] for m in now["members"]),
        )

    def wait_for_another(self) -> None:
        """Waits until two groups are in the quorum, or one waits to join it."""
        self._poll("other group", lambda now: now["waiters"] >= 1 or len(now["quorum"]) > 1)

    def wait_for_healthy(self, count: int) -> None:
        """Waits until this number of groups are healthy. From then on none of them gets a quorum alone."""
        self._poll(f"{count} healthy groups", lambda now: now["healthy"] >= count)

    def wait_for_stragglers(self, count: int) -> list[dict[str, Any]]:
        """Waits until this number of groups are named as stragglers. Returns their status."""
        self._poll(f"{count} stragglers", lambda now: len(_stragglers(now)) == count)
        return _stragglers(self.status())

    def _poll(self, what: str, reached: Callable[[Any], bool]) -> None:
        deadline = time.monotonic() + 60
        while not reached(status := self.status()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what}: {status}")
            time.sleep(0.01)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.close()
        self.lighthouse.shutdown()
        self._threads.shutdown()


def _stragglers(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [member for member in status["members"] if member.get("straggler")]


def _run(loop: Callable[[Rank], T], rank: Rank) -> T:
    torch.set_num_threads(1)
    return loop(rank)


def results(*groups: list[Future[T]]) -> list[T]:
    """Returns the results of the loops. Raises the first error of a loop."""
    return [future.result(timeout=90) for group in groups for future in group]


def runs_twice_and_trains_once(script: Any, folder: Path) -> None:
    """Runs a loop of six steps, which writes checkpoints every four into the folder, in one group and then in
    another: the last step has a checkpoint, with which the second ends. `script.seen` has the steps by group.
    """
    with Cluster() as cluster:
        (first,) = results(cluster.start(script, 0))
        assert sorted(path.name for path in folder.glob("step-*")) == ["step-4", "step-6"]
        (again,) = results(cluster.start(script, 1))
    assert first is not None and again is not None and torch.equal(first[0], again[0])
    assert len(script.seen[0]) == 6 and 1 not in script.seen


@contextmanager
def records_of(name: str) -> Iterator[list[Any]]:
    """The records that all groups give to a logger."""
    records: list[Any] = []
    handler, logger = logging.Handler(), logging.getLogger(name)
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


class Gate:
    """Lets a test hold a group until another one has reached some point."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def open(self) -> None:
        self._event.set()

    def wait(self) -> None:
        if not self._event.wait(80):
            raise TimeoutError("the gate was not opened within 80 s")


def crash_and_wait() -> tuple[Gate, Callable[[Rank], bool], Callable[[Rank], bool]]:
    """Two events of a script, of which the first ends its group as a failure does, and opens the gate; the
    second holds a group until another one is in the quorum, or asks to join.
    """
    gate = Gate()

    def crash(rank: Rank) -> bool:
        rank.crash()
        gate.open()
        return True

    def wait(rank: Rank) -> bool:
        rank.cluster.wait_for_another()
        return False

    return gate, crash, wait
