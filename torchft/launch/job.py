"""A job on this machine: keeps its replica groups running until all of them have finished."""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable
from urllib.parse import urlsplit

from torchft._lighthouse_http import HttpLighthouse, Unanswered
from torchft._manager.settings import BAD_NODE_STATUS, LATE_STATUS, RETURNS_ENV, STOPPED_STATUS
from torchft._manager.signals import LEAVE_ON_ENV
from torchft._security import RUN_ENV
from torchft.addresses import node_name
from torchft.launch.group import ReplicaGroup
from torchft.launch.lighthouse import LaunchError, free_port
from torchft.launch.output import error_of, exit_code
from torchft.launch.restarts import FRUITLESS_LIVES, of_device, restart_delay
from torchft.launch.step_rate import StepRate


class JobStops(LaunchError):
    """The same exception has ended two groups, or a group twice: its cause is in the data or the code."""

    status = STOPPED_STATUS


class HostFails(LaunchError):
    """This host should not be used: its groups cannot start, or its check found it bad."""

    status = BAD_NODE_STATUS


class ScriptFailed(LaunchError):
    """The script of a group has failed behind its loop, and none of its lives ran to its end.

    Args:
        groups: those groups.
    """

    def __init__(self, groups: Sequence[GroupState]) -> None:
        super().__init__("; ".join(group.failed for group in groups))
        self.status = max(1, *(group.code for group in groups))


_TICK_SEC = 0.1
_LOOK_SEC = 0.01  # between two looks whether a group has ended: the others wait for its start
_ANSWER_SEC = 1.0
# The timeout of a drain request is longer: a group that does not receive it gets SIGTERM, even in the middle
# of a step.
_REQUEST_SEC = 4.0
_ASK_EVERY_SEC = 0.5
# A group ends at the latest TORCHFT_GRACE_S after SIGTERM. It is killed if it still runs this many seconds
# later.
_AFTER_GRACE_SEC = 2.0
# How long a drained group may take to leave before it gets SIGTERM: its script may never call `draining()`.
_DRAIN_SEC = 30.0


STANDBY = "standby"  # the state of a group that the lighthouse holds back
# That of a group that is told that the training has ended, and of one whose script had failed behind its loop
LATE, FAILED = "came back after the end", "failed behind its loop"


@dataclass
class GroupState:
    """The state of one group."""

    group: ReplicaGroup
    port: int = 0  # port of its manager server, which identifies the group among the lighthouse's members
    state: str = "starting"
    step: int = 0
    fruitless: int = 0  # consecutive incarnations that took part in no step
    codes: Sequence[int] = ()  # the exit codes of their scripts, negative for a signal; 0: not known
    took_part: bool = False  # whether this incarnation participated in a step, or is ready to
    restart_at: float | None = None
    leaving: bool = False
    abandoned: str = ""  # why it is not restarted; empty if it is
    failed: str = ""  # how its script ended after the end of the training, with an error; empty: it did not
    code: int = 0  # the exit code of the script then, negative for a signal
    end_by: float | None = None  # time at which it gets SIGTERM if it has not left
    replica_id: str = ""  # as the lighthouse reports it

    @property
    def running(self) -> bool:
        return self.group.starts > 0 and self.group.status is None


class LocalJob:
    """Replica groups of one script, under one lighthouse.

    Args:
        make_group: makes group ``number``, without starting it.
        replicas: initial number of groups.
        most: largest number of groups for ``scale``.
        least: smallest number of groups for ``scale``: with fewer, none of them trains.
        lighthouse: address of the lighthouse.
        kill_every: seconds between two kills of a group chosen at random; None: no kills.
        seed: seed of the random choice.
        standby: number of further groups, which the lighthouse holds back until one of the others fails. All
            groups are alike: one that comes back after a failure is the next standby.
    """

    def __init__(
        self,
        make_group: Callable[[int], ReplicaGroup],
        replicas: int,
        most: int,
        lighthouse: str,
        kill_every: float | None = None,
        seed: int | None = None,
        least: int = 1,
        standby: int = 0,
    ) -> None:
        self.members: list[GroupState] = []
        self._first = self.wanted = replicas  # wanted: the number of groups that was set last
        self.most = most
        self.least = least
        self._standby = standby
        self.kills = 0
        self.pace = StepRate()
        self.shown: dict[str, Any] = {}  # what the lighthouse showed last
        self.decision = ""  # of --scale auto
        self.follow_again: Callable[[], None] | None = None  # after a number that was set by hand
        self._make_group = make_group
        self._lighthouse = lighthouse
        self._run = (
            os.environ.get(RUN_ENV) or uuid.uuid4().hex
        )  # groups that come back after its end are told
        self._kill_every = kill_every
        self._trained = False  # whether a group has ever taken part in a step: then the script can start
        self._errors: list[str] = []  # which ended groups before that
        self._choice = random.Random(seed)
        self._next_kill = time.monotonic() + (kill_every or 0.0)
        self._asked = 0.0
        self.scale(replicas)

    def scale(self, replicas: int) -> None:
        """Adds groups, or drains the last ones that train: they leave between two steps, so no step of the
        others is aborted. The number of standbys stays.

        Groups whose restarts had stopped are started again.

        Raises:
            ValueError: ``replicas`` is below ``least`` or above ``most``, a group that is wanted again is
                still leaving, or the lighthouse does not take the number of a job with standbys.
        """
        if not self.least <= replicas <= self.most:
            more = (
                f"; to allow them, start it with --replicas {self._first}:{replicas}"
                if replicas > self.most
                else ""
            )
            raise ValueError(
                f"{replicas} replica groups are not allowed; allowed: {self.least} (--min-replicas) to "
                f"{self.most} "
                f"(MAX of --replicas){more}"
            )
        stay = [member for member in self.members if not member.leaving]
        lacking = replicas + self._standby - len(stay)
        left = sorted(
            (member for member in self.members if member.leaving), key=lambda member: member.running
        )
        again = left[: max(0, lacking)]
        for member in again:
            if member.running:
                raise ValueError(f"group {member.group.number} is still leaving; try again when it has left")
        # Before a group leaves, whose place a standby would take.
        if self._standby and self.members and not limit(self._lighthouse, replicas):
            raise ValueError(f"the lighthouse does not take {replicas} as its max_replicas; try again")
        trains = [member for member in stay if member.state not in (STANDBY, "done")]
        if self._standby:  # a group that starts again may be about to stand by
            trains.sort(key=lambda member: member.state == "training")
        for member in trains[len(trains) - max(0, -lacking) :]:
            member.leaving, member.state, member.restart_at, member.abandoned = True, "leaving", None, ""
            self._drain(member)
        for _ in range(lacking - len(again)):
            self.members.append(GroupState(self._make_group(len(self.members))))
            again.append(self.members[-1])
        for member in [*again, *(member for member in stay if member.abandoned)]:
            member.leaving, member.abandoned, member.fruitless = False, "", 0
            self._errors.clear()  # the script may have been repaired
            self._start(member)
        self.wanted = replicas

    def tick(self) -> bool:
        """Updates, restarts and ends groups. Returns whether any of them runs or will be restarted.

        Raises:
            JobStops: an exception would end it again and again.
            ScriptFailed: the script of a group has failed behind its loop.
            LaunchError: the script raises the same error each time, before its first step; or a group is no
                longer restarted, and others have finished.
            HostFails: a group is no longer restarted, and either none runs, will be restarted or has
                finished, or none has ever taken part in a step.
        """
        now = time.monotonic()
        if now - self._asked > _ASK_EVERY_SEC:
            self._asked = now
            self._ask(now)
        for member in self.members:
            self._look_after(member, now)
        if self._kill_every is not None and now >= self._next_kill:
            self._next_kill = now + self._kill_every
            self._kill_one()
        if self._standby:
            self._end_standbys()
        goes_on = any(member.running or member.restart_at is not None for member in self.members)
        if not goes_on:
            self._check_ends()
        abandoned = [member for member in self.members if member.abandoned]
        if abandoned and not goes_on:
            if any(member.state == "done" for member in self.members):  # on this host, too
                why = "; ".join(member.abandoned for member in abandoned)
                raise LaunchError(why, *(member.group.log for member in abandoned))
            raise self._host_fails(abandoned)
        return goes_on

    def pause(self) -> None:
        """Waits until the next tick, which comes early if a group ends or is to be started again."""
        running = [member for member in self.members if member.running]
        until = min([time.monotonic() + _TICK_SEC, *(m.restart_at for m in self.members if m.restart_at)])
        while time.monotonic() < until and all(member.running for member in running):
            time.sleep(_LOOK_SEC)

    def end(self, grace: float) -> None:
        """Sends SIGTERM to all groups, so that their scripts can end between two steps, and kills those that
        do not end.

        Args:
            grace: seconds that they may take, the value of TORCHFT_GRACE_S.
        """
        for member in self.members:
            member.group.terminate()
        deadline = time.monotonic() + grace + _AFTER_GRACE_SEC
        while any(member.running for member in self.members) and time.monotonic() < deadline:
            time.sleep(_TICK_SEC)
        self.kill()

    def kill(self) -> None:
        """Kills all groups at once."""
        for member in self.members:
            member.group.kill()

    def _drain(self, member: GroupState) -> None:
        """Drains a group that the lighthouse knows. Any other group gets SIGTERM at once."""
        if member.running and member.replica_id and drain(self._lighthouse, member.replica_id):
            member.end_by = time.monotonic() + _DRAIN_SEC
        else:
            member.group.terminate()

    def _start(self, member: GroupState) -> None:
        member.port = free_port()
        member.state = "starting" if member.group.starts == 0 else "starting again"
        member.took_part, member.restart_at, member.step = False, None, 0
        member.replica_id, member.end_by = "", None
        # SIGTERM drains a group whose script calls `draining()`. It ends other scripts, unless they handle
        # it.
        leave_on = {LEAVE_ON_ENV: os.environ.get(LEAVE_ON_ENV, signal.SIGTERM.name)}
        own = {"TORCHFT_MANAGER_PORT": str(member.port), RUN_ENV: self._run}
        if member.group.starts > 0:
            own[RETURNS_ENV] = "1"
        member.group.start(self._lighthouse, {**own, **leave_on})

    def _look_after(self, member: GroupState, now: float) -> None:
        status = member.group.status
        if status is None:
            if member.end_by is not None and now >= member.end_by:
                member.end_by = None
                member.group.terminate()
            return
        if member.leaving:
            member.state = "left"
        elif member.abandoned or member.state in (LATE, FAILED):
            return
        elif member.restart_at is not None:
            if now >= member.restart_at:
                self._start(member)
        elif status == 0:
            member.state, member.failed = "done", ""
        else:
            code = exit_code(member.group.log) if status > 0 else status  # 0: torchrun reports none
            # A restarted group is told that the training has ended. A script may use that code, too.
            if code == LATE_STATUS and member.group.starts > 1 and self._has_ended():
                member.state = FAILED if member.failed else LATE
                return
            self._note_end(member, code or status)
            member.fruitless = 0 if member.took_part else member.fruitless + 1
            member.codes = [*member.codes, code] if member.fruitless else []
            error = error_of(member.group.log) if member.fruitless else ""
            self._end_if_repeated(member, error)
            delay = restart_delay(member.fruitless)
            if delay is None and member.failed:
                member.state = FAILED
                return
            if delay is None:
                self._stop_restarting(member, status, error)
                return
            if member.state != "killed":
                member.state = f"ended with status {status}"
            member.restart_at = now + delay

    def _has_ended(self) -> bool:
        return bool(status(self._lighthouse).get("ended") == self._run)

    def _note_end(self, member: GroupState, code: int) -> None:
        """Remembers how a life of a group has failed, if the training was complete. The next one may resume
        from a checkpoint of the last step, and run to its end; or it is told that the training has ended.

        Args:
            member: the group.
            code: the exit code of its script, negative for a signal.
        """
        if not self._has_ended():
            return
        self._trained = True  # perhaps faster than this looks
        log, member.code = member.group.log, code
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        error = error_of(log) if code > 0 else ""
        member.failed = (
            f"group {member.group.number}: its script {how} after the training was complete, and ran to its "
            f"end in no life{': ' * bool(error)}{error}; see {log}"
        )

    def _check_ends(self) -> None:
        """Raises ScriptFailed if a script has failed behind its loop. One that was killed, with its host say,
        is made up for by that of another group, which ran to its end.
        """
        failed = [member for member in self.members if member.state == FAILED]
        if any(member.state == "done" for member in self.members):
            failed = [member for member in failed if member.code > 0]
        if failed:
            raise ScriptFailed(failed)

    def _end_if_repeated(self, member: GroupState, error: str) -> None:
        """Ends the job if its script cannot start: it raised the same error twice, in one group or in two,
        and no group has ever taken part in a step. An error of a device may be the fault of this host.
        """
        if not error or self._trained or of_device(error):
            return
        if error in self._errors:
            raise LaunchError(f"the script ends before its first step: {error}", member.group.log)
        self._errors.append(error)

    def _stop_restarting(self, member: GroupState, status: int, error: str) -> None:
        """Stops restarting a group. The job ends if no group has ever taken part in a step: then the script
        or this host is at fault.
        """
        member.abandoned = (
            f"group {member.group.number} ended {FRUITLESS_LIVES} times before it took part in a step, the "
            "last time "
            f"with status {status}" + (f": {error}" if error else "")
        )
        if not self._trained:
            if error == "" and member.codes[0] > 0 and len(set(member.codes)) == 1:  # its arguments, say
                raise LaunchError(f"{member.abandoned}, each with status {member.codes[0]}", member.group.log)
            raise self._host_fails([member])
        member.state = (
            f"not restarted: ended with status {status} and never took part, see {member.group.log}"
        )

    def _host_fails(self, abandoned: list[GroupState]) -> HostFails:
        why = "; ".join(member.abandoned for member in abandoned)
        return HostFails(
            f"{why}; no group is started on node {node_name()} any more: try another one",
            *(member.group.log for member in abandoned),
        )

    def _end_standbys(self) -> None:
        """Ends the groups that are left when as many as train have finished: standbys, which a script without
        ``shutdown(finished=True)`` leaves waiting, and groups that come back too late.
        """
        finished = sum(member.state == "done" for member in self.members)
        if finished < self.wanted or any(m.running and m.state == "training" for m in self.members):
            return
        for member in self.members:
            if (member.running or member.restart_at is not None) and not member.leaving:
                member.leaving, member.state, member.restart_at = True, "leaving", None
                member.group.terminate()

    def _kill_one(self) -> None:
        candidates = [
            member
            for member in self.members
            if member.running and member.took_part and not member.leaving and member.state != STANDBY
        ]
        if len(candidates) < 2:  # one group must survive
            return
        victim = self._choice.choice(candidates)
        victim.group.kill()
        victim.state = "killed"
        self.kills += 1

    def _ask(self, now: float) -> None:
        """Updates the groups' states from the lighthouse, if it answers."""
        self.shown = shown = status(self._lighthouse)
        if shown.get("stopped"):
            raise JobStops(shown["stopped"])
        if self._standby and shown.get("max_replicas", self.wanted) != self.wanted:
            limit(self._lighthouse, self.wanted)  # another lighthouse leads
        members = {
            urlsplit(reported["address"]).port: reported
            for reported in shown["members"]
            if reported.get("address")
        }
        for member in self.members:
            reported = members.get(member.port)
            if reported is None or not member.running or member.leaving:
                continue
            member.step, member.replica_id = reported["step"], reported["replica_id"]
            stands_by = reported.get("standby", False)
            member.state = "training" if reported["in_quorum"] else STANDBY if stands_by else "waiting"
            # also a standby: its script can start
            member.took_part = member.took_part or reported["in_quorum"] or stands_by
        self._trained = self._trained or any(member.took_part for member in self.members)
        if steps := [reported["step"] for reported in shown["members"] if reported["in_quorum"]]:
            self.pace.look(now, shown["quorum_id"], max(steps))


def status(lighthouse: str) -> dict[str, Any]:
    """The status of a lighthouse; without members if it does not answer."""
    try:
        return HttpLighthouse(lighthouse, timeout=_ANSWER_SEC).get("/status")
    except Unanswered:
        return {"members": []}


def drain(lighthouse: str, replica_id: str) -> bool:
    """Drains a group. Returns False if the lighthouse could not pass the request on."""
    return _asked(lighthouse, "drain", replica_id=replica_id)


def limit(lighthouse: str, max_replicas: int) -> bool:
    """Sets how many groups train. Returns False if the lighthouse does not answer, or refuses."""
    return _asked(lighthouse, "max_replicas", max_replicas=max_replicas)


def _asked(lighthouse: str, what: str, **body: str | int) -> bool:
    try:
        HttpLighthouse(lighthouse, timeout=_REQUEST_SEC).ask(what, **body)
    except Unanswered:
        return False
    return True
