from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, List
from unittest.mock import MagicMock, create_autospec, patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.profiler import ProfilerActivity, profile, record_function

import torchft
from tests.unit.manager.quorums import Quorum, healing, manager_state, peer_state
from torchft._agreement import CALLS, HEALS, VERSION, announce
from torchft._torchft import ManagerClient
from torchft.checkpointing.transport import CheckpointError
from torchft.ddp import DistributedDataParallel, PureDistributedDataParallel
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import (
    ExceptionWithTraceback,
    Manager,
    WorldSizeMode,
    _ManagedFuture,
)
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupDummy
from torchft.work import _DummyWork

if TYPE_CHECKING:
    from tests.unit.manager.conftest import Fixture


class FailingWork(dist._Work):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def wait(self, timeout: Any = None) -> bool:
        raise self._error

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_exception(self._error)
        return future


class FailingGroup(ProcessGroupDummy):
    def allreduce(self, tensors: List[torch.Tensor], opts: object) -> dist._Work:
        return FailingWork(RuntimeError("connection reset by peer"))


# A step


def test_step_is_committed(fixture: Fixture) -> None:
    manager = fixture.manager()
    assert manager.current_step() == 0 and manager.batches_committed() == 0
    manager.start_quorum()
    tensor = torch.tensor([2.0, 4.0])
    assert manager.allreduce(tensor).wait()
    assert tensor.tolist() == [1.0, 2.0]  # a dummy sums over one group; the quorum has two participants
    assert (
        manager.num_participants() == 2 and manager.participating_rank() == 1 and manager.is_participating()
    )
    assert manager.should_commit()
    assert manager.state_dict() == {"step": 1, "batches_committed": 2}
    fixture.transport.disallow_checkpoint.assert_called_once()


@pytest.mark.parametrize(("of", "requests"), [("torchft", 1), ("upstream", 2)])
def test_optimizers_that_begin_together_share_a_step(
    fixture: Fixture, make_quorum: Quorum, of: str, requests: int
) -> None:
    """With a quorum for each, a group that joins between the two would be one behind the others."""
    texts = ((HEALS, "1"),) if of == "torchft" else ()
    groups = ProcessGroupDummy(0, 1), fixture.pg
    handles = [announce(pg.get_reconfigure_handle(), texts) for pg in groups]
    fixture.client._quorum.return_value = make_quorum(reconfigure_handles=handles, max_step=1)
    manager = fixture.manager()
    manager.load_state_dict({"step": 1, "batches_committed": 1})
    both = [
        OptimizerWrapper(manager, torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0))
        for _ in range(2)
    ]
    for round in (1, 2):
        for optimizer in both:
            optimizer.zero_grad()
        manager.wait_quorum()
        assert fixture.client._quorum.call_count == round * requests
        for optimizer in both:
            optimizer.step()
    assert manager.current_step() == 1 + 2 * requests
    both[0].zero_grad()
    manager.wait_quorum()
    both[0].zero_grad()
    manager.wait_quorum()
    assert fixture.client._quorum.call_count == 2 * requests + 2, (
        "a step that is begun again has another quorum"
    )
    manager.allreduce(torch.ones(2)).wait()
    both[1].zero_grad()
    manager.wait_quorum()
    assert fixture.client._quorum.call_count == 2 * requests + 3, "what was reduced is of the first one alone"


def test_the_quorum_request_has_all_fields(fixture: Fixture, make_quorum: Quorum) -> None:
    manager = fixture.manager(init_sync=False, quorum_timeout=timedelta(seconds=7))
    manager.load_state_dict({"step": 5, "batches_committed": 9})
    fixture.client.should_commit.side_effect = [False]
    manager.start_quorum()
    manager.should_commit()
    manager.start_quorum(shrink_only=True, timeout=timedelta(seconds=3))
    manager.wait_quorum()
    first, second = (call.kwargs for call in fixture.client._quorum.call_args_list)
    assert first == dict(
        group_rank=1,
        step=5,
        checkpoint_metadata="http://me/checkpoint/",
        shrink_only=False,
        timeout=timedelta(seconds=7),
        init_sync=False,
        commit_failures=0,
        reconfigure_handle=announce(
            fixture.pg.get_reconfigure_handle(), ((CALLS, "1"), (HEALS, "1"), (VERSION, torchft.__version__))
        ),
    )
    assert (
        second["shrink_only"] and second["timeout"] == timedelta(seconds=3) and second["commit_failures"] == 1
    )


@pytest.mark.parametrize("reduce_op", [ReduceOp.SUM, ReduceOp.MAX])
def test_other_reductions_are_not_divided(fixture: Fixture, reduce_op: ReduceOp) -> None:
    manager = fixture.manager()
    manager.start_quorum()
    tensor = torch.tensor([2, 4])
    manager.allreduce(tensor, reduce_op=reduce_op).wait()
    assert tensor.tolist() == [2, 4]


def test_average_of_integers_is_refused(fixture: Fixture) -> None:
    manager = fixture.manager()
    manager.start_quorum()
    with pytest.raises(ValueError, match=r"AVG needs a floating point tensor, this one is torch.int64"):
        manager.allreduce(torch.tensor([1]))


@pytest.mark.parametrize("order", ["wait", "future", "wait then future", "future then wait", "twice"])
def test_average_divides_once(fixture: Fixture, order: str) -> None:
    manager = fixture.manager()
    manager.start_quorum()
    tensor = torch.tensor([4.0])
    work = manager.allreduce(tensor)
    if order in ("wait", "wait then future", "twice"):
        assert work.wait()
    if order in ("future", "wait then future", "future then wait"):
        future = work.get_future()
        assert isinstance(future, _ManagedFuture)
        assert future.wait() is tensor
    if order in ("future then wait", "twice"):
        assert work.wait()
    assert tensor.tolist() == [2.0]


def test_chain_of_futures_sees_the_average_and_runs_once(fixture: Fixture) -> None:
    manager = fixture.manager()
    manager.start_quorum()
    calls: list[str] = []

    def note(name: str, add: float) -> Callable[[Any], Any]:
        def run(done: Any) -> Any:
            calls.append(name)
            return done.value() + add

        return run

    future = manager.allreduce(torch.tensor([4.0])).get_future()
    last = future.then(note("first", 10)).then(note("second", 100))
    assert last.wait().tolist() == [112.0]
    assert calls == ["first", "second"]


def test_commit_waits_for_collectives_without_a_wait(fixture: Fixture) -> None:
    fixture.pg = FailingGroup(0, 1)
    manager = fixture.manager()
    manager.start_quorum()
    manager.allreduce(torch.ones(1))
    assert not manager.should_commit()
    assert fixture.votes() == [False]


# Errors


@pytest.mark.parametrize("through_future", [False, True])
def test_failed_collective_costs_the_step_only(fixture: Fixture, through_future: bool) -> None:
    fixture.pg = FailingGroup(0, 1)
    manager = fixture.manager()
    manager.start_quorum()
    tensor = torch.tensor([4.0])
    work = manager.allreduce(tensor)
    if through_future:
        assert work.get_future().wait() is tensor
    assert not work.wait()
    error = manager.errored()
    assert isinstance(error, ExceptionWithTraceback) and "connection reset by peer" in str(error)
    assert tensor.tolist() == [4.0]

    later = manager.allreduce(torch.ones(1))
    assert isinstance(later, _DummyWork) and later.wait()
    assert not manager.should_commit() and fixture.votes() == [False]
    assert manager.current_step() == 0

    fixture.pg.__class__ = ProcessGroupDummy  # the next quorum's group works
    manager.start_quorum()
    assert manager.errored() is None
    manager.allreduce(torch.ones(1)).wait()
    assert manager.should_commit()
    assert fixture.client._quorum.call_args.kwargs["commit_failures"] == 1


def test_first_error_is_the_cause(fixture: Fixture) -> None:
    manager = fixture.manager()
    manager.start_quorum()
    manager.report_error(RuntimeError("first"))
    manager.report_error(RuntimeError("second"))
    error = manager.errored()
    assert error is not None and "first" in str(error)


def test_process_group_error_is_asked_for(fixture: Fixture) -> None:
    manager = fixture.manager()
    manager.start_quorum()
    fixture.pg.errored = MagicMock(return_value=RuntimeError("NCCL"))  # type: ignore[method-assign]
    assert not manager.should_commit()
    assert fixture.votes() == [False]


def test_group_votes_against(fixture: Fixture) -> None:
    manager = fixture.manager()
    fixture.client.should_commit.side_effect = [False]
    manager.start_quorum()
    assert not manager.should_commit()
    assert manager.state_dict() == {"step": 0, "batches_committed": 0}


def test_configure_error_costs_the_step(fixture: Fixture) -> None:
    fixture.pg.configure = MagicMock(side_effect=RuntimeError("no rendezvous"))  # type: ignore[method-assign]
    manager = fixture.manager()
    manager.start_quorum()
    assert isinstance(manager.allreduce(torch.ones(1)), _DummyWork)
    assert "no rendezvous" in str(manager.errored())
    assert not manager.should_commit()


def test_no_quorum_does_not_raise_into_the_model(fixture: Fixture) -> None:
    manager = fixture.manager()
    fixture.client._quorum.side_effect = RuntimeError("lighthouse ended")
    manager.start_quorum()
    assert manager.allreduce(torch.ones(1)).wait()
    with pytest.raises(RuntimeError, match="lighthouse ended"):
        manager.wait_quorum()
    with pytest.raises(RuntimeError, match="lighthouse ended"):
        manager.should_commit()
    fixture.client._quorum.side_effect = None  # a script that caught the error may continue
    manager.start_quorum()
    assert manager.should_commit()


@pytest.mark.parametrize("where", ["metadata", "handle", "begin"])
def test_a_step_that_cannot_begin_has_no_quorum(fixture: Fixture, where: str) -> None:
    """It does not have the quorum of the previous step either."""
    manager = fixture.manager()
    manager.start_quorum()
    assert manager.should_commit()
    failing = MagicMock(side_effect=RuntimeError("cannot begin"))
    with pytest.MonkeyPatch.context() as patch:
        if where == "metadata":
            patch.setattr(fixture.transport, "metadata", failing)
        elif where == "handle":
            patch.setattr(fixture.pg, "get_reconfigure_handle", failing)
        else:
            patch.setattr(manager._rounds, "begin", failing)
        with pytest.raises(RuntimeError, match="cannot begin"):
            manager.start_quorum()
        with pytest.raises(RuntimeError, match="start_quorum must be called"):
            manager.wait_quorum()
    manager.start_quorum()
    assert manager.should_commit()


def test_a_quorum_stands_after_a_step_that_could_not_begin(fixture: Fixture) -> None:
    manager = fixture.manager()
    manager.start_quorum()
    assert manager.should_commit()
    failing = MagicMock(side_effect=RuntimeError("cannot begin"))
    with (
        patch.object(fixture.transport, "metadata", failing),
        pytest.raises(RuntimeError, match="cannot begin"),
    ):
        manager.start_quorum()
    for _ in range(2):
        with patch.object(manager._server, "standing", return_value=manager._quiet):
            manager.start_quorum()
        assert manager.allreduce(torch.ones(1)).wait()
        assert manager.should_commit()
    assert fixture.client._quorum.call_count == 1


def test_synchronous_quorum_raises_at_once(fixture: Fixture) -> None:
    manager = fixture.manager(use_async_quorum=False)
    fixture.client._quorum.side_effect = TimeoutError("too late")
    with pytest.raises(TimeoutError, match="too late"):
        manager.start_quorum()


def test_max_retries(fixture: Fixture) -> None:
    manager = fixture.manager(max_retries=1)
    fixture.client.should_commit.side_effect = lambda *args, **kwargs: False
    manager.start_quorum()
    assert not manager.should_commit()
    manager.start_quorum()
    with pytest.raises(RuntimeError, match=r"2 steps in a row .*, exceeding max_retries=1; the last one: "):
        manager.should_commit()


def test_too_few_participants(fixture: Fixture) -> None:
    manager = fixture.manager(min_replica_size=3)
    manager.start_quorum()
    assert not manager.should_commit()
    assert fixture.votes() == [False]


def test_start_quorum_first(fixture: Fixture) -> None:
    manager = fixture.manager()
    for call in (manager.wait_quorum, manager.should_commit, lambda: manager.allreduce(torch.ones(1))):
        with pytest.raises(
            RuntimeError, match=r"no step has begun, start_quorum must be called .*OptimizerWrapper"
        ):
            call()
    assert manager.errored() is None


@pytest.mark.parametrize("algorithm", [None, LocalSGD, DiLoCo])
def test_only_local_sgd_and_diloco_ask_for_each_step(fixture: Fixture, algorithm: Any) -> None:
    """Their quorums do not stand: a synchronization is rare, and another group joins only there."""
    manager = fixture.manager(use_async_quorum=False)
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    inner, outer = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    if algorithm is not None:
        algorithm(
            manager, *([[model], inner, outer] if algorithm is DiLoCo else [model, inner]), sync_every=2
        )
    assert manager._rounds is not None
    with patch.object(manager._rounds, "begin", wraps=manager._rounds.begin) as begin:
        manager.start_quorum()
    assert begin.call_args.args[1].asks_each_step == (algorithm is not None)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, PureDistributedDataParallel])
@pytest.mark.parametrize("settings", [{}, {"static_graph": True}])
def test_an_optimizer_that_is_not_wrapped_is_an_error_of_backward(
    fixture: Fixture, wrap: Any, settings: dict[str, bool]
) -> None:
    """Otherwise the loop would train on gradients that are not reduced."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = wrap(fixture.manager(), model, **(settings if wrap is DistributedDataParallel else {}))
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"backward: no step has begun, .*OptimizerWrapper"):
        ddp(torch.ones(1, 2)).sum().backward()


def test_a_loss_is_reduced_after_the_vote(fixture: Fixture) -> None:
    manager = fixture.manager()
    manager.start_quorum()
    assert manager.should_commit()
    loss = torch.tensor([4.0])
    assert manager.allreduce(loss).wait() and loss.tolist() == [2.0]


def test_there_are_no_participants_before_the_first_quorum(fixture: Fixture) -> None:
    manager = fixture.manager()
    assert manager.num_participants() == 0
    assert manager.participating_rank() is None
    assert manager.is_participating() is False
    manager.start_quorum()
    assert (manager.num_participants(), manager.participating_rank(), manager.is_participating()) == (
        2,
        1,
        True,
    )


def test_wrap_future(fixture: Fixture) -> None:
    manager = fixture.manager()
    manager.start_quorum()
    manager.wait_quorum()
    good: torch.futures.Future[int] = torch.futures.Future()
    good.set_result(1)
    assert manager.wrap_future(good, 2).wait() == 1
    assert manager.errored() is None
    never: torch.futures.Future[int] = torch.futures.Future()
    assert manager.wrap_future(never, 2, timeout=timedelta(milliseconds=10)).wait() == 2
    assert manager.errored() is not None


# Quorums and the process group


@pytest.mark.parametrize("heals", [True, False])
def test_a_profile_shows_the_ranges_of_upstream(
    fixture: Fixture, make_quorum: Quorum, monkeypatch: pytest.MonkeyPatch, heals: bool
) -> None:
    ranges: list[str] = []

    def noted(name: str) -> record_function:
        ranges.append(name)
        return record_function(name)

    # A profile shows only the ranges of its own thread.
    monkeypatch.setattr("torchft._manager.observe.own_time.record_function", noted)
    fixture.client._quorum.return_value = (
        healing(make_quorum) if heals else make_quorum(recover_dst_replica_ranks=[0])
    )
    fixture.transport.recv_checkpoint.return_value = peer_state()
    manager = fixture.manager()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        manager.start_quorum()
        manager.allreduce(torch.ones(1)).wait()
        assert manager.should_commit()
    transfer = f"_checkpoint_transport::{'recv' if heals else 'send'}_checkpoint"
    of_step = ["start_quorum", "wait_quorum", "allreduce", "should_commit", "_async_quorum", "_pg::configure"]
    of_waits = [f"should_commit::{stream}_stream::synchronize" for stream in ("recovery", "current")]
    assert {f"torchft::manager::{name}" for name in [*of_step, *of_waits, transfer]} == set(ranges)
    seen = {event.name for event in profiled.events()}
    assert {f"torchft::manager::{name}" for name in ("start_quorum", "allreduce", "should_commit")} <= seen
    ranges.clear()
    manager.start_quorum()
    manager.wait_quorum()
    assert ranges == [], "nothing is profiled"


def test_other_projects_read_the_state_by_name(fixture: Fixture, make_quorum: Quorum) -> None:
    manager = fixture.manager(use_async_quorum=True, quorum_timeout=timedelta(seconds=7))
    fixture.client._quorum.return_value = make_quorum(quorum_id=5)
    manager.start_quorum()
    manager.wait_quorum()
    assert (manager._participating_replica_rank, manager._participating_replica_world_size) == (1, 2)
    assert manager._errored is None and manager._pending_state_dict is None and not manager._healing
    manager.report_error(error := RuntimeError("bad batch"))
    assert manager._errored is not None and manager._errored.original_exception is error
    assert not manager.should_commit()
    assert (manager._step, manager._quorum_id, manager._commit_failures, manager._batches_committed) == (
        0,
        5,
        1,
        0,
    )
    manager.start_quorum()
    assert manager.should_commit()
    assert (manager._step, manager._commit_failures, manager._batches_committed) == (1, 0, 2)
    assert (manager._replica_id, manager._group_rank, manager._use_async_quorum) == ("group_1:uuid", 1, True)
    assert (manager._timeout, manager._quorum_timeout) == (timedelta(seconds=10), timedelta(seconds=7))
    assert manager._client is fixture.client and manager._pg is fixture.pg
    assert manager._load_state_dict_fns.keys() == manager._user_state_dicts.keys() == {"default"}
    assert manager._manager_state_dict() == manager_state(step=1, batches=2)
    with manager._state_dict_lock.w_lock():
        pass


def test_replacements_by_other_projects_have_an_effect(fixture: Fixture, make_quorum: Quorum) -> None:
    manager = fixture.manager()
    manager._client = client = create_autospec(ManagerClient, instance=True)
    client._quorum.return_value = make_quorum(quorum_id=3)
    manager._step, manager._timeout, manager._quorum_timeout = 5, timedelta(seconds=3), timedelta(seconds=4)
    manager._quorum_id = 3  # the process group then has the peers of this quorum
    work = MagicMock(wait=MagicMock(return_value=True))
    fixture.pg.allreduce = lambda *_: work  # type: ignore[method-assign,assignment]
    fixture.pg.configure = configure = MagicMock()  # type: ignore[method-assign]
    manager.start_quorum()
    manager.allreduce(torch.ones(1)).wait()
    manager.should_commit()
    assert client._quorum.call_args.kwargs["step"] == 5
    assert client._quorum.call_args.kwargs["timeout"] == timedelta(seconds=4)
    assert client.should_commit.call_args.kwargs["timeout"] == timedelta(seconds=3)
    configure.assert_not_called()
    work.wait.assert_called_with(timedelta(seconds=3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_replica_size": 0}, "min_replica_size=0"),
        ({"max_retries": -1}, "max_retries=-1"),
        ({"state_dict": None}, "belong together"),
        ({"timeout": timedelta(0)}, "timeout=0s"),
    ],
)
def test_bad_settings(fixture: Fixture, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fixture.manager(**given)


def test_spare_contributes_zeros(fixture: Fixture, make_quorum: Quorum) -> None:
    fixture.client._quorum.return_value = make_quorum(max_replica_rank=1, max_world_size=2)
    manager = fixture.manager(world_size_mode=WorldSizeMode.FIXED_WITH_SPARES, min_replica_size=1)
    manager.start_quorum()
    tensor = torch.ones(2)
    manager.allreduce(tensor).wait()
    assert tensor.tolist() == [0.0, 0.0]
    assert manager.participating_rank() is None and manager.num_participants() == 1


# Hooks, settings, aborts and shutdown


def test_commit_hook(fixture: Fixture) -> None:
    manager = fixture.manager()
    seen: list[Any] = []
    manager.register_commit_hook(lambda *args: 1 / 0)  # logged, and the others still run
    manager.register_commit_hook(lambda *args: seen.append(args))
    fixture.client.should_commit.side_effect = [True, False]
    for _ in range(2):
        manager.start_quorum()
        manager.should_commit()
    assert seen == [(0, True, 2), (1, False, 2)]


@pytest.mark.parametrize(
    ("given", "env", "expected"),
    [(None, None, True), (None, "0", False), (True, "0", True), (False, None, False)],
)
def test_error_bus_setting(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch, given: Any, env: Any, expected: bool
) -> None:
    monkeypatch.delenv("TORCHFT_FAILURE_BUS", raising=False)
    if env is not None:
        monkeypatch.setenv("TORCHFT_FAILURE_BUS", env)
    assert fixture.manager(enable_error_bus=given)._failures.enabled is expected


def test_step_is_the_quorums_also_when_the_heal_fails(fixture: Fixture, make_quorum: Quorum) -> None:
    """All ranks of a group vote on the same step, including a rank whose heal fails."""
    manager = fixture.manager()
    manager.load_state_dict({"step": 3, "batches_committed": 6})
    fixture.client._quorum.return_value = healing(make_quorum)
    fixture.transport.recv_checkpoint.side_effect = RuntimeError("source failed")
    manager.start_quorum()
    assert manager.num_participants() == 1 and manager.current_step() == 20
    assert not manager.should_commit()
    assert fixture.client.should_commit.call_args.args[1] == 20
    assert manager.current_step() == 3


def test_error_bus_setting_that_is_neither(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_FAILURE_BUS", "yes")
    with pytest.raises(ValueError, match=r"TORCHFT_FAILURE_BUS='yes': allowed are 0 \(off\) and 1 \(on\)"):
        fixture.manager()


def test_timeouts_of_calls_are_checked(fixture: Fixture) -> None:
    manager = fixture.manager()
    for call in (manager.start_quorum, manager.should_commit):
        with pytest.raises(ValueError, match="timeout=0s: must be longer than 0s"):
            call(timeout=timedelta(0))


def test_failed_collective_aborts_the_group_once(fixture: Fixture) -> None:
    fixture.pg = FailingGroup(0, 1)
    fixture.pg.abort = MagicMock()  # type: ignore[method-assign]
    manager = fixture.manager()
    manager.start_quorum()
    assert not manager.allreduce(torch.ones(1)).wait()
    manager.allreduce(torch.ones(1)).wait()
    assert not manager.should_commit()
    fixture.pg.abort.assert_called_once_with()


@pytest.mark.parametrize("through_future", [False, True])
def test_a_reported_error_aborts_once(fixture: Fixture, through_future: bool) -> None:
    """The peers must not wait for what this rank does not reduce any more."""
    fixture.pg.abort = MagicMock()  # type: ignore[method-assign]
    manager = fixture.manager()
    manager.start_quorum()
    manager.allreduce(torch.ones(1)).wait()
    if through_future:
        failed = torch.futures.Future[None]()
        failed.set_exception(RuntimeError("bad gradient"))  # type: ignore[arg-type]
        manager.wrap_future(failed, None).wait()
    else:
        manager.report_error(RuntimeError("bad gradient"))
    fixture.pg.abort.assert_called_once_with()
    assert isinstance(manager.allreduce(torch.ones(1)), _DummyWork)
    manager.report_error(RuntimeError("another one"))
    assert not manager.should_commit()
    fixture.pg.abort.assert_called_once_with()


def test_an_error_that_is_reported_while_the_group_connects_aborts_when_it_is_connected(
    fixture: Fixture,
) -> None:
    """An abort would end the connecting, for which the peers wait."""
    connects, goes_on = threading.Event(), threading.Event()
    fixture.pg.configure = lambda *args, **kwargs: (connects.set(), goes_on.wait(30))  # type: ignore[method-assign]
    fixture.pg.abort = MagicMock()  # type: ignore[method-assign]
    manager = fixture.manager()
    manager.start_quorum()
    assert connects.wait(30)
    manager.report_error(RuntimeError("bad batch"))
    fixture.pg.abort.assert_not_called()
    goes_on.set()
    manager.wait_quorum()
    fixture.pg.abort.assert_called_once_with()
    assert not manager.should_commit()


@pytest.mark.parametrize("votes", [True, False])
def test_after_an_abort_the_next_quorum_has_other_connections(fixture: Fixture, votes: bool) -> None:
    manager = fixture.manager()
    manager.start_quorum()
    manager.wait_quorum()
    manager.report_error(RuntimeError("bad batch"))
    if votes:
        assert not manager.should_commit()
    manager.start_quorum()
    assert manager.should_commit()
    manager.start_quorum()
    assert manager.should_commit()
    requests = [call.kwargs for call in fixture.client._quorum.call_args_list]
    assert [request["commit_failures"] for request in requests] == [0, 1, 0]


@pytest.mark.parametrize("began", [True, False])
def test_an_error_that_is_reported_between_two_steps_aborts_nothing(fixture: Fixture, began: bool) -> None:
    fixture.pg.abort = MagicMock()  # type: ignore[method-assign]
    manager = fixture.manager()
    if began:
        manager.start_quorum()
        assert manager.should_commit()
    manager.report_error(RuntimeError("bad batch"))
    fixture.pg.abort.assert_not_called()
    manager.start_quorum()
    assert manager.should_commit()


@pytest.mark.parametrize("error", [ValueError("size mismatch"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_load_that_fails_half_way(fixture: Fixture, make_quorum: Quorum, error: BaseException) -> None:
    """Some of the weights are then the peer's, so nothing is committed until a heal succeeds.

    A notebook may go on after Ctrl-C.
    """
    fails = [True, False]

    def load_optimizer(_: Any) -> None:
        if fails.pop(0):
            raise error

    manager = fixture.manager()
    manager.register_state_dict_fn("optimizer", load_optimizer, dict)
    manager.load_state_dict({"step": 7, "batches_committed": 7})
    fixture.client._quorum.return_value = healing(make_quorum)
    fixture.transport.recv_checkpoint.return_value = peer_state(user={"default": "weights", "optimizer": {}})
    manager.start_quorum()
    with contextlib.suppress(KeyboardInterrupt):
        assert not manager.should_commit() and manager.current_step() == 7

    fixture.client._quorum.return_value = make_quorum(max_step=7)  # no group is ahead of this one
    manager.start_quorum()
    with pytest.raises(RuntimeError, match=r"weights are of no step.*no group to heal from"):
        manager.should_commit()

    fixture.client._quorum.return_value = healing(make_quorum)
    manager.start_quorum()
    assert manager.should_commit() and manager.current_step() == 21
    fixture.client._quorum.return_value = make_quorum(max_step=21)
    manager.start_quorum()
    assert manager.should_commit()


def test_shutdown_leaves_no_thread(fixture: Fixture) -> None:
    before = set(threading.enumerate())
    manager: Manager = fixture.manager()
    manager.start_quorum()
    manager.should_commit()
    started = [t for t in threading.enumerate() if t.name.startswith("torchft_quorum") and t not in before]
    assert started
    manager.shutdown()
    assert not any(t.is_alive() for t in started)
    fixture.transport.shutdown.assert_called_with(wait=True)


def test_shutdown_ends_a_heal(fixture: Fixture, make_quorum: Quorum) -> None:
    """It would go on as long as data arrives."""
    begun, abandoned = threading.Event(), threading.Event()

    def receive(**_: Any) -> None:
        begun.set()
        assert abandoned.wait(60)
        raise RuntimeError("aborted")

    fixture.transport.recv_checkpoint.side_effect = receive
    fixture.transport.abandon_receiving = lambda reason: abandoned.set()
    fixture.client._quorum.return_value = healing(make_quorum)
    manager = fixture.manager()
    manager.start_quorum()
    assert begun.wait(20)
    manager.shutdown()
    assert abandoned.is_set()
    with pytest.raises(RuntimeError, match="shut down"):
        manager.start_quorum()


def test_shutdown_ends_all_parts_even_if_one_raises(fixture: Fixture) -> None:
    manager = fixture.manager()
    manager._manager = server = MagicMock()
    fixture.transport.shutdown.side_effect = OSError("transport")
    server.shutdown.side_effect = RuntimeError("server")
    try:
        with pytest.raises(RuntimeError, match="server"):
            manager.shutdown()
        fixture.client.shutdown.assert_called_once_with()
        with pytest.raises(RuntimeError, match="shut down"):
            manager.start_quorum()
    finally:
        fixture.transport.shutdown.side_effect = server.shutdown.side_effect = None


def test_finish_serving_waits_for_the_step_and_then_for_the_readers(
    fixture: Fixture, make_quorum: Quorum
) -> None:
    """Streaming DiLoCo changes its state while a step is in progress. A healing group must not read a partial
    change.
    """
    manager = fixture.manager(use_async_quorum=False)
    manager.start_quorum()
    manager.finish_serving()
    fixture.transport.disallow_checkpoint.assert_not_called()  # no group heals from this one
    fixture.client._quorum.return_value = make_quorum(quorum_id=2, recover_dst_replica_ranks=[0])
    manager.start_quorum()
    fixture.transport.send_checkpoint.assert_called_once()
    order: list[str] = []
    fixture.transport.disallow_checkpoint.side_effect = lambda: order.append("not served any more")
    work = manager.allreduce(torch.ones(2))
    wait = work.wait
    work.wait = lambda *timeout: (order.append("collective"), wait(*timeout))[1]  # type: ignore[method-assign]
    manager.finish_serving()
    assert order == ["collective", "not served any more"]


@pytest.mark.parametrize("in_mid_step", [False, True])
def test_a_source_continues_when_its_target_has_failed(
    fixture: Fixture, make_quorum: Quorum, in_mid_step: bool
) -> None:
    """With a process group on a device, only the wait for the end of a transfer shows that it has failed."""
    fixture.pg.abort = MagicMock()  # type: ignore[method-assign]
    manager = fixture.manager(use_async_quorum=False)
    fixture.client._quorum.return_value = make_quorum(recover_dst_replica_ranks=[0])
    fixture.transport.disallow_checkpoint.side_effect = CheckpointError("the group was aborted")
    manager.start_quorum()
    if in_mid_step:
        manager.finish_serving()
    assert manager.should_commit()
    # The transfer must not complete with a state that changes meanwhile.
    fixture.pg.abort.assert_called_once()
