"""Leader/follower: one of the threads that wait for a worker's answers reads the answers for all."""

from __future__ import annotations

import threading
from typing import Callable, Optional


def _held_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Leadership:
    """The leader reads answers; followers sleep until their operation has ended or there is no leader.

    This class decides and wakes; it neither reads nor waits. Every method is called with the channel's lock held. A
    thread that waits for an operation calls, until that has ended:

    - `join`. The leader reads, then calls `step_down`. A follower sleeps until its signal, a held lock, is released;
    - `leave`, if it stops sleeping before it was woken: at its deadline, or interrupted. If woken, it joins again.

    A thread that only reads what has arrived calls `lead`, and if that is True reads and calls `step_down`.

    Invariants, whenever the lock is free:

    1. At most one thread leads.
    2. While there are followers, there is a leader, or a woken thread that has not joined or left yet; or the channel
       is closed. So all answers are read, and no follower needs a timeout for that.
    3. A follower is woken because its operation has ended or because there is no leader, and for nothing else.
    4. When the last thread leaves, the reserve is woken.
    5. After `close` no thread becomes the leader. `Channel.close` ends all operations, which wakes all followers.

    A new thread may take the lead before the follower that was woken to lead; that follower then joins as a follower
    again. So a thread that waits for many operations in turn reads its own answers, without waiting for a thread to
    wake up.

    Args:
        wake_reserve: wakes the thread that leads only if no other thread waits; it uses `lead`.
        make_signal: makes the lock at which a follower sleeps.

    Attributes:
        taken: whether there is a leader.
    """

    def __init__(
        self, wake_reserve: Callable[[], None], make_signal: Callable[[], threading.Lock] = _held_lock
    ) -> None:
        self._wake_reserve = wake_reserve
        self._make_signal = make_signal
        # The signals of followers, in the order in which they joined, and the operation of each. A garbage collection
        # may call `close` and `ended` in the middle of another method.
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
        """Tries to become the leader; True if the thread leads from now on."""
        if self.taken or self._closed:
            return False
        self.taken = True
        return True

    def step_down(self) -> None:
        """The leader stops reading."""
        self.taken = False
        self._pass_on()

    def leave(self, signal: threading.Lock) -> None:
        """A follower that was not woken stops waiting."""
        if self._followers.pop(signal, None) is None:
            # It was woken in the meantime, perhaps to lead, so another thread has to lead.
            self._pass_on()

    def ended(self, operation: object) -> None:
        """Wakes the threads that wait for an operation."""
        for signal in list(self._followers):
            if self._followers.get(signal) is operation:
                self._wake(signal)

    def close(self) -> None:
        """From now on no thread becomes the leader."""
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
