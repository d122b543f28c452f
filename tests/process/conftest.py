"""Children of these tests are forked from one process that has PyTorch imported, unless FORK_SERVER=0."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import processes
import pytest
from forkserver import ForkServer


@pytest.fixture(autouse=True, scope="session")
def fork_server() -> Iterator[None]:
    if os.environ.get("FORK_SERVER") == "0" or sys.platform != "linux":
        yield
        return
    server = processes.fork_server = ForkServer(processes.child_environment(processes.HERE))
    yield
    processes.fork_server = None
    server.close()
