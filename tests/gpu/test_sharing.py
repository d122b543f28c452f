"""CUDA memory and events that two real processes share."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any, Iterator, Optional

import pytest
import torch

from tests.gpu import peer
from tests.gpu.device import BUSY_S, DEVICE, MB, busy, settled_mb, wait_until
from torchft.process_group.isolated import cuda
from torchft.process_group.isolated.sharing import Registration

COUNT = 1 << 18
# Duration of a kernel that no call may wait for. A call that takes half as long fails the test.
LONG_S = 20.0


class Pair:
    """The trainer's end of shared memory in this process, and the worker's end in another process.

    Args:
        values: whether streams wait for values, if the driver lets them; otherwise the host waits for events.
    """

    def __init__(self, values: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=peer.run, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        assert self._answer(60) == "up"
        self.values = values
        self.end = cuda.TrainerEnd(self._notify)
        self.imports = 0
        # Kernels are loaded on first use, which takes long.
        self.double(torch.ones(4, device=DEVICE))
        torch.cuda.synchronize()

    def _answer(self, seconds: float = 30) -> object:
        connection: Connection = self.connection  # type: ignore[assignment]
        assert connection.poll(seconds), "the worker does not answer"
        return connection.recv()

    def _notify(self, note: Any, descriptor: Optional[int], held: Optional[Registration]) -> None:
        if not self.process.is_alive():
            raise RuntimeError("the worker process has ended")
        # The worker opens the file by its name here: a connection does not carry descriptors.
        shares = self.values and descriptor is not None
        self.connection.send(("note", note, f"/proc/{os.getpid()}/fd/{descriptor}" if shares else None))
        self.imports = self._answer()  # type: ignore[assignment]
        if held is not None:
            held.release()

    def start(
        self, tensors: list[torch.Tensor], seconds: float = 0.0
    ) -> tuple[cuda._Mark, list[Registration]]:
        """Makes the worker double the tensors. Returns when the worker has queued that on its stream."""
        registrations = [self.end.register(tensor, True, True) for tensor in tensors]
        self.connection.send(
            ("double", seconds, self.end.mark(), [registration.ref for registration in registrations])
        )
        return self._answer(), registrations  # type: ignore[return-value]

    def double(self, *tensors: torch.Tensor) -> None:
        mark, registrations = self.start(list(tensors))
        self.follow(mark)
        for registration in registrations:
            registration.release()

    def follow(self, mark: cuda._Mark) -> bool:
        """As a wait does; returns whether the host waited."""
        if self.end.follow(mark):
            return False
        wait_until(lambda: self.end.reached(mark))
        return True

    def kill(self) -> None:
        self.process.kill()
        self.process.join(30)
        self.end.close()

    def close(self) -> None:
        if self.process.is_alive():
            self.connection.send(None)
            self.process.join(30)
        self.end.close()
        self.process.close()
        self.connection.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_the_worker_works_on_the_trainers_memory(pair: Pair) -> None:
    whole = torch.arange(24, dtype=torch.float32, device=DEVICE).view(2, 3, 4)
    half, number, empty = whole.bfloat16(), torch.tensor(3, device=DEVICE), torch.empty(0, 2, device=DEVICE)
    pair.double(whole[:, 1:, ::2], half, number, empty)
    expected = torch.arange(24.0).view(2, 3, 4)
    assert torch.equal(half.cpu(), expected.mul(2).bfloat16())
    expected[:, 1:, ::2] *= 2
    assert torch.equal(whole.cpu(), expected)
    assert number.item() == 6


def test_many_operations_need_few_events(pair: Pair) -> None:
    tensor = torch.ones(COUNT, device=DEVICE)
    for _ in range(20):
        pair.double(tensor)
        torch.cuda.synchronize()
    assert tensor.eq(2.0**20).all()
    assert pair.end._marks._count <= 2


def test_the_worker_waits_for_the_trainers_stream(pair: Pair) -> None:
    tensor = torch.full((COUNT,), float("nan"), device=DEVICE)
    torch.cuda.synchronize()
    busy(BUSY_S)
    busy_until = torch.cuda.current_stream().record_event()
    tensor.fill_(3)
    mark, _ = pair.start([tensor])
    reached = pair.end.reached(mark)
    assert not busy_until.query(), "the request waited for the device"
    assert not reached, "the worker did not wait for the stream"
    pair.follow(mark)
    assert tensor.eq(6).all()


@pytest.mark.parametrize("values", [False, True])
def test_the_trainers_stream_waits_for_the_worker(values: bool) -> None:
    pair = Pair(values)
    tensor = torch.full((COUNT,), 3.0, device=DEVICE)
    torch.cuda.synchronize()
    mark, _ = pair.start([tensor], seconds=BUSY_S)
    assert not pair.end.reached(mark)
    on_host = pair.follow(mark)
    assert pair.end.reached(mark) is on_host
    assert on_host is not (values and pair.end._awaited is not None)
    after = tensor.clone()
    tensor.fill_(5)
    torch.cuda.synchronize()
    assert after.eq(6).all() and tensor.eq(5).all()
    pair.close()


def test_memory_is_not_reused_before_the_worker_has_finished(pair: Pair) -> None:
    tensor = torch.full((COUNT,), 3.0, device=DEVICE)
    torch.cuda.synchronize()
    address = tensor.data_ptr()
    mark, registrations = pair.start([tensor], seconds=BUSY_S)
    del tensor
    other = torch.full((COUNT,), 7.0, device=DEVICE)
    assert other.data_ptr() != address
    wait_until(lambda: pair.end.reached(mark))
    assert other.eq(7).all()
    for registration in registrations:
        registration.release()


def test_freed_memory_is_returned_while_the_worker_runs(pair: Pair) -> None:
    small = torch.ones(4, device=DEVICE)
    pair.double(small)
    before = settled_mb()
    big = torch.ones(256 * MB // 4, device=DEVICE)
    pair.double(big)
    assert settled_mb() > before + 200
    del big
    pair.double(small)  # the worker reads the note about the freed memory, and confirms it
    assert pair.imports == 1
    wait_until(lambda: settled_mb() < before + 64)


def test_memory_of_killed_workers_is_returned() -> None:
    tensor = torch.ones(64 * MB // 4, device=DEVICE)
    Pair().kill()
    before = settled_mb()
    for _ in range(3):
        pair = Pair()
        dropped = torch.ones(256 * MB // 4, device=DEVICE)
        pair.start([tensor, dropped], seconds=5.0)
        del dropped
        pair.kill()
    wait_until(lambda: abs(settled_mb() - before) < 64)
    # Memory that was shared with three killed workers can be shared with a fourth.
    pair = Pair()
    tensor.fill_(1)
    pair.double(tensor)
    assert tensor.eq(2).all()
    pair.close()


def test_the_driver_lets_a_stream_wait_for_a_value(pair: Pair) -> None:
    """Otherwise isolated groups are slower, but right: docs/gpu.md."""
    assert pair.end._awaited is not None
    mark, _ = pair.start([torch.ones(4, device=DEVICE)])
    assert not cuda._is_event(mark)


def test_the_trainers_stream_does_not_wait_for_a_killed_worker(pair: Pair) -> None:
    tensor = torch.ones(COUNT, device=DEVICE)
    mark, _ = pair.start([tensor], seconds=LONG_S)
    began = time.monotonic()
    pair.end.follow(mark)
    after = tensor.clone()
    assert not pair.end.reached(mark)
    pair.kill()
    assert time.monotonic() - began < LONG_S / 2, "the device waited for the worker's kernel"
    assert after.isfinite().all()
