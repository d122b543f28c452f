"""The figures of devices, whose work is late."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from torchft._node import figures
from torchft._node.verdict import Report
from torchft.checkpointing.client.deadline import Deadline


@pytest.fixture
def devices(late: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    for name, value in {
        "_EACH_SEC": 1e-6,
        "_DEVICE_ROWS": 64,
        "_COPY": 1 << 16,
        "_DEVICE_COPY": 1 << 16,
        "_CHUNK": 1 << 12,
        "_TESTED": 1 << 15,
    }.items():
        monkeypatch.setattr(figures, name, value)
    return [device for device in figures.devices() if device.type == "late"]


def test_all_devices_are_measured(devices: list[torch.device]) -> None:
    assert devices == [torch.device("late", number) for number in range(torch.accelerator.device_count())]
    report = Report("host")
    figures.measure(report, devices, lambda what: None, Deadline(1000))
    assert [problem for problem in report.problems if "times its own" not in problem] == report.unknown == []
    assert report.figures.keys() == {
        "device: matrix products",
        "device: memory",
        "host to device",
        "device to host",
    }


def test_a_byte_that_changes_on_the_way_is_found(
    devices: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = figures.copies

    def damaged(source: torch.Tensor, target: torch.Tensor) -> Any:
        rates = copies(source, target)
        if target.device.type == "cpu":
            target[5] ^= 1
        return rates

    monkeypatch.setattr(figures, "copies", damaged)
    report = Report("host")
    figures.measure(report, devices[:1], lambda what: None, Deadline(1000))
    assert report.problems == ["late:0: bytes that were copied to it and back differ"]
