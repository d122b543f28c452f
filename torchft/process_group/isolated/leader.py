"""Leader/follower: one of the threads that wait for a worker's answers reads the answers of all."""

from __future__ import annotations

import threading
from typing import Callable, Optional


def _held_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Leadership:
    """The leader reads answers; followers sleep until their operation has ended or nobody leads.

    This class decides and wakes; it neither reads nor waits. Every method is called with the channel's lock held. A
    thread that waits for an operation calls, until that has ended:

    - `join`. The leader reads, then calls `step_down`. A follower sleeps at its signal, a held lock that is released;
    - `leave`, if it stops sleeping without having been woken: at its deadline, or interrupted. Woken, it joins again.

    A thread that does not wait reads between `lead`, if that is True, and `step_down`.

    Invariants, whenever the lock is free:

    1. At most one thread leads.
    2. While there are followers, somebody leads, or a thread that was woken has not joined or left yet; or the channel
       is closed. So all answers are read, and no follower needs a timeout for that.
    3. A follower is woken because its operation has ended or because nobody leads, and for nothing else.
    4. When the last thread leaves, the reserve is woken.
    5. After `close` nobody begins to lead. Operations end without being read then, which wakes all followers.

    A thread that comes may take the lead before the follower that was woken for it, which joins as a follower again. So
    one that waits for many operations in turn reads its own answers, and does not wait for another thread to wake up.

    Args:
        wake_reserve: wakes the thread that leads only where no other thread waits; it uses `lead`.
        make_signal: what a follower sleeps at.

    Attributes:
        taken: whether somebody leads.
    """

    def __init__(
        self, wake_reserve: Callable[[], None], make_signal: Callable[[], threading.Lock] = _held_lock
    ) -> None:
        self._wake_reserve = wake_reserve
        self._make_signal = make_signal
        # The signals of followers, the first one first, and what each waits for. A garbage collection may call `close`
        # and `ended` on a thread that is in here.
        self._followers: dict[threading.Lock, object] = {}
        self._closed = False
        self.taken = False

    def join(self, operation: object) -> Optional[threading.Lock]:
        """None if the thread leads from now on, else its signal. The operation has not ended."""
        if self.lead():
            return None
        signal = self._make_signal()
        self._followers[signal] = operation
        return signal

    def lead(self) -> bool:
        """Whether the thread leads from now on."""
        if self.taken or self._closed:
            return False
        self.taken = True
        return True

    def step_down(self) -> None:
        """The leader reads no more."""
        self.taken = False
        self._pass_on()

    def leave(self, signal: threading.Lock) -> None:
        """A follower waits no more, and had not been woken when it stopped."""
        if self._followers.pop(signal, None) is None:
            # Woken since then, perhaps to lead.
            self._pass_on()

    def ended(self, operation: object) -> None:
        """Wakes the threads that wait for an operation."""
        for signal in list(self._followers):
            if self._followers.get(signal) is operation:
                self._wake(signal)

    def close(self) -> None:
        """Nobody begins to lead any more."""
        self._closed = True

    def _pass_on(self) -> None:
        if self.taken or self._closed:
            return
        if self._followers:
            self._wake(next(iter(self._followers)))
        else:
            self._wake_reserve()

    def _wake(self, signal: threading.Lock) -> None:
        if self._followers.pop(signal, None) is not None:
            signal.release()
