"""The loader in groups on one device, as threads: they end with the weights of one process, bit for bit."""

from __future__ import annotations

from typing import Any, Optional

import pytest
import torch

from tests.gpu.device import DEVICE
from tests.integration.cluster import Rank
from tests.integration.test_loader import Training, check, ends_of_a_failure_and_a_join, wrapped_by_torchft
from tests.integration.test_reproducible import Ranks, growing, one_process
from tests.unit.data.test_loader import make, train


def on_device(rank: Rank) -> torch.device:
    torch.cuda.set_device(DEVICE)
    return DEVICE


def own_stream(train: Any, rank: Rank) -> Any:
    # Autograd has one thread per device, on which groups in one process would deadlock: see test_training.py.
    torch.cuda.set_device(DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()), torch.autograd.set_multithreading_enabled(False):
        return train(rank)


class OnDevice(Training):
    def __call__(self, rank: Rank) -> Optional[torch.Tensor]:
        return own_stream(super().__call__, rank)


class RanksOnDevice(Ranks):
    def __call__(self, rank: Rank) -> torch.Tensor:
        return own_stream(super().__call__, rank)


@pytest.mark.parametrize("workers", [0, 1])
def test_memory_is_pinned(workers: int) -> None:
    units = [
        unit.data[0]
        for _, units in train(make(pin_memory=True, shuffle=False, num_workers=workers))
        for unit in units
    ]
    assert all(part.is_pinned() for part in units)
    assert torch.cat([part.to(DEVICE, non_blocking=True) for part in units]).tolist() == list(range(10))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_group_fails_and_another_one_joins(workers: int) -> None:
    loader = {"pin_memory": True, "num_workers": workers}
    training = OnDevice(start_with=3, device_of=on_device, wrap=wrapped_by_torchft, loader=loader)
    ended = ends_of_a_failure_and_a_join(training)
    check(training, ended)
    assert sum(weights is not None for weights in ended) == 3


def test_a_failure_and_a_join_end_with_the_bits_of_one_process_on_the_device() -> None:
    training = OnDevice(start_with=3, device_of=on_device, settings={"reproducible_reduction": True})
    ended = ends_of_a_failure_and_a_join(training)
    check(training, ended)
    expected = one_process(device=DEVICE)
    assert all(weights is None or torch.equal(weights, expected) for weights in ended)


def test_gradients_that_do_not_fit_are_repeated_in_the_same_step() -> None:
    ranks = RanksOnDevice(1, fails=(0, 3), device_of=on_device)
    ended, expected = ranks.run(), one_process(growing, DEVICE)
    assert all(torch.equal(weights, expected) for weights in ended)
    assert "planned" in ranks.lost
    assert {0, 2} <= set(ranks.repeated[0])
