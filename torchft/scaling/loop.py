"""Carries out the policy: asks a lighthouse how fast the job is, and a scaler for another number."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from torchft._lighthouse_http import HttpLighthouse, Unanswered
from torchft.scaling.places import Scaler, ScalerError
from torchft.scaling.policy import Policy, Seen, allowed_numbers

_LOOK_SEC = 0.5
_CURRENT_SEC = 10.0  # between two questions to a scaler, which may run a command


class Follower:
    """Gives the policy what a lighthouse and a scaler show of a job, and carries out its decisions.

    Args:
        scaler: reads and sets the number.
        policy: chooses it.
        tell: is called with each decision, as a line.
        current_sec: seconds between two questions to the scaler.
    """

    def __init__(
        self,
        scaler: Scaler,
        policy: Policy,
        tell: Callable[[str], None],
        current_sec: float = _CURRENT_SEC,
    ) -> None:
        self._scaler = scaler
        self._policy = policy
        self._tell = tell
        self._current_sec = current_sec
        self._ask_at = -math.inf
        self._wanted = 0
        self._due: int | None = None  # a decision that is to be carried out
        self._problem = ""

    def look(self, now: float, status: Mapping[str, Any]) -> bool:
        """Looks at the job once. Returns False if it has ended.

        Args:
            now: seconds of the monotonic clock.
            status: ``/status`` of the lighthouse; without ``quorum_id``: it did not answer.
        """
        try:
            return self._look(now, status)
        except ScalerError as e:
            if str(e) != self._problem:
                self._problem = str(e)
                self._tell(f"the number of groups cannot be changed at present: {e}")
            self._ask_at = now + self._current_sec
            return True

    def _look(self, now: float, status: Mapping[str, Any]) -> bool:
        if now >= self._ask_at:
            self._ask(now)
        if not self._wanted:
            return False
        if not status.get("quorum_id") or self._due is not None:
            return True
        decision = self._policy.look(now, seen(status, self._wanted))
        if decision is not None:
            self._tell(decision.reason)
            if decision.groups != self._wanted:
                self._due = decision.groups
                self._ask(now)
        return True

    def _ask(self, now: float) -> None:
        """Asks the scaler for its number, and sets another one if that is due."""
        current, due = self._scaler.current(), self._due
        # Otherwise it was set by hand since, which the policy sees next.
        if due is not None and current == self._wanted:
            self._scaler.set(due)
            current = due
        self._due, self._wanted, self._problem = None, current, ""
        self._ask_at = now + self._current_sec


def seen(status: Mapping[str, Any], wanted: int) -> Seen:
    """What the status of a lighthouse shows of a job with a quorum."""
    trains = [m["in_quorum"] and m["healthy"] and not m.get("healing") for m in status["members"]]
    return Seen(wanted, sum(trains), status["quorum_id"], status["max_step"])


def follow(
    scaler: Scaler,
    least: int,
    most: int,
    sizes: str = "all",
    *,
    lighthouse: str | None = None,
    job: str | None = None,
) -> None:
    """Gives a job the number of replica groups that is best for it, until it has ended.

    The global batch has to be the same for each number of groups, as with ``torchft.Job``.

    Args:
        scaler: reads and sets the number.
        least: smallest number.
        most: largest number.
        sizes: which of the numbers between: ``"all"``, ``"powers_of_two"``, or a list such as ``"2/4/8"``.
        lighthouse: its address, or those of a cluster, separated by commas; default: TORCHFT_LIGHTHOUSE, else
            this machine.
        job: name of the job; default: TORCHFT_JOB_ID, else the lighthouse's unnamed job.

    Raises:
        ValueError: the range or ``sizes`` is not allowed.
        Unanswered: the address of the lighthouse is malformed.
        ScalerError: the scaler does not know the number at the start, or there is no group.
    """
    policy = Policy(allowed_numbers(least, most, sizes))
    http = HttpLighthouse(lighthouse, job)
    if scaler.current() == 0:
        raise ScalerError(
            f"{type(scaler).__name__}: no group of the job is found: start it first, and check its name"
        )

    def tell(reason: str) -> None:
        print(reason, flush=True)
        record(http, reason)

    follower = Follower(scaler, policy, tell)
    while follower.look(time.monotonic(), _status(http)):
        time.sleep(_LOOK_SEC)


def record(lighthouse: HttpLighthouse, reason: str) -> None:
    """Makes a decision an event of the job."""
    try:
        lighthouse.ask("scaled", reason=reason)
    except Unanswered as e:
        print(f"torchft: the change of the number of groups is no event of the job: {e}", file=sys.stderr)


def _status(lighthouse: HttpLighthouse) -> Mapping[str, Any]:
    try:
        return lighthouse.get("/status")
    except Unanswered:
        return {}
