"""A new member makes the same calls as an older group in its first step, or sends nothing and ends."""

from __future__ import annotations

import logging
import socket
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from torch.distributed import ReduceOp, TCPStore

from torchft._agreement import CALLS, announce
from torchft._manager.checks.calls import Calls, describe_call, judge_of
from torchft._manager.checks.layout import LayoutDiffers, read_layout
from torchft._manager.quorum.plan import HealSource, Plan
from torchft._manager.rank import RankState
from torchft.process_group.reconfigure import Handle

SHORT = timedelta(milliseconds=100)
ONE = torch.ones(2, 3)


def plan(
    me: int, max_step: int = 7, source: Optional[int] = None, handles: Optional[list[str]] = None
) -> Plan:
    fields: dict[str, Any] = dict.fromkeys(Plan.__dataclass_fields__)
    fields.update(
        quorum_id=3,
        replica_rank=me,
        replica_ids=["a", "b"],
        handles=handles or [],
        max_step=max_step,
        source=None if source is None else HealSource(source, "http://source", str(source)),
    )
    return Plan(**fields)


@pytest.mark.parametrize(
    ("the_plan", "new_here", "judge"),
    [
        (plan(0), False, None),  # an older group
        (plan(1, source=0), True, 0),
        (plan(0, source=1), True, 1),
        (plan(1, source=0), False, 0),  # it heals: it was away
        (plan(0, max_step=0), True, None),  # at step 0 the first group decides
        (plan(0, max_step=0, source=1), True, None),
        (plan(1, max_step=0), True, 0),
        (plan(1, max_step=40), True, 0),  # all groups begin with a checkpoint of step 40
    ],
)
def test_with_which_group_a_new_one_compares(the_plan: Plan, new_here: bool, judge: Optional[int]) -> None:
    assert judge_of(the_plan, new_here) == judge


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        (describe_call(torch.ones(6), ReduceOp.SUM, False), True),  # as many bytes
        (describe_call(ONE, ReduceOp(ReduceOp.SUM), False), True),
        (describe_call(torch.ones(2, 4), ReduceOp.SUM, False), False),
        (describe_call(ONE.double(), ReduceOp.SUM, False), False),
        (describe_call(ONE.int(), ReduceOp.SUM, False), False),
        (describe_call(ONE, ReduceOp.AVG, False), False),
        (describe_call(ONE, ReduceOp.SUM, True), False),
        (describe_call(ONE.to_sparse(), ReduceOp.SUM, False), False),
    ],
)
def test_which_calls_fit_together(other: str, equal: bool) -> None:
    assert (describe_call(ONE, ReduceOp.SUM, False) == other) is equal


class Two:
    """An older group, and one that joins."""

    def __init__(self) -> None:
        self.stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
        bare = [
            Handle(id=str(i), store=f"127.0.0.1:{store.port}").encode() for i, store in enumerate(self.stores)
        ]
        self.handles = [announce(handle, ((CALLS, "1"),)) for handle in bare]
        self.failure: Optional[Exception] = None
        self.rank_state = RankState(SHORT)
        self.older, self.newer = (Calls(self._check, self.rank_state, logging.getLogger()) for _ in range(2))  # type: ignore[arg-type]
        self.collectives: Any = SimpleNamespace(aborted=False)

    def begin(self, quorum_id: int = 3) -> None:
        for calls, me, source in ((self.older, 0, None), (self.newer, 1, 0)):
            one = plan(me, source=source, handles=self.handles)
            object.__setattr__(one, "quorum_id", quorum_id)
            calls.begin(one, new_here=source is not None)

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def call(self, calls: Calls, tensor: torch.Tensor = ONE) -> None:
        calls.check(self.collectives, tensor, ReduceOp.SUM, False)


@pytest.fixture
def two() -> Two:
    return Two()


def test_the_same_calls(two: Two) -> None:
    two.begin()
    for tensor in (ONE, torch.ones(4, dtype=torch.int64)):
        two.call(two.older, tensor)  # does not wait
        two.call(two.newer, tensor)
    for calls in (two.older, two.newer):
        calls.end(lost=False)
    assert two.newer.differs is None
    two.call(two.newer, torch.ones(5))  # after the step nothing is compared


def test_another_call_in_the_middle(two: Two) -> None:
    two.begin()
    two.call(two.older)
    two.call(two.older, torch.ones(4))
    two.call(two.newer)
    with pytest.raises(
        LayoutDiffers, match=r"call 1 of the step differs: .* 5 x .* here, .* 4 x .* in a; allowed"
    ):
        two.call(two.newer, torch.ones(5))
    assert two.newer.differs is not None and two.newer.differs.must_end


def test_one_call_too_many(two: Two) -> None:
    two.begin()
    two.call(two.older)
    two.older.end(lost=False)
    two.call(two.newer)
    with pytest.raises(LayoutDiffers, match=r"call 1 of the step differs: .* here, no further call in a"):
        two.call(two.newer)


def test_the_other_group_loses_the_step(two: Two) -> None:
    two.begin()
    two.older.end(lost=True)
    with pytest.raises(RuntimeError, match="a, with which the first calls are compared, has lost the step"):
        two.call(two.newer)
    assert two.newer.differs is None  # the next step with new peers compares again
    two.begin(quorum_id=4)
    two.call(two.older)
    two.call(two.newer)
    assert not two.stores[0].check(["calls/3/7/0"])  # the calls before are dropped


def test_a_handle_that_names_another_store(two: Two) -> None:
    two.begin()
    two.call(two.older)
    two.stores[0] = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    two.handles[0] = announce(
        Handle(id="0", store=f"127.0.0.1:{two.stores[0].port}").encode(), ((CALLS, "1"),)
    )
    two.begin(quorum_id=4)
    two.call(two.older)
    two.call(two.newer)
    assert two.stores[0].check(["calls/4/7/0"])


def test_the_wait_uses_the_present_timeout(two: Two) -> None:
    two.begin()
    two.rank_state.timeout = timedelta(milliseconds=50)
    with pytest.raises(TimeoutError, match=r"did not make call 0 of the step in 0:00:00.05"):
        two.call(two.newer)


def test_an_unknown_operation_is_described_equally() -> None:
    assert describe_call(ONE, object(), False) == "allreduce of 6 x float32 (another operation)"  # type: ignore[arg-type]


@pytest.mark.parametrize("cause", ["time", "peer", "abort"])
def test_the_wait_for_the_other_group_ends(two: Two, cause: str) -> None:
    two.begin()
    two.failure = ValueError("a peer has failed") if cause == "peer" else None
    two.collectives.aborted = cause == "abort"
    error = {"time": "a did not make call 0", "peer": "a peer has failed", "abort": "were aborted"}[cause]
    with pytest.raises((TimeoutError, RuntimeError, ValueError), match=error):
        two.call(two.newer)


def test_a_peer_that_lists_no_calls_is_not_compared(two: Two) -> None:
    two.handles[0] = Handle(id="0", store=f"127.0.0.1:{two.stores[0].port}").encode()
    two.begin()
    two.call(two.newer)


def test_a_store_that_cannot_be_reached_costs_no_step(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchft._manager.checks.calls._CONNECT_TIMEOUT", SHORT)
    two.handles[0] = announce(Handle(id="0", store="127.0.0.1:1").encode(), ((CALLS, "1"),))
    one = plan(1, source=0, handles=two.handles)
    two.newer._logger = SimpleNamespace(warn=(warned := []).append)  # type: ignore[assignment]
    two.newer.begin(one, new_here=True)
    two.call(two.newer)
    assert "the first calls in quorum 3 are not compared" in warned[0]


def test_a_store_that_stops_to_answer(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other group is suspended: its store heeds no timeout."""
    two.begin()
    resumed = threading.Event()
    monkeypatch.setattr(two.newer, "_judge", ("a", SimpleNamespace(check=lambda _: resumed.wait(20))))
    with pytest.raises(TimeoutError, match="a did not make call 0"):
        two.call(two.newer)
    two.failure = ValueError("a peer has failed")
    with pytest.raises(ValueError, match="a peer has failed"):
        two.call(two.newer)
    resumed.set()


def test_a_store_that_never_answers_costs_no_step(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchft._manager.checks.calls._CONNECT_TIMEOUT", SHORT)
    monkeypatch.setattr("torchft._manager.checks.layout._FETCH_TIMEOUT", SHORT)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        handle = Handle(id="0", store=f"127.0.0.1:{silent.getsockname()[1]}")
        two.handles[0] = announce(handle.encode(), ((CALLS, "1"),))
        two.newer._logger = SimpleNamespace(warn=(warned := []).append)  # type: ignore[assignment]
        two.newer.begin(plan(1, source=0, handles=two.handles), new_here=True)
        two.call(two.newer)
        assert read_layout(handle.store, "0") is None
    assert "the first calls in quorum 3 are not compared" in warned[0]
