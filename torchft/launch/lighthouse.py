"""The lighthouse of a job on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from torchft._security import TLS_CERT_ENV
from torchft.launch import process_tree

# The command starts within 0.3 s; a machine that is busy with other things takes longer.
_START_SEC = 20.0


class LaunchError(Exception):
    """What did not work, and the logs that say more."""

    def __init__(self, message: str, *logs: Path) -> None:
        super().__init__(message)
        self.logs = logs


@contextlib.contextmanager
def lighthouse(log: Path, options: list[str], bind: str = "127.0.0.1:0") -> Iterator[str]:
    """Runs a lighthouse, and gives its address, ``http://host:port``, or ``https://`` if TORCHFT_TLS_CERT is set.

    ``bind`` is ``host:port``; port 0 takes a free one.

    Raises:
        LaunchError: it did not start.
    """
    host, _, port = bind.rpartition(":")
    if port == "0":
        port = str(free_port(host.strip("[]")))
    # not the installed command: it may be missing from PATH, or belong to another environment
    main = "from torchft._torchft import lighthouse_main; lighthouse_main()"
    command = [sys.executable, "-c", main, "--bind", f"{host}:{port}", *options]
    process = process_tree.start(command, log)
    try:
        deadline = time.monotonic() + _START_SEC
        while not _answers(host.strip("[]"), int(port)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise LaunchError(f"the lighthouse did not start on {host}:{port}", log)
            time.sleep(0.05)
        yield f"{'https' if os.environ.get(TLS_CERT_ENV) else 'http'}://{host}:{port}"
    finally:
        process_tree.kill_tree(process)


def free_port(host: str = "") -> int:
    """A TCP port that nobody listens on now."""
    with socket.create_server((host, 0)) as free:
        return int(free.getsockname()[1])


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True
