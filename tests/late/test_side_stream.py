"""Device work of another thread follows the mark of the training thread, and has ended when its context
ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import ModuleType

import pytest
import torch

from torchft._manager.heal.side_stream import SideStream
from torchft._manager.step.background import Background
from torchft.checkpointing.memory.staging import StreamCopies
from torchft.utils import get_stream_context


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """A thread beside that of the test, which stands for the training thread."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_work_beside_follows_the_mark_and_not_what_comes_later(
    late: ModuleType, other: ThreadPoolExecutor
) -> None:
    weights = torch.ones(3, device="late")
    side_stream = SideStream(weights.device)

    def read() -> list[float]:
        with side_stream.running():
            return weights.cpu().tolist()

    with late.held():
        weights.fill_(2)
        side_stream.mark()
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
    side_stream = SideStream(weights.device)
    late.delays(7, 20_000, 30_000)

    def write() -> bool:
        with side_stream.running():
            weights.fill_(2)
            stream = torch.accelerator.current_stream()
        return stream.query()

    assert other.submit(write).result(20)


class Shared:
    """A stream of PyTorch's pool, which has 32 and hands them out in turn, that heals have used."""

    def __init__(self, other: ThreadPoolExecutor) -> None:
        self.weights = torch.ones(3, device="late")
        self.side_stream = SideStream(self.weights.device)
        self.stream = other.submit(self._used).result(20)

    def _used(self) -> torch.Stream:
        with self.side_stream.running():
            return torch.accelerator.current_stream()

    def read(self) -> list[float]:
        with self.side_stream.running():
            return self.weights.cpu().tolist()


def test_work_beside_is_not_on_the_stream_of_the_training_thread(
    late: ModuleType, other: ThreadPoolExecutor
) -> None:
    """The training thread may queue a collective at any time, which waits for a peer that waits for this
    work.
    """
    shared = Shared(other)
    with get_stream_context(shared.stream):
        shared.side_stream.mark()
        shared.stream.synchronize()
        with late.held(shared.stream):
            assert other.submit(shared.read).result(20) == [1, 1, 1]


def test_work_beside_is_not_behind_a_collective(late: ModuleType, other: ThreadPoolExecutor) -> None:
    shared = Shared(other)
    with late.held(shared.stream):
        with get_stream_context(shared.stream):
            shared.weights.fill_(2)  # stands for the collective
        assert other.submit(shared.read).result(20) == [1, 1, 1]


def test_memory_from_beside_is_kept_until_the_training_thread_has_used_it(
    late: ModuleType, other: ThreadPoolExecutor
) -> None:
    side_stream = SideStream(torch.device("late", 0))

    def allocate(value: float) -> torch.Tensor:
        with side_stream.running():
            return side_stream.allocated(torch.full((5000,), value, device="late"))

    state = other.submit(allocate, 7.0).result(20)
    side_stream.mark()
    with late.held(torch.accelerator.current_stream()):
        read_late = state * 1
        del state
        later = other.submit(allocate, 9.0).result(20)
    assert (read_late[0].item(), later[0].item()) == (7.0, 9.0)


def test_a_heal_at_once_is_not_behind_a_collective(late: ModuleType, other: ThreadPoolExecutor) -> None:
    """Neither the stream of a heal nor that of its copies."""
    source, device = torch.ones(3, device="late"), torch.device("late", 0)
    background = Background()

    def heal() -> tuple[list[float], list[torch.Stream]]:
        background.begin()
        copies = StreamCopies(device)
        with background.running():
            stream, read = torch.accelerator.current_stream(), source.cpu().tolist()
        background.join(timedelta(seconds=20))
        return read, [stream, copies._stream]

    read, streams = other.submit(heal).result(20)
    assert read == [1, 1, 1]
    for stream in streams:
        with late.held(stream):
            with get_stream_context(stream):
                torch.zeros(3, device="late").fill_(2)  # stands for the collective
            read, again = other.submit(heal).result(20)
            assert read == [1, 1, 1] and stream not in again
