"""The wrappers that change allreduce: ErrorSwallowing, Fake, and the Manager's."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Optional
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, ReduceOp, TCPStore, Work
from torch.distributed.distributed_c10d import AllreduceOptions
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tests.unit.process_group.ranks import TIMEOUT, connect, meeting, on_ranks
from torchft import process_group
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroup,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupWrapper,
    _ErrorSwallowingWork,
)
from torchft.work import _DummyWork


class Broken(ProcessGroupDummy):
    """A group whose operations fail in the call, or later."""

    def __init__(self, at_once: bool) -> None:
        super().__init__(0, 1)
        self.at_once = at_once
        self.calls = 0

    def allreduce(self, tensors: list[torch.Tensor], opts: object) -> Work:
        self.calls += 1
        if self.at_once:
            raise KeyError("at once")
        return FailsLater()


class FailsLater(Work):
    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        raise KeyError("later")

    def get_future(self) -> Future[object]:
        fut: Future[object] = Future()
        fut.set_exception(KeyError("later"))
        return fut


# ErrorSwallowing


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "later"])
@pytest.mark.parametrize("how", ["wait", "future"])
def test_the_first_error_is_swallowed_and_kept(at_once: bool, how: str) -> None:
    inner = Broken(at_once)
    group = ErrorSwallowingProcessGroupWrapper(inner)
    tensor = torch.ones(2)
    assert group.error() is None

    work = group.allreduce([tensor], ReduceOp.SUM)
    if how == "wait":
        assert work.wait() and work.wait(TIMEOUT)
    else:
        value = work.get_future().wait()
        assert isinstance(value, list) and value[0] is tensor
    assert isinstance(group.error(), KeyError)
    assert tensor.tolist() == [1.0, 1.0]

    assert group.allreduce([tensor], ReduceOp.SUM).wait()
    assert inner.calls == 1  # no further operation is started
    assert group.errored() is None  # there is no error for the Manager


def test_new_peers_clear_the_error() -> None:
    group = ErrorSwallowingProcessGroupWrapper(Broken(at_once=True))
    group.report_error(KeyError())
    group.configure("nowhere", "replica", 0, 1)
    assert group.error() is None


def test_without_an_error_the_result_is_the_operations() -> None:
    group = ErrorSwallowingProcessGroupWrapper(ProcessGroupDummy(0, 1))
    tensor = torch.ones(2)
    work = group.allreduce([tensor], ReduceOp.SUM)
    assert isinstance(work, _ErrorSwallowingWork)
    assert work.wait()
    value = work.get_future().wait()
    assert isinstance(value, list) and value[0] is tensor
    assert group.error() is None


def test_the_other_operations_are_not_swallowed() -> None:
    class NoBarrier(ProcessGroupDummy):
        def barrier(self, opts: object = None) -> Work:
            raise KeyError("barrier")

    with pytest.raises(KeyError, match="barrier"):
        ErrorSwallowingProcessGroupWrapper(NoBarrier(0, 1)).barrier()


def test_the_work_is_looked_up_in_the_package() -> None:
    group = ErrorSwallowingProcessGroupWrapper(ProcessGroupDummy(0, 1))
    with patch.object(process_group, "_ErrorSwallowingWork", return_value="replaced") as replaced:
        assert group.allreduce([torch.ones(1)], ReduceOp.SUM) == "replaced"
    assert replaced.call_args.args[0] is group


# Fake


def test_a_fake_fails_the_next_allreduce_and_no_other() -> None:
    group = FakeProcessGroupWrapper(ProcessGroupDummy(0, 1))
    for use in ("wait", "future"):
        group.report_future_error(KeyError("made"))
        work = group.allreduce([torch.ones(1)], ReduceOp.SUM)
        with pytest.raises(KeyError, match="made"):
            work.wait() if use == "wait" else work.get_future().wait()
        assert group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()


def test_a_fake_still_takes_part(store: TCPStore) -> None:
    """The peers of a rank with a simulated failure get their result."""
    groups = [FakeProcessGroupWrapper(ProcessGroupGloo(timeout=TIMEOUT)) for _ in range(2)]
    connect(groups, store)
    groups[0].report_future_error(KeyError("made"))
    tensors = [torch.ones(1), torch.ones(1)]

    def call(rank: int) -> None:
        work = groups[rank].allreduce([tensors[rank]], ReduceOp.SUM)
        if rank == 0:
            with pytest.raises(KeyError, match="made"):
                work.wait()
        else:
            work.wait()

    on_ranks(2, call)
    assert [tensor.item() for tensor in tensors] == [2, 2]
    for group in groups:
        group.shutdown()


def test_new_peers_clear_a_requested_error() -> None:
    group = FakeProcessGroupWrapper(ProcessGroupDummy(0, 1))
    group.report_future_error(KeyError())
    group.configure("nowhere", "replica", 0, 1)
    assert group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()


# Managed


class Manager:
    """The methods of a Manager that the group calls. It averages like a Manager."""

    def __init__(self, pg: ProcessGroup) -> None:
        self._pg = pg
        self.participants = 2
        self.calls: list[tuple[torch.Tensor, object]] = []

    def num_participants(self) -> int:
        return self.participants

    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: ReduceOp = ReduceOp.AVG
    ) -> Work:
        self.calls.append((tensor, reduce_op))
        return self._pg.allreduce([tensor], reduce_op)


def managed(pg: ProcessGroup) -> tuple[Manager, ManagedProcessGroup]:
    manager = Manager(pg)
    return manager, ManagedProcessGroup(manager)  # type: ignore[arg-type]


def test_an_allreduce_is_the_managers() -> None:
    manager, group = managed(ProcessGroupDummy(0, 1))
    tensor = torch.ones(2)
    opts = AllreduceOptions()
    opts.reduceOp = ReduceOp.MAX
    for given in (ReduceOp.SUM, opts):
        assert group.allreduce([tensor], given).wait()
    assert [call[0] is tensor for call in manager.calls] == [True, True]
    assert [call[1] for call in manager.calls] == [ReduceOp.SUM, ReduceOp.MAX]
    with pytest.raises(ValueError, match="one tensor at a time, got 2"):
        group.allreduce([tensor, tensor], ReduceOp.SUM)


def test_the_size_is_the_number_of_participants() -> None:
    manager, group = managed(ProcessGroupDummy(0, 1))
    for manager.participants in (1, 5):
        assert group.size() == manager.participants
        assert dist.ProcessGroup.size(group) == manager.participants  # from C++
    assert group.getBackendName() == "torchft-dummy"


def test_other_operations_go_to_the_managers_group() -> None:
    class Seen(ProcessGroupDummy):
        def barrier(self, opts: object = None) -> Work:
            return _DummyWork("the manager's group")

    _, group = managed(Seen(0, 1))
    assert group.barrier().get_future().value() == "the manager's group"


def test_pytorchs_ddp_over_a_managed_group(store: TCPStore) -> None:
    """Both ranks end with the same gradients, the mean of their own."""
    groups = [ProcessGroupGloo(timeout=TIMEOUT) for _ in range(2)]
    connect(groups, store)
    managers = [managed(group) for group in groups]
    dist.init_process_group(
        "gloo", store=PrefixStore(meeting(store), store), rank=0, world_size=1, timeout=TIMEOUT
    )
    try:

        def train(rank: int) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model: Any = DistributedDataParallel(nn.Linear(3, 2), process_group=managers[rank][1])
            for _ in range(2):
                model(torch.full((1, 3), float(rank + 1))).sum().backward()
            return [p.grad for p in model.parameters()]

        grads = on_ranks(2, train, timedelta(seconds=60))
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(grads[0], grads[1])
    # Two backward passes, inputs of 1 and 2: 2 * 1.5 for each weight, 2 * 1 for each bias
    torch.testing.assert_close(grads[0], [torch.full((2, 3), 3.0), torch.full((2,), 2.0)])
    assert all(manager.calls for manager, _ in managers)
    for group in groups:
        group.shutdown()


# repr


def test_repr_names_the_class_and_the_wrapped_group() -> None:
    dummy = ProcessGroupDummy(0, 1)
    assert repr(dummy) == "ProcessGroupDummy()"
    assert repr(ProcessGroupWrapper(pg=dummy)) == "ProcessGroupWrapper(pg=ProcessGroupDummy())"
    swallowing = ErrorSwallowingProcessGroupWrapper(FakeProcessGroupWrapper(dummy))
    assert (
        repr(swallowing)
        == "ErrorSwallowingProcessGroupWrapper(pg=FakeProcessGroupWrapper(pg=ProcessGroupDummy()))"
    )
    assert repr(ProcessGroupGloo()) == "ProcessGroupGloo(pg=None)"
