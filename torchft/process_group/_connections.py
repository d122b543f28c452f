"""The TCP connections of one Gloo group, so that an abort can cut them.

Gloo's own abort does not touch an operation in flight. Shutting its sockets down does: every operation
in the group fails within milliseconds, here and at the peers. Which sockets are the group's is known for
sure from what its ranks published in the store: each connection leads from or to the listening address
of one of them. Where that cannot be told (another version of Gloo, no /proc), nothing is cut, and
operations end with their timeout.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from typing import Any, NamedTuple, Optional

from torch.distributed import Store

_DESCRIPTORS = "/proc/self/fd"


class _Connection(NamedTuple):
    inode: int
    here: tuple[bytes, ...]
    there: tuple[bytes, ...]


class Connections:
    """The established connections of a group.

    Args:
        store: the one the group was created with.
        rank: of this process in the group.
        world_size: of the group.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._connections: dict[int, _Connection] = {}
        # Gloo's first (and in PyTorch only) context publishes under these keys.
        keys = [f"0/{peer}" for peer in range(world_size)]
        if world_size < 2 or not os.path.isdir(_DESCRIPTORS) or not store.check(keys):
            return
        published = store.multi_get(keys)
        own = published.pop(rank)
        peers = b"|".join(published)
        for name in os.listdir(_DESCRIPTORS):
            found = _open(int(name))
            if found is None:
                continue
            with found[0]:
                connection = found[1]
            if any(raw in own for raw in connection.here) or any(raw in peers for raw in connection.there):
                self._connections[int(name)] = connection

    def __len__(self) -> int:
        return len(self._connections)

    def shutdown(self) -> None:
        """Cuts those connections that are still open."""
        for descriptor, connection in self._connections.items():
            found = _open(descriptor)
            if found is None:
                continue
            # A duplicate of our own: what was checked of it cannot change before it is used.
            with found[0] as duplicate:
                if found[1] == connection:
                    with contextlib.suppress(OSError):  # the peer was faster
                        duplicate.shutdown(socket.SHUT_RDWR)
        self._connections = {}


def _open(descriptor: int) -> Optional[tuple[socket.socket, _Connection]]:
    """A duplicate of a connected TCP socket and what identifies it, None when it is something else."""
    try:
        # Most descriptors are something else, and this is the cheapest way to see it.
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        duplicate = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    try:
        return duplicate, _Connection(
            os.fstat(duplicate.fileno()).st_ino,
            _raw(duplicate.family, duplicate.getsockname()),
            _raw(duplicate.family, duplicate.getpeername()),
        )
    except OSError:  # not connected
        duplicate.close()
        return None


def _raw(family: int, address: Any) -> tuple[bytes, ...]:
    """How an address may stand in memory, as C's sockaddr_in or sockaddr_in6; empty for other families."""
    if family == socket.AF_INET:
        return (_sockaddr_in(*address),)
    if family == socket.AF_INET6:
        host, port = address[0].partition("%")[0], address[1]
        packed = socket.inet_pton(socket.AF_INET6, host)
        in6 = struct.pack("=H", family) + struct.pack("!H", port) + bytes(4) + packed
        # A connection to an IPv4 address may be made with an IPv6 socket.
        return (in6, _sockaddr_in(host[7:], port)) if host.startswith("::ffff:") else (in6,)
    return ()


def _sockaddr_in(host: str, port: int) -> bytes:
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
