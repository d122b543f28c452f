"""Connects the process group with a quorum's groups: at once, or as a standby (handover.py)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from torchft._agreement import CONNECTIONS, announced, other_version
from torchft._manager.checks.layout import Layout, LayoutDiffers
from torchft._manager.handover import Connections, Way, decide, name_of
from torchft._manager.observe.own_time import ranged
from torchft._manager.settings import TORCH_FR_DUMP_TEMP_FILE_ENV, Settings
from torchft._manager.step.failures import PeerFailed
from torchft.process_group.native import reset_flight_recorder
from torchft.process_group.reconfigure import Handle, options_of
from torchft.utils import device_name, empty_cache, out_of_memory

if TYPE_CHECKING:
    from torchft._manager.edge import Peers
    from torchft._manager.heal.in_passing import InPassing
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.quorum.plan import Plan
    from torchft._manager.step.errors import Errors
    from torchft._manager.step.failures import Failures
    from torchft._torchft import MemberFailure
    from torchft.process_group._attempt import ConnectionAttempt


# How many attempts to make a standby connection may fail in a row. Then all groups connect at
# once: another connection may not fit into the memory of a device, for example.
_MOST_ATTEMPTS = 3

# How many times in a row a group may fail to connect because its own device has too little memory. Each time
# all groups lose a step, and what PyTorch keeps for later tensors is returned to the device. Then the group
# ends.
_MOST_WITHOUT_MEMORY = 2


class _Next(NamedTuple):
    """The standby connection, which is made while another one is in use."""

    name: str
    plan: Plan
    attempt: Optional[ConnectionAttempt[Any]]  # None: it has failed, or has not begun

    @property
    def made(self) -> bool:
        return self.attempt is not None and self.attempt.made

    @property
    def error(self) -> Optional[BaseException]:
        return self.attempt.error if self.attempt is not None else None


class Connection:
    """Connects one rank with its peers, quorum after quorum.

    Attributes:
        apart: whether this rank waits for its connection, while the other groups train on.
        unmade: whether the connection with the groups of the latest quorum could not be made. The same
            quorum, from a server that gives it no new id, is then connected again.
        unsupported: whether a group of the latest quorum does not fit into the job, and is about to end.
        members: replica ids of the groups of the connection in use, with this one; empty if there is none.
        made: the number of connections that this rank has used.
    """

    apart = False
    unmade = False
    unsupported = False
    made = 0

    def __init__(
        self,
        peers: Peers,
        replica_id: str,
        settings: Settings,
        layout: Layout,
        *,
        in_passing: InPassing,
        failures: Failures,
        errors: Errors,
        logger: _ManagerLogger,
    ) -> None:
        self._peers = peers
        self._replica_id = replica_id
        self._settings = settings
        self._layout = layout
        self._in_passing = in_passing
        self._failures = failures
        self._errors = errors
        self._logger = logger
        self._dumps = os.environ.get(TORCH_FR_DUMP_TEMP_FILE_ENV)
        self._plan: Optional[Plan] = None  # the latest one that was followed
        self._name = ""  # of the connection in use; empty: there is none, or it has no name
        self._version: Optional[str] = None  # names a group with another version of torchft
        self.members: list[str] = []
        self._next: Optional[_Next] = None
        self._failed = 0  # attempts in a row to make the next connection
        self._without_memory = 0  # times in a row that the device had too little memory to connect
        self._no_memory: Optional[Exception] = None  # the last of these errors
        # Whether the latest request had an announcement: the others decide by it, whatever `_may_wait` is.
        self._announced = False
        self._unconnected: set[int] = set()  # replica ranks of the groups that wait for their connection

    # For a quorum request

    def _may_wait(self) -> bool:
        return self._peers.connects_standby and self._in_passing.why_not() is None

    def announcement(self, step: int, broken: bool) -> str:
        """Returns the announcement of this rank's connections; empty if it announces none.

        Args:
            step: the step of its weights.
            broken: whether the connection in use may be broken.

        Raises:
            RuntimeError: the device of this rank has too little memory to connect.
        """
        if self._without_memory >= _MOST_WITHOUT_MEMORY:
            raise RuntimeError(
                f"{device_name()} has too little memory for the connection with the other groups, "
                f"{self._without_memory} times in a row: leave more of it free, for example by a smaller "
                "batch; this group ends, so that the others can train on"
            ) from self._no_memory
        if broken:
            self._name = ""
        following = self._next
        if following is not None and following.error is not None:
            self._cannot_connect(following, following.error)
        may_wait = self._may_wait() and self._failed < _MOST_ATTEMPTS
        if following is not None and (broken or not may_wait):
            # All groups connect at once then, under another quorum id: the attempt has used this quorum's.
            self._next = following._replace(attempt=None)
        self._announced = may_wait
        if not may_wait:
            return ""
        following, connected = self._next, self._name != ""
        return Connections(
            self._name,
            len(self.members) if connected else 0,
            following.name if following is not None and following.made else "",
            0 if connected else step,
        ).encode()

    @property
    def settled(self) -> bool:
        """Whether the connection in use is that of all groups of the latest quorum."""
        return not (self.unmade or self.apart or self._unconnected) and self._next is None

    @property
    def needs_new_quorum(self) -> bool:
        """Whether a quorum with another id is needed, since the next connection could not be made."""
        return self._next is not None and self._next.attempt is None

    def _cannot_connect(self, attempted: _Next, error: BaseException) -> None:
        self._next = attempted._replace(attempt=None)
        if isinstance(error, PeerFailed):
            return  # it will not be in the next quorum
        self._failed += 1
        then = "retried" if self._failed < _MOST_ATTEMPTS else "all groups connect at once"
        self._logger.warn(
            f"quorum {attempted.plan.quorum_id}: the groups that join are not connected; {then}: {error!r}"
        )

    # For a quorum

    def may_change(self, plan: Plan) -> bool:
        """Whether a quorum with the id of the last one changes the connection: that was not made, or the
        groups may hand over to the next one, by what they announce now.
        """
        return self.unmade or (self._next is not None and plan is not self._plan)

    @ranged("_pg::configure")
    def follow(self, plan: Plan, new_here: bool, reconfigure: Callable[[int, list[str]], None]) -> None:
        """Connects the process group with the groups of a quorum, or keeps its connection. If connecting
        fails, the step fails, and the next quorum has a new id.

        Args:
            new_here: whether this group has committed no step since its process began.
            reconfigure: passes the quorum's id and the handles of its groups to the process group.

        Raises:
            LayoutDiffers: this group does not fit into the job.
        """
        last, self._plan = self._plan, plan
        if last is None or last.quorum_id != plan.quorum_id:
            self._logger.quorum_event()
            self._logger.info(
                f"quorum {plan.quorum_id}: replica rank {plan.replica_rank} of {plan.replica_world_size}, "
                f"{plan.participants} up to date at step {plan.max_step}"
            )
            if self._dumps is not None:
                # PyTorch's flight recorder appends the rank: each quorum's dump gets a separate file
                os.environ[TORCH_FR_DUMP_TEMP_FILE_ENV] = f"{self._dumps}_quorum{plan.quorum_id}_"
        name, way = self._decide(plan)
        self.unsupported = False
        self.apart = way is Way.STANDBY and not self._name
        if self.apart:
            self.members = []
        if way is Way.KEEP or way is Way.STANDBY:
            self._failures.follow(plan.quorum_id, None if self.apart else self.members)
            if way is Way.STANDBY:
                self._connect_standby(name, plan)
            else:
                self._drop_next()
                self._failed = 0
            return
        try:
            self._connect(name, plan, new_here, reconfigure)
        except LayoutDiffers as e:
            if e.must_end:
                raise
            # The other group raises this error and ends. This group votes no and does not connect, because
            # the groups would reduce different tensors. The next quorum does not contain the other group.
            self._errors.recurring(e, f"another group differs: {e}")
            self.unsupported = True
        except Exception as e:
            self._logger.exception(f"the process group could not be made for quorum {plan.quorum_id}: {e}")
            self._count_memory(e)
            self._errors.lose(e)
        finally:
            self._drop_next()

    def _count_memory(self, error: Exception) -> None:
        if out_of_memory(error):
            self._without_memory += 1
            self._no_memory = error
            empty_cache()

    def _decide(self, plan: Plan) -> tuple[str, Way]:
        """The name of the connection of all groups of a quorum, and what they do."""
        self._unconnected = set()
        if not plan.handles or not (self._announced or self._may_wait()):
            return "", Way.CONNECT
        try:
            ids = [Handle.decode(handle).id for handle in plan.handles]
        except ValueError:  # a group that is not torchft's
            return "", Way.CONNECT
        connections = [Connections.decode(announced(handle, CONNECTIONS)) for handle in plan.handles]
        name = name_of(plan.quorum_id, ids)
        way = decide(name, connections, plan.max_step)
        if way is Way.STANDBY:
            self._unconnected = {
                rank for rank, one in enumerate(connections) if one is not None and not one.name
            }
        return name, way

    def _connect(
        self, name: str, plan: Plan, new_here: bool, reconfigure: Callable[[int, list[str]], None]
    ) -> None:
        """Connects with all groups of a quorum, and waits for that."""
        self._name, self.members, self.unmade = "", plan.replica_ids, True
        reset_flight_recorder()
        with self._failures.connecting(plan.quorum_id):
            self._failures.check()
            self._layout.check(plan, new_here)
            self._name_version(plan)
            if name and self._next is not None and self._next.name == name:
                self._peers.hand_over()
            elif plan.handles:
                reconfigure(plan.quorum_id, plan.handles)
            else:
                self._peers.configure_by_store(plan, self._replica_id, self._settings)
        self._name, self.unmade = name, False
        self._failed = self._without_memory = 0
        self.made += 1

    def _name_version(self, plan: Plan) -> None:
        before, self._version = self._version, other_version(dict(zip(plan.replica_ids, plan.handles)))
        if self._version is not None and self._version != before:
            self._logger.warn(self._version)

    def _connect_standby(self, name: str, plan: Plan) -> None:
        """Begins to make the next connection, unless that has begun."""
        if self._next is not None and self._next.name == name:
            return
        opts = options_of(plan.quorum_id, plan.handles, self._settings.timeout)
        following = _Next(name, plan, None)
        try:
            self._next = following._replace(attempt=self._peers.connect_standby(opts))
        except Exception as e:
            self._cannot_connect(following, e)
        for failure in self._failures.reported(plan.quorum_id):
            self.peer_failed(failure)  # reported before there was an attempt

    def _drop_next(self) -> None:
        if self._next is not None:
            self._next = None
            self._peers.abandon_standby(RuntimeError("a later quorum needs another connection, or none"))

    def peer_failed(self, failure: MemberFailure) -> None:
        """Ends an attempt that would wait for a group that has failed. Called on any thread."""
        following = self._next
        if following is None or following.attempt is None or following.attempt.ended:
            return
        if failure.quorum_id == following.plan.quorum_id and failure.replica_id in following.plan.replica_ids:
            self._peers.abandon_standby(PeerFailed(failure), following.attempt)

    def without_unconnected(self, plan: Plan) -> Plan:
        """The plan without transfers to the groups that wait for their connection, which do not heal yet."""
        if not self._unconnected:
            return plan
        return replace(
            plan,
            recover_dst=[rank for rank in plan.recover_dst if rank not in self._unconnected],
            help_dst=[rank for rank in plan.help_dst if rank not in self._unconnected],
        )
