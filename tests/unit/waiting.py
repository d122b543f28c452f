"""Waits for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Returns once the condition is true; an AssertionError after this time, which the policy takes for a
    timeout.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{seconds:g} s passed before the condition was true"
        time.sleep(0.001)
