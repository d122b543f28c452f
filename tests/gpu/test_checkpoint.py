"""Healing with a state on the device, over HTTP."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from tests.gpu.device import DEVICE, busy
from torchft.checkpointing import HTTPTransport

TIMEOUT = timedelta(seconds=30)


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_a_state_on_the_device_arrives(num_chunks: int) -> None:
    state = {
        "weights": torch.arange(1 << 20, dtype=torch.float32, device=DEVICE),
        "half": torch.ones(3, 5, dtype=torch.bfloat16, device=DEVICE).t(),
        "late": torch.zeros(1 << 20, device=DEVICE),
        "host": torch.arange(5),
        "step": 7,
    }
    torch.cuda.synchronize()
    source, target = HTTPTransport(TIMEOUT, num_chunks), HTTPTransport(TIMEOUT, num_chunks)
    try:
        busy(0.2)
        state["late"].fill_(3)  # type: ignore[attr-defined]
        source.send_checkpoint([1], 7, state, TIMEOUT)
        got = target.recv_checkpoint(0, source.metadata(), 7, TIMEOUT)
        source.disallow_checkpoint()
    finally:
        source.shutdown()
        target.shutdown()
    assert got.keys() == state.keys() and got["step"] == 7
    for name in ("weights", "half", "late", "host"):
        mine, theirs = state[name], got[name]
        assert isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)
        assert theirs.dtype == mine.dtype and theirs.shape == mine.shape
        assert torch.equal(theirs.cpu(), mine.cpu()), name
