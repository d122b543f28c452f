"""The trainer's side of the fork server: one server per trainer process, and standby workers.

Server    the server process: started with the first group, shared by all groups, ended some seconds after the last one
Worker    a worker process: its channel, and how it is ended
Workers   the workers of one group: hands out the standby worker, and starts the next one
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import select
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
from torchft.process_group.isolated.messages import send
from torchft.process_group.isolated.operation import WorkerFailed

# Long, because the server imports PyTorch before it forks the first worker.
_START_SEC = 60.0

# How many workers in a row may end before they answer.
_ATTEMPTS = 5

# How long the server outlives the last group, since another group often follows. An idle server costs only memory.
_LINGER = timedelta(seconds=10)

# How long a server may take to end, usually a few milliseconds, before it is killed.
_END_SEC = 1.0

# A killed worker that has not ended after this time hangs in a driver; the memory that it shares then stays allocated
# forever.
_REAP_SEC = 30.0

# How long an abort waits for the end of the worker, which takes some ten milliseconds.
_STOP_SEC = 0.08

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from torchft.process_group.isolated.server import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class WorkerTimedOut(TimeoutError, RuntimeError):
    """The worker process did not answer in time."""


class Server:
    """The fork server. Its constructor does not wait for it; requests are queued until it is up."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise RuntimeError(f"isolated groups need Linux, not {sys.platform}")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The server ends when this socket is closed. PR_SET_PDEATHSIG would end it with the thread that started it.
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self._numbers = itertools.count()
        # RLock, here and below: a garbage collection may end a group on a thread that holds the lock.
        self._lock = threading.RLock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def spawn(self, message: dict[str, Any], requests: int, answers: int) -> tuple[int, int]:
        """Asks for a worker.

        Returns:
            The worker's number, for `kill`, and a descriptor that reaches end of file when the worker has ended.
        """
        number = next(self._numbers)
        ended, theirs = os.pipe()
        try:
            self._send({"spawn": number, **message}, (requests, answers, theirs))
        except BaseException:
            os.close(ended)
            raise
        finally:
            os.close(theirs)
        return number, ended

    def kill(self, number: int) -> None:
        # If the server has ended, so have its workers.
        with contextlib.suppress(OSError):
            self._send({"kill": number}, ())

    def _send(self, message: dict[str, Any], descriptors: tuple[int, ...]) -> None:
        data = json.dumps(message).encode()
        with self._lock:
            while True:
                try:
                    send(self._control, data, descriptors)
                    return
                except BlockingIOError:
                    # The server is still starting, and the socket's buffer is full of requests.
                    poll = select.poll()
                    poll.register(self._control, select.POLLOUT)
                    if not poll.poll(60_000):
                        raise OSError("the server of isolated workers does not respond") from None

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
            self._process.wait(_END_SEC)

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
            self._alive()

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            # At exit the server is closed before its last users, and no timer may be started then.
            if self._users == 0 and self._server is not None:
                # A garbage collection may release on a thread that has no device yet.
                self._end = _TIMEOUT_MANAGER.schedule(_LINGER, self._expire, on_device=False)

    def get(self) -> Server:
        with self._lock:
            return self._alive()

    def retire(self, server: Server) -> None:
        """Takes no more workers from a server. It is not ended yet, because its workers may be in use."""
        with self._lock:
            if self._server is server:
                self._server = None
                self._retired.append(server)

    def _alive(self) -> Server:
        if self._server is not None and not self._server.alive():
            self._server.close()
            self._server = None
        if self._server is None:
            self._server = Server()
        return self._server

    def _expire(self) -> None:
        with self._lock:
            servers = [] if self._users else self._all()
        for server in servers:
            server.close()

    def close(self) -> None:
        """Ends the server now."""
        with self._lock:
            servers = self._all()
        for server in servers:
            server.close()

    def _all(self) -> list[Server]:
        servers, self._retired = self._retired, []
        if self._server is not None:
            servers.append(self._server)
            self._server = None
        return servers

    def forget(self) -> None:
        for server in self._all():
            server.forget()
        self._reset()


servers = _Servers()
atexit.register(servers.close)
os.register_at_fork(after_in_child=servers.forget)


class Worker:
    """One worker's process.

    Args:
        message: settings of the worker; see `worker.main`.
        name: name of the group, for errors.
        sharings: see `Channel`.
    """

    def __init__(
        self,
        message: dict[str, Any],
        name: str,
        sharings: MakeSharing,
    ) -> None:
        self._name = name
        self._number, self._ended = -1, -1
        self.channel = channel = Channel(name, sharings, self._broken, self._poll_end)
        requests, answers = channel.wire.theirs
        try:
            try:
                self._spawn(message, requests.fileno(), answers)
            except ConnectionError:
                # The server was killed a moment ago, and `alive` is True until the kernel has ended it.
                servers.retire(self._server)
                self._spawn(message, requests.fileno(), answers)
        except OSError as e:
            # For example, the fork server has ended at this moment.
            channel.close(WorkerFailed(f"{name}: the worker could not be started: {e}"))
        except BaseException as e:
            channel.close(RuntimeError(f"{name}: the worker could not be started: {e}"))
            raise
        finally:
            requests.close()
            os.close(answers)

    def _spawn(self, message: dict[str, Any], requests: int, answers: int) -> None:
        self._server = servers.get()
        self._number, self._ended = self._server.spawn(message, requests, answers)

    def ask(
        self, kind: int, rest: bytes, timeout: float, what: str, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Sends a request and waits for its answer.

        Args:
            timeout: in seconds.
            what: the requested action, for the error.
            meanwhile: called after the request was sent.

        Raises:
            WorkerFailed: the worker ended before it answered.
            WorkerTimedOut: the worker did not answer in time.
            Exception: the worker's own error.
        """
        op = self.channel.start(kind, (rest,), [], None, timeout)
        meanwhile()
        if not self.channel.wait(op, timeout):
            raise WorkerTimedOut(f"{self._name}: the worker timed out after {timeout:g} seconds: it did not {what}")
        if op.error is not None:
            raise copied(op.error)

    def blame_server(self) -> None:
        """Makes the next worker come from a new server, because this server may have stalled."""
        servers.retire(self._server)

    def _broken(self) -> None:
        if self._number < 0:
            return
        self._server.kill(self._number)
        # An abort returns only after the worker has ended, since until then the worker may write into shared memory.
        # With a device that can take long, and the memory is kept until then.
        if not self.channel.devices.any:
            self.channel.join(_STOP_SEC)

    def _poll_end(self) -> bool:
        """Waits for the end of a worker that was killed; False if it does not end."""
        if self._number < 0:
            return True
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        ended = bool(poll.poll(1000 * _REAP_SEC))
        os.close(self._ended)
        return ended

    def end(self, error: Exception) -> None:
        """Kills the worker. Threads that wait for it get `error`. Does not wait for the end of the process."""
        self.channel.close(error)


class Workers:
    """The workers of a group.

    Args:
        make: starts a worker, without waiting for it.
        standby: whether a standby worker is kept.
    """

    def __init__(self, make: Callable[[], Worker], standby: bool) -> None:
        self._make = make
        self._standby = standby
        self._lock = threading.RLock()
        self._next: Optional[Worker] = None
        self._given: Optional[Worker] = None
        self._used = False

    def prepare(self) -> None:
        """Starts a server and a standby worker if there are none."""
        with self._lock:
            if not self._used:
                self._used = True
                servers.acquire()
            if self._standby and (self._next is None or self._next.channel.broken is not None):
                self._next = self._make()

    def first(self) -> Worker:
        """The worker that `take` will return; it is started if there is none."""
        self.prepare()
        with self._lock:
            if self._next is None or self._next.channel.broken is not None:
                self._next = self._make()
            return self._next

    def take(self) -> Worker:
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


def started(get: Callable[[], Worker]) -> Worker:
    """A worker that has answered. One that ends before it answers is replaced.

    Standby workers end with their server, and the trainer does not notice that at once. Only an answer shows that a
    worker is alive.

    Args:
        get: returns a worker; each call after the end of the previous worker returns a new one.

    Raises:
        Exception: the worker's own error; or too many workers have ended, or 60 s have passed.
    """
    deadline = time.monotonic() + _START_SEC
    for attempt in itertools.count(1):
        worker = get()
        try:
            worker.ask(protocol.PING, b"", max(0.0, deadline - time.monotonic()), "start")
            return worker
        except WorkerFailed:
            if attempt == _ATTEMPTS:
                raise
        except WorkerTimedOut as e:
            worker.blame_server()
            worker.end(copied(e))
            raise
    raise AssertionError("unreachable: the loop has no end")
