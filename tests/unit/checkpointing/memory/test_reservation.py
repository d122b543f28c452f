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

from torchft.checkpointing.memory import host, reservation
from torchft.checkpointing.memory.reservation import NoRoom, reserve

_FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the host."""
    monkeypatch.setattr(reservation, "folder", tmp_path / "host")
    return tmp_path / "host"


@contextmanager
def rank(begin: Any, nbytes: int, share: int) -> Iterator[tuple[Any, Callable[[], bool]]]:
    """A process that reserves when `begin` is set, and keeps that while the block runs."""
    here, there = _FORK.Pipe()

    def run() -> None:
        begin.wait(60)
        try:
            kept = reserve(nbytes, lambda: 100, share)
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
            reserve(60, lambda: 100)
        assert refused.value.free == 40
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        reserve(60, lambda: 100)
    assert {path.name for path in folder.iterdir()} == {"lock"}


def test_a_release_and_the_end_of_the_object_end_it() -> None:
    first, second = reserve(30, lambda: 100), reserve(30, lambda: 100)
    with pytest.raises(NoRoom):
        reserve(50, lambda: 100)
    first.release()
    first.release()
    reserve(70, lambda: 100)
    del second
    reserve(100, lambda: 100)


def test_a_forked_child_neither_keeps_nor_ends_it() -> None:
    kept = reserve(60, lambda: 100)
    here, there = _FORK.Pipe()

    def run() -> None:
        kept.release()
        there.send(None)
        there.recv()

    child = _FORK.Process(target=run, daemon=True)
    child.start()
    assert here.poll(60)
    with pytest.raises(NoRoom):
        reserve(60, lambda: 100)
    kept.release()
    reserve(60, lambda: 100)
    child.kill()
    child.join(60)


def test_without_a_shared_folder_the_ranks_of_a_group_divide_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.touch()
    monkeypatch.setattr(host, "available_memory", lambda: 800)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    host.reserve(50, share=2)
    with pytest.raises(NoRoom):
        host.reserve(51, share=2)
    assert "memory cannot be reserved" in caplog.text


def test_a_stopped_process_holds_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation, "_LOCK_SEC", 0.01)
    with reservation._locked(), pytest.raises(TimeoutError, match="lock: timed out, not released within"):
        reserve(1, lambda: 100)
