"""What joins policy, scaler and lighthouse: what it asks for, when, and what it says."""

from __future__ import annotations

import time
from typing import Any

import pytest

from torchft._lighthouse_http import HttpLighthouse, Unanswered
from torchft.scaling import Scaler, ScalerError, follow
from torchft.scaling import loop as module
from torchft.scaling.loop import Follower, record, seen
from torchft.scaling.policy import Decision, Policy, Seen


class Place(Scaler):
    """A number of groups; ``problem``: why it cannot be asked or set at present."""

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.problem = ""
        self.asked = 0
        self.sets: list[int] = []

    def current(self) -> int:
        self.asked += 1
        if self.problem:
            raise ScalerError(self.problem)
        return self.groups

    def set(self, groups: int) -> None:
        if self.problem:
            raise ScalerError(self.problem)
        self.sets.append(groups)
        self.groups = groups


class Scripted(Policy):
    """Decides what the test wants."""

    def __init__(self) -> None:
        super().__init__([1, 2, 3])
        self.next: Decision | None = None
        self.seen: list[Seen] = []

    def look(self, now: float, seen: Seen) -> Decision | None:
        self.seen.append(seen)
        decision, self.next = self.next, None
        return decision


STATUS: dict[str, Any] = {
    "quorum_id": 7,
    "max_step": 40,
    "members": [
        {"in_quorum": True, "healthy": True},
        {"in_quorum": True, "healthy": True, "healing": True},
        {"in_quorum": True, "healthy": False},
        {"in_quorum": False, "healthy": True},
        {"in_quorum": True, "healthy": True},
    ],
}


def follower(groups: int) -> tuple[Follower, Place, Scripted, list[str]]:
    place, policy, told = Place(groups), Scripted(), list[str]()
    return Follower(place, policy, told.append), place, policy, told


def test_groups_that_have_failed_or_heal_are_not_seen() -> None:
    assert seen(STATUS, 4) == Seen(wanted=4, groups=2, quorum=7, step=40)


def test_a_decision_is_told_and_carried_out() -> None:
    follows, place, policy, told = follower(2)
    policy.next = Decision(3, "2 -> 3 groups: why")
    assert follows.look(0.0, STATUS)
    assert (place.sets, told) == ([3], ["2 -> 3 groups: why"])
    assert follows.look(1.0, STATUS)
    assert policy.seen[-1].wanted == 3
    policy.next = Decision(3, "3 groups stay: why")
    assert follows.look(2.0, STATUS)
    assert (place.sets, told[1:]) == ([3], ["3 groups stay: why"])


def test_the_scaler_is_asked_now_and_then_and_before_a_change() -> None:
    follows, place, policy, _ = follower(2)
    for tenth in range(200):
        assert follows.look(tenth / 10, STATUS)
    assert place.asked == 2
    follows.look(19.9, STATUS)
    place.groups = 1  # somebody has set it
    policy.next = Decision(3, "2 -> 3 groups: why")
    assert follows.look(19.95, STATUS)
    assert place.sets == [] and policy.seen[-1].wanted == 2
    assert follows.look(20.0, STATUS)
    assert policy.seen[-1].wanted == 1


def test_without_a_quorum_nothing_is_decided() -> None:
    follows, _, policy, _ = follower(2)
    assert follows.look(0.0, {}) and follows.look(1.0, {**STATUS, "quorum_id": 0})
    assert policy.seen == []


def test_a_change_that_fails_is_tried_again() -> None:
    follows, place, policy, told = follower(2)
    assert follows.look(0.0, STATUS)
    asked = len(policy.seen)
    policy.next = Decision(3, "2 -> 3 groups: why")
    place.problem = "no controller"
    for second in range(1, 9):
        assert follows.look(float(second), STATUS)
    place.problem = ""
    assert place.sets == [] and len(policy.seen) == asked + 1
    assert told[1:] == ["the number of groups cannot be changed at present: no controller"]
    assert follows.look(30.0, STATUS)
    assert place.sets == [3] and policy.seen[-1].wanted == 3


def test_it_ends_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    place, waits = Place(2), list[float]()
    monkeypatch.setattr(module, "_status", lambda _: {})

    def wait(seconds: float) -> None:
        waits.append(seconds)
        place.groups = 0

    monkeypatch.setattr(time, "sleep", wait)
    now = iter(range(0, 1000, 20))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    follow(place, 1, 4, lighthouse="http://localhost:1")
    assert len(waits) == 1


def test_a_wrong_range_address_or_scaler_is_an_error_at_once() -> None:
    place = Place(2)
    with pytest.raises(ValueError, match="4:2 groups are not allowed"):
        follow(place, 4, 2)
    with pytest.raises(Unanswered, match="the lighthouse address 'nowhere' is not allowed"):
        follow(place, 1, 2, lighthouse="nowhere")
    with pytest.raises(ScalerError, match="Place: no group of the job is found"):
        follow(Place(0), 1, 2, lighthouse="http://localhost:1")
    place.problem = "no such job"
    with pytest.raises(ScalerError, match="no such job"):
        follow(place, 1, 2, lighthouse="http://localhost:1")


def test_a_decision_that_the_lighthouse_does_not_take_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    record(HttpLighthouse("http://127.0.0.1:1"), "2 -> 3 groups")
    assert "is no event of the job: no lighthouse answered" in capsys.readouterr().err
