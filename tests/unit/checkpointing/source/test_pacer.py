"""The limit for PyTorch's streaming format."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.unit.checkpointing.checkpoint_states import assert_same
from torchft.checkpointing.codec.requests import FULL
from torchft.checkpointing.native import core
from torchft.checkpointing.source.checkpoint import Checkpoint
from torchft.checkpointing.source.offer import Offer
from torchft.checkpointing.source.pacer import Pacer

TIMEOUT = timedelta(seconds=20)
MB = 1 << 20


def test_the_limit_applies_to_all_threads_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleep = MagicMock(return_value=100.0), MagicMock()
    monkeypatch.setattr("torchft.checkpointing.source.pacer.time", MagicMock(monotonic=clock, sleep=sleep))
    pacer = Pacer(10)
    pacer.wait(5)
    pacer.wait(10)
    pacer.wait(10)
    assert [call.args[0] for call in sleep.call_args_list] == [0.0, 0.5, 1.5]
    Pacer().wait(1 << 40)
    assert len(sleep.call_args_list) == 3


def test_bytes_are_sent_at_once_after_a_pause_that_was_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target processes one part before it requests the next: at the limit both take no longer than the
    slower one.
    """
    clock, sleep = MagicMock(side_effect=[100.0, 100.4, 200.0]), MagicMock()
    monkeypatch.setattr("torchft.checkpointing.source.pacer.time", MagicMock(monotonic=clock, sleep=sleep))
    pacer = Pacer(10)
    for _ in range(3):
        pacer.wait(5)
    assert [call.args[0] for call in sleep.call_args_list] == pytest.approx([0.0, 0.1, 0.0])


def test_streams_share_the_limit(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "native", lambda: None)
    source, state = make(bandwidth_limit=20 * MB), {"w": torch.rand(MB)}
    source.send_checkpoint([1, 2], 1, state, TIMEOUT)
    start = time.monotonic()
    with ThreadPoolExecutor() as pool:
        heals = [pool.submit(make().recv_checkpoint, 0, source.metadata(), 1, TIMEOUT) for _ in range(2)]
    assert time.monotonic() - start > 0.25, "the last of 8 MB at 20 MB/s is sent after 0.3 s"
    for heal in heals:
        assert_same(heal.result(), state)


def test_a_reader_that_waits_for_the_limit_does_not_delay_the_end_of_an_offer() -> None:
    checkpoint = Checkpoint({"w": torch.ones(MB)}, 0)
    offer = Offer(checkpoint)
    stream = checkpoint.stream(FULL)
    assert stream is not None
    cut_off, pacer = MagicMock(), Pacer(1 << 30)
    pieces = offer.read(stream, cut_off, pacer)
    next(pieces)  # the prefix

    def wait(nbytes: int) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(partial(offer.close, 10)).result(20)

    pacer.wait = wait  # type: ignore[method-assign]
    with pytest.raises(ConnectionAbortedError, match="has resumed training"):
        next(pieces)
    cut_off.assert_not_called()
