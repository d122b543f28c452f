"""A store for the tests to meet at."""

from __future__ import annotations

import os

import pytest
from torch.distributed import TCPStore

# PyTorch's TCPStore asks the name server for the name of every peer. One that loses a question costs 5 s,
# which is no test's fault.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(scope="session")
def store() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
