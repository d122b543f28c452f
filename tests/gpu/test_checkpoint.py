"""Healing with a state on the device, over HTTP."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from tests.gpu.device import DEVICE, busy
from torchft.checkpointing import HTTPTransport, _staging

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


def test_two_page_locked_blocks_are_enough_for_any_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_staging, "_free", {})
    state = {"w": torch.arange(5 * _staging.BLOCK // 8 + 3, device=DEVICE)}
    source, target = HTTPTransport(TIMEOUT, 0, snapshot=False), HTTPTransport(TIMEOUT, 0)
    try:
        for step in (1, 2):
            source.send_checkpoint([1], step, state, TIMEOUT)
            got = target.recv_checkpoint(0, source.metadata(), step, TIMEOUT)
            source.disallow_checkpoint()
            assert torch.equal(got["w"].cpu(), state["w"].cpu())
            state["w"] += 1
    finally:
        source.shutdown()
        target.shutdown()
    blocks = _staging._free["cuda"]
    assert len(blocks) == 2 and all(block.is_pinned() for block in blocks)


def test_a_copy_under_way_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` returns when the device has read what a reader was promised, and not before."""
    source = torch.arange(4 * _staging.BLOCK, device=DEVICE, dtype=torch.int32).to(torch.uint8)
    expected = source.cpu()
    torch.cuda.synchronize()
    staged = _staging.Staged(source, _staging.StreamCopies(DEVICE))
    reader = staged.read(0)
    got = [next(reader).clone()]
    staged.close()
    source.fill_(7)
    got += [piece.clone() for piece in reader]
    assert torch.equal(torch.cat(got), expected[: 2 * _staging.BLOCK])
