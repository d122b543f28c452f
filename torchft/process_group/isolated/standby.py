"""The trainer's side of the fork server: one server per trainer process, and standby workers.

servers   the server process: started with the first group, shared by all, ended with this process
Workers   the workers of one group: hands out the standby worker, and starts the next one
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
from typing import TYPE_CHECKING, Any, Callable, Optional

import torch

from torchft.process_group._errors import copied
from torchft.process_group.isolated import protocol
from torchft.process_group.isolated.channel import Channel
from torchft.process_group.isolated.operation import WorkerFailed, WorkerTimedOut
from torchft.utils import current_device

if TYPE_CHECKING:
    from torchft.process_group.isolated.parent import ProcessGroupBaby

# Long, because the server imports PyTorch before it forks the first worker.
_START_SEC = 60.0

# How many workers in a row may end before they answer.
_ATTEMPTS = 5

# How long a killed server may take to end, on a very busy machine.
_KILL_SEC = 30.0

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from torchft.process_group.isolated.server import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class _Server:
    """A fork server. Its constructor does not wait for it; requests are queued until it is up."""

    def __init__(self) -> None:
        try:
            os.close(os.pidfd_open(os.getpid()))
        except (AttributeError, OSError) as e:
            raise RuntimeError(
                "isolated groups need Linux 5.3 or newer, and a Python that was built for it"
            ) from e
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The server ends when this socket is closed; with PR_SET_PDEATHSIG it would with its starting thread.
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )

    def kill(self) -> None:
        """Ends the server, and with it all its workers."""
        self.control.close()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_KILL_SEC)


class Servers:
    """The server of this process."""

    def __init__(self) -> None:
        # RLock, here and below: a garbage collection may end a group on a thread that holds the lock.
        self._lock = threading.RLock()
        self._server: Optional[_Server] = None
        self._retired: list[_Server] = []

    def get(self) -> _Server:
        """The server, which is started if there is none."""
        with self._lock:
            if self._server is not None and self._server.process.poll() is not None:
                self._server.control.close()
                self._server = None
            if self._server is None:
                self._server = _Server()
            return self._server

    def spawn(self, settings: dict[str, Any], channel: Channel) -> None:
        """Asks for a worker with `settings` (`worker.main`). OSError: the server has ended just now."""
        with self._lock:
            channel.server = server = self.get()
            try:
                protocol.send(server.control, settings, (channel.theirs.fileno(),))
            except ConnectionError:
                self.retire(server)
                raise

    def retire(self, server: Any) -> None:
        """Takes no more workers from a server. It is not ended yet, because its workers may be in use."""
        with self._lock:
            if self._server is server:
                self._server = None
                self._retired.append(server)

    def close(self) -> None:
        """Ends the server now."""
        for server in self._taken():
            server.kill()

    def forget(self) -> None:
        self._lock = threading.RLock()  # a thread of the parent may hold the lock
        for server in self._taken():
            server.control.close()
            server.process.returncode = 0  # it belongs to the parent

    def _taken(self) -> list[_Server]:
        with self._lock:
            taken = [*self._retired, *([] if self._server is None else [self._server])]
            self._server, self._retired = None, []
        return taken


servers = Servers()
atexit.register(servers.close)
os.register_at_fork(after_in_child=servers.forget)


class Workers:
    """The workers of a group.

    Args:
        group: its class. Not the group, which a reference from here would keep alive.
        standby: whether the next worker is kept ready.
        context: whether that one also has a context on the current device.

    Attributes:
        given: the worker that `take` returned last; None after `end`.
    """

    def __init__(self, group: type[ProcessGroupBaby], standby: bool, context: bool) -> None:
        self._group = group
        self._standby = standby
        self._context = context
        self._lock = threading.RLock()
        self._next: Optional[Channel] = None
        self.given: Optional[Channel] = None

    def _start(self) -> Channel:
        """Starts a worker, without waiting for it. Returns the trainer's end of its channel."""
        group = self._group
        if group.__module__ == "__main__":
            raise ValueError(
                f"{group.__qualname__} is defined in __main__, which a worker does not import: put it into "
                "a module"
            )
        settings = {
            "group": f"{group.__module__}:{group.__qualname__}",
            "path": sys.path,
            "pytorch": str(torch.__version__),
            "sharing": group._sharing,
            "prepare": (current_device() or 0) if self._context else None,
        }
        channel = Channel(group._name, group._sharing, group._queues)
        try:
            servers.spawn(settings, channel)
        except OSError as e:
            channel.close(WorkerFailed(f"{group._name}: the worker could not be started: {e}"))
        except BaseException as e:
            channel.close(RuntimeError(f"{group._name}: the worker could not be started: {e}"))
            raise
        finally:
            channel.theirs.close()
        return channel

    def prepare(self) -> None:
        """Starts a standby worker, or at least the server, if there is none."""
        if self._standby:
            self.first()
        else:
            servers.get()

    def first(self) -> Channel:
        """The worker that `take` will return; it is started if there is none."""
        with self._lock:
            if self._next is None or self._next.broken is not None:
                self._next = self._start()
            return self._next

    def take(self) -> Channel:
        """The standby worker, or a new one. Only an answer shows that it is alive; see `started`."""
        with self._lock:
            self.given = self.first()
            self._next = None
            return self.given

    def end(self, error: Exception) -> None:
        """Ends the worker in use, if any."""
        with self._lock:
            worker, self.given = self.given, None
        if worker is not None:
            worker.close(error)

    def close(self) -> None:
        """Ends all workers."""
        error = RuntimeError("the group was shut down")
        self.end(error)
        with self._lock:
            worker, self._next = self._next, None
        if worker is not None:
            worker.close(error)


def started(get: Callable[[], Channel]) -> Channel:
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
            servers.retire(worker.server)  # it may have stalled
            worker.close(copied(e))
            raise
    raise AssertionError("unreachable: the loop has no end")
