"""The adapters in edge.py for clients, transports and process groups of other projects."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest

from tests.unit.manager.test_rounds import LONG, REQUEST, UPSTREAM, Followed
from torchft._manager.edge import GroupServer, Transport, _NativeServer, as_peers, as_server, work_kind
from torchft._manager.quorum.rounds import Rounds
from torchft._torchft import ManagerClient, QuorumResult
from torchft.checkpointing import CheckpointTransport
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupDummy,
    ProcessGroupGloo,
)
from torchft.work import _DummyWork

SOON = timedelta(seconds=3)


class UpstreamClient:
    """Exactly the methods of upstream's client."""

    def __init__(self, addr: str, connect_timeout: timedelta) -> None:
        self.result: Any = QuorumResult(quorum_id=3)
        self.votes: list[Any] = []

    def _quorum(self, **request: Any) -> Any:
        assert request == UPSTREAM
        return self.result

    def should_commit(self, group_rank: int, step: int, should_commit: bool, timeout: timedelta) -> bool:
        self.votes.append((group_rank, step, should_commit, timeout))
        return should_commit


@pytest.fixture
def server() -> GroupServer:
    return as_server(UpstreamClient("http://m:1", connect_timeout=SOON), 2)


def test_a_client_with_the_methods_of_upstream_suffices(server: GroupServer) -> None:
    followed = Followed()
    rounds = Rounds(server.ask)
    rounds.begin(followed, REQUEST, LONG).result()
    assert followed.by[0][0].quorum_id == 3
    assert server.vote(5, True, SOON) and server.client.votes == [(2, 5, True, SOON)]
    server.listen({"failed": lambda _: pytest.fail("no notices can be received")})
    server.suspect(3, ["b"])
    server.report("counted", name="nonfinite_syncs", number=1)
    server.leave(SOON)
    server.close()
    server.join()
    rounds.shutdown(wait=False)


@pytest.mark.parametrize(
    "stand_in", [SimpleNamespace(quorum_id=3, max_step=5), MagicMock(quorum_id=3, max_step=5)]
)
def test_a_result_of_another_class_gets_all_fields(server: GroupServer, stand_in: Any) -> None:
    server.client.result = stand_in
    followed = Followed()
    rounds = Rounds(server.ask)
    rounds.begin(followed, REQUEST, LONG).result()
    (result, _), *_ = followed.by
    assert (result.quorum_id, result.max_step, result.draining, result.replay) == (3, 5, False, False)
    rounds.shutdown(wait=False)


def test_a_double_of_our_client_is_used_by_its_methods() -> None:
    double = MagicMock(spec=ManagerClient)
    server = as_server(double, 0)
    assert type(server) is GroupServer, "a test double would return notices at once and without end"
    server.leave(SOON)
    server.close()
    double._leave.assert_called_once_with(SOON)
    double.shutdown.assert_called_once_with()


@pytest.mark.parametrize(("yes", "committed"), [(True, True), (True, False), (False, False)])
def test_the_decision_of_our_manager_server_counts(yes: bool, committed: bool) -> None:
    assert (
        _NativeServer(MagicMock(should_commit=lambda *_, **__: committed), 0).vote(5, yes, SOON) is committed
    )


def test_a_commit_against_this_ranks_vote_is_an_error() -> None:
    server = _NativeServer(MagicMock(should_commit=lambda *_, **__: True), 0)
    with pytest.raises(RuntimeError, match="committed step 5, which this rank voted against"):
        server.vote(5, False, SOON)


class UpstreamTransport:
    """A transport that is not derived from torchft's class."""

    def metadata(self) -> str:
        return "where"

    def recv_checkpoint(self, **what: Any) -> Any:
        return what


def test_a_transport_with_the_methods_of_upstream_suffices() -> None:
    transport = Transport(UpstreamTransport())  # type: ignore[arg-type]
    assert transport.metadata() == "where" and transport.recv_checkpoint(step=3) == {"step": 3}
    assert not (transport.several_sources or transport.takes_target or transport.in_place)
    transport.refuse_checkpoint(dst_ranks=[0], step=3, reason="none", timeout=SOON)
    assert not transport.abandon_receiving(RuntimeError("its source failed"))


def test_a_double_of_a_transport_has_the_abilities_of_upstreams() -> None:
    double = create_autospec(CheckpointTransport, instance=True)
    transport = Transport(double)
    assert not (transport.several_sources or transport.takes_target or transport.in_place)
    double.abandon_receiving = MagicMock()  # some transports have this method
    transport = Transport(double)
    error = RuntimeError("its source failed")
    assert transport.abandon_receiving(error)
    double.abandon_receiving.assert_called_once_with(error)


def test_a_process_group_with_the_methods_of_a_native_one_suffices() -> None:
    group = SimpleNamespace(
        supports_reconfigure=True, get_reconfigure_handle=lambda: "handle", errored=lambda: None
    )
    peers = as_peers(group)  # type: ignore[arg-type]
    peers.set_rank_info("g:uuid", 0, 1)
    peers.announce_layout("digest", "lines")
    assert peers.handle() == "handle" and peers.error() is None


class OfAnotherProject(ProcessGroup):
    pass


@pytest.mark.parametrize(
    ("group", "ours"),
    [
        (ProcessGroupGloo(), True),
        (type("WithLogs", (ProcessGroupGloo,), {})(), True),
        (type("WithLogs", (ErrorSwallowingProcessGroupWrapper,), {})(ProcessGroupGloo()), True),
        (ProcessGroupDummy(0, 1), True),
        (OfAnotherProject(0, 1), False),
        (create_autospec(ProcessGroupGloo, instance=True, supports_reconfigure=True), False),
    ],
    ids=["torchft's", "derived", "derived wrapper", "dummy", "of another project", "double"],
)
def test_weights_are_compared_by_default_with_a_group_derived_from_one_of_torchft(
    group: Any, ours: bool
) -> None:
    assert as_peers(group).ours is ours


def test_a_work_derived_from_one_of_torchft_has_its_abilities() -> None:
    class Logged(_DummyWork):
        pass

    assert work_kind(Logged(None)) == work_kind(_DummyWork(None))
