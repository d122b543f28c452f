"""Contexts: what makes one, and that threads of torchft make none on device 0. In jobs: test_processes.py."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from tests.late import load
from tests.unit.waiting import wait_until
from torchft import futures
from torchft.collectives import allreduce_quantized
from torchft.futures import context_timeout, stream_timeout
from torchft.process_group import ProcessGroup
from torchft.utils import DeviceEvent, DeviceThread

load()
from tests.late.group import together  # noqa: E402
from tests.late.isolated import ProcessGroupBabyLate, sharing  # noqa: E402
from tests.late.test_isolated import started  # noqa: E402
from tests.late.test_quantization import gloo_group, inputs  # noqa: E402
from tests.late.test_transports import PAIRS, tensors, transfer  # noqa: E402
from tests.late.workers import ProcessGroupBabyCounting  # noqa: E402


@pytest.fixture(autouse=True)
def no_garbage(late: Any) -> Iterator[None]:
    """A timer of an earlier test would run on that test's device; an event that one left in a cycle is
    destroyed on any thread.
    """
    gc.collect()
    gc.disable()
    futures._STREAM_TIMERS.reset()
    futures._TIMEOUT_MANAGER.shutdown()  # after the collection, which may end groups
    memory_is_returned()
    late.reset()
    yield
    gc.enable()


def memory_is_returned() -> None:
    """Waits for the thread that returns shared memory: it uses the device of that memory, here that of other
    tests.
    """
    if sharing._returner is not None:
        returned = threading.Event()
        sharing._freed.put(
            SimpleNamespace(device=torch.device("late:0"), holders=(), release_now=returned.set)
        )
        assert returned.wait(60)


def on_thread(function: Callable[[], object], index: int | None = None) -> None:
    """Calls a function on a new thread, whose first device is 0."""

    def run() -> object:
        if index is not None:
            torch.accelerator.set_device_index(index)
        return function()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result(60)


class Things:
    """Objects on device 5, for threads that begin on another device."""

    def __init__(self) -> None:
        self.tensor = torch.ones(3, device="late:5")
        self.stream = torch.Stream("late:5")
        self.events = [torch.accelerator.current_stream(5).record_event()]


def compute(things: Things) -> None:
    with torch.late.device(5):  # type: ignore[attr-defined]
        things.tensor + 1
    things.tensor.sum().item()


def leave_a_stream(things: Things) -> None:
    with torch.late.stream(things.stream):  # type: ignore[attr-defined]
        things.tensor + 1


CALLS: dict[str, tuple[Callable[[Things], object], bool]] = {
    "computing under a guard": (compute, False),
    "leaving a stream": (leave_a_stream, True),
    "querying an event": (lambda things: things.events[0].query(), True),
    "destroying an event": (lambda things: things.events.clear(), True),
    "an operation of a tensor": (lambda things: things.tensor.cpu(), False),
    "pinned memory": (lambda things: torch.empty(3, pin_memory=True), False),
    "memory of the current device": (lambda things: torch.empty(3, device="late"), True),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("set_first", [False, True])
def test_calls_that_make_a_context_on_a_threads_first_device(late: Any, call: str, set_first: bool) -> None:
    things: list[Things] = []
    on_thread(lambda: things.append(Things()), 5)
    assert set(late.contexts()) == {5}
    function, needs = CALLS[call]
    on_thread(lambda: function(things[0]), 5 if set_first else None)
    assert set(late.contexts()) == ({0, 5} if needs and not set_first else {5})
    on_thread(lambda: things[0].events.clear(), 5)


def test_a_thread_of_ours_has_the_device_of_the_one_that_makes_it(late: Any) -> None:
    got: list[int] = []

    def make() -> None:
        torch.empty(3, device="late")
        thread = DeviceThread(lambda: got.append(torch.accelerator.current_device_index()), "thread")
        thread.start()
        thread.join(60)

    on_thread(make, 6)
    assert got == [6]


@pytest.mark.parametrize("of_stream", [True, False])
def test_timers_run_on_the_device_of_the_thread_that_set_them(late: Any, of_stream: bool) -> None:
    got: list[int] = []

    def expire() -> None:
        got.append(torch.accelerator.current_device_index())

    def run(index: int) -> None:
        tensor = torch.empty(3, device="late")
        if of_stream:
            with late.held():
                tensor.fill_(1)
                stream_timeout(expire, timedelta(milliseconds=1))
                wait_until(lambda: index in got)
        else:
            with context_timeout(expire, timedelta(milliseconds=1)):
                wait_until(lambda: index in got)

    for index in (5, 6):
        on_thread(lambda index=index: run(index), index)
    assert got == [5, 6] and set(late.contexts()) == {5, 6}


def test_no_event_waits_for_the_garbage_collector(late: Any) -> None:
    """It runs on any thread, also on one that has no device yet."""

    def marks() -> int:
        return sum(isinstance(each, DeviceEvent) for each in gc.get_objects())

    def rank(r: int, pg: ProcessGroup) -> None:
        for _ in range(10):
            works = [pg.allreduce([torch.ones(3, device="late")], ReduceOp.SUM) for _ in range(3)]
            works[0].get_future().wait()
            for work in works:
                work.wait()
        torch.accelerator.synchronize()

    before = marks()
    together(rank)
    stream_timeout(print, timedelta(seconds=60))  # drops those that the streams have reached
    assert marks() <= before + 1


# A group on devices works on the two that are current when it connects: test_processes.py has it.
@pytest.mark.parametrize("name", [name for name in PAIRS if name != "process group on the device"])
def test_heals(late: Any, name: str) -> None:
    """The copy for the target, the server's threads, and those that fetch."""
    state = {"w": torch.arange(1 << 21, device="late:3"), "small": torch.ones(5, device="late:3")}
    own = {name: torch.zeros_like(tensor, device="late:4") for name, tensor in state.items()}
    with ExitStack() as stack:
        got = transfer(PAIRS[name](stack), state, own, writable=True, devices=(3, 4))
    assert all(tensor.device.index == 4 for tensor in tensors(got))
    assert set(late.contexts()) <= {1, 3, 4}, late.contexts().get(0)  # the ends of Gloo are made on device 1


def test_quantized_collectives_by_gloo(late: Any) -> None:
    def rank(r: int, pg: ProcessGroup) -> None:
        torch.accelerator.set_device_index(r + 3)
        allreduce_quantized([tensor.to("late") for tensor in inputs(r)], ReduceOp.SUM, pg).wait()

    together(rank, make=gloo_group)
    assert 0 not in late.contexts(), late.contexts()[0]


@pytest.mark.slow
def test_isolated_groups_and_their_workers(late: Any) -> None:
    """The worker adds up 2 ** n for each device n on which it has a context."""

    def run() -> None:
        groups = started(ProcessGroupBabyCounting)
        group: ProcessGroupBabyLate = next(groups)
        for _ in range(3):
            tensor = torch.zeros(4, device="late")
            group.allreduce([tensor], ReduceOp.SUM).get_future().wait()
            assert tensor.tolist() == [8, 8, 8, 8]
        done = threading.Event()
        group.allreduce([tensor], ReduceOp.SUM).get_future().then(lambda _: done.set())
        assert done.wait(60)
        del tensor
        groups.close()  # type: ignore[attr-defined]

    on_thread(run, 3)
    assert set(late.contexts()) == {3}, late.contexts().get(0)
