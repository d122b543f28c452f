"""A context of `multiprocessing` whose processes are threads: quick to start, easy to debug."""

from __future__ import annotations

import multiprocessing.connection
import multiprocessing.dummy as mp
import threading
from typing import Callable, Iterable, Mapping


class DummyContext:
    """Has the interface of `multiprocessing.get_context`'s result, with threads instead of processes.

    Args:
        method: the start method; ignored, since threads have only one.
    """

    def __init__(self, method: object = None) -> None:
        self._method = method

    def Process(
        self,
        group: object = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[object] = (),
        kwargs: Mapping[str, object] = {},
        daemon: bool | None = None,
    ) -> mp.DummyProcess:
        """A thread with the methods of a process, without `kill` and `terminate`."""
        process = mp.Process(group, target, name, tuple(args), dict(kwargs))
        if daemon is not None:
            process.daemon = daemon
        return process

    def Pipe(
        self, duplex: bool = True
    ) -> tuple[multiprocessing.connection.Connection, multiprocessing.connection.Connection]:
        """A real pipe, so that objects are pickled as between processes and `poll` takes a timeout."""
        return multiprocessing.Pipe(duplex)

    def Queue(self, maxsize: int = 0) -> mp.Queue:
        return mp.Queue(maxsize)

    def Event(self) -> threading.Event:
        return threading.Event()

    def Lock(self) -> threading.Lock:
        return threading.Lock()

    def RLock(self) -> threading.RLock:
        return threading.RLock()

    def Semaphore(self, value: int = 1) -> threading.Semaphore:
        return threading.Semaphore(value)

    def BoundedSemaphore(self, value: int = 1) -> threading.BoundedSemaphore:
        return threading.BoundedSemaphore(value)

    def Condition(self, lock: threading.Lock | threading.RLock | None = None) -> threading.Condition:
        return threading.Condition(lock)

    def Manager(self) -> object:
        """A module with plain `list`, `dict` and `Namespace`: threads share their objects without proxies."""
        return mp.Manager()


def get_context(method: object = None) -> DummyContext:
    """Stands in for `multiprocessing.get_context`."""
    return DummyContext(method)
