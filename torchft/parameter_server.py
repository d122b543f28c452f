"""A server that talks to each of its clients over a process group of their own: push, pull, or whatever it implements.

A client asks over HTTP for a session, and both connect a group of two: the server is rank 0, the client rank 1. The
HTTP connection stays open as long as the client holds on to the group. When it breaks, because the client let go of the
group or died, the server aborts the session's group: so a session that its client abandons ends, wherever `forward`
waits, and nothing of it stays behind.

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
from http.server import BaseHTTPRequestHandler
from typing import Any

from torch.distributed import TCPStore

from torchft.addresses import announced_host, host_port
from torchft.http import _DeadlineSocket, _IPv6HTTPServer
from torchft.process_group import ProcessGroup

__all__ = ["ParameterServer"]

_logger: logging.Logger = logging.getLogger(__name__)

_PATH = "/new_session"
_STORE_TIMEOUT = timedelta(seconds=60)
_REQUEST_TIMEOUT_SEC = 30.0


class ParameterServer(ABC):
    """Serves sessions, each on a thread, until `shutdown`.

    Args:
        port: for HTTP; 0 takes a free one.
        store_port: of the TCPStore where the two of a session meet; 0 takes a free one.

    Raises:
        ValueError: a port is out of range.
    """

    def __init__(self, port: int, store_port: int = 0) -> None:
        for name, value in (("port", port), ("store_port", store_port)):
            if not isinstance(value, int) or not 0 <= value < 65536:
                raise ValueError(f"{name}={value!r}: allowed are 0 (any free port) to 65535")
        self._store = TCPStore("localhost", store_port, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
        self._sessions: dict[str, ProcessGroup] = {}
        self._lock = threading.Lock()
        self._server = _Server(("", port), self)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="torchft_parameter_server",
            daemon=True,
        )
        self._thread.start()

    def address(self) -> str:
        """Where clients ask for sessions: ``http://host:port/new_session``."""
        return f"http://{host_port(announced_host(), self._server.server_port)}{_PATH}"

    @classmethod
    @abstractmethod
    def new_process_group(cls) -> ProcessGroup:
        """A group without peers, for one session; called by the server and by its clients.

        Its timeout is how long either waits for the other one to connect.
        """

    @abstractmethod
    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        """Serves a session, on a thread of its own. When it returns or raises, the session is over.

        Args:
            session_id: of the session, unlike any other.
            pg: of two: the server is rank 0, the client rank 1. Its operations fail once the client is gone.
        """

    @classmethod
    def new_session(cls, address: str) -> ProcessGroup:
        """Called by a client: opens a session.

        Args:
            address: of the server, as its `address` says.

        Returns:
            The group of the session, whose rank 1 is the caller. The session ends with its `shutdown`, and at the
            latest when nobody holds on to it.

        Raises:
            ValueError: the address is none.
            RuntimeError: the server cannot be reached, or has no session for us.
        """
        lease, session_id, store = _ask(address)
        pg = cls.new_process_group()
        try:
            pg.configure(f"{store}/session/{session_id}", "client", 1, 2)
        except BaseException:
            lease.close()
            pg.shutdown()
            raise
        weakref.finalize(pg, lease.close)
        return pg

    def sessions(self) -> list[str]:
        """Ids of the sessions that are open now."""
        with self._lock:
            return list(self._sessions)

    def shutdown(self) -> None:
        """Ends the server and its sessions: what waits in them gets an error. Safe to call twice."""
        self._server.shutdown()
        with self._lock:
            groups = list(self._sessions.values())
        for pg in groups:
            pg.abort()
        self._server.server_close()
        self._thread.join(_REQUEST_TIMEOUT_SEC)

    def _serve(self, session_id: str, connection: socket.socket) -> None:
        """A session, from connecting to its end."""
        pg = self.new_process_group()
        with self._lock:
            self._sessions[session_id] = pg
        over = threading.Event()
        watcher = threading.Thread(
            target=self._watch, args=(session_id, connection, over), name="torchft_session_lease", daemon=True
        )
        watcher.start()
        try:
            pg.configure(f"localhost:{self._store.port}/session/{session_id}", "server", 0, 2)
            self.forward(session_id, pg)
        except Exception as e:
            gone = session_id not in self._sessions
            _logger.warning("session %s %s: %s", session_id, "was abandoned" if gone else "failed", e)
        finally:
            with self._lock:
                self._sessions.pop(session_id, None)
            over.set()
            pg.shutdown()
            _hang_up(connection)  # ends the watcher
            watcher.join(_REQUEST_TIMEOUT_SEC)

    def _watch(self, session_id: str, connection: socket.socket, over: threading.Event) -> None:
        """Aborts the session when the client's connection breaks."""
        lease = select.poll()
        with suppress(OSError, ValueError):  # it is closed already
            lease.register(connection, select.POLLIN)
            lease.poll()  # a client sends nothing more: what can be read is the end
        with self._lock:
            pg = self._sessions.pop(session_id, None)
        while pg is not None and not over.is_set():
            pg.abort()  # once is not enough: the session may be about to connect
            over.wait(0.1)


class _Server(_IPv6HTTPServer):
    def __init__(self, address: tuple[str, int], owner: ParameterServer) -> None:
        super().__init__(address, _Handler)
        self.owner = owner


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # type: ignore[assignment]
    connection: _DeadlineSocket
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        if self.headers.get("Origin") is not None:  # a web page's script
            self.send_error(403, "sessions are not for browsers")
            return
        if self.path != _PATH:
            self.send_error(404, f"there is {_PATH} only")
            return
        if not self.server.admit(self.connection):
            self.close_connection = True
            return
        session_id = str(uuid.uuid4())
        store = host_port(announced_host(), self.server.owner._store.port)
        body = json.dumps({"session_id": session_id, "store_addr": store}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        self.close_connection = True
        self.server.owner._serve(session_id, self.connection)

    def log_message(self, format: str, *args: Any) -> None:
        _logger.debug(format, *args)


def _ask(address: str) -> tuple[HTTPConnection, str, str]:
    """The open connection that holds the session, its id, and the store to meet at."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme != "http" or parts.hostname is None or parts.port is None:
        raise ValueError(f"address={address!r}: http://host:port{_PATH} is needed")
    connection = HTTPConnection(parts.hostname, parts.port, timeout=_REQUEST_TIMEOUT_SEC)
    try:
        connection.request("POST", parts.path or _PATH)
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(f"{address} has no session for us: {response.status} {response.reason}")
        answer = json.loads(body)
        return connection, answer["session_id"], answer["store_addr"]
    except (OSError, HTTPException, ValueError, KeyError) as e:
        connection.close()
        raise RuntimeError(f"no session from {address}: {e}") from e
    except BaseException:
        connection.close()
        raise


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # the client was faster
        connection.shutdown(socket.SHUT_RDWR)
