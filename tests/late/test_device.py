"""The test device: its work is delayed, its memory is separate, and only streams and events order its
work.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.late import load
from tests.unit.children import run_python

load()
ROOT = Path(__file__).resolve().parents[2]


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def settle() -> None:
    torch.accelerator.synchronize()


# Streams and events


def test_work_is_late(late):
    x = torch.ones(3, device="late")
    with late.held():
        y = x + 1
        assert late.pending() > 0
    assert y.tolist() == [2, 2, 2]


def test_an_event_orders_two_streams(late):
    other = torch.Stream("late")
    a = torch.zeros(1000, device="late")
    settle()
    late.hold(current())
    a.fill_(3)
    event = current().record_event()
    other.wait_event(event)
    with other:
        b = a.clone()
    assert not event.query() and not other.query()
    late.release()
    other.record_event().synchronize()
    assert event.query()
    with other:
        assert b.sum().item() == 3000


def test_a_stream_waits_for_a_word_that_another_stream_or_the_host_writes(late):
    words = (ctypes.c_uint32 * 2)(2**32 - 1, 0)
    address = late.C.register_words(ctypes.addressof(words), 8)
    other, a = torch.Stream("late"), torch.zeros(3, device="late")
    settle()
    # Behind the largest number, which it has.
    late.C.wait_value(other.device_index, other.stream_id, address, 1)
    with other:
        b = a.clone()
    with late.held(current()):
        a.fill_(3)
        late.C.write_value(current().device_index, current().stream_id, address, 1)
        assert not other.query() and words[0] == 2**32 - 1
    other.synchronize()
    assert b.tolist() == [3, 3, 3]
    late.C.wait_value(other.device_index, other.stream_id, address + 4, 1)
    late.host_timeout_ms(50)
    with pytest.raises(RuntimeError, match="host waited over 50 ms"):
        other.synchronize()
    late.host_timeout_ms(60000)
    words[1] = 7
    other.synchronize()
    for wrong in (address + 8, ctypes.addressof(words), address + 2):
        with pytest.raises(RuntimeError, match="no word of registered memory"):
            late.C.wait_value(other.device_index, other.stream_id, wrong, 0)


def test_without_an_event_another_stream_reads_old_values(late):
    other = torch.Stream("late")
    a = torch.zeros(1000, device="late")
    settle()
    with late.held(current()):
        a.fill_(3)
        with other:
            assert a.sum().item() == 0


def test_a_held_stream_runs_the_given_number_of_tasks(late):
    a = torch.zeros(4, device="late")
    settle()
    with late.held(current()):
        for _ in range(3):
            a += 1
        late.step(current(), 2)
        deadline = time.monotonic() + 10
        while late.pending() > 1:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert late.cpu_view(a).tolist() == [2] * 4
    assert a.tolist() == [3] * 4


def test_lazy_work_runs_on_demand_through_events(late):
    late.lazy(60_000_000)
    a = torch.ones(10, device="late")
    other = torch.Stream("late")
    other.wait_event(current().record_event())
    with other:
        b = a + 1
        assert late.pending(current()) > 0
        assert b.sum().item() == 20


def test_a_host_that_waits_for_a_held_stream_gets_an_error(late):
    late.host_timeout_ms(50)
    x = torch.ones(3, device="late")
    with late.held(), pytest.raises(RuntimeError, match="host waited over 50 ms"):
        x.tolist()


def test_events_measure_time(late):
    late.delays(1, 1000, 2000)
    begin, end = (torch.Event("late", enable_timing=True) for _ in range(2))
    begin.record()
    torch.ones(3, device="late")
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) >= 1


def test_waits_of_the_host_release_the_gil(late):
    late.enqueue(lambda: time.sleep(0.01))
    settle()
    event = current().record_event()
    late.enqueue(lambda: time.sleep(0.01))
    event.synchronize()


def test_a_future_is_done_at_launch_and_orders_the_streams_of_its_users(late):
    other = torch.Stream("late")
    a = torch.zeros(5, device="late")
    settle()
    with late.held(other):
        future = torch.futures.Future(devices=[torch.device("late:0")])
        with other:
            b = a + 1
            future.set_result(b)
        c = future.then(lambda done: done.value() + 1).wait()
        assert future.done() and late.pending() > 0
    assert c.tolist() == [2] * 5


# Memory


def test_memory_is_nan_until_it_is_written(late):
    assert torch.isnan(torch.empty(10, device="late").cpu()).all()
    a = torch.ones(10, device="late")
    address = a.data_ptr()
    del a
    b = torch.empty(10, device="late")
    assert b.data_ptr() == address and torch.isnan(b.cpu()).all()


def test_a_freed_block_is_reused_at_once_in_stream_order(late):
    with late.held():
        a = torch.full((100,), 1.0, device="late")
        address = a.data_ptr()
        b = a + 1
        del a
        c = torch.full((100,), 5.0, device="late")
        assert c.data_ptr() == address
    assert b.sum().item() == 200


@pytest.mark.parametrize(("record", "expected"), [(False, (True, 9.0)), (True, (False, 7.0))])
def test_record_stream_keeps_a_block_from_its_next_user(late, record: bool, expected: tuple[bool, float]):
    other = torch.Stream("late")
    a = torch.full((5000,), 7.0, device="late")
    settle()
    late.hold(other)
    with other:
        read_late = a * 1
    if record:
        a.record_stream(other)
    address = a.data_ptr()
    del a
    b = torch.full((5000,), 9.0, device="late")
    current().synchronize()
    late.release()
    with other:
        assert (b.data_ptr() == address, read_late[0].item()) == expected


def test_a_free_writes_nothing(late):
    """As on CUDA: another stream reads correct data if the block's stream waits for that stream before the
    next allocation.
    """
    other = torch.Stream("late")
    with other:
        a = torch.full((5000,), 7.0, device="late")
    address = a.data_ptr()
    settle()
    with late.held(current()):
        read_late = a * 1
        del a
        other.synchronize()
        other.wait_stream(current())
        with other:
            b = torch.full((5000,), 9.0, device="late")
    assert (b.data_ptr() == address, read_late[0].item()) == (True, 7.0)


def test_the_host_cannot_read_device_memory(late):
    a = torch.ones(3, device="late")
    mappings = [line.split()[:2] for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [(*(int(end, 16) for end in where.split("-")), how) for where, how in mappings]
    assert [how for begin, end, how in ranges if begin <= a.data_ptr() < end] == ["---s"]
    with pytest.raises(TypeError, match="can't convert late"):
        a.numpy()


def test_memory_is_counted(late):
    before = torch.accelerator.memory_allocated()
    a = torch.ones(1000, device="late")
    assert torch.accelerator.memory_allocated() - before == 4000
    del a
    assert torch.accelerator.memory_allocated() == before


# Copies


def test_a_copy_from_page_locked_memory_reads_late(late):
    host = torch.ones(10).pin_memory()
    assert host.is_pinned()
    with late.held():
        device = host.to("late", non_blocking=True)
        host.fill_(5)
    assert device.sum().item() == 50


def test_a_copy_from_other_memory_is_staged(late):
    host = torch.ones(10)
    with late.held():
        device = host.to("late", non_blocking=True)
        host.fill_(5)
    assert device.sum().item() == 10


def test_a_copy_to_the_host_is_incomplete_without_a_wait(late):
    device = torch.ones(10, device="late")
    settle()
    with late.held():
        host = torch.zeros(10).pin_memory()
        host.copy_(device, non_blocking=True)
        assert host.sum() == 0
    settle()
    assert host.sum() == 10


def test_copies_between_devices(late):
    a = torch.ones(3, device="late:1")
    assert (a + 1).to("late:0").tolist() == [2, 2, 2]


def test_saving_loading_and_pickling(late):
    file = io.BytesIO()
    torch.save({"a": torch.arange(4.0, device="late")}, file)
    file.seek(0)
    a = torch.load(file)["a"]
    assert a.device.type == "late" and a.tolist() == [0, 1, 2, 3]
    assert pickle.loads(pickle.dumps(a)).tolist() == [0, 1, 2, 3]


# Errors


def test_a_kernels_error_is_raised_at_the_next_wait(late):
    index = torch.tensor([7], device="late")
    torch.ones(3, device="late").gather(0, index)
    with pytest.raises(RuntimeError, match="failed asynchronously"):
        settle()


def test_mistakes_in_arguments_are_raised_at_launch(late):
    with pytest.raises(RuntimeError):
        torch.ones(3, device="late") @ torch.ones(4, device="late")
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="late") + torch.ones(3)


def test_a_missing_operator_is_named(late):
    with pytest.raises(NotImplementedError, match="the operator aten::_to_sparse is missing"):
        torch.ones(3, device="late").to_sparse()
    with pytest.raises(NotImplementedError, match="the operator aten::_fused_dropout is missing"):
        torch._fused_dropout(torch.ones(3, device="late"), 0.5)


def test_a_view_does_not_reach_beyond_its_memory(late):
    with pytest.raises(RuntimeError, match="as_strided needs 40 bytes of a storage of 12"):
        torch.ones(3, device="late").as_strided((10,), (1,))


@pytest.mark.slow
def test_a_forked_child_cannot_use_the_device(job_server):
    # In a separate process, because threads of other runtimes in the test process do not survive a fork.
    script = """
import os, torch
from tests.late import load
load()
x = torch.ones(1, device="late")
pid = os.fork()
if pid == 0:
    try:
        x + 1
    except RuntimeError as e:
        os._exit(7 if "forked" in str(e) else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = run_python(script, env={"PYTHONPATH": str(ROOT)})
    assert done.stdout.strip() == "7", done.stderr


def test_random_numbers_are_the_same_under_any_schedule(late):
    def draw() -> list[float]:
        torch.manual_seed(3)
        return (torch.randn(3, device="late") + torch.randn(3, device="late")).tolist()

    first = draw()
    late.delays(5, 0, 300)
    assert draw() == first


def test_each_thread_has_its_own_device(late):
    got = []

    def run() -> None:
        torch.accelerator.set_device_index(1)
        got.append(torch.ones(1, device="late").device.index)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert got == [1] and torch.ones(1, device="late").device.index == 0
