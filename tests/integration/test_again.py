"""A step of a loader comes again after a failure, and groups compute only the units of the failed group."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Callable, Optional, cast

import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed import ReduceOp

from tests.integration.cluster import Cluster, Rank, results
from tests.integration.test_loader import Training, check
from torchft._manager.step import collectives
from torchft.ddp import DistributedDataParallel, PureDistributedDataParallel
from torchft.manager import Manager
from torchft.process_group import ManagedProcessGroup, ProcessGroupGloo

# 12 units in a batch: four groups compute 3 each, and the survivors of one 1 more.
LOADER = {"micro_batch_size": 1}
# As in test_replay.py: Gloo does not wake one send of a hundred when a peer fails.
OPERATION = timedelta(seconds=10)


@pytest.fixture(autouse=True)
def long_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_DRAIN_SEC", 20.0)


class Killed(Exception):
    """Ends the loop of the group that fails."""


class ReducesCopies(nn.Module):
    """As FSDP2 does, reduces tensors of its own after the backward pass, and copies the results to where the
    optimizer reads them.
    """

    def __init__(self, manager: Manager, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self._group = ManagedProcessGroup(manager)
        self._syncs = self._queued = False
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def set_requires_gradient_sync(self, requires: bool) -> None:
        self._syncs = requires

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def _accumulated(self, _: torch.Tensor) -> None:
        if self._syncs and not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._reduce)  # type: ignore[arg-type]

    def _reduce(self) -> None:
        self._queued = False
        for parameter in self.net.parameters():
            assert parameter.grad is not None
            copy = parameter.grad.clone()
            self._group.allreduce([copy], ReduceOp.AVG).wait()
            parameter.grad.copy_(copy)


def pytorch_ddp(manager: Manager, net: nn.Module) -> nn.Module:
    group = cast(Any, ManagedProcessGroup(manager))
    return nn.parallel.DistributedDataParallel(net, process_group=group, find_unused_parameters=True)


KINDS: dict[str, Callable[[Manager, nn.Module], nn.Module]] = {
    "plain": lambda manager, net: net,
    "ddp": DistributedDataParallel,
    "copied gradients": lambda manager, net: DistributedDataParallel(
        manager, net, gradient_as_bucket_view=False
    ),
    "pure ddp": PureDistributedDataParallel,
    "pytorch's ddp": pytorch_ddp,
    "like FSDP2": ReducesCopies,
}


def fails(place: str) -> Callable[[Rank], Optional[str]]:
    """Makes a rank fail at a place of the step whose units it has."""

    def begin(rank: Rank) -> Optional[str]:
        manager = rank.manager
        assert manager is not None
        if place == "forward":
            rank.crash()
            return "crashed"
        reduce, vote, left = manager.allreduce, manager.should_commit, [int(place[-1:] == "2") * 2]

        def allreduce(tensor: torch.Tensor, **more: Any) -> Any:
            if left[0] == 0 and place != "vote":
                rank.crash()
            left[0] -= 1
            return reduce(tensor, **more)

        def should_commit(*args: Any, **more: Any) -> bool:
            if not rank.crashed:
                vote(*args, **more)
                rank.crash()
            raise Killed

        manager.allreduce = allreduce  # type: ignore[method-assign]
        manager.should_commit = should_commit  # type: ignore[method-assign]
        return None

    return begin


@dataclass
class Job(Training):
    """Groups that replay, of which some fail."""

    settings: dict[str, Any] = field(default_factory=lambda: {"replay_failed_step": True})
    loader: dict[str, Any] = field(default_factory=LOADER.copy)

    def __call__(self, rank: Rank) -> Optional[torch.Tensor]:
        try:
            return super().__call__(rank)
        except Killed:
            return None

    def run(self, groups: int, world_size: int = 1, least: int = 2) -> list[Optional[torch.Tensor]]:
        self.start_with = groups
        with Cluster(min_replicas=least, make_pg=lambda _: ProcessGroupGloo(timeout=OPERATION)) as cluster:
            return results(*(cluster.start(self, group, world_size) for group in range(groups)))

    def computed(self, step: int) -> dict[int, list[int]]:
        """The units that each group computed in the attempts at a step."""
        return {group: units for (group, at), units in self.units.items() if at == step}


@pytest.mark.parametrize("place", ["forward", "bucket0", "bucket2", "vote"])
@pytest.mark.parametrize("groups", [3, 4])
@pytest.mark.parametrize("kind", ["plain", "ddp", "like FSDP2"])
def test_only_the_units_of_the_failed_group_are_computed_again(kind: str, groups: int, place: str) -> None:
    if kind == "ddp" and place == "bucket2":
        place = "bucket0"  # it has one bucket
    job = Job(wrap=KINDS[kind], events={(0, 0, 2): fails(place)})
    ended = job.run(groups)
    # The failed group has voted: the others mostly have all results, and its samples are not recorded.
    committed_at_once = place == "vote" and not job.lost
    check(job, ended, incomplete=frozenset({2} if committed_at_once else ()))
    assert sum(weights is not None for weights in ended) == groups - 1
    own, survivors = 12 // groups, range(1, groups)
    expected = [own] if committed_at_once else [own, own // (groups - 1)]
    assert {group: job.computed(2)[group] for group in survivors} == dict.fromkeys(survivors, expected)
    assert all(len(units) == 1 for (_, step), units in job.units.items() if step != 2)
