"""A host is measured; wrong products, copies and memory are found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torchft._node import figures
from torchft._node.verdict import Report
from torchft.checkpointing.client.deadline import Deadline

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "_EACH_SEC", 1e-6)
    monkeypatch.setattr(figures, "_ROWS", 64)
    monkeypatch.setattr(figures, "_COPY", 1 << 16)
    monkeypatch.setattr(figures, "_CHUNK", 1 << 12)
    monkeypatch.setattr(figures, "_TESTED", 1 << 16)


def measured(*on: torch.device, seconds: float = 1000.0) -> Report:
    report = Report("host")
    figures.measure(report, list(on), lambda what: None, Deadline(seconds))
    return report


def test_the_figures_of_a_host() -> None:
    report = measured(CPU)
    assert report.problems == report.unknown == []
    assert report.units == {"processor: matrix products": "TFLOP/s", "processor: memory": "GB/s"}
    assert report.figures.keys() == report.units.keys()
    for values in report.figures.values():
        assert len(values) == 9 and min(values) > 0
    (note,) = report.notes
    assert note.startswith("cpu: load ")


def test_a_product_that_is_wrong_once(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = torch.matmul, []

    def once_wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        product = right(*args, **kwargs)
        calls.append(product)
        if len(calls) == 20:
            product[3, 5] += 1
        return product

    monkeypatch.setattr(torch, "matmul", once_wrong)
    assert measured(CPU).problems == ["cpu: the same matrix product has different results"]


def test_a_copy_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_a_flipped_bit(source: torch.Tensor, target: torch.Tensor) -> list[float]:
        target.copy_(source)
        target[77] ^= 4
        return [1.0]

    monkeypatch.setattr(figures, "copies", with_a_flipped_bit)
    assert measured(CPU).problems == ["cpu: a copy differs from its source"]


@pytest.mark.parametrize("pattern", figures._PATTERNS)
def test_a_flipped_byte_of_memory(pattern: int) -> None:
    chunks = figures.written(CPU, 1 << 16, pattern)
    assert len(chunks) == 16 and len({int(word) for chunk in chunks for word in chunk}) == len(chunks) * 512
    assert figures.errors_in(chunks, pattern) == []
    chunks[1].view(torch.uint8)[803] ^= 0x10
    (error,) = figures.errors_in(chunks, pattern)
    assert error == f"1 words of memory changed, the first of them {4096 + 800} bytes from the beginning"


def test_memory_that_changes_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = figures.written

    def damaged(*args: Any) -> list[torch.Tensor]:
        chunks = whole(*args)
        chunks[0][0] += 1
        return chunks

    monkeypatch.setattr(figures, "written", damaged)
    assert len(measured(CPU).problems) == len(figures._PATTERNS)


def test_time_that_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(CPU, seconds=0).unknown == ["cpu is not measured for lack of time"]
    monkeypatch.setattr(figures, "copies", lambda *_: monkeypatch.setattr(Deadline, "left", 0.0) or [1.0])
    report = measured(CPU)
    assert report.unknown == ["the memory of cpu is not tested for lack of time"] and report.figures


def test_a_device_that_is_slower_than_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(device: torch.device, problems: list[str]) -> Iterator[tuple[str, str, list[float]]]:
        if device.index == 3:
            raise RuntimeError("CUDA error: an illegal instruction\nmore")
        if device.index == 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        yield "device: memory", "GB/s", [2.0 if device.index == 1 else 4.0] * 9

    monkeypatch.setattr(figures, "_of_device", of)
    monkeypatch.setattr(figures, "_PATTERNS", ())  # there is no such memory here
    report = measured(*(torch.device("cuda", number) for number in range(5)))
    assert report.figures == {"device: memory": [2.0] * 9}, "those of the slowest one"
    assert report.problems == [
        "cuda:3: CUDA error: an illegal instruction",
        "cuda:1: device: memory: the median of the other devices is 2.00 times its own",
    ]
    assert report.unknown == ["cuda:4 is not measured: CUDA out of memory."]


def test_the_processor_is_always_measured() -> None:
    assert figures.devices()[0] == CPU
