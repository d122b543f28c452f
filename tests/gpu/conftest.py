"""Tests that need a CUDA device: one is enough. `make test-gpu` runs them; without a device they are deselected."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator

import pytest
import torch
from torch.distributed import TCPStore

_HERE = Path(__file__).parent


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
