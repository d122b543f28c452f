"""A group whose parameters are on a device trains along while its state arrives in pieces: then all have the same bits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn, optim

from tests.integration.cluster import DEADLINE, Cluster, Rank
from tests.integration.test_heal_along import EARLY, LEAST_ROUNDS, Loop, _run
from tests.integration.test_heal_along import one_piece_a_step as one_piece_a_step
from tests.late import load
from tests.late.test_jobs import on_device
from torchft._manager.along import Heal
from torchft._manager.beside import Beside
from torchft._manager.tracked import Parameters, Unfit

load()
from tests.late.group import ProcessGroupLate  # noqa: E402


class Scaled(nn.Module):
    """Multiplies by a buffer, which belongs to no parameter. Each group begins with its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), Scaled(), nn.ReLU(), nn.Linear(32, 1))


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts that all work of the training thread on pieces is marked before another thread touches them."""
    unmarked: set[Beside] = set()

    def noted(name: str) -> None:
        of_class = getattr(Parameters, name)

        def works(self: Parameters, *args: Any) -> None:
            if threading.current_thread().name != "torchft_heal_along":
                unmarked.add(self.beside)
            of_class(self, *args)

        monkeypatch.setattr(Parameters, name, works)

    noted("step")
    noted("write")
    mark, running = Beside.mark, Beside.running

    @contextmanager
    def checked(self: Beside) -> Iterator[None]:
        assert self not in unmarked
        with running(self):
            yield

    def marks(self: Beside) -> None:
        unmarked.discard(self)
        mark(self)

    monkeypatch.setattr(Beside, "mark", marks)
    monkeypatch.setattr(Beside, "running", checked)


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
@pytest.mark.parametrize("between_votes", [False, True])
@pytest.mark.parametrize("schedule", ["at once", "delayed", "lazy"])
@pytest.mark.parametrize(
    "make",
    [
        lambda model: optim.Adam(model.parameters(), lr=0.01),
        lambda model: optim.Adam(model.parameters(), lr=0.01, capturable=True),  # its count of steps is on the device
        lambda model: optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    ],
    ids=["adam", "capturable", "sgd"],
)
def test_a_group_that_joins_has_the_same_bits(
    late: ModuleType,
    marked: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    schedule: str,
    between_votes: bool,
    make: Callable[[nn.Module], optim.Optimizer],
) -> None:
    if schedule == "delayed":
        late.delays(7, 0, 500)
    if schedule == "lazy":
        late.lazy(5000)
    if between_votes:
        monkeypatch.setattr(Heal, "early", EARLY)
    loop = Loop(together=2, make=make, model=small, device_of=on_device)
    with Cluster(make_pg=lambda group: ProcessGroupLate(timeout=DEADLINE)) as cluster, caplog.at_level(logging.INFO):
        _run(cluster, loop, first=1, later=1)
    assert between_votes or loop.joined[1] >= LEAST_ROUNDS, "its state came in pieces over some steps"
    assert all(committed for _, committed, _ in loop.histories[0])
    assert not [r for r in caplog.records if "transferred as a whole" in r.getMessage()]


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """A thread beside that of the test, which stands for the training thread."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_work_beside_follows_the_mark_and_not_what_comes_later(late: ModuleType, other: ThreadPoolExecutor) -> None:
    weights = torch.ones(3, device="late")
    beside = Beside(weights.device)

    def read() -> list[float]:
        with beside.running():
            return weights.cpu().tolist()

    with late.held():
        weights.fill_(2)
        beside.mark()
        held = other.submit(read)
        with pytest.raises(TimeoutError):
            held.result(0.05)
    assert held.result(20) == [2, 2, 2]
    stream = torch.accelerator.current_stream()
    with late.held(stream):
        weights.fill_(3)  # not marked
        assert other.submit(read).result(20) == [2, 2, 2]


def test_work_beside_has_ended_with_its_context(late: ModuleType, other: ThreadPoolExecutor) -> None:
    weights = torch.ones(3, device="late")
    beside = Beside(weights.device)
    late.delays(7, 20_000, 30_000)

    def write() -> bool:
        with beside.running():
            weights.fill_(2)
        assert beside._stream is not None
        return beside._stream.query()

    assert other.submit(write).result(20)


def test_memory_from_beside_is_kept_until_the_training_thread_has_used_it(
    late: ModuleType, other: ThreadPoolExecutor
) -> None:
    beside = Beside(torch.device("late", 0))

    def allocate(value: float) -> torch.Tensor:
        with beside.running():
            return beside.allocated(torch.full((5000,), value, device="late"))

    state = other.submit(allocate, 7.0).result(20)
    beside.mark()
    with late.held(torch.accelerator.current_stream()):
        read_late = state * 1
        del state
        later = other.submit(allocate, 9.0).result(20)
    assert (read_late[0].item(), later[0].item()) == (7.0, 9.0)


def test_parameters_on_several_devices_are_healed_as_a_whole(late: ModuleType) -> None:
    parameters = [torch.ones(2, device=f"late:{index}", requires_grad=True) for index in (0, 1)]
    with pytest.raises(Unfit, match="parameter 1 is on late:1, and parameter 0 on late:0"):
        Parameters([optim.SGD(parameters)]).check()
