"""A server that communicates with each client over a process group of two ranks, one such session per client.

A client requests a session over HTTP, and both configure a process group: the server is rank 0, the client
rank 1. The HTTP connection stays open as long as the client keeps the process group. When the connection
breaks, because the client released the process group or failed, the server aborts its side. So an abandoned
session ends wherever `forward` waits, and leaves no thread or socket behind.

    class Pull(ParameterServer):
        @classmethod
        def new_process_group(cls):
            return ProcessGroupGloo()

        def forward(self, session_id, pg):
            for parameter in model.parameters():
                pg.broadcast_one(parameter.data, 0).wait()

    server = Pull(port=0)                        # one process
    pg = Pull.new_session(server.address())      # another one; pg.broadcast_one(tensor, 0).wait() receives
"""

from __future__ import annotations

import json
import logging
import select
import socket
import threading
import urllib.parse
import uuid
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress
from datetime import timedelta
from http.client import HTTPConnection, HTTPException
from typing import Optional

from torch.distributed import TCPStore

from torchft._forked import Maker, threaded
from torchft.addresses import announced_host, host_port, loopback
from torchft.http import _IPv6HTTPServer, _RequestHandler
from torchft.process_group import ProcessGroup
from torchft.utils import current_device, use_device

__all__ = ["ParameterServer"]

_logger: logging.Logger = logging.getLogger(__name__)

_PATH = "/new_session"
_STORE_TIMEOUT = timedelta(seconds=60)
_REQUEST_TIMEOUT_SEC = 30.0


class ParameterServer(ABC):
    """Serves sessions, each on a thread, until `shutdown`.

    Args:
        port: port for HTTP; 0 takes a free one.
        store_port: port of the TCPStore where the two sides of a session meet; 0 takes a free one.

    Raises:
        ValueError: a port is out of range.
    """

    def __init__(self, port: int, store_port: int = 0) -> None:
        for name, value in (("port", port), ("store_port", store_port)):
            if not isinstance(value, int) or not 0 <= value < 65536:
                raise ValueError(f"{name}={value!r}: allowed are 0 (any free port) to 65535")
        self._maker = Maker(type(self).__name__)
        self._store: Optional[TCPStore] = threaded(
            TCPStore(loopback(), store_port, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
        )
        self._store_port = self._store.port
        self._sessions: dict[str, ProcessGroup] = {}
        self._device = current_device()
        self._lock = threading.Lock()
        self._server = _SessionServer(("", port), self)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="torchft_parameter_server",
            daemon=True,
        )
        self._thread.start()

    def address(self) -> str:
        """The address for `new_session`: ``http://host:port/new_session``."""
        return f"http://{host_port(announced_host(), self._server.server_port)}{_PATH}"

    @classmethod
    @abstractmethod
    def new_process_group(cls) -> ProcessGroup:
        """Makes a process group without peers, for one session, in the server and in its clients.

        Its timeout limits how long server and client wait for each other to connect.
        """

    @abstractmethod
    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        """Serves a session, on a separate thread. When it returns or raises, the session ends.

        Args:
            session_id: id of the session, unique.
            pg: process group of two ranks: the server is rank 0, the client rank 1. Its operations fail once
                the client has failed.
        """

    @classmethod
    def new_session(cls, address: str) -> ProcessGroup:
        """Opens a session, as a client.

        Args:
            address: result of the server's `address`.

        Returns:
            The process group of the session; the caller is rank 1. The session ends with the group's
            `shutdown`, and at the latest when the group is garbage collected.

        Raises:
            ValueError: the address is malformed.
            RuntimeError: the server cannot be reached, or refuses the session.
        """
        connection, session_id, store = _ask(address)
        pg = cls.new_process_group()
        try:
            pg.configure(f"{store}/session/{session_id}", "client", 1, 2)
        except BaseException:
            connection.close()
            pg.shutdown()
            raise
        weakref.finalize(pg, connection.close)
        return pg

    def sessions(self) -> list[str]:
        """Ids of the sessions that are open now."""
        with self._lock:
            return list(self._sessions)

    def shutdown(self) -> None:
        """Ends the server and its sessions: their pending operations fail. Safe to call twice."""
        self._maker.check()
        self._server.shutdown()
        with self._lock:
            groups = list(self._sessions.values())
        for pg in groups:
            pg.abort()
        self._server.server_close()
        self._thread.join(_REQUEST_TIMEOUT_SEC)
        self._store = None  # the last reference to it: that closes its port

    def _serve(self, session_id: str, connection: socket.socket) -> None:
        """Connects the process group of a session, and serves the session to its end."""
        use_device(self._device)
        pg = self.new_process_group()
        with self._lock:
            self._sessions[session_id] = pg
        over = threading.Event()
        watcher = threading.Thread(
            target=self._watch, args=(session_id, connection, over), name="torchft_session_watch", daemon=True
        )
        watcher.start()
        try:
            store = host_port(loopback(), self._store_port)
            pg.configure(f"{store}/session/{session_id}", "server", 0, 2)
            self.forward(session_id, pg)
        except Exception as e:
            abandoned = session_id not in self._sessions
            _logger.warning("session %s %s: %s", session_id, "was abandoned" if abandoned else "failed", e)
        finally:
            with self._lock:
                self._sessions.pop(session_id, None)
            over.set()
            pg.shutdown()
            _hang_up(connection)  # ends the watching thread
            watcher.join(_REQUEST_TIMEOUT_SEC)

    def _watch(self, session_id: str, connection: socket.socket, over: threading.Event) -> None:
        """Aborts the session when the client's connection breaks."""
        poll = select.poll()
        with suppress(OSError, ValueError):  # the connection is closed already
            poll.register(connection, select.POLLIN)
            poll.poll()  # a client sends nothing more, so a readable connection has ended
        with self._lock:
            pg = self._sessions.pop(session_id, None)
        while pg is not None and not over.is_set():
            pg.abort()  # repeated: an abort before the session has begun to connect ends nothing
            over.wait(0.1)


class _SessionServer(_IPv6HTTPServer):
    def __init__(self, address: tuple[str, int], owner: ParameterServer) -> None:
        super().__init__(address, _SessionHandler)
        self.owner = owner


class _SessionHandler(_RequestHandler):
    server: _SessionServer  # type: ignore[assignment]

    def do_POST(self) -> None:
        if self.headers.get("Origin") is not None:  # a script of a web page must not open sessions (CSRF)
            self.send_error(403, "sessions are not for browsers")
            return
        if self.path != _PATH:
            self.send_error(404, f"there is {_PATH} only")
            return
        if not self.server.admit(self.connection):
            self.close_connection = True
            return
        session_id = str(uuid.uuid4())
        store = host_port(announced_host(), self.server.owner._store_port)
        body = json.dumps({"session_id": session_id, "store_addr": store}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        self.close_connection = True
        self.server.owner._serve(session_id, self.connection)


def _ask(address: str) -> tuple[HTTPConnection, str, str]:
    """Requests a session. Returns the connection that keeps the session open, the session's id, and the
    address of the store.
    """
    parts = urllib.parse.urlsplit(address)
    if parts.scheme != "http" or parts.hostname is None or parts.port is None:
        raise ValueError(f"address={address!r}: http://host:port{_PATH} is needed")
    connection = HTTPConnection(parts.hostname, parts.port, timeout=_REQUEST_TIMEOUT_SEC)
    try:
        connection.request("POST", parts.path or _PATH)
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(f"{address} refused the session: {response.status} {response.reason}")
        answer = json.loads(body)
        return connection, answer["session_id"], answer["store_addr"]
    except (OSError, HTTPException, ValueError, KeyError) as e:
        connection.close()
        raise RuntimeError(f"no session from {address}: {e}") from e
    except BaseException:
        connection.close()
        raise


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # the client has closed it already
        connection.shutdown(socket.SHUT_RDWR)
