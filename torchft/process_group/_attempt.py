"""A connection attempt that an abort can end.

PyTorch's stores and Gloo wait in C++ for missing peers until a timeout, and offer no way to end that wait. A peer that
fails between the quorum and the connection would delay the others until that timeout.
"""

from __future__ import annotations

import threading
from typing import Callable, Generic, Optional, TypeVar

import torch

T = TypeVar("T")


class Attempt(Generic[T]):
    """A call on a separate thread; after `abandon`, its result is discarded.

    `result` starts the thread, so the attempt can be registered for an abort before that.

    Args:
        call: may wait for peers.
        discard: gets the result of `call` if that returns after `abandon`.
    """

    def __init__(self, call: Callable[[], T], discard: Callable[[T], None]) -> None:
        self._call = call
        self._discard = discard
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._value: list[T] = []
        self._error: Optional[BaseException] = None
        self._device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def result(self) -> T:
        """Makes the call, once, and waits for its end.

        Raises:
            BaseException: the error of the call, or the one passed to `abandon`.
        """
        threading.Thread(target=self._run, name="torchft_connect", daemon=True).start()
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._value.pop()

    def abandon(self, error: Exception) -> None:
        """Ends the wait with this error, unless the call has ended."""
        with self._lock:
            if not self._ended.is_set():
                self._error = error
                self._ended.set()

    def _run(self) -> None:
        error: Optional[BaseException] = None
        made: list[T] = []
        try:
            if self._device is not None:
                torch.accelerator.set_device_index(self._device)
            made.append(self._call())
        except BaseException as e:
            error = e
        with self._lock:
            late = self._ended.is_set()
            if not late:
                self._value, self._error = made, error
                self._ended.set()
        if late and made:
            self._discard(made.pop())
