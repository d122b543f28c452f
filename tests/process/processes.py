"""Child processes for tests and benchmarks: starts, observes and kills them, and leaves none behind.

A `Job` owns its children. Every wait has a deadline. If a child ends unexpectedly, the wait ends early with
an error that contains the child's stderr.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from forkserver import Forked, ForkServer

HERE = Path(__file__).resolve().parent
Event = dict[str, Any]
T = TypeVar("T")
# Importing torch takes seconds, and much longer while tests share a small machine.
START_TIMEOUT_S = 120


class JobFailed(AssertionError):
    """A child failed or was too slow; the message contains the end of its stderr."""


def ours_path() -> Path:
    """Return the entry for PYTHONPATH that selects the torchft that this process would import, without
    importing it.
    """
    spec = importlib.util.find_spec("torchft")
    if spec is None or spec.origin is None:
        raise JobFailed("torchft is not importable here: install it (pip install .) or set PYTHONPATH")
    return Path(spec.origin).resolve().parent.parent


# Environment variables that change the behavior of torchft, its runtime or PyTorch.
_SETTINGS = ("TORCHFT_", "TORCHELASTIC_", "RUST_", "GODEBUG", "GOGC", "GOMAXPROCS", "GOMEMLIMIT")
_SETTINGS += ("GRPC_", "OTEL_", "MALLOC_", "OMP_", "MKL_")
# scikit-learn sets two of these in a process that imports it.
_SETTINGS += ("KMP_",)
# The folder of the test's snapshots, without which children would use that of the user.
_MEMORY = "TORCHFT_SNAPSHOT_MEMORY"
# Settings for each child: unbuffered output, few threads, and 1 s in place of 5 s for a lost answer of the
# name server, which PyTorch's stores ask at each connection.
_CHILD = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}


def clean_environment(path: Path) -> dict[str, str]:
    """Return this process's environment without the variables of `_SETTINGS`, and with the torchft below
    `path` first on PYTHONPATH.
    """
    kept = {
        name: value for name, value in os.environ.items() if name == _MEMORY or not name.startswith(_SETTINGS)
    }
    return {**kept, "PYTHONPATH": os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])}


def child_environment(path: Path, env: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child with the torchft below `path`, and with the additional variables of
    `env`.
    """
    return {**clean_environment(path), **_CHILD, **(env or {})}


# Set by tests. Benchmarks do not set it: their children start as those of users do.
fork_server: ForkServer | None = None


@contextlib.contextmanager
def with_fork_server() -> Iterator[None]:
    """Makes children fork from a process that has imported PyTorch, unless FORK_SERVER=0."""
    global fork_server
    if os.environ.get("FORK_SERVER") == "0" or sys.platform != "linux":
        yield
        return
    from forkserver import ForkServer

    server = fork_server = ForkServer(child_environment(HERE))
    yield
    fork_server = None
    server.close()


_given_ports: set[int] = set()


def free_port() -> int:
    """Return a free port, outside the range of ports of outgoing connections.

    No port is returned twice, because the process that got it may listen only after it has imported torch.
    """
    for _ in range(100):
        port = random.randint(20000, 29000)
        if port in _given_ports:
            continue
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given_ports.add(port)
        return port
    raise JobFailed("no free port between 20000 and 29000")


def processes_of(folder: Path) -> list[int]:
    """Return the processes with XDG_RUNTIME_DIR=`folder` in their environment: a command and its
    descendants.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        # The process has ended in the meantime, or belongs to another user.
        with contextlib.suppress(OSError):
            if f"XDG_RUNTIME_DIR={folder}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


class Child:
    """One Python process. Its JSON events are collected in `events`; all other output goes to its log."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes] | Forked,
        log: IO[bytes],
        changed: threading.Condition,
    ) -> None:
        self.name = name
        self.events: list[Event] = []
        self.expected_to_live = True
        self._log = log
        self._changed = changed
        self._process = process
        self._reader = threading.Thread(target=self._read, name=f"read-{name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def send(self, **command: Any) -> None:
        """Send one command. If the child has ended, the next wait notices it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def of(self, event: str) -> list[Event]:
        """Return the events of this name, oldest first."""
        return [e for e in list(self.events) if e.get("event") == event]

    def kill(self) -> None:
        """Send SIGKILL to the child and all its descendants."""
        self.expected_to_live = False
        self.send_signal(signal.SIGKILL)
        self._process.wait(timeout=10)

    def close(self) -> None:
        """Kill remaining processes and close the pipes."""
        self.kill()
        self._reader.join(timeout=10)
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()

    def log_tail(self, lines: int) -> str:
        """Return the end of what it wrote to stderr, long lines cut."""
        return "\n".join(line[:300] for line in self.log().splitlines()[-lines:])

    def log(self) -> str:
        """Return all that it wrote to stderr."""
        return Path(self._log.name).read_text(errors="replace")

    def send_signal(self, number: int) -> None:
        """Send a signal to the child and all its descendants, and wait for nothing."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            with self._changed:
                if isinstance(event, dict):
                    event.setdefault("received", time.monotonic())
                    self.events.append(event)
                else:
                    self._log.write(line)
                    self._log.flush()
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


class Job:
    """The children of one test or measurement. Leaving the `with` block kills all of them."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._changed = threading.Condition()
        # The children's working directories, and their logs.
        self._folder = tempfile.TemporaryDirectory(prefix="torchft-job-")

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the children."""
        for child in self.children:
            child.close()
        self._folder.cleanup()

    def python(
        self,
        name: str,
        script: Path,
        *args: object,
        path: Path,
        env: dict[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> Child:
        """Start `python SCRIPT ARGS` with the torchft below `path`, from the fork server if there is one."""
        argv = [str(script), *map(str, args)]
        full = child_environment(path, env)
        if fork_server is None or options or not fork_server.can_start(full):
            return self.start(name, [sys.executable, *options, *argv], path=path, env=env)
        log = self._log(name)
        return self._add(name, fork_server.start(argv, full, self._folder.name, log), log)

    def start(
        self, name: str, argv: Sequence[str | Path], *, path: Path, env: dict[str, str] | None = None
    ) -> Child:
        """Start any command with the torchft below `path`, never from the fork server."""
        log = self._log(name)
        # A new session, so that `kill` also kills its children, and Ctrl-C reaches only the parent.
        process = subprocess.Popen(
            [str(a) for a in argv],
            env=child_environment(path, env),
            cwd=self._folder.name,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        return self._add(name, process, log)

    def lighthouse(self, path: Path, **options: int) -> tuple[Child, str]:
        """Start a lighthouse of the torchft below `path`; return it and its address."""
        args = [f"--{key}={value}" for key, value in options.items()]
        child = self.python("lighthouse", HERE / "lighthouse_host.py", *args, path=path)
        event = self.wait(lambda: child.of("listening"), START_TIMEOUT_S, "the lighthouse listens")[0]
        return child, event["address"]

    def wait(self, condition: Callable[[], T], timeout: float, what: str) -> T:
        """Wait until `condition()` is true and return it; it is evaluated whenever a child writes an event.

        Raises:
            JobFailed: after `timeout` seconds, or when a child ended unexpectedly.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                if result := condition():
                    return result
                self._check_alive(what)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise JobFailed(f"{timeout:g} s passed before: {what}\n{self.report()}")
                # A child can end without an event, so the condition is evaluated at least four times a
                # second.
                self._changed.wait(min(left, 0.25))

    def wait_exit(self, children: Sequence[Child], timeout: float) -> None:
        """Wait until these children have ended by themselves, with exit status 0."""
        for child in children:
            child.expected_to_live = False
        self.wait(lambda: all(c.returncode is not None for c in children), timeout, "the children end")
        bad = [c for c in children if c.returncode != 0]
        if bad:
            raise JobFailed(f"{bad[0].name} ended with {bad[0].returncode}\n{self.report()}")

    def report(self) -> str:
        """Return the last output of every child."""
        parts = []
        for child in self.children:
            state = "running" if child.returncode is None else f"exit {child.returncode}"
            last = "\n".join(json.dumps(e)[:300] for e in child.events[-3:])
            parts.append(f"--- {child.name} ({state})\n{last}\n{child.log_tail(40)}")
        return "\n".join(parts)

    def _log(self, name: str) -> IO[bytes]:
        return open(Path(self._folder.name) / f"{len(self.children)}-{name}.log", "wb")

    def _add(self, name: str, process: subprocess.Popen[bytes] | Forked, log: IO[bytes]) -> Child:
        child = Child(name, process, log, self._changed)
        self.children.append(child)
        return child

    def _check_alive(self, what: str) -> None:
        for child in self.children:
            code = child.returncode
            if child.expected_to_live and code is not None:
                raise JobFailed(f"{child.name} ended with {code} before: {what}\n{self.report()}")
