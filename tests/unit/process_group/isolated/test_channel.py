"""The trainer's end of a worker when the worker fails at different moments. The test acts as the worker's end."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any, Iterator

import pytest

from tests.unit.waiting import wait_until
from torchft.futures import future_wait
from torchft.process_group.isolated import protocol
from torchft.process_group.isolated.channel import Channel
from torchft.process_group.isolated.operation import WorkerFailed, _OpMetadata

AGES = timedelta(seconds=30)


def no_sharing(*_: Any) -> Any:
    raise AssertionError("there are no tensors")


@pytest.fixture
def channel() -> Iterator[Channel]:
    channel = Channel("test", no_sharing, lambda: None, lambda: None)
    yield channel
    channel.close(RuntimeError("the test is over"))
    channel.wire.theirs[0].close()


def test_closed_descriptors_are_not_used_to_wake_a_thread(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reading thread may notice the worker's end and close the descriptors while another thread closes the channel.
    The descriptors' numbers may be in use for other files by then.
    """
    op = channel.start(protocol.PING, (), [], None, 60.0)
    woken: list[bool] = []

    def meanwhile() -> None:
        os.close(channel.wire.theirs[1])
        wait_until(lambda: channel.wire.closed)

    monkeypatch.setattr(channel.devices, "abandon", meanwhile)
    monkeypatch.setattr(os, "eventfd_write", lambda *_: woken.append(channel.wire.closed))
    reader = threading.Thread(target=channel.wait, args=(op, None), daemon=True)
    reader.start()
    wait_until(lambda: channel._leadership.taken)
    channel.close(RuntimeError("aborted"))
    reader.join(AGES.total_seconds())
    assert not reader.is_alive() and op.error is not None
    assert True not in woken


def test_a_future_whose_operation_ends_while_the_worker_fails(channel: Channel) -> None:
    """The answer was read just before the failure. The thread for futures ends because it has nothing left to do."""
    op = channel.start(protocol.PING, (), [], ["the result"], 60.0)
    future = channel.get_future(op, [], None)
    read = channel._ops.pop(op.op_id)
    channel.close(RuntimeError("aborted"))
    wait_until(lambda: channel._completer._thread is None)
    channel._end(read)
    assert future_wait(future, AGES) == ["the result"]
    os.close(channel.wire.theirs[1])


def test_a_future_ends_with_the_channel(channel: Channel) -> None:
    futures = [channel.get_future(channel.start(protocol.PING, (), [], None, 60.0), [], None) for _ in range(3)]
    channel.close(RuntimeError("aborted"))
    for future in futures:
        with pytest.raises(RuntimeError, match="aborted"):
            future_wait(future, AGES)
    os.close(channel.wire.theirs[1])


def test_a_drain_does_not_end_while_another_thread_looks_at_the_queued_operations(channel: Channel) -> None:
    """`errored` of one thread and an operation of another may do so at the same time."""
    op = channel.start(protocol.PING, (), [], None, 60.0)
    op.marks = ((1, b"mark"),)
    channel.devices.hold(op)
    drained: list[bool] = []

    class Device:
        asked = 0

        def reached(self, mark: bytes) -> bool:
            self.asked += 1
            if self.asked == 1:
                drained.append(channel.drain(0.0))
            return False

        def close(self) -> None: ...

    channel.devices._sharings[1] = Device()  # type: ignore[assignment]
    channel.devices.release_reached()
    assert drained == [False] and channel.devices.queued


class NeverReached:
    """The trainer's end for a device whose worker was killed."""

    def reached(self, mark: bytes) -> bool:
        return False


def test_the_wait_for_the_device_ends_with_the_worker(channel: Channel) -> None:
    """No other thread may be reading, so that nothing else notices the worker's end."""
    channel.devices._sharings[1] = NeverReached()  # type: ignore[assignment]
    op = channel.start(protocol.PING, (), [], None, 60.0)
    channel._done(op.op_id, protocol.marks([(1, b"mark")]))
    assert not channel.drain(0.0)
    os.close(channel.wire.theirs[1])
    assert channel.drain(AGES.total_seconds() / 10)
    assert isinstance(channel.broken, WorkerFailed)


class Streams:
    """The trainer's end for a device whose streams can wait for the worker."""

    def __init__(self, follows: bool = True) -> None:
        self.follows = follows
        self.passed = False
        self.calls: list[str] = []

    def follow(self, mark: bytes) -> bool:
        self.calls.append("follow")
        return self.follows

    def reached(self, mark: bytes) -> bool:
        return self.passed

    def waiting(self) -> None:
        self.calls.append("waiting")


def queued(channel: Channel, streams: Streams, timeout_sec: float = 60.0) -> _OpMetadata:
    """An operation that the worker has queued on its device."""
    channel.devices._sharings[1] = streams  # type: ignore[assignment]
    channel._on_waiting = streams.waiting
    op = channel.start(protocol.PING, (), [], None, timeout_sec)
    channel._done(op.op_id, protocol.marks([(1, b"mark")]))
    return op


def test_a_thread_looks_after_the_worker_before_a_stream_waits(channel: Channel) -> None:
    streams = Streams()
    op = queued(channel, streams)
    channel.follow(op)
    assert streams.calls == ["waiting", "follow"]
    os.close(channel.wire.theirs[1])


def test_the_worker_ends_when_a_stream_waits_past_the_deadline(channel: Channel) -> None:
    op = queued(channel, Streams(), timeout_sec=0.05)
    channel.follow(op)
    channel.follow(op)  # a second wait
    wait_until(lambda: channel.broken is not None)
    assert "timed out: it did not complete within 0.05 s" in str(channel.broken)
    with pytest.raises(RuntimeError, match="timed out"):
        channel.follow(op)
    os.close(channel.wire.theirs[1])


def test_an_operation_that_ends_in_time_has_no_timer_left(channel: Channel) -> None:
    streams = Streams()
    op = queued(channel, streams)
    channel.follow(op, 0.05)
    assert not op.timer.cancelled
    streams.passed = True
    channel.devices.release_reached()
    assert op.timer.cancelled and channel.broken is None
    reached = queued(channel, streams)
    channel.follow(reached)
    assert reached.timer is None
    os.close(channel.wire.theirs[1])


@pytest.mark.parametrize("own", [True, False], ids=["operation", "caller"])
def test_the_host_waits_until_the_deadline_where_a_stream_cannot(channel: Channel, own: bool) -> None:
    op = queued(channel, Streams(follows=False), timeout_sec=0.05)
    with pytest.raises(RuntimeError, match=r"timed out: it did not complete within 0.05 s"):
        channel.follow(op) if own else channel.follow(op, 0.05, time.monotonic())
    assert (channel.broken is not None) is own, "the operation goes on unless its own deadline has passed"
    os.close(channel.wire.theirs[1])


def test_the_last_words_of_a_worker_that_has_ended_are_read(channel: Channel) -> None:
    answers = channel.wire.theirs[1]
    os.write(answers, protocol.answer(protocol.FATAL, 0, protocol.encode_error(RuntimeError("COMM_ERROR"))))
    os.close(answers)
    channel.ended()
    channel.ended()
    assert "COMM_ERROR" in str(channel.broken)


class Interrupted:
    """A signal whose wait is interrupted."""

    def acquire(self, timeout: float) -> bool:
        raise KeyboardInterrupt

    def release(self) -> None:
        pass


def test_an_interrupted_thread_does_not_become_the_leader(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the leader has finished, the lead goes to the next thread that still waits."""
    first, second, third = (channel.start(protocol.PING, (), [], None, 60.0) for _ in range(3))
    answers = channel.wire.theirs[1]
    leader = threading.Thread(target=channel.wait, args=(first, None), daemon=True)
    leader.start()
    wait_until(lambda: channel._leadership.taken)
    with monkeypatch.context() as patch:
        patch.setattr(channel._leadership, "_make_signal", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            channel.wait(second, None)
    follower = threading.Thread(target=channel.wait, args=(third, None), daemon=True)
    follower.start()
    wait_until(lambda: third in channel._leadership._followers.values())
    for op, thread in ((first, leader), (third, follower)):
        os.write(answers, protocol.answer(protocol.DONE, op.op_id))
        thread.join(AGES.total_seconds())
        assert not thread.is_alive()
    os.close(answers)


def test_an_operation_in_flight_ends_in_a_forked_child(channel: Channel) -> None:
    op = channel.start(protocol.PING, (), [], None, 60.0)
    channel._forget()  # a fork calls this in the child
    assert channel.wait(op, 0.0)
    assert "a forked process cannot use its parent's group" in str(op.error)
    os.close(channel.wire.theirs[1])


class Broken:
    """A registration whose methods raise on demand."""

    ref = b""

    def __init__(self, fetch: BaseException | None = None, release: BaseException | None = None) -> None:
        self._fetch = fetch
        self._release = release

    def fetch(self) -> None:
        if self._fetch is not None:
            raise self._fetch

    def release(self) -> None:
        if self._release is not None:
            raise self._release


def test_an_operation_ends_when_its_leader_is_interrupted(channel: Channel) -> None:
    """Ctrl-C while the leader copies another thread's result must not reach that thread."""
    op = channel.start(protocol.PING, (), [(0, Broken(fetch=KeyboardInterrupt()))], None, 60.0)
    with pytest.raises(KeyboardInterrupt):
        channel._done(op.op_id, b"")
    assert channel.wait(op, 0.0)
    assert isinstance(op.error, RuntimeError) and "interrupted" in str(op.error)
    os.close(channel.wire.theirs[1])


def test_an_operation_ends_when_its_memory_cannot_be_released(channel: Channel) -> None:
    op = channel.start(protocol.PING, (), [(0, Broken(release=OSError("no device")))], None, 60.0)
    channel._done(op.op_id, b"")
    assert channel.wait(op, 0.0)
    assert "no device" in str(op.error)
    os.close(channel.wire.theirs[1])


@pytest.mark.parametrize("error", [RuntimeError("no thread"), KeyboardInterrupt()])
def test_all_operations_end_with_the_channel_even_if_one_raises(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    first, second = (channel.start(protocol.PING, (), [], None, 60.0) for _ in range(2))
    ended = channel._leadership.ended

    def end(op: object) -> None:
        ended(op)
        if op is first:
            raise error

    monkeypatch.setattr(channel._leadership, "ended", end)
    with pytest.raises(type(error)):
        channel.close(RuntimeError("aborted"))
    assert channel.wait(first, 0.0) and channel.wait(second, 0.0)
    assert "aborted" in str(second.error) and channel.wire.closed
    os.close(channel.wire.theirs[1])
