"""The faults that a job survives, by name: random ones for a given time, or each a number of times for a
table.

`make chaos` runs this. `--record=FILE` records the effect of each fault, continues where an earlier run
ended, and prints the table of all that is in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from chaos import PHASES, STOP_BOUND_S, Chaos, Outcome
from chaos_worker import SNAPSHOTS
from flapping import Flapping
from processes import Job

KINDS = ("gloo", "isolated", "native", "late")  # "late": the test accelerator of tests/late
HEALS = ("at_once", "in_passing", "auto")
# For groups of several ranks: a stopped rank stalls while its manager server runs.
EJECT = ("--stalled_after_ms=2000", "--eject_stalled_after_ms=3000")


@dataclass(frozen=True)
class Fault:
    """A fault, and the smallest job in which it makes sense."""

    name: str
    do: Callable[[Chaos, random.Random], Outcome]
    groups: int = 2
    ranks: int = 1
    torchrun: bool = False
    weight: int = 1  # relative frequency in a random choice
    times: int = 5  # number of repetitions in a record
    lost: int = 1  # the most steps that it may cost


Do = Callable[[Chaos, random.Random], Outcome]


def _some(chaos: Chaos, rng: random.Random, count: int) -> list[int]:
    """This number of groups; 0: all but one."""
    return rng.sample(range(chaos.groups), count or chaos.groups - 1)


def _kill(count: int, phase: str | None = None, rank: int = 0) -> Do:
    return lambda chaos, rng: chaos.kill(
        *_some(chaos, rng, count), phase=phase or rng.choice(PHASES), rank=rank
    )


def _stop(count: int, phase: str | None = None, rank: int = 0) -> Do:
    # A stalled member is evicted later than a silent one.
    bound_s = STOP_BOUND_S + (3.0 if rank else 0.0)
    return lambda chaos, rng: chaos.stop(
        *_some(chaos, rng, count), phase=phase or rng.choice(PHASES), rank=rank, bound_s=bound_s
    )


def _heal(role: str, number: int) -> Do:
    return lambda chaos, rng: chaos.strike_while_healing(rng.randrange(chaos.groups), role, number)


def _agent(chaos: Chaos, rng: random.Random) -> Outcome:
    return chaos.kill_agent(rng.randrange(chaos.groups))


def _worker(chaos: Chaos, rng: random.Random) -> Outcome:
    return chaos.kill_worker(rng.randrange(chaos.groups), rng.choice(PHASES))


def _all(lighthouse: bool) -> Do:
    return lambda chaos, rng: chaos.kill_all(rng.choice(PHASES), lighthouse)


FAULTS = [
    *(Fault(f"kill -9 {phase}", _kill(1, phase), weight=2, times=50) for phase in PHASES),
    Fault("kill -9 of the manager's rank", _kill(1), ranks=2),
    Fault("kill -9 of another rank", _kill(1, rank=1), ranks=2, weight=4),
    Fault("kill -9 of torchrun's agent", _agent, torchrun=True),
    Fault("kill -9 of a worker that torchrun restarts", _worker, torchrun=True),
    Fault("kill -9 of two at once", _kill(2), groups=4, weight=2),
    Fault("kill -9 of all but one at once", _kill(0), groups=3, weight=2),
    Fault("kill -9 of all groups at once", _all(lighthouse=False), weight=2, lost=SNAPSHOTS + 1),
    Fault("kill -9 of all groups and the lighthouse at once", _all(lighthouse=True), lost=SNAPSHOTS + 1),
    Fault(
        "kill -9 of all agents and workers at once", _all(lighthouse=True), torchrun=True, lost=SNAPSHOTS + 1
    ),
    Fault("kill -9 of the source of a heal", _heal("source", signal.SIGKILL), groups=3),
    Fault("kill -9 while it heals", _heal("target", signal.SIGKILL)),
    *(Fault(f"SIGSTOP {phase}", _stop(1, phase)) for phase in PHASES),
    Fault("SIGSTOP of the manager's rank", _stop(1), ranks=2),
    Fault("SIGSTOP of another rank", _stop(1, rank=1), ranks=2),
    Fault("an exception of the script", lambda chaos, rng: chaos.raises(rng.randrange(chaos.groups))),
    Fault("a hang of another rank", lambda chaos, rng: chaos.hang(rng.randrange(chaos.groups)), ranks=2),
    Fault("a slow group", lambda chaos, rng: chaos.slow(rng.randrange(chaos.groups)), groups=3, lost=0),
    Fault(
        "a group is taken away and added", lambda chaos, rng: chaos.scale(rng.randrange(chaos.groups)), lost=0
    ),
    Fault("the same exception in all groups", lambda chaos, rng: chaos.poison(), lost=SNAPSHOTS + 1),
    Fault("kill -9 of the check of a host", lambda chaos, rng: chaos.crash_check(), lost=0),
    Fault("SIGSTOP of two at once", _stop(2), groups=4),
    Fault("SIGSTOP of all but one at once", _stop(0), groups=3),
    Fault("SIGSTOP of the source of a heal", _heal("source", signal.SIGSTOP), groups=3),
    Fault("SIGSTOP while it heals", _heal("target", signal.SIGSTOP)),
    Fault("kill -9 of the lighthouse", lambda chaos, rng: chaos.kill_lighthouse()),
    Fault("SIGSTOP of the lighthouse for 4 s", lambda chaos, rng: chaos.stop_lighthouse(4.0)),
]


def possible_in(
    groups: int, ranks: int, torchrun: bool, only: str = "", recorded: bool = False
) -> list[Fault]:
    """The faults that make sense in a job. For a record, only faults that are impossible in a job with fewer
    ranks.
    """
    found = [
        f
        for f in FAULTS
        if f.groups <= groups and f.ranks <= ranks and f.torchrun == torchrun and only in f.name
    ]
    return [f for f in found if f.ranks == ranks] if recorded else found


def kills_only(faults: Iterable[Fault]) -> bool:
    return not any("SIGSTOP" in fault.name for fault in faults)


def next_at_random(possible: list[Fault], rng: random.Random) -> Fault:
    return rng.choices(possible, weights=[fault.weight for fault in possible])[0]


def next_missing(possible: list[Fault], kind: str, done: dict[str, int]) -> Fault | None:
    """The fault that lacks the largest share of its repetitions; None if the record is complete."""

    def share(fault: Fault) -> float:
        return done.get(fault.name, 0) / (fault.times if kind == "gloo" else 5)

    least = min(possible, key=share)
    return least if share(least) < 1 else None


def table(records: Iterable[dict[str, Any]]) -> str:
    """Formats a Markdown table. For each fault and kind of group: how often all invariants held, the median
    and longest time in seconds until the survivors' next commit, and the largest number of steps that a
    survivor lost.
    """
    by_fault: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        by_fault.setdefault((record["fault"], record["kind"]), []).append(record)
    kinds = [kind for kind in KINDS if any(k == kind for _, k in by_fault)]
    lines = [
        "| fault | " + " | ".join(f"{kind}: held, median s, longest s, steps lost" for kind in kinds) + " |",
        "| - |" + " - |" * len(kinds),
    ]
    for fault in FAULTS:
        cells = []
        for kind in kinds:
            of = by_fault.get((fault.name, kind), [])
            good = [record for record in of if "broken" not in record]
            cell = f"{len(good)} of {len(of)}" if of else ""
            if good:
                seconds = [record["seconds"] for record in good]
                lost = max(record["lost"] for record in good)
                cell += f", {statistics.median(seconds):.2f}, {max(seconds):.2f}, {lost}"
            cells.append(cell)
        if any(cells):
            lines.append(f"| {fault.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    args = _parse()
    with tempfile.TemporaryDirectory(prefix="torchft-test-", dir="/dev/shm") as memory:
        os.environ["TORCHFT_SNAPSHOT_MEMORY"] = memory  # the keeper ends with it
        return flap(args) if args.flapping else run(args)


def run(args: argparse.Namespace) -> int:
    torchrun = " --torchrun" * args.torchrun + " --forked" * args.forked
    again = " ".join(
        [
            f"chaos_faults.py --seed={args.seed} --kind={args.kind} --groups={args.groups}",
            f"--ranks={args.ranks}{torchrun}",
            *worker_options(args),
        ]
    )
    print(f"to replay: {again}", flush=True)
    rng = random.Random(args.seed)
    possible = possible_in(
        args.groups, args.ranks, args.torchrun, args.only, recorded=args.record is not None
    )
    done = dict.fromkeys((fault.name for fault in possible), 0)
    for record in _read(args.record) if args.record else []:
        if record["kind"] == args.kind and "broken" not in record:
            done[record["fault"]] = done.get(record["fault"], 0) + 1
    records: list[dict[str, Any]] = []
    fault: Fault | None = None
    began = time.monotonic()
    with Job() as job:
        options = EJECT if args.ranks > 1 else ()
        chaos = Chaos(
            job,
            args.kind,
            args.groups,
            args.ranks,
            torchrun=args.torchrun,
            forked=args.forked,
            kills_only=kills_only(possible),
            lighthouse_options=options,
            options=worker_options(args),
        )
        try:
            chaos.start()
            while time.monotonic() - began < 60 * args.minutes and len(records) < (
                args.faults or sys.maxsize
            ):
                fault = (
                    next_missing(possible, args.kind, done) if args.record else next_at_random(possible, rng)
                )
                if fault is None:
                    break
                outcome = fault.do(chaos, rng)
                done[fault.name] += 1
                records.append(
                    {"fault": fault.name, "kind": args.kind, "groups": args.groups, "ranks": args.ranks}
                )
                records[-1] |= {
                    "seconds": round(outcome.seconds, 3),
                    "lost": outcome.lost,
                    "phases": outcome.phases,
                }
                print(
                    f"[{time.monotonic() - began:7.1f} s] {len(records)}: {fault.name}: {outcome}", flush=True
                )
                if outcome.seconds > args.slow:
                    print(job.report(), flush=True)
            chaos.finish()
        except BaseException as e:
            print(f"broken; to replay: {again}\n{job.report()}", file=sys.stderr, flush=True)
            if args.record and fault is not None:
                # The error occurred in this fault; earlier faults of the job are not recorded.
                _append(args.record, [{"fault": fault.name, "kind": args.kind, "broken": repr(e)[:300]}])
            raise
    if args.record:  # recorded only after the job's history was checked
        _append(args.record, records)
        records = _read(args.record)
    print(table(records))
    return 0


def worker_options(args: argparse.Namespace) -> list[str]:
    heal = [f"--heal={args.heal}"]
    return heal if args.compare_commits is None else [*heal, f"--compare_commits={args.compare_commits}"]


def flap(args: argparse.Namespace) -> int:
    """Runs a job without faults of processes, whose network is interrupted for 100 ms once per second."""
    with Flapping() as proxy, Job() as job:
        chaos = Chaos(job, args.kind, args.groups, args.ranks, through=proxy)
        chaos.start()
        began = time.monotonic()
        chaos.flap(args.flapping)
        seconds = time.monotonic() - began
        chaos.finish()
        steps = len(chaos.lives[0].ranks[0].of("step"))
    print(
        f"{args.flapping} cuts in {seconds:.0f} s broke {proxy.broken} connections; {steps} steps, all "
        "committed by all"
    )
    return 0


def _append(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with open(path, "a") as out:
        out.writelines(json.dumps(record) + "\n" for record in records)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill and stop the processes of a job, until a rule breaks.")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(2**31), help="seed of the choices; default: random"
    )
    parser.add_argument("--faults", type=int, help="number of faults; --minutes limits them too")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kind", choices=KINDS, default="gloo")
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--torchrun", action="store_true", help="each group has one rank, started by an agent of torchrun"
    )
    parser.add_argument(
        "--forked", action="store_true", help="with --torchrun: ranks start by `torchft exec`"
    )
    parser.add_argument(
        "--heal",
        choices=HEALS,
        help="default: in_passing, and with --record, which measures the Manager's default, at_once",
    )
    parser.add_argument(
        "--compare_commits",
        type=int,
        metavar="N",
        help="groups compare weights within N commits; default: the Manager's",
    )
    parser.add_argument(
        "--flapping", type=int, metavar="N", help="no faults, but N cuts of 100 ms, one each second"
    )
    parser.add_argument(
        "--slow",
        type=float,
        default=float("inf"),
        metavar="S",
        help="print all logs when a fault took longer",
    )
    parser.add_argument("--only", default="", help="only faults whose name contains this, such as SIGSTOP")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="run each fault its number of times, and record its effect in this file",
    )
    args = parser.parse_args()
    if args.torchrun and args.ranks != 1:
        parser.error(f"--torchrun --ranks {args.ranks}: allowed is 1")
    if args.forked and not args.torchrun:
        parser.error("--forked: allowed only with --torchrun")
    if args.heal is None:
        args.heal = "in_passing" if args.record is None else "at_once"
    if not (possible := possible_in(args.groups, args.ranks, args.torchrun)):
        parser.error(f"--groups {args.groups} --ranks {args.ranks}: no fault makes sense in such a job")
    if not any(args.only in fault.name for fault in possible):
        names = ", ".join(fault.name for fault in possible)
        parser.error(f"--only {args.only!r}: allowed is a part of one of {names}")
    for name in ("groups", "ranks", "faults", "flapping"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name} {value}: allowed is 1 or more")
    return args


if __name__ == "__main__":
    os.environ.setdefault("TORCHFT_LOG_LEVEL", "warning")
    sys.exit(main())
