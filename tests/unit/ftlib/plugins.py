"""A custom consensus and communication library: members are threads, and tensors pass through a store."""

from __future__ import annotations

import itertools
import threading
import time
from datetime import timedelta

import torch
from torch.distributed import HashStore, PrefixStore, Store

from torchft.ftlib import Consensus, Framework, Identity, Member, View
from torchft.ftlib.consensus import Listener

SOON_SEC = 30.0


class Recorder:
    """A listener that keeps the reports of its consensus."""

    def __init__(self) -> None:
        self.failed: list[tuple[int, str]] = []
        self.joins = 0

    def new_member_join(self) -> None:
        self.joins += 1

    def member_failed(self, view: int, reason: str) -> None:
        self.failed.append((view, reason))


class Room:
    """The meeting point of a job: a view is made when all present members have requested one."""

    def __init__(self, least: int = 1) -> None:
        self.least = least  # minimum size of the first view
        self.changed = threading.Condition()
        self.present: dict[Identity, Listener | None] = {}
        self.asking: set[Identity] = set()
        self.views: list[View] = []

    def decide(self) -> None:
        if (
            self.asking
            and self.asking == self.present.keys()
            and (self.views or len(self.asking) >= self.least)
        ):
            members = tuple(Member(identity, "store:1") for identity in self.present)
            self.views.append(View(len(self.views) + 1, members))
            self.asking.clear()
            self.changed.notify_all()


class RoomConsensus(Consensus):
    """A passive consensus in about thirty lines."""

    def __init__(self, room: Room, name: str) -> None:
        self.identity = Identity(name, 0)
        self._room = room
        self._listener: Listener | None = None

    def attach(self, listener: Listener) -> None:
        self._listener = listener

    def get_member_list(self) -> View:
        room = self._room
        with room.changed:
            if self.identity not in room.present:
                for other in room.present.values():
                    other.new_member_join() if other else None
            room.present[self.identity] = self._listener
            room.asking.add(self.identity)
            room.decide()
            if not room.changed.wait_for(lambda: self.identity not in room.asking, SOON_SEC):
                raise TimeoutError(f"asked: {room.asking} of {room.present.keys()}")
            return room.views[-1]

    def close(self) -> None:
        with self._room.changed:
            self._room.present.pop(self.identity, None)
            for listener in self._room.present.values():
                listener.member_failed(
                    len(self._room.views), f"{self.identity.name} left"
                ) if listener else None
            self._room.decide()


class StoreFramework(Framework):
    """A communication library in about thirty lines. ``shared`` is a store that all members can reach."""

    def __init__(self, shared: Store) -> None:
        self._shared = shared
        self._store: Store = PrefixStore("no peers", shared)

    def rebuild(self, rank: int, size: int, address: str) -> bool:
        self._store = PrefixStore(address, self._shared)
        self._rank, self._size, self._calls = rank, size, itertools.count()
        return True

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        call = next(self._calls)
        self._store.set(f"{call}/{self._rank}", tensor.numpy().tobytes())
        deadline = time.monotonic() + SOON_SEC
        while not self._store.check([f"{call}/{rank}" for rank in range(self._size)]):
            if self._store.check(["aborted"]) or time.monotonic() > deadline:
                raise RuntimeError("a peer is missing")
            time.sleep(0.001)
        read = [self._store.get(f"{call}/{rank}") for rank in range(self._size)]
        return [torch.frombuffer(bytearray(each), dtype=tensor.dtype).reshape(tensor.shape) for each in read]

    def allreduce_average(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(torch.stack(self.allgather(tensor)).sum(0) / self._size)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        tensor.copy_(self.allgather(tensor)[root])

    def abort(self) -> None:
        self._store.set("aborted", b"")  # peers see it too


def shared_store() -> Store:
    store = HashStore()
    store.set_timeout(timedelta(seconds=SOON_SEC))
    return store
