"""A source whose answers a test determines."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from typing import Iterator


@contextmanager
def server_that_sends(answer: bytes) -> Iterator[str]:
    """A source that answers every request with these bytes and closes the connection. Returns its
    metadata.
    """
    listener = socket.create_server(("localhost", 0))

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                sock.recv(4096)
                sock.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://localhost:{listener.getsockname()[1]}/checkpoint/"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
