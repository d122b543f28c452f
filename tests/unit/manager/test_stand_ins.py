"""A Manager over stand-ins of `unittest.mock`, as projects make them to test code of their own.

Nothing is set on them but what the published package's classes have.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Optional
from unittest.mock import MagicMock, create_autospec, patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from torchft._torchft import ManagerClient, QuorumResult
from torchft.checkpointing import CheckpointTransport
from torchft.manager import MANAGER_ADDR_KEY, REPLICA_ID_KEY, Manager
from torchft.process_group import ProcessGroup
from torchft.work import _DummyWork


def published(**fields: Any) -> QuorumResult:
    """A quorum of two groups with some of the published fields, set one by one; it names no groups."""
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
    """What a Manager works with.

    Attributes:
        client, pg, transport: stand-ins.
        loaded: what was loaded.
    """

    def __init__(self, client: MagicMock, store: TCPStore) -> None:
        self.client = client
        self.client._quorum.return_value = published()
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
        built = StandIns(client_class(), store)  # without arguments, as in the published package
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
def test_a_real_client_says_what_is_missing(given: dict[str, Any], missing: str) -> None:
    with pytest.raises(TypeError, match=f"ManagerClient: missing {missing}"):
        ManagerClient(**given)


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_steps_with_a_stand_in_of_a_client(stand_ins: StandIns, use_async_quorum: bool) -> None:
    stand_ins.client._quorum.return_value = published(max_replica_rank=1)
    manager = stand_ins.manager(use_async_quorum=use_async_quorum)
    for step in range(3):
        manager.start_quorum()
        tensor = torch.tensor([4.0])
        manager.allreduce(tensor).wait()
        assert tensor.tolist() == [2.0]
        assert manager.should_commit() and manager.errored() is None
        assert manager.current_step() == step + 1


def test_a_heal_by_published_fields(stand_ins: StandIns) -> None:
    stand_ins.client._quorum.return_value = published(**HEAL)
    state = {"user": {"default": {"weights": 1}}, "torchft": {"step": 20, "batches_committed": 40}}
    stand_ins.transport.recv_checkpoint.return_value = state
    manager = stand_ins.manager()
    manager.start_quorum()
    assert manager.should_commit(), manager.errored()
    assert manager.current_step() == 21 and stand_ins.loaded == [{"weights": 1}]


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
    stand_ins.client._quorum.return_value = published(reconfigure_handles=["a", "b"])
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
    stand_ins.client._quorum.return_value = published(**fields)
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


def test_the_future_of_an_allreduce_is_asked_for_once(stand_ins: StandIns) -> None:
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


# Process groups


class NativeLike:
    """What a Manager calls of PyTorch's own reconfigurable groups, and no more. The first reconfiguration fails."""

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


def test_a_native_group_is_reconfigured_after_a_failure(stand_ins: StandIns) -> None:
    group = NativeLike()
    manager = stand_ins.manager(pg=group)
    stand_ins.client.should_commit.side_effect = lambda group_rank, step, should_commit, timeout: should_commit
    for quorum_id, committed in ((1, False), (2, True), (2, True)):
        stand_ins.client._quorum.return_value = published(
            quorum_id=quorum_id, max_replica_rank=1, reconfigure_handles=["a", "b"]
        )
        manager.start_quorum()
        manager.allreduce(torch.ones(1)).wait()
        assert (cause(manager) is None) is committed
        assert manager.should_commit() is committed
    assert group.quorums == [1, 2]
    requests = [call.kwargs for call in stand_ins.client._quorum.call_args_list]
    assert [request["commit_failures"] for request in requests] == [0, 1, 0]  # the lighthouse then gives a new id
