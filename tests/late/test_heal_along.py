"""A group with parameters on a device trains along while its state arrives in parts: all end with the same
bits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn, optim

from tests.integration.cluster import DEADLINE, Cluster, Rank
from tests.integration.test_heal_along import LEAST_ROUNDS, Loop, _run
from tests.integration.test_heal_along import one_part_a_step as one_part_a_step
from tests.late import load
from tests.late.test_jobs import on_device
from torchft._manager.heal.side_stream import SideStream
from torchft._manager.heal.tracked import Parameters, Unsupported

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


class OnStream(Loop):
    """Each group trains on its own stream: on the default stream, the mark of another thread would do,
    too.
    """

    def __call__(self, rank: Rank) -> Any:
        with torch.Stream(on_device(rank)), torch.autograd.set_multithreading_enabled(False):
            return super().__call__(rank)


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts that all work of the training thread on parts is marked before another thread touches them."""
    unmarked: set[SideStream] = set()

    def noted(name: str) -> None:
        of_class = getattr(Parameters, name)

        def works(self: Parameters, *args: Any) -> None:
            if threading.current_thread().name != "torchft_heal_along":
                unmarked.add(self.side_stream)
            of_class(self, *args)

        monkeypatch.setattr(Parameters, name, works)

    noted("step")
    noted("write")
    mark, running = SideStream.mark, SideStream.running

    @contextmanager
    def checked(self: SideStream) -> Iterator[None]:
        assert self not in unmarked
        with running(self):
            yield

    def marks(self: SideStream) -> None:
        unmarked.discard(self)
        mark(self)

    monkeypatch.setattr(SideStream, "mark", marks)
    monkeypatch.setattr(SideStream, "running", checked)


OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "adam": lambda model: optim.Adam(model.parameters(), lr=0.01),
    # Counts steps on the device.
    "capturable": lambda model: optim.Adam(model.parameters(), lr=0.01, capturable=True),
    "sgd": lambda model: optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
}
SCHEDULES = ("at once", "delayed", "lazy")
# Each value of each parameter; the other combinations are slow, a second or two each.
FEW = {
    ("adam", "delayed"),
    ("capturable", "lazy"),
    ("sgd", "at once"),
}


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        pytest.param(*case, marks=() if case in FEW else pytest.mark.slow)
        for case in product(OPTIMIZERS, SCHEDULES)
    ],
)
def test_a_group_that_joins_has_the_same_bits(
    late: ModuleType,
    marked: None,
    caplog: pytest.LogCaptureFixture,
    optimizer: str,
    schedule: str,
) -> None:
    if schedule == "delayed":
        late.delays(7, 0, 1000)
    if schedule == "lazy":
        late.lazy(2000)
    loop = OnStream(together=2, make=OPTIMIZERS[optimizer], model=small, device_of=on_device)
    with (
        Cluster(make_pg=lambda group: ProcessGroupLate(timeout=DEADLINE)) as cluster,
        caplog.at_level(logging.INFO),
    ):
        _run(cluster, loop, first=1, later=1)
    assert loop.joined[1] >= LEAST_ROUNDS, "its state came in parts over some steps"
    assert all(committed for _, committed, _ in loop.histories[0])
    assert not [r for r in caplog.records if "transferred at once" in r.getMessage()]


def test_a_learning_rate_on_a_device_falls_back_by_name(late: ModuleType) -> None:
    weight = torch.ones(2, device="late", requires_grad=True)
    adam = optim.Adam([weight], lr=torch.tensor(0.1, device="late"), capturable=True)
    with pytest.raises(Unsupported, match=r"'lr' of the optimizer is a tensor of shape \[\] on late:0"):
        Parameters([adam]).hyperparameters()


def test_parameters_on_several_devices_are_healed_at_once(late: ModuleType) -> None:
    parameters = [torch.ones(2, device=f"late:{index}", requires_grad=True) for index in (0, 1)]
    with pytest.raises(Unsupported, match="parameter 1 is on late:1, and parameter 0 on late:0"):
        Parameters([optim.SGD(parameters)]).check()
