"""Device work of another thread follows the mark of the training thread, and has ended when its context ends."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch

from torchft._manager.heal.beside import Beside, stream_beside


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
        return stream_beside(weights.device).query()

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
