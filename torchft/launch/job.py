"""A job on this machine: keeps its replica groups running until all of them have finished."""

from __future__ import annotations

import random
import re
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable
from urllib.parse import urlsplit

from torchft._lighthouse_http import Lighthouse, Unanswered
from torchft.launch.group import ReplicaGroup
from torchft.launch.lighthouse import LaunchError, free_port
from torchft.launch.restarts import FRUITLESS_LIVES, restart_delay

_TICK_SEC = 0.1
_ANSWER_SEC = 1.0
# The timeout of an order is longer, because a group that does not receive it is ended in mid-step.
_TELL_SEC = 4.0
_ASK_EVERY_SEC = 0.5
# A group that was told to end does so by itself after TORCHFT_GRACE_S. This much later it is killed.
_AFTER_GRACE_SEC = 2.0
# How long a group that is asked to leave at the end of a step may take: its script may not heed that.
_DRAIN_SEC = 30.0
_RATE_OVER_SEC = 5.0


@dataclass
class Member:
    """What is known of one group."""

    group: ReplicaGroup
    port: int = 0  # of its manager server: how the lighthouse's members are told apart
    state: str = "starting"
    step: int = 0
    fruitless: int = 0  # lives in a row without a step
    took_part: bool = False  # in this life
    restart_at: float | None = None
    leaving: bool = False
    given_up: str = ""  # why it is not started again
    end_by: float | None = None  # when it is told to end in another way, if it has not left by itself
    replica_id: str = ""  # as the lighthouse knows it
    history: deque[tuple[float, int]] = field(default_factory=deque)  # (seconds, step)

    @property
    def running(self) -> bool:
        return self.group.starts > 0 and self.group.status is None

    @property
    def rate(self) -> float:
        """Steps per second, lately."""
        if len(self.history) < 2:
            return 0.0
        (began, first), (now, last) = self.history[0], self.history[-1]
        return (last - first) / (now - began)


class LocalJob:
    """Replica groups of one script, under one lighthouse.

    Args:
        make_group: makes group ``number``, not started yet.
        replicas: how many there are at first.
        most: up to how many ``scale`` may go.
        lighthouse: its address.
        kill_every: seconds between two kills of a group chosen at random; None: no kills.
        seed: of that choice.
    """

    def __init__(
        self,
        make_group: Callable[[int], ReplicaGroup],
        replicas: int,
        most: int,
        lighthouse: str,
        kill_every: float | None = None,
        seed: int | None = None,
    ) -> None:
        self.members: list[Member] = []
        self.most = most
        self.kills = 0
        self._make_group = make_group
        self._lighthouse = lighthouse
        self._kill_every = kill_every
        self._choice = random.Random(seed)
        self._next_kill = time.monotonic() + (kill_every or 0.0)
        self._asked = 0.0
        self.scale(replicas)

    def scale(self, replicas: int) -> None:
        """Adds groups, or lets the last ones leave: at the end of a step, so that the others lose none.

        One that was given up is tried again.

        Raises:
            ValueError: fewer than one, or more than ``most``.
        """
        if not 1 <= replicas <= self.most:
            raise ValueError(f"{replicas} replica groups are not allowed; allowed: 1 to {self.most}")
        for member in self.members[replicas:]:
            if member.state not in ("done", "left", "leaving"):
                member.leaving, member.state, member.restart_at = True, "leaving", None
                self._drain(member)
        for number in range(replicas):
            if number == len(self.members):
                self.members.append(Member(self._make_group(number)))
            member = self.members[number]
            if member.group.starts > 0 and not member.leaving and not member.given_up:
                continue
            if member.leaving and member.running:
                raise ValueError(f"group {number} is still leaving; try again when it is gone")
            member.leaving, member.given_up, member.fruitless = False, "", 0
            self._start(member)

    def tick(self) -> bool:
        """Looks after all groups. Returns whether any of them still has something to do.

        Raises:
            LaunchError: a group does not start, and there is no other one, or all others have finished.
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
        goes_on = any(member.running or member.restart_at is not None for member in self.members)
        given_up = [member for member in self.members if member.given_up]
        if given_up and not goes_on:
            raise LaunchError("; ".join(m.given_up for m in given_up), *(m.group.log for m in given_up))
        return goes_on

    def run(self, show: Callable[[LocalJob], None], each_tick: Callable[[LocalJob], None] = lambda job: None) -> None:
        """Until all groups have finished."""
        while self.tick():
            show(self)
            each_tick(self)
            time.sleep(_TICK_SEC)
        show(self)

    def end(self, grace: float) -> None:
        """Tells all groups to end by SIGTERM, on which a script leaves between two steps, and kills those that do not.

        Args:
            grace: how many seconds they may take, as TORCHFT_GRACE_S says.
        """
        for member in self.members:
            member.group.terminate()
        deadline = time.monotonic() + grace + _AFTER_GRACE_SEC
        while any(member.running for member in self.members) and time.monotonic() < deadline:
            time.sleep(_TICK_SEC)
        self.kill()

    def kill(self) -> None:
        """Ends everything at once."""
        for member in self.members:
            member.group.kill()

    def _drain(self, member: Member) -> None:
        """Asks a group to leave. One that trains does so at the end of a step; any other is ended now."""
        if member.running and member.replica_id and drain(self._lighthouse, member.replica_id):
            member.end_by = time.monotonic() + _DRAIN_SEC
        else:
            member.group.terminate()

    def _start(self, member: Member) -> None:
        member.port = free_port()
        member.state = "starting" if member.group.starts == 0 else "starting again"
        member.took_part, member.restart_at, member.step = False, None, 0
        member.replica_id, member.end_by = "", None
        member.history.clear()
        member.group.start(self._lighthouse, {"TORCHFT_MANAGER_PORT": str(member.port)})

    def _look_after(self, member: Member, now: float) -> None:
        status = member.group.status
        if status is None:
            if member.end_by is not None and now >= member.end_by:
                member.end_by = None
                member.group.terminate()
            return
        if member.leaving:
            member.state = "left"
        elif member.given_up:
            return
        elif member.restart_at is not None:
            if now >= member.restart_at:
                self._start(member)
        elif status == 0:
            member.state = "done"
        else:
            member.fruitless = 0 if member.took_part else member.fruitless + 1
            delay = restart_delay(member.fruitless)
            if delay is None:
                self._give_up(member, status)
                return
            if member.state != "killed":
                member.state = f"ended with status {status}"
            member.restart_at = now + delay

    def _give_up(self, member: Member, status: int) -> None:
        """Those that train go on without it. Where none does, the script does not start at all, and the job ends."""
        member.given_up = (
            f"group {member.group.number} ended {FRUITLESS_LIVES} times before it took part in a step, the last time "
            f"with status {status}"
        )
        if not any(other.took_part for other in self.members):
            raise LaunchError(member.given_up, member.group.log)
        member.state = f"given up: ended with status {status} and never took part, see {member.group.log}"

    def _kill_one(self) -> None:
        candidates = [member for member in self.members if member.running and member.took_part and not member.leaving]
        if len(candidates) < 2:  # somebody has to survive
            return
        victim = self._choice.choice(candidates)
        victim.group.kill()
        victim.state = "killed"
        self.kills += 1

    def _ask(self, now: float) -> None:
        """What the lighthouse says of the groups. One that does not answer says nothing."""
        members = {urlsplit(said["address"]).port: said for said in status(self._lighthouse) if said.get("address")}
        for member in self.members:
            said = members.get(member.port)
            if said is None or not member.running or member.leaving:
                continue
            member.step, member.replica_id = said["step"], said["replica_id"]
            member.state = "training" if said["in_quorum"] else "waiting"
            member.took_part = member.took_part or said["in_quorum"]
            member.history.append((now, member.step))
            while now - member.history[0][0] > _RATE_OVER_SEC:
                member.history.popleft()


def status(lighthouse: str) -> list[dict[str, Any]]:
    """The members that a lighthouse knows; none if it does not answer."""
    try:
        return list(Lighthouse(lighthouse, timeout=_ANSWER_SEC).get("/status")["members"])
    except (Unanswered, ValueError, KeyError):
        return []


def drain(lighthouse: str, replica_id: str) -> bool:
    """Asks a group to leave at the end of a step. False if the lighthouse could not tell it."""
    try:
        Lighthouse(lighthouse, timeout=_TELL_SEC).ask("drain", replica_id)
    except (Unanswered, ValueError):
        return False
    return True


# What torchrun's agent writes first when a worker has failed. Dozens of lines follow it, and none says why.
_OF_TORCHRUN = re.compile(r"torch/distributed/elastic/\S+ failed \(exitcode: ")


def tail(log: Path, lines: int = 20) -> str:
    """The end of a log: of what the script itself said last, where torchrun reports its end."""
    text = log.read_text(errors="replace").splitlines()
    reports = [i for i, line in enumerate(text) if _OF_TORCHRUN.search(line)]
    end = reports[-1] if reports and reports[-1] > 0 else len(text)
    return "\n".join(text[max(0, end - lines) : end])
