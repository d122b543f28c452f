"""NCCL in this process.

There is one rank, since NCCL before 2.30 does not accept two on a device; a busy stream simulates a stalled
peer.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Callable, Iterator

import pytest
import torch
from torch.distributed import ReduceOp, TCPStore
from torch.distributed.distributed_c10d import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BroadcastOptions,
)

from tests.gpu.collectives import check_gathering
from tests.gpu.device import BUSY_S, DEVICE, busy, settled_mb, wait_until
from tests.promises import ABORT_S, NEW_PEERS_S, within
from tests.unit.process_group.ranks import TIMEOUT, meeting
from torchft.process_group import ProcessGroupNCCL


@pytest.fixture
def group(store: TCPStore) -> Iterator[ProcessGroupNCCL]:
    group = ProcessGroupNCCL(timeout=TIMEOUT)
    group.configure(meeting(store), "replica", 0, 1, global_ranks=[0])
    # Kernels are loaded on first use, which takes long.
    group.allreduce([ones()], ReduceOp.SUM).wait()
    torch.cuda.synchronize()
    yield group
    group.shutdown()


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape or (4,), device=DEVICE)


def test_collectives(group: ProcessGroupNCCL) -> None:
    tensor = ones()
    group.allreduce([tensor], ReduceOp.SUM).wait()
    group.allreduce([tensor], AllreduceOptions()).wait()
    group.allreduce_coalesced([tensor, ones(2)], AllreduceCoalescedOptions()).wait()
    group.broadcast([tensor], BroadcastOptions()).wait()
    check_gathering(group, tensor)


def test_wait_queues_and_the_stream_sees_the_result(group: ProcessGroupNCCL) -> None:
    tensor = torch.zeros(4, device=DEVICE)
    torch.cuda.synchronize()
    busy(BUSY_S)
    busy_until = torch.cuda.current_stream().record_event()
    tensor.fill_(3)
    work = group.allreduce([tensor], ReduceOp.SUM)
    work.wait()
    assert not busy_until.query(), "the host waited for the device"
    assert tensor.tolist() == [3, 3, 3, 3]
    assert work.get_future().wait()[0].data_ptr() == tensor.data_ptr()


def test_an_abort_takes_no_time_and_leaves_the_device_usable(
    group: ProcessGroupNCCL, store: TCPStore
) -> None:
    tensor = ones()
    busy(BUSY_S)
    idle = torch.cuda.current_stream().record_event()
    work = group.allreduce([tensor], ReduceOp.SUM)
    times: list[str] = []

    def timed(name: str, call: Callable[[], object]) -> float:
        began = time.monotonic()
        call()
        took = time.monotonic() - began
        times.append(f"{name}: {took:.3f} s, then the device is {'idle' if idle.query() else 'busy'}")
        return took

    def wait() -> None:
        with pytest.raises(RuntimeError, match="aborted"):
            work.wait()

    assert timed("abort", group.abort) + timed("wait", wait) < within(ABORT_S), times
    assert isinstance(group.errored(), RuntimeError)
    assert timed("connect", lambda: group.configure(meeting(store), "replica", 0, 1)) < within(NEW_PEERS_S), (
        times
    )
    timed("allreduce", lambda: group.allreduce([tensor], ReduceOp.SUM).wait())
    assert group.errored() is None, times


def test_an_operation_past_its_deadline_aborts_the_group(store: TCPStore) -> None:
    group = ProcessGroupNCCL(timeout=TIMEOUT)
    group.configure(meeting(store), "replica", 0, 1)
    opts = AllreduceOptions()
    timeout_s = 0.1
    opts.timeout = timedelta(seconds=timeout_s)
    busy(timeout_s + BUSY_S)
    group.allreduce([ones()], opts).wait()
    wait_until(lambda: group._aborted is not None, timeout_s + within(ABORT_S))
    assert isinstance(group.errored(), RuntimeError)
    group.shutdown()


def test_reconfiguring_leaves_no_memory_behind(group: ProcessGroupNCCL, store: TCPStore) -> None:
    def again() -> None:
        group.configure(meeting(store), "replica", 0, 1)
        group.allreduce([ones()], ReduceOp.SUM).wait()
        torch.cuda.synchronize()

    again()
    before = settled_mb()
    for _ in range(10):
        again()
    wait_until(lambda: settled_mb() < before + 64)


def test_pytorch_gets_the_error_handling_setting(group: ProcessGroupNCCL) -> None:
    backend = group.parent._get_backend(DEVICE)
    assert backend.options.config.blocking == 0
    assert backend.options._timeout >= timedelta(days=1)
    group.set_timeout(timedelta(seconds=5))
    assert backend.options._timeout >= timedelta(days=1)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ, "groups made later are not torchft's"
