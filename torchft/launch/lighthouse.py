"""The lighthouse of a job on this machine."""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torchft._lighthouse_http import DEFAULT_PORT
from torchft._security import TLS_CERT_ENV
from torchft.addresses import localhost
from torchft.launch import process_tree

# The command starts within 0.3 s on an idle machine.
_START_SEC = 20.0


class LaunchError(Exception):
    """A launch failed; `logs` have the details, and `status` is the exit status of the command."""

    status = 1

    def __init__(self, message: str, *logs: Path, status: int | None = None) -> None:
        super().__init__(message)
        self.logs = logs
        self.status = self.status if status is None else status


@contextlib.contextmanager
def lighthouse(log: Path, options: list[str], bind: str = "127.0.0.1:0") -> Iterator[str]:
    """Runs a lighthouse, and gives its address, ``http://host:port``, or ``https://`` if TORCHFT_TLS_CERT is
    set.

    ``bind`` is ``host:port``; port 0 takes a free one.

    Raises:
        LaunchError: it did not start; the message says why, for example that the address is in use.
    """
    with watched_lighthouse(log, options, bind) as (address, _):
        yield address


@contextlib.contextmanager
def watched_lighthouse(
    log: Path, options: list[str], bind: str | None
) -> Iterator[tuple[str, Callable[[], None]]]:
    """As :func:`lighthouse`; also gives a function that raises LaunchError if the lighthouse has ended.

    Without ``bind`` it listens where ``torchft status`` looks by default, or on a free port if that one is in
    use.
    """
    try:
        process, port = _start(log, options, bind or f"127.0.0.1:{DEFAULT_PORT}")
    except LaunchError:
        if bind:
            raise
        process, port = _start(log, options, "127.0.0.1:0")

    def check() -> None:
        if process.poll() is not None:
            raise LaunchError(f"the lighthouse ended with status {process.returncode}", log)

    try:
        host = bind.rpartition(":")[0] if bind else "127.0.0.1"
        host = localhost() if host in ("", "0.0.0.0", "[::]") else host
        yield url(host, port), check
    finally:
        process_tree.kill_tree(process)


def url(host: str, port: int) -> str:
    """The address of a lighthouse of this job: https if TORCHFT_TLS_CERT is set."""
    return f"{'https' if os.environ.get(TLS_CERT_ENV) else 'http'}://{host}:{port}"


def command(bind: str, state_dir: str, options: list[str]) -> list[str]:
    """The command line of a lighthouse."""
    # Not the installed command, which may not be in PATH or may belong to another environment; and not the
    # torchft of the current directory, which may be a folder of sources.
    main = f"import sys; sys.path[:] = {sys.path!r}; import torchft._torchft as t; t.lighthouse_main()"
    return [sys.executable, "-c", main, "--bind", bind, "--state_dir", state_dir, *options]


def _start(log: Path, options: list[str], bind: str) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a lighthouse, and waits until it listens. Returns its process and its port."""
    before = log.stat().st_size if log.exists() else 0
    # No state on disk: the lighthouse ends with the job, and no later one continues it.
    process = process_tree.start(command(bind, "", options), log, stdout=subprocess.PIPE)
    try:
        return process, _port_of(process, bind, log, before)
    except BaseException:
        process_tree.kill_tree(process)
        raise


def _port_of(process: subprocess.Popen[bytes], bind: str, log: Path, before: int) -> int:
    """The port of the lighthouse, from its own output: another job may write to the same log, and the
    requested port may belong to another process.
    """
    assert process.stdout is not None
    deadline = time.monotonic() + _START_SEC
    text = b""
    with process.stdout as output:
        while not (found := re.search(rb"^Lighthouse listening on: .*:(\d+)\n", text, re.MULTILINE)):
            if not select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise LaunchError(f"the lighthouse did not start on {bind} within {_START_SEC:g} s", log)
            more = os.read(output.fileno(), 4096)
            if not more:
                raise LaunchError(f"the lighthouse did not start: {last_line(log, before)}", log)
            text += more
    return int(found[1])


def last_line(log: Path, before: int) -> str:
    """The last line that a lighthouse wrote, from this position of its log on."""
    with log.open("rb") as lines:
        lines.seek(before)
        text = lines.read().decode(errors="replace")
    return (text.strip().splitlines() or ["it says nothing"])[-1].removeprefix("torchft_lighthouse: ")


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
