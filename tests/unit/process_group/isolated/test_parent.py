"""The trainer's side of an isolated group: operations in flight, lifecycle, settings."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Callable, Sequence

import pytest
import torch
from torch.distributed import ReduceOp, TCPStore

from tests.unit.process_group.ranks import TIMEOUT, in_threads, meeting
from torchft.process_group import ProcessGroup, ProcessGroupBaby, ProcessGroupBabyGloo
from torchft.process_group.isolated import parent, protocol
from torchft.process_group.isolated.operation import operation
from torchft.process_group.isolated.sharing import Registration, Sharing


def test_more_operations_in_flight_than_a_socket_holds(alone: ProcessGroup) -> None:
    tensors = [torch.full((4,), float(i)) for i in range(3000)]
    works = [alone.allreduce([tensor], ReduceOp.SUM) for tensor in tensors]
    works[-1].wait()
    for work in works:
        work.wait()
    assert alone.num_active_work() == 0  # type: ignore[attr-defined]
    assert [tensor[0].item() for tensor in tensors] == list(range(3000))


def test_an_operation_with_very_many_tensors(alone: ProcessGroup) -> None:
    """Its request is larger than the socket's buffer."""
    tensors = [torch.full((3,), float(i)) for i in range(1500)]
    alone.allreduce_coalesced(tensors, ReduceOp.SUM).wait()
    assert [tensor[2].item() for tensor in tensors] == list(range(1500))


def test_futures_are_completed_with_their_own_tensors(alone: ProcessGroup) -> None:
    seen: dict[int, Any] = {}
    done = threading.Semaphore(0)
    tensors = [torch.full((2,), float(i)) for i in range(30)]
    for i, tensor in enumerate(tensors):
        future = alone.allreduce([tensor], ReduceOp.SUM).get_future()

        def callback(future: Any, i: int = i) -> None:
            seen[i] = future.value()
            done.release()

        future.add_done_callback(callback)
    for _ in tensors:
        assert done.acquire(timeout=TIMEOUT.total_seconds())
    assert all(
        seen[i][0] is tensor or seen[i][0].data_ptr() == tensor.data_ptr() for i, tensor in enumerate(tensors)
    )


def test_two_threads_wait_and_a_third_for_a_future(pair: list[ProcessGroup]) -> None:
    """One thread reads the answers for all."""
    plain, isolated = pair
    tensors = [torch.zeros(2) for _ in range(3)]
    works = [isolated.recv([tensor], 0, tag) for tag, tensor in enumerate(tensors)]
    future = works[2].get_future()
    waits: Sequence[Callable[[], Any]] = [
        lambda: works[0].wait(),
        lambda: works[1].wait(),
        lambda: future.wait(),
    ]

    def send() -> None:
        for tag in (2, 1, 0):
            plain.send([torch.full((2,), float(tag))], 1, tag).wait()

    results = in_threads([*waits, send])
    assert not [result for result in results if isinstance(result, Exception)]
    assert [tensor[0].item() for tensor in tensors] == [0, 1, 2]


def test_threads_use_one_group(pair: list[ProcessGroup]) -> None:
    """Each pair of threads has its own tag, and receives only messages with this tag."""

    def talk(rank: int, tag: int) -> None:
        for i in range(20):
            tensor = torch.full((4,), 100.0 * tag + i)
            if rank == i % 2:
                pair[rank].send([tensor], 1 - rank, tag).wait()
            else:
                got = torch.zeros(4)
                pair[rank].recv([got], 1 - rank, tag).wait()
                assert torch.equal(got, tensor)

    calls = [lambda rank=rank, tag=tag: talk(rank, tag) for rank in (0, 1) for tag in (0, 1)]
    assert in_threads(calls) == [None] * 4


def test_a_wait_that_times_out_does_not_cancel_the_operation(pair: list[ProcessGroup]) -> None:
    tensor = torch.zeros(1)
    work = pair[1].recv([tensor], 0, 7)
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(milliseconds=50))
    assert not work.is_completed() and not work.is_success()
    pair[0].send([torch.ones(1)], 1, 7).wait()
    work.wait()
    assert work.is_success() and tensor.item() == 1


def test_calls_in_any_order(store: TCPStore) -> None:
    group = ProcessGroupBabyGloo(TIMEOUT)
    assert (group.size(), group.rank(), group.num_active_work(), group.errored()) == (-1, 0, 0, None)
    group.abort()
    assert group.errored() is None
    with pytest.raises(AssertionError, match="process group not initialized"):
        group.allreduce([torch.ones(1)], ReduceOp.SUM)
    for _ in range(2):
        group.configure(meeting(store), "replica", 0, 1)
        group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    group.shutdown()
    with pytest.raises(OSError, match="handle is closed"):
        group.barrier()
    group.configure(meeting(store), "replica", 0, 1)
    group.abort()
    with pytest.raises(RuntimeError, match="was aborted"):
        group.barrier()
    group.shutdown()


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (-1, 1), (0, 0)])
def test_a_bad_rank_is_named(alone: ProcessGroup, store: TCPStore, rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} must be between 0 and"):
        alone.configure(meeting(store), "replica", rank, world_size)


@pytest.mark.parametrize("timeout", [0, -1.0, timedelta(0), float("inf"), "soon"])
def test_a_bad_timeout_is_named(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout=.*a timedelta above zero is needed, or seconds"):
        ProcessGroupBabyGloo(timeout)


def test_a_bad_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_ISOLATED_STANDBY", "yes")
    with pytest.raises(ValueError, match=r"TORCHFT_ISOLATED_STANDBY='yes': allowed are 0 \(off\) and 1"):
        ProcessGroupBabyGloo()


def test_tensors_of_two_devices_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the work on both could not be kept."""
    released: list[int] = []

    class Registered(Registration):
        def release(self) -> None:
            released.append(self.ref)

    class Device(Sharing):
        def register(self, tensor: torch.Tensor, read: bool, write: bool) -> Registration:
            return Registered(0)

    monkeypatch.setattr(protocol, "DEVICES", ("cpu", "meta"))
    tensors = [torch.ones(1), torch.ones(1, device="meta")]
    with pytest.raises(RuntimeError, match="group: allreduce: tensors on cpu and meta: one device is needed"):
        operation(lambda device: Device(), "group", "allreduce", (tensors, None), None, TIMEOUT)
    assert released == [0]


def test_the_base_class_has_no_backend() -> None:
    with pytest.raises(NotImplementedError, match=r"ProcessGroupBaby\._create_pg"):
        ProcessGroupBaby._create_pg(None, 0, 1)  # type: ignore[arg-type]


def test_an_abort_after_the_worker_has_connected_is_not_lost(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = ProcessGroupBabyGloo(timeout=TIMEOUT)

    def aborted() -> bool:
        group.abort()
        return False

    monkeypatch.setattr(parent, "enabled", aborted)  # asked after the worker has answered
    with pytest.raises(RuntimeError, match="was aborted"):
        group.configure(meeting(store), "replica", 0, 1)
    assert group.size() == -1
    monkeypatch.undo()
    group.configure(meeting(store), "replica", 0, 1)
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    group.shutdown()
