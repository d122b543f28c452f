"""Measurements on a GPU that nothing else uses: `python python/bench/gpu.py`, or `--quick` for about three
minutes.

Prints tables and writes them, with date, device and command, into docs/internals/gpu.md. Each subject is
measured in a fresh process with one rank, because NCCL before 2.30 refuses two on one device. With 2.30, two
groups share the device to measure how long the survivor of a killed group takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from common import REPOSITORY, Side
from recovery import fail_once

WORKER = Path(__file__).resolve().parent / "gpu_worker.py"
PAGE = REPOSITORY / "docs" / "internals" / "gpu.md"
BEGIN, END = "<!-- figures: written by gpu.py -->", "<!-- end of figures -->"
CHILD_TIMEOUT_S = 300


@dataclass(frozen=True)
class Group:
    """A kind of process group: its column in the tables, its class and the arguments.

    `job` is its kind in the jobs of recovery.py, if it is measured there.
    """

    name: str
    kind: str = ""
    job: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    upstream: bool = False
    quick: bool = True


GROUPS = [
    Group("PyTorch"),
    Group("ours", "ProcessGroupNCCL", "nccl"),
    Group(
        "isolated, standby",
        "ProcessGroupBabyNCCL",
        "isolated nccl",
        {"standby": True, "standby_context": False},
    ),
    Group("isolated", "ProcessGroupBabyNCCL", settings={"standby": False}, quick=False),
    Group(
        "isolated, standby with a context",
        "ProcessGroupBabyNCCL",
        settings={"standby_context": True},
        quick=False,
    ),
    Group("upstream", "ProcessGroupNCCL", "nccl", upstream=True),
    Group("upstream, isolated", "ProcessGroupBabyNCCL", "isolated nccl", upstream=True),
]
FIGURES = {
    "issue_us": "begin an allreduce of 16 floats, µs",
    "done_us": "the same until the device has finished, µs",
    "large_ms": "allreduce of 25 MB until finished, ms",
    "step_host_ms": "20 allreduces of 5 MB and their waits, on the host, ms",
    "step_ms": "the same until finished, ms",
    "reconfigure_ms": "reconfigure until the first allreduce has finished, ms",
    "abort_ms": "abort, ms",
    "device_mb": "device memory, MB",
}
RATES = {
    "heal": {
        "in_place_gb_s": "heal 1 GiB, device to device, in place",
        "heal_gb_s": "the same into new memory, then copied to its place",
        "format_gb_s": "the same, in the upstream format",
    },
    "quantization": {
        "quantize_gb_s": "quantize float32 into fp8",
        "reduce_gb_s": "reduce fp8 of two ranks",
        "dequantize_gb_s": "dequantize fp8 into float32",
    },
}
Results = dict[str, dict[str, Any]]


def main() -> int:
    args = _parse()
    import torch

    if not torch.cuda.is_available():
        print("needs a CUDA device: torch.cuda.is_available() is False", file=sys.stderr)
        return 1
    began = time.monotonic()
    rounds, pause = (3, 1.0) if args.quick else (args.rounds, 2.0)
    groups = [g for g in GROUPS if (g.quick or not args.quick) and (args.upstream or not g.upstream)]
    results: Results = {}

    def measure(name: str, upstream: bool, *what: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {name}", file=sys.stderr, flush=True)
        results[name] = in_child(args.upstream if upstream else None, *what)
        # Written after each subject, so that the figures of an interrupted run are kept.
        print(json.dumps(results[name]), file=sys.stderr, flush=True)

    for g in groups:
        what = ("group", f"--group={g.kind}", f"--settings={json.dumps(g.settings)}")
        measure(g.name, g.upstream, *what, f"--rounds={rounds}", f"--pause={pause}")
    for subject in RATES:
        measure(subject, False, subject)
        if args.upstream:
            measure(f"{subject}, upstream", True, subject)
    measure("killed", False, "killed")
    if torch.cuda.nccl.version() >= (2, 30):
        for g in groups:
            if g.job:
                print(
                    f"[{time.monotonic() - began:5.1f} s] {g.name}, a group is killed",
                    file=sys.stderr,
                    flush=True,
                )
                results[f"{g.name}, a group is killed"] = killed = recovery(g, args.upstream, rounds)
                print(json.dumps(killed), file=sys.stderr, flush=True)

    command = "python python/bench/gpu.py" + (" --quick" if args.quick else f" --rounds {args.rounds}")
    command += " --upstream DIR" if args.upstream else ""
    head = f"{date.today().isoformat()}, {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, "
    head += f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, `{command}`; medians."
    if args.upstream:
        head += f" Upstream: {_version(args.upstream)}."
    text = page(results, groups, head, bool(args.upstream))
    print(text)
    print(f"[{time.monotonic() - began:5.1f} s] done", file=sys.stderr)
    if not args.no_write:
        old = PAGE.read_text()
        first, last = old.index(BEGIN) + len(BEGIN), old.index(END)
        PAGE.write_text(f"{old[:first]}\n\n{text}\n\n{old[last:]}")
    return int(any("error" in result for result in results.values()))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure process groups, heals and codes on a GPU.")
    parser.add_argument(
        "--rounds", type=int, default=10, help="reconfigurations and aborts of each kind; default: 10"
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds of fewer kinds: about three minutes")
    parser.add_argument("--upstream", type=_directory, help="directory of upstream's package, for comparison")
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: allowed is 1 or more")
    return args


def _directory(name: str) -> Path:
    path = Path(name).resolve()
    if not (path / "torchft").is_dir():
        raise argparse.ArgumentTypeError(f"{name}: has no folder torchft")
    return path


def _version(upstream: Path) -> str:
    names = [path.name.removesuffix(".dist-info") for path in upstream.glob("torchft*.dist-info")]
    return names[0] if names else "of unknown version"


def in_child(upstream: Path | None, *what: str) -> dict[str, Any]:
    """Return the figures of gpu_worker.py; `error` if it failed."""
    first = upstream or REPOSITORY
    others = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(first), *others])}
    command = [sys.executable, str(WORKER), *what]
    try:
        done = subprocess.run(command, capture_output=True, timeout=CHILD_TIMEOUT_S, text=True, env=env)
    except subprocess.TimeoutExpired:
        return {"error": f"not ended after {CHILD_TIMEOUT_S} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        errors = done.stderr.strip().splitlines()
        return {"error": f"ended with {done.returncode}: {errors[-1] if errors else 'no output'}"}
    figures = json.loads(lines[-1])
    if "torchft" in figures and Path(figures["torchft"]).parent != first:
        return {"error": f"measured {figures['torchft']} and not {first}"}
    return figures


def recovery(group: Group, upstream: Path | None, rounds: int) -> dict[str, Any]:
    """Return how long the survivor of two groups takes when the other one is killed."""
    side = Side(group.name, upstream if group.upstream and upstream else REPOSITORY)
    try:
        seconds = [fail_once(side, "kill", 2, group.job)["seconds"] for _ in range(rounds)]
    except Exception as e:
        return {"error": (str(e) or type(e).__name__).splitlines()[0]}
    return {"recovery_s": statistics.median(seconds)}


def page(results: Results, groups: list[Group], head: str, upstream: bool) -> str:
    """Return the text between the markers on the page."""
    lines = [head, "", "| | " + " | ".join(g.name for g in groups) + " |", "|---" * (len(groups) + 1) + "|"]
    for name, what in FIGURES.items():
        lines.append(f"| {what} | " + " | ".join(_cell(results[g.name], name) for g in groups) + " |")
    killed = [results.get(f"{g.name}, a group is killed", {}) for g in groups]
    if any(killed):
        cells = [_cell(figures, "recovery_s") for figures in killed]
        lines.append(f"| a group of two is killed, until the other commits, s | {' | '.join(cells)} |")
    columns = ["GB/s", "ours", *(["upstream"] if upstream else [])]
    lines += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for subject, rates in RATES.items():
        for name, what in rates.items():
            sides = [results[subject], *([results[f"{subject}, upstream"]] if upstream else [])]
            lines.append(f"| {what} | " + " | ".join(_cell(side, name) for side in sides) + " |")
    errors = [f"- {name}: {result['error']}" for name, result in results.items() if "error" in result]
    if errors:
        lines += ["", *errors]
    if "released_s" in results["killed"]:
        seconds = results["killed"]["released_s"]
        fate = "does not continue within 20 s" if seconds is None else f"continues after {seconds:.2f} s"
        lines += ["", f"A stream that waits for a killed worker {fate}."]
    return "\n".join(lines)


def _cell(figures: dict[str, Any], name: str) -> str:
    if "error" in figures:
        return "failed"
    return f"{figures[name]:.2f}" if name in figures else "-"


if __name__ == "__main__":
    sys.exit(main())
