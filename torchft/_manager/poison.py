"""Exceptions that end a rank. The lighthouse decides whether one is the fault of the data or the code, so
that it would end the job again and again; then the job stops, once, with an exit status of its own.

A rank reports an exception when Python is about to end the process by it (``sys.excepthook``), or when it
passes through ``Manager.shutdown``.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Optional

import torch
import torch.distributed as dist

from torchft._manager.settings import STOPPED_STATUS
from torchft._torchft import MemberFailure, refusal

if TYPE_CHECKING:
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.rank import RankState
    from torchft._manager.step.errors import Errors

# How long a rank that an exception ends waits for the answer of the lighthouse.
_ANSWER_SEC = 2.0
# Where torchft and torch.distributed are.
_OURS = (f"{Path(__file__).parents[1]}/", f"{Path(str(dist.__file__)).parent}/")
# Another cause than data or code: the next life of the group may well succeed.
_OUTSIDE = (OSError, MemoryError, dist.DistError, StopIteration, StopAsyncIteration)
_MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class JobStopped(SystemExit):
    """The job stops, because the same exception would end it again and again. Its code is 65. `reason`: which
    exception, in which groups and which step, and its traceback.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(STOPPED_STATUS)
        self.reason = reason


def digest(error: BaseException, step: int, unit: Optional[Sequence[int]] = None) -> Optional[dict[str, Any]]:
    """The identity of an exception, as the fields of the proto's Raised: type, place, step and unit. None for
    one that says nothing about data or code: an interrupt, an error of the operating system, of the network
    or of a process group, and what torchft itself raises when peers or servers fail.

    Args:
        unit: indices of the samples that the rank computes; None: they are not known.
    """
    while error.__cause__ is not None:  # a reader's error, for example, which torchft has wrapped
        error = error.__cause__
    if not isinstance(error, Exception):
        return None
    if isinstance(error, _OUTSIDE) and not isinstance(error, _MISSING):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    file = frames[-1].filename if frames else ""
    if isinstance(error, RuntimeError) and file.startswith(_OURS):
        return None
    place = f"{file}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return {
        "type": type(error).__name__,
        "place": place,
        "step": step,
        "unit": "" if unit is None else ", ".join(map(str, unit)),
        "device": isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error),
    }


class Poison:
    """The exceptions of one rank, and whether the job stops. `stopped`: why it does; empty: it does not."""

    def __init__(self, rank_state: RankState, errors: Errors, logger: _ManagerLogger) -> None:
        self._rank_state = rank_state
        self._errors = errors
        self._logger = logger
        self._reported = False
        self._answered = threading.Event()
        self.stopped = ""
        _install(self)

    def judged(self, answer: MemberFailure) -> None:
        """The answer of the lighthouse to an exception of this group."""
        self.stopped = self.stopped or answer.reason
        self._answered.set()

    def stop(self, notice: MemberFailure) -> None:
        """The job stops, because of exceptions of other groups."""
        if not self.stopped:
            self.stopped = notice.reason
            self._logger.warn(notice.reason)

    def check(self) -> None:
        """Raises JobStopped if the job stops."""
        if self.stopped:
            raise JobStopped(self.stopped)

    def passing(self) -> None:
        """Reports the exception that passes through the caller on the main thread, if there is one: after the
        Manager is shut down, nothing can be reported.
        """
        if threading.current_thread() is threading.main_thread():
            self.raised(sys.exc_info()[1])

    def raised(self, error: Optional[BaseException]) -> None:
        """An exception ends this rank, unless it is None: reports it, and waits for the answer."""
        if error is None or self._reported or self.stopped:
            return
        if refusal(error) == "poisoned":
            self.stopped = str(error)
        if self._rank_state.quorum_id < 0:
            return  # one before the first quorum concerns this group alone
        step = self._errors.step
        found = digest(error, self._rank_state.step, step.unit if step.undecided else None)
        skip = step.skip if step.undecided else ""
        if found is None:
            return
        self._reported = True
        text = "".join(traceback.format_exception(error))
        if self._logger.raised({**found, "text": text, "skip": skip}):
            self._answered.wait(_ANSWER_SEC)


_live: weakref.WeakSet[Poison] = weakref.WeakSet()
_previous: Optional[Callable[..., Any]] = None


def _install(poison: Poison) -> None:
    global _previous
    _live.add(poison)
    if _previous is None:
        _previous, sys.excepthook = sys.excepthook, _ended_by


def _ended_by(kind: type[BaseException], error: BaseException, trace: Optional[TracebackType], /) -> None:
    """Python's ``sys.excepthook``: reports the exception, and ends a job that stops with its own status."""
    ranks = list(_live)
    for rank in ranks:
        rank.raised(error)
    assert _previous is not None
    _previous(kind, error, trace)
    if any(rank.stopped for rank in ranks):
        print(
            f"torchft: the job stops, with status {STOPPED_STATUS}: this exception ends it each time",
            file=sys.stderr,
        )
        raise SystemExit(STOPPED_STATUS)
