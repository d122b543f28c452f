"""Requirements for every transport. A new transport joins with an entry in PAIRS."""

from __future__ import annotations

import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from tests.unit.checkpointing.checkpoint_states import assert_same, training_state
from torchft.checkpointing import CheckpointTransport, HTTPTransport
from torchft.checkpointing.client.progress import watched_by
from torchft.checkpointing.native import core
from torchft.checkpointing.pg_transport import PGTransport

TIMEOUT = timedelta(seconds=20)
SHORT = timedelta(seconds=0.2)


@dataclass
class Pair:
    source: CheckpointTransport[Any]
    target: CheckpointTransport[Any]

    def transfer(self, state: Any, step: int = 3) -> Any:
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(self.source.send_checkpoint, [1], step, state, TIMEOUT)
            got = self.target.recv_checkpoint(0, self.source.metadata(), step, TIMEOUT)
            sent.result()
        self.source.disallow_checkpoint()
        return got


def _http(num_chunks: int, native: bool = True) -> Callable[[], Iterator[Pair]]:
    def make() -> Iterator[Pair]:
        with pytest.MonkeyPatch.context() as patch:
            if not native:
                patch.setattr(core, "native", lambda: None)
            source: HTTPTransport[Any] = HTTPTransport(TIMEOUT, num_chunks)
            target: HTTPTransport[Any] = HTTPTransport(TIMEOUT, num_chunks)
            yield Pair(source, target)
            target.shutdown()
            source.shutdown()

    return make


def _process_group() -> Iterator[Pair]:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def group(rank: int) -> dist.ProcessGroup:
        own = dist.TCPStore("localhost", store.port)
        return dist.ProcessGroupGloo(dist.PrefixStore("test", own), rank, 2, TIMEOUT)

    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(group, range(2)))
    source, target = (PGTransport(pg, TIMEOUT, torch.device("cpu")) for pg in groups)  # type: ignore[arg-type]
    yield Pair(source, target)
    target.shutdown()
    source.shutdown()


PAIRS = {
    "http": _http(0),
    "http, upstream format": _http(0, native=False),
    "http, upstream format in chunks": _http(3, native=False),
    "process group": _process_group,
}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield from PAIRS[request.param]()


def test_everything_arrives(pair: Pair) -> None:
    assert_same(pair.transfer(training_state()), training_state())


@pytest.mark.parametrize("state", [{}, {"a": 1}, [], 5, torch.ones(2), {"empty": torch.empty(0)}])
def test_small_and_odd_states(pair: Pair, state: Any) -> None:
    assert_same(pair.transfer(state), state)


def test_the_received_state_is_the_targets_own(pair: Pair) -> None:
    state = {"w": torch.ones(4)}
    got = pair.transfer(state)
    got["w"].add_(1)
    assert state["w"].tolist() == [1, 1, 1, 1]


def test_successive_transfers(pair: Pair) -> None:
    for step in (1, 2, 7):
        assert_same(pair.transfer(training_state(seed=step), step), training_state(seed=step))


def test_no_source(pair: Pair) -> None:
    with pytest.raises(TimeoutError, match="step 3"):
        pair.target.recv_checkpoint(0, pair.source.metadata(), 3, SHORT)


def test_a_loaded_state_continues_equally(pair: Pair) -> None:
    torch.manual_seed(0)
    a, b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    opt_a, opt_b = (torch.optim.Adam(m.parameters()) for m in (a, b))

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    step(a, opt_a)
    got = pair.transfer({"model": a.state_dict(), "optim": opt_a.state_dict()})
    b.load_state_dict(got["model"])
    opt_b.load_state_dict(got["optim"])
    step(a, opt_a)
    step(b, opt_b)
    assert_same(b.state_dict(), a.state_dict())


def test_the_target_reports_its_progress(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    state = {f"w{i}": torch.ones(1 << 20) for i in range(3)}
    seen: list[tuple[int, int]] = []
    with watched_by(lambda received, total: seen.append((received, total))):
        assert_same(pair.transfer(state), state)
    assert seen and all(0 <= received <= total for received, total in seen)
    if not getattr(pair.target, "_num_chunks", 0):  # the size of a chunk is known only when it arrives
        assert 0 <= seen[0][1] - 3 * 4 * (1 << 20) < 1 << 16  # the tensors, and their description
    assert re.search(r"checkpoint of step 3 .*: 0\.013 GB in [\d.]+ s, [\d.]+ GB/s", caplog.text)


@contextmanager
def no_new_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    new = set(threading.enumerate()) - before
    for thread in new:
        thread.join(5)
    assert not [t for t in new if t.is_alive()]


@pytest.mark.parametrize("name", [name for name in PAIRS if name.startswith("http")])
def test_no_thread_is_left(name: str) -> None:
    with no_new_threads():
        for pair in PAIRS[name]():
            pair.transfer(training_state())
