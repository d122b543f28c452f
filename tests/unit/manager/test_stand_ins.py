"""A Manager with mocks of `unittest.mock`, which other projects use in their tests.

Only attributes of upstream's classes are set on the mocks.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Optional
from unittest.mock import MagicMock, call, create_autospec, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore
from torch.nn.parallel import DistributedDataParallel

from torchft import ddp
from torchft._torchft import ManagerClient, ManagerServer, QuorumResult
from torchft.checkpointing import CheckpointTransport
from torchft.checkpointing._rwlock import RWLock
from torchft.futures import future_wait
from torchft.manager import MANAGER_ADDR_KEY, REPLICA_ID_KEY, ExceptionWithTraceback, Manager, _ManagedWork
from torchft.process_group import ProcessGroup, ProcessGroupDummy
from torchft.work import _DummyWork


def upstream_quorum(**fields: Any) -> QuorumResult:
    """Makes the result of a quorum of two groups with some of upstream's fields; it has no replica ids."""
    result = QuorumResult()
    two = dict(quorum_id=123, replica_rank=1, replica_world_size=2, max_world_size=2)
    for name, value in {**two, **fields}.items():
        setattr(result, name, value)
    return result


HEAL = dict(
    heal=True,
    max_step=20,
    max_world_size=1,
    recover_src_manager_address="manager:1",
    recover_src_replica_rank=0,
    store_address="store:1",
)


class StandIns:
    """The mocks of a Manager.

    Attributes:
        client, pg, transport: the mocks.
        loaded: states that were loaded.
    """

    def __init__(self, client: MagicMock, store: TCPStore) -> None:
        self.client = client
        self.client._quorum.return_value = upstream_quorum()
        self.client.should_commit.return_value = True
        self.client._checkpoint_metadata.return_value = "where"
        self.pg = create_autospec(ProcessGroup, instance=True)
        self.pg.allreduce.side_effect = lambda tensors, opts: _DummyWork(tensors)
        self.transport = create_autospec(CheckpointTransport, instance=True)
        self.loaded: list[Any] = []
        self._store = store
        self._managers: list[Manager] = []

    def manager(self, **given: Any) -> Manager:
        settings: dict[str, Any] = dict(
            pg=self.pg,
            load_state_dict=self.loaded.append,
            state_dict=dict,
            min_replica_size=1,
            rank=1,
            world_size=2,
            store_addr="localhost",
            store_port=self._store.port,
            timeout=timedelta(seconds=10),
            checkpoint_transport=self.transport,
        )
        manager = Manager(**{**settings, **given})
        self._managers.append(manager)
        return manager

    def close(self) -> None:
        for manager in self._managers:
            manager.shutdown()


@pytest.fixture
def stand_ins() -> Iterator[StandIns]:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store.set(MANAGER_ADDR_KEY, "http://manager:1")
    store.set(REPLICA_ID_KEY, "group_1:uuid")
    with patch("torchft.manager.ManagerClient", autospec=True) as client_class:
        built = StandIns(client_class(), store)  # without arguments, as in upstream
        yield built
        built.close()


def cause(manager: Manager) -> Optional[Exception]:
    error = manager.errored()
    return error.original_exception if error is not None else None


def test_the_class_is_callable_without_arguments() -> None:
    assert isinstance(create_autospec(ManagerClient)(), ManagerClient)


@pytest.mark.parametrize(
    ("given", "missing"),
    [({}, "addr and connect_timeout"), ({"addr": "http://m:1"}, "connect_timeout")],
)
def test_a_real_client_names_missing_arguments(given: dict[str, Any], missing: str) -> None:
    with pytest.raises(TypeError, match=f"ManagerClient: missing {missing}"):
        ManagerClient(**given)


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_steps_with_a_stand_in_of_a_client(stand_ins: StandIns, use_async_quorum: bool) -> None:
    stand_ins.client._quorum.return_value = upstream_quorum(max_replica_rank=1)
    manager = stand_ins.manager(use_async_quorum=use_async_quorum)
    for step in range(3):
        manager.start_quorum()
        tensor = torch.tensor([4.0])
        manager.allreduce(tensor).wait()
        assert tensor.tolist() == [2.0]
        assert manager.should_commit() and manager.errored() is None
        assert manager.current_step() == step + 1


@pytest.mark.parametrize(("how", "reports"), [({}, 0), ({"wait": False}, 0), ({"finished": True}, 1)])
def test_only_a_training_that_ended_on_purpose_reports_its_end(
    stand_ins: StandIns, how: dict[str, bool], reports: int
) -> None:
    manager = stand_ins.manager()
    manager._manager = server = create_autospec(ManagerServer, instance=True)
    manager.shutdown(**how)
    assert server._finish.call_args_list == [call(manager.current_step())] * reports
    server.shutdown.assert_called_once_with()


def test_a_heal_by_the_fields_of_upstream(stand_ins: StandIns) -> None:
    stand_ins.client._quorum.return_value = upstream_quorum(**HEAL)
    state = {"user": {"default": {"weights": 1}}, "torchft": {"step": 20, "batches_committed": 40}}
    stand_ins.transport.recv_checkpoint.return_value = state
    manager = stand_ins.manager()
    manager.start_quorum()
    assert manager.should_commit(), manager.errored()
    assert manager.current_step() == 21 and stand_ins.loaded == [{"weights": 1}]


# State that other projects set


STATE: dict[str, Any] = {
    "user": {"default": {"weights": 1}},
    "torchft": {"step": 20, "batches_committed": 40},
}


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_a_transport_that_is_set_heals(stand_ins: StandIns, use_async_quorum: bool) -> None:
    stand_ins.client._quorum.return_value = upstream_quorum(**HEAL)
    manager = stand_ins.manager(use_async_quorum=use_async_quorum)
    assert manager._checkpoint_transport is stand_ins.transport
    manager._checkpoint_transport = transport = MagicMock()
    transport.recv_checkpoint.return_value = STATE
    manager.start_quorum()
    assert manager.should_commit(), manager.errored()
    assert manager._checkpoint_transport is transport and stand_ins.loaded == [{"weights": 1}]
    stand_ins.transport.recv_checkpoint.assert_not_called()
    manager.shutdown()
    assert [mock.shutdown.call_count for mock in (transport, stand_ins.transport)] == [1, 1]


@pytest.mark.parametrize("native", [True, False])
def test_a_process_group_that_is_set_reduces(stand_ins: StandIns, native: bool) -> None:
    manager = stand_ins.manager()
    manager.start_quorum()
    manager.allreduce(torch.ones(1)).wait()
    assert manager.should_commit()
    group = create_autospec(
        dist.ProcessGroup if native else ProcessGroup, instance=True, supports_reconfigure=True
    )
    group.allreduce.side_effect = lambda tensors, opts: _DummyWork(tensors)
    group.size.return_value, group.rank.return_value = 2, 0
    group.get_reconfigure_handle.return_value = "a"
    manager._pg = group
    assert manager._pg is group
    stand_ins.client._quorum.return_value = upstream_quorum(quorum_id=124, reconfigure_handles=["a", "b"])
    manager.start_quorum()
    assert manager.allreduce(torch.ones(1)).wait()
    assert manager.should_commit(), manager.errored()
    assert (group.reconfigure.call_count, group.allreduce.call_count, stand_ins.pg.allreduce.call_count) == (
        1,
        1,
        1,
    )


def test_a_participating_rank_that_is_set_counts(stand_ins: StandIns) -> None:
    manager = stand_ins.manager()
    manager.start_quorum()
    manager.wait_quorum()
    assert manager._participating_replica_rank is None
    zeros = torch.ones(1)
    manager.allreduce(zeros).wait()
    manager._participating_replica_rank, manager._participating_replica_world_size = 1, 4
    assert (manager.participating_rank(), manager.num_participants(), manager.is_participating()) == (
        1,
        4,
        True,
    )
    value = torch.ones(1)
    manager.allreduce(value).wait()
    assert (zeros.item(), value.item()) == (0.0, 0.25)
    manager._healing = True
    assert not manager.is_participating()
    assert manager.should_commit() and manager.batches_committed() == 4


def test_an_error_that_is_set_or_cleared_counts_in_the_vote(stand_ins: StandIns) -> None:
    manager = stand_ins.manager()
    stand_ins.client.should_commit.side_effect = lambda group_rank, step, should_commit, timeout: (
        should_commit
    )
    manager.start_quorum()
    manager._errored = error = ExceptionWithTraceback(RuntimeError("set by a test"))
    assert manager.errored() is error and not manager.should_commit()
    manager.start_quorum()
    manager.wait_quorum()
    manager.report_error(RuntimeError("cleared by a test"))
    manager._errored = None
    assert manager.should_commit()


def test_functions_of_the_state_that_are_set_are_called(stand_ins: StandIns) -> None:
    manager = stand_ins.manager(use_async_quorum=True)
    manager._user_state_dicts, manager._load_state_dict_fns = (
        {"mine": lambda: 5},
        {"mine": stand_ins.loaded.append},
    )
    manager._state_dict_lock = RWLock(timeout=3)
    assert manager._manager_state_dict()["user"] == {"mine": 5}
    manager._pending_state_dict = {**STATE, "user": {"mine": 7}}
    manager.start_quorum()
    manager.wait_quorum()
    manager._healing = True
    manager._pending_state_dict = {**STATE, "user": {"mine": 7}}
    manager.should_commit()
    assert stand_ins.loaded == [7] and manager._pending_state_dict is None
    manager._manager_state_dict = lambda: {"user": {}, "torchft": {}}  # type: ignore[method-assign]
    stand_ins.client._quorum.return_value = upstream_quorum(
        quorum_id=124, recover_dst_replica_ranks=[0], max_step=1
    )
    manager.start_quorum()
    manager.wait_quorum()
    assert stand_ins.transport.send_checkpoint.call_args.kwargs["state_dict"] == {"user": {}, "torchft": {}}


def test_a_quorum_is_synchronous_if_that_is_set(stand_ins: StandIns) -> None:
    manager = stand_ins.manager(use_async_quorum=True)
    manager._use_async_quorum = False
    stand_ins.client._quorum.return_value = upstream_quorum(**HEAL)
    stand_ins.transport.recv_checkpoint.return_value = STATE
    manager.start_quorum()
    assert stand_ins.loaded == [{"weights": 1}] and manager.is_participating()


# Errors


def test_an_error_of_the_configuration_is_kept(stand_ins: StandIns) -> None:
    error = RuntimeError("no peers")
    stand_ins.pg.configure.side_effect = error
    manager = stand_ins.manager()
    manager.start_quorum()
    manager.wait_quorum()
    assert cause(manager) is error
    stand_ins.client.should_commit.return_value = False
    assert not manager.should_commit()
    assert stand_ins.client.should_commit.call_args.args[2] is False


def test_an_error_of_a_reconfiguration_is_kept(stand_ins: StandIns) -> None:
    error = RuntimeError("no peers")
    stand_ins.client._quorum.return_value = upstream_quorum(reconfigure_handles=["a", "b"])
    stand_ins.pg.reconfigure.side_effect = error
    manager = stand_ins.manager()
    manager.start_quorum()
    manager.wait_quorum()
    assert cause(manager) is error


@pytest.mark.parametrize("use_async_quorum", [True, False])
@pytest.mark.parametrize(
    ("fields", "call"),
    [(HEAL, "recv_checkpoint"), (dict(recover_dst_replica_ranks=[0], max_step=20), "send_checkpoint")],
)
def test_an_error_of_a_transfer_is_kept(
    stand_ins: StandIns, fields: dict[str, Any], call: str, use_async_quorum: bool
) -> None:
    error = RuntimeError("no bytes")
    stand_ins.client._quorum.return_value = upstream_quorum(**fields)
    getattr(stand_ins.transport, call).side_effect = error
    manager = stand_ins.manager(use_async_quorum=use_async_quorum)
    manager.start_quorum()
    manager.wait_quorum()
    assert cause(manager) is error


def test_an_allreduce_that_cannot_be_queued_costs_one_step(stand_ins: StandIns) -> None:
    manager = stand_ins.manager()
    manager.start_quorum()
    assert manager.allreduce(torch.ones(1)).wait() and manager.errored() is None
    error = RuntimeError("not queued")
    stand_ins.pg.allreduce.side_effect = error
    for _ in range(2):
        tensor = torch.ones(1)
        assert manager.allreduce(tensor).get_future().wait() is tensor
    assert cause(manager) is error
    assert stand_ins.pg.allreduce.call_count == 2, "the second one after the error was not skipped"
    stand_ins.client.should_commit.return_value = False
    assert not manager.should_commit() and cause(manager) is error
    manager.start_quorum()
    assert manager.errored() is None
    stand_ins.pg.allreduce.side_effect = lambda tensors, opts: _DummyWork(tensors)
    manager.allreduce(torch.ones(1)).wait()
    assert stand_ins.pg.allreduce.call_count == 3 and manager.errored() is None


def test_the_future_of_an_allreduce_is_requested_once(stand_ins: StandIns) -> None:
    work, ended = create_autospec(dist._Work, instance=True), torch.futures.Future[None]()
    work.get_future.side_effect = [ended]  # a second call is an error
    stand_ins.pg.allreduce.side_effect = [work]
    manager = stand_ins.manager()
    manager.start_quorum()
    managed, seen = manager.allreduce(torch.ones(1)), []
    for _ in range(2):
        managed.get_future().then(lambda done: seen.append(done.value()))
    ended.set_result(None)
    assert managed.wait() and len(seen) == 2
    assert manager.should_commit() and manager.errored() is None


def test_calls_of_a_work_and_errors_that_it_shows_in_its_future(stand_ins: StandIns) -> None:
    work = stand_ins.pg.allreduce.return_value = create_autospec(dist._Work, instance=True)
    stand_ins.pg.allreduce.side_effect = None
    manager = stand_ins.manager()
    stand_ins.client.should_commit.side_effect = lambda group_rank, step, should_commit, timeout: (
        should_commit
    )
    manager.start_quorum()
    assert manager.allreduce(torch.ones(1)).wait() and manager.errored() is None
    assert (work.wait.call_count, work.get_future.call_count) == (1, 1)
    stand_ins.pg.allreduce.side_effect = error = RuntimeError("not queued")
    manager.allreduce(torch.ones(1)).wait()
    assert cause(manager) is error and not manager.should_commit()
    assert (work.wait.call_count, work.get_future.call_count, stand_ins.pg.abort.call_count) == (1, 1, 1)
    stand_ins.pg.allreduce.side_effect = None
    failed = torch.futures.Future[None]()
    failed.set_exception(late := RuntimeError("failed later"))  # type: ignore[arg-type]
    work.get_future.return_value = failed
    manager.start_quorum()
    assert manager.errored() is None and not manager.allreduce(torch.ones(1)).wait()
    assert (work.wait.call_count, work.get_future.call_count) == (2, 2)
    assert cause(manager) is late and not manager.should_commit()


# Process groups


class NativeLike:
    """The methods of PyTorch's reconfigurable groups that a Manager calls. The first reconfiguration
    fails.
    """

    supports_reconfigure = True
    error = RuntimeError("a peer did not come")

    def __init__(self) -> None:
        self.quorums: list[int] = []

    def get_reconfigure_handle(self) -> str:
        return "b"

    def reconfigure(self, opts: Any) -> None:
        self.quorums.append(opts.uuid)
        if len(self.quorums) == 1:
            raise self.error

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.AllreduceOptions) -> dist._Work:
        return _DummyWork(tensors)

    def abort(self) -> None:
        pass


@pytest.mark.parametrize("new_id", [True, False])
def test_a_native_group_is_reconfigured_after_a_failure(stand_ins: StandIns, new_id: bool) -> None:
    """A client that is a mock gives the next quorum no new id."""
    group = NativeLike()
    manager = stand_ins.manager(pg=group)
    stand_ins.client.should_commit.side_effect = lambda group_rank, step, should_commit, timeout: (
        should_commit
    )
    for quorum_id, committed in ((1, False), (1 + new_id, True), (1 + new_id, True)):
        stand_ins.client._quorum.return_value = upstream_quorum(
            quorum_id=quorum_id, max_replica_rank=1, reconfigure_handles=["a", "b"]
        )
        manager.start_quorum()
        manager.allreduce(torch.ones(1)).wait()
        assert (cause(manager) is None) is committed
        assert manager.should_commit() is committed
    assert group.quorums == [1, 1 + new_id]
    requests = [call.kwargs for call in stand_ins.client._quorum.call_args_list]
    # The lighthouse then assigns a new id.
    assert [request["commit_failures"] for request in requests] == [0, 1, 0]


@pytest.mark.parametrize("kind", [dist.ProcessGroup, ProcessGroup])
@pytest.mark.parametrize("by_work", [True, False])
def test_a_mock_of_a_group_is_reconfigured_after_a_failure(
    stand_ins: StandIns, kind: type, by_work: bool
) -> None:
    error = RuntimeError("a peer did not come")
    group = create_autospec(kind, instance=True, supports_reconfigure=True)
    failed = create_autospec(dist._Work, instance=True)
    failed.wait.side_effect = error
    group.reconfigure.side_effect = [failed if by_work else error, create_autospec(dist._Work, instance=True)]
    group.size.return_value, group.rank.return_value = 2, 0
    group.get_reconfigure_handle.return_value = "a"
    manager = stand_ins.manager(pg=group)
    stand_ins.client._quorum.return_value = upstream_quorum(reconfigure_handles=["a", "b"])
    for calls, expected in ((1, error), (2, None), (2, None)):
        manager.start_quorum()
        manager.wait_quorum()
        assert cause(manager) is expected and group.reconfigure.call_count == calls
        manager.should_commit()


# Works


@pytest.fixture
def reporting() -> MagicMock:
    """A mock of a Manager to which failures are reported."""
    return create_autospec(Manager, instance=True)


def failing(future: object) -> MagicMock:
    work = create_autospec(dist._Work, instance=True)
    work.wait.side_effect = RuntimeError("a peer failed")
    work.get_future.return_value = future
    return work


def test_a_work_that_fails_is_reported(reporting: MagicMock) -> None:
    work, value = failing(MagicMock()), torch.ones(1)
    managed = _ManagedWork(reporting, work, value)
    assert managed.wait() is False
    reporting.report_error.assert_called_once_with(work.wait.side_effect)
    assert managed.get_future().value() is value


@pytest.mark.parametrize("waits", [True, False])
def test_a_hook_on_a_work_that_fails_returns_a_finished_future(reporting: MagicMock, waits: bool) -> None:
    # Its future never completes: only a wait shows that the work has failed.
    work = failing(torch.futures.Future[Any]() if waits else MagicMock())
    futures = []

    def reduce(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        managed = _ManagedWork(reporting, work, bucket.buffer())
        if waits:
            assert not managed.wait()
        futures.append(managed.get_future())
        assert futures[-1].done()
        return futures[-1]

    model = DistributedDataParallel(nn.Linear(2, 1), process_group=ProcessGroupDummy(0, 1))
    model.register_comm_hook(None, lambda state, bucket: reduce(bucket))
    model(torch.ones(1, 2)).backward()
    assert len(futures) == 1 and reporting.report_error.call_count == 1
    assert [p.grad.tolist() for p in model.parameters() if p.grad is not None] == [[[1.0, 1.0]], [1.0]]


class Later(dist._Work):
    """A work that a test completes. Streams can be ordered behind it before it is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.future = torch.futures.Future[Any]()

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future

    def block_current_stream(self) -> None:
        pass

    def is_completed(self) -> bool:
        return self.future.done()


class WorkOfPyTorch27:
    """The methods of PyTorch's work before it had ``block_current_stream``."""

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future[Any]()


def as_double(later: Later, kind: type = dist._Work) -> Any:
    work = create_autospec(kind, instance=True)
    work.get_future.return_value = later.future
    return work


WORKS: dict[str, Callable[[Later], Any]] = {
    "double": as_double,
    "double of PyTorch 2.7's": lambda later: as_double(later, WorkOfPyTorch27),
    "real": lambda later: later,
}


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS.keys())
@pytest.mark.parametrize("fails", [True, False])
def test_a_callback_runs_once_with_the_value(
    reporting: MagicMock, work: Callable[[Later], Any], fails: bool
) -> None:
    later, value, seen = Later(), torch.ones(1), []
    managed = _ManagedWork(reporting, work(later), value)
    managed.get_future().then(lambda done: seen.append(done.value()))
    managed.block_current_stream()
    assert not seen
    if fails:
        later.future.set_exception(RuntimeError("a peer failed"))
    else:
        later.future.set_result("another value")
    assert len(seen) == 1 and seen[0] is value
    assert managed.wait() is not fails and reporting.report_error.call_count == fails


def test_a_work_that_is_finished_before_its_future_is_requested(reporting: MagicMock) -> None:
    later, value, seen = Later(), torch.ones(1), []
    managed = _ManagedWork(reporting, as_double(later), value)
    managed.block_current_stream()
    managed.get_future().then(lambda done: seen.append(done.value()))
    later.future.set_result(None)
    assert len(seen) == 1 and seen[0] is value


class Waited(dist._Work):
    """A work that ends in its wait. Its future completes there, or never.

    Args:
        completes: whether the future completes.
        error: what the wait raises.
    """

    def __init__(self, completes: bool, error: Optional[Exception] = None) -> None:
        super().__init__()
        self.future = torch.futures.Future[Any]()
        self.completes, self.error = completes, error
        self.timeouts: list[Optional[timedelta]] = []

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        self.timeouts.append(timeout)
        if self.completes and not self.future.done():
            if self.error is None:
                self.future.set_result(None)
            else:
                self.future.set_exception(self.error)  # type: ignore[arg-type]
        if self.error is not None:
            raise self.error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future


ENDS = pytest.mark.parametrize("completes", [True, False], ids=["completes", "never"])
OUTCOMES = pytest.mark.parametrize("error", [None, RuntimeError("a peer failed")], ids=["succeeds", "fails"])


@ENDS
@OUTCOMES
@pytest.mark.parametrize("waits", ["work", "future", "then"])
def test_the_wait_of_a_work_decides(
    reporting: MagicMock, completes: bool, error: Optional[Exception], waits: str
) -> None:
    work, value, seen = Waited(completes, error), torch.ones(1), []
    managed = _ManagedWork(reporting, work, value)
    future = managed.get_future()
    following = future.then(lambda done: seen.append(done.value())).then(lambda done: seen.append(value))
    assert not seen and not work.timeouts, "a callback runs in the wait"
    if waits == "work":
        assert managed.wait() is (error is None)
    else:
        (future if waits == "future" else following).wait()
    assert len(seen) == 2 and seen[0] is value and seen[1] is value
    assert future.done() and future.value() is value
    assert managed.wait() is (error is None), "the outcome stays"
    assert [call.args[0] for call in reporting.report_error.call_args_list] == [error] * (error is not None)
    assert len(work.timeouts) == 1 and work.timeouts[0] is not None, (
        "the stand-in of a Manager has no timeout"
    )


def test_a_callback_that_raises_fails_the_futures_behind_it(reporting: MagicMock) -> None:
    managed = _ManagedWork(reporting, Waited(completes=False), torch.ones(1))
    failed = managed.get_future().then(lambda done: 1 / 0)
    assert managed.wait()
    for future in (failed, failed.then(lambda done: done.value())):
        with pytest.raises(ZeroDivisionError):
            future.wait()


def test_a_wait_without_a_timeout_is_called_without_one(reporting: MagicMock) -> None:
    class Simple(dist._Work):
        def wait(self) -> bool:  # type: ignore[override]
            return True

    assert _ManagedWork(reporting, Simple(), torch.ones(1)).wait()
    reporting.report_error.assert_not_called()


MODELS = {
    "ddp": ddp.DistributedDataParallel,
    "static graph": lambda manager, module: ddp.DistributedDataParallel(manager, module, static_graph=True),
    "static graph, many buckets": lambda manager, module: ddp.DistributedDataParallel(
        manager, module, static_graph=True, bucket_cap_mb=1e-5
    ),
    "pure": ddp.PureDistributedDataParallel,
}


@pytest.mark.parametrize("wrap", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("managed", [True, False], ids=["managed", "bare"])
@ENDS
@OUTCOMES
def test_a_backward_pass_ends_with_works_that_end_in_their_wait(
    reporting: MagicMock, wrap: Any, managed: bool, completes: bool, error: Optional[Exception]
) -> None:
    works: list[Waited] = []

    def allreduce(tensor: torch.Tensor) -> dist._Work:
        works.append(Waited(completes, error))
        return _ManagedWork(reporting, works[-1], tensor) if managed else works[-1]

    reporting.allreduce.side_effect = allreduce
    model = wrap(reporting, nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)))
    for steps in range(1, 4):
        works.clear()
        reporting.report_error.reset_mock()
        model(torch.ones(1, 2)).backward()
        assert works and all(len(work.timeouts) == 1 for work in works)
        assert reporting.report_error.call_count == (len(works) if error is not None else 0)
        assert [p.grad.tolist() for p in [*model.parameters()][-1:] if p.grad is not None] == [[float(steps)]]


class Interrupted(Waited):
    """A work that never ends. Its first wait sends a signal to this thread, as Ctrl-C does."""

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        assert timeout is not None
        threading.Thread(target=signal.pthread_kill, args=(threading.get_ident(), signal.SIGINT)).start()
        future_wait(self.future, timeout)
        return True


@pytest.fixture
def interruptible() -> Iterator[None]:
    # SIGINT is ignored if the tests run in the background
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("waits", ["work", "future", "then"])
def test_a_signal_ends_a_wait(reporting: MagicMock, waits: str) -> None:
    managed = _ManagedWork(reporting, Interrupted(completes=False), torch.ones(1))
    future = managed.get_future()
    wait = {"work": managed.wait, "future": future.wait, "then": future.then(lambda done: None).wait}[waits]
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert not future.done()
    reporting.report_error.assert_not_called()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("wrap", MODELS.values(), ids=MODELS.keys())
def test_a_signal_ends_a_backward_pass(reporting: MagicMock, wrap: Any) -> None:
    reporting.allreduce.side_effect = lambda tensor: Interrupted(completes=False)
    model = wrap(reporting, nn.Linear(2, 1))
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 2)).backward()


def test_a_bare_mock_of_a_manager_trains(reporting: MagicMock) -> None:
    model = ddp.DistributedDataParallel(MagicMock(), nn.Linear(2, 1))
    model(torch.ones(1, 2)).backward()
    assert [p.grad.tolist() for p in model.parameters() if p.grad is not None] == [[[1.0, 1.0]], [1.0]]
