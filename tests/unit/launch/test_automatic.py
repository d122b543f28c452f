"""`torchft run --scale auto`: what it sets, shows and tells the lighthouse."""

from __future__ import annotations

from typing import Any

import pytest

from torchft._lighthouse_http import HttpLighthouse
from torchft.launch import automatic

ADDRESS = "http://localhost:1"


class Job:
    """A job of this machine that allows up to four groups."""

    def __init__(self) -> None:
        self.wanted = 1
        self.leaving = False
        self.decision = ""
        self.follow_again: Any = None
        self.step = 0

    def scale(self, replicas: int) -> None:
        if self.leaving:
            raise ValueError("group 1 is still leaving; try again when it has left")
        self.wanted = replicas

    def shown(self) -> dict[str, Any]:
        self.step += 5 * min(self.wanted, 2)
        members = [{"in_quorum": True, "healthy": True}] * self.wanted
        return {"quorum_id": self.wanted, "max_step": self.step, "members": members}


def test_two_groups_on_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(HttpLighthouse, "ask", lambda _, what, reason: told.append(reason))
    job: Any = Job()
    follows = automatic.follower(job, range(1, 5), ADDRESS)
    numbers = []
    for second in range(600):
        job.leaving = job.wanted > 1 and second % 7 > 0  # a change may have to wait
        assert follows.look(float(second), job.shown())
        numbers += [job.wanted] if numbers[-1:] != [job.wanted] else []
    assert numbers == [1, 2, 3, 2]
    waits = [reason for reason in told if "group 1 is still leaving; try again when it has left" in reason]
    changes = [reason.partition(":")[0] for reason in told if reason not in waits]
    assert changes == ["1 -> 2 groups", "2 -> 3 groups", "3 -> 2 groups", "2 groups stay"] and waits
    assert job.decision == told[-1]

    job.leaving = False
    job.scale(4)
    for second in range(600, 2000):
        assert follows.look(float(second), job.shown())
    assert job.wanted == 4 and told[-1] == "4 groups, set by hand: this number stays"
    job.follow_again()
    for second in range(2000, 3000):
        assert follows.look(float(second), job.shown())
    assert job.wanted == 2
