"""Readers that arrive while a source takes its memory back."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.unit.flickering import cleared_after_each_look
from torchft.checkpointing.codec.requests import StatePart
from torchft.checkpointing.source.checkpoint import Checkpoint
from torchft.checkpointing.source.publisher import Publisher, Unavailable


def test_a_checkpoint_that_is_dropped_while_the_next_one_is_published() -> None:
    source = cleared_after_each_look(Publisher, "_offer")(keep=60)
    source.publish(1, Checkpoint({"w": torch.zeros(1)}, 0))
    source.publish(2, Checkpoint({"w": torch.ones(1)}, 0))
    assert source._step == 2
    source.close(5)


def test_a_slow_state_function_delays_no_other_request() -> None:
    """Only the training thread, which is about to change the state, waits for its end."""
    source, began, may_end, order = Publisher(keep=60), threading.Event(), threading.Event(), list[str]()

    class Slow:
        def part(self, key: str) -> StatePart:
            raise ValueError(key)

        def whole(self) -> None:
            began.set()
            assert may_end.wait(60)
            order.append("read")
            source.publish(7, Checkpoint({"w": torch.zeros(1)}, 0))

    def request() -> None:
        with source.reading(7, 60):
            pass

    def takes_back() -> None:
        source.disallow(5)
        order.append("taken back")

    source.decide(6, 1, True)
    source.open(7, Slow())
    with ThreadPoolExecutor(3) as pool:
        read = pool.submit(request)
        assert began.wait(60)
        with pytest.raises(Unavailable), source.reading(7, 0.01):
            pass
        decided, taken_back = pool.submit(source.decision, 6, 1, 60), pool.submit(takes_back)
        try:
            assert decided.result(20) is True
        finally:
            may_end.set()
        taken_back.result(60)
        read.exception(60)  # the state may have been taken back before it is served
    assert order == ["read", "taken back"]
    source.close(5)
