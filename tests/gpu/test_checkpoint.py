"""Transfers of a state on the device, over HTTP and over Gloo."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tests.gpu.device import DEVICE, busy
from tests.gpu.test_heal_memory import InUpstreamFormat
from tests.unit.checkpointing.checkpoint_states import into
from tests.unit.process_group.ranks import connect
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.memory import staging
from torchft.checkpointing.pg_transport import PGTransport
from torchft.process_group import ProcessGroup, ProcessGroupGloo

TIMEOUT = timedelta(seconds=30)


@pytest.mark.parametrize("num_chunks", [0, 3])
@pytest.mark.parametrize("make", [HTTPTransport[Any], InUpstreamFormat])
def test_a_state_on_the_device_arrives(num_chunks: int, make: type[HTTPTransport[Any]]) -> None:
    state = {
        "weights": torch.arange(1 << 20, dtype=torch.float32, device=DEVICE),
        "half": torch.ones(3, 5, dtype=torch.bfloat16, device=DEVICE).t(),
        "late": torch.zeros(1 << 20, device=DEVICE),
        "host": torch.arange(5),
        "step": 7,
    }
    torch.cuda.synchronize()
    source, target = make(TIMEOUT, num_chunks), HTTPTransport[Any](TIMEOUT, num_chunks)
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
        assert theirs.dtype == mine.dtype and theirs.shape == mine.shape and theirs.device == mine.device
        assert torch.equal(theirs.cpu(), mine.cpu()), name


@pytest.mark.parametrize("make", [InUpstreamFormat, HTTPTransport[Any]])
def test_page_locked_memory_is_of_small_blocks_for_any_state(
    monkeypatch: pytest.MonkeyPatch, make: type[HTTPTransport[Any]]
) -> None:
    sizes: list[int] = []
    page_locked = staging.page_locked
    monkeypatch.setattr(staging, "page_locked", lambda nbytes: sizes.append(nbytes) or page_locked(nbytes))
    state = {"w": torch.arange(5 * staging.BLOCK // 8 + 3, device=DEVICE)}
    source, target = make(TIMEOUT, 0), HTTPTransport[Any](TIMEOUT, 0)
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
    assert sizes and max(sizes) <= staging.BLOCK


def test_tensors_on_the_device_are_received_in_place(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    def state(value: float) -> dict[str, torch.Tensor]:
        large = torch.full((3 * staging.BLOCK // 4 + 5,), value, device=DEVICE)
        return {
            "large": large,
            "small": torch.full((3, 7), value, device=DEVICE).t(),
            "host": torch.full((5,), value),
        }

    own, theirs = state(0.0), state(2.0)
    source, target = HTTPTransport(TIMEOUT, 0), HTTPTransport(TIMEOUT, 0)
    torch.cuda.reset_peak_memory_stats()
    used = torch.cuda.memory_allocated()
    try:
        busy(0.2)
        own["large"].fill_(1)  # queued before the transfer, which must be ordered behind it
        source.send_checkpoint([1], 1, theirs, TIMEOUT)
        got = target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT, target=into(own))
        assert torch.cuda.max_memory_allocated() - used < 1 << 20
        source.disallow_checkpoint()
    finally:
        source.shutdown()
        target.shutdown()
    for name, mine in own.items():
        assert got[name] is mine and torch.equal(mine, theirs[name]), name
    assert "digest " in caplog.text


def test_the_end_of_a_reader_waits_for_a_copy_in_progress() -> None:
    source = torch.arange(4 * staging.BLOCK, device=DEVICE, dtype=torch.int32).to(torch.uint8)
    expected = source[: staging.BLOCK].cpu()
    copies = staging.StreamCopies(DEVICE)
    reader = copies.in_blocks(source)
    got = next(reader).clone()
    reader.close()
    assert copies._stream.query() and torch.equal(got, expected)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_state_on_the_device_over_gloo(store: TCPStore, in_place: bool) -> None:
    """Gloo needs host memory, from which the target's tensors on the device are filled; other tensors stay
    there.
    """
    groups: list[ProcessGroup] = [ProcessGroupGloo(timeout=TIMEOUT) for _ in range(2)]
    connect(groups, store)
    state = {
        "large": torch.arange(1 << 20, device=DEVICE),
        "half": torch.ones(3, 5, device=DEVICE).half().t(),
        "step": 7,
    }
    own = {
        "large": torch.zeros(1 << 20, dtype=torch.int64, device=DEVICE),
        "half": torch.zeros(5, 3, device=DEVICE).half(),
    }
    torch.cuda.synchronize()
    cpu = torch.device("cpu")
    source: PGTransport[Any] = PGTransport(groups[0], TIMEOUT, cpu)
    target: PGTransport[Any] = PGTransport(groups[1], TIMEOUT, cpu, (lambda: own) if in_place else None)
    try:
        with ThreadPoolExecutor(2) as pool:
            sent = pool.submit(source.send_checkpoint, [1], 7, state)
            got = pool.submit(target.recv_checkpoint, 0, "", 7).result(60)
            sent.result(60)
        torch.cuda.synchronize()
    finally:
        for group in groups:
            group.shutdown()
    assert got["step"] == 7
    for name in ("large", "half"):
        assert torch.equal(got[name].cpu(), state[name].cpu()) and (got[name] is own[name]) == in_place, name
