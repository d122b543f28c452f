"""Runs commands in parallel, each with its own log: `make test`, and functions for night.py.

`make test` runs its parts on some lanes: the longest part first, and the next one when a lane is free. Tests
with real processes are one part, so that no two of them run at once, because they measure time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("build/test")
PROGRESS_S = 15.0
# The limit of `make test`, which takes six minutes: a process that hangs at its exit has no other limit.
LIMIT_S = 1500.0
# On a signal, pytest first stops the processes of its tests.
END_S = 20.0
# How long a run of pytest that took too long may write the stacks of its threads. Go's tests have their own
# -timeout.
STACKS_S = 2.0
# Numbers of lines shown of a log, for a part that failed and one that passed.
SHOWN_FAILED, SHOWN_PASSED = 400, 40
PYTEST_FRAME = re.compile(r' *File ".*(/_pytest/|/pluggy/|/pytest/|<frozen runpy>)')


@dataclass(frozen=True)
class Part:
    name: str
    command: Sequence[str]
    cwd: Path = ROOT
    env: dict[str, str] = field(default_factory=dict)
    # The share of the time for this part, which replaces {seconds} or {minutes} in the command. None: all
    # remaining time.
    wants_s: float | None = None
    # The part is skipped if less time remains: it could not end, or its result would be meaningless.
    needs_s: float = 0.0
    # Seconds beyond its share, for building and ending.
    extra_s: float = 0.0

    def seconds(self, left_s: float) -> float | None:
        """The part's share of the remaining time; None if it is skipped."""
        if left_s < self.needs_s + self.extra_s:
            return None
        wants_s = left_s if self.wants_s is None else self.wants_s
        return min(wants_s, left_s - self.extra_s)


@dataclass(frozen=True)
class Result:
    part: Part
    command: tuple[str, ...]
    seconds: float
    status: int | None  # None: skipped, because too little time remained
    ended: bool = False  # it took too long

    @property
    def failed(self) -> bool:
        return self.status not in (0, None)


class Running:
    """A running part, in a new session, so that its processes can be ended with it."""

    def __init__(self, part: Part, log: Path, seconds: float, until: float) -> None:
        self.part, self.log, self.began, self.until = part, log, time.monotonic(), until
        self.command = filled_in(part.command, seconds)
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                self.command,
                cwd=part.cwd,
                # Container images often set PYTHONDONTWRITEBYTECODE; each child would then compile the
                # package again.
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", **part.env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.ended = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def poll(self) -> Result | None:
        if self.process.poll() is None and time.monotonic() > self.until:
            self.ended = True
            if "pytest" in self.command:
                self.process.send_signal(
                    signal.SIGQUIT
                )  # tests/conftest.py writes the stacks of all threads to the log
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(STACKS_S)
            end([self])
            self.process.wait()
        if self.process.poll() is None:
            return None
        self._signal(signal.SIGKILL)  # processes that it has left behind
        status = self.process.returncode
        return Result(self.part, self.command, self.seconds, 1 if self.ended else status, self.ended)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def filled_in(command: Sequence[str], seconds: float) -> tuple[str, ...]:
    """The command, with its share of the time in place of {seconds} and {minutes}."""
    given = {"{seconds}": f"{seconds:.0f}", "{minutes}": f"{seconds / 60:.1f}"}
    return tuple(re.sub(r"\{(seconds|minutes)\}", lambda m: given[m[0]], word) for word in command)


def end(running: Sequence[Running]) -> None:
    """Ends the parts like Ctrl-C, and kills those that do not end."""
    for r in running:
        r._signal(signal.SIGINT)
    until = time.monotonic() + END_S
    try:
        for r in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                r.process.wait(max(until - time.monotonic(), 0.1))
    finally:  # even after a second Ctrl-C
        for r in running:
            r._signal(signal.SIGKILL)


def run(
    parts: Sequence[Part],
    lanes: int,
    folder: Path,
    report_line: Callable[[str], object],
    time_s: float = float("inf"),
    over_s: float = float("inf"),
) -> list[Result]:
    """Runs the parts in this order, `lanes` of them at once. A part gets its share of `time_s`; parts that
    still run `over_s` seconds after that time are ended. On Ctrl-C all parts end, and the results so far are
    returned.
    """
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + time_s
    waiting, running, done = list(parts), list[Running](), list[Result]()
    reported_at = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < lanes:
                part = waiting.pop(0)
                seconds = part.seconds(until - time.monotonic())
                if seconds is None:
                    report_line(f"{part.name}: left out, no time")
                    done.append(Result(part, tuple(part.command), 0.0, None))
                else:
                    try:
                        running.append(Running(part, folder / f"{part.name}.log", seconds, until + over_s))
                    except OSError as e:
                        report_line(f"{part.name}: {e}")
                        (folder / f"{part.name}.log").write_text(f"{e}\n")
                        done.append(Result(part, tuple(part.command), 0.0, 127))
            time.sleep(0.1)
            for r in list(running):
                if result := r.poll():
                    running.remove(r)
                    done.append(result)
                    how = (
                        "ended, it took too long"
                        if r.ended
                        else f"status {result.status}"
                        if result.failed
                        else "ok"
                    )
                    report_line(f"{r.part.name}: {how}, {clock(result.seconds)}")
            if running and time.monotonic() - reported_at > PROGRESS_S:
                reported_at = time.monotonic()
                report_line("   ".join(f"{r.part.name} {clock(r.seconds)}{progress(r.log)}" for r in running))
    except KeyboardInterrupt:
        report_line("interrupted: everything ends")
        done += [Result(r.part, r.command, r.seconds, 130) for r in running]
    finally:
        end(running)
    return done


def ends_on_signals() -> None:
    """Gives SIGTERM, which CI systems send, the effect of Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def clock(seconds: float) -> str:
    return f"{seconds // 60:.0f}m{seconds % 60:02.0f}s" if seconds >= 60 else f"{seconds:.0f}s"


def progress(log: Path) -> str:
    """The progress of pytest, from the last line with a percentage; else the last line of the log."""
    text = log.read_text(errors="replace")
    if found := re.findall(r"\[ *(\d+)%\]$", text, re.MULTILINE):
        return f" {found[-1]}%"
    lines = text.split("\n")[:-1]  # the last line may be incomplete
    return f" ({lines[-1][:60].strip()})" if lines else ""


def tail(text: str, failed: bool) -> str:
    """The part of a log to show: the failures, or, if all tests passed, the lines after the tests. pytest's
    own frames are left out.
    """
    lines = [line for line in text.splitlines() if not PYTEST_FRAME.match(line)]
    if failed:
        begin = next((i for i, line in enumerate(lines) if re.match(r"=+ (FAILURES|ERRORS) =+$", line)), 0)
        most = SHOWN_FAILED
    else:
        dots = [i for i, line in enumerate(lines) if re.search(r"\[ *\d+%\]$", line)]
        begin, most = dots[-1] + 1 if dots else 0, SHOWN_PASSED
    deselected = [line for line in lines[:begin] if line.startswith("deselected:")]
    shown = lines[begin:]
    left_out = [f"... {len(shown) - most} lines left out ..."] if len(shown) > most else []
    return "\n".join(deselected + left_out + shown[-most:])


def pytest(name: str, *arguments: str, folder: Path = FOLDER) -> list[str]:
    """The command of a pytest part. Parts that run at once do not share a cache; durations.py reads the junit
    file.
    """
    return [
        sys.executable,
        "-u",
        "-m",
        "pytest",
        f"--junitxml={folder}/{name}.xml",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]


# The half of the unit tests that communicates.
GROUPS = ["tests/unit/process_group", "tests/unit/checkpointing"]


def without(paths: Sequence[str]) -> list[str]:
    return [f"--ignore={path}" for path in paths]


def parts_of_test() -> list[Part]:
    """The parts of `make test`, the longest first. None is so long that it ends alone."""
    files = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/integration/test_*.py"))
    half = files[: len(files) // 2]
    return [
        Part("unit", pytest("unit", "tests/unit", *without(GROUPS))),
        Part("groups", pytest("groups", *GROUPS)),
        Part("process", pytest("process", "tests/process")),
        Part("other", pytest("other", *without(["tests/process", "tests/unit", "tests/late", *half]))),
        Part("integration", pytest("integration", *half)),
        # In a separate process, because PyTorch has an accelerator once the test accelerator is registered.
        Part("late", pytest("late", "tests/late")),
        Part("go", [os.environ.get("MAKE", "make"), "--no-print-directory", "test-go"]),
    ]


def second_runs(folder: Path) -> list[str]:
    """The tests that passed only in their second run, recorded by tests/policy.py and by gotestsum."""
    again: set[str] = set()
    for path in folder.glob("flaky.jsonl"):
        again |= {json.loads(line)["test"] for line in path.read_text().splitlines()}
    # Github.com/torchft/torchft/go/sim.TestX/case: 2 runs, 1 failures.
    for path in folder.glob("flaky-*.txt"):
        again |= set(
            re.findall(r"^.*?/(go/[^:/]*(?:/[^:/.]+)*\.\w+): 2 runs", path.read_text(), re.MULTILINE)
        )
    return sorted(again)


def show(results: Sequence[Result], folder: Path, out: TextIO) -> None:
    """Prints the end of each log, those of failed parts last."""
    for result in sorted(results, key=lambda r: r.failed):
        log = folder / f"{result.part.name}.log"
        print(f"\n----- {result.part.name}, {clock(result.seconds)}: {log}", file=out)
        text = log.read_text(errors="replace") if log.exists() else ""  # a part that was left out has none
        print(tail(text, result.failed), file=out)


def report(results: Sequence[Result], again: Sequence[str], folder: Path, out: TextIO) -> int:
    """Prints the results, and returns the exit status."""
    show(results, folder, out)
    # `make test` must run every part; a part without a status was left out.
    failed = [result.part.name for result in results if result.failed or result.status is None]
    print(file=out)
    for nodeid in again:
        print(f"needed a second run: {nodeid}", file=out)
    of_go = sum(name.startswith("go/") for name in again)
    flaky = max(of_go, len(again) - of_go) > 1
    if flaky:
        print(
            f"{len(again)} tests needed a second run: more than one of Go or of Python is a failure", file=out
        )
    if failed:
        print(f"failed: {', '.join(failed)}", file=out)
    return 1 if failed or flaky else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lanes", type=int, default=4, help="parts that run at once (default: %(default)s)")
    lanes = parser.parse_args().lanes
    if lanes < 1:
        parser.error(f"--lanes {lanes}: allowed is 1 or more")
    ends_on_signals()
    os.chdir(ROOT)
    for path in FOLDER.glob("flaky*"):
        path.unlink()
    began = time.monotonic()
    results = run(parts_of_test(), lanes, FOLDER, lambda line: print(line, flush=True), LIMIT_S, over_s=0.0)
    status = report(results, second_runs(FOLDER), FOLDER, sys.stdout)
    print(f"make test: {'FAILED' if status else 'passed'} in {clock(time.monotonic() - began)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
