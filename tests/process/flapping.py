"""A proxy whose network is interrupted repeatedly: its connections break, and new ones fail."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class Flapping:
    """Forwards TCP connections to a port of this machine, until the end of the `with` block.

    Args:
        every_s: seconds from the beginning of an interruption to the beginning of the next one.
        lasts_s: duration of an interruption in seconds.

    Attributes:
        address: host:port on which it listens.
        port: the port to which it forwards; set it before the first connection.
        broken: number of connections that were cut.
    """

    def __init__(self, every_s: float = 1.0, lasts_s: float = 0.1) -> None:
        self._every_s, self._lasts_s = every_s, lasts_s
        self.port = 0
        self.broken = 0
        self._away = False
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="flapping", daemon=True)

    def __enter__(self) -> Flapping:
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._pass_on, "127.0.0.1", 0))
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._do(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def flap(self, times: int) -> None:
        """Interrupts the network this many times, and returns after the last interruption."""
        self._do(self._flap(times))

    def _do(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()

    async def _flap(self, times: int) -> None:
        for _ in range(times):
            self.broken += len(self._open) // 2
            self._away = True
            self._break()
            await asyncio.sleep(self._lasts_s)
            self._away = False
            await asyncio.sleep(self._every_s - self._lasts_s)

    async def _shut(self) -> None:
        self._server.close()
        self._break()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    def _break(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._away:
            writer.transport.abort()
            return
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, there_writer}
        self._open |= both
        try:
            await asyncio.gather(_pump(reader, there_writer), _pump(there_reader, writer))
        finally:
            self._open -= both
            for one in both:
                one.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()  # gRPC never ends one direction only
