"""Tests that need a CUDA device, most of them one: `make test-gpu` runs them, and says what did not run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Iterator

import pytest
import torch
from processes import with_fork_server
from torch.distributed import TCPStore

from tests.gpu.report import Report

_HERE = Path(__file__).parent

# The process that children are forked from must not begin to use the driver, as a look for devices would.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Report(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.device)
        # PyTorch and NCCL warn about the host: no peer access, an old driver. That is no test's fault.
        item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def store() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(autouse=True)
def own_stream() -> Iterator[None]:
    """Nothing that a test has queued reaches the next one."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()


@pytest.fixture(scope="module")
def fork_server() -> Iterator[None]:
    """Processes of the tests that ask for it have PyTorch imported when they start: by themselves each takes 10 s."""
    with with_fork_server():
        yield
