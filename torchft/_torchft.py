"""The native classes: servers and clients of the Go core, with Python's types, durations and errors.

Errors, for every call:
    ValueError: an argument that is not allowed; the text names it, its value and what is allowed.
    TypeError: an argument of the wrong type.
    TimeoutError: the call's own ``timeout`` passed.
    RuntimeError: everything else that failed: connecting within ``connect_timeout``, an address without
        ``http://`` or ``https://``, the peer's refusal, use after shutdown, use in a forked child.
    KeyboardInterrupt: Ctrl-C ends every wait at once and cancels the call.

Servers and clients alike are protected by the files that TORCHFT_TOKEN_FILE and TORCHFT_TLS_CERT, _KEY, _CA
and _CLIENT_CA name when they are made; a file that cannot be used is a ValueError.

The native library is loaded on first use, so that a process that forks before it uses torchft can use it in
the child too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torchft import _libraries
from torchft._records import (
    MemberFailure,
    Quorum,
    QuorumMember,
    QuorumRequest,
    QuorumResult,
    Timestamp,
    integer,
)
from torchft._security import files, run_id, security
from torchft.addresses import announced_host

__all__ = [
    "LighthouseClient",
    "LighthouseServer",
    "ManagerClient",
    "ManagerServer",
    "MemberFailure",
    "Quorum",
    "QuorumMember",
    "QuorumRequest",
    "QuorumResult",
    "Timestamp",
    "held_in",
    "keep",
    "lighthouse_main",
]

#: What the native library logs to standard error: debug, info, warn or error. Default: warn; of the
#: lighthouse command: info.
LOG_LEVEL_ENV = "TORCHFT_LOG_LEVEL"


def refusal(error: BaseException) -> str:
    """Returns why the lighthouse has refused the request that an exception tells of, one of ``Refusal`` in
    go/quorum/types.go; empty: it has refused none.
    """
    return getattr(error, "refusal", "") or ("" if error.__cause__ is None else refusal(error.__cause__))


_MICROSECOND = timedelta(microseconds=1)
_LONGEST = timedelta(days=36500) // _MICROSECOND  # a duration that fits into Go's type; in effect, no limit

_native: Any = None


def _load(log_level: str = "warn") -> Any:
    """Returns the native library. ``log_level`` applies unless TORCHFT_LOG_LEVEL is set."""
    global _native
    if _native is None:
        library = _libraries.load("torchft._torchft_go")
        level = os.environ.get(LOG_LEVEL_ENV)
        try:
            library.pyapi_SetLogLevel(level or log_level)
        except ValueError as e:
            raise ValueError(f"{LOG_LEVEL_ENV}: {e}") from None
        _native = library
    return _native


def _micros(name: str, value: timedelta) -> int:
    if not isinstance(value, timedelta):
        raise TypeError(f"{name}={value!r} is not allowed; allowed: a datetime.timedelta")
    us = value // _MICROSECOND
    if us <= 0:
        raise ValueError(f"{name}={value!r} is not allowed; allowed: more than 0")
    return min(us, _LONGEST)


class _Native:
    """An object that lives in the Go core: a handle, released by ``_release`` or with the last reference."""

    __slots__ = ("__weakref__", "_go", "_handle")

    _go: Any
    _handle: int

    def _open(self, start: str, *args: object) -> None:
        self._handle = 0
        self._go = _load()
        self._go.open(self, getattr(self._go, start), *args)

    def _release(self) -> None:
        handle, self._handle = self._handle, 0
        if handle:
            self._go.run(self._go.pyapi_ReleaseStart, handle)

    def __del__(self) -> None:
        # In a forked child this object cannot be used: it belongs to the parent, which has the threads.
        if getattr(self, "_handle", 0) and not self._go.forked():
            self._release()


class _Operation(_Native):
    """A call in progress. It is cancelled with its last reference."""

    __slots__ = ()

    def __init__(self, go: Any, op: int) -> None:
        self._go, self._handle = go, op

    def wait(self) -> Any:
        """Returns the result, once."""
        op, self._handle = self._handle, 0
        return self._go.wait(op)


class _GoServer(_Native):
    """A native object that listens at an address."""

    __slots__ = ("_address",)

    def __init__(self, start: str, *args: object) -> None:
        self._open(start, *args)
        self._address: str = self._go.pyapi_Address(self._handle)

    def address(self) -> str:
        """``http://hostname:port`` of this server, ``https://`` if it speaks TLS."""
        return self._address

    def shutdown(self) -> None:
        """Ends the server; clients that wait for its answer get an error. A second shutdown does nothing."""
        self._release()


# The groups that have completed a training in this process: name, and run.
_completed: set[tuple[str, str]] = set()


class ManagerServer(_GoServer):
    """The server of one replica group, on its group rank 0. It heartbeats to the lighthouse, gathers the
    group's ranks for a quorum and for the vote on a commit, and ends with ``shutdown`` or the last reference.

    Args:
        replica_id (str): identifies this group; unique in the job.
        lighthouse_addr (str): ``http://host:port`` of the lighthouse.
        hostname (str): host under which others reach this server.
        bind (str): ``host:port`` to listen on; port 0 takes a free one.
        store_addr (str): ``host:port`` of the group's store, handed to the other groups.
        world_size (int): ranks in this group, at least 1.
        heartbeat_interval (timedelta): time between heartbeats, more than 0.
        connect_timeout (timedelta): how long to try to reach the lighthouse, more than 0.
        quorum_retries (int): how often a request that the lighthouse refused is sent again, at least 0.

    Raises:
        ValueError: an argument that is not allowed.
        RuntimeError: the lighthouse is not reached in time, or the port is in use.
    """

    __slots__ = ("_training",)

    def __init__(
        self,
        replica_id: str,
        lighthouse_addr: str,
        hostname: str,
        bind: str,
        store_addr: str,
        world_size: int,
        heartbeat_interval: timedelta,
        connect_timeout: timedelta,
        quorum_retries: int,
    ) -> None:
        # A script may train twice. The second training of a group is no late life of the first one.
        self._training = replica_id.partition(":")[0], run_id()
        run = "" if self._training in _completed else None
        super().__init__(
            "pyapi_ManagerServerStart",
            replica_id,
            lighthouse_addr,
            hostname,
            bind,
            store_addr,
            integer("world_size", world_size, 1),
            _micros("heartbeat_interval", heartbeat_interval),
            _micros("connect_timeout", connect_timeout),
            integer("quorum_retries", quorum_retries, 0),
            security(run),
        )

    def _finish(self, step: int = 0) -> None:
        """Informs the server, with ``shutdown``, that the training has ended on purpose. `step`: the number
        of committed steps; 0: it is not known, and groups that come back are not told.
        """
        if self._handle:
            _completed.add(self._training)
            self._go.pyapi_ManagerServerFinish(self._handle, step)


_STANDS = 2  # the decision of a vote: commit, and begin the next step without a round


class ManagerClient(_Native):
    """A rank's connection to the manager server of a replica group.

    Args:
        addr (str): ``http://host:port`` of the manager server.
        connect_timeout (timedelta): how long to try to reach it, more than 0.

    Raises:
        TypeError: one of them is missing.
        ValueError: an argument that is not allowed.
        RuntimeError: the server is not reached in time, or the address has no scheme.
    """

    __slots__ = ("_asked", "_failed", "_stands")

    # Both are required. Their defaults are for mocks of the upstream class, which get no arguments.
    def __init__(self, addr: str | None = None, connect_timeout: timedelta | None = None) -> None:
        if addr is None or connect_timeout is None:
            given = {"addr": addr, "connect_timeout": connect_timeout}
            raise TypeError(
                f"ManagerClient: missing {' and '.join(n for n, v in given.items() if v is None)}"
            )
        self._asked: QuorumRequest | None = None  # the last request of a round
        # The step that this rank may begin without a round, since the quorum stands; -1: none.
        self._stands = -1
        self._failed = -1  # the last quorum of which a member has failed
        timeout_us = _micros("connect_timeout", connect_timeout)
        self._open("pyapi_ManagerClientStart", addr, timeout_us, security())

    def _quorum(
        self,
        group_rank: int,
        step: int,
        checkpoint_metadata: str,
        shrink_only: bool,
        timeout: timedelta,
        commit_failures: int,
        init_sync: bool = True,
        reconfigure_handle: str = "",
        **further: Any,
    ) -> QuorumResult:
        """Waits until all ranks of the group asked and the lighthouse has a quorum.

        Args:
            timeout: limit for the whole wait.
            further: fields that upstream's request does not have. All arguments are described in
                :class:`QuorumRequest`.
        """
        request = QuorumRequest(
            integer("group_rank", group_rank, 0),
            step,
            checkpoint_metadata,
            shrink_only,
            commit_failures,
            init_sync,
            reconfigure_handle,
            **further,
        )
        go = self._go
        timeout_us = _micros("timeout", timeout)
        result = go.run(go.pyapi_ManagerRoundStart, self._handle, request._to_json(), timeout_us)
        return QuorumResult(**json.loads(result))

    # `_quorum` in three calls, for a caller that requests a quorum at each step and needs no thread for it.

    def _stands_for(self, request: QuorumRequest, last: QuorumResult | None) -> bool:
        """Whether the quorum stands, so that the result is ``last`` with the step of the request. Otherwise
        :meth:`_begin_round` requests it.

        Args:
            request: the rank's request.
            last: the last result, None if there is none to compare with.
        """
        if request.traceparent:
            self._go.pyapi_ManagerTrace(self._handle, request.traceparent)
        stands, self._stands = self._stands == request.step, -1
        return stands and last is not None and self._asked == request and last.quorum_id != self._failed

    def _begin_round(self, request: QuorumRequest, timeout: timedelta) -> object:
        """Does the same as :meth:`_quorum`, without waiting. Pass the returned handle to :meth:`_end_round`,
        once. `timeout`: limit for the whole wait.
        """
        go = self._go
        timeout_us = _micros("timeout", timeout)
        self._asked = request
        return _Operation(go, go.pyapi_ManagerRoundStart(self._handle, request._to_json(), timeout_us))

    def _end_round(self, begun: object) -> QuorumResult:
        """Waits for a round's result."""
        assert isinstance(begun, _Operation)
        return QuorumResult(**json.loads(begun.wait()))

    def _wait_notice(self, timeout: timedelta) -> tuple[str, MemberFailure] | None:
        """Waits for the lighthouse's next notice.

        Returns:
            The kind of the notice, and the member that failed or is stalled. Kinds are ``failed``,
            ``stalled``, ``regressed`` (the quorum is below the job's step), ``judged`` and ``stopped`` (of
            exceptions) and ``progress``: the lighthouse asks what this rank does. None if there was no notice
            in time.

        Raises:
            RuntimeError: the client is shut down.
        """
        go = self._go
        text = go.run(go.pyapi_ManagerNoticeStart, self._handle, _micros("timeout", timeout))
        if not text:
            return None
        notice = json.loads(text)
        kind, failure = notice.pop("kind"), MemberFailure(**notice)
        if kind == "failed":
            self._failed = failure.quorum_id  # a step that begins now must not begin in this quorum
        return kind, failure

    def _checkpoint_metadata(self, rank: int, timeout: timedelta) -> str:
        """The value that group rank ``rank`` announced as ``checkpoint_metadata`` in its last quorum."""
        go = self._go
        return go.run(
            go.pyapi_ManagerCheckpointMetadataStart,
            self._handle,
            integer("rank", rank, 0),
            _micros("timeout", timeout),
        )

    def should_commit(self, group_rank: int, step: int, should_commit: bool, timeout: timedelta) -> bool:
        """Votes on a step and waits for the group's decision.

        Args:
            group_rank: rank of this process in its group, at least 0.
            step: step to vote on.
            should_commit: this rank's vote.
            timeout: limit for the whole wait.

        Returns:
            True if every rank of the group voted True.
        """
        decision = self._go.vote(
            self._handle,
            group_rank
            if type(group_rank) is int and group_rank >= 0
            else integer("group_rank", group_rank, 0),
            step,
            should_commit,
            _micros("timeout", timeout),
        )
        if decision == _STANDS:
            self._stands = step + 1
        return bool(decision)

    def _leave(self, timeout: timedelta) -> None:
        """Reports that this group has ended its last step, and waits until no other group needs it."""
        self._go.run(self._go.pyapi_ManagerLeaveStart, self._handle, _micros("timeout", timeout))

    def _report(self, **report: object) -> None:
        """Sends a request of RankRequest (proto/torchft.proto) that has no answer. It may be lost.

        Raises:
            ValueError: there is no such request, field or counter.
            RuntimeError: the client is shut down.
        """
        self._go.pyapi_ManagerReport(self._handle, json.dumps(report))

    def shutdown(self) -> None:
        """Closes the connection: waiting calls get an error. A second shutdown does nothing."""
        self._release()


class LighthouseServer(_GoServer):
    """The server of a job that tracks its members and forms their quorums. In production it runs as
    ``torchft_lighthouse``. It ends with ``shutdown`` or the last reference.

    ``TORCHFT_TOKEN_FILE`` and ``TORCHFT_TLS_CERT``, ``_KEY``, ``_CLIENT_CA`` protect it, as they protect a
    :class:`ManagerServer` (docs/operating.md).

    Args:
        bind (str): ``host:port`` to listen on; port 0 takes a free one.
        min_replicas (int): least number of replica groups in a quorum, at least 1.
        join_timeout_ms (int): how long a quorum waits for healthy groups that have not requested it yet;
            default 100.
        quorum_tick_ms (int): interval at which quorums are decided also without a new request; default 100.
        heartbeat_timeout_ms (int): time without a heartbeat after which a group counts as failed; default
            5000.
        state_dir (str): directory where the last quorum of each job is kept for a restarted lighthouse;
            default: none.
        max_replicas (int): most replica groups that train: further ones are standbys; 0: no limit.

    Raises:
        ValueError: an argument that is not allowed.
        RuntimeError: the port is in use, or ``state_dir`` cannot be used, or is used by another lighthouse.
    """

    __slots__ = ()

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
        state_dir: str | None = None,
        max_replicas: int = 0,
    ) -> None:
        settings = {
            "bind": bind,
            "min_replicas": integer("min_replicas", min_replicas, 1),
            "join_timeout_ms": integer(
                "join_timeout_ms", 100 if join_timeout_ms is None else join_timeout_ms, 0
            ),
            "quorum_tick_ms": integer("quorum_tick_ms", 100 if quorum_tick_ms is None else quorum_tick_ms, 1),
            "heartbeat_timeout_ms": integer(
                "heartbeat_timeout_ms", 5000 if heartbeat_timeout_ms is None else heartbeat_timeout_ms, 1
            ),
            "state_dir": state_dir or "",
            "max_replicas": integer("max_replicas", max_replicas, 0),
            **files(),
        }
        arguments = json.dumps([f"--{name}={value}" for name, value in settings.items()])
        super().__init__("pyapi_LighthouseStart", arguments, announced_host(), False)


class LighthouseClient(_Native):
    """A client of the lighthouse for programs that request a quorum without a manager server.

    Args:
        addr (str): ``http://host:port`` of the lighthouse.
        connect_timeout (timedelta): how long to try to reach it, more than 0.

    Raises:
        ValueError: an argument that is not allowed.
        RuntimeError: the lighthouse is not reached in time, or the address has no scheme.
    """

    __slots__ = ()

    def __init__(self, addr: str, connect_timeout: timedelta) -> None:
        self._open(
            "pyapi_LighthouseClientStart", addr, _micros("connect_timeout", connect_timeout), security()
        )

    def quorum(
        self,
        replica_id: str,
        timeout: timedelta,
        address: str = "",
        store_address: str = "",
        step: int = 0,
        world_size: int = 0,
        shrink_only: bool = False,
        data: dict[Any, Any] | None = None,
    ) -> Quorum:
        """Requests to be in the next quorum, and waits for it.

        Args:
            replica_id: replica id of the member; unique in the job.
            timeout: limit for the whole wait.
            address: address of the member's manager server.
            store_address: address of the member's store.
            step: the member's step in progress.
            world_size: ranks in its group.
            shrink_only: the quorum must have no new members.
            data: passed on to the other members; any value that ``json`` can encode.
        """
        go = self._go
        member = {
            "replica_id": replica_id,
            "address": address,
            "store_address": store_address,
            "step": step,
            "world_size": integer("world_size", world_size, 0),
            "shrink_only": shrink_only,
            "data": "" if data is None else json.dumps(data),
        }
        timeout_us = _micros("timeout", timeout)
        result = json.loads(
            go.run(go.pyapi_LighthouseQuorumStart, self._handle, json.dumps(member), timeout_us)
        )
        participants = [QuorumMember(**member) for member in result["participants"]]
        for participant, member in zip(participants, result["participants"]):
            participant.data = json.loads(member["data"]) if member["data"] else None
        return Quorum(result["quorum_id"], participants, Timestamp(**result["created"]))

    def heartbeat(self, replica_id: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Sends a heartbeat for ``replica_id``; ``timeout`` is the limit of the call."""
        self._go.run(
            self._go.pyapi_LighthouseHeartbeatStart, self._handle, replica_id, _micros("timeout", timeout)
        )


@contextmanager
def _end_awaited() -> Iterator[Callable[[], object]]:
    """Yields a function that returns at (also earlier) SIGINT or SIGTERM. Then these end the process."""
    import signal

    # A byte in a pipe wakes this thread whichever one gets the signal, without a lock that it may hold.
    signaled, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    try:
        yield lambda: os.read(signaled, 1)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.close(signaled)
        os.close(wake)


def lighthouse_main() -> None:
    """The ``torchft_lighthouse`` command: serves until SIGINT or SIGTERM; clients retry pending requests.

    Exits with 2 when an argument is not understood or not allowed, and with 1 when the server does not start.
    """
    import sys

    arguments = json.dumps(sys.argv[1:])
    try:
        usage = _load(log_level="info").pyapi_LighthouseCommandHelp(arguments)
        if usage:
            print(usage, end="")
            return
        with _end_awaited() as wait:
            server = _GoServer("pyapi_LighthouseStart", arguments, announced_host(), True)
            print(f"Lighthouse listening on: {server.address()}", flush=True)
            wait()
    except (ValueError, RuntimeError) as e:
        print(f"torchft_lighthouse: {e}", file=sys.stderr)
        sys.exit(2 if isinstance(e, ValueError) else 1)
    server.shutdown()  # a second signal ends the process at once


def keep(root: str, bind: str, keep: timedelta, writer: list[str], began: Callable[[], None]) -> None:
    """Keeps the slots in a folder until SIGINT or SIGTERM, or until there is nothing to keep.

    Args:
        root: the folder, of this user alone.
        bind: ``host:port`` to listen on; "": free ports.
        keep: for how long to keep slots after the last trainer of their job has ended, more than 0.
        writer: the command that writes slots to disk, to which the folder is added; empty: none.
        began: called once this process keeps the folder.

    Raises:
        ValueError: an argument that is not allowed.
        TimeoutError: another keeper has the folder; the text says which.
        RuntimeError: the folder cannot be used.
    """
    _load(log_level="info")
    with _end_awaited() as wait:
        command, keep_us = json.dumps(writer), _micros("keep", keep)
        keeper = _GoServer("pyapi_KeeperStart", root, bind, announced_host(), command, keep_us)
        began()
        wait()
    keeper.shutdown()  # a second signal ends the process at once


def held_in(root: str) -> dict[str, Any]:
    """Returns the slots in a folder, and the work of the writer of checkpoints: ``snapshots`` and ``disks``,
    as ``GET /api/v1/keepers`` describes them. No keeper needs to run. RuntimeError: the folder cannot be
    read.
    """
    found: dict[str, Any] = json.loads(_load().pyapi_KeeperList(root))
    return found
