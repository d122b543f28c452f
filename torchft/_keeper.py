"""Starts the keeper of this host: the process that keeps the slots of ranks in memory when trainers end.

One keeper runs for each user and host. It serves all jobs, also those that begin later; a job tells it its
lighthouse, and the files of its token and certificates, by a file in the folder of its slots.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

from torchft._lighthouse_http import LIGHTHOUSE_ENV
from torchft._security import DEFAULT_JOB, JOB_ENV, files

#: Folder of the copies of the state, a file system in memory. Default: /dev/shm/torchft-UID.
ROOT_ENV = "TORCHFT_SNAPSHOT_MEMORY"
SETTINGS = "job.json"  # in the folder of a job
_LOCK = "keeper.lock"
_LOG = "keeper.log"
_MOST_LOG = 1 << 20  # bytes; a longer log of earlier keepers is dropped when one starts
_logger = logging.getLogger(__name__)


def root() -> Path:
    """Returns the folder of all slots of this user on this host, and makes it: TORCHFT_SNAPSHOT_MEMORY, else
    one in /dev/shm. OSError: it cannot be made, or another user owns it or may write to it.
    """
    path = Path(os.environ.get(ROOT_ENV) or f"/dev/shm/torchft-{os.getuid()}").absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise OSError(f"{path}, the folder of snapshots ({ROOT_ENV}): {error.strerror}") from error
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{path}, the folder of snapshots ({ROOT_ENV}), belongs to user {found.st_uid} with mode "
            f"{found.st_mode & 0o777:o}: it must be this user's ({os.getuid()}), and no other one may write "
            "to it"
        )
    return path


def quoted(name: str) -> str:
    """Returns the name of a job or group as the name of its folder."""
    return quote(name, safe="").replace(".", "%2E") if name.strip(".") == "" else quote(name, safe="")


def ensure(job: str, lighthouse: str = "") -> None:
    """Makes the keeper of this host keep the slots of a job, and starts it if none runs.

    One rank of each host calls it. A failure is a warning: training goes on without a keeper.

    Args:
        job: name under which the job's ranks keep slots.
        lighthouse: addresses of its lighthouse, separated by commas; default: TORCHFT_LIGHTHOUSE.
    """
    try:
        folder = root()
        mine = folder / quoted(job)
        mine.mkdir(mode=0o700, exist_ok=True)
        settings = {
            "lighthouse": lighthouse or os.environ.get(LIGHTHOUSE_ENV, ""),
            "job": os.environ.get(JOB_ENV) or DEFAULT_JOB,
            **{name: os.path.abspath(path) if path else "" for name, path in files().items()},
        }
        temporary = mine / f"{SETTINGS}.{os.getpid()}"
        temporary.write_text(json.dumps(settings))
        temporary.replace(mine / SETTINGS)  # before the look: a keeper that ends looks for it once more
        start(folder)
    except OSError as e:
        _logger.warning(f"no keeper runs on this host, so snapshots are not shared with other hosts: {e}")


def start(folder: Path) -> None:
    """Starts a keeper of a folder if none runs, or OSError. It outlives all that kill this process's tree."""
    if running(folder):
        return
    paths = [os.path.abspath(path) for path in sys.path]
    # As a grandchild whose parent has ended: it is in no tree of this process, and in a session of its own.
    main = (
        f"import os, sys; sys.path[:] = {paths!r}; os.setsid(); os.fork() and os._exit(0); "
        f"import torchft.cli as c; sys.exit(c.main(['keeper', '--root', {str(folder)!r}]))"
    )
    log = folder / _LOG
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > _MOST_LOG:
            log.unlink()
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
        command = [sys.executable, "-c", main]
        subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/", check=False, timeout=60
        )


def running(folder: Path) -> bool:
    """Whether a keeper of a folder runs. OSError: its lock cannot be tried."""
    return holder(folder / _LOCK) is not None


def holder(lock: Path) -> str | None:
    """What the process has written that holds a file's lock; None: none does. OSError: it cannot be tried."""
    with contextlib.suppress(FileNotFoundError), open(lock, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for a moment: who wants it tries again
        except BlockingIOError:
            return file.read().decode(errors="replace")
    return None
