"""Properties of a step that only a real device can show, with one rank."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, TCPStore

from tests.gpu.device import BUSY_S, DEVICE, busy, wait_until
from tests.promises import ABORT_S, within
from tests.unit.process_group.ranks import TIMEOUT, meeting
from torchft.process_group import ProcessGroupNCCL
from torchft.process_group.isolated import cuda


def ones(n: int = 4) -> torch.Tensor:
    return torch.ones(n, device=DEVICE)


@pytest.fixture
def group(store: TCPStore) -> ProcessGroupNCCL:
    group = ProcessGroupNCCL(timeout=TIMEOUT)
    group.configure(meeting(store), "replica", 0, 1)
    return group


def test_reduced_tensors_are_freed_long_before_the_deadline(group: ProcessGroupNCCL) -> None:
    def step() -> None:
        group.allreduce([ones(1 << 20)], ReduceOp.SUM).wait()

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (8 << 20), "100 tensors of 4 MB"
    group.shutdown()


def test_a_synchronous_call_returns_a_work(group: ProcessGroupNCCL) -> None:
    opts = dist.AllreduceOptions()
    opts.asyncOp = False
    tensor = ones()
    assert group.allreduce([tensor], opts).wait()
    assert tensor.tolist() == [1, 1, 1, 1]
    assert group.errored() is None
    group.shutdown()


def test_a_graph_that_captures_an_operation_is_refused_by_name(group: ProcessGroupNCCL) -> None:
    tensor = ones()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="torchft-nccl: allreduce cannot be captured"),
        torch.cuda.graph(graph),
    ):
        group.allreduce([tensor], ReduceOp.SUM)
    group.shutdown()


def test_an_abort_ends_connecting_to_an_absent_peer() -> None:
    """NCCL's first operation waits for the peer, and holds the lock that its abort needs."""
    from torchft.process_group.reconfigure import ReconfigureOptions

    group, other = ProcessGroupNCCL(timeout=TIMEOUT), ProcessGroupNCCL(timeout=TIMEOUT)
    opts = ReconfigureOptions()
    opts.handles, opts.uuid = (
        [group.get_reconfigure_handle(), other.get_reconfigure_handle()],
        time.monotonic_ns(),
    )
    errors: list[Exception] = []

    def connect() -> None:
        torch.cuda.set_device(DEVICE)
        try:
            group.reconfigure(opts)
        except Exception as e:
            errors.append(e)

    thread = threading.Thread(target=connect)
    thread.start()
    wait_until(lambda: bool(errors) or (group._attempt is not None and bool(group._attempt._interrupts)), 20)
    time.sleep(1)
    began = time.monotonic()
    group.abort()
    thread.join(20)
    assert time.monotonic() - began < within(ABORT_S)
    assert "aborted" in str(errors)


@pytest.mark.parametrize("shared", [False, True])
def test_memory_that_another_stream_reads_is_not_reused(shared: bool) -> None:
    side = torch.cuda.Stream()
    trainer = cuda.TrainerEnd(lambda note, descriptor: None)
    tensor = ones(3 << 20)
    if shared:
        trainer.register(tensor, True, True).release()
    torch.cuda.synchronize()
    address = tensor.data_ptr()
    with torch.cuda.stream(side):
        busy(BUSY_S)
    tensor.record_stream(side)
    trainer.close()
    del tensor
    assert ones(3 << 20).data_ptr() != address


def test_an_operation_of_a_worker_past_its_deadline_is_never_a_success(store: TCPStore) -> None:
    """PyTorch's watchdog in the worker aborts the operation. It then ends as after a success, so the trainer
    must ask the worker for an error.

    The trainer has the same deadline, and either of the two may notice it first.
    """
    from torchft.process_group import ProcessGroupBabyNCCL

    group = ProcessGroupBabyNCCL(timeout=TIMEOUT)
    try:
        group.configure(meeting(store), "replica", 0, 1)
        group.allreduce([ones()], ReduceOp.SUM).wait()
        assert group.errored() is None
        # Not earlier: the first operation loads kernels, which takes long.
        group.set_timeout(timedelta(seconds=3))
        busy(8)
        group.allreduce([ones()], ReduceOp.SUM).wait()  # the stream waits, not the host
        torch.cuda.synchronize()
        error = group.errored()
        assert "timed out" in str(error) or "reports TIMEOUT" in str(error)
    finally:
        group.shutdown()
