"""Tests that need CUDA devices, most of them one: `make test-gpu` runs them, and lists those that did not
run.
"""

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

# The process from which children are forked must not use the driver, not even to count devices.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# From NCCL 2.30 on, ranks may share a device. Their kernels take turns on it.
os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Report(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.device)
        # Warnings of PyTorch and NCCL about the host (no peer access, an old driver) must not fail a test.
        item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def store() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(autouse=True)
def own_stream() -> Iterator[None]:
    """Runs each test on a new stream, so that its queued work does not affect the next test."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()


@pytest.fixture(scope="module")
def fork_server() -> Iterator[None]:
    """Forks processes of the test from one that has imported PyTorch; otherwise each takes 10 s to start."""
    with with_fork_server():
        yield
