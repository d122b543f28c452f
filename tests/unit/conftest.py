"""Two fork servers that start once per test run: one for scripts of tests, one for isolated workers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
from processes import with_fork_server


@pytest.fixture(autouse=True, scope="session")
def fork_server() -> Iterator[None]:
    """The fork server for scripts that tests run with `children.run_python`, unless FORK_SERVER=0."""
    with with_fork_server():
        yield


@pytest.fixture(autouse=True, scope="session")
def isolated_server_stays() -> Iterator[None]:
    """Keeps the server of isolated workers running between tests that need it, because its start takes
    seconds.
    """
    with pytest.MonkeyPatch.context() as patch:
        # All test modules are imported by now. Without this module, no test of the run uses isolated workers.
        if standby := sys.modules.get("torchft.process_group.isolated.standby"):
            patch.setattr(standby, "_LINGER", timedelta(hours=1))
        yield
