"""NCCL in a worker, with one rank, since NCCL before 2.30 does not accept two ranks on one device."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Iterator

import pytest
import torch
from torch.distributed import ReduceOp, TCPStore
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
)

import torchft.process_group
from tests.gpu.collectives import check_gathering
from tests.gpu.device import BUSY_S, DEVICE, MB, busy, settled_mb, used_mb, wait_until
from tests.promises import ABORT_S, within
from tests.unit.process_group.ranks import TIMEOUT, meeting

COUNT = 1 << 20


def make(**settings: Any) -> Any:
    return torchft.process_group.ProcessGroupBabyNCCL(**{"timeout": TIMEOUT, **settings})


def configure(group: Any, store: TCPStore) -> None:
    group.configure(meeting(store), "replica", 0, 1, global_ranks=[0])
    # Kernels are loaded on first use, which takes long.
    group.allreduce([torch.ones(4, device=DEVICE)], ReduceOp.SUM).wait()


@pytest.fixture
def group(store: TCPStore) -> Iterator[Any]:
    torch.cuda.set_device(DEVICE)
    group = make()
    configure(group, store)
    yield group
    group.shutdown()


def ones(count: int = 4) -> torch.Tensor:
    return torch.ones(count, device=DEVICE)


def kill(group: Any) -> None:
    """Sends SIGKILL to the worker, as the kernel does when memory runs out, and waits until it has ended."""
    before = set(_children())
    worker = group._worker
    worker.kill()
    wait_until(lambda: worker.broken is not None)
    wait_until(lambda: not before <= set(_children()) or not _children(), 30)


def _children() -> list[str]:
    """The process ids of all workers."""
    server = torchft.process_group.isolated.standby.servers.get().pid
    with open(f"/proc/{server}/task/{server}/children") as file:
        return file.read().split()


def test_collectives(group: Any) -> None:
    tensor = ones()
    group.allreduce([tensor], ReduceOp.SUM).wait()
    check_gathering(group, tensor)


def test_the_worker_waits_for_the_stream(group: Any) -> None:
    tensor = torch.full((COUNT,), float("nan"), device=DEVICE)
    out = torch.zeros(COUNT, device=DEVICE)
    torch.cuda.synchronize()
    busy(BUSY_S)
    busy_until = torch.cuda.current_stream().record_event()
    tensor.fill_(3)
    work = group.allgather([[out]], [tensor], AllgatherOptions())
    assert not busy_until.query(), "allgather() waited for the device"
    work.wait()
    assert out.eq(3).all()
    after = out.clone()
    out.zero_()
    assert after.eq(3).all()


def test_the_future_holds_the_tensors(group: Any) -> None:
    tensor = torch.full((COUNT,), float("nan"), device=DEVICE)
    busy(0.1)
    tensor.fill_(3)
    future = group.allreduce([tensor], AllreduceOptions()).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    (value,) = future.wait()
    assert value.data_ptr() == tensor.data_ptr()
    assert doubled.eq(6).all()


def test_many_operations_of_many_tensors(group: Any) -> None:
    works = []
    for i in range(200):
        tensor = torch.full((1000,), float(i), device=DEVICE)
        works.append((i, tensor, group.allreduce([tensor], ReduceOp.SUM)))
        del tensor
    for i, tensor, work in works:
        work.wait()
        assert tensor[0].item() == i and tensor[-1].item() == i


def test_an_abort_takes_no_time_and_the_next_worker_works(group: Any, store: TCPStore) -> None:
    tensor = ones(COUNT)
    busy(BUSY_S)
    work = group.allreduce([tensor], ReduceOp.SUM)
    began = time.monotonic()
    group.abort()
    with pytest.raises(RuntimeError):
        work.wait()
    assert time.monotonic() - began < within(ABORT_S)
    assert isinstance(group.errored(), RuntimeError)
    configure(group, store)
    group.allreduce([tensor], ReduceOp.SUM).wait()
    assert tensor.eq(1).all() and group.errored() is None


def test_a_kill_in_the_middle_is_an_error_and_leaves_the_device_usable(group: Any, store: TCPStore) -> None:
    tensor = ones(COUNT)
    busy(BUSY_S)
    work = group.allreduce([tensor], ReduceOp.SUM)
    worker = group._worker
    worker.kill()
    began = time.monotonic()
    with suppress(RuntimeError):  # if the end is known already
        work.wait()
    torch.cuda.synchronize()
    assert time.monotonic() - began < BUSY_S + within(ABORT_S)
    assert isinstance(group.errored(), RuntimeError) and not work.is_success()
    tensor.fill_(2)
    assert tensor.eq(2).all()
    configure(group, store)
    group.allreduce([tensor], ReduceOp.SUM).wait()
    assert tensor.eq(2).all()


def test_an_operation_past_its_deadline_ends_the_worker(group: Any) -> None:
    """NCCL cannot distinguish a busy stream from a stalled peer."""
    opts = AllreduceOptions()
    timeout_s = 1.0
    opts.timeout = timedelta(seconds=timeout_s)
    tensor = ones()
    busy(timeout_s + BUSY_S)
    began = time.monotonic()
    with suppress(RuntimeError):  # where the host waits
        group.allreduce([tensor], opts).wait()
    torch.cuda.synchronize()
    assert time.monotonic() - began < timeout_s + BUSY_S + within(ABORT_S)
    assert isinstance(group.errored(), RuntimeError)


def test_twenty_kills_leave_device_memory_unchanged(group: Any, store: TCPStore) -> None:
    tensor = ones(64 * MB // 4)
    group.allreduce([tensor], ReduceOp.SUM).wait()
    before = settled_mb()
    for _ in range(20):
        dropped = ones(64 * MB // 4)
        group.allreduce([tensor], ReduceOp.SUM).wait()
        busy(0.2)
        group.allreduce([dropped], ReduceOp.SUM)
        del dropped
        kill(group)
        configure(group, store)
    group.allreduce([tensor], ReduceOp.SUM).wait()
    wait_until(lambda: abs(settled_mb() - before) < 64)


@pytest.mark.parametrize("context", [False, True])
def test_a_standby_holds_a_context_only_if_asked(store: TCPStore, context: bool) -> None:
    torch.cuda.synchronize()
    alone = make(standby=False)
    configure(alone, store)
    without = settled_mb()
    alone.shutdown()
    both = make(standby=True, standby_context=context)
    configure(both, store)
    if context:
        wait_until(lambda: used_mb() > without + 50)
    time.sleep(1)
    cost = settled_mb() - without
    print(f"a standby worker takes {cost} MB of the device")
    assert (cost > 50) is context
    both.shutdown()


def test_the_worker_ends_with_its_group(group: Any) -> None:
    numbers = _children()
    assert numbers
    group.shutdown()
    wait_until(lambda: not any(os.path.exists(f"/proc/{number}") for number in numbers))
    assert signal.getsignal(signal.SIGCHLD) in (signal.SIG_DFL, None), (
        "the group changed the trainer's signal handler"
    )
