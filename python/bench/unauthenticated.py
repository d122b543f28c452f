"""The slow-down of a heal while clients without a valid request  connect to the checkpoint server: goal 1.5.

They connect from a separate process: first more of them than the server accepts, then 200 per second. They
keep their connections open; half of them send nothing, half the beginning of a request. One target fetches a
state in the native format and one in the upstream format, in turns with and without them. On busy processors,
the processor time of both ends, in benchmarks.json, is more reliable than the duration of a heal. The native
core's port is measured by `go test ./heal -run '^$' -bench AmongUnauthenticated` (in go/).

    python python/bench/run.py unauthenticated
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from heal import TIMEOUT_S, Process, serve_commands

GOAL = 1.5
STATE_BYTES = 500 << 20
TENSOR_BYTES = 10 << 20
EACH_SEC = 1 / 200
TRANSFERS = 3
FORMATS = {"native format": True, "upstream format": False}
HEAD = b"GET /checkpoint/1/full HTTP/1.1\r\n"


class Worker:
    """The source, the target, or the unauthenticated clients."""

    def do_usage(self) -> dict[str, Any]:
        return {"rss": 0, "cpu_s": time.process_time()}

    def do_source(self, native: bool) -> dict[str, Any]:
        state = {f"t{i}": self._tensor(i) for i in range(STATE_BYTES // TENSOR_BYTES)}
        timeout = timedelta(seconds=TIMEOUT_S)
        self.transport = self._transport(native)
        self.transport.send_checkpoint([1], 1, state, timeout)
        return {"metadata": self.transport.metadata(), "places": self.transport._server.max_connections}

    def do_fetch(self, metadata: str, native: bool) -> dict[str, Any]:
        timeout = timedelta(seconds=TIMEOUT_S)
        transport = self._transport(native)
        took = []
        for _ in range(TRANSFERS):
            began = time.monotonic()
            transport.recv_checkpoint(0, metadata, 1, timeout)
            took.append(time.monotonic() - began)
        transport.shutdown()
        return {"seconds": sorted(took)[TRANSFERS // 2]}

    def do_come(self, port: int, at_once: int) -> dict[str, Any]:
        self.kept: list[socket.socket] = []
        self.over = threading.Event()
        for number in range(at_once):
            self._open(port, number)
        self.more = threading.Thread(target=self._go_on, args=(port,))
        self.more.start()
        return {}

    def do_go(self) -> dict[str, Any]:
        self.over.set()
        self.more.join()
        for sock in self.kept:
            sock.close()
        return {"came": len(self.kept)}

    def do_end(self) -> dict[str, Any]:
        self.transport.shutdown()
        return {}

    def _open(self, port: int, number: int) -> None:
        with suppress(OSError):  # the server has cut the connection already
            self.kept.append(socket.create_connection(("localhost", port), timeout=5))
            self.kept[-1].sendall(HEAD if number % 2 else b"")

    def _go_on(self, port: int) -> None:
        number = 0
        while not self.over.wait(EACH_SEC):
            self._open(port, number)
            number += 1

    def _tensor(self, value: int) -> Any:
        import torch

        return torch.full((TENSOR_BYTES,), value, dtype=torch.uint8)

    def _transport(self, native: bool) -> Any:
        from torchft.checkpointing import HTTPTransport
        from torchft.checkpointing.native import core

        if not native:
            core.native = lambda: None
        return HTTPTransport(timedelta(seconds=TIMEOUT_S), 0)


def measure(ours: Any, _upstream: Any, rounds: int, progress: Any) -> dict[str, Any]:
    """Return, per format: seconds alone and among unauthenticated connections, and their ratio in the same
    round.
    """
    from common import Spread

    figures: dict[str, Any] = {}
    for name, native in FORMATS.items():
        source, target, others = processes = [Process(ours.path, Path(__file__).resolve()) for _ in range(3)]
        rows: list[dict[str, float]] = []
        try:
            offered = source.do("source", native=native)
            metadata = offered["metadata"]
            come = {"port": int(metadata.split("/")[2].rsplit(":", 1)[1]), "at_once": offered["places"] + 50}
            # a warm-up: the first transfer of a process loads libraries
            target.do("fetch", metadata=metadata, native=native)
            for number in range(rounds):
                took: dict[bool, float] = {}
                cpu: dict[bool, float] = {}
                for among in (False, True) if number % 2 else (True, False):
                    if among:
                        others.do("come", **come)
                    before = _processor_time(source, target)
                    took[among] = target.do("fetch", metadata=metadata, native=native)["seconds"]
                    cpu[among] = (_processor_time(source, target) - before) / TRANSFERS
                    if among:
                        others.do("go")
                row = {"alone": took[False], "among": took[True], "ratio": took[True] / took[False]}
                rows.append({**row, "cpu_alone": cpu[False], "cpu_among": cpu[True]})
                progress(
                    f"unauthenticated, {name}, round {number + 1}/{rounds}: {row['ratio']:.2f} of the "
                    "time alone"
                )
            source.do("end")
        finally:
            for process in processes:
                process.close()
        figures[name] = {key: vars(Spread.of(row[key] for row in rows)) for key in rows[0]}
    return figures


def _processor_time(*processes: Process) -> float:
    return sum(process.do("usage")["cpu_s"] for process in processes)


def tables(result: dict[str, Any], _ours: str, _upstream: str) -> str:
    """Return the result as Markdown."""
    from common import Spread, markdown_table, verdict

    rows = []
    for name, figures in result.items():
        spread = {key: Spread(**value) for key, value in figures.items()}
        ratio = f"{spread['ratio'].text()} {verdict(spread['ratio'].median <= GOAL)}"
        rows.append([name, spread["alone"].text(), spread["among"].text(), ratio])
    return markdown_table(
        ["format", "alone, s", "with unauthenticated, s", f"ratio (goal <= {GOAL:g})"], rows
    )


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))
    serve_commands(Worker())
