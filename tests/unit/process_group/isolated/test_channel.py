"""The trainer's end of a worker when the worker fails at different moments. The test acts as the worker's
end.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Iterator

import pytest

from tests.unit.waiting import wait_until
from torchft.futures import future_wait
from torchft.process_group.isolated import channel as channel_module
from torchft.process_group.isolated import protocol
from torchft.process_group.isolated.channel import Channel
from torchft.process_group.isolated.operation import WorkerFailed, _OpMetadata

AGES = timedelta(seconds=30)


@pytest.fixture
def channel() -> Iterator[Channel]:
    channel = Channel("test", {})
    yield channel
    channel.close(RuntimeError("the test is over"))
    channel.theirs.close()


def end_worker(channel: Channel) -> None:
    """Its end is noticed by the reader."""
    channel.theirs.close()


def test_nothing_is_left_of_a_channel_that_has_ended(channel: Channel) -> None:
    channel.get_future(channel.request(protocol.CHECK, 60.0), [], None)
    end_worker(channel)
    channel._reader.join(AGES.total_seconds())
    threads = (channel._reader, channel._completer)
    wait_until(lambda: not any(thread is not None and thread.is_alive() for thread in threads))
    assert channel._socket.fileno() == -1 and isinstance(channel.broken, WorkerFailed)


def test_a_callback_may_wait_for_another_operation(channel: Channel) -> None:
    first, second = (channel.request(protocol.CHECK, 60.0) for _ in range(2))
    future = channel.get_future(first, [], None).then(lambda _: second.wait(AGES.total_seconds()))
    protocol.send(channel.theirs, (first.op_id, None, None))
    assert first.wait(AGES.total_seconds()) and not second.done
    protocol.send(channel.theirs, (second.op_id, None, None))
    assert future_wait(future, AGES) is True
    end_worker(channel)


def test_a_future_ends_with_the_channel(channel: Channel) -> None:
    futures = [channel.get_future(channel.request(protocol.CHECK, 60.0), [], None) for _ in range(3)]
    channel.close(RuntimeError("aborted"))
    for future in futures:
        with pytest.raises(RuntimeError, match="aborted"):
            future_wait(future, AGES)
    end_worker(channel)


def test_a_drain_does_not_end_while_another_thread_looks_at_the_queued_operations(channel: Channel) -> None:
    """`errored` of one thread and an operation of another may do so at the same time."""
    op = channel.request(protocol.CHECK, 60.0)
    op.mark = b"mark"
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

    op.sharing = Device()  # type: ignore[assignment]
    channel.devices.release_reached()
    assert drained == [False] and channel.devices.queued


class NeverReached:
    """The trainer's end for a device whose worker was killed."""

    def reached(self, mark: bytes) -> bool:
        return False

    def close(self) -> None: ...


def test_the_wait_for_the_device_ends_with_the_worker(channel: Channel) -> None:
    op = channel.request(protocol.CHECK, 60.0)
    op.sharing = NeverReached()  # type: ignore[assignment]
    channel._handle(op.op_id, b"mark", None)
    assert not channel.drain(0.0)
    end_worker(channel)
    assert channel.drain(AGES.total_seconds() / 10)
    assert isinstance(channel.broken, WorkerFailed)


class Streams:
    """The trainer's end for a device whose streams can wait for the worker."""

    def __init__(self, follows: bool = True) -> None:
        self.follows = follows
        self.passed = False

    def follow(self, mark: bytes) -> bool:
        return self.follows

    def reached(self, mark: bytes) -> bool:
        return self.passed

    def close(self) -> None: ...


def queued(channel: Channel, streams: Streams, timeout_sec: float = 60.0) -> _OpMetadata:
    """An operation that the worker has queued on its device."""
    op = channel.request(protocol.CHECK, timeout_sec)
    op.sharing = streams  # type: ignore[assignment]
    channel._handle(op.op_id, b"mark", None)
    return op


def test_the_worker_ends_when_a_stream_waits_past_the_deadline(channel: Channel) -> None:
    op = queued(channel, Streams(), timeout_sec=0.05)
    channel.follow(op)
    channel.follow(op)  # a second wait
    wait_until(lambda: channel.broken is not None)
    assert "timed out: it did not complete within 0.05 s" in str(channel.broken)
    with pytest.raises(RuntimeError, match="timed out"):
        channel.follow(op)
    end_worker(channel)


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
    end_worker(channel)


@pytest.mark.parametrize("own", [True, False], ids=["operation", "caller"])
def test_the_host_waits_until_the_deadline_where_a_stream_cannot(channel: Channel, own: bool) -> None:
    op = queued(channel, Streams(follows=False), timeout_sec=0.05)
    with pytest.raises(RuntimeError, match=r"timed out: it did not complete within 0.05 s"):
        channel.follow(op) if own else channel.follow(op, 0.05, time.monotonic())
    assert (channel.broken is not None) is own, "the operation goes on unless its own deadline has passed"
    end_worker(channel)


def test_the_last_words_of_a_worker_that_has_ended_are_read(channel: Channel) -> None:
    protocol.send(channel.theirs, (0, None, protocol.encode_error(RuntimeError("COMM_ERROR"))))
    end_worker(channel)
    wait_until(lambda: channel.broken is not None)
    assert "COMM_ERROR" in str(channel.broken)


def test_an_operation_in_flight_ends_in_a_forked_child(channel: Channel) -> None:
    op = channel.request(protocol.CHECK, 60.0)
    channel._forget()  # a fork calls this in the child
    assert op.wait(0.0)
    assert "a forked process cannot use its parent's group" in str(op.error)
    assert channel._socket.fileno() == channel.theirs.fileno() == -1, "no descriptor is left there"
    end_worker(channel)


class Broken:
    """A registration that cannot be released, or a timer."""

    ref = b""

    def __init__(self, release: Exception) -> None:
        self._release = release

    def fetch(self) -> None:
        pass

    def release(self) -> None:
        raise self._release

    cancel = release


def test_an_operation_ends_when_its_memory_cannot_be_released(channel: Channel) -> None:
    op = channel.request(protocol.CHECK, 60.0)
    op.registrations = [Broken(release=OSError("no device"))]  # type: ignore[list-item]
    channel._handle(op.op_id, None, None)
    assert op.wait(0.0)
    assert "no device" in str(op.error)
    end_worker(channel)


def test_all_operations_end_with_the_channel_even_if_the_device_fails(channel: Channel) -> None:
    ops = [channel.request(protocol.CHECK, 60.0) for _ in range(2)]
    ops[0].timer = Broken(release=OSError("no device"))
    channel.close(RuntimeError("aborted"))
    assert all(op.wait(AGES.total_seconds()) and "aborted" in str(op.error) for op in ops)
    end_worker(channel)


def test_a_worker_is_pinged_as_soon_as_another_thread_does_not_send(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers, so it is healthy, although its operation is late."""
    monkeypatch.setattr(channel_module, "_PING_EVERY_SEC", 0.05)
    monkeypatch.setattr(channel_module, "_UNRESPONSIVE_SEC", 0.5)
    with channel._send_lock:  # as a thread that sends something at the moment of the first ping
        channel._look_at = 0.0
        op = _OpMetadata(0.0)
        op.op_id, channel._ops[1] = 1, op
        wait_until(lambda: channel._pinged_at is not None)
    (request, *_), _ = protocol.receive(channel.theirs)
    assert request == protocol.PING
    protocol.send(channel.theirs, (0, None, None))
    wait_until(lambda: channel._pinged_at is None)
    assert channel.broken is None
    end_worker(channel)


def test_a_worker_may_take_long_for_a_note(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """To unmap memory may have to wait for operations on the device, which have longer timeouts."""
    monkeypatch.setattr(channel_module, "_PING_EVERY_SEC", 0.02)
    monkeypatch.setattr(channel_module, "_UNRESPONSIVE_SEC", 0.1)
    monkeypatch.setattr(channel_module, "_NOTE_SEC", 0.1)
    protocol.send(channel.theirs, (0, None, None))  # the reader looks at once, and from now on often
    channel.start(_OpMetadata(60.0))
    channel._note(1, ("drop", 1), None, None)
    time.sleep(0.5)
    assert channel.broken is None and channel._pinged_at is None
    end_worker(channel)


def test_a_stopped_worker_that_is_sent_many_notes_is_killed(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that sends waits for it, although no operation is in flight."""
    monkeypatch.setattr(channel_module, "_PING_EVERY_SEC", 0.02)
    monkeypatch.setattr(channel_module, "_UNRESPONSIVE_SEC", 0.1)
    monkeypatch.setattr(channel_module, "_NOTE_SEC", 0.1)

    def send_many() -> None:
        for _ in range(100_000):
            channel._note(1, ("drop", 1), None, None)

    with pytest.raises(RuntimeError, match="does not respond"):
        send_many()
    end_worker(channel)
