"""The TCP connections of one Gloo group, so that an abort can cut them.

Gloo's own abort does not end operations in flight. Shutting the sockets down does: every operation in the
group fails within milliseconds, here and at the peers. A socket belongs to the group if two conditions hold.
It connects from or to an address at which a rank of the group listens (the ranks publish these addresses in
the store). And it is in the event loop of this rank's listening socket, because other ranks of the same
process connect to the same addresses. If this cannot be determined (another version of Gloo, connections made
on first use, no /proc), nothing is cut; the operations then continue in the background, and only the waits
for them end (`operations`).
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import socket
import stat
import struct
import weakref
from typing import Any, NamedTuple, Optional

from torch.distributed import Store

from torchft.process_group._gloo.loops import epolls, is_open, quiet_later, watched

_DESCRIPTORS = "/proc/self/fd"

_all: weakref.WeakSet[GlooConnections] = weakref.WeakSet()


class _Connection(NamedTuple):
    inode: int
    here: tuple[bytes, ...]
    there: tuple[bytes, ...]


class GlooConnections:
    """The established connections of a group, which was created with this store.

    Attributes:
        cut: whether `shutdown` was called.
        severed: whether `shutdown` cut the connections to all peers on all interfaces, so that nothing
            arrives any more.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._connections: dict[int, _Connection] = {}
        self.cut = False
        self._complete = False
        if world_size < 2 or not os.path.isdir(_DESCRIPTORS):
            return
        _all.add(self)
        own: set[Optional[bytes]] = set()
        peers: set[Optional[bytes]] = set()
        # For each interface in GLOO_SOCKET_IFNAME Gloo has a context with separate connections.
        for context in itertools.count():
            keys = [f"{context}/{peer}" for peer in range(world_size)]
            if not store.check(keys):
                break
            for peer, published in enumerate(store.multi_get(keys)):
                (own if peer == rank else peers).add(_listening(published))
        if not own:
            return
        of_loops = _of_loops(own)
        for descriptor in map(int, os.listdir(_DESCRIPTORS)) if of_loops is None else of_loops:
            found = _open(descriptor)
            if found is None:
                continue
            with found[0]:
                connection = found[1]
            if own.intersection(connection.here) or peers.intersection(connection.there):
                self._connections[descriptor] = connection
        self._complete = len(self._connections) >= context * (world_size - 1)

    @property
    def severed(self) -> bool:
        return self.cut and self._complete

    def __len__(self) -> int:
        return len(self._connections)

    def alive(self) -> tuple[int, int]:
        """The number of connections that Gloo still holds (it closes a failed one), and the initial one."""
        connections = self._connections  # the attribute is replaced, its value never changed
        return sum(is_open(fd, connection.inode) for fd, connection in connections.items()), len(connections)

    def shutdown(self) -> None:
        """Cuts the connections that are still open."""
        self.cut = True
        connections, self._connections = self._connections, {}
        for descriptor, connection in connections.items():
            found = _open(descriptor)
            if found is None:
                self._complete = self._complete and not is_open(descriptor, connection.inode)
                continue
            # On a duplicate descriptor, so that only the checked socket can be cut: Gloo may close its own.
            with found[0] as duplicate:
                if found[1] == connection:
                    with contextlib.suppress(OSError):  # the peer has closed it already
                        duplicate.shutdown(socket.SHUT_RDWR)
        if connections:
            quiet_later({descriptor: connection.inode for descriptor, connection in connections.items()})


def _forget_all() -> None:
    """In a forked child: the connections are those of the parent, which goes on to use them."""
    for connections in list(_all):
        connections._connections = {}
    _all.clear()


os.register_at_fork(after_in_child=_forget_all)


@atexit.register
def _shutdown_all() -> None:
    """Cuts all connections at the end: the destruction of a Gloo group would wait for its operations."""
    for connections in list(_all):
        connections.shutdown()


def _open(descriptor: int) -> Optional[tuple[socket.socket, _Connection]]:
    """Returns a duplicate of a connected TCP socket and its addresses; None for any other descriptor."""
    try:
        # Most descriptors are something else, and this check is the cheapest.
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
    except OSError:  # it is not connected
        duplicate.close()
        return None


def _of_loops(own: set[Optional[bytes]]) -> Optional[list[int]]:
    """The sockets in the event loops that listen at these addresses; None if no loop is found."""
    found = []
    for epoll in epolls():
        with contextlib.suppress(OSError):  # closed in the meantime
            descriptors = [one.descriptor for one in watched(epoll)]
            if any(own.intersection(_bound(descriptor)) for descriptor in descriptors):
                found += descriptors
    return found or None


def _bound(descriptor: int) -> tuple[bytes, ...]:
    """The address at which a socket listens; empty if it is connected, or is no socket."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return ()
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            listens = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return _raw(duplicate.family, duplicate.getsockname()) if listens else ()
    except OSError:
        return ()


def _listening(published: bytes) -> Optional[bytes]:
    """Extracts the address from the bytes that a rank of Gloo publishes, as `_raw` formats it; None if it
    is not understood.

    The bytes are: length and text of the host name, length and memory of a sockaddr_storage, and more. Most
    of the sockaddr_storage is uninitialized memory, which may contain other addresses.
    """
    try:
        (length,) = struct.unpack_from("=Q", published)
        (size,) = struct.unpack_from("=Q", published, 8 + length)
        start = 16 + length
        (family,) = struct.unpack_from("=H", published, start)
    except (struct.error, OverflowError):
        return None
    used = {socket.AF_INET: 8, socket.AF_INET6: 24}.get(family)
    if used is None or size < used or len(published) < start + size:
        return None
    address = published[start : start + used]
    # Without the flow information.
    return address if family == socket.AF_INET else address[:4] + bytes(4) + address[8:]


def _raw(family: int, address: Any) -> tuple[bytes, ...]:
    """The forms of an address in memory, as C's sockaddr_in or sockaddr_in6; empty for other families."""
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
