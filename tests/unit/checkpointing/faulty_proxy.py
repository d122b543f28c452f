"""A TCP proxy that damages its traffic; a seed determines the faults."""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

_PIECE = 64 << 10


@dataclass
class Fault:
    """A fault of one connection.

    Args:
        kind: drop (the connection is closed), reset, truncate (closed in the middle of some data), flip (one
            bit), delay (no data is forwarded for a while)
        after: number of bytes that are forwarded before the fault
        from_source: direction in which bytes are counted, and in which a flip or truncation occurs
    """

    kind: str
    after: int
    from_source: bool
    bit: int = 0
    seconds: float = 0.05


class Proxy:
    """Forwards a port. Each of the first connections gets one fault, later ones none.

    Args:
        port: port of the source on this host
        faults: faults of the first connections, in their order
    """

    def __init__(self, port: int, faults: list[Fault]) -> None:
        self._target = port
        self._faults = list(faults)
        self._listener = socket.create_server(("localhost", 0))
        self.port: int = self._listener.getsockname()[1]
        self.done: list[Fault] = []  # the faults that have occurred
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._stop.is_set():
            readable, _, _ = select.select([self._listener], [], [], 0.05)
            if readable:
                client, _ = self._listener.accept()
                fault = self._faults.pop(0) if self._faults else None
                thread = threading.Thread(target=self._forward, args=(client, fault))
                self._threads.append(thread)
                thread.start()

    def _forward(self, client: socket.socket, fault: Fault | None) -> None:
        try:
            server = socket.create_connection(("localhost", self._target), timeout=5)
        except OSError:
            client.close()
            return
        with client, server, suppress(OSError):
            self._pump(client, server, fault)

    def _pump(self, client: socket.socket, server: socket.socket, fault: Fault | None) -> None:
        other = {client: server, server: client}
        passed = 0
        while not self._stop.is_set() and other:
            readable, _, _ = select.select(list(other), [], [], 0.05)
            for sock in readable:
                data = sock.recv(_PIECE)
                if not data:
                    return
                if fault is not None and (sock is server) == fault.from_source:
                    passed += len(data)
                    if passed > fault.after:
                        self.done.append(fault)
                        at = len(data) - (passed - fault.after)
                        data = self._strike(fault, data, at, client, server)
                        fault = None
                        if data is None:
                            return
                other[sock].settimeout(5)
                other[sock].sendall(data)

    def _strike(
        self, fault: Fault, data: bytes, at: int, client: socket.socket, server: socket.socket
    ) -> bytes | None:
        if fault.kind == "flip":
            return data[:at] + bytes([data[at] ^ (1 << fault.bit)]) + data[at + 1 :]
        if fault.kind == "delay":
            self._stop.wait(fault.seconds)
            return data
        if fault.kind == "truncate":
            (client if fault.from_source else server).sendall(data[:at])
        elif fault.kind == "reset":
            for sock in (client, server):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return None

    def close(self) -> None:
        self._stop.set()
        end = time.monotonic() + 10
        for thread in self._threads:
            thread.join(max(0, end - time.monotonic()))
        self._listener.close()
        assert not any(thread.is_alive() for thread in self._threads)


def random_faults(rng: random.Random, kinds: list[str], size: int, most: int) -> list[Fault]:
    """Makes faults at random places of a transfer of this size."""
    return [
        Fault(
            rng.choice(kinds),
            # near the start, which contains the structure of the messages, or anywhere
            rng.randrange(200) if rng.random() < 0.3 else rng.randrange(size),
            from_source=rng.random() < 0.8,
            bit=rng.randrange(8),
            seconds=rng.uniform(0, 0.1),
        )
        for _ in range(rng.randrange(most + 1))
    ]
