"""A timeout of a whole transfer, or of one without data."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.unit.checkpointing.faulty_proxy import Fault
from tests.unit.checkpointing.test_faults import TIMEOUT, Wire
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.client.deadline import Deadline
from torchft.checkpointing.client.target import TargetState
from torchft.checkpointing.native import core
from torchft.checkpointing.transport import CheckpointTimeout

MB = 1 << 20
SHORT = timedelta(seconds=0.7)


@pytest.mark.parametrize(
    ("of_progress", "left", "text"),
    [(False, 1.0, "after 9.0 seconds"), (True, 6.0, "because nothing arrived for 10 seconds")],
)
def test_data_moves_a_deadline_of_progress_only(of_progress: bool, left: float, text: str) -> None:
    now = [100.0]
    deadline = Deadline(10, of_progress, clock=lambda: now[0])
    assert deadline.left == 10
    now[0] = 105
    deadline.arrived()
    now[0] = 109
    assert deadline.left == left and deadline.passed() == text


@pytest.fixture(
    params=[
        "native",
        *(pytest.param(f"upstream format{more}", marks=pytest.mark.slow) for more in ("", " in chunks")),
    ]
)
def ends(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[HTTPTransport[Any]]]:
    """A source that sends 2 MB in a second, and a target."""
    if request.param != "native":
        monkeypatch.setattr(core, "native", lambda: None)
    chunks = 2 if request.param.endswith("chunks") else 0
    made = [HTTPTransport[Any](TIMEOUT, chunks, bandwidth_limit=2 * MB) for _ in range(2)]
    yield made
    for transport in made:
        transport.shutdown()


def receive(target: HTTPTransport[Any], metadata: str, waited_for: bool, own: Any) -> Any:
    where = TargetState(lambda: own, writable=False, waited_for=waited_for)
    return target.recv_checkpoint(0, metadata, 1, SHORT, target=where)


def test_a_heal_that_receives_data_is_not_ended(ends: list[HTTPTransport[Any]]) -> None:
    """It takes three times its timeout. If the other groups do not wait for it, the timeout is that of the
    whole.
    """
    source, target = ends
    state = {f"w{i}": torch.ones(MB) for i in range(2)}  # 8 MB
    source.send_checkpoint([1], 1, state, TIMEOUT)
    with pytest.raises(CheckpointTimeout, match=r"timed out after 0\.[78] seconds"):
        receive(target, source.metadata(), False, {})
    got = receive(target, source.metadata(), True, {})
    assert all(torch.equal(got[name], state[name]) for name in state)


def test_a_heal_that_receives_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = (HTTPTransport[Any](TIMEOUT, 0) for _ in range(2))
    source.send_checkpoint([1], 1, {"w": torch.ones(4 * MB)}, TIMEOUT)
    wire = Wire(source, [], [Fault("delay", MB, True, seconds=60.0) for _ in range(8)])
    try:
        with pytest.raises(
            CheckpointTimeout, match=r"step 1 .*: timed out because nothing arrived for 0\.7 seconds"
        ):
            receive(target, wire.metadata, True, {})
    finally:
        wire.close()
        source.shutdown()
        target.shutdown()
