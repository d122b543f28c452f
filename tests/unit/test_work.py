"""Work that is complete when it is made."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from torchft.work import _DummyWork


def test_the_work_is_complete() -> None:
    tensor = torch.ones(2)
    work = _DummyWork([tensor])
    assert isinstance(work, dist.Work)
    assert work.wait() and work.wait(timedelta(seconds=1))
    assert work.is_completed() and work.is_success() and work.exception() is None
    work.synchronize()
    work.block_current_stream()
    assert work.result()[0] is tensor
    assert work.get_future().done()
    assert work.get_future().value()[0] is tensor
    assert work.get_future() is work.get_future()


def test_pytorchs_cpp_code_sees_the_work_as_complete() -> None:
    """Through the C++ interface that DDP's reducer uses."""

    class Group(dist.ProcessGroup):
        def allreduce(self, tensors: list[torch.Tensor], opts: object) -> dist.Work:
            return _DummyWork(tensors)

    tensor = torch.ones(2)
    work = dist.ProcessGroup.allreduce(Group(0, 1), [tensor])
    work.wait()
    assert work.get_future().value()[0].data_ptr() == tensor.data_ptr()
