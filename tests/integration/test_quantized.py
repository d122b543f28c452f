"""Manager.allreduce(should_quantize=True) is like a plain allreduce, except for the number of bytes and
rounding.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch.distributed import ReduceOp

from tests.integration.cluster import Cluster, Gate, Rank, results
from torchft.manager import Manager


def state(manager: Manager) -> None:
    manager.set_state_dict_fns(lambda state: None, lambda: {"weights": 1})


def test_average_over_participants() -> None:
    def loop(rank: Rank) -> tuple[list[float], list[float]]:
        manager = rank.start_manager(min_replica_size=2)
        state(manager)
        average, total = torch.full((5,), 2.0 + 4 * rank.group), torch.full((5,), 1.0)
        while manager.current_step() < 2:  # at step 0 one group heals, and contributes zeros
            manager.start_quorum()
            average.fill_(2.0 + 4 * rank.group)
            total.fill_(1.0)
            works = [
                manager.allreduce(average, should_quantize=True),
                manager.allreduce(total, should_quantize=True, reduce_op=ReduceOp.SUM),
            ]
            for work in works:
                assert work.wait()
            assert manager.should_commit()
        return average.tolist(), total.tolist()

    with Cluster(min_replicas=2) as cluster:
        for outcome in results(cluster.start(loop, 0), cluster.start(loop, 1)):
            assert outcome == ([4.0] * 5, [2.0] * 5)


def test_a_failed_peer_costs_a_step_and_raises_no_error() -> None:
    victim_ended = Gate()

    def survivor(rank: Rank) -> list[bool]:
        manager = rank.start_manager(timeout=timedelta(seconds=10))
        state(manager)
        commits = []
        while len(commits) < 4:
            manager.start_quorum()
            both = manager.num_participants() == 2
            if len(commits) == 1:
                victim_ended.wait()
            tensor = torch.ones(100)
            future = manager.allreduce(tensor, should_quantize=True).get_future()
            assert future.wait() is tensor
            committed = manager.should_commit()
            if commits or both:  # before that, one of the two joins or heals
                commits.append(committed)
        assert tensor.tolist() == [1.0] * 100
        return commits

    def victim(rank: Rank) -> None:
        manager = rank.start_manager()
        state(manager)
        while manager.current_step() == 0 or not victim_ended._event.is_set():
            manager.start_quorum()
            both = manager.num_participants() == 2
            manager.allreduce(torch.ones(100), should_quantize=True).wait()
            if manager.should_commit() and both:
                manager.start_quorum()
                manager.wait_quorum()
                rank.crash()
                victim_ended.open()
                return

    with Cluster() as cluster:
        surviving, failing = cluster.start(survivor, 0), cluster.start(victim, 1)
        (commits,) = results(surviving)
        results(failing)
    assert commits[0] and not commits[1] and commits[-1]


def test_shapes_that_differ_between_groups_are_named() -> None:
    def loop(rank: Rank) -> str:
        manager = rank.start_manager(min_replica_size=2)
        state(manager)
        manager.start_quorum()
        manager.allreduce(torch.ones(3 + rank.group), should_quantize=True).wait()
        error = manager.errored()
        if rank.group == 0:
            assert not manager.should_commit()
        else:
            with pytest.raises(ValueError, match=r"call 0 .* 4 x float32 \(AVG, quantized\) here, .* 3 x"):
                manager.should_commit()
        return str(error)

    with Cluster(min_replicas=2) as cluster:
        for error in results(cluster.start(loop, 0), cluster.start(loop, 1)):
            assert error != "None"


def test_tensors_that_cannot_be_quantized_are_refused_at_once() -> None:
    def loop(rank: Rank) -> None:
        manager = rank.start_manager()
        state(manager)
        manager.start_quorum()
        with pytest.raises(
            ValueError, match=r"tensor of shape \(3,\) is torch.float64, which cannot be quantized"
        ):
            manager.allreduce(torch.ones(3).double(), should_quantize=True)
        with pytest.raises(ValueError, match=r"reduce_op=MIN: .*SUM and AVG"):
            manager.allreduce(torch.ones(3), should_quantize=True, reduce_op=ReduceOp.MIN)
        assert manager.errored() is None and manager.should_commit()

    with Cluster() as cluster:
        results(cluster.start(loop, 0))
