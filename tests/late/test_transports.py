"""Transports between groups with different devices: received tensors go to the devices of the target's own
state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

from tests.gpu import two_ranks
from tests.late import load
from torchft.checkpointing import CheckpointTransport, HTTPTransport, pg_transport
from torchft.checkpointing.client.deadline import Deadline
from torchft.checkpointing.client.target import BufferMap, TargetState
from torchft.checkpointing.memory import reservation
from torchft.checkpointing.native import core
from torchft.checkpointing.pg_transport import PGTransport
from torchft.checkpointing.source import offer
from torchft.checkpointing.transport import CheckpointError, CheckpointTimeout, Unsendable
from torchft.process_group import ProcessGroupGloo
from torchft.process_group.native import abort_group
from torchft.utils import get_stream_context

load()
from tests.late.group import ProcessGroupLate, together  # noqa: E402
from tests.late.test_reconfigure import LATE, ranks, reconfigure  # noqa: E402

TIMEOUT = timedelta(seconds=30)
Pair = tuple[CheckpointTransport[Any], CheckpointTransport[Any]]


def http(stack: ExitStack, num_chunks: int = 0, native: bool = True) -> Pair:
    if not native:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(core, "native", lambda: None)
    pair = HTTPTransport[Any](TIMEOUT, num_chunks), HTTPTransport[Any](TIMEOUT, num_chunks)
    for transport in pair:
        stack.callback(transport.shutdown)
    return pair


def process_group(stack: ExitStack, on_device: bool) -> Pair:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    stack.enter_context(nullcontext(store))  # where the ends of each transfer meet

    def end(rank: int) -> PGTransport[Any]:
        torch.accelerator.set_device_index(rank)
        group = ProcessGroupLate(timeout=TIMEOUT) if on_device else ProcessGroupGloo(timeout=TIMEOUT)
        stack.callback(group.shutdown)
        group.configure(f"localhost:{store.port}/test", f"rank{rank}", rank, 2)
        return PGTransport(group, TIMEOUT, torch.device("late", rank) if on_device else torch.device("cpu"))

    with ThreadPoolExecutor(2) as pool:
        source, target = pool.map(end, range(2))
    return source, target


PAIRS: dict[str, Callable[[ExitStack], Pair]] = {
    "http": http,
    "http, upstream format": lambda stack: http(stack, native=False),
    "http, upstream format in chunks": lambda stack: http(stack, 3, native=False),
    "Gloo": lambda stack: process_group(stack, on_device=False),
    "process group on the device": lambda stack: process_group(stack, on_device=True),
}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, late: Any) -> Iterator[Pair]:
    late.delays(11, 0, 200)
    with ExitStack() as stack:
        yield PAIRS[request.param](stack)


def transfer(pair: Pair, state: Any, own: Any, writable: bool, devices: tuple[int, int] = (0, 1)) -> Any:
    """Returns the state that a target receives. Each end runs on a thread with its own current device."""
    source, target = pair

    def send() -> None:
        torch.accelerator.set_device_index(devices[0])
        source.send_checkpoint([1], 3, state, TIMEOUT)

    def receive() -> Any:
        torch.accelerator.set_device_index(devices[1])
        where = TargetState(lambda: own, writable)
        got = target.recv_checkpoint(0, source.metadata(), 3, TIMEOUT, target=where)
        if not writable:
            assert all(leaf.device.type == "cpu" for leaf in tensors(got)), "on a device before it is settled"
        return where.settle(got)

    with ThreadPoolExecutor(2) as pool:
        sent, got = pool.submit(send), pool.submit(receive)
        sent.result(60)
        result = got.result(60)
    source.disallow_checkpoint()
    return result


def tensors(state: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def state_on(first: str, second: str, value: float) -> dict[str, Any]:
    """A state with tensors on two devices, and some on the host."""
    return {
        "first": torch.full((300, 1000), value, device=first),
        "second": [torch.full((50, 7), value + 1, device=second), torch.full((), 2 * value, device=second)],
        "transposed": torch.arange(12.0).reshape(3, 4).mul(value).to(first).t(),
        "other shape": torch.full((5,), value, device=first),
        "host": torch.full((9,), value),
        "step": value,
    }


@pytest.mark.parametrize("writable", [True, False], ids=["in place", "settled"])
def test_each_tensor_goes_to_the_targets_device_for_it(pair: Pair, writable: bool) -> None:
    """The source uses the devices 0 and 2, the target 1 and 3. The target's new Adam has no state yet."""
    state = state_on("late:0", "late:2", 5.0)
    state["adam"] = {0: {"exp_avg": torch.full((100, 100), 7.0, device="late:0"), "step": torch.tensor(3.0)}}
    state["adam"][1] = {"exp_avg": torch.full((10,), 8.0, device="late:2")}
    own = state_on("late:1", "late:3", 1.0)
    own["other shape"] = torch.zeros(6, device="late:1")
    got = transfer(pair, state, own, writable)
    assert got["first"] is own["first"] and got["transposed"] is own["transposed"]
    assert got["second"][0] is own["second"][0] and got["second"][1] is own["second"][1]
    for theirs, mine in zip(tensors(state), tensors(got), strict=True):
        expected = {"late:0": "late:1", "late:2": "late:3", "cpu": "cpu"}[str(theirs.device)]
        assert str(mine.device) == expected and torch.equal(theirs.cpu(), mine.cpu())
    assert got["step"] == 5.0


@pytest.mark.parametrize(
    ("own", "source", "of", "home"),
    [
        # the device of the target's tensor that corresponds to the source's other tensor on late:2
        (["late:1", "late:3"], ["late:0", "late:2"], "late:2", "late:3"),
        # the target has the source's tensors of late:0 on several devices: the device of most of them
        (["late:1", "late:3", "late:3"], ["late:0", "late:0", "late:0"], "late:0", "late:3"),
        # the source has no other tensor on late:2: the target's only device of the same type
        (["late:1", "cpu"], ["late:0", "cpu"], "late:2", "late:1"),
        # Ambiguous: the target has two devices.
        (["late:1", "late:3"], ["late:0", "late:0"], "late:2", "cpu"),
        (["cpu"], ["late:0"], "late:0", "cpu"),
        ([], [], "late:0", "cpu"),
        (["late:1"], ["cpu"], "cpu", "cpu"),
    ],
)
def test_the_device_of_a_tensor_that_the_target_does_not_have(
    late: Any, own: list[str], source: list[str], of: str, home: str
) -> None:
    mine = {(str(i),): torch.empty(1, device=device) for i, device in enumerate(own)}
    theirs = {(str(i),): device for i, device in enumerate(source) if device != "cpu"}
    assert str(BufferMap(mine, theirs).of(of)) == home


@pytest.mark.parametrize("writable", [True, False], ids=["in place", "settled"])
def test_a_target_without_the_devices_of_the_source(pair: Pair, writable: bool) -> None:
    """The target's existing tensors are filled where they are. Other received tensors stay on the host; the
    target's load function can move them.
    """
    state, own = state_on("late:0", "late:2", 5.0), state_on("cpu", "cpu", 1.0)
    del own["second"]
    got = transfer(pair, state, own, writable)
    for theirs, mine in zip(tensors(state), tensors(got), strict=True):
        assert mine.device.type == "cpu" and torch.equal(theirs.cpu(), mine)


def test_a_target_whose_state_cannot_be_read_heals_in_memory_of_the_host(pair: Pair) -> None:
    source, target = pair

    def fail() -> Any:
        raise AttributeError("no optimizer yet")

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(source.send_checkpoint, [1], 3, {"w": torch.ones(5, device="late:0")}, TIMEOUT)
        got = target.recv_checkpoint(
            0, source.metadata(), 3, TIMEOUT, target=TargetState(fail, writable=True)
        )
        sent.result(60)
    assert got["w"].device.type == "cpu" and got["w"].tolist() == [1] * 5


def test_a_transport_without_a_target_uses_the_current_device(late: Any) -> None:
    with ExitStack() as stack:
        for make in (http, PAIRS["http, upstream format"]):
            source, target = make(stack)
            source.send_checkpoint([1], 3, {"w": torch.ones(5, device="late:0")}, TIMEOUT)
            torch.accelerator.set_device_index(2)
            try:
                got = target.recv_checkpoint(0, source.metadata(), 3, TIMEOUT)
            finally:
                torch.accelerator.set_device_index(0)
            assert str(got["w"].device) == "late:2" and got["w"].tolist() == [1] * 5


def test_a_tensor_without_data_is_refused_and_the_target_gets_the_reason(pair: Pair) -> None:
    """The target gets the reason at once, without waiting for the timeout."""
    source, target = pair
    state = {"model": {"w": torch.empty(3, device="meta")}}
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(target.recv_checkpoint, 0, source.metadata(), 3, TIMEOUT)
        with pytest.raises(
            Unsendable, match=r"\['model'\]\['w'\] is on the meta device: it has no data to send"
        ):
            source.send_checkpoint([1], 3, state, TIMEOUT)
        with pytest.raises(
            CheckpointError, match=r"cannot send its state.*\['model'\]\['w'\] is on the meta device"
        ):
            got.result(60)
    assert time.monotonic() - begun < TIMEOUT.total_seconds() / 2


@pytest.fixture
def held_at_the_tensors(late: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds the devices when a process group's source has sent its header, so that all further work is only
    queued.
    """
    announced = pg_transport._Channel.announced

    def stop(self: Any, nbytes: int) -> None:
        announced(self, nbytes)
        if self.progress is None:  # the source's channel
            torch.accelerator.synchronize()
            late.hold()

    monkeypatch.setattr(pg_transport._Channel, "announced", stop)


def test_the_source_may_continue_when_the_device_has_sent(late: Any, held_at_the_tensors: None) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        source, target = process_group(stack, on_device=True)
        weights = torch.full((1000,), 3.0, device="late:0")
        got = pool.submit(target.recv_checkpoint, 0, "", 3, TIMEOUT)
        sent = pool.submit(source.send_checkpoint, [1], 3, {"w": weights}, TIMEOUT)
        try:
            with pytest.raises(FutureTimeout):
                sent.result(0.3)
        finally:
            late.release()
        sent.result(60)
        weights.fill_(-1)
        assert got.result(60)["w"].tolist() == [3.0] * 1000
        source.disallow_checkpoint()


@pytest.mark.slow
def test_a_source_whose_sends_do_not_end_has_a_deadline(late: Any, held_at_the_tensors: None) -> None:
    """The sends do not end if the peer has failed and does not receive."""
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        source, target = process_group(stack, on_device=True)
        torch.accelerator.set_device_index(0)
        got = pool.submit(target.recv_checkpoint, 0, "", 3, TIMEOUT)
        with pytest.raises(
            CheckpointTimeout,
            match=r"to \[1\]: timed out after 3 seconds without progress: the device has not ended it",
        ):
            source.send_checkpoint([1], 3, {"w": torch.ones(5, device="late:0")}, timedelta(seconds=3))
        late.release()
        target._pg.abort()  # type: ignore[attr-defined]
        assert isinstance(got.exception(60), CheckpointError)


@pytest.mark.parametrize("name", ["http", "Gloo", "process group on the device"])
def test_no_host_memory_for_tensors_on_a_device(
    late: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """The upstream format is not tested: there the target learns a tensor's device only when the tensor
    arrives.
    """
    monkeypatch.setattr(reservation, "available_memory", lambda: 1000)
    monkeypatch.setattr(reservation, "folder", tmp_path)
    # the source has enough
    monkeypatch.setattr(offer, "reserve", lambda nbytes, share: reservation.Reservation())
    own, state = ({"w": torch.ones(1000, device=f"late:{i}")} for i in (1, 0))
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        source, target = PAIRS[name](stack)
        sent = pool.submit(source.send_checkpoint, [1], 3, state, timedelta(seconds=1000))
        with pytest.raises(
            CheckpointError, match=r"4000 bytes of it are on a device.*1000 free.*use_async_quorum=False"
        ):
            target.recv_checkpoint(
                0, source.metadata(), 3, TIMEOUT, target=TargetState(lambda: own, writable=False)
            )
        sent.result(60)  # the source does not wait for a target that has no memory for the state
        source.disallow_checkpoint()


@pytest.mark.parametrize("name", ["Gloo", "process group on the device"])
def test_a_target_that_cannot_even_discard_a_state_ends_the_transfer(
    late: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """If its device is full, it aborts the group, so that the source gets an error at once instead
    of at its timeout.
    """

    def full(*_: Any) -> Any:
        raise CheckpointError("no memory for a tensor")

    own, state = ({"w": torch.ones(1000, device=f"late:{i}")} for i in (1, 0))
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        source, target = PAIRS[name](stack)
        monkeypatch.setattr(pg_transport._Channel, "_staged", full)
        monkeypatch.setattr(pg_transport._Channel, "_is_here", lambda self, tensor: False)

        def send() -> None:
            torch.accelerator.set_device_index(0)
            source.send_checkpoint([1], 3, state, timedelta(seconds=1000))
            source.disallow_checkpoint()

        sent = pool.submit(send)
        with pytest.raises(CheckpointError, match="no memory for a tensor"):
            target.recv_checkpoint(
                0, source.metadata(), 3, TIMEOUT, target=TargetState(lambda: own, writable=True)
            )
        with pytest.raises(CheckpointError, match=r"checkpoint of step 3 to \[1\]"):
            sent.result(60)


def test_a_heal_whose_native_group_was_aborted_returns_no_state(
    late: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The abort ends the receive on the device, which leaves undefined data in the tensor. The backend has no
    error.
    """
    groups = ranks(2)
    reconfigure(groups, 1)
    source, target = (PGTransport[Any](group, TIMEOUT, LATE) for group in groups)
    receiving, may_send = threading.Event(), threading.Event()
    start_all, announced = pg_transport._Channel._start, pg_transport._Channel.announced

    def started(self: Any, operations: list[Callable[[], Any]]) -> None:
        def start() -> Any:
            work = operations[0]()
            if self.progress is not None:  # the target's channel, after the header
                receiving.set()
            return work

        start_all(self, [start])

    def stop(self: Any, nbytes: int) -> None:
        announced(self, nbytes)
        if self.progress is None:  # the source's channel
            assert may_send.wait(20)

    monkeypatch.setattr(pg_transport._Channel, "_start", started)
    monkeypatch.setattr(pg_transport._Channel, "announced", stop)
    own = {"w": torch.zeros(1000, device="late:1")}

    def send() -> None:
        torch.accelerator.set_device_index(0)
        source.send_checkpoint([1], 3, {"w": torch.full((1000,), 3.0, device="late:0")}, TIMEOUT)

    def receive() -> Any:
        torch.accelerator.set_device_index(1)
        return target.recv_checkpoint(0, "", 3, TIMEOUT, target=TargetState(lambda: own, writable=True))

    with ThreadPoolExecutor(2) as pool:
        sent, got = pool.submit(send), pool.submit(receive)
        try:
            assert receiving.wait(20)
            abort_group(groups[1])
            with pytest.raises(
                CheckpointError, match="was aborted and has no peers until it is reconfigured"
            ):
                got.result(20)
        finally:
            for group in groups:
                abort_group(group)
            may_send.set()
            sent.exception(20)


def test_a_state_has_arrived_on_the_device_when_it_is_returned(late: Any, held_at_the_tensors: None) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        source, target = process_group(stack, on_device=True)
        got = pool.submit(target.recv_checkpoint, 0, "", 3, TIMEOUT)
        sent = pool.submit(
            source.send_checkpoint, [1], 3, {"w": torch.full((1000,), 3.0, device="late:0")}, TIMEOUT
        )
        try:
            with pytest.raises(FutureTimeout):
                got.result(0.3)
        finally:
            late.release()
        assert got.result(60)["w"].tolist() == [3.0] * 1000
        sent.result(60)
        source.disallow_checkpoint()


def test_a_heal_in_flight_does_not_delay_an_allreduce(late: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source has queued its sends, and the target does not receive them yet. A communicator runs its
    operations one after the other, as NCCL's does.
    """
    may_receive, queued, announced = threading.Event(), threading.Event(), pg_transport._Channel.announced
    wait = pg_transport._Channel.wait

    def all_queued(self: Any) -> None:
        if self.progress is None and self._left is not None:  # the source's channel
            queued.set()
        wait(self)

    def stop(self: Any, nbytes: int) -> None:
        announced(self, nbytes)
        if self.progress is not None:  # the target's channel, after the header
            assert may_receive.wait(60)

    monkeypatch.setattr(pg_transport._Channel, "announced", stop)
    monkeypatch.setattr(pg_transport._Channel, "wait", all_queued)
    weights = torch.arange(4500.0, device="late:0")
    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        source, target = process_group(stack, on_device=True)

        def send() -> None:
            torch.accelerator.set_device_index(0)
            with get_stream_context(torch.Stream("late:0")):  # a heal has a stream of its own
                source.send_checkpoint([1], 3, {"w": weights}, TIMEOUT)

        def receive() -> Any:
            torch.accelerator.set_device_index(1)
            return target.recv_checkpoint(0, "", 3, TIMEOUT)

        def reduce(rank: int) -> list[float]:
            torch.accelerator.set_device_index(rank)
            gradient = torch.full((3,), rank + 1.0, device=torch.device("late", rank))
            (source, target)[rank]._pg.allreduce([gradient], dist.AllreduceOptions()).wait()  # type: ignore[attr-defined]
            return gradient.tolist()

        got, sent = pool.submit(receive), pool.submit(send)
        try:
            assert queued.wait(20)
            reduced = [pool.submit(reduce, rank) for rank in range(2)]
            assert [one.result(20) for one in reduced] == [[3.0] * 3] * 2
            assert not got.done() and not sent.done()
        finally:
            may_receive.set()
        assert torch.equal(got.result(60)["w"].cpu(), weights.cpu())
        sent.result(60)
        source.disallow_checkpoint()


@pytest.mark.parametrize("ends", ["abort", "new peers"])
def test_the_connection_of_a_heal_ends_with_its_group(late: Any, ends: str) -> None:
    """The group is aborted when a peer fails. Its heals would wait for that peer as its collectives would."""
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        source, target = process_group(stack, on_device=True)
        groups: list[Any] = [end._pg for end in (source, target)]  # type: ignore[attr-defined]
        torch.accelerator.set_device_index(0)
        got = pool.submit(target.recv_checkpoint, 0, "", 3, TIMEOUT)
        with get_stream_context(torch.Stream("late:0")):
            pair = groups[0].pair(1, "3", TIMEOUT)
        for rank, group in enumerate(groups):
            if ends == "abort":
                group.abort()
            else:
                torch.accelerator.set_device_index(rank)
                group.configure(f"{group._store_addr}/alone", f"rank{rank}", 0, 1)
        assert pair.errored() is not None
        with pytest.raises(CheckpointError, match="checkpoint of step 3 from rank 0"):
            got.result(60)


@pytest.mark.slow
def test_a_receive_into_host_memory_that_does_not_end_has_a_deadline(
    late: Any, held_at_the_tensors: None
) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        source, target = process_group(stack, on_device=True)
        own = torch.zeros(5, device="late:1")

        def receive() -> Any:
            torch.accelerator.set_device_index(1)
            where = TargetState(lambda: {"w": own}, writable=False)
            return target.recv_checkpoint(0, "", 3, timedelta(seconds=3), target=where)

        got = pool.submit(receive)
        sent = pool.submit(source.send_checkpoint, [1], 3, {"w": torch.ones(5, device="late:0")}, TIMEOUT)
        try:
            with pytest.raises(
                CheckpointTimeout, match="from rank 0: timed out after 3 seconds: the device has not"
            ):
                got.result(60)
        finally:
            late.release()
            source._pg.abort()  # type: ignore[attr-defined]
        assert isinstance(sent.exception(60), CheckpointError)


@pytest.mark.slow
def test_a_device_that_stops_after_a_receive_into_host_memory_has_a_deadline(
    late: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A received tensor is copied to the host with a limit on the wait for the device."""
    wait = pg_transport._Channel._wait

    def stop(self: Any, ahead: int) -> None:
        wait(self, ahead)
        if ahead == 0 and not self.of_progress:  # the target's channel
            late.hold()

    monkeypatch.setattr(pg_transport._Channel, "_wait", stop)
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        source, target = process_group(stack, on_device=True)

        def receive() -> Any:
            torch.accelerator.set_device_index(1)
            return target.recv_checkpoint(0, "", 3, timedelta(seconds=3))

        got = pool.submit(receive)
        sent = pool.submit(source.send_checkpoint, [1], 3, {"w": torch.ones(5, device="late:0")}, TIMEOUT)
        try:
            with pytest.raises(CheckpointTimeout, match="timed out after 3 seconds: the device has not"):
                got.result(60)
        finally:
            late.release()
            source._pg.abort()  # type: ignore[attr-defined]
        assert isinstance(sent.exception(60), CheckpointError)


class Counted(Deadline):
    """Counts what has moved it."""

    def __init__(self, clock: Callable[[], float], timeout: float, of_progress: bool) -> None:
        super().__init__(timeout, of_progress, clock)
        self.moves = 0

    def arrived(self) -> float:
        self.moves += 1
        return super().arrived()


class SlowTransfer:
    """A transfer in eleven pieces. The device begins each when both ends have noticed the one before, and
    after `slow`.

    Args:
        stack: ends it
        late: the test device
        timeout: of both ends, in seconds
        waited_for: whether the other groups wait for the target
        writable: whether it receives in place, or into host memory
        slow: called on the source's device with the number of a piece
        clock: that of both deadlines
    """

    PIECES = 11

    def __init__(
        self,
        stack: ExitStack,
        late: Any,
        timeout: float,
        slow: Callable[[int], object],
        clock: Callable[[], float] = time.monotonic,
        waited_for: bool = True,
        writable: bool = True,
    ) -> None:
        self.ends: list[Counted] = []
        self.over = threading.Event()
        self.most_ahead = 0
        self.source, self.target = process_group(stack, on_device=True)
        self.state = {"w": torch.arange(9000.0, device="late:0")}
        patch, pool = (
            stack.enter_context(pytest.MonkeyPatch.context()),
            stack.enter_context(ThreadPoolExecutor(2)),
        )
        stack.callback(self.end)
        own, seconds = {"w": torch.zeros(9000, device="late:1")}, timedelta(seconds=timeout)
        begin, send = iter(range(100)), pg_transport._Channel._send

        def deadline(timeout: float, of_progress: bool) -> Counted:
            self.ends.append(Counted(clock, timeout, of_progress))
            return self.ends[-1]

        def begins(piece: int) -> None:
            while not self.over.is_set() and not (
                len(self.ends) == 2 and min(e.moves for e in self.ends) >= piece
            ):
                time.sleep(0.001)
            if not self.over.is_set():
                slow(piece)

        def send_slowly(channel: Any, data: torch.Tensor) -> None:
            piece = next(begin)
            self.most_ahead = max(self.most_ahead, piece - min(end.moves for end in self.ends))
            late.enqueue(lambda: begins(piece))
            send(channel, data)

        patch.setattr(pg_transport, "Deadline", deadline)
        patch.setattr(pg_transport, "_LEAST_PIECE", 4000)
        patch.setattr(pg_transport._Channel, "_send", send_slowly)

        def receive() -> Any:
            torch.accelerator.set_device_index(1)
            where = TargetState(lambda: own, writable, waited_for)
            return self.target.recv_checkpoint(0, "", 3, seconds, target=where)

        def serve() -> None:
            torch.accelerator.set_device_index(0)
            self.source.send_checkpoint([1], 3, self.state, seconds)

        self.got, self.sent = pool.submit(receive), pool.submit(serve)

    def end(self) -> None:
        self.over.set()
        for end in (self.source, self.target):
            end._pg.abort()  # type: ignore[attr-defined]


@pytest.mark.parametrize("writable", [True, False], ids=["in place", "into host memory"])
def test_a_transfer_may_take_longer_than_the_timeout(late: Any, writable: bool) -> None:
    """Each piece takes 0.7 of the timeout."""
    now = [0.0]

    def slow(piece: int) -> None:
        now[0] += 70

    with ExitStack() as stack:
        transfer = SlowTransfer(stack, late, 100, slow, lambda: now[0], writable=writable)
        transfer.sent.result(60)
        assert torch.equal(transfer.got.result(60)["w"].cpu(), transfer.state["w"].cpu())
        transfer.source.disallow_checkpoint()
        assert (
            now[0] == 70 * transfer.PIECES and [end.moves for end in transfer.ends] == [transfer.PIECES] * 2
        )
        assert 1 < transfer.most_ahead <= pg_transport._AHEAD + 1


def test_a_target_for_which_the_others_do_not_wait_has_the_timeout_for_all(late: Any) -> None:
    now = [0.0]

    def slow(piece: int) -> None:
        now[0] += 70

    with ExitStack() as stack:
        transfer = SlowTransfer(stack, late, 100, slow, lambda: now[0], waited_for=False)
        with pytest.raises(CheckpointTimeout, match=r"from rank 0: timed out after 100 seconds(:|$)"):
            transfer.got.result(60)
        transfer.end()
        assert isinstance(transfer.sent.exception(60), CheckpointError)


@pytest.mark.slow
def test_a_device_that_stops_has_the_timeout_since_its_last_piece(late: Any) -> None:
    stopped = threading.Event()

    with ExitStack() as stack:
        transfer = SlowTransfer(stack, late, 3, lambda piece: piece == 5 and stopped.wait(60))
        stack.callback(stopped.set)
        for end, whose in ((transfer.sent, r"to \[1\]"), (transfer.got, "from rank 0")):
            error = f"{whose}: timed out after 3 seconds without progress: the device has not ended it"
            with pytest.raises(CheckpointTimeout, match=error):
                end.result(60)
        assert [end.moves for end in transfer.ends] == [5, 5]


@pytest.mark.parametrize("failed", [0, 1], ids=["source", "target"])
def test_a_peer_that_fails_in_a_transfer(late: Any, failed: int) -> None:
    """The other end does not wait for its timeout, if the backend notices the failure."""
    reached, may_go_on = threading.Event(), threading.Event()

    def slow(piece: int) -> None:
        if piece == 5:
            reached.set()
            may_go_on.wait(60)

    with ExitStack() as stack:
        transfer = SlowTransfer(stack, late, 1000, slow)
        stack.callback(may_go_on.set)
        assert reached.wait(60)
        (transfer.source, transfer.target)[failed]._pg.abort()  # type: ignore[attr-defined]
        may_go_on.set()
        ends = (transfer.sent, transfer.got)
        assert isinstance(ends[failed].exception(60), CheckpointError)
        with pytest.raises(CheckpointError, match="checkpoint of step 3"):
            ends[1 - failed].result(60)


@pytest.mark.parametrize("kind", ["late", "gloo"])
def test_the_gpu_test_of_two_ranks(late: Any, kind: str) -> None:
    """The test of PGTransport over NCCL, in tests/gpu/test_ranks.py, needs a GPU. Its ranks run here without
    one.
    """

    def make() -> Any:
        return ProcessGroupGloo(timeout=TIMEOUT) if kind == "gloo" else ProcessGroupLate(timeout=TIMEOUT)

    def rank(r: int, group: Any) -> Any:
        device = torch.device("late", r)
        wants = torch.device("cpu") if kind == "gloo" else device
        if r == 0:
            two_ranks.send(group, wants, device, TIMEOUT, lambda: late.enqueue(lambda: time.sleep(0.1)))
            return None
        return two_ranks.receive(group, wants, device, TIMEOUT)

    two_ranks.check(together(rank, make=make)[1])
