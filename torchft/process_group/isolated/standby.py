"""The trainer's side of the fork server: one server per trainer process, and standby workers.

Server         the server process: started with the first group, shared by all, ended some seconds after the
               last one
WorkerProcess  a worker process: its channel, and how it is ended
Workers        the workers of one group: hands out the standby worker, and starts the next one
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any, Callable, Optional

from torchft.futures import _TIMEOUT_MANAGER
from torchft.process_group._errors import copied
from torchft.process_group.isolated import protocol
from torchft.process_group.isolated.channel import Channel
from torchft.process_group.isolated.devices import MakeSharing
from torchft.process_group.isolated.operation import WorkerFailed

# Long, because the server imports PyTorch before it forks the first worker.
_START_SEC = 60.0

# How many workers in a row may end before they answer.
_ATTEMPTS = 5

# How long the server outlives the last group, since another group often follows. An idle server costs only
# memory.
_LINGER = timedelta(seconds=10)

# How long a server may take to end, usually a few milliseconds, before it is killed.
_END_SEC = 1.0

# How long a killed server may take to end, on a very busy machine.
_KILL_SEC = 30.0

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from torchft.process_group.isolated.server import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class WorkerTimedOut(TimeoutError, RuntimeError):
    """The worker process did not answer in time."""


class Server:
    """The fork server. Its constructor does not wait for it; requests are queued until it is up."""

    def __init__(self) -> None:
        try:
            os.close(os.pidfd_open(os.getpid()))
        except (AttributeError, OSError) as e:
            raise RuntimeError(
                "isolated groups need Linux 5.3 or newer, and a Python that was built for it"
            ) from e
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The server ends when this socket is closed. PR_SET_PDEATHSIG would end it with the thread that
        # started it.
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        # RLock, here and below: a garbage collection may end a group on a thread that holds the lock.
        self._lock = threading.RLock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def spawn(self, settings: dict[str, Any], channel: int) -> None:
        """Asks for a worker.

        Args:
            settings: see `worker.main`.
            channel: descriptor of the worker's end of its channel.
        """
        with self._lock:
            # The server is still starting if the socket's buffer is full of requests.
            protocol.send(self._control, settings, (channel,), _START_SEC)

    def close(self) -> None:
        """Ends the server and all its workers."""
        with self._lock:
            self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SEC)
            return
        # For example, the server is still importing PyTorch.
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SEC)

    def forget(self) -> None:
        """In a forked child: the server belongs to the parent."""
        os.close(self._control.detach())
        self._process.returncode = 0


class _Servers:
    """The server of this process, as long as a group needs it."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._server: Optional[Server] = None
        self._retired: list[Server] = []
        self._users = 0
        self._end: Any = None

    def acquire(self) -> None:
        with self._lock:
            self._users += 1
            if self._end is not None:
                self._end.cancel()
                self._end = None
            self.get()

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            # At exit the server is closed before its last users, and no timer may be started then.
            if self._users == 0 and self._server is not None:
                # A garbage collection may release on a thread that has no device yet.
                self._end = _TIMEOUT_MANAGER.schedule(_LINGER, self._expire, on_device=False)

    def get(self) -> Server:
        with self._lock:
            if self._server is not None and not self._server.alive():
                self._server.close()
                self._server = None
            if self._server is None:
                self._server = Server()
            return self._server

    def retire(self, server: Server) -> None:
        """Takes no more workers from a server. It is not ended yet, because its workers may be in use."""
        with self._lock:
            if self._server is server:
                self._server = None
                self._retired.append(server)

    def _expire(self) -> None:
        if not self._users:
            self.close()

    def _taken(self) -> list[Server]:
        with self._lock:
            taken = [*self._retired, *([] if self._server is None else [self._server])]
            self._server, self._retired = None, []
        return taken

    def close(self) -> None:
        """Ends the server now."""
        for server in self._taken():
            server.close()

    def forget(self) -> None:
        self._lock = threading.RLock()  # a thread of the parent may hold the lock
        for server in self._taken():
            server.forget()
        self._reset()


servers = _Servers()
atexit.register(servers.close)
os.register_at_fork(after_in_child=servers.forget)


class WorkerProcess:
    """One worker's process.

    Args:
        settings: settings of the worker; see `worker.main`.
        name: name of the group, for errors.
        sharings: see `Channel`.
    """

    def __init__(self, settings: dict[str, Any], name: str, sharings: MakeSharing) -> None:
        self._name = name
        self.channel = channel = Channel(name, sharings)
        try:
            try:
                self._spawn(settings)
            except ConnectionError:
                # The server was killed a moment ago, and `alive` is True until the kernel has ended it.
                servers.retire(self._server)
                self._spawn(settings)
        except OSError as e:
            # For example, the fork server has ended at this moment.
            channel.close(WorkerFailed(f"{name}: the worker could not be started: {e}"))
        except BaseException as e:
            channel.close(RuntimeError(f"{name}: the worker could not be started: {e}"))
            raise
        finally:
            channel.theirs.close()

    def _spawn(self, settings: dict[str, Any]) -> None:
        self._server = servers.get()
        self._server.spawn(settings, self.channel.theirs.fileno())

    def ask(
        self, kind: str, timeout: float, what: str, *rest: Any, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Sends a request and waits for its answer.

        Args:
            timeout: in seconds.
            what: the requested action, for the error.
            rest: the rest of the request.
            meanwhile: called after the request was sent.

        Raises:
            WorkerFailed: the worker ended before it answered.
            WorkerTimedOut: the worker did not answer in time.
            Exception: the worker's own error.
        """
        op = self.channel.ask(kind, timeout, *rest)
        meanwhile()
        if not op.wait(timeout):
            raise WorkerTimedOut(
                f"{self._name}: the worker timed out after {timeout:g} seconds: it did not {what}"
            )
        if op.error is not None:
            raise copied(op.error)

    def blame_server(self) -> None:
        """Makes the next worker come from a new server, because this server may have stalled."""
        servers.retire(self._server)

    def end(self, error: Exception) -> None:
        """Kills the worker. Threads that wait for it get `error`. Does not wait for the end of the
        process.
        """
        self.channel.close(error)


class Workers:
    """The workers of a group.

    Args:
        make: starts a worker, without waiting for it.
        standby: whether a standby worker is kept.
    """

    def __init__(self, make: Callable[[], WorkerProcess], standby: bool) -> None:
        self._make = make
        self._standby = standby
        self._lock = threading.RLock()
        self._next: Optional[WorkerProcess] = None
        self._given: Optional[WorkerProcess] = None
        self._used = False

    def prepare(self) -> None:
        """Starts a server and a standby worker if there are none."""
        with self._lock:
            if not self._used:
                self._used = True
                servers.acquire()
            if self._standby and (self._next is None or self._next.channel.broken is not None):
                self._next = self._make()

    def first(self) -> WorkerProcess:
        """The worker that `take` will return; it is started if there is none."""
        self.prepare()
        with self._lock:
            if self._next is None or self._next.channel.broken is not None:
                self._next = self._make()
            return self._next

    def take(self) -> WorkerProcess:
        """The standby worker, or a new one. Only an answer shows that it is alive; see `started`."""
        self.prepare()
        with self._lock:
            worker, self._next = self._next, None
            if worker is None or worker.channel.broken is not None:
                worker = self._make()
            self._given = worker
        return worker

    def end(self, error: Exception) -> None:
        """Ends the worker that `take` returned last, if any."""
        with self._lock:
            worker, self._given = self._given, None
        if worker is not None:
            worker.end(error)

    def close(self) -> None:
        """Ends all workers. The server is not needed until `prepare` is called again."""
        self.end(RuntimeError("the group was shut down"))
        with self._lock:
            worker, self._next = self._next, None
            used, self._used = self._used, False
        if worker is not None:
            worker.end(RuntimeError("the group was shut down"))
        if used:
            servers.release()


def started(get: Callable[[], WorkerProcess]) -> WorkerProcess:
    """A worker that has answered. One that ends before it answers is replaced.

    Standby workers end with their server, and the trainer does not notice that at once. Only an answer shows
    that a worker is alive.

    Args:
        get: returns a worker; each call after the end of the previous worker returns a new one.

    Raises:
        Exception: the worker's own error; or too many workers have ended, or 60 s have passed.
    """
    deadline = time.monotonic() + _START_SEC
    for attempt in itertools.count(1):
        worker = get()
        try:
            worker.ask(protocol.CHECK, max(0.0, deadline - time.monotonic()), "start")
            return worker
        except WorkerFailed:
            if attempt == _ATTEMPTS:
                raise
        except WorkerTimedOut as e:
            worker.blame_server()
            worker.end(copied(e))
            raise
    raise AssertionError("unreachable: the loop has no end")
