"""The fixture `late`: the test accelerator, for one test.

These tests run in a separate process (`pytest tests/late`, and as a part of `make test`), because a device is
registered for the whole process, and other tests need a host without a device. They require the newest
PyTorch. If they are deselected, one line reports that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import processes
import pytest
from forkserver import ForkServer

from tests.late import OLDEST_TORCH, load, torch_version
from torchft.checkpointing.client import transfer
from torchft.checkpointing.memory import staging
from torchft.checkpointing.native import staged_receive
from torchft.checkpointing.source import offer
from torchft.process_group._gloo.reaper import drain

if TYPE_CHECKING:
    from tests.late.observed import Observed

_HERE = Path(__file__).parent


def _left_out(config: pytest.Config) -> str | None:
    if torch_version() < OLDEST_TORCH:
        return f"need PyTorch {'.'.join(map(str, OLDEST_TORCH))}"
    paths = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    if not all(path == _HERE or _HERE in path.parents for path in paths):
        return "run by themselves: pytest tests/late"
    return None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path.name.startswith("test_") and _left_out(config) else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if why := _left_out(config):
        terminalreporter.write_line(f"left out: those of tests/late {why}")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes a process group's settings for NCCL at the end of the test."""
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "")
    monkeypatch.delenv("TORCH_NCCL_NONBLOCKING_TIMEOUT")


@pytest.fixture
def late() -> Iterator[ModuleType]:
    device = load()
    try:
        yield device
    finally:
        drain(10)  # groups of this test whose threads would use the device of the next one
        device.reset()


@pytest.fixture(scope="session")
def job_server() -> Iterator[None]:
    """Makes children of `processes.Job` fork from a process that has imported PyTorch, as in
    tests/process.
    """
    if os.environ.get("FORK_SERVER") == "0":
        yield
        return
    server = processes.fork_server = ForkServer(processes.child_environment(processes.HERE))
    try:
        yield
    finally:
        processes.fork_server = None
        server.close()


@pytest.fixture
def device(late: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Observed]]:
    """Records the copies that checkpointing makes."""
    from tests.late.observed import BLOCK, Observed

    Observed.made = []
    monkeypatch.setattr(Observed, "late", 0.002)
    for module in (staged_receive, offer, transfer, staging):
        if hasattr(module, "copies_for"):
            monkeypatch.setattr(module, "copies_for", lambda kind: Observed if kind == "late" else None)
    monkeypatch.setattr(staging, "BLOCK", BLOCK)
    yield Observed
    for each in Observed.made:
        each.close()
