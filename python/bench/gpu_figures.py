"""All that is measured on a GPU, in one file, within eight minutes: `make gpu-figures`.

    python python/bench/gpu_figures.py [--out FILE] [--seconds S] [PART ...]

The parts run one after the other, in the order of `PARTS`. A part that fails, or is not done within its share
of the time, is reported as such, with its last lines, and the next one runs. The file is written anew after
each part, so that an interruption loses nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from common import REPOSITORY

from torchft.launch.process_tree import kill_tree

TOTAL_S = 480.0
LINES = 80
DONE = "done"
SURVIVOR_ENV = {
    "TORCH_DIST_USE_NCCL2": "0",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "5",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
}


@dataclass(frozen=True)
class Part:
    """A measurement.

    Attributes:
        name: what PART selects.
        what: the heading in the file.
        command: its arguments; {seconds} is replaced with the part's share of the time.
        wants_s: how long it takes on an H200, by estimate: this time is kept for it. None: takes what the
            others leave.
        env: added to the environment.
    """

    name: str
    what: str
    command: Sequence[str]
    wants_s: float | None = None
    env: dict[str, str] = field(default_factory=dict)


def _bench(name: str, *args: str) -> list[str]:
    return [sys.executable, str(REPOSITORY / "python" / "bench" / name), *args]


PARTS = [
    Part("tests", "make test-gpu", [sys.executable, "-m", "tests.gpu.run", "--total", "{seconds}"]),
    Part("figures", "python python/bench/gpu.py --quick", _bench("gpu.py", "--quick", "--no-write"), 130),
    Part(
        "survivor",
        "a survivor lives 60 s after a kill, beside a world of PyTorch's older backend",
        _bench("gpu_job.py", "survivor"),
        90,
        SURVIVOR_ENV,
    ),
    Part(
        "blocking",
        "PyTorch's group, launches of a blocking communicator",
        _bench("gpu_worker.py", "group", "--rounds=3", "--pause=0.5"),
        20,
        {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"},
    ),
    Part(
        "nonblocking",
        "PyTorch's group, launches of a non-blocking communicator, as torchft's",
        _bench("gpu_worker.py", "group", "--rounds=3", "--pause=0.5"),
        20,
        {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"},
    ),
    Part(
        "reserved",
        "reserved memory after 1 and 40 quantized allreduces",
        _bench("gpu_job.py", "reserved"),
        20,
    ),
    Part(
        "gap",
        "from the last allreduce to the optimizer's first kernel in train_fsdp.py",
        _bench("gpu_job.py", "gap"),
        30,
    ),
    Part(
        "heal-along",
        "python python/bench/heal_along.py --device cuda --group nccl --mb 1000 --rate 200 --rounds 3",
        _bench("heal_along.py", "--device=cuda", "--group=nccl", "--mb=1000", "--rate=200", "--rounds=3"),
        100,
    ),
]


def main() -> int:
    args = _parse()
    return measure([part for part in PARTS if part.name in args.parts], args.seconds, args.out)


def measure(parts: Sequence[Part], total_s: float, out: Path) -> int:
    """Runs the parts one after the other, and writes `out` after each. Returns 1 if one failed or is not
    done.
    """
    until = time.monotonic() + total_s
    began = datetime.now(timezone.utc)
    summary: list[str] = []
    texts: list[str] = []
    for number, part in enumerate(parts):
        later_s = sum(other.wants_s or 0 for other in parts[number + 1 :])
        left_s = until - time.monotonic()
        # At least its own share; more if the parts before took less than theirs, or if none comes after it.
        share_s = min(left_s, max(part.wants_s or 0, left_s - later_s))
        print(f"== {part.name}, {max(0, share_s):.0f} s at most: {part.what}", flush=True)
        at = time.monotonic()
        state, output = run(part, share_s)
        summary.append(f"{part.name}: {state}, {time.monotonic() - at:.1f} s")
        texts.append(f"## {part.what}\n\n{part.name}: {state}\n\n```\n{output}\n```\n")
        rest = [f"{other.name}: not run yet" for other in parts[number + 1 :]]
        head = f"# make gpu-figures, {began:%Y-%m-%d %H:%M} UTC\n\n" + "\n".join(
            f"- {s}" for s in summary + rest
        )
        partial = out.with_name(f"{out.name}.new")
        partial.write_text(f"{head}\n\n{chr(10).join(texts)}")
        partial.replace(out)
        print(f"   {summary[-1]}", flush=True)
    print(f"written: {out}")
    return int(any(f": {DONE}, " not in line for line in summary))


def run(part: Part, limit_s: float) -> tuple[str, str]:
    """Runs a part. Returns `DONE` or what went wrong, and its last lines."""
    if limit_s <= 0:
        return "not run for lack of time", ""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
    }
    # A part that looks at its time ends before its limit, and reports what it has.
    command = [word.format(seconds=max(1, int(limit_s * 0.9))) for word in part.command]
    # A file and no pipe: what a killed part has written is kept, and no child can block on it or keep it
    # open.
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            child = subprocess.Popen(command, cwd=REPOSITORY, env={**env, **part.env}, stdout=log, stderr=log)
        except OSError as e:
            return f"failed: {e}", ""
        try:
            code = child.wait(limit_s)
            state = DONE if code == 0 else f"failed: ended with {code}"
        except subprocess.TimeoutExpired:
            state = f"not done: ended after {limit_s:.0f} s"
        finally:
            kill_tree(child)
        log.seek(0)
        return state, "\n".join(log.read().strip().splitlines()[-LINES:])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure on a GPU, and write one file.")
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("gpu-figures.md"), help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=TOTAL_S, help="for all parts together; default: %(default)g"
    )
    args = parser.parse_args()
    if args.seconds <= 0:
        parser.error(f"--seconds {args.seconds:g}: allowed is more than 0")
    for name in args.parts:
        if name not in names:
            parser.error(f"{name}: no such part; allowed are {', '.join(names)}")
    args.parts = args.parts or names
    return args


if __name__ == "__main__":
    sys.exit(main())
