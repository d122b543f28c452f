"""The timeout of a send or a receive: PyTorch's have no options, and a transfer has a limit of its own."""

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
