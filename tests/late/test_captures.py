"""Captures of graphs by another thread: queries of events neither invalidate them nor end anything."""

from __future__ import annotations

import ctypes
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.late import load
from torchft import futures, utils
from torchft.futures import context_timeout, stream_timeout
from torchft.utils import DeviceEvent, DeviceThread

load()
SOON = timedelta(milliseconds=1)


@pytest.fixture
def modes(late: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads can change their mode of capture, as with CUDA's driver."""

    def exchange(mode: Any) -> None:
        mode._obj.value = late.C.exchange_capture_mode(mode._obj.value)

    monkeypatch.setattr(utils, "_exchange_capture_mode", lambda: exchange)


def mark() -> DeviceEvent:
    return DeviceEvent([torch.accelerator.current_stream().device])


def beside_a_timer() -> None:
    """Returns when the timer thread has run a later timer than those that were set."""
    ran = threading.Event()
    with context_timeout(ran.set, 5 * SOON):
        assert ran.wait(20)


def test_threads_of_ours_leave_the_graph_valid(late: Any, modes: None) -> None:
    torch.ones(3, device="late")
    reached = mark()
    torch.accelerator.synchronize()
    got: list[bool] = []
    with late.captured():
        thread = DeviceThread(lambda: got.append(reached.reached()), "thread")
        thread.start()
        thread.join(20)
    assert got == [True]


def test_a_thread_of_the_users_keeps_its_mode_and_leaves_the_graph_valid(late: Any, modes: None) -> None:
    before = late.C.exchange_capture_mode(0)
    torch.ones(3, device="late")
    reached = mark()
    torch.accelerator.synchronize()
    with late.captured():
        assert reached.reached()
    assert late.C.exchange_capture_mode(before) == 0


def test_a_deadline_that_passes_during_a_capture_leaves_the_graph_valid(late: Any, modes: None) -> None:
    expired = threading.Event()
    torch.ones(3, device="late")
    torch.accelerator.synchronize()
    with late.captured():
        stream_timeout(expired.set, SOON)
        beside_a_timer()
    assert not expired.is_set()
    with late.held():
        torch.ones(3, device="late")
        with late.captured():
            stream_timeout(expired.set, SOON)
            assert expired.wait(20)


def test_a_query_that_a_capture_forbids_is_no_deadline_passed(
    late: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver cannot change the mode. The query is repeated after the capture."""
    monkeypatch.setattr(futures, "_ASK_AGAIN", SOON)
    monkeypatch.setattr(utils, "_exchange_capture_mode", lambda: lambda _: late.C.exchange_capture_mode(0))
    expired, refused = threading.Event(), threading.Event()
    query = DeviceEvent.known

    def known(self: DeviceEvent) -> bool | None:
        answer = query(self)
        if answer is None:
            refused.set()
        return answer

    monkeypatch.setattr(DeviceEvent, "known", known)
    with late.held():
        torch.ones(3, device="late")
        late.C.begin_capture()
        stream_timeout(expired.set, SOON)
        assert refused.wait(20)
        beside_a_timer()
        assert not expired.is_set()
        assert not late.C.end_capture(), "valid"
        assert expired.wait(20)


def test_a_device_that_has_failed_is_a_deadline_passed(late: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def query(_: DeviceEvent) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(DeviceEvent, "known", query)
    expired = threading.Event()
    torch.ones(3, device="late")
    stream_timeout(expired.set, SOON)
    assert expired.wait(20)


def test_a_wait_of_the_training_thread_outlasts_a_capture_of_another_thread(late: Any) -> None:
    torch.ones(3, device="late")
    reached = mark()
    torch.accelerator.synchronize()
    late.C.begin_capture()
    ends = threading.Timer(0.05, late.C.end_capture)
    ends.start()
    assert reached.wait(20)


def test_the_call_of_the_driver_is_that_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    def driver(name: str) -> Any:
        assert name == "libcuda.so.1"
        return type(
            "Driver",
            (),
            {"cuThreadExchangeStreamCaptureMode": lambda self, mode: given.append(mode._obj.value)},
        )()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", driver)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    utils._exchange_capture_mode.cache_clear()
    try:
        utils.use_device(3)
    finally:
        utils._exchange_capture_mode.cache_clear()
    assert given == [1]  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
