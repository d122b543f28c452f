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
from typing import NamedTuple, Optional

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
    """A duplicate of a connected socket and what identifies it, None when it is something else."""
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
            _raw(duplicate.getsockname()),
            _raw(duplicate.getpeername()),
        )
    except OSError:  # not connected
        duplicate.close()
        return None


def _raw(address: object) -> tuple[bytes, ...]:
    """How an address may stand in memory, as C's sockaddr_in or sockaddr_in6; empty for other kinds."""
    if not isinstance(address, tuple) or len(address) not in (2, 4):
        return ()
    host, port = address[0].partition("%")[0], struct.pack("!H", address[1])
    if len(address) == 2:
        return (_family(socket.AF_INET) + port + socket.inet_aton(host),)
    in6 = _family(socket.AF_INET6) + port + bytes(4) + socket.inet_pton(socket.AF_INET6, host)
    if not host.startswith("::ffff:"):
        return (in6,)
    return in6, _family(socket.AF_INET) + port + socket.inet_aton(host[len("::ffff:") :])


def _family(family: int) -> bytes:
    return struct.pack("=H", family)
