"""The control socket by which another process of the same user changes a running job (`torchft scale`).

Each job has a Unix socket in a directory that only this user can access. Request and answer are a line of
JSON each.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchft.launch.job import LocalJob

# Seconds; the job calls `look` ten times per second, but may wait for its lighthouse in between.
_ANSWER_SEC = 20.0
_REQUEST_SEC = 1.0  # seconds; a client sends its request right after it has connected
_LONGEST = 4096  # bytes of a request
AUTO = "auto"


class Control:
    """Answers requests of other processes. The loop of the job calls `look` repeatedly."""

    def __init__(self) -> None:
        self.path = _folder() / f"{os.getpid()}.sock"
        self.path.unlink(missing_ok=True)  # left by an earlier process with the same process id
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short(self.path) as path:
                self._socket.bind(path)
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def look(self, job: LocalJob) -> None:
        """Answers one request, if there is one. Returns quickly."""
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_REQUEST_SEC)
            connection.sendall(json.dumps(_answer(connection.recv(_LONGEST), job)).encode() + b"\n")

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)


def _answer(request: bytes, job: LocalJob) -> dict[str, str]:
    try:
        replicas = json.loads(request)["replicas"]
        if replicas == AUTO and job.follow_again is not None:
            job.follow_again()
            return {"done": "the number of replica groups follows the speed of the job"}
        if replicas == AUTO:
            raise ValueError(
                f"{AUTO!r} is not allowed for a job without --scale auto; allowed: a whole number"
            )
        if not isinstance(replicas, int):
            raise ValueError(f"replicas={replicas!r} is not allowed; allowed: a whole number")
        job.scale(replicas)
    except (ValueError, KeyError, TypeError) as e:
        return {"error": str(e)}
    return {"done": f"{replicas} replica groups"}


def scale(replicas: int | str, pid: int | None = None) -> str:
    """Sets the number of groups of the job of process ``pid``, or of this user's only job; AUTO: lets the job
    choose it again.

    Raises:
        ValueError: there is no such job, there are several, or it refused.
        OSError: it does not answer.
    """
    jobs = running()
    if not jobs:
        raise ValueError("no `torchft run` of yours runs on this machine")
    if pid is not None and pid not in jobs:
        raise ValueError(f"no job of yours runs as process {pid}; running: {_names(jobs)}")
    if pid is None and len(jobs) != 1:
        raise ValueError(f"which job? name one with --pid; running: {_names(jobs)}")
    path = jobs[pid if pid is not None else next(iter(jobs))]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_SEC)
        with _short(path) as short:
            connection.connect(short)
        connection.sendall(json.dumps({"replicas": replicas}).encode())
        connection.shutdown(socket.SHUT_WR)
        line = connection.makefile("rb").readline()
    if not line:
        raise ValueError(f"the job of process {path.stem} ended before it answered")
    answer = json.loads(line)
    if "error" in answer:
        raise ValueError(answer["error"])
    return str(answer["done"])


def running() -> dict[int, Path]:
    """The sockets of this user's jobs on this machine, by process id."""
    jobs = {int(path.stem): path for path in _folder().glob("*.sock") if path.stem.isdigit()}
    return {pid: path for pid, path in jobs.items() if Path(f"/proc/{pid}").exists()}


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Another path of the same socket: the kernel allows 107 bytes, and TMPDIR may be longer."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _names(jobs: dict[int, Path]) -> str:
    return ", ".join(str(pid) for pid in sorted(jobs))


def _folder() -> Path:
    # May name the folder of a login that has ended, or of another host.
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    there = os.path.isdir(base)
    folder = Path(base) / "torchft" if there else Path(tempfile.gettempdir()) / f"torchft-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder that only this user can enter")
    return folder
