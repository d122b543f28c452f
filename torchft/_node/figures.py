"""What a host does in a second, and whether it computes and remembers right.

Each measurement has a fixed size and is repeated. Its work runs on one device of the host at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from torchft._manager.observe.own_time import host
from torchft._node.verdict import Report, slow
from torchft.checkpointing.client.deadline import Deadline
from torchft.checkpointing.memory.reservation import available_memory

_REPETITIONS = 9
_EACH_SEC = 0.05  # of a repetition: short ones are made of several calls
_MOST_CALLS = 200
_COMPARED = 10  # products, each with the first one
_CPU = torch.device("cpu")
# Rows of a square matrix of float32 on the processor, of bfloat16 on a device.
_ROWS, _DEVICE_ROWS = 1024, 8192
# Bytes of a copy: more than a cache holds.
_COPY, _DEVICE_COPY = 128 << 20, 1 << 30
# Bytes of host memory that are tested; of a device most of what is free.
_TESTED = 1 << 28
_DEVICE_SHARE = 0.8
_CHUNK = 1 << 26
_PATTERNS = (0x5555555555555555, -0x5555555555555556)  # each bit is 0 once and 1 once
Say = Callable[[str], None]


def devices() -> list[torch.device]:
    """The processor, and the accelerators that this process sees."""
    if not torch.accelerator.is_available():
        return [_CPU]
    kind = str(torch.accelerator.current_accelerator())
    count = torch.accelerator.device_count()
    return [_CPU, *(torch.device(kind.partition(":")[0], number) for number in range(count))]


def measure(report: Report, on: list[torch.device], say: Say, deadline: Deadline) -> None:
    """Adds the figures of this host to a report: of several devices those of the slowest one, and a problem
    for each device that is slower than the others, or wrong.
    """
    rates: dict[str, dict[str, list[float]]] = {}
    for device in on:
        if deadline.left <= 0:
            report.unknown.append(f"{device} is not measured for lack of time")
            continue
        say(f"measuring {device}")
        try:
            for figure, unit, values in _of_device(device, report.problems):
                rates.setdefault(figure, {})[str(device)] = values
                report.units[figure] = unit
            for pattern in _PATTERNS:
                if deadline.left <= 0:
                    report.unknown.append(f"the memory of {device} is not tested for lack of time")
                    break
                chunks = written(device, tested(device), pattern)
                report.problems += [f"{device}: {error}" for error in errors_in(chunks, pattern)]
                del chunks
        except torch.OutOfMemoryError as error:  # other processes use it
            report.unknown.append(f"{device} is not measured: {_first_line(error)}")
        except RuntimeError as error:
            report.problems.append(f"{device}: {_first_line(error)}")
        else:
            report.notes.append(f"{device}: {host(None if device == _CPU else device)}")
    for figure, of in rates.items():
        report.figures[figure] = min(of.values(), key=median)
        report.problems += [f"{device}: {reason}" for device, reason in slow(figure, of, "devices").items()]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _of_device(device: torch.device, problems: list[str]) -> Iterator[tuple[str, str, list[float]]]:
    """The name, unit and repetitions of each figure of a device."""
    on_host = device == _CPU
    rows, size = (_ROWS, _COPY) if on_host else (_DEVICE_ROWS, _DEVICE_COPY)
    where = "processor" if on_host else "device"
    values, right = products(device, rows)
    yield f"{where}: matrix products", "TFLOP/s", values
    if not right:
        problems.append(f"{device}: the same matrix product has different results")
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    yield f"{where}: memory", "GB/s", copies(source, target)
    if not torch.equal(source, target):
        problems.append(f"{device}: a copy differs from its source")
    if not on_host:
        pinned = torch.full((_COPY,), 0xA5, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(pinned, device=device)
        back = torch.empty_like(pinned, pin_memory=True)
        yield "host to device", "GB/s", copies(pinned, there)
        yield "device to host", "GB/s", copies(there, back)
        if not torch.equal(pinned, back):
            problems.append(f"{device}: bytes that were copied to it and back differ")


def timed(work: Callable[[], object], device: torch.device) -> list[float]:
    """How long a call takes, in seconds, in each repetition."""

    def ended() -> None:
        if device != _CPU:
            torch.accelerator.synchronize(device)

    def several(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            work()
        ended()
        return (time.perf_counter() - began) / calls

    several(1)  # libraries initialize themselves
    calls = min(_MOST_CALLS, math.ceil(_EACH_SEC / max(several(1), 1e-9)))
    return [several(calls) for _ in range(_REPETITIONS)]


def products(device: torch.device, rows: int) -> tuple[list[float], bool]:
    """The rates of a product of two square matrices, in TFLOP/s, and whether all results were the same.

    The factors are small integers, whose sums are exact in any order, also where several threads add.
    """
    generator = torch.Generator(device).manual_seed(0)
    kind = torch.float32 if device == _CPU else torch.bfloat16
    a, b = (
        torch.randint(-8, 9, (rows, rows), generator=generator, device=device, dtype=kind) for _ in range(2)
    )
    first = a @ b
    again = torch.empty_like(first)
    took = timed(lambda: torch.matmul(a, b, out=again), device)
    same = all(torch.equal(first, torch.matmul(a, b, out=again)) for _ in range(_COMPARED))
    return [2 * rows**3 / seconds / 1e12 for seconds in took], same


def copies(source: torch.Tensor, target: torch.Tensor) -> list[float]:
    """The rates of a copy, in GB/s."""
    device = source.device if source.device != _CPU else target.device
    took = timed(lambda: target.copy_(source, non_blocking=True), device)
    return [source.nbytes / seconds / 1e9 for seconds in took]


def tested(device: torch.device) -> int:
    """How many bytes of a device, or of the host, are tested."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _DEVICE_SHARE)
    return min(_TESTED, available_memory() // 8)


def written(device: torch.device, size: int, pattern: int) -> list[torch.Tensor]:
    """Memory of about this size in which each word of 8 bytes has its own value, as int64."""
    words = torch.arange(_CHUNK // 8, dtype=torch.int64, device=device)
    count = max(1, size // _CHUNK)
    return [words ^ _of_chunk(number, pattern) for number in range(count)]


def _of_chunk(number: int, pattern: int) -> int:
    """The first word of a chunk."""
    return pattern ^ number * (_CHUNK // 8)


def errors_in(chunks: list[torch.Tensor], pattern: int) -> list[str]:
    """Where the memory of :func:`written` has other values."""
    words = torch.arange(chunks[0].numel(), dtype=torch.int64, device=chunks[0].device)
    found = []
    for number, chunk in enumerate(chunks):
        wrong = words.ne(chunk ^ _of_chunk(number, pattern))
        if count := int(wrong.sum()):
            place = number * _CHUNK + 8 * int(wrong.nonzero()[0])
            found.append(
                f"{count} words of memory changed, the first of them {place} bytes from the beginning"
            )
    return found
