"""The lighthouses of a job on this machine that agree by Raft."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torchft.launch import process_tree
from torchft.launch.lighthouse import LaunchError, command, free_port, last_line, url
from torchft.launch.restarts import restart_delay

_HOST = "127.0.0.1"
_START_SEC = 20.0
_LISTENS = b"Lighthouse listening on: "


def log_name(number: int) -> str:
    """The file to which a lighthouse writes; the first has number 1."""
    return f"lighthouse-{number}.log"


class _Lighthouse:
    """One process of the cluster, which is restarted with its state when it ends."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command = command
        self._log = log
        self._fruitless = 0  # consecutive lives in which it did not listen
        self._restart_at: float | None = None
        self._start()

    def _start(self) -> None:
        self._restart_at = None
        self._before = self._log.stat().st_size if self._log.exists() else 0
        self._process: subprocess.Popen[bytes] = process_tree.start(self._command, self._log)

    def listens(self) -> bool:
        """Whether its present life has begun to listen."""
        with self._log.open("rb") as log:
            log.seek(self._before)
            return _LISTENS in log.read()

    def look(self, now: float) -> None:
        """Restarts it if it has ended. LaunchError: it has ended several times before it listened."""
        if self._restart_at is None and (status := self._process.poll()) is not None:
            self._fruitless = 0 if self.listens() else self._fruitless + 1
            delay = restart_delay(self._fruitless)
            if delay is None:
                why = last_line(self._log, self._before)
                raise LaunchError(
                    f"a lighthouse ended with status {status} before it listened: {why}", self._log
                )
            self._restart_at = now + delay
        if self._restart_at is not None and now >= self._restart_at:
            self._start()

    def kill(self) -> None:
        process_tree.kill_tree(self._process)


@contextlib.contextmanager
def watched_cluster(folder: Path, options: list[str], count: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Runs ``count`` lighthouses that agree by Raft, on free ports of this machine, with logs and state in
    ``folder``.

    Gives their addresses, separated by commas, and a function that restarts each that has ended; it raises
    LaunchError if one ends several times before it listens. Their state is removed at the end.

    Raises:
        LaunchError: they did not start; the message says why.
    """
    ports = [free_port() for _ in range(count)]
    addresses = ",".join(url(_HOST, port) for port in ports)
    lighthouses: list[_Lighthouse] = []

    def check() -> None:
        for lighthouse in lighthouses:
            lighthouse.look(time.monotonic())

    # No later job continues this one: one in the same folder has other ports, and is refused its state.
    with tempfile.TemporaryDirectory(prefix="lighthouses-", dir=folder) as state:
        try:
            for number, port in enumerate(ports, 1):
                own = ["--cluster", addresses, *options]
                line = command(f"{_HOST}:{port}", str(Path(state) / str(number)), own)
                lighthouses.append(_Lighthouse(line, folder / log_name(number)))
            deadline = time.monotonic() + _START_SEC
            while not all(lighthouse.listens() for lighthouse in lighthouses):
                check()
                if time.monotonic() > deadline:
                    logs = [folder / log_name(number) for number in range(1, count + 1)]
                    raise LaunchError(
                        f"timed out after {_START_SEC:g} s: the lighthouses did not start", *logs
                    )
                time.sleep(0.05)
            yield addresses, check
        finally:
            for lighthouse in lighthouses:
                lighthouse.kill()
