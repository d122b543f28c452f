from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, Callable, Iterator, cast

import pytest
import torch
import torch.distributed as dist

from tests.unit.checkpointing.checkpoint_states import Evil, assert_same, training_state
from tests.unit.process_group.backends import NATIVE
from tests.unit.process_group.ranks import connect, meeting, natives, on_ranks
from torchft.checkpointing import pg_transport
from torchft.checkpointing.client.deadline import Deadline
from torchft.checkpointing.client.target import TargetState
from torchft.checkpointing.pg_transport import PGTransport
from torchft.checkpointing.transport import CheckpointError
from torchft.process_group import (
    ProcessGroupBabyGloo,
    ProcessGroupGloo,
    create_store_client,
    reconfigure_with_store,
)

TIMEOUT = timedelta(seconds=20)
CPU = torch.device("cpu")


@pytest.fixture
def groups() -> Iterator[list[Any]]:
    """Three ranks of one Gloo group, in this process."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def group(rank: int) -> dist.ProcessGroup:
        return dist.ProcessGroupGloo(dist.TCPStore("localhost", store.port), rank, 3, TIMEOUT)

    with ThreadPoolExecutor(3) as pool:
        yield list(pool.map(group, range(3)))


def run(*calls: Callable[[], Any]) -> list[Any]:
    """Runs the calls concurrently. Returns their results or exceptions."""

    def result(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(result, calls))


def test_several_targets_at_once(groups: list[Any]) -> None:
    source, *targets = (PGTransport(group, TIMEOUT, CPU) for group in groups)
    state = training_state()
    results = run(
        lambda: source.send_checkpoint([1, 2], 4, state),
        *[lambda t=t: t.recv_checkpoint(0, source.metadata(), 4) for t in targets],
    )
    assert results[0] is None
    for got in results[1:]:
        assert_same(got, state)


def test_no_targets(groups: list[Any]) -> None:
    PGTransport(groups[0], TIMEOUT, CPU).send_checkpoint([], 4, {"a": 1})


def test_in_place(groups: list[Any]) -> None:
    state = training_state(seed=1)
    mine = training_state(seed=2)
    mine["user"]["default"]["optim"]["state"] = {}  # a new optimizer has no state
    mine["user"]["tensors"]["bf16"] = torch.zeros(7)  # another shape
    transposed = mine["user"]["tensors"]["transposed"]
    source, target = PGTransport(groups[0], TIMEOUT, CPU), PGTransport(groups[1], TIMEOUT, CPU, lambda: mine)
    _, got = run(lambda: source.send_checkpoint([1], 4, state), lambda: target.recv_checkpoint(0, "", 4))
    assert_same(got, state)
    weights = mine["user"]["default"]["model"]
    assert all(got["user"]["default"]["model"][name] is tensor for name, tensor in weights.items())
    assert got["user"]["tensors"]["transposed"] is transposed and not transposed.is_contiguous()


def test_large_tensors_are_sent_in_pieces(groups: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pg_transport, "_PIECE", 1000)
    source, target = (PGTransport(group, TIMEOUT, CPU) for group in groups[:2])
    state = {"a": torch.randn(777), "b": torch.randn(10)}
    _, got = run(lambda: source.send_checkpoint([1], 4, state), lambda: target.recv_checkpoint(0, "", 4))
    assert_same(got, state)


def test_keys_of_any_kind(groups: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends cut a state into pieces of the same size, and the target finds its existing tensors."""
    monkeypatch.setattr(pg_transport, "_LEAST_PIECE", 64)
    state = {
        (1, "a"): torch.arange(30_000.0),
        torch.float16: torch.ones(5),
        b"x": {2**70: torch.full((7,), 3.0)},
    }
    own = {(1, "a"): torch.zeros(30_000), torch.float16: torch.zeros(5), b"x": {2**70: torch.zeros(7)}}
    source, target = PGTransport(groups[0], TIMEOUT, CPU), PGTransport(groups[1], TIMEOUT, CPU, lambda: own)
    sent, got = run(lambda: source.send_checkpoint([1], 4, state), lambda: target.recv_checkpoint(0, "", 4))
    assert sent is None
    assert_same(got, state)
    assert got[1, "a"] is own[1, "a"] and got[b"x"][2**70] is own[b"x"][2**70]


# A target that cannot receive a state: the source sends all of it, and continues


def test_a_wrong_step(groups: list[Any]) -> None:
    source, target = (PGTransport(group, TIMEOUT, CPU) for group in groups[:2])
    state = {"a": torch.ones(1000)}
    sent, got = run(lambda: source.send_checkpoint([1], 4, state), lambda: target.recv_checkpoint(0, "", 5))
    assert sent is None and isinstance(got, CheckpointError)
    assert "step 5 from rank 0" in str(got) and "sends step 4" in str(got)


def test_no_target_and_no_source(groups: list[Any]) -> None:
    short = timedelta(seconds=0.2)
    transport = PGTransport(groups[0], short, CPU)
    with pytest.raises(
        TimeoutError, match=r"checkpoint of step 4 from rank 1: timed out after 0.2 seconds"
    ) as caught:
        transport.recv_checkpoint(1, "", 4)
    assert isinstance(caught.value, RuntimeError), "the error of the upstream transport"
    transport = PGTransport(groups[2], short, CPU)
    with pytest.raises((TimeoutError, CheckpointError), match="checkpoint of step 4 to"):
        transport.send_checkpoint([1], 4, {"a": torch.ones(1 << 22)})


def test_a_malicious_header_runs_no_code(groups: list[Any], tmp_path: Any) -> None:
    source, target = (PGTransport(group, TIMEOUT, CPU) for group in groups[:2])
    state = {"a": Evil(str(tmp_path / "proof"))}
    _, got = run(lambda: source.send_checkpoint([1], 4, state), lambda: target.recv_checkpoint(0, "", 4))
    assert isinstance(got, CheckpointError) and "system" in str(got)
    assert not (tmp_path / "proof").exists()


def test_a_peer_with_another_protocol(groups: list[Any]) -> None:
    def speak() -> None:
        groups[0].send([torch.tensor([5, 4, 6])], 1, 1).wait()

    _, got = run(speak, lambda: PGTransport(groups[1], TIMEOUT, CPU).recv_checkpoint(0, "", 4))
    assert isinstance(got, CheckpointError) and "no header but [5, 6]" in str(got)


def test_no_memory_at_the_target(groups: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros

    def refuse(shape: Any, *args: Any, **kwargs: Any) -> Any:
        if shape == 2800:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return zeros(shape, *args, **kwargs)

    source, target = (PGTransport(group, TIMEOUT, CPU) for group in groups[:2])
    state = {"a": torch.ones(3), "b": torch.ones(100, 7), "c": torch.ones(2, 200_000), "d": torch.ones(0)}
    monkeypatch.setattr(pg_transport.torch, "zeros", refuse)
    sent, got = run(lambda: source.send_checkpoint([1], 4, state), lambda: target.recv_checkpoint(0, "", 4))
    assert sent is None and isinstance(got, CheckpointError)
    assert str(got) == "checkpoint of step 4 from rank 0: no memory for a tensor of 2800 bytes"


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-1)])
def test_bad_settings(timeout: timedelta) -> None:
    with pytest.raises(ValueError, match=r"timeout=.*: must be longer than 0s"):
        PGTransport(None, timeout, CPU)  # type: ignore[arg-type]


def connected(make: Callable[[], list[Any]]) -> list[Any]:
    """Returns process groups whose timeout also limits their connection: other groups if that took too
    long.
    """
    for _ in range(20):
        with suppress(RuntimeError):
            return make()
    return make()


@pytest.mark.parametrize(
    "isolated_rank",
    [pytest.param(0, id="source", marks=pytest.mark.slow), pytest.param(1, id="target")],
)
def test_the_timeout_of_a_call_wins_when_it_is_longer(isolated_rank: int) -> None:
    """The call's timeout is longer than those of the transport and the process group. The worker of an
    isolated group applies the group's timeout itself.
    """
    late_sec = 2.0  # seconds by which the other end is late
    short = timedelta(seconds=1.5)  # also the timeout of connecting
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def make() -> list[Any]:
        groups: list[Any] = [ProcessGroupGloo(TIMEOUT), ProcessGroupGloo(TIMEOUT)]
        groups[isolated_rank] = ProcessGroupBabyGloo(short)
        try:
            connect(groups, store)
        except RuntimeError:
            for group in groups:
                group.shutdown()
            raise
        return groups

    groups = connected(make)
    try:
        source, target = (PGTransport(group, short, CPU) for group in groups)
        # More than a connection buffers while the other end does not read.
        state = {"a": torch.randn(1 << 22)}
        late = threading.Event()

        def lately(rank: int, call: Callable[[], Any]) -> Any:
            if rank != isolated_rank:
                late.wait(late_sec)
            return call()

        _, got = run(
            lambda: lately(0, lambda: source.send_checkpoint([1], 4, state, TIMEOUT)),
            lambda: lately(1, lambda: target.recv_checkpoint(0, "", 4, TIMEOUT)),
        )
        assert_same(got, state)
    finally:
        for group in groups:
            group.shutdown()


def of_torchft(store: dist.TCPStore, timeout: timedelta) -> list[Any]:
    groups = [ProcessGroupGloo(timeout), ProcessGroupGloo(timeout)]
    connect(groups, store)
    return groups


def of_pytorch(store: dist.TCPStore, timeout: timedelta) -> list[Any]:
    where = meeting(store)
    own = [create_store_client(where, TIMEOUT) for _ in range(2)]
    return on_ranks(2, lambda rank: dist.ProcessGroupGloo(own[rank], rank, 2, timeout))


def native(store: dist.TCPStore, timeout: timedelta) -> list[Any]:
    groups, where = natives(store, 2), meeting(store)
    on_ranks(2, lambda rank: reconfigure_with_store(groups[rank], where, rank, 2, timeout))
    for group in groups:
        group.set_timeout(timeout)
    return groups


@pytest.mark.parametrize(
    "make",
    [
        of_torchft,
        pytest.param(of_pytorch, marks=pytest.mark.slow),
        pytest.param(native, marks=pytest.mark.skipif(not NATIVE, reason="needs PyTorch >= 2.14")),
    ],
)
def test_the_timeout_of_a_call_wins_over_that_of_gloo(make: Callable[..., list[Any]]) -> None:
    """The call's timeout is longer than those of the transport and the process group, in both directions; the
    peer is late by more than these.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    short, late = timedelta(seconds=1), threading.Event()
    pairs = [connected(lambda: make(store, short)) for _ in range(2)]
    state = {"a": torch.randn(1 << 22)}  # more than a connection buffers while the other end does not read

    def send(group: Any) -> None:
        PGTransport(group, short, CPU).send_checkpoint([1], 4, state, TIMEOUT)

    def recv(group: Any) -> Any:
        return PGTransport(group, short, CPU).recv_checkpoint(0, "", 4, TIMEOUT)

    def lately(call: Callable[[], Any]) -> Any:
        late.wait(1.3 * short.total_seconds())
        return call()

    (first, second), (third, fourth) = pairs
    results = run(
        lambda: send(first),
        lambda: lately(lambda: recv(second)),
        lambda: lately(lambda: send(third)),
        lambda: recv(fourth),
    )
    assert (results[0], results[2]) == (None, None)
    assert_same(results[1], state)
    assert_same(results[3], state)


def test_the_timeout_of_a_call_wins_when_it_is_shorter(groups: list[Any]) -> None:
    short = timedelta(seconds=0.2)
    source, target = (PGTransport(group, TIMEOUT, CPU) for group in groups[:2])
    with pytest.raises(TimeoutError, match=r"timed out after 0\.2 seconds"):
        target.recv_checkpoint(2, "", 4, short)
    with pytest.raises(TimeoutError, match=r"timed out after 0\.2 seconds"):
        source.send_checkpoint([2], 4, {"a": torch.ones(1 << 22)}, short)


def test_the_connections_of_a_transfer_share_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that does not come costs the others no further timeout."""
    now, given = [100.0], list[float]()
    monkeypatch.setattr(pg_transport, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Group:
        def pair(self, peer: int, name: str, timeout: timedelta) -> None:
            given.append(timeout.total_seconds())
            now[0] += 7

    pg_transport.connected(Group(), [1, 2, 3], "4", timedelta(seconds=10))  # type: ignore[arg-type]
    assert given == [10, 3, pg_transport._EARLY]


@pytest.mark.parametrize("waited_for", [True, False])
@pytest.mark.parametrize("each_sec", [7.0, 11.0])
def test_each_piece_moves_the_deadline(
    monkeypatch: pytest.MonkeyPatch, waited_for: bool, each_sec: float
) -> None:
    """If the other groups do not wait for the target, its timeout is that of the whole transfer."""
    now, sent = [100.0], list[torch.Tensor]()
    monkeypatch.setattr(pg_transport, "Deadline", partial(Deadline, clock=lambda: now[0]))

    class Moved:
        def wait(self, timeout: timedelta) -> bool:
            now[0] += min(each_sec, timeout.total_seconds())
            if each_sec > timeout.total_seconds():
                raise TimeoutError
            return True

    class Group:
        def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Moved:
            sent.append(tensors[0].clone())
            return Moved()

        def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Moved:
            tensors[0].copy_(sent.pop(0))
            return Moved()

        def abort(self) -> None:
            pass

    transport, timeout = PGTransport(cast(Any, Group()), TIMEOUT, CPU), timedelta(seconds=10)
    state = {"a": torch.randn(1 << 18)}  # in several pieces
    target = TargetState(dict, writable=True, waited_for=waited_for)
    if each_sec > 10:
        with pytest.raises(TimeoutError, match=r"timed out after 10 seconds without progress"):
            transport.send_checkpoint([1], 4, state, timeout)
        return
    transport.send_checkpoint([1], 4, state, timeout)
    assert len(sent) > 4
    if waited_for:
        assert_same(transport.recv_checkpoint(0, "", 4, timeout, target), state)
    else:
        with pytest.raises(TimeoutError, match=r"timed out after 10 seconds$"):
            transport.recv_checkpoint(0, "", 4, timeout, target)
