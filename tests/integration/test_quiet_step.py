"""A step without a failure, while the quorum stands: few parts run, and no request is made."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Callable

import pytest
import torch
from torch import nn

import torchft
from torchft._torchft import QuorumRequest
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper

from .cluster import Cluster, Rank

_PACKAGE = str(Path(torchft.__file__).parent)
# With Gloo, and without the comparison of weights, which reads other parts of the state in each step.
_MOST_FILES = 15


def loop_of(manager: Manager) -> Callable[[], None]:
    """Makes a function that trains one step."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    ddp = DistributedDataParallel(manager, model)
    optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    return step


def test_a_quiet_step_runs_few_files() -> None:
    files: list[set[str]] = []  # of some steps

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            files[-1].add(frame.f_code.co_filename.removeprefix(_PACKAGE))

    with Cluster(min_replicas=2) as cluster:
        together = threading.Barrier(2, timeout=60)

        def loop(rank: Rank) -> None:
            manager = rank.start_manager(init_sync=False, compare_commits=0)
            step = loop_of(manager)
            for number in range(17):
                if number >= 12:
                    together.wait()
                    if rank.group == 0:
                        files.append(set())
                        sys.setprofile(note)
                step()
                sys.setprofile(None)
            assert manager.current_step() == 17

        for group in [cluster.start(loop, group)[0] for group in range(2)]:
            group.result(timeout=120)
    fewest = min(files, key=len)  # if the peer is late, a wait looks at its connections
    assert len(fewest) <= _MOST_FILES, sorted(fewest)
    assert "/manager.py" in fewest


def layout(manager: Manager) -> None:
    manager.register_layout("what is reduced", ["a line"])


def process_group(manager: Manager) -> None:
    manager._pg = manager._pg


def signal(manager: Manager) -> None:
    manager._signals.wanted = True


def nothing(manager: Manager) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "asks"),
    [(nothing, 0), (layout, 1), (process_group, 1), (signal, 1)],
    ids=lambda value: str(value),
)
def test_a_request_is_made_where_a_rank_has_something_new_to_say(
    change: Callable[[Manager], None], asks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: Counter[str] = Counter()

    def request(**given: Any) -> QuorumRequest:
        requests[threading.current_thread().name] += 1
        return QuorumRequest(**given)

    monkeypatch.setattr("torchft._manager.stepping.QuorumRequest", request)
    with Cluster(min_replicas=2) as cluster:
        together = threading.Barrier(2, timeout=60)

        def loop(rank: Rank) -> int:
            manager = rank.start_manager(init_sync=False)
            me = threading.current_thread().name
            for number in range(6):
                if number == 5:
                    together.wait()
                    before = requests[me]
                    change(manager)
                manager.start_quorum()
                manager.allreduce(torch.ones(2)).wait()
                assert manager.should_commit()
            return requests[me] - before

        groups = [cluster.start(loop, group)[0] for group in range(2)]
        assert [group.result(timeout=120) for group in groups] == [asks, asks]
