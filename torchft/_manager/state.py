"""The user's state: what a heal carries besides the step, and the lock that keeps it still while it is read."""

from __future__ import annotations

from typing import Any, Callable, TypeVar

from torchft.checkpointing._rwlock import RWLock

T = TypeVar("T")

DEFAULT_KEY = "default"


class UserState:
    """The functions a user registered to read and to load state, by key.

    Attributes:
        load_fns: key to the function that loads that part.
        read_fns: key to the function that returns that part.
        lock: held for reading while state is collected; ``disallow_read`` holds it for writing.
    """

    def __init__(self, timeout_sec: float) -> None:
        self.load_fns: dict[str, Callable[[Any], None]] = {}
        self.read_fns: dict[str, Callable[[], Any]] = {}
        self.lock = RWLock(timeout=timeout_sec)
        self._readable = True

    def register(self, key: str, load: Callable[[T], None], read: Callable[[], T]) -> None:
        """Adds a part of the state.

        Raises:
            ValueError: the key is taken.
        """
        if key in self.load_fns:
            raise ValueError(f"state dict key {key!r} is registered already; keys: {sorted(self.load_fns)}")
        self.load_fns[key] = load
        self.read_fns[key] = read

    def read(self) -> dict[str, Any]:
        """Collects all parts; waits while reading is disallowed.

        Raises:
            RuntimeError: nothing is registered.
            TimeoutError: reading stayed disallowed for the whole timeout.
        """
        if not self.read_fns:
            raise RuntimeError("there is no state to heal another group with: call set_state_dict_fns first")
        with self.lock.r_lock():
            return {key: read() for key, read in self.read_fns.items()}

    def load(self, parts: dict[str, Any]) -> None:
        """Loads all parts.

        Raises:
            RuntimeError: nothing is registered, or the source lacks a part that this group has.
            Exception: whatever a registered function raises.
        """
        if not self.load_fns:
            raise RuntimeError("there is nothing to load a peer's state with: call set_state_dict_fns first")
        missing = sorted(self.load_fns.keys() - parts.keys())
        if missing:
            raise RuntimeError(f"the source's state lacks {missing}; it has {sorted(parts)}")
        for key, load in self.load_fns.items():
            load(parts[key])

    def allow_read(self) -> None:
        if not self._readable:
            self._readable = True
            self.lock.w_release()

    def disallow_read(self) -> None:
        if self._readable:
            self.lock.w_acquire()
            self._readable = False
