"""Another process of the same user changes a running job."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchft.launch import control
from torchft.launch.control import Control


class FakeJob:
    def __init__(self) -> None:
        self.replicas = 2
        self.follow_again: Any = None

    def scale(self, replicas: int) -> None:
        if replicas > 4:
            raise ValueError(f"{replicas} replica groups are not allowed; allowed: 1 to 4")
        self.replicas = replicas


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJob]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(control, "_REQUEST_SEC", 30.0)
    job, end = FakeJob(), threading.Event()
    server = Control()

    def look() -> None:
        while not end.wait(0.01):
            server.look(job)  # type: ignore[arg-type]

    thread = threading.Thread(target=look)
    thread.start()
    yield job
    end.set()
    thread.join()
    server.close()
    assert control.running() == {}


def test_the_only_job_needs_no_pid(job: FakeJob) -> None:
    assert control.running().keys() == {os.getpid()}
    assert control.scale(4) == "4 replica groups"
    assert job.replicas == 4


def test_a_refusal_of_the_job_reaches_the_caller(job: FakeJob) -> None:
    with pytest.raises(ValueError, match="9 replica groups are not allowed; allowed: 1 to 4"):
        control.scale(9, os.getpid())
    with pytest.raises(ValueError, match="no job of yours runs as process 1;"):
        control.scale(3, 1)
    assert job.replicas == 2


def test_a_job_chooses_its_number_again_only_if_it_did_before(job: FakeJob) -> None:
    with pytest.raises(ValueError, match="'auto' is not allowed for a job without --scale auto"):
        control.scale("auto")
    begun: list[str] = []
    job.follow_again = lambda: begun.append("again")
    assert control.scale("auto") == "the number of replica groups follows the speed of the job"
    assert begun == ["again"] and job.replicas == 2


def test_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="no `torchft run` of yours runs on this machine"):
        control.scale(3)
    with pytest.raises(ValueError, match="no `torchft run` of yours runs on this machine"):
        control.scale(3, 1)


def test_a_runtime_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, sudo and containers keep the variable of a login whose folder does not exist for them."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = Control()
    assert control.running().keys() == {os.getpid()}
    server.close()


def test_a_job_that_ends_before_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    server = Control()
    with server._socket as job:
        job.setblocking(True)

        def close() -> None:
            connection, _ = job.accept()
            with connection:
                connection.recv(4096)

        thread = threading.Thread(target=close)
        thread.start()
        with pytest.raises(ValueError, match=f"the job of process {os.getpid()} ended before it answered"):
            control.scale(3)
        thread.join()
    server.close()


def test_a_folder_whose_path_is_longer_than_that_of_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux allows 107 bytes. TMPDIR of a scheduler's job is often longer."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    server = Control()
    job: Any = FakeJob()
    thread = threading.Thread(
        target=lambda: [server.look(job) for _ in iter(lambda: job.replicas, 4)], daemon=True
    )
    thread.start()
    assert control.scale(4) == "4 replica groups"
    thread.join()
    server.close()
    assert control.running() == {}


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "torchft").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="only this user can enter"):
        Control()
