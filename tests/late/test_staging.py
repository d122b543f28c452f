"""Staging on the test device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.late.observed import BLOCK, Observed, numbers, until
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.client.target import TargetState
from torchft.checkpointing.codec.requests import FULL
from torchft.checkpointing.memory import staging
from torchft.checkpointing.memory.reservation import NoRoom, Reservation
from torchft.checkpointing.memory.staging import StreamCopies, Uploads
from torchft.checkpointing.source import offer as offers
from torchft.checkpointing.source.checkpoint import Checkpoint
from torchft.checkpointing.source.offer import Offer
from torchft.checkpointing.source.pacer import Pacer
from torchft.utils import get_stream_context

TIMEOUT = timedelta(seconds=20)


@pytest.mark.parametrize("nbytes", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_every_byte_once(device: type[Observed], nbytes: int) -> None:
    source, copies = numbers(nbytes), Observed(torch.device("late:0"))
    pieces = [piece.clone() for piece in copies.in_blocks(source)]
    assert torch.equal(torch.cat(pieces), source.cpu())
    assert copies.most_under_way <= 2


def test_the_next_block_is_copied_while_one_is_used(device: type[Observed]) -> None:
    copies = Observed(torch.device("late:0"))
    reader = copies.in_blocks(numbers(5 * BLOCK))
    for used in range(1, 5):
        piece = next(reader)
        before = piece.clone()
        until(lambda used=used: copies.ended == used + 1)  # while this block is being used
        assert torch.equal(piece, before)
        assert copies.under_way == 0  # no further copy is started, because there are two blocks
    assert copies.blocks == 2


def test_no_copy_is_in_progress_after_the_end(
    device: type[Observed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Observed, "late", 0.2)
    copies = Observed(torch.device("late:0"))
    reader = copies.in_blocks(numbers(3 * BLOCK))
    next(reader)
    reader.close()  # the second block's copy was under way
    assert copies.under_way == 0


def test_an_offer_of_device_memory(device: type[Observed], monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader in the middle of a tensor gets an error."""
    monkeypatch.setattr(offers, "_SMALL_TENSORS", 0)
    monkeypatch.setattr(offers, "_PIECE", BLOCK)
    state = {"w": numbers(4 * BLOCK)}
    expected = state["w"].cpu()
    checkpoint = Checkpoint(state, 0)
    offer = Offer(checkpoint)
    stream = checkpoint.stream(FULL)
    assert stream is not None
    pieces = offer.read(stream, lambda: None, Pacer())
    next(pieces)  # the prefix
    got = bytes(next(pieces)) + bytes(next(pieces))
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(offer.close, 10)
        until(lambda: offer._closed)
        with pytest.raises(ConnectionAbortedError, match="has resumed training"):
            next(pieces)
        closed.result(20)
    assert torch.equal(torch.frombuffer(bytearray(got), dtype=torch.uint8), expected[: 2 * BLOCK])


@pytest.mark.parametrize("num_chunks", [0, 2])
def test_a_heal_from_device_memory(
    device: type[Observed], num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(nbytes: int, share: int) -> Reservation:
        raise NoRoom(0)

    monkeypatch.setattr(offers, "reserve", full)
    state = {
        "w": numbers(3 * BLOCK + 7),
        "b": torch.ones(3, device="late"),
        "empty": torch.empty(0, device="late"),
        "lr": 0.1,
    }
    source: HTTPTransport[Any] = HTTPTransport(TIMEOUT, num_chunks)
    target: HTTPTransport[Any] = HTTPTransport(TIMEOUT, num_chunks)
    try:
        source.send_checkpoint([1], 1, state, TIMEOUT)
        got = target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    finally:
        source.shutdown()
        target.shutdown()
    assert got["lr"] == 0.1 and all(torch.equal(got[key], state[key]) for key in ("w", "b", "empty"))


def test_small_tensors_are_copied_before_a_forward_pass_on_another_stream(late: Any) -> None:
    """A batch norm changes its statistics as soon as the source has offered its state."""
    source, target = HTTPTransport[Any](TIMEOUT, 0), HTTPTransport[Any](TIMEOUT, 0)
    mean, beside = torch.zeros(3, device="late"), torch.Stream("late:0")

    def send() -> None:
        with get_stream_context(beside):
            source.send_checkpoint([1], 1, {"mean": mean}, TIMEOUT)

    try:
        with ThreadPoolExecutor(1) as pool:
            with late.held(beside):
                sent = pool.submit(send)
                with pytest.raises(TimeoutError):
                    sent.result(0.2)
            sent.result(60)
        mean.fill_(7)
        got = target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
        assert got["mean"].tolist() == [0, 0, 0]
    finally:
        source.shutdown()
        target.shutdown()


def test_copies_are_ordered_behind_work_queued_on_the_device(late: Any) -> None:
    source = torch.zeros(BLOCK, dtype=torch.uint8, device="late")
    training = torch.accelerator.current_stream()
    with late.held(training):
        source.fill_(7)
        copies = StreamCopies(source.device)
        block = copies.block(BLOCK)
        copied = copies.start(block, source)
        assert not copies._stream.query(), "a copy overtook the training's stream"
    assert copied.wait(60)
    assert block.unique().tolist() == [7]


LATE = torch.device("late:0")


def test_host_memory_is_copied_to_the_device_without_a_wait_for_each_copy(
    late: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An asynchronous quorum's state waits in host memory, and is copied between two steps."""
    monkeypatch.setattr(staging, "BLOCK", 1 << 10)
    sizes = [1, 100, 3, 500, 2048, 7, 0]
    own = {str(i): torch.zeros(size, device=LATE) for i, size in enumerate(sizes)}
    expected = {str(i): torch.arange(float(size)) for i, size in enumerate(sizes)}
    expected["new"] = torch.ones(300)
    state = {name: tensor.clone() for name, tensor in expected.items()}
    target = TargetState(lambda: own, writable=False)
    target.devices = {(f"[{name!r}]",): "late:0" for name in state}
    late.hold()
    with ThreadPoolExecutor(1) as pool:
        settled = pool.submit(target.settle, state)
        try:
            until(lambda: late.pending() >= 5 or settled.done())  # those of the first two blocks
            assert not settled.done(), "the device does not have them yet"
        finally:
            late.release()
        got = settled.result(60)
    assert all(got[name] is own[name] for name in own) and got["new"].device == LATE
    assert all(torch.equal(got[name].cpu(), expected[name]) for name in expected)


def test_weights_are_read_before_they_are_replaced_and_after_they_arrived(
    late: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "BLOCK", 1 << 10)
    late.delays(5, 0, 500)
    weights, read = torch.zeros(5000, device=LATE), torch.empty(5000, device=LATE)
    with late.held():
        read.copy_(weights)  # by a kernel of the last step
        with ThreadPoolExecutor(1) as pool:
            target = TargetState(lambda: {"w": weights}, writable=False)
            target.devices = {("['w']",): "late:0"}
            settled = pool.submit(target.settle, {"w": torch.ones(5000)})
            until(lambda: late.pending() > 1)
            late.release()
            settled.result(60)
    after = weights * 2
    assert read.tolist() == [0.0] * 5000 and after.tolist() == [2.0] * 5000


def test_a_device_that_takes_no_data_has_a_deadline(late: Any) -> None:
    weights, uploads = torch.zeros(50, device=LATE), Uploads(0.1)
    with late.held():
        uploads.copy(weights, torch.ones(50))
        with pytest.raises(TimeoutError, match=r"late:0 did not take a part of a state within 0\.1 s"):
            uploads.finish()
    assert weights.tolist() == [1.0] * 50
