"""A small threading HTTP server for IPv6 and IPv4, and a socket with a deadline for either end."""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Callable, Iterator, Type

from torchft._forked import Maker

logger: logging.Logger = logging.getLogger(__name__)

# A read of at least this many bytes waits for all of them in one call. That is safe, because buffered readers
# request less: a caller that requests that many bytes needs all of them.
_LARGE_READ = 1 << 20

# The answer of a server without room, and the seconds after which there may be some.
_BUSY = b"HTTP/1.1 503 busy\r\nRetry-After: %d\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_ADMITTED_ENDS, _PENDING_ENDS = 1, 0


class _DeadlineSocket(socket.socket):
    """A socket whose reads and writes end at `deadline`, even if the peer sends its bytes one at a time.

    The timeout of an ordinary socket restarts with every byte, so a slow client could occupy a thread without
    limit. Python also implements it as a loop of poll and read, which takes the GIL each time: while a
    training loop holds the GIL, that costs more than the transfer. Here the kernel has the timeout, and a
    large read or write is one call.
    """

    deadline: float | None = None  # by time.monotonic(); None: no limit
    # Runs after each read of data; returns the deadline from then on.
    arrived: Callable[[], float] | None = None

    @classmethod
    def wrap(cls, sock: socket.socket) -> _DeadlineSocket:
        """Takes over an open socket; its former owner cannot use it any more."""
        wrapped = cls(fileno=sock.detach())
        wrapped.setblocking(True)
        return wrapped

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        if (nbytes or len(buffer)) >= _LARGE_READ:
            flags |= socket.MSG_WAITALL
        with self._limited(socket.SO_RCVTIMEO):
            count = super().recv_into(buffer, nbytes, flags)
        if count and self.arrived is not None:
            self.deadline = self.arrived()
        return count

    def sendall(self, data: Any, flags: int = 0) -> None:
        left = memoryview(data).cast("B")
        while left:
            with self._limited(socket.SO_SNDTIMEO):
                left = left[super().send(left, flags) :]

    @contextmanager
    def _limited(self, option: int) -> Iterator[None]:
        if self.deadline is not None:
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            seconds, micros = divmod(int(left * 1e6), 1_000_000)
            # a struct timeval; all zero would mean no limit
            self.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, max(1, micros)))
        try:
            yield
        except BlockingIOError:
            raise TimeoutError("timed out") from None

    def abort(self) -> None:
        """Ends a read or write that waits in any thread; it gets an error."""
        with suppress(OSError):  # the socket is closed already
            self.shutdown(socket.SHUT_RDWR)


class _IPv6HTTPServer(ThreadingHTTPServer):
    """A threading HTTP server for IPv6 and IPv4; on a host without IPv6, for IPv4 only.

    Every connection is served by its own thread. `server_close` cuts the open connections and waits for their
    threads, at most `close_timeout` seconds. A connection is *pending* until its handler has found its
    request valid and called `admit`. There are at most `max_pending` of them, and `pending_of_one` from one
    address; beyond that the oldest is cut. `admit` refuses a request beyond `max_connections` admitted ones.
    In both cases the client is told when to retry.

    Args:
        server_address: host and port; host "" or "::" is every address, port 0 any free port
        RequestHandlerClass: answers the requests
    """

    address_family = socket.AF_INET6
    request_queue_size = 1024
    daemon_threads = True
    max_connections = 256
    # A small number suffices: a peer sends its request at once, so it is pending for a moment only.
    max_pending = 64
    pending_of_one = 32
    close_timeout = 5.0

    def __init__(
        self,
        server_address: tuple[str, int],
        RequestHandlerClass: Callable[..., BaseHTTPRequestHandler] | Type[BaseHTTPRequestHandler],
        bind_and_activate: bool = True,
    ) -> None:
        self._connections: set[_DeadlineSocket] = set()
        # Connections that are not admitted yet, with their addresses, oldest first.
        self._pending: dict[_DeadlineSocket, str] = {}
        self._admitted: set[_DeadlineSocket] = set()  # those admitted
        self._full = False  # whether a connection was refused since the last one was admitted
        self._request_threads: list[threading.Thread] = []
        self._connections_lock = threading.Lock()
        self._maker = Maker(type(self).__name__)
        host, port = server_address[:2]
        if not _has_ipv6() and host in ("", "::"):
            self.address_family = socket.AF_INET
            host = ""
        # typeshed asks for a class, but any callable that makes a handler works
        super().__init__((host, port), RequestHandlerClass, bind_and_activate)  # type: ignore[arg-type]
        _servers.add(self)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # HTTPServer.server_bind would look the host up in the DNS, which can take seconds, for an unused name
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def get_request(self) -> tuple[socket.socket, Any]:
        sock, address = super().get_request()
        return _DeadlineSocket.wrap(sock), address

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            daemon=True,
            name="torchft-http-request",
        )
        host = client_address[0]
        with self._connections_lock:
            same = [other for other, its in self._pending.items() if its == host]
            if len(same) >= self.pending_of_one:
                self._cut(same[0])
            elif len(self._pending) >= self.max_pending:
                self._cut(next(iter(self._pending)))
            self._connections.add(request)
            self._pending[request] = host
            # in a list apart from the connections: a thread outlives its connection by a moment
            self._request_threads = [t for t in self._request_threads if t.is_alive()] + [thread]
            thread.start()

    def _cut(self, connection: _DeadlineSocket, retry_after: int = _PENDING_ENDS) -> None:
        del self._pending[connection]
        with suppress(OSError):
            connection.send(_BUSY % retry_after, socket.MSG_DONTWAIT)
        connection.abort()

    def admit(self, request: _DeadlineSocket) -> bool:
        """Admits a connection with a valid request.

        Returns:
            False if it was cut, or `max_connections` are admitted. Its client has been told to retry: the
            handler closes the connection.
        """
        with self._connections_lock:
            if request not in self._pending:
                return request in self._admitted
            full, self._full = self._full, len(self._admitted) >= self.max_connections
            if not self._full:
                self._admitted.add(request)
                del self._pending[request]
                return True
            self._cut(request, _ADMITTED_ENDS)
        if not full:
            logger.warning(
                "connections are refused: %d are open already (max_connections)", self.max_connections
            )
        return False

    def shutdown_request(self, request: Any) -> None:
        try:
            super().shutdown_request(request)
        finally:
            with self._connections_lock:
                self._connections.discard(request)
                self._admitted.discard(request)
                self._pending.pop(request, None)

    def abort_connections(self) -> None:
        """Cuts every open connection; reads and writes that wait on one of them get an error."""
        with self._connections_lock:
            for connection in self._connections:
                connection.abort()

    def shutdown(self) -> None:
        """Ends `serve_forever`, and waits for that. RuntimeError: this is a child of the server's process."""
        self._maker.check()
        super().shutdown()

    def server_close(self) -> None:
        super().server_close()
        with self._connections_lock:
            threads = list(self._request_threads)
        self.abort_connections()
        end = time.monotonic() + self.close_timeout
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            # the peer closed the connection, or was too slow
            logger.debug("connection of %s ended: %r", client_address, error)
        else:
            logger.warning("request of %s failed", client_address, exc_info=error)


class _RequestHandler(BaseHTTPRequestHandler):
    """Answers the requests of a connection to such a server."""

    connection: _DeadlineSocket
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s: " + format, self.client_address[0], *args)


_servers: weakref.WeakSet[_IPv6HTTPServer] = weakref.WeakSet()


def _close_in_child() -> None:
    # Otherwise a forked child (the worker of a data loader) would keep the port and the connections open
    # after its parent has ended, and peers would wait for an answer instead of noticing the end of the
    # source.
    for server in list(_servers):
        for sock in [server.socket, *server._connections]:
            with suppress(OSError):
                os.close(sock.detach())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _has_ipv6() -> bool:
    """Whether an IPv6 socket can be bound: a container may have support for IPv6 but no address."""
    if not socket.has_ipv6:
        return False
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
        return True
    except OSError:
        return False
