"""A fork server for scripts of tests, which starts once per test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import with_fork_server


@pytest.fixture(autouse=True, scope="session")
def fork_server() -> Iterator[None]:
    """The fork server for scripts that tests run with `children.run_python`, unless FORK_SERVER=0."""
    with with_fork_server():
        yield
