"""A timeout for individual sends and receives.

PyTorch's point-to-point calls take no timeout, but a transfer of state needs a timeout other than its
group's.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import Iterator, Optional

_local = threading.local()


@contextmanager
def point_to_point_timeout(timeout: timedelta) -> Iterator[None]:
    """Sends and receives that this thread starts in the block use this timeout instead of their group's."""
    _local.timeout = timeout
    try:
        yield
    finally:
        _local.timeout = None


def given_timeout() -> Optional[timedelta]:
    """The timeout that `point_to_point_timeout` sets for this thread; None outside of it."""
    return getattr(_local, "timeout", None)
