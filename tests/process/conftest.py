"""Makes the children of these tests fork from a process that has imported PyTorch, unless FORK_SERVER=0."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import with_fork_server


@pytest.fixture(autouse=True, scope="session")
def fork_server() -> Iterator[None]:
    with with_fork_server():
        yield
