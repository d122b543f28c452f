"""Stops Gloo's event loop from spinning on a connection that was cut while it still held unread data.

Gloo reads from a connection only data that it has a buffer for. It has no buffer for data that arrives after
its receive was aborted, or after its operation failed because of another peer. Gloo leaves that data in the
socket, and so never reads the end of the connection behind it. Epoll reports both again and again, and the
event loop spins for as long as the process group exists: until nothing refers to it any more, not even a
traceback. (Seen with PyTorch 2.15)

Gloo may close a socket at any moment, and another socket may then get its number and be watched by the same
epoll. To epoll a watched socket is its number together with its file. So a child process changes how a socket
is watched: there the number keeps its file. If Gloo has closed the socket, the change fails, and the other
socket is left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
import struct
import subprocess
import sys
import threading
import time
from typing import Iterator, NamedTuple

# How long Gloo gets to close cut connections itself, which usually takes milliseconds. Epoll is changed only
# after this time: an operation on such a connection may need epoll's report of the cut before it can fail. It
# has failed by then.
_CLOSE_SEC = 0.5
_LOOK_SEC = 0.02
# Seconds within which the child process ends, and how often it is started if Gloo closes a socket just then.
_CHILD_SEC = 30.0
_CHILDREN = 3

# C's struct epoll_event: the watched events, and the data that Gloo gets with them.
_EVENT = struct.Struct("=IQ" if platform.machine() == "x86_64" else "=I4xQ")
_EPOLL_CTL_MOD = 3


class _Watched(NamedTuple):
    descriptor: int
    inode: int
    data: int


def quiet_later(sockets: dict[int, int]) -> None:
    """Starts a thread that gives Gloo time to close the cut sockets, and then makes epoll report only changes
    of those that are still open. `sockets`: their inodes, by descriptor.
    """
    with contextlib.suppress(RuntimeError):  # the process is ending, and no thread can be started any more
        threading.Thread(target=_quiet, args=(sockets,), name="torchft_quiet", daemon=True).start()


def _quiet(sockets: dict[int, int]) -> None:
    deadline = time.monotonic() + _CLOSE_SEC
    while sockets := {fd: inode for fd, inode in sockets.items() if is_open(fd, inode)}:
        if time.monotonic() >= deadline:
            break
        time.sleep(_LOOK_SEC)
    for _ in range(_CHILDREN):
        sockets = {fd: inode for fd, inode in sockets.items() if is_open(fd, inode)}
        found = list(epolls())
        if not sockets or not found or not sys.executable:
            return
        arguments = [",".join(map(str, found)), *(f"{fd}:{inode}" for fd, inode in sockets.items())]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # one was closed in the meantime
            subprocess.run(
                [sys.executable, "-I", "-S", __file__, *arguments],
                pass_fds=[*sockets, *found],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_CHILD_SEC,
            )
            return


def main(epolls: str, *sockets: str) -> None:
    """In the child process. `epolls`: descriptors, between commas; `sockets`: "descriptor:inode" each."""
    inodes = {int(fd): int(inode) for fd, _, inode in (one.partition(":") for one in sockets)}
    for epoll in map(int, epolls.split(",")):
        with contextlib.suppress(OSError):  # closed before this process began
            for one in watched(epoll):
                if inodes.get(one.descriptor) == one.inode and is_open(one.descriptor, one.inode):
                    _report_changes(epoll, one)


def is_open(descriptor: int, inode: int) -> bool:
    """Whether a descriptor still refers to the socket with this inode; its number may have been reused."""
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


def epolls() -> Iterator[int]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                yield int(name)


def watched(epoll: int) -> list[_Watched]:
    """The descriptors that an epoll instance watches."""
    found = []
    with open(f"/proc/self/fdinfo/{epoll}") as file:
        for line in file:
            # tfd: 7 events: 19 data: 7f6cf4003f20 pos:0 ino:1a2b3c sdev:8
            if line.startswith("tfd:"):
                # Maps each word to the next one: the names in the line to their values.
                values = dict(zip(words := line.replace(":", " ").split(), words[1:]))
                found.append(_Watched(int(values["tfd"]), int(values["ino"], 16), int(values["data"], 16)))
    return found


def _report_changes(epoll: int, one: _Watched) -> None:
    """Makes epoll report only changes of a socket. Epoll must continue to watch the socket (no
    EPOLL_CTL_DEL): if Gloo later closes a socket that epoll does not watch, it ends the process.
    """
    event = ctypes.create_string_buffer(_EVENT.pack(select.EPOLLET & 0xFFFFFFFF, one.data))
    # An error is ignored: if Gloo has closed the socket in the meantime, epoll does not report it any more.
    ctypes.CDLL(None).epoll_ctl(epoll, _EPOLL_CTL_MOD, one.descriptor, event)


if __name__ == "__main__":
    main(*sys.argv[1:])
