"""Worker processes of a data loader: which signals end them, and what they leave alone.

They are daemon processes, like PyTorch's: at its end Python waits without a limit for other child processes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, ClassVar, Optional

import pytest

from torchft.data.workers import WorkerInit


def echo(pipe: Any) -> None:
    WorkerInit([signal.SIGTERM])(0)
    while True:
        pipe.send(pipe.recv())


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_only_its_loader_ends_such_a_worker(method: str) -> None:
    """A loader ends its workers by SIGTERM and waits for their end; otherwise its process could not exit."""
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe()
    worker = context.Process(target=echo, args=(there,), daemon=True)
    worker.start()
    try:
        for message in ("ready", "alive"):
            here.send(message)
            assert here.recv() == message
            subprocess.run(["/bin/sh", "-c", f"kill -TERM {worker.pid}"], check=True)
            # The kernel drops a signal while the same one is pending.
            wait_until_taken(worker.pid, signal.SIGTERM)
        worker.terminate()
        worker.join(60)
        assert worker.exitcode == 0
    finally:
        worker.kill()
        worker.join(60)


def wait_until_taken(pid: Optional[int], number: int) -> None:
    """Waits until a thread of a process has taken a signal to the whole process."""
    deadline = time.monotonic() + 60
    while True:
        found = re.search(r"^ShdPnd:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        assert found is not None
        if not int(found[1], 16) >> (number - 1) & 1:
            return
        assert time.monotonic() < deadline
        time.sleep(0.001)


class OfTheRank:
    """An object that only a garbage collection frees, like a process group in a cycle with the frames of its
    error.
    """

    ended: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        OfTheRank.ended.append(os.getpid())


def collect(pipe: Any) -> None:
    WorkerInit(())(0)
    gc.collect()
    pipe.send(OfTheRank.ended)


def test_a_worker_collects_nothing_of_its_rank() -> None:
    """The threads of a process group do not exist in the worker, where its destruction may be a segmentation
    fault.
    """
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    gc.disable()
    try:
        OfTheRank()
        worker = fork.Process(target=collect, args=(there,), daemon=True)
        worker.start()
        assert here.recv() == []
        worker.join(60)
    finally:
        gc.enable()
    gc.collect()
    assert OfTheRank.ended == [os.getpid()]
