"""How much device memory a communicator may take, and when the next one waits for it."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Optional

import pytest
import torch

from torchft._handoff import Handed
from torchft.process_group import ProcessGroupNCCL, accelerator
from torchft.process_group._device_memory import communicator_bytes, free_bytes, waits_for_abort

MIB = 1 << 20


@pytest.mark.parametrize(
    ("world_size", "environment", "mib"),
    [
        (1, {}, 0),
        (2, {}, 294),
        (3, {}, 588),
        (6, {}, 1470),
        (1000, {}, 1470),  # a rank has few neighbors
        (2, {"NCCL_MAX_CTAS": "4"}, 36.75),
        (2, {"NCCL_MAX_NCHANNELS": "4"}, 36.75),
        (2, {"NCCL_BUFFSIZE": str(MIB)}, 198),
        (2, {"NCCL_BUFFSIZE": "", "NCCL_MAX_CTAS": "many"}, 294),
    ],
)
def test_the_estimate_of_a_communicator(world_size: int, environment: dict[str, str], mib: float) -> None:
    assert communicator_bytes(world_size, environment) == mib * MIB


@pytest.mark.parametrize(
    ("free", "needed", "expected"),
    [(None, 1, False), (0, 0, False), (0, 1, True), (99, 100, True), (100, 100, False)],
)
def test_a_communicator_waits_if_it_may_not_fit(free: Optional[int], needed: int, expected: bool) -> None:
    assert waits_for_abort(free, needed) == expected


def test_a_device_that_does_not_say_is_not_full() -> None:
    assert free_bytes(torch.device("cpu")) is None


def test_an_abort_that_hangs_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group, may_end, waits = ProcessGroupNCCL(timedelta(seconds=0.2)), threading.Event(), []

    class Hanging(Handed):
        def wait(self, timeout_sec: float) -> bool:
            waits.append(timeout_sec)
            return super().wait(timeout_sec)

    monkeypatch.setattr(accelerator, "free_bytes", lambda device: MIB)
    group._dropping.append(Hanging(lambda: may_end.wait(60), "hangs"))
    try:
        group._make_room(torch.device("cpu"), 1)
        assert waits == [], "a group of one rank needs no buffers"
        group._make_room(torch.device("cpu"), 2)
        group._make_room(torch.device("cpu"), 2)
        assert len(waits) == 1 and waits[0] <= 0.1, "half of the timeout of connecting"
        assert caplog.text.count("the former communicator was not freed within 0.1 s") == 1
    finally:
        may_end.set()
