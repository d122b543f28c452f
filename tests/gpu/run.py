"""Runs tests/gpu, each file in a separate process, and prints a table of the tests that ran: `make test-gpu`.

After a device error, all later tests in the same process would fail.

    python -m tests.gpu.run [--limit S] [--total S] [--out FILE] [test_nccl.py ...]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.gpu import report
from tests.policy import devices

ROOT = Path(__file__).resolve().parents[2]
# Seconds for a process to print its threads' stacks when it is asked to end.
END_S = 5.0


def main() -> int:
    args = _parse()
    # Without a device no test runs, and one process suffices to report that.
    files = (args.files or sorted(report.HERE.glob("test_*.py"))) if devices() else [report.HERE]
    rows: list[report.Row] = []
    status = 0
    began = time.monotonic()
    for file in files:
        limit = min(args.limit, args.total - (time.monotonic() - began))
        if limit <= 0:
            rows.append(report.Row(file.name, failures=["not run for lack of time"]))
            status = 1
            continue
        print(f"\n== {file.name}, {limit:.0f} s at most", flush=True)
        new, code = run(file, limit)
        rows += new
        status = status or code
    text = f"{report.machine()}\n\n{report.table(rows)}"
    print(f"\n{text}", flush=True)
    if args.out:
        Path(args.out).write_text(text + "\n")
    return status


def run(file: Path, limit_s: float) -> tuple[list[report.Row], int]:
    """Runs a file. Returns the results of its tests, and 0 if nothing failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rs",
            "--durations=10",
            f"--timeout={limit_s:.0f}",
            str(file),
        ]
        began = time.monotonic()
        # In a new session, so that killpg ends its workers, too.
        child = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "GPU_REPORT": str(path)}, start_new_session=True
        )
        ended = ""
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            ended = f"not ended after {limit_s:.0f} s"
            child.send_signal(signal.SIGABRT)  # pytest's faulthandler prints where each thread is
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_S)
            code = 1
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        rows = report.load(path) if path.exists() else []
    if not rows:
        rows = [report.Row(file.name)]
    if len(rows) == 1:
        rows[0].seconds = time.monotonic() - began  # includes the start of the process
    if code == 5:  # all were deselected
        code = 0
    if not ended and code not in (0, 1):
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    if ended:
        rows[-1].failures.append(f"{rows[-1].running} ({ended})".lstrip())
    elif code and not any(row.failures for row in rows):
        rows[-1].failures.append(f"pytest ended with {code}")
    return rows, code


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the tests that need a CUDA device.")
    parser.add_argument(
        "files", nargs="*", type=_file, metavar="FILE", help="files of tests/gpu; default: all"
    )
    parser.add_argument("--limit", type=float, default=300, help="limit in seconds for a file; default: 300")
    parser.add_argument(
        "--total", type=float, default=3600, help="limit in seconds for all files; default: 3600"
    )
    parser.add_argument("--out", help="also write the table to this file")
    args = parser.parse_args()
    for name in ("limit", "total"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} {getattr(args, name)}: allowed is more than 0")
    return args


def _file(name: str) -> Path:
    path = report.HERE / Path(name).name
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{name}: no such file in {report.HERE}")
    return path


if __name__ == "__main__":
    sys.exit(main())
