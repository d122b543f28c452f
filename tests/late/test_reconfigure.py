"""The second form of the backend, which revokes instead of aborting, and gets peers by `reconfigure`."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.late import load
from torchft.process_group.native import abort_group, errors_of, reconfigure_group
from torchft.process_group.reconfigure import ReconfigureOptions

load()
from tests.late.group import native_group  # noqa: E402
from tests.late.one_rank import OneRank  # noqa: E402
from tests.promises import ABORT_S, within  # noqa: E402

LATE = torch.device("late")


def ranks(count: int) -> list[dist.ProcessGroup]:
    store = dist.HashStore()
    return [native_group(store) for _ in range(count)]


def reconfigure(groups: list[dist.ProcessGroup], uuid: int) -> None:
    """Connects the groups with each other, each on its own device."""
    opts = ReconfigureOptions()
    opts.uuid, opts.timeout = uuid, timedelta(seconds=20)
    opts.handles = [group._get_backend(LATE).get_reconfigure_handle() for group in groups]

    def one(index: int) -> None:
        torch.accelerator.set_device_index(index)
        groups[index]._get_backend(LATE).reconfigure(opts)

    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(one, range(len(groups))))


def allreduce(groups: list[dist.ProcessGroup]) -> list[list[float]]:
    tensors = [torch.full((2,), i + 1.0, device=f"late:{i}") for i in range(len(groups))]
    for group, tensor in zip(groups, tensors):
        group._get_backend(LATE).allreduce([tensor], dist.AllreduceOptions()).wait()
    return [tensor.tolist() for tensor in tensors]


def test_it_has_no_peers_before_reconfigure(late):
    (group,) = ranks(1)
    backend = group._get_backend(LATE)
    assert backend.supports_reconfigure
    with pytest.raises(RuntimeError, match=r"reconfigure\(\) first"):
        backend.allreduce([torch.ones(1, device="late")], dist.AllreduceOptions())


def test_peers_join_and_leave(late):
    late.delays(1, 0, 500)
    groups = ranks(3)
    reconfigure(groups, 1)
    assert allreduce(groups) == [[6.0] * 2] * 3
    reconfigure(groups[:2], 2)
    assert allreduce(groups[:2]) == [[3.0] * 2] * 2


@pytest.mark.parametrize("mode", ["2", "3"])
def test_a_peer_that_ends_revokes_and_never_ends_the_process(late, monkeypatch, mode: str):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", mode)
    groups = ranks(2)
    reconfigure(groups, 1)
    backend = groups[0]._get_backend(LATE)
    allreduce(groups)
    groups[1]._get_backend(LATE).abort()
    x = torch.ones(2, device="late:0")
    work = backend.allreduce([x], dist.AllreduceOptions())
    deadline = time.monotonic() + 10
    while backend.get_error().name == "SUCCESS":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    work.wait()
    assert x.tolist() not in ([1.0] * 2, [2.0] * 2)  # garbage
    with pytest.raises(RuntimeError, match="revoked"):
        backend.allreduce([x], dist.AllreduceOptions())
    reconfigure(groups, 2)
    assert backend.get_error().name == "SUCCESS"
    assert allreduce(groups) == [[3.0] * 2] * 2


def test_an_absent_peer_costs_the_timeout(late):
    groups = ranks(2)
    opts = ReconfigureOptions()
    opts.uuid, opts.timeout = 1, timedelta(seconds=0.2)
    opts.handles = [group._get_backend(LATE).get_reconfigure_handle() for group in groups]
    with pytest.raises(RuntimeError, match="connecting timed out"):
        groups[0]._get_backend(LATE).reconfigure(opts)
    reconfigure(groups, 2)
    assert allreduce(groups) == [[3.0] * 2] * 2


def test_an_aborted_wait_of_another_thread_ends(late):
    groups = ranks(2)
    reconfigure(groups, 1)
    allreduce(groups)
    x = torch.ones(2, device="late:0")
    work = groups[0]._get_backend(LATE).allreduce([x], dist.AllreduceOptions())
    threading.Timer(0.05, groups[0]._get_backend(LATE).abort).start()
    work.wait()
    torch.accelerator.synchronize()
    assert work.is_completed()


def test_an_aborted_group_has_an_error_until_it_has_peers_again(late: Any) -> None:
    (group,) = ranks(1)
    torch.accelerator.set_device_index(0)
    reconfigure([group], 1)
    assert errors_of(group)() is None
    abort_group(group)
    assert "was aborted" in str(errors_of(group)())
    opts = ReconfigureOptions()
    opts.uuid, opts.timeout = 2, timedelta(seconds=20)
    opts.handles = [group._get_backend(LATE).get_reconfigure_handle()]
    reconfigure_group(group, opts)
    assert errors_of(group)() is None


class _HangsInItsAbort(OneRank):
    """NCCL may hang in an abort."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()
        self.ended = False
        self.had_ended: list[bool] = []

    def abort(self) -> None:
        assert self.may_end.wait(20)
        self.ended = True

    def reconfigure(self, opts: object) -> None:
        self.had_ended.append(self.ended)


def test_a_hanging_abort_of_a_native_group_delays_only_its_next_peers(late: Any) -> None:
    """If the abort ended later, it would end operations with the new peers."""
    group, opts = _HangsInItsAbort(), ReconfigureOptions()
    opts.handles, opts.timeout = ["late"], timedelta(seconds=0.2)
    caller = threading.Thread(target=abort_group, args=(group,), daemon=True)
    caller.start()
    try:
        caller.join(within(ABORT_S))
        assert not caller.is_alive()
        with pytest.raises(RuntimeError, match=r"the abort of its last peers has not ended within 0.2 s"):
            reconfigure_group(group, opts)
        assert group.had_ended == []
    finally:
        group.may_end.set()
    opts.timeout = timedelta(seconds=20)
    reconfigure_group(group, opts)
    assert group.had_ended == [True]
