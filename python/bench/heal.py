"""The rate of a transfer of a state between two replica groups, and its memory beside the state itself.

Ours with and without checksums, upstream, and plain TCP with 8 streams take turns, each between its pair of
processes on loopback. "In place" and plain TCP receive into memory that was used before; the others allocate
it, like a group that has just been started. "Trains on" copies the state, because the source needs it back at
once.

Extra memory is the peak of a process's resident memory during the transfer (VmHWM), less its resident memory
after its start, without a state, and less the state itself.

    python python/bench/heal.py                         # 2 GB, 5 rounds
    python python/bench/heal.py --gb 0.5 --rounds 3
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve()
STREAMS = 8
LARGE = 20 << 20  # bytes; such tensors count as large
SMALL, SMALL_TENSORS = 10 << 10, 400
TIMEOUT_S = 120
NOT_SHOWN = "ours, no checksums"  # left out of the table, because others show each of its settings
GOALS = {"ours, in place, no checksums": 0.9, "ours, in place": 0.7}
GOAL_MEMORY = 0.1

# name, package, keyword arguments of both transports and of the target's, whether the target has the state
# already
VARIANTS: list[tuple[str, str, dict[str, Any], dict[str, Any], bool]] = [
    ("plain TCP", "", {}, {}, True),
    ("ours, in place, no checksums", "ours", {}, {"checksum": False}, True),
    ("ours, in place", "ours", {}, {}, True),
    ("ours, no checksums", "ours", {}, {"checksum": False}, False),
    ("ours", "ours", {}, {}, False),
    ("upstream", "upstream", {}, {}, False),
    (f"upstream, {STREAMS} chunks", "upstream", {"num_chunks": STREAMS}, {"num_chunks": STREAMS}, False),
]


class Worker:
    """Source or target of a transfer. Commands arrive on stdin; an answer is a line of JSON."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.state: dict[str, Any] = {}
        # a warm-up: the first transfer of a process loads libraries
        transport = self._transport({})
        transport.send_checkpoint([1], 1, {"a": torch.ones(3)}, timedelta(seconds=TIMEOUT_S))
        transport.recv_checkpoint(0, transport.metadata(), 1, timedelta(seconds=TIMEOUT_S))
        transport.shutdown()

    def do_state(self, nbytes: int, value: float) -> dict[str, Any]:
        large = max(1, (nbytes - SMALL * SMALL_TENSORS) // LARGE)
        sizes = [LARGE] * large + [SMALL] * SMALL_TENSORS
        self.state = {f"t{i}": self.torch.full((size // 4,), value) for i, size in enumerate(sizes)}
        return {"nbytes": sum(sizes)}

    def do_forget(self) -> dict[str, Any]:
        self.state = {}
        # Return freed memory to the system, so that the next transfer has to allocate it again.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        return {}

    def do_serve(self, plain: bool, kwargs: dict[str, Any]) -> dict[str, Any]:
        if plain:
            self.listener = socket.create_server(("127.0.0.1", 0))
            self.thread = threading.Thread(target=self._send_plain)
            self.thread.start()
            return {"metadata": str(self.listener.getsockname()[1])}
        self.transport = self._transport(kwargs)
        self.transport.send_checkpoint([1], 1, self.state, timedelta(seconds=TIMEOUT_S))
        return {"metadata": self.transport.metadata()}

    def do_end(self, plain: bool) -> dict[str, Any]:
        if plain:
            self.thread.join(TIMEOUT_S)
            self.listener.close()
        else:
            self.transport.disallow_checkpoint()
            self.transport.shutdown()
        return {}

    def do_fetch(self, plain: bool, kwargs: dict[str, Any], metadata: str, in_place: bool) -> dict[str, Any]:
        if plain:
            start = time.perf_counter()
            self._receive_plain(int(metadata))
            return {"seconds": time.perf_counter() - start, "ok": self._all_ones()}
        transport, into = self._transport(kwargs), {}
        if in_place:
            from torchft.checkpointing.client.target import TargetState

            into["target"] = TargetState(lambda: self.state, writable=True)
        start = time.perf_counter()
        self.state = transport.recv_checkpoint(0, metadata, 1, timedelta(seconds=TIMEOUT_S), **into)
        seconds = time.perf_counter() - start
        transport.shutdown()
        return {"seconds": seconds, "ok": self._all_ones()}

    def do_usage(self) -> dict[str, Any]:
        """Processor time so far in seconds; resident memory now and its peak since the last call, in
        bytes.
        """
        status = Path("/proc/self/status").read_text()
        kib = {
            line.split(":")[0]: int(line.split()[1]) for line in status.splitlines() if line.startswith("Vm")
        }
        Path("/proc/self/clear_refs").write_text("5")
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {"cpu": used.ru_utime + used.ru_stime, "rss": kib["VmRSS"] << 10, "peak": kib["VmHWM"] << 10}

    def _transport(self, kwargs: dict[str, Any]) -> Any:
        from torchft.checkpointing import HTTPTransport

        options: dict[str, Any] = {"timeout": timedelta(seconds=TIMEOUT_S), "num_chunks": 0, **kwargs}
        return HTTPTransport(**options)

    def _all_ones(self) -> bool:
        return all(bool((t[:: max(1, t.numel() // 100)] == 1).all()) for t in self.state.values())

    def _shares(self) -> Iterator[list[memoryview]]:
        tensors = list(self.state.values())
        for i in range(STREAMS):
            yield [
                memoryview((ctypes.c_char * (t.numel() * 4)).from_address(t.data_ptr())).cast("B")
                for t in tensors[i::STREAMS]
            ]

    def _send_plain(self) -> None:
        def send(share: list[memoryview], sock: socket.socket) -> None:
            with closing(sock):
                for memory in share:
                    sock.sendall(memory)

        _together(send, [(share, self.listener.accept()[0]) for share in self._shares()])

    def _receive_plain(self, port: int) -> None:
        def receive(share: list[memoryview], sock: socket.socket) -> None:
            with closing(sock):
                for memory in share:
                    while memory:
                        n = sock.recv_into(memory, 0, socket.MSG_WAITALL)
                        if n == 0:
                            raise RuntimeError("the stream was cut short")
                        memory = memory[n:]

        _together(
            receive, [(share, socket.create_connection(("127.0.0.1", port))) for share in self._shares()]
        )


def _together(work: Any, arguments: list[tuple[Any, ...]]) -> None:
    threads = [threading.Thread(target=work, args=args) for args in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)


def serve_commands(worker: Any) -> None:
    """Execute the commands on stdin, one per line, until it ends."""
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(worker, f"do_{command.pop('do')}")(**command)), flush=True)


class Process:
    """A worker process. It runs `serve_commands` of a script, with the torchft in `path`."""

    def __init__(self, path: Path, script: Path = SCRIPT) -> None:
        import subprocess

        from processes import clean_environment

        self._process = subprocess.Popen(
            [sys.executable, str(script), "worker"],
            env={**clean_environment(path), "TORCHFT_HOST": "127.0.0.1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the server logs a line for each request
            text=True,
        )
        self.idle_rss: int = self.do("usage")["rss"]

    def do(self, do: str, **args: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **args}) + "\n")
        self._process.stdin.flush()
        killer = threading.Timer(2 * TIMEOUT_S, self._process.kill)
        killer.start()
        line = self._process.stdout.readline()
        killer.cancel()
        if not line:
            raise RuntimeError(f"the worker ended during {do} {args}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def measure(ours: Any, upstream: Any, rounds: int, progress: Any, gb: float = 2.0) -> dict[str, Any]:
    """Return, for each variant: GB/s and the ratio to plain TCP of the same round, CPU seconds per GB, extra
    memory.
    """
    nbytes = int(gb * 1e9)
    paths = {"": ours.path, "ours": ours.path, "upstream": upstream.path}
    pairs: dict[str, tuple[Process, Process]] = {}
    rows: dict[str, list[dict[str, float]]] = {variant[0]: [] for variant in VARIANTS}
    try:
        for package, path in paths.items():
            pairs[package] = Process(path), Process(path)
        return _rounds(pairs, rows, rounds, nbytes, progress)
    finally:
        for pair in pairs.values():
            for process in pair:
                process.close()


def _rounds(
    pairs: dict[str, tuple[Process, Process]],
    rows: dict[str, list[dict[str, float]]],
    rounds: int,
    nbytes: int,
    progress: Any,
) -> dict[str, Any]:
    from common import Spread, rotated

    for number in range(rounds):
        for variant in rotated(VARIANTS, number):
            rows[variant[0]].append(_one(*pairs[variant[1]], variant, nbytes))
        plain = rows["plain TCP"][-1]
        for row in rows.values():
            row[-1]["ratio"] = row[-1]["gb_per_s"] / plain["gb_per_s"]
            row[-1]["cpu_ratio"] = plain["cpu"] / row[-1]["cpu"]
        progress(
            f"heal, round {number + 1}/{rounds}: "
            + ", ".join(
                f"{name} {row[-1]['gb_per_s']:.2f} ({row[-1]['ratio']:.2f})" for name, row in rows.items()
            )
        )
    return {
        "gb": nbytes / 1e9,
        "transfers": {
            name: {key: vars(Spread.of(r[key] for r in row)) for key in row[0]} for name, row in rows.items()
        },
    }


def _one(source: Process, target: Process, variant: Any, nbytes: int) -> dict[str, float]:
    _, package, kwargs, target_kwargs, in_place = variant
    plain = package == ""
    nbytes = source.do("state", nbytes=nbytes, value=1.0)["nbytes"]
    target.do("forget")
    if in_place:
        target.do("state", nbytes=nbytes, value=2.0)
    before = [p.do("usage") for p in (source, target)]
    metadata = source.do("serve", plain=plain, kwargs=kwargs)["metadata"]
    got = target.do("fetch", plain=plain, kwargs=dict(target_kwargs), metadata=metadata, in_place=in_place)
    source.do("end", plain=plain)
    after = [p.do("usage") for p in (source, target)]
    for process in (source, target):  # so that waiting pairs use no memory
        process.do("forget")
    if not got["ok"]:
        raise RuntimeError(f"{variant[0]}: wrong data")
    extra = [a["peak"] - process.idle_rss - nbytes for a, process in zip(after, (source, target))]
    return {
        "gb_per_s": nbytes / got["seconds"] / 1e9,
        "cpu": sum(a["cpu"] - b["cpu"] for a, b in zip(after, before)) / nbytes * 1e9,
        "extra_source": max(0, extra[0]) / nbytes,
        "extra_target": max(0, extra[1]) / nbytes,
    }


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    from common import Spread, markdown_table, verdict

    rows = []
    for name, figures in result["transfers"].items():
        if name == NOT_SHOWN:
            continue
        spread = {key: Spread(**value) for key, value in figures.items()}
        ratio = spread["ratio"].text()
        if name in GOALS:
            ratio += f" (goal >= {GOALS[name]:g}: {verdict(spread['ratio'].median >= GOALS[name])})"
        memory = []
        for side in ("extra_source", "extra_target"):
            text = f"{100 * spread[side].median:.1f} %"
            if name in GOALS:
                text += f" {verdict(spread[side].median < GOAL_MEMORY)}"
            memory.append(text)
        name = name.replace("upstream", upstream)
        rows.append([name, spread["gb_per_s"].middle(), ratio, spread["cpu"].middle(), *memory])
    source = f"extra memory (goal < {100 * GOAL_MEMORY:g} %), source"
    head = ["transfer", "GB/s", "ratio to plain TCP", "CPU s a GB, both ends", source, "target"]
    return markdown_table(head, rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Measure the rate of a transfer of a state between two groups."
    )
    parser.add_argument("--gb", type=float, default=2.0, help="size of the state; default 2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--upstream", default="nightly", help="nightly or stable")
    args = parser.parse_args()
    if args.gb <= 0 or args.rounds < 1:
        parser.error(f"--gb {args.gb} --rounds {args.rounds}: allowed are more than 0, and 1 or more")
    from common import Side
    from processes import ours_path
    from upstream import REQUIREMENTS, install

    upstream = Side(REQUIREMENTS[args.upstream].replace("==", " "), install(args.upstream))
    result = measure(
        Side("ours", ours_path()), upstream, args.rounds, lambda line: print(line, flush=True), args.gb
    )
    print(tables(result, "ours", upstream.name))
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        sys.path.remove(str(Path(__file__).resolve().parent))
        serve_commands(Worker())
    else:
        sys.path[:0] = [str(SCRIPT.parent), str(SCRIPT.parents[2] / "tests" / "process")]
        sys.exit(main())
