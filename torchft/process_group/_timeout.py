"""Timeouts of single sends and receives: PyTorch's calls take none, but a transfer of state has its own."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import Iterator, Optional

_here = threading.local()


@contextmanager
def point_to_point_timeout(timeout: timedelta) -> Iterator[None]:
    """Sends and receives that this thread starts in the block have this timeout in place of their group's."""
    _here.timeout = timeout
    try:
        yield
    finally:
        _here.timeout = None


def given_timeout() -> Optional[timedelta]:
    """The timeout of what this thread starts, if it is not the group's."""
    return getattr(_here, "timeout", None)
