"""Ranks of a host reserve memory before they allocate it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from torchft.checkpointing.memory import reservation
from torchft.checkpointing.memory.reservation import NoRoom, available_memory, reserve

_FORK = multiprocessing.get_context("fork")
GB = 1 << 30


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the host."""
    monkeypatch.setattr(reservation, "folder", tmp_path / "host")
    monkeypatch.setattr(reservation, "available_memory", lambda: 100)
    return tmp_path / "host"


@contextmanager
def rank(begin: Any, nbytes: int, share: int) -> Iterator[tuple[Any, Callable[[], bool]]]:
    """A process that reserves when `begin` is set, and keeps that while the block runs."""
    here, there = _FORK.Pipe()

    def run() -> None:
        begin.wait(60)
        try:
            kept = reserve(nbytes, share)
        except NoRoom:
            kept = None
        there.send(kept is not None)
        there.recv()

    process = _FORK.Process(target=run, daemon=True)
    process.start()

    def admitted() -> bool:
        assert here.poll(60)
        return here.recv()

    try:
        yield process, admitted
    finally:
        process.kill()
        process.join(60)


@pytest.mark.parametrize(("nbytes", "share", "expected"), [(40, 2, 1), (40, 1, 2), (20, 2, 4), (51, 2, 0)])
def test_processes_that_check_at_the_same_moment(nbytes: int, share: int, expected: int) -> None:
    """Without reservations each of the eight would see 100 free bytes."""
    begin = _FORK.Event()
    with ExitStack() as stack:
        ranks = [stack.enter_context(rank(begin, nbytes, share)) for _ in range(8)]
        begin.set()
        assert sum(admitted() for _, admitted in ranks) == expected


def test_the_reservation_of_a_killed_process_ends(folder: Path) -> None:
    begin = _FORK.Event()
    begin.set()
    with rank(begin, 60, 1) as (process, admitted):
        assert admitted()
        with pytest.raises(NoRoom) as refused:
            reserve(60)
        assert refused.value.free == 40
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        reserve(60)
    assert {path.name for path in folder.iterdir()} == {"lock"}


def test_a_release_and_the_end_of_the_object_end_it() -> None:
    first, second = reserve(30), reserve(30)
    with pytest.raises(NoRoom):
        reserve(50)
    first.release()
    first.release()
    reserve(70)
    del second
    reserve(100)


def test_a_forked_child_neither_keeps_nor_ends_it() -> None:
    kept = reserve(60)
    here, there = _FORK.Pipe()

    def run() -> None:
        kept.release()
        there.send(None)
        there.recv()

    child = _FORK.Process(target=run, daemon=True)
    child.start()
    assert here.poll(60)
    with pytest.raises(NoRoom):
        reserve(60)
    kept.release()
    reserve(60)
    child.kill()
    child.join(60)


def test_without_a_shared_folder_the_ranks_of_a_group_divide_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.touch()
    monkeypatch.setattr(reservation, "available_memory", lambda: 800)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    reserve(50, share=2)
    with pytest.raises(NoRoom):
        reserve(51, share=2)
    assert "memory cannot be reserved" in caplog.text


def test_a_stopped_process_holds_the_lock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reservation, "_LOCK_SEC", 0.01)
    with reservation._locked():
        reserve(1)
    assert "lock: timed out, not released within" in caplog.text


# The free memory


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize(
    ("v2", "v1", "want"),
    [
        ({}, {}, 8 * GB),
        ({"memory__max": "max\n", "memory__current": "1\n"}, {}, 8 * GB),
        (
            {"memory__max": str(4 * GB), "memory__current": str(3 * GB), "memory__stat": "anon 5\n"},
            {},
            1 * GB,
        ),
        (
            {
                "memory__max": str(4 * GB),
                "memory__current": str(3 * GB),
                "memory__stat": f"inactive_file {2 * GB}\n",
            },
            {},
            3 * GB,
        ),
        ({"memory__max": str(4 * GB), "memory__current": str(5 * GB), "memory__stat": ""}, {}, 0),
        ({"memory__max": str(64 * GB), "memory__current": "0", "memory__stat": ""}, {}, 8 * GB),
        ({"memory__max": "junk", "memory__current": "0", "memory__stat": ""}, {}, 8 * GB),
        (
            {},
            {
                "memory__limit_in_bytes": str(2 * GB),
                "memory__usage_in_bytes": str(GB),
                "memory__stat": "cache 1\n",
            },
            1 * GB,
        ),
    ],
)
def test_the_smallest_limit_counts(tmp_path: Path, v2: dict[str, str], v1: dict[str, str], want: int) -> None:
    write(tmp_path / "proc", meminfo=f"MemTotal: 9 kB\nMemAvailable: {8 * GB // 1024} kB\n")
    write(tmp_path / "cgroup", **v2)
    write(tmp_path / "cgroup" / "memory", **v1)
    assert available_memory(tmp_path / "proc", tmp_path / "cgroup") == want


def test_this_machine_has_available_memory() -> None:
    free = available_memory()
    assert free is not None and free > 1 << 20
