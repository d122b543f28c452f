"""Measure process groups on a GPU: `python python/bench/gpu.py`, on a device that nobody else uses.

Prints a table and writes it, with date, device and command, into docs/gpu.md. Each kind of group is measured in a fresh
process; NCCL refuses two ranks on one device, so every group has one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

PAGE = REPOSITORY / "docs" / "gpu.md"
BEGIN, END = "<!-- figures: written by gpu.py -->", "<!-- end of figures -->"

KINDS = {
    "in-process": {},
    "isolated": {"standby": False},
    "isolated, standby": {"standby": True, "standby_context": False},
    "isolated, standby with a context": {"standby": True, "standby_context": True},
}
KILLED = "killed"
HEAL = "heal"
HEAL_BYTES = 1 << 30
FIGURES = {
    "issue_us": "begin an allreduce of 16 floats, µs",
    "done_us": "the same until the device has finished, µs",
    "large_ms": "allreduce of 25 MB until finished, ms",
    "reconfigure_ms": "reconfigure until the first allreduce has finished, ms",
    "abort_ms": "abort, ms",
    "device_mb": "device memory, MB",
}
CHILD_TIMEOUT_S = 300


def main() -> int:
    args = _parse()
    if args.child:
        others = {KILLED: _killed, HEAL: _heal}
        figures = others[args.child]() if args.child in others else _measure(args.child, args.rounds)
        print(json.dumps(figures), flush=True)
        # A stream that waits for a killed process would keep a normal exit.
        os._exit(0)

    import torch

    if not torch.cuda.is_available():
        print("needs a CUDA device: torch.cuda.is_available() is False", file=sys.stderr)
        return 1
    results = {kind: _in_child(kind, args.rounds) for kind in (*KINDS, KILLED, HEAL)}
    text = _page(results, torch.cuda.get_device_name(), torch.__version__, args.rounds)
    print(text)
    if not args.no_write:
        page = PAGE.read_text()
        begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
        PAGE.write_text(f"{page[:begin]}\n\n{text}\n\n{page[end:]}")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure process groups on a GPU.")
    parser.add_argument("--rounds", type=int, default=10, help="reconfigurations and aborts of each kind; default: 10")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: allowed is 1 or more")
    return args


def _in_child(kind: str, rounds: int) -> dict[str, Any]:
    print(f"measuring: {kind}", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--child", kind, "--rounds", str(rounds)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=CHILD_TIMEOUT_S, check=True, text=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as e:
        return {"error": str(e)}
    return json.loads(done.stdout.strip().splitlines()[-1])


def _measure(kind: str, rounds: int) -> dict[str, float]:
    import torch
    from torch.distributed import ReduceOp, TCPStore

    from tests.gpu.device import DEVICE, settled_mb
    from torchft.process_group import ProcessGroupBabyNCCL, ProcessGroupNCCL

    torch.cuda.set_device(DEVICE)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    small, large = torch.ones(16, device=DEVICE), torch.ones(25_000_000 // 4, device=DEVICE)
    before = settled_mb()
    timeout = timedelta(seconds=60)
    group: Any = ProcessGroupNCCL(timeout) if kind == "in-process" else ProcessGroupBabyNCCL(timeout, **KINDS[kind])
    number = 0

    def reconfigure() -> None:
        nonlocal number
        number += 1
        group.configure(f"localhost:{store.port}/{number}", "replica", 0, 1)
        finish(small)

    def finish(tensor: torch.Tensor) -> None:
        group.allreduce([tensor], ReduceOp.SUM).wait()
        torch.cuda.synchronize()

    reconfigure()
    # The worker that stands by has come up, too.
    time.sleep(10)
    device_mb = settled_mb() - before

    issued = []
    for _ in range(1000):
        began = time.perf_counter()
        work = group.allreduce([small], ReduceOp.SUM)
        issued.append(time.perf_counter() - began)
        work.wait()
        torch.cuda.synchronize()
    done = _times(lambda: finish(small), 1000)
    large_done = _times(lambda: finish(large), 100)
    reconfigured, aborted = [], []
    for _ in range(rounds):
        # Steps lie between two quorums: time enough for the next worker to come up.
        time.sleep(2)
        reconfigured += _times(reconfigure, 1)
        aborted += _times(group.abort, 1)
    group.shutdown()
    return {
        "issue_us": statistics.median(issued) * 1e6,
        "done_us": statistics.median(done) * 1e6,
        "large_ms": statistics.median(large_done) * 1e3,
        "reconfigure_ms": statistics.median(reconfigured) * 1e3,
        "abort_ms": statistics.median(aborted) * 1e3,
        "device_mb": device_mb,
    }


def _times(call: Callable[[], object], count: int) -> list[float]:
    """Seconds that each of `count` calls took."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def _killed() -> dict[str, Any]:
    """Whether a stream goes on that waits for an event of a process that is killed before it got there."""
    import torch

    from tests.gpu.device import DEVICE
    from tests.gpu.test_sharing import Pair

    pair = Pair(queue=True)
    tensor = torch.ones(16, device=DEVICE)
    mark, _ = pair.start([tensor], seconds=60.0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        pair.end.follow(mark)
    time.sleep(0.5)
    if stream.query():
        return {"error": "the stream did not wait at all"}
    pair.process.kill()
    pair.process.join(60)
    began = time.monotonic()
    while time.monotonic() - began < 30:
        if stream.query():
            return {"released_s": time.monotonic() - began}
        time.sleep(0.01)
    return {"released_s": None}


def _heal() -> dict[str, Any]:
    """How fast a state on the device gets onto the device again, of a target in the same process."""
    import torch

    from tests.gpu.device import DEVICE
    from torchft.checkpointing import HTTPTransport

    timeout = timedelta(seconds=60)
    state = {f"t{i}": torch.ones(HEAL_BYTES // 64, dtype=torch.uint8, device=DEVICE) for i in range(64)}
    torch.cuda.synchronize()
    own = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def gb_s(snapshot: bool) -> float:
        source: Any = HTTPTransport(timeout, 0, snapshot)
        target: Any = HTTPTransport(timeout, 0, state_dict=lambda: own)
        seconds = []
        for step in range(4):
            source.send_checkpoint([1], step, state, timeout)
            seconds += _times(lambda step=step: target.recv_checkpoint(0, source.metadata(), step, timeout), 1)
            source.disallow_checkpoint()
        return HEAL_BYTES / 1e9 / statistics.median(seconds[1:])  # the first gets the blocks

    return {"heal_gb_s": gb_s(snapshot=True), "heal_stock_gb_s": gb_s(snapshot=False)}


def _page(results: dict[str, dict[str, Any]], device: str, torch_version: str, rounds: int) -> str:
    lines = [
        f"{date.today().isoformat()}, {device}, PyTorch {torch_version}, "
        f"`python python/bench/gpu.py --rounds {rounds}`; medians.",
        "",
        "| | " + " | ".join(KINDS) + " |",
        "|---" * (len(KINDS) + 1) + "|",
    ]
    for name, what in FIGURES.items():
        cells = [f"{results[kind][name]:.1f}" if name in results[kind] else "failed" for kind in KINDS]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    errors = [f"- {kind}: {result['error']}" for kind, result in results.items() if "error" in result]
    if errors:
        lines += ["", *errors]
    if "released_s" in results[KILLED]:
        seconds = results[KILLED]["released_s"]
        fate = "never goes on (looked at for 30 s)" if seconds is None else f"goes on after {seconds:.2f} s"
        lines += ["", f"A stream that waits for an event of a worker that is killed before it got there {fate}."]
    if "heal_gb_s" in results[HEAL]:
        ours, stock = results[HEAL]["heal_gb_s"], results[HEAL]["heal_stock_gb_s"]
        lines += [
            "",
            f"Healing {HEAL_BYTES / 1e9:.1f} GB in place, device to device: {ours:.2f} GB/s; "
            f"{stock:.2f} GB/s in the published format.",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
