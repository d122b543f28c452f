"""NCCL in this process.

It refuses two ranks on one device, so there is one rank, and a busy stream stands for a peer that hangs.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Iterator

import pytest
import torch
from torch.distributed import ReduceOp, TCPStore
from torch.distributed.distributed_c10d import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BroadcastOptions,
)

from tests.gpu.collectives import check_gathering
from tests.gpu.device import DEVICE, busy, settled_mb, wait_until
from tests.unit.process_group.ranks import TIMEOUT, meeting
from torchft.process_group import ProcessGroupNCCL


@pytest.fixture
def group(store: TCPStore) -> Iterator[ProcessGroupNCCL]:
    group = ProcessGroupNCCL(timeout=TIMEOUT)
    group.configure(meeting(store), "replica", 0, 1, global_ranks=[0])
    # Kernels are loaded when they are first used, which takes long.
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
    began = time.monotonic()
    busy(0.3)
    tensor.fill_(3)
    work = group.allreduce([tensor], ReduceOp.SUM)
    work.wait()
    assert time.monotonic() - began < 0.25, "the host waited for the device"
    assert tensor.tolist() == [3, 3, 3, 3]
    assert work.get_future().wait()[0].data_ptr() == tensor.data_ptr()


def test_an_abort_takes_no_time_and_leaves_the_device_usable(group: ProcessGroupNCCL, store: TCPStore) -> None:
    tensor = ones()
    busy(1.0)
    work = group.allreduce([tensor], ReduceOp.SUM)
    began = time.monotonic()
    group.abort()
    assert time.monotonic() - began < 0.1
    with pytest.raises(RuntimeError, match="aborted"):
        work.wait()
    assert isinstance(group.errored(), RuntimeError)
    began = time.monotonic()
    group.configure(meeting(store), "replica", 0, 1)
    assert time.monotonic() - began < 5
    group.allreduce([tensor], ReduceOp.SUM).wait()
    assert group.errored() is None


def test_an_operation_that_is_overdue_aborts_the_group(store: TCPStore) -> None:
    group = ProcessGroupNCCL(timeout=TIMEOUT)
    group.configure(meeting(store), "replica", 0, 1)
    opts = AllreduceOptions()
    opts.timeout = timedelta(milliseconds=100)
    busy(1.0)
    group.allreduce([ones()], opts).wait()
    wait_until(lambda: group._aborted is not None, 5)
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


def test_what_pytorch_is_told(group: ProcessGroupNCCL) -> None:
    backend = group.parent._get_backend(DEVICE)
    assert backend.options.config.blocking == 0
    assert backend.options._timeout >= timedelta(days=1)
    group.set_timeout(timedelta(seconds=5))
    assert backend.options._timeout >= timedelta(days=1)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
