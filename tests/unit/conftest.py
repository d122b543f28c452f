"""Processes that start once per test run: scripts of tests are forked from one, isolated workers from the other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
from processes import with_fork_server


@pytest.fixture(autouse=True, scope="session")
def fork_server() -> Iterator[None]:
    """Scripts that tests run with `children.run_python` are forked from it, unless FORK_SERVER=0."""
    with with_fork_server():
        yield


@pytest.fixture(autouse=True, scope="session")
def isolated_server_stays() -> Iterator[None]:
    """Keeps the server of isolated workers running, because it imports PyTorch, even if no test
    needs it for a while.
    """
    with pytest.MonkeyPatch.context() as patch:
        # otherwise no test of this run has imported it
        if standby := sys.modules.get("torchft.process_group.isolated.standby"):
            patch.setattr(standby, "_LINGER", timedelta(hours=1))
        yield
