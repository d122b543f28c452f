"""Values that a worker's streams write and a trainer's streams wait for; both ends are in this process."""

from __future__ import annotations

import threading
from typing import Any, Optional

import pytest

from torchft.process_group.isolated import values
from torchft.process_group.isolated.values import Awaited, Page, Pages, WrittenValues, reached

TOP = (1 << 32) - 1


@pytest.mark.parametrize(
    ("now", "value", "expected"),
    [
        (0, 0, True),
        (0, 1, False),
        (1, 0, True),
        (7, 7, True),
        (TOP, 0, False),  # 0 comes behind the largest value
        (0, TOP, True),
        (5, TOP - 5, True),
        (TOP - 5, 5, False),
        ((1 << 31) - 1, 0, True),
        (1 << 31, 0, False),  # half the cycle: as the driver compares integers with a sign
    ],
)
def test_values_are_compared_in_cyclic_order(now: int, value: int, expected: bool) -> None:
    assert reached(now, value) is expected


class Device:
    """A driver whose streams write at once, or when a test lets them."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.held = False
        self.queued: list[tuple[int, int]] = []
        self.waits: list[tuple[object, int, int]] = []
        self.registered: list[tuple[int, int]] = []

    def register(self, address: int, size: int) -> int:
        self.check("register")
        self.registered.append((address, size))
        return address

    def write(self, stream: Any, address: int, value: int) -> None:
        self.check("write")
        self.queued.append((address, value))
        if not self.held:
            self.finish()

    def finish(self) -> None:
        for address, value in self.queued:
            values.ctypes.c_uint32.from_address(address).value = value
        self.queued.clear()

    def wait(self, stream: Any, address: int, value: int) -> None:
        self.check("wait")
        self.waits.append((stream, (address - self.registered[-1][0]) // 4, value))

    def check(self, call: str) -> None:
        if call == self.refuses:
            raise RuntimeError(f"{call} failed")


def page_of(device: Device) -> Page:
    page = Pages(lambda: device).take("any stream")
    assert page is not None
    device.waits.clear()
    device.held = True
    return page


def test_a_stream_waits_for_the_value_of_the_worker() -> None:
    device = Device()
    page = page_of(device)
    awaited, written = Awaited(page), WrittenValues(page)
    slot, value = written.mark("worker's stream")
    assert not awaited.reached(slot, value)
    awaited.follow("trainer's stream", slot, value)
    assert device.waits == [("trainer's stream", slot, value)]
    device.finish()
    assert awaited.reached(slot, value)
    awaited.follow("trainer's stream", slot, value)
    assert len(device.waits) == 1, "nothing to wait for"


def test_each_stream_of_the_worker_has_its_own_slot() -> None:
    """They finish in any order."""
    device = Device()
    page = page_of(device)
    written = WrittenValues(page)
    marks = [written.mark(stream) for stream in "aba"]
    assert marks == [(0, 1), (1, 1), (0, 2)]
    page[0] = 1
    assert [Awaited(page).reached(*mark) for mark in marks] == [True, False, False]


def test_streams_are_freed_from_a_worker_that_has_ended() -> None:
    device = Device()
    page = page_of(device)
    awaited, written = Awaited(page), WrittenValues(page)
    marks = [written.mark(stream) for stream in "abaab"]
    for mark in (marks[2], marks[0], marks[1]):  # two threads may wait in any order
        awaited.follow("s", *mark)
    awaited.release()
    assert all(awaited.reached(slot, value) for _, slot, value in device.waits)
    assert not awaited.reached(*marks[3]) and not awaited.reached(*marks[4]), "no stream waited for these"
    awaited.follow("s", *marks[3])
    assert len(device.waits) == 3, "nothing would write the value"


def test_values_that_were_reached_are_not_set_back() -> None:
    device = Device()
    page = page_of(device)
    awaited, written = Awaited(page), WrittenValues(page)
    slot, first = written.mark("a")
    awaited.follow("s", slot, first)
    _, second = written.mark("a")
    device.finish()
    awaited.release()
    assert page[slot] == second


def test_a_full_queue_does_not_block_the_release() -> None:
    """The driver blocks a wait while the stream's queue is full, which it stays until the stream is freed."""
    device, blocked, freed = Device(), threading.Event(), threading.Event()
    page = page_of(device)
    awaited, written = Awaited(page), WrittenValues(page)

    def wait(stream: Any, address: int, value: int) -> None:
        blocked.set()
        assert freed.wait(20)

    device.wait = wait  # type: ignore[method-assign]
    slot, value = written.mark("a")
    waiting = threading.Thread(target=awaited.follow, args=("s", slot, value), daemon=True)
    waiting.start()
    assert blocked.wait(20)
    awaited.release()
    assert awaited.reached(slot, value)
    freed.set()
    waiting.join(20)
    assert not waiting.is_alive()


def test_the_next_worker_continues_from_the_values_of_the_page() -> None:
    """Otherwise a stream that comes late to a wait for the earlier worker would wait again."""
    device = Device()
    pages = Pages(lambda: device)
    page = pages.take("s")
    assert page is not None
    for start in (TOP, 5):  # also past the largest value
        page[0] = start
        slot, value = WrittenValues(page).mark("a stream")
        assert (slot, value) == (0, (start + 1) & TOP) and page[slot] == value
    pages.give_back(page)
    assert pages.take("s") is page and len(device.registered) == 1
    assert pages.take("s") not in (None, page), "two workers at a time have a page each"


@pytest.mark.parametrize("refuses", ["register", "write", "wait", "all"])
def test_a_driver_that_refuses_is_asked_once(refuses: str) -> None:
    asked: list[object] = []

    def driver() -> Optional[Device]:
        asked.append(refuses)
        return None if refuses == "all" else Device(refuses)

    pages = Pages(driver)
    assert pages.take("s") is None and pages.take("s") is None
    assert len(asked) == 1


def test_a_system_without_descriptors_refuses_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits then."""
    made: list[int] = []
    create = values.os.memfd_create

    def memfd_create(*args: Any) -> int:
        made.append(create(*args))
        return made[-1]

    def ftruncate(*_: int) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(values.os, "memfd_create", memfd_create)
    monkeypatch.setattr(values.os, "ftruncate", ftruncate)
    pages = Pages(Device)
    assert pages.take("s") is None and pages.take("s") is None
    (descriptor,) = made
    with pytest.raises(OSError, match="Bad file descriptor"):
        values.os.fstat(descriptor)
