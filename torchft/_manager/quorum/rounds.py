"""Quorum rounds: the training thread starts one, continues, and waits for the result when it needs it.

To *follow* a quorum is to act on its result. A result that brings a change (new peers, a heal) must be
followed as soon as it arrives, and not only when the training thread needs it, because other groups wait for
this one. So a quorum thread follows changes. A result without a change is followed by the first thread that
asks for it, usually the training thread: most steps switch no threads.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Optional, Protocol

from torchft._manager.settings import LATE_STATUS, RETURNS_ENV
from torchft._torchft import refusal

if TYPE_CHECKING:
    from torchft._torchft import ManagerClient, QuorumRequest, QuorumResult

Follow = Callable[["QuorumResult"], None]

_logger = logging.getLogger("torchft.manager")

# The timeout of one call that waits for a change; the call is repeated. Its length does not matter.
_LONGEST_WAIT = timedelta(hours=1)


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
    """One quorum round of this rank, which ends when its result has been followed. `asks`: whether the core
    asks for a quorum, in which groups may heal: the training thread then waits for the answer when the step
    begins, and reads the state that other groups need.
    """

    asks = False

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: Optional[BaseException] = None
        self._answered = threading.Event()  # set when the answer has arrived, or the round ended without one
        self._answer: Optional[QuorumResult] = None

    def end(self, error: Optional[BaseException] = None) -> None:
        """Ends the round, with an error or without; only the first call counts."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()
            self._answered.set()

    def ended(self) -> bool:
        """Whether the round has ended."""
        return self._ended.is_set()

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

    def _set_answer(self, answer: QuorumResult) -> QuorumResult:
        self._answer = answer
        self._answered.set()
        return answer

    def result(self) -> None:
        """Returns when the result has been followed. BaseException: what that, or the round, failed with."""
        self.wait()
        if self._error is not None:
            raise self._error


class LateRound(Round):
    """A round that begins when its result is first needed: other groups do not wait for what this one does
    before.

    Args:
        begin: begins it.
        prepare: called before that.
    """

    def __init__(self, begin: Callable[[], Round], prepare: Callable[[], None]) -> None:
        super().__init__()
        self._begin = begin
        self._prepare = prepare
        self._lock = threading.Lock()
        self._begun: Optional[Round] = None

    def ended(self) -> bool:
        return self._begun is not None and self._begun.ended()

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


class Rounds(Protocol):
    """Begins the rounds of one rank, one after the other."""

    def standing(self, request: QuorumRequest) -> Optional[QuorumResult]:
        """The result of a quorum that stands: the last one, without a request. None: :meth:`begin` next."""
        ...

    def begin(self, follow: Follow, request: QuorumRequest, timeout: timedelta) -> Round:
        """Begins a round.

        Args:
            follow: acts on the result; called once, on any thread.
            request: the request of this rank.
            timeout: of the whole wait; a standby asks again and again.

        The result is JobFinished if this group has nothing to train, and SystemExit if it is a standby that
        is to leave.
        """
        ...

    def shutdown(self, wait: bool) -> None:
        """Ends the background thread, after the client's shutdown. `wait`: also waits for its end."""
        ...


class _Thread:
    """A thread that starts when it is first needed. It is a daemon, because Python joins other threads before
    it exits: after Ctrl-C the process would wait until the quorum's timeout, while its peers take it for
    alive.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._thread: Optional[threading.Thread] = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchft_quorum", daemon=True)
            self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()


class _NativeRound(Round):
    """A round in the native core, which asks the other groups.

    Args:
        take: waits for the result. If only the step differs from the last result, it returns that very
            object.
        follow: acts on a result.
        last: the last result.
    """

    asks = True

    def __init__(
        self, take: Callable[[], QuorumResult], follow: Follow, last: Optional[QuorumResult]
    ) -> None:
        super().__init__()
        self._take = take
        self._follow = follow
        self._last = last
        self._lock = threading.Lock()
        self._result: Optional[QuorumResult] = None

    def wait(self) -> None:
        if not self._ended.is_set():
            self._get()
            super().wait()

    def answer(self) -> QuorumResult:
        if not self._ended.is_set():
            self._get()
        return super().answer()

    def follow_change(self) -> None:
        """Waits for a result that brings a change, and follows it; called on the quorum thread."""
        self._get()
        if not self._ended.is_set() and self._result is not None:
            self._try(self._follow, self._result)

    def _get(self) -> None:
        with self._lock:
            if self._result is not None or self._ended.is_set():
                return
            try:
                self._result = self._set_answer(self._take())
            except BaseException as e:
                self.end(e)
                if isinstance(e, KeyboardInterrupt):
                    raise
                return
            if self._result is self._last:
                self._try(self._follow, self._result)
                if isinstance(self._error, KeyboardInterrupt):  # `wait` does not raise the round's error
                    raise self._error

    def _try(self, follow: Follow, result: QuorumResult) -> None:
        try:
            follow(result)
        except BaseException as e:
            self.end(e)
        else:
            self.end()


class StandingRound(Round):
    """The round of a quorum that stands. It ends when it is made, without events: its result is the last one.

    Args:
        result: the last result, with the number of the step.
        follow: acts on the result.
    """

    def __init__(self, result: QuorumResult, follow: Follow) -> None:
        self._result = result
        self._error = None
        try:
            follow(result)
        except Exception as e:
            self._error = e

    def ended(self) -> bool:
        return True

    def wait(self) -> None: ...

    def answer(self) -> QuorumResult:
        return self._result


class NativeRounds:
    """Rounds that run in the native core, which knows which of them bring a change."""

    def __init__(self, client: ManagerClient) -> None:
        self._client = client
        self._last: Optional[QuorumResult] = None
        self._lock = threading.Lock()
        # The last round. The quorum thread does not keep it alive, because it refers to the Manager.
        self._round: Callable[[], Optional[_NativeRound]] = lambda: None
        self._closed: Optional[Exception] = None
        self._thread = _Thread(self._follow_changes)

    def standing(self, request: QuorumRequest) -> Optional[QuorumResult]:
        last = self._last
        if not self._client._stands_for(request, last) or last is None:
            return None
        if self._closed is not None:
            raise self._closed
        last.max_step = request.step
        return last

    def begin(self, follow: Follow, request: QuorumRequest, timeout: timedelta) -> Round:
        self._thread.start()
        last, self._last = self._last, None

        def take() -> QuorumResult:
            nonlocal op
            while True:
                try:
                    self._last = result = self._client._end_round(op, last)
                    return result
                except (TimeoutError, RuntimeError) as e:
                    why = refusal(e)
                    if why == "ended":
                        _logger.warning(f"this group trains nothing: {e}")  # a status of 0 says nothing
                        raise JobFinished(str(e)) from None
                    if why == "unneeded":
                        _logger.info("the script ends: %s", e)
                        # not StopIteration or alike: what follows the loop is for groups that have trained
                        raise SystemExit(0) from None
                    if why != "held":
                        raise
                op = self._client._begin_round(request, timeout, last)

        with self._lock:
            if self._closed is not None:
                raise self._closed
            op = self._client._begin_round(request, timeout, last)
            begun = _NativeRound(take, follow, last)
            self._round = weakref.ref(begun)
            return begun

    def shutdown(self, wait: bool) -> None:
        if wait:
            self._thread.join()

    def _follow_changes(self) -> None:
        while True:
            try:
                changed = self._client._wait_change(_LONGEST_WAIT)
            except Exception as e:  # the client is shut down
                with self._lock:
                    self._closed = e
                    begun = self._round()
                    if begun is not None:
                        begun.end(e)
                return
            if changed:
                with self._lock:
                    begun = self._round()
                if begun is not None:
                    begun.follow_change()
                del begun  # keep nothing of a step alive until the next change


class ThreadRounds:
    """Rounds that run on a thread. `ask`: waits for a quorum; it has the upstream arguments."""

    def __init__(self, ask: Callable[..., QuorumResult]) -> None:
        self._ask = ask
        self._begun: queue.SimpleQueue[Optional[tuple[Round, Callable[[], None]]]] = queue.SimpleQueue()
        self._thread = _Thread(self._run)

    def standing(self, request: QuorumRequest) -> None:
        return None

    def begin(self, follow: Follow, request: QuorumRequest, timeout: timedelta) -> Round:
        begun = Round()

        def call() -> None:
            follow(begun._set_answer(self._ask(timeout=timeout, **request.as_upstream())))

        self._begun.put((begun, call))
        self._thread.start()
        return begun

    def shutdown(self, wait: bool) -> None:
        self._begun.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while (item := self._begun.get()) is not None:
            begun, call = item
            try:
                call()
            except BaseException as e:
                begun.end(e)
            else:
                begun.end()
            del item, begun, call  # keep nothing of a step alive until the next one
