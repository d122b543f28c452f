"""A group beyond `max_replicas` is a standby: it takes no part until a group fails, and then heals."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.integration.cluster import Cluster, Gate, Rank, results
from tests.unit.waiting import wait_until
from torchft._torchft import ManagerClient

END = 12
SHORT = timedelta(seconds=1)


class _Group:
    """A loop of one rank, whose weight is the number of its committed steps."""

    def __init__(self, rank: Rank, **settings: Any) -> None:
        self.weight, self.participants = 0, list[int]()
        self.manager = rank.start_manager(
            load_state_dict=self._load, state_dict=lambda: {"weight": self.weight}, **settings
        )

    def _load(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"]

    def step(self) -> None:
        self.manager.start_quorum()
        self.manager.allreduce(torch.ones(1)).wait()
        if self.manager.should_commit():
            self.weight += 1
            self.participants.append(self.manager.num_participants())


def _members(cluster: Cluster, state: str) -> list[str]:
    return [m["replica_id"].split(":")[0] for m in cluster.status()["members"] if m.get(state)]


def test_a_standby_takes_the_place_of_a_failed_group_and_the_next_one_ends_with_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stands_by, again = Gate(), Gate()
    timeouts: list[timedelta] = []
    begin_round = ManagerClient._begin_round

    def counted(client: ManagerClient, request: Any, timeout: timedelta) -> object:
        timeouts.append(timeout)
        return begin_round(client, request, timeout)

    monkeypatch.setattr(ManagerClient, "_begin_round", counted)
    with Cluster(max_replicas=2) as cluster:

        def survivor(rank: Rank) -> _Group:
            group = _Group(rank)
            cluster.wait_for_healthy(2)  # alone it would be past the steps of the victim
            while group.manager.current_step() < END:
                if group.manager.current_step() == 2 * END // 3:
                    again.wait()
                group.step()
            wait_until(lambda: _members(cluster, "standby"))
            group.manager.shutdown(finished=True)
            return group

        def victim(rank: Rank) -> None:
            group = _Group(rank)
            while group.manager.current_step() < 3:
                group.step()
            stands_by.wait()
            rank.crash()

        def standby(rank: Rank) -> _Group:
            wait_until(lambda: len(_members(cluster, "in_quorum")) == 2)  # who has not asked has no seat
            group = _Group(rank, quorum_timeout=SHORT)
            while group.manager.current_step() < END:
                group.step()
            group.manager.shutdown(finished=True)
            return group

        def last(rank: Rank) -> None:
            again.wait()
            group = _Group(rank)
            with pytest.raises(SystemExit) as e:
                group.step()
            assert e.value.code == 0 and group.participants == []

        loops = [cluster.start(loop, i) for i, loop in enumerate((survivor, victim, standby, last))]
        wait_until(lambda: timeouts.count(SHORT) == 2)  # the timeout of a request is no error of a standby
        wait_until(lambda: _members(cluster, "standby") == ["group_2"])
        assert sorted(_members(cluster, "in_quorum")) == ["group_0", "group_1"]
        stands_by.open()
        wait_until(lambda: sorted(_members(cluster, "in_quorum")) == ["group_0", "group_2"])
        again.open()
        stayed, _, joined, _ = results(*loops)

    assert stayed.weight == joined.weight == END
    # with the group that failed, perhaps alone for a step, and with the standby
    assert 3 not in stayed.participants and stayed.participants[-1] == 2
    assert len(joined.participants) < END, "it heals, and commits only steps after that"
