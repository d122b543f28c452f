"""A Manager over PyTorch's own groups, whose abort does not end every operation."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from tests.promises import ABORT_S, within
from tests.unit.process_group.ranks import TIMEOUT, in_threads, natives
from torchft._agreement import HEALS, announced
from torchft._torchft import MemberFailure, QuorumResult
from torchft.manager import Manager
from torchft.process_group import ReconfigureOptions
from torchft.process_group._gloo.connections import GlooConnections
from torchft.process_group.native import abort_group, reconfigure_group

if TYPE_CHECKING:
    from tests.unit.manager.conftest import Fixture

pytestmark = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "reconfigure"),
    reason="needs PyTorch >= 2.14, whose groups can be reconfigured",
)

FAILED = MemberFailure(1, "group_0:uuid", "its connection broke")


def waits(work: dist._Work) -> None:
    assert not work.wait()


def asks_for_the_future(work: dist._Work) -> None:
    work.get_future().wait()


def forget(self: GlooConnections) -> None:
    """Replaces `GlooConnections.shutdown`, to simulate an operation that Gloo does not wake when its
    connection breaks.
    """
    self.cut = True


def connected(fixture: Fixture, quorum: Callable[..., QuorumResult]) -> tuple[Manager, dist.ProcessGroup]:
    """Returns a Manager in a quorum of two groups, and the process group of the other one, which is idle."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    peer, own = natives(store, 2)
    handles = [group.get_reconfigure_handle() for group in (peer, own)]
    fixture.client._quorum.return_value = quorum(reconfigure_handles=handles)
    manager = fixture.manager(pg=own, timeout=2 * TIMEOUT)

    def begin() -> None:
        manager.start_quorum()
        manager.wait_quorum()

    def join() -> None:
        opts = ReconfigureOptions()
        opts.uuid, opts.handles, opts.timeout = 1, handles, TIMEOUT
        reconfigure_group(peer, opts)

    assert in_threads([begin, join]) == [None, None]
    assert manager.errored() is None
    sent = fixture.client._quorum.call_args.kwargs["reconfigure_handle"]
    assert announced(sent, HEALS), "native groups wait for those that heal"
    return manager, peer


@pytest.mark.parametrize(
    ("end", "how"),
    [(waits, {}), (asks_for_the_future, {}), (waits, {"should_quantize": True})],
    ids=["wait", "future", "quantized"],
)
def test_a_failure_ends_a_collective_that_gloo_does_not_wake(
    fixture: Fixture,
    make_quorum: Callable[..., QuorumResult],
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[dist._Work], None],
    how: dict[str, Any],
) -> None:
    """Gloo may not wake an operation whose connection breaks, above all in a process that was stopped
    meanwhile. The operation then sleeps until its timeout. Here this is simulated by an abort without effect.
    """
    manager, peer = connected(fixture, make_quorum)
    work = manager.allreduce(torch.ones(64), **how)
    with monkeypatch.context() as forgetful:
        forgetful.setattr(GlooConnections, "shutdown", forget)
        manager._failures.member_failed(FAILED)
        began = time.monotonic()
        end(work)
        assert time.monotonic() - began < within(ABORT_S), "it waited for Gloo"
    assert not manager.should_commit()
    assert "group_0:uuid of quorum 1 failed" in str(manager.errored())
    abort_group(peer)  # ends Gloo's operation


def test_a_group_that_could_not_be_reconfigured_trains_in_the_next_quorum(
    fixture: Fixture, make_quorum: Callable[..., QuorumResult]
) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    peer, own = natives(store, 2)
    handles = [group.get_reconfigure_handle() for group in (peer, own)]
    manager = fixture.manager(pg=own, timeout=2 * TIMEOUT)
    fixture.client._quorum.return_value = make_quorum(reconfigure_handles=[handles[0], "another"])
    manager.start_quorum()
    manager.allreduce(torch.ones(1)).wait()
    assert manager.errored() is not None
    assert not manager.should_commit()
    fixture.client._quorum.return_value = make_quorum(quorum_id=2, reconfigure_handles=handles)
    ours, theirs = torch.tensor([2.0]), torch.tensor([4.0])

    def train() -> None:
        manager.start_quorum()
        assert manager.allreduce(ours).wait()

    def follow() -> None:
        opts = ReconfigureOptions()
        opts.uuid, opts.handles, opts.timeout = 2, handles, TIMEOUT
        reconfigure_group(peer, opts)
        peer.allreduce([theirs]).wait()

    assert in_threads([train, follow]) == [None, None]
    assert ours.tolist() == [3.0] and manager.should_commit() and manager._pg is own


@pytest.mark.parametrize("aborted", [1, 2])
def test_a_group_whose_threads_are_all_occupied_joins_no_quorum(
    fixture: Fixture, make_quorum: Callable[..., QuorumResult], monkeypatch: pytest.MonkeyPatch, aborted: int
) -> None:
    """The two Gloo threads of a native group remain when its peers change. Operations with the next peers
    would wait behind the aborted ones.
    """
    manager, peer = connected(fixture, make_quorum)
    for _ in range(aborted):
        manager.allreduce(torch.ones(64))
    with monkeypatch.context() as forgetful:
        forgetful.setattr(GlooConnections, "shutdown", forget)
        manager._failures.member_failed(FAILED)
        assert not manager.should_commit()
    fixture.client._quorum.side_effect = RuntimeError("asked")
    if aborted == 2:
        with pytest.raises(TimeoutError, match="aborted collectives occupy all 2 threads"):
            manager.start_quorum(timeout=timedelta(milliseconds=50))
        assert fixture.client._quorum.call_count == 1
        threading.Timer(0.1, abort_group, [peer]).start()  # ends Gloo's operation
    manager.start_quorum()
    with pytest.raises(RuntimeError, match="asked"):
        manager.wait_quorum()
    abort_group(peer)
