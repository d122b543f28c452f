"""A group on a device trains along while its state arrives in parts. Then all groups have the same bits."""

from __future__ import annotations

import logging
from typing import Any, Callable

import pytest
import torch
from torch import nn, optim

from tests.gpu.device import DEVICE
from tests.integration.cluster import DEADLINE, Cluster, Rank
from tests.integration.test_heal_along import LEAST_ROUNDS, Loop, _run
from tests.integration.test_heal_along import one_part_a_step as one_part_a_step
from torchft.process_group import ProcessGroupGloo


class OnDevice(Loop):
    """Each group has its own stream: on the default stream, a missing wait would be hidden
    (test_training.py).
    """

    def __call__(self, rank: Rank) -> Any:
        torch.cuda.set_device(DEVICE)
        with torch.cuda.stream(torch.cuda.Stream()), torch.autograd.set_multithreading_enabled(False):
            return super().__call__(rank)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: optim.Adam(model.parameters(), lr=0.01),
        # Its count of steps is on the device.
        lambda model: optim.AdamW(model.parameters(), lr=0.01, fused=True),
        lambda model: optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    ],
    ids=["adam", "fused", "sgd"],
)
def test_a_group_that_joins_has_the_same_bits(
    caplog: pytest.LogCaptureFixture,
    make: Callable[[nn.Module], optim.Optimizer],
) -> None:
    loop = OnDevice(together=2, make=make, device_of=lambda rank: DEVICE)
    with (
        Cluster(make_pg=lambda group: ProcessGroupGloo(timeout=DEADLINE)) as cluster,
        caplog.at_level(logging.INFO),
    ):
        _run(cluster, loop, first=1, later=1)
    assert loop.joined[1] >= LEAST_ROUNDS, "its state came in parts over some steps"
    assert all(committed for _, committed, _ in loop.histories[0])
    assert not [r for r in caplog.records if "transferred at once" in r.getMessage()]
