"""Several ranks in one test: each is a thread, and every wait has a deadline."""

from __future__ import annotations

import itertools
import threading
from datetime import timedelta
from typing import Callable, Sequence, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from torchft.process_group import create_store_client, reconfigure_with_store

T = TypeVar("T")

TIMEOUT = timedelta(seconds=30)

_meetings = itertools.count()


def in_threads(calls: Sequence[Callable[[], T]], timeout: timedelta = TIMEOUT) -> list[T | Exception]:
    """Runs the calls concurrently. Returns their results or exceptions."""
    results: list[T | Exception] = [AssertionError("still running") for _ in calls]

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as e:
            results[i] = e

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for i, thread in enumerate(threads):
        thread.join(timeout.total_seconds())
        assert not thread.is_alive(), f"call {i} still runs after {timeout}"
    return results


def on_ranks(n: int, call: Callable[[int], T], timeout: timedelta = TIMEOUT) -> list[T]:
    """Returns the results of call(rank) for each of n ranks. The first error is raised."""
    results = in_threads([lambda rank=rank: call(rank) for rank in range(n)], timeout)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results  # type: ignore[return-value]


def meeting(store: TCPStore) -> str:
    """Returns a store address that was never used."""
    return f"localhost:{store.port}/meeting/{next(_meetings)}"


def connect(groups: Sequence[dist.ProcessGroup], store: TCPStore) -> None:
    """Connects the groups with each other, in this order."""
    where = meeting(store)
    on_ranks(
        len(groups), lambda rank: reconfigure_with_store(groups[rank], where, rank, len(groups), TIMEOUT)
    )


def natives(store: TCPStore, n: int) -> list[dist.ProcessGroup]:
    """Makes process groups like init_process_group(..., enable_reconfigure=True) in n ranks of a job, without
    its global state.
    """
    where = meeting(store)
    return [native(create_store_client(where, TIMEOUT), rank, n) for rank in range(n)]


def native(own: Store, rank: int, n: int, prefix: str = "cpu/") -> dist.ProcessGroup:
    group = dist.ProcessGroup(own, rank, n)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    below = PrefixStore(prefix, own) if prefix else own
    backend = dist.ProcessGroupGloo(below, rank, n, timeout=TIMEOUT, enable_reconfigure=True)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
