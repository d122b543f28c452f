"""The lighthouses of a job on this machine."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torchft._lighthouse_http import DEFAULT_PORT
from torchft._security import TLS_CERT_ENV
from torchft.addresses import localhost
from torchft.launch import process_tree
from torchft.launch.restarts import restart_delay

_HOST = "127.0.0.1"
_START_SEC = 20.0  # the command starts within 0.3 s on an idle machine


class LaunchError(Exception):
    """A launch failed; `logs` have the details, and `status` is the exit status of the command."""

    status = 1

    def __init__(self, message: str, *logs: Path, status: int | None = None) -> None:
        super().__init__(message)
        self.logs = logs
        self.status = self.status if status is None else status


class LocalLighthouse:
    """A lighthouse, whose process is started again with its state when it ends.

    Args:
        bind: ``host:port`` on which it listens; another job may write to the same log, but has other ports.
        log: file to which its output is appended.
        state: folder of its state.
        options: further options.
    """

    def __init__(self, bind: str, log: Path, state: Path, options: Sequence[str]) -> None:
        self.log = log
        self._command = command(bind, str(state), options)
        port = re.escape(bind.rpartition(":")[2])
        self._says = re.compile(rf"^Lighthouse listening on: .*:{port}$", re.MULTILINE)
        self._listened = False
        self._fruitless = 0  # consecutive lives in which it did not listen
        self._restart_at: float | None = None
        self._start()

    def _start(self) -> None:
        self._restart_at = None
        self._before = self.log.stat().st_size if self.log.exists() else 0
        self._process: subprocess.Popen[bytes] = process_tree.start(self._command, self.log)

    def _text(self) -> str:
        """Its output since its last start."""
        with self.log.open("rb") as lines:
            lines.seek(self._before)
            return lines.read().decode(errors="replace")

    def listens(self) -> bool:
        """Whether its present life has begun to listen."""
        listens = self._says.search(self._text()) is not None
        self._listened = self._listened or listens
        return listens

    def look(self) -> None:
        """Starts it again if it has ended. LaunchError: it has never listened, or has ended several times
        before it listened.
        """
        now = time.monotonic()
        if self._restart_at is None and (status := self._process.poll()) is not None:
            self._fruitless = 0 if self.listens() else self._fruitless + 1
            delay = restart_delay(self._fruitless)
            if delay is None or not self._listened:
                said = (self._text().strip().splitlines() or ["it says nothing"])[-1]
                why = said.removeprefix("torchft_lighthouse: ")
                raise LaunchError(
                    f"a lighthouse ended with status {status} before it listened: {why}", self.log
                )
            self._restart_at = now + delay
        if self._restart_at is not None and now >= self._restart_at:
            self._start()

    def kill(self) -> None:
        process_tree.kill_tree(self._process)


@contextlib.contextmanager
def lighthouses(
    folder: Path, options: Sequence[str], count: int = 1, bind: str | None = None
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Runs a lighthouse, or several on free ports that agree by Raft, with logs and state in a folder.

    Gives their addresses, separated by commas, and a function that starts each again that has ended; it
    raises LaunchError if one ends several times before it listens. Their state is removed at the end.

    Args:
        folder: the folder.
        options: of each lighthouse.
        count: number of lighthouses.
        bind: ``host:port`` of a single one; port 0 takes a free one. Default: where ``torchft status`` looks
            by default, or a free port if that one is in use.

    Raises:
        LaunchError: they did not start; the message says why, for example that the address is in use.
    """
    # No later job continues this one: one in the same folder has other ports, and is refused its state.
    with (
        tempfile.TemporaryDirectory(prefix="lighthouses-", dir=folder) as state,
        contextlib.ExitStack() as stack,
    ):

        def start(*binds: str) -> str:
            addresses = ",".join(map(_url, binds))
            own = ["--cluster", addresses, *options] if len(binds) > 1 else options
            for number, each in enumerate(binds, 1):
                log = folder / log_name(number, len(binds))
                running.append(LocalLighthouse(each, log, Path(state) / str(number), own))
                stack.callback(running[-1].kill)
            deadline = time.monotonic() + _START_SEC
            while not all(one.listens() for one in running):
                check()
                if time.monotonic() > deadline:
                    late = f"timed out after {_START_SEC:g} s: the lighthouses did not start"
                    raise LaunchError(late, *(one.log for one in running))
                time.sleep(0.01)
            return addresses

        def check() -> None:
            for one in running:
                one.look()

        running: list[LocalLighthouse] = []
        if count > 1 or bind is not None:
            bind = bind or f"{_HOST}:0"
            addresses = start(*(_with_port(bind) for _ in range(count)))
        else:
            try:
                addresses = start(f"{_HOST}:{DEFAULT_PORT}")
            except LaunchError:
                running.pop().kill()
                addresses = start(f"{_HOST}:{free_port()}")
        yield addresses, check


def log_name(number: int, count: int) -> str:
    """The file to which a lighthouse writes; the first of several has number 1."""
    return "lighthouse.log" if count == 1 else f"lighthouse-{number}.log"


def _with_port(bind: str) -> str:
    """An address to listen on, with a free port if it has port 0."""
    return f"{bind.removesuffix(':0')}:{free_port()}" if bind.endswith(":0") else bind


def _url(bind: str) -> str:
    """The address of a lighthouse of this job: https if TORCHFT_TLS_CERT is set."""
    host, _, port = bind.rpartition(":")
    host = localhost() if host in ("", "0.0.0.0", "[::]") else host
    return f"{'https' if os.environ.get(TLS_CERT_ENV) else 'http'}://{host}:{port}"


def command(bind: str, state_dir: str, options: Sequence[str]) -> list[str]:
    """The command line of a lighthouse."""
    # Not the installed command, which may not be in PATH or may belong to another environment.
    main = process_tree.python("import torchft._torchft as t; t.lighthouse_main()")
    return [*main, "--bind", bind, "--state_dir", state_dir, *options]


# Below Linux's range for outgoing connections (32768 and above). Otherwise such a connection could get a port
# that `free_port` has returned, in the seconds until a server listens on it.
_PORTS = range(20000, 29000)
_given: set[int] = set()


def free_port() -> int:
    """A free port that was not returned before."""
    for candidate in random.sample(_PORTS, 200):
        if candidate not in _given:
            with contextlib.suppress(OSError):
                _given.add(_listenable(candidate))
                return candidate
    return _listenable(0)


def _listenable(port: int) -> int:
    with socket.create_server(("", port)) as free:
        return int(free.getsockname()[1])
