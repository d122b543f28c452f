"""CUDA's implementation of sharing, without CUDA: its counters, references and notes, with PyTorch's calls
replaced.

tests/gpu/test_sharing.py tests it on a device.
"""

from __future__ import annotations

import ctypes
import gc
import os
import queue
import threading
import time
import weakref
from typing import Any, Iterator, Optional

import pytest
import torch

from torchft.process_group.isolated import cuda
from torchft.process_group.isolated.sharing import Registration


class Cuda:
    """Replaces CUDA memory and events for both ends, which are in one process here."""

    def __init__(self) -> None:
        self.addresses: dict[bytes, int] = {}
        self.shared: list[int] = []
        self._released: list[tuple[bytes, int]] = []
        self.imported: list[bytes] = []
        self.events: dict[bytes, Event] = {}
        self.waited: list[tuple[object, Event]] = []
        self.stream: object = "default"
        self.streams = 0
        self.devices: list[int] = []
        self.driver: Optional[Driver] = None  # it refuses
        # Whether the device has finished its queued work.
        self.finished = threading.Event()
        self.finished.set()

    @property
    def released(self) -> list[tuple[bytes, int]]:
        settle()
        return self._released

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        number = len(self.shared)
        self.shared.append(storage.nbytes())
        if storage.nbytes() == 0:
            return (0, None, 0, 0, None, 0, None, False)
        handle = b"allocation %d" % number
        self.addresses[handle] = storage.data_ptr()
        return (0, handle, storage.nbytes(), 512, b"counters", number, b"event", True)

    def import_(self, device: int, handle: bytes, size: int, at: int, counter: bytes, *_: object) -> object:
        assert counter == cuda._NO_COUNTER and at == 512
        self.imported.append(handle)
        memory = (ctypes.c_char * size).from_address(self.addresses[handle])
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def settle() -> None:
    """What the thread for freed storages does."""
    while not cuda._freed.empty():
        cuda._return([cuda._freed.get()])


class Driver:
    """A driver whose streams write a value when a test lets them."""

    def __init__(self) -> None:
        self.writes: list[tuple[object, int, int]] = []
        self.waits: list[tuple[object, int]] = []

    def register(self, address: int, size: int) -> int:
        return address

    def write(self, stream: object, address: int, value: int) -> None:
        self.writes.append((stream, address, value))

    def wait(self, stream: object, address: int, value: int) -> None:
        self.waits.append((stream, value))

    def finish(self) -> None:
        for _, address, value in self.writes:
            ctypes.c_uint32.from_address(address).value = value


class Event:
    """An event that passes only when a test makes it pass."""

    def __init__(self, fake: Cuda, interprocess: bool) -> None:
        assert interprocess
        self._fake = fake
        self.recorded: list[object] = []
        self.passed = 0
        self.handle = b"%064d" % len(fake.events)
        fake.events[self.handle] = self

    def ipc_handle(self) -> bytes:
        return self.handle

    def record(self, stream: object) -> None:
        self.recorded.append(stream)

    def query(self) -> bool:
        return self.passed >= len(self.recorded)

    def wait(self, stream: object) -> None:
        self._fake.waited.append((stream, self))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    fake = Cuda()

    class Events:
        def __new__(cls, interprocess: bool) -> Any:
            return Event(fake, interprocess)

        @staticmethod
        def from_ipc_handle(device: torch.device, handle: bytes) -> Event:
            return fake.events[handle]

    class Within:
        def __init__(self, what: object) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    def new_stream(device: torch.device) -> str:
        fake.streams += 1
        return f"stream {fake.streams}"

    def set_stream(stream: object) -> None:
        fake.stream = stream

    storage = torch.UntypedStorage
    monkeypatch.setattr(cuda, "_DEVICE", "cpu")
    monkeypatch.setattr(storage, "_share_cuda_", lambda storage: fake.share(storage), raising=False)
    monkeypatch.setattr(storage, "_new_shared_cuda", lambda *args: fake.import_(*args), raising=False)
    monkeypatch.setattr(
        storage, "_release_ipc_counter_cuda", lambda *args: fake._released.append(args), raising=False
    )
    for name, value in {
        "Event": Events,
        "Stream": new_stream,
        "current_device": lambda: 0,
        "current_stream": lambda device: fake.stream,
        "set_stream": set_stream,
        "set_device": fake.devices.append,
        "stream": Within,
        "device": Within,
        "ipc_collect": lambda: None,
        "synchronize": lambda device: fake.finished.wait(20),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    hold = cuda._hold

    def settled_hold(storage: torch.UntypedStorage, holder: cuda.TrainerEnd) -> cuda._Export:
        settle()
        return hold(storage, holder)

    monkeypatch.setattr(cuda, "_hold", settled_hold)
    monkeypatch.setattr(cuda, "_freed", queue.SimpleQueue())
    monkeypatch.setattr(cuda, "_returner", threading.current_thread())
    monkeypatch.setattr(cuda, "_pages", {})
    monkeypatch.setattr(cuda.driver, "driver_of", lambda device: fake.driver)
    yield fake
    gc.collect()
    cuda._exports.clear()


Notes = list[tuple[Any, Optional[Registration]]]


def ends() -> tuple[cuda.TrainerEnd, cuda.WorkerEnd, Notes]:
    """Returns the trainer's end, the worker's end, and the notes between them, which `deliver` delivers."""
    notes: Notes = []

    def notify(note: Any, descriptor: Optional[int], held: Optional[Registration]) -> None:
        if note[0] == cuda._DROP:
            notes.append((note, held))
        else:
            worker.notified(note, None if descriptor is None else os.dup(descriptor))

    worker = cuda.WorkerEnd()

    return cuda.TrainerEnd(notify), worker, notes


def deliver(notes: Notes, worker: cuda.WorkerEnd) -> None:
    """Both sides of a note: the worker reads and answers it."""
    while notes:
        note, held = notes.pop(0)
        worker.notified(note, None)
        assert held is not None
        held.release()


# Memory


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0),
        lambda: torch.arange(6).view(2, 3).t(),
        lambda: torch.arange(24, dtype=torch.bfloat16).view(2, 3, 4)[:, 1:, ::2],
        lambda: torch.tensor(3, dtype=torch.int64),
        lambda: torch.zeros(2, 0, 3, dtype=torch.float64),
        lambda: torch.ones(3, dtype=torch.complex64),
        lambda: torch.ones(4).to(torch.float8_e4m3fn),
        lambda: torch.ones(3, requires_grad=True),
    ],
)
def test_the_worker_sees_the_tensor_itself(fake: Cuda, make: Any) -> None:
    trainer, worker, _ = ends()
    tensor = make()
    borrowed = worker.borrow(trainer.register(tensor, True, True).ref)
    assert (
        borrowed.shape == tensor.shape
        and borrowed.dtype == tensor.dtype
        and borrowed.stride() == tensor.stride()
    )
    assert borrowed.data_ptr() == tensor.data_ptr()
    assert not borrowed.requires_grad


def test_a_storage_is_shared_and_imported_once(fake: Cuda) -> None:
    trainer, worker, _ = ends()
    tensor = torch.arange(8.0)
    for view in (tensor, tensor[2:], tensor.view(2, 4)):
        assert worker.borrow(trainer.register(view, True, False).ref).tolist() == view.tolist()
    # Another worker, for example after a new quorum.
    other, other_worker, _ = ends()
    other_worker.borrow(other.register(tensor, True, True).ref)
    assert fake.shared == [32]
    assert len(fake.imported) == 2


def test_memory_is_identified_by_its_storage_not_by_its_address(fake: Cuda) -> None:
    trainer, worker, notes = ends()
    refs = []
    for value in range(20):
        # The allocator reuses the same address again and again.
        tensor = torch.full((1000,), float(value))
        registration = trainer.register(tensor, True, True)
        deliver(notes, worker)
        assert worker.borrow(registration.ref)[0].item() == value
        refs.append(registration.ref[0])
        registration.release()
    assert len(set(refs)) == 20 and len(fake.shared) == 20
    assert len(worker._imports) == 1


def test_a_registration_keeps_the_memory(fake: Cuda) -> None:
    trainer, _, _ = ends()
    tensor = torch.ones(4)
    freed: list[int] = []
    weakref.finalize(tensor.untyped_storage(), freed.append, 1)
    registration = trainer.register(tensor, True, True)
    registration.fetch()
    del tensor
    assert not freed
    registration.release()
    registration.release()
    assert freed


def test_a_dropped_registration_keeps_the_memory_until_the_worker_is_reaped(fake: Cuda) -> None:
    trainer, _, _ = ends()
    tensor = torch.ones(4)
    freed: list[int] = []
    weakref.finalize(tensor.untyped_storage(), freed.append, 1)
    trainer.register(tensor, True, True)
    del tensor
    assert not freed, "the device may still write for a worker that is about to end"
    trainer.close()
    assert freed


def test_memory_is_returned_when_the_worker_has_dropped_it(fake: Cuda) -> None:
    trainer, worker, notes = ends()
    tensor, other = torch.ones(4), torch.ones(5)
    registration = trainer.register(tensor, True, True)
    worker.borrow(registration.ref)
    registration.release()
    del tensor
    assert not notes, "no note is sent from within the garbage collector"
    worker.borrow(trainer.register(other, True, True).ref)
    assert len(notes) == 1 and not fake.released, "the worker has not read the note yet"
    deliver(notes, worker)
    assert len(worker._imports) == 1
    assert fake.released == [(b"counters", 0)]
    trainer.register(other, True, True)
    assert not notes
    trainer.close()
    del other
    assert fake.released == [(b"counters", 0), (b"counters", 1)]


def test_memory_of_a_killed_worker_is_returned(fake: Cuda) -> None:
    trainer, worker, _ = ends()
    freed, kept = torch.ones(4), torch.ones(5)
    for tensor in (freed, kept):
        worker.borrow(trainer.register(tensor, True, True).ref)
    del freed, tensor
    assert not fake.released
    trainer.close()
    trainer.close()
    assert fake.released == [(b"counters", 0)]
    # Storages that the user still has are shared with the next worker without a new export.
    after, _, _ = ends()
    after.register(kept, True, True)
    assert len(fake.shared) == 2
    after.close()
    del kept
    assert fake.released == [(b"counters", 0), (b"counters", 1)]
    with pytest.raises(RuntimeError, match="worker of this group has ended"):
        trainer.register(torch.ones(3), True, True)


def test_memory_waits_for_all_workers_that_use_it(fake: Cuda) -> None:
    one, _, _ = ends()
    two, _, _ = ends()
    tensor = torch.ones(4)
    one.register(tensor, True, True)
    two.register(tensor, True, True)
    del tensor
    one.close()
    assert not fake.released
    two.close()
    assert fake.released == [(b"counters", 0)]


def test_memory_is_returned_when_all_streams_are_done_with_it(
    fake: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator ignores a shared storage, so `record_stream` does not protect memory that a stream still
    reads.
    """
    monkeypatch.setattr(cuda, "_returner", None)
    trainer, _, _ = ends()
    fake.finished.clear()
    tensor = torch.ones(4)
    trainer.register(tensor, True, True).release()
    trainer.close()
    del tensor
    time.sleep(0.02)
    assert not fake._released
    fake.finished.set()
    deadline = time.monotonic() + 20
    while not fake._released and time.monotonic() < deadline:
        time.sleep(0.001)
    assert fake._released == [(b"counters", 0)]


def test_a_storage_may_be_freed_while_the_table_is_locked(fake: Cuda) -> None:
    """The garbage collector runs anywhere, also in a thread that holds the lock."""
    trainer, _, _ = ends()
    tensor = torch.ones(4)
    trainer.register(tensor, True, True)
    trainer.close()
    with cuda._lock:
        del tensor
        assert cuda._freed.qsize() == 1
    assert fake.released == [(b"counters", 0)]


def test_a_forked_child_does_not_change_the_counters(fake: Cuda) -> None:
    trainer, _, _ = ends()
    tensor = torch.ones(4)
    trainer.register(tensor, True, True)
    cuda._forget_all()
    trainer.close()
    del tensor
    assert not fake.released


def test_a_worker_that_has_failed_may_be_noticed_while_exporting(fake: Cuda) -> None:
    def notify(*_: object) -> None:
        trainer.close()
        raise RuntimeError("the worker process has ended")

    trainer = cuda.TrainerEnd(notify)
    tensor = torch.ones(4)
    with pytest.raises(RuntimeError, match="has ended"):
        trainer.register(tensor, True, True)
    del tensor
    assert not cuda._exports


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        (lambda: torch.ones(2, device="meta"), RuntimeError, "tensor on meta.*cannot share memory of meta"),
        (lambda: torch.ones(2, 2).to_sparse(), RuntimeError, "layout torch.sparse_coo"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), RuntimeError, "resolve_conj"),
    ],
)
def test_what_cannot_be_registered_is_refused(
    fake: Cuda, tensor: Any, error: type[Exception], message: str
) -> None:
    trainer, _, _ = ends()
    with pytest.raises(error, match=message):
        trainer.register(tensor(), True, True)


def test_without_a_device_a_tensor_is_refused_by_name() -> None:
    trainer = cuda.TrainerEnd(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"tensor on cpu: .* memory of CUDA"):
        trainer.register(torch.ones(2), True, True)
    trainer.close()


def test_a_worker_has_one_device(fake: Cuda) -> None:
    trainer, _, _ = ends()
    trainer.register(torch.ones(2), True, True)
    trainer.register(torch.ones(2), True, True)
    assert fake.devices == [0]
    trainer._device = torch.device("cpu", 1)
    with pytest.raises(ValueError, match=r"tensor on cpu: the other operations of this group were on cpu:1"):
        trainer.register(torch.ones(2), True, True)


# Order


def passed(worker: cuda.WorkerEnd, mark: Any) -> bool:
    """Whether the device has passed the trainer's mark."""
    event = worker._marks.event(mark, worker._device)
    return event is None or event.query()


def test_both_ends_send_marks(fake: Cuda) -> None:
    trainer, worker, _ = ends()
    mark = trainer.mark()
    worker.follow(mark)
    (stream, event) = fake.waited[0]
    assert event.recorded == ["default"] and stream == "stream 1" and fake.stream == stream
    assert not passed(worker, mark)
    answer = worker.mark()
    assert not trainer.reached(answer)
    for event in fake.events.values():
        event.passed = 1
    assert trainer.reached(answer) and passed(worker, mark)


def test_operations_take_turns_on_streams(fake: Cuda) -> None:
    trainer, worker, _ = ends()
    for _ in range(3):
        worker.follow(trainer.mark())
    assert [stream for stream, _ in fake.waited] == ["stream 1", "stream 2", "stream 3"]


def test_an_event_is_reused_once_the_device_has_passed_it(fake: Cuda) -> None:
    trainer, worker, _ = ends()
    first, second = trainer.mark(), trainer.mark()
    assert len(fake.events) == 2, "the first one may still be waited for"
    assert not passed(worker, first)
    for event in fake.events.values():
        event.passed = 1
    third = trainer.mark()
    assert len(fake.events) == 2
    assert not passed(worker, third)
    assert passed(worker, first), "it was passed, otherwise its event would not have been reused"
    assert passed(worker, second)


def test_a_stream_never_waits_for_an_event_of_the_worker(fake: Cuda) -> None:
    """It would wait for ever if the worker was killed."""
    trainer, worker, _ = ends()
    registration = trainer.register(torch.ones(2), True, True)
    mark = worker.mark()
    assert not trainer.follow(mark) and not trainer.reached(mark)
    assert not fake.waited
    registration.release()
    trainer.close()


def test_a_stream_waits_for_a_value_that_the_worker_writes(fake: Cuda) -> None:
    device = fake.driver = Driver()
    trainer, worker, _ = ends()
    trainer.register(torch.ones(2), True, True)
    assert device.waits == [("default", 0)] * 2 and [write[2] for write in device.writes] == [0, 0], (
        "both ends asked"
    )
    worker.follow(trainer.mark())
    mark = worker.mark()
    assert device.writes[-1][::2] == ("stream 1", 1) and not trainer.reached(mark)
    fake.stream = "the trainer's"
    assert trainer.follow(mark)
    assert device.waits[-1] == ("the trainer's", 1)
    device.finish()
    assert trainer.reached(mark)
    assert [event.recorded for event in fake.events.values()] == [["default"]], "the worker has recorded none"
    trainer.close()


def test_streams_are_freed_and_the_page_is_used_again_when_the_worker_has_ended(fake: Cuda) -> None:
    fake.driver = Driver()
    trainer, worker, _ = ends()
    trainer.register(torch.ones(2), True, True)
    mark = worker.mark()
    trainer.follow(mark)
    trainer.free_streams()
    assert trainer.reached(mark)
    awaited = trainer._awaited
    trainer.close()
    trainer.close()
    next_one, next_worker, _ = ends()
    next_one.register(torch.ones(2), True, True)
    assert awaited is not None and next_one._awaited is not None and next_one._awaited.page is awaited.page
    assert not next_one.reached(next_worker.mark()), "it continues from the value that was written"
    next_one.close()
