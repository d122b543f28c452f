"""Quorum rounds: the training thread starts one, continues, and waits for the result when it needs it.

To *follow* a quorum is to act on its result. It must be followed as soon as it arrives, and not only when the
training thread needs it, because other groups wait for this one: so the quorum thread follows it. While a
quorum stands there is nothing to wait for, and the training thread follows it itself: such steps switch no
threads.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Optional

from torchft._manager.settings import LATE_STATUS, RETURNS_ENV

if TYPE_CHECKING:
    from torchft._torchft import QuorumRequest, QuorumResult

Follow = Callable[["QuorumResult"], None]
Wait = Callable[[], "QuorumResult"]


class JobFinished(SystemExit):
    """The training was complete before this group came back, or the group is a standby: it has nothing to
    train. Uncaught, it ends the process with status 0, so that no launcher starts it again; with 66 for one
    that tells these two apart (TORCHFT_RETURNS).

    Args:
        reason: names the step of the end.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(LATE_STATUS if os.environ.get(RETURNS_ENV) else 0)
        self.reason = reason


class Round:
    """One quorum round of this rank, which ends when its result has been followed. `follow`: acts on it."""

    def __init__(self, follow: Follow) -> None:
        self._follow = follow
        self._answered = threading.Event()  # set when the answer has arrived, or the round ended without one
        self._ended = threading.Event()
        self._answer: Optional[QuorumResult] = None
        self._error: Optional[BaseException] = None

    def end(self, answer: Optional[QuorumResult], error: Optional[BaseException] = None) -> None:
        """Follows the answer. `error`: what the round failed with, if there is no answer."""
        self._answer, self._error = answer, error
        self._answered.set()
        try:
            if answer is not None:
                self._follow(answer)
        except BaseException as e:
            self._error = e
        self._ended.set()

    def wait(self) -> None:
        """Returns when the round has ended, with or without an error."""
        self._ended.wait()

    def answer(self) -> QuorumResult:
        """The result of the quorum, perhaps not yet followed. BaseException: what the round failed with."""
        self._answered.wait()
        if self._answer is None:
            assert self._error is not None
            raise self._error
        return self._answer

    def result(self) -> None:
        """Returns when the result has been followed. BaseException: what that, or the round, failed with."""
        self.wait()
        if self._error is not None:
            raise self._error


class LateRound(Round):
    """A round that begins when its result is first needed: other groups do not wait for what this one does
    before. `prepare`: called before `begin`.
    """

    def __init__(self, begin: Callable[[], Round], prepare: Callable[[], None]) -> None:
        self._begin = begin
        self._prepare = prepare
        self._lock = threading.Lock()
        self._begun: Optional[Round] = None

    def wait(self) -> None:
        self._needed().wait()

    def answer(self) -> QuorumResult:
        return self._needed().answer()

    def result(self) -> None:
        self._needed().result()

    def _needed(self) -> Round:
        with self._lock:
            if self._begun is None:
                self._prepare()
                self._begun = self._begin()
            return self._begun


class Rounds:
    """Begins the rounds of one rank, one after the other, and takes and follows their results on a thread.

    The thread starts with the first round. It is a daemon, because Python joins other threads before it
    exits: after Ctrl-C the process would wait until the quorum's timeout, while its peers take it for alive.
    It does not keep a round alive, which refers to the Manager.

    Args:
        ask: sends a request, with the limit of the whole wait; returns what waits for the result.
    """

    def __init__(self, ask: Callable[[QuorumRequest, timedelta], Wait]) -> None:
        self._ask = ask
        self._asked: queue.SimpleQueue[Optional[tuple[Wait, weakref.ref[Round]]]] = queue.SimpleQueue()
        self._thread: Optional[threading.Thread] = None
        self._lock = threading.Lock()  # a round that has begun is asked before the end of the thread
        self._over = False

    def begin(self, follow: Follow, request: QuorumRequest, timeout: timedelta) -> Round:
        """Begins a round. `follow` is called with its result, on the thread. RuntimeError: after the end."""
        begun = Round(follow)
        with self._lock:
            if self._over:
                raise RuntimeError("the Manager is shut down")
            self._asked.put((self._ask(request, timeout), weakref.ref(begun)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="torchft_quorum", daemon=True)
                self._thread.start()
        return begun

    def shutdown(self, wait: bool) -> None:
        """Ends the thread, after the client's shutdown. `wait`: also waits for its end."""
        with self._lock:
            self._over = True
            self._asked.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            wait, begun = asked
            answer: Optional[QuorumResult] = None
            error: Optional[BaseException] = None
            try:
                answer = wait()
            except BaseException as e:
                error = e
            if (known := begun()) is not None:
                known.end(answer, error)
            del asked, wait, known, answer, error  # keep nothing of a step alive until the next one
