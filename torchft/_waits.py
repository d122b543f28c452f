"""Waits that say what they wait for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def announced(after_sec: float, say: Callable[..., object], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Calls ``say`` on another thread, once, if the `with` block takes longer than this."""
    timer = threading.Timer(after_sec, say, args, kwargs)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
