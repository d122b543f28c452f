"""Readers that arrive while a source takes its memory back."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.unit.flickering import cleared_after_each_look
from torchft.checkpointing._checkpoint import Checkpoint
from torchft.checkpointing._memory import HostMemory
from torchft.checkpointing._offer import Offer
from torchft.checkpointing._source import Source, Unavailable


def test_a_reader_that_arrives_during_the_copy_gets_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader is woken when the copy is complete, and does not wait for its own timeout."""
    closing, go_on = threading.Event(), threading.Event()
    close = Offer.close

    def slow_close(self: Offer, keep_copy: bool, timeout: float) -> None:
        closing.set()
        assert go_on.wait(30)
        close(self, keep_copy, timeout)

    monkeypatch.setattr(Offer, "close", slow_close)
    source = Source(keep=60)
    source.publish(1, Checkpoint({"w": torch.zeros(1_000_000)}, 0), receivers=1, copy=True)
    taking_back = threading.Thread(target=source.disallow, args=(30,))
    taking_back.start()
    assert closing.wait(30)

    read = threading.Event()

    def reader() -> None:
        with source.reading(1, 60):
            read.set()

    late = threading.Thread(target=reader)
    late.start()
    assert not read.wait(0.2)  # it waits for the copy
    go_on.set()
    assert read.wait(20)
    for thread in (taking_back, late):
        thread.join(30)
    source.close(5)


def test_a_checkpoint_that_is_dropped_while_the_next_one_is_published() -> None:
    source = cleared_after_each_look(Source, "_offer")(keep=60)
    source.publish(1, Checkpoint({"w": torch.zeros(1)}, 0), receivers=1, copy=False)
    source.publish(2, Checkpoint({"w": torch.ones(1)}, 0), receivers=1, copy=False)
    assert source._step == 2
    source.close(5)


def test_a_copy_that_is_late_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may contain weights of the next step: a Manager goes on after the error."""
    go_on = threading.Event()

    take = HostMemory.take

    def slow(memory: HostMemory, nbytes: int) -> torch.Tensor:
        assert go_on.wait(30)
        return take(memory, nbytes)

    monkeypatch.setattr(HostMemory, "take", slow)
    weights = torch.zeros(1_000_000)
    source = Source(keep=60)
    source.publish(1, Checkpoint({"w": weights}, 0), receivers=1, copy=True)
    assert source._offer is not None
    copier = source._offer._copier
    with pytest.raises(TimeoutError, match=r"not copied within 0\.2 s"):
        source.disallow(0.2)
    weights.fill_(1)
    go_on.set()
    assert copier is not None
    copier.join(30)
    offer = source._offer
    source.disallow(0.2)  # each commit does so
    assert offer._late, "a reader that began before would get weights of the next step"
    with pytest.raises(Unavailable), source.reading(1, 0.2):
        pass
    source.close(5)
