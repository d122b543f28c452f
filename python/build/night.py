"""`make test-all`: every kind of test, for a given time, with the date as the seed.

One lane runs pytest without reruns, and without a fork server for processes: the slow tests, and, where there
is time, then the others, which `make test` runs, too. The other lane runs Go's tests with the race detector,
then the machines and the simulation at full size, chaos (kills of real processes), the fuzz targets, and
longer simulations; each day another kind of these is the first. The report at the end lists the parts that
ran and those that were skipped, and how to repeat a failure.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import lock
from lanes import ROOT, Part, Result, clock, ends_on_signals, pytest, run, show

T = TypeVar("T")

FOLDER = Path("build/night")
# The parts that run pytest; the tests of the test accelerator run in a separate process.
PYTEST = ("pytest", "late", "oldest")
GO = os.environ.get("GO") or "go"
# A part that still runs this long after the end is killed, so that TIME=10m takes twelve minutes at most.
OVER_S = 90.0
# One lane uses one core. By default Go spends up to a minute minimizing each input that reaches new code.
FUZZ_OPTIONS = ("-parallel=1", "-fuzzminimizetime=1s")
# The machines have no goroutine, lock or clock: nothing can race.
PURE = ("gossip/agree", "quorum", "recovery", "rendezvous", "round", "slots")
# Shares of the time.
FUZZ_S, FUZZ_LEAST_S, FUZZ_SHARE = 28.0, 5.0, 0.24
CHAOS_SHARE, CHAOS_LEAST_S = 0.2, 90.0
SOAK_SHARE, LIGHTHOUSES_SHARE, SOAK_LEAST_S = 0.13, 0.02, 10.0
# Parts that take minutes and cannot be limited run only if the total time is at least this: the tests of the
# simulations with planted mistakes, and the tests that `make test` runs, too; at twice this time those with
# the oldest releases that users may install.
LONG_S = 1800.0
# A time that suffices for every part.
ALL_S = 7200.0
CHAOS = (
    ("gloo", "--kind=gloo", "--groups=4", "--heal=at_once"),
    ("isolated", "--kind=isolated", "--groups=3"),
    ("native", "--kind=native", "--groups=3"),
    ("torchrun", "--groups=2", "--torchrun"),
    ("in_passing", "--kind=gloo", "--groups=3", "--compare_commits=20"),
    ("auto", "--kind=gloo", "--groups=3", "--heal=auto"),
)
UNITS = {"s": 1, "m": 60, "h": 3600}
# Patterns of log lines that summarize a part or its failure; the report shows the last match.
WHAT = "|".join(
    (
        r"^=+ (.*\b(?:passed|failed|error).*) =+$",  # pytest
        r"^(\S+: seeds .*)",  # TestSoak
        r"^(fuzz: elapsed.*)",
        r"^(\[ *[\d.]+ s\] .*)",  # chaos
    )
)
WRONG = "|".join(
    (
        r"^(panic: .*)",
        r"^(fatal error: .*)",
        r"^(\s*--- FAIL: \S+)",
        r"^(WARNING: DATA RACE)",
        r"^(\w*(?:Error|Exception)\b.*)",  # chaos
    )
)

# The end of a fuzzer's time, which Go reports as a failure, without an input, if an input runs at that
# moment.
FUZZ_TIME_OVER = r"^--- FAIL: Fuzz\w+ \([\d.]+s\)\n\s+context deadline exceeded\nFAIL$"


def seconds_of(text: str) -> float:
    """Reads 90s, 30m, 1.5h or 1h30m."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", text)
    total = sum(float(number) * UNITS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text or total <= 0:
        raise ValueError(f"time {text!r}: allowed is a number with s, m or h, such as 90s, 30m or 1h30m")
    return total


def fuzz_targets(go: Path = ROOT / "go") -> list[tuple[str, str]]:
    """(package, name) of every fuzz target."""
    found = []
    for path in sorted(go.rglob("*_test.go")):
        package = "./" + path.parent.relative_to(go).as_posix()
        found += [
            (package, name)
            for name in re.findall(r"^func (Fuzz\w+)\(f \*testing\.F\)", path.read_text(), re.MULTILINE)
        ]
    return found


def racing(go: Path = ROOT / "go") -> str:
    """The packages with tests in which something can race."""
    names = {path.parent.relative_to(go).as_posix() for path in go.rglob("*_test.go")}
    return " ".join(f"./{name}" for name in sorted(names - set(PURE)))


def rotated(things: Sequence[T], seed: int) -> list[T]:
    """Rotates the parts by the seed, so that a short time does not skip the same ones each day."""
    n = seed % max(len(things), 1)
    return [*things[n:], *things[:n]]


def plan(time_s: float, seed: int, until: float, targets: Sequence[tuple[str, str]]) -> list[Part]:
    """The parts, in the order in which two lanes run them. pytest is first, and occupies a lane to the end.

    `until` is a time in seconds of time.monotonic(), after which pytest begins no test."""
    go = ROOT / "go"
    reruns = os.environ.get("RERUNS", "0")
    settings = {
        "SEED": str(seed),
        "RERUNS": reruns,
        "FORK_SERVER": "0",
        "NIGHT_UNTIL": f"{until:.0f}",
    }
    # A short night has no time for the tests of `make test`.
    marked = "" if time_s >= LONG_S else "slow"
    tests = Part("pytest", pytest("pytest", "-m", marked, folder=FOLDER), env=settings)
    late = Part("late", pytest("late", "-m", marked, "tests/late", folder=FOLDER), env=settings, needs_s=60)
    test = [GO, "test", "-trimpath"]
    # With FULL, histories are longer, servers run longer, and there are more of both.
    full = {"FULL": "1"}
    again = [
        GO,
        "tool",
        "-modfile=tools/go.mod",
        "gotestsum",
        "--format=standard-quiet",
        f"--rerun-fails={reruns}",
    ]
    again += [
        "--rerun-fails-max-failures=1",
        "--rerun-fails-run-root-test",
        "--rerun-fails-abort-on-data-race",
    ]
    options = ["--", "-trimpath", "-vet=off", "-timeout=20m"]
    # Without -count=1, because the histories are the same each time, so Go may reuse an earlier result. Runs
    # with the race detector differ in their schedules.
    # 105 s alone on two cores, twice as long beside other tests.
    sim = Part("sim", [*again, "--packages=./sim ./gossip/...", *options], go, full, needs_s=210)
    machines = " ".join(f"./{name}" for name in PURE)
    pure = Part("machines", [*again, f"--packages={machines}", *options], go, full, needs_s=120)
    # In a short night it has the histories of `make test`, so that others have a turn beside it.
    race = Part(
        "race",
        [*again, f"--packages={racing()}", *options, "-race", "-count=1"],
        go,
        full if time_s >= LONG_S else {},
        needs_s=240,
    )
    fuzz = [
        Part(
            f"fuzz-{Path(package).name}-{name}",
            [*test, package, "-run=^$", f"-fuzz=^{name}$", "-fuzztime={seconds}s", *FUZZ_OPTIONS],
            go,
            wants_s=min(FUZZ_S, max(FUZZ_LEAST_S, FUZZ_SHARE * time_s / len(targets))),
            needs_s=FUZZ_LEAST_S,
            extra_s=15.0,
        )
        for package, name in targets
    ]
    calls = min(len(CHAOS), max(1, int(CHAOS_SHARE * time_s / (2 * CHAOS_LEAST_S))))
    chaos = [
        Part(
            f"chaos-{name}",
            [
                sys.executable,
                "-u",
                "tests/process/chaos_faults.py",
                f"--seed={seed}",
                "--minutes={minutes}",
                *options,
            ],
            wants_s=CHAOS_SHARE * time_s / calls,
            needs_s=CHAOS_LEAST_S,
            extra_s=60.0,
        )
        for name, *options in CHAOS
    ]
    soaks = [
        Part(
            name,
            [
                *test,
                package,
                "-count=1",
                "-timeout=0",
                "-run=^TestSoak$",
                "-v",
                "-soak={seconds}s",
                f"-seed={seed}",
            ],
            go,
            wants_s=share * time_s,
            needs_s=SOAK_LEAST_S,
            extra_s=10.0,
        )
        for name, package, share in (
            ("soak-lighthouses", "./cmd/torchft_lighthouse", LIGHTHOUSES_SHARE),
            ("soak", "./sim", SOAK_SHARE),
        )
    ]
    planted = [
        Part("sim-gossip", [*test, "./gossip/agree", "-run=Mistakes", "-agree.mistakes"], go, needs_s=55),
    ]
    oldest = Part(
        "oldest", [sys.executable, "-u", "python/build/oldest.py"], env={"SEED": str(seed)}, needs_s=600
    )
    sims = [sim, *(planted if time_s >= LONG_S else [])]
    others = [oldest] if time_s >= 2 * LONG_S else []
    faults = [*rotated(chaos, seed)[:calls], *rotated(fuzz, seed), *soaks]
    kinds = [[pure, *sims, late, *others], faults]
    return [tests, race, *(part for kind in rotated(kinds, seed) for part in kind)]


def unplanned(parts: Sequence[Part], seed: int, targets: Sequence[tuple[str, str]]) -> list[Result]:
    """The parts for which there is no time, for the report."""
    planned = {part.name for part in parts}
    more = [part for part in plan(ALL_S, seed, 0, targets) if part.name not in planned]
    return [Result(part, tuple(part.command), 0.0, None) for part in more]


def last(pattern: str, text: str) -> str:
    found = [next(filter(None, m.groups()), m[0]) for m in re.finditer(pattern, text, re.MULTILINE)]
    return found[-1].strip() if found else ""


def command_line(command: Sequence[str], env: dict[str, str], cwd: Path) -> str:
    """The command to type in the root of the repository."""
    words = [Path(sys.executable).name if word == sys.executable else word for word in command]
    words = [
        ".venv/bin/python" if word.startswith("python") and i == 0 else word for i, word in enumerate(words)
    ]
    kept = [f"{name}={shlex.quote(value)}" for name, value in env.items() if name != "NIGHT_UNTIL"]
    folder = "" if cwd == ROOT else f"cd {cwd.relative_to(ROOT)} && "
    return folder + " ".join([*kept, shlex.join(words)])


def judged(result: Result, text: str) -> Result:
    """The result, with a fuzzer that only ended at its time as passed."""
    if (
        result.failed
        and result.part.name.startswith("fuzz")
        and re.search(FUZZ_TIME_OVER, text, re.MULTILINE)
    ):
        return replace(result, status=0)
    return result


def failures(result: Result, text: str) -> list[tuple[str, str]]:
    """(what failed, how to repeat it): each failed test of pytest, one entry for any other part."""
    part = result.part
    found = []
    if part.name in PYTEST:
        base = command_line([sys.executable, "-m", "pytest", "-m", ""], part.env, part.cwd)
        for kind, nodeid, why in re.findall(
            r"^(FAILED|ERROR) (\S+(?:\[.*?\])?)(?: - (.*))?$", text, re.MULTILINE
        ):
            found.append((f"{kind} {nodeid}: {why}", f"{base} {shlex.quote(nodeid)}"))
    if result.ended:
        found.append(
            (f"{part.name} took too long and was ended", command_line(result.command, part.env, part.cwd))
        )
    elif not found:
        again = last(r"^\s*(go test -run=Fuzz\S+)", text)
        repeat = (
            f"cd go && {again} {result.command[3]}"
            if again
            else command_line(result.command, part.env, part.cwd)
        )
        found.append((f"{part.name}: {last(WRONG, text) or f'status {result.status}'}", repeat))
    return found


def page(results: Sequence[Result], logs: dict[str, str], title: str, seconds: float) -> str:
    """The report: the parts that ran, the failures, and how to repeat them."""
    lines = [f"# {title}", "", "| part | ran for | what | result |", "|---|---|---|---|"]
    for r in results:
        how = "left out: no time" if r.status is None else "FAILED" if r.failed else "passed"
        what = last(WHAT, logs.get(r.part.name, "")).replace("|", "\\|")
        lines.append(f"| {r.part.name} | {clock(r.seconds)} | {what} | {how} |")
    tests = [logs.get(name, "") for name in PYTEST]
    counts = r"^(?:deselected|not run for lack of time|skipped under CI).*$"
    not_run = re.findall(counts, "\n".join(tests), re.MULTILINE)
    if not_run:
        lines += ["", *not_run]
    wrong = [f for r in results if r.failed for f in failures(r, logs.get(r.part.name, ""))]
    if wrong:
        lines += ["", "## Failed, and how to repeat it", ""]
        for what, repeat in wrong:
            lines += [what, "", f"    {repeat}", ""]
    if any(r.part.name.startswith("fuzz") and r.failed for r in results):
        lines += [
            "The fuzzer draws without a seed; the input is in go/*/testdata/fuzz, and is committed with the "
            "fix.",
            "",
        ]
    # The verdict counts each test of pytest, and each other part as one test.
    others = [r for r in results if r.part.name not in PYTEST]
    passed = sum(r.status == 0 for r in others) + sum(_count("passed", text) for text in tests)
    failed = sum(r.failed for r in others) + sum(_count("failed|errors?", text) for text in tests)
    if not failed and any(r.failed for r in results):
        failed = 1
    verdict = f"{failed} failed, {passed} passed" if failed else f"{passed} passed"
    return "\n".join([*lines, "", f"{verdict} in {seconds:.0f}s ({clock(seconds)})"])


def _count(words: str, text: str) -> int:
    """The number before one of these words in pytest's last line."""
    return sum(
        int(number)
        for number in re.findall(rf"(\d+) (?:{words})\b", last(r"^=+ (.* in [\d.]+s.*) =+$", text))
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run every kind of test for a given time, with the date as the seed."
    )
    parser.add_argument("--time", default="2h", help="how long to run, such as 30m (default: %(default)s)")
    today = datetime.date.today()
    seed = int(os.environ.get("SEED") or f"{today:%Y%m%d}")
    parser.add_argument(
        "--seed", type=int, default=seed, help="seed of all choices (default: SEED, else the date)"
    )
    args = parser.parse_args()
    try:
        time_s = seconds_of(args.time)
    except ValueError as e:
        parser.error(f"--time: {e}")
    ends_on_signals()
    os.chdir(ROOT)
    title = f"Night of {today}, seed {args.seed}, {args.time} on {os.cpu_count()} cores"
    title += f", Python {platform.python_version()}, {_output(GO, 'env', 'GOVERSION')}"
    title += f", commit {_output('git', 'log', '-1', '--format=%h')}"
    print(f"{title}\nagain: make test-all TIME={args.time} SEED={args.seed}\n", flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    targets = fuzz_targets()
    parts = plan(time_s, args.seed, began + time_s, targets)

    def report_line(line: str) -> None:
        print(f"[{clock(time.monotonic() - began)}] {line}", flush=True)

    results = [*run(parts, 2, FOLDER, report_line, time_s, OVER_S), *unplanned(parts, args.seed, targets)]
    ran = [r.part.name for r in results if r.status is not None]
    logs = {name: (FOLDER / f"{name}.log").read_text(errors="replace") for name in ran}
    results = [judged(r, logs.get(r.part.name, "")) for r in results]
    text = page(results, logs, title, time.monotonic() - began)
    show([r for r in results if r.failed], FOLDER, sys.stdout)
    (FOLDER / "page.md").write_text(text + "\n")
    if line := lock.newer():
        print(line)
    print(f"\n{text}")
    return 1 if any(r.failed for r in results) else 0


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout.strip()
    except OSError:
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
