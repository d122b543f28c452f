"""Measures how the time of a quorum round grows with the number of replica groups: `make bench-quorum`.

go/bench simulates the groups, each with its own connection. Groups with the protocol of upstream's managers
are measured with upstream's lighthouse and with ours; groups with the protocol of our managers are measured
with our lighthouse only. The load generator runs on the same machine as the lighthouse, so the time of a
round includes the work of both. The script prints a table, writes it into docs/internals/scaling.md and draws
docs/internals/scaling.png.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from common import REPOSITORY, Side, markdown_table, verdict
from processes import Child, Job, JobFailed, free_port, ours_path
from run import machine
from startup import CONSOLE_SCRIPT
from upstream import REQUIREMENTS, UpstreamUnavailable, install

# Numbers of replica groups. Above the largest number in UPSTREAM, only the protocol of our managers is
# measured.
UPSTREAM = (100, 300, 1000)
OURS = (100, 300, 1000, 3000, 10000)
IN_PLOT_ONLY = (300,)
# After the rounds, the groups send only heartbeats for this time, to measure the processor time that those
# cost.
IDLE_S = 10
START_TIMEOUT_S = 60
RUN_TIMEOUT_S = 300
# The lighthouse and the generator each need one file descriptor per group, and at most this many others.
SPARE_FILES = 100

Row = dict[str, Any]


def main() -> int:
    args = _parse()
    _allow_files(max(args.groups) + SPARE_FILES)
    try:
        upstream = Side(REQUIREMENTS[args.upstream].replace("==", " "), install(args.upstream))
    except UpstreamUnavailable as e:
        print(f"nothing to compare with: {e}", file=sys.stderr)
        return 1
    ours = Side("ours", Path(args.ours).resolve() if args.ours else ours_path())
    with tempfile.TemporaryDirectory(prefix="torchft-bench-") as tools:
        go = REPOSITORY / "go"
        build = [args.go, "build", "-o", tools]
        subprocess.run(
            [*build, "./bench", "./cmd/torchft_lighthouse"], cwd=go, check=True, timeout=RUN_TIMEOUT_S
        )
        standalone = [Path(tools) / "torchft_lighthouse"] if args.standalone else None
        rows: list[Row] = []
        began = time.monotonic()
        for groups in args.groups:
            plan = [(upstream, "upstream"), (ours, "upstream")] if groups <= max(UPSTREAM) else []
            for side, kind in [*plan, (ours, "ours")]:
                command = standalone if side is ours else None
                row = measure(Path(tools) / "bench", side, kind, groups, args.rounds, command)
                rows.append(row)
                so_far = f"{time.monotonic() - began:.0f} s"
                print(
                    f"{so_far}: {side.name}, {groups} groups of kind {kind}: {row['round_ms']:.1f} ms",
                    flush=True,
                )
    table = tables(rows, ours.name, upstream.name)
    print(f"\n{table}")
    if not args.no_write:
        shown = [row for row in rows if row["groups"] not in IN_PLOT_ONLY]
        _write(Path(args.docs), tables(shown, ours.name, upstream.name), rows, upstream.name)
    return 0


def measure(
    bench: Path, side: Side, kind: str, groups: int, rounds: int, command: Sequence[str | Path] | None
) -> Row:
    """Run a lighthouse, and the load generator against it; return the generator's figures.

    Args:
        bench: the load generator.
        side: name and Python path of the lighthouse.
        kind: protocol of the groups, "upstream" or "ours".
        groups: number of groups.
        rounds: number of measured rounds.
        command: command of the lighthouse; None: the console script of `side`.
    """
    port = free_port()
    options = ["--min_replicas", str(groups), "--bind", f"0.0.0.0:{port}", "--join_timeout_ms", "60000"]
    with Job() as job:
        argv = [*(command or [sys.executable, CONSOLE_SCRIPT]), *options]
        lighthouse = job.start(f"lighthouse-{side.name}", argv, path=side.path)
        _wait_until_listening(job, lighthouse, port)
        idle = ["-idle", f"{IDLE_S}s"] if kind == "ours" else []
        generator = [bench, "-lighthouse", f"http://127.0.0.1:{port}", "-pid", str(lighthouse.pid)]
        out = subprocess.run(
            [*generator, "-kind", kind, "-groups", str(groups), "-rounds", str(rounds), *idle],
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
        )
        if out.returncode:
            raise JobFailed(
                f"{side.name}, {groups} groups of kind {kind}: {out.stderr.strip()}\n{job.report()}"
            )
    return {"lighthouse": side.name, **json.loads(out.stdout)}


def _wait_until_listening(job: Job, lighthouse: Child, port: int) -> None:
    began = time.monotonic()
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if lighthouse.returncode is not None or time.monotonic() - began > START_TIMEOUT_S:
                raise JobFailed(f"the lighthouse does not listen\n{job.report()}") from None
            time.sleep(0.02)


def tables(rows: Sequence[Row], ours: str, upstream: str) -> str:
    head = ["groups", "speak as", "lighthouse", "round", "sent a round", "first round", "memory"]
    body = [
        [
            f"{row['groups']:,}",
            row["kind"],
            row["lighthouse"],
            f"{row['round_ms']:.1f} ms [{row['fastest_ms']:.1f}, {row['slowest_ms']:.1f}]",
            _bytes(row["round_bytes"]),
            f"{row['first_ms']:.0f} ms",
            f"{row.get('peak_mb', 0):.0f} MB",
        ]
        for row in rows
    ]
    return "\n".join([markdown_table(head, body), "", *goals(rows, ours, upstream)])


def goals(rows: Sequence[Row], ours: str, upstream: str) -> list[str]:
    """Return a line for each goal that the run has measured."""
    found = {(row["lighthouse"], row["kind"], row["groups"]): row for row in rows}
    lines = []
    baseline = found.get((upstream, "upstream", 1000))
    for kind, limit in (("upstream", 0.2), ("ours", 0.06)):
        row = found.get((ours, kind, 1000))
        if baseline and row:
            share = row["round_ms"] / baseline["round_ms"]
            words = f"1,000 groups that speak as {kind}: {share:.3f} of the time of upstream's lighthouse"
            lines.append(f"- {words}, at most {limit}: {verdict(share <= limit)}")
    if row := found.get((ours, "ours", 10000)):
        met = row["round_ms"] < 700 and row["peak_mb"] < 700
        lines.append(
            f"- 10,000 groups: {row['round_ms'] / 1000:.2f} s a round and {row['peak_mb']:.0f} MB, "
            f"below 0.7 s and 700 MB: {verdict(met)}"
        )
        cores = row.get("idle_cpu", 0)
        lines.append(f"- heartbeats of 10,000 groups: {cores:.2f} cores, below 0.5: {verdict(cores < 0.5)}")
    return lines


def _bytes(n: float) -> str:
    return f"{n / 1e6:.1f} MB" if n >= 1e6 else f"{n / 1e3:.0f} kB"


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise SystemExit(f"{count} open files are needed, {hard} allowed: raise the limit (ulimit -n)")
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def _write(docs: Path, table: str, rows: Sequence[Row], upstream: str) -> None:
    page = docs / "scaling.md"
    text = page.read_text()
    begin, end = "<!-- written by python/bench/quorum.py -->", "<!-- end of what it wrote -->"
    if begin not in text or end not in text:
        raise SystemExit(f"{page} lacks the markers {begin!r} and {end!r}")
    before, after = text[: text.index(begin)], text[text.index(end) :]
    rounds = "Rounds: median [fastest, slowest]; all else: one run."
    where = f"{machine()}; against {upstream}, {date.today()}. {rounds}"
    page.write_text(f"{before}{begin}\n{where}\n\n{table}\n\n{after}")
    _plot(docs / "scaling.png", rows)


def _plot(path: Path, rows: Sequence[Row]) -> None:
    try:
        import matplotlib
    except ImportError:
        print(f"{path} was not drawn again: the plot needs matplotlib", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    names = {
        (row["lighthouse"], row["kind"]): f"{row['lighthouse']}, groups speak as {row['kind']}"
        for row in rows
    }
    for key, label in names.items():
        line = sorted(
            (row["groups"], row["round_ms"]) for row in rows if (row["lighthouse"], row["kind"]) == key
        )
        axes.plot([x for x, _ in line], [y for _, y in line], marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="replica groups", ylabel="quorum round, ms")
    axes.set_title("A quorum round on one machine, load generator included")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure how a quorum round grows with the number of replica groups."
    )
    parser.add_argument("--groups", type=int, nargs="+", default=list(OURS), help="default: %(default)s")
    parser.add_argument(
        "--rounds", type=int, default=20, help="rounds of each measurement; default: %(default)s"
    )
    parser.add_argument("--upstream", choices=sorted(REQUIREMENTS), default="nightly")
    parser.add_argument(
        "--ours", help="directory that holds our torchft; default: the one this Python imports"
    )
    parser.add_argument(
        "--standalone", action="store_true", help="run our lighthouse as the Go command, built from this tree"
    )
    parser.add_argument(
        "--go", default=os.environ.get("GO", "go"), help="the go command; default: %(default)s"
    )
    parser.add_argument("--docs", default=str(REPOSITORY / "docs" / "internals"), help="where scaling.md is")
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: allowed is 1 or more")
    if min(args.groups) < 1:
        parser.error(f"--groups {min(args.groups)}: allowed is 1 or more")
    return args


if __name__ == "__main__":
    sys.exit(main())
