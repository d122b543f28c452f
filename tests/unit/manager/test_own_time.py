"""The own time of a rank in a step, as it is measured and reported."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from torchft._manager.observe import own_time
from torchft._manager.observe.own_time import OwnTime, host


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(own_time.time, "monotonic", lambda: self.now)

    def after(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_from_the_end_of_a_step_to_the_first_reduction_of_the_next_one(clock: Clock) -> None:
    reports: list[list[int]] = []
    own = OwnTime(lambda took, _: reports.append(took))
    assert not own.running
    for seconds in (0.2, 0.25, 0.3):
        own.begins()
        clock.after(seconds)
        assert own.running
        own.reduces()
        assert not own.running
        clock.after(10)  # the wait for others
    own.begins()
    assert reports == [[200_000], [250_000], [300_000]]


def test_the_time_of_a_part_is_reported_as_that_of_the_usual_one(clock: Clock) -> None:
    reports: list[list[int]] = []
    own = OwnTime(lambda took, _: reports.append(took))
    for part, seconds in ((0.5, 0.3), (0.0, 5), (2.0, 1.2), (1.0, 0.6)):
        own.begins()
        own.computes(part)
        clock.after(seconds)
        if own.running:
            own.reduces()
        clock.after(1)
    own.begins()
    assert reports == [[600_000]] * 3


def test_short_steps_are_reported_together(clock: Clock) -> None:
    reports: list[list[int]] = []
    own = OwnTime(lambda took, _: reports.append(took))
    for _ in range(30):
        own.begins()
        clock.after(1 / 16)
        own.reduces()
    assert [len(took) for took in reports] == [1, 8, 8, 8]


def test_a_step_that_waits_for_its_quorum_is_not_measured(clock: Clock) -> None:
    reports: list[list[int]] = []
    own = OwnTime(lambda took, _: reports.append(took))
    own.begins()
    own.skip()
    assert not own.running
    clock.after(10)
    own.begins()
    assert reports == []


def test_without_a_server_nothing_is_measured() -> None:
    own = OwnTime(None)
    own.begins()
    assert not own.running


class TimedEvent:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.at = clock, 0.0

    def record(self, stream: object) -> None:
        self.at = self.clock.now

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: TimedEvent) -> float:
        return (end.at - self.at) * 1000


def test_on_a_device_it_is_the_time_between_two_events(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", lambda device, enable_timing: TimedEvent(clock))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    reports: list[list[int]] = []
    own = OwnTime(lambda took, _: reports.append(took), torch.device("cuda", 0))
    for part in (1.0, 0.5):
        own.begins()
        own.computes(part)
        clock.after(0.2 * part)
        own.reduces()
        clock.after(1)
    own.begins()
    assert reports == [[200_000], [200_000]]


def test_a_device_without_timed_events_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device, enable_timing: bool) -> None:
        raise NotImplementedError

    monkeypatch.setattr(torch, "Event", fails)
    own = OwnTime(lambda took, _: None, torch.device("cuda", 0))
    own.begins()
    own.begins()
    assert not own.running


def test_the_line_about_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (12.34, 1, 1))
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert host(None).startswith("load 12.3 on 8 processors")
    device = torch.device("cuda", 0)
    assert "MHz" not in host(device)  # none here
    nvml = SimpleNamespace(nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x1 | 0x20 | 0x4)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", lambda device: None)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1410)
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 84)
    assert host(device).endswith(", 1410 MHz, 84 °C, its clock is lowered by heat and power")
