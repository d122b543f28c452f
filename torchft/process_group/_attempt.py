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

    `start` or `result` starts the thread, so the attempt can be registered for an abort before that.

    Args:
        call: may wait for peers.
        discard: gets the result of `call` if nobody takes it after `abandon`.

    Attributes:
        error: why there is no result; None before the end of the call, and if it succeeded.
    """

    def __init__(self, call: Callable[[], T], discard: Callable[[T], None]) -> None:
        self._call = call
        self._discard = discard
        self._lock = threading.Lock()
        self._started = False
        self._ended = threading.Event()
        self._value: list[T] = []
        self.error: Optional[BaseException] = None
        self._device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def start(self) -> None:
        """Makes the call, once."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name="torchft_connect", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the call has ended, or was abandoned."""
        return self._ended.is_set()

    def result(self) -> T:
        """Makes the call unless that was done before, and waits for its end. To be called once.

        Raises:
            BaseException: the error of the call, or the one passed to `abandon`.
        """
        self.start()
        self._ended.wait()
        with self._lock:
            if self.error is not None:
                raise self.error
            return self._value.pop()

    def abandon(self, error: Exception) -> None:
        """Ends the wait with this error, and discards a result that nobody has taken."""
        with self._lock:
            if self._ended.is_set() and not self._value:
                return
            untaken, self._value = self._value, []
            self.error = error
            self._ended.set()
        if untaken:
            self._discard(untaken.pop())

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
                self._value, self.error = made, error
                self._ended.set()
        if late and made:
            self._discard(made.pop())
