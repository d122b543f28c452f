"""``torchft run``: a whole job on this machine, which survives the failure of any of its groups."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torchft import _keeper
from torchft._lighthouse_http import DEFAULT_PORT
from torchft._manager.signals import grace_from_env
from torchft.addresses import node_name
from torchft.cli.arguments import Parser, duration, lighthouse_count, natural, nearest, positive, replicas
from torchft.cli.node import check
from torchft.cli.output import write_no_more
from torchft.launch import automatic
from torchft.launch.control import Control
from torchft.launch.group import ReplicaGroup, environment
from torchft.launch.job import HostFails, LocalJob
from torchft.launch.lighthouse import LaunchError, lighthouses, log_name
from torchft.launch.output import tail
from torchft.launch.owned import ReadyProcess
from torchft.launch.progress import StatusLines
from torchft.scaling.policy import allowed_numbers

_ABOUT = """\
Starts a lighthouse, or several that agree, and replica groups of a script, each a separate torchrun; restarts
groups and lighthouses that fail; shows one line for each group, and ends when all groups have finished.
Ctrl-C, SIGTERM or a closed terminal (SIGHUP, unless nohup ignores it) ends all processes of the job: scripts
that call Manager.draining() end their step first, in TORCHFT_GRACE_S (25 s).

The environment of the script has REPLICA_GROUP_ID, NUM_REPLICA_GROUPS (the largest number, MAX, and
standbys), and torchrun's variables.

  torchft run --replicas 2 --kill-every 30s train_ddp.py --steps 5000
  torchft run --lighthouses 3 --replicas 2 train.py
  torchft run --replicas 2 --standby 1 train.py   # a third group is ready to take the place of one
  torchft run --replicas 2:8 train.py        # and later, in another terminal: torchft scale 4
  torchft run --replicas 2:8 --scale auto train.py   # finds the number of groups that is best
"""


_LOGS = "torchft-logs"
# A terminal sends Ctrl-C to a wrapper such as `timeout` too, which forwards it: it arrives twice, a moment
# apart.
_ECHO_SEC = 1.0


class _Terminated(KeyboardInterrupt):
    """SIGINT from Ctrl-C, SIGTERM, for example from a scheduler that preempts the machine, or SIGHUP from a
    closed terminal has arrived.
    """

    def __init__(self, number: int, why: str = "") -> None:
        super().__init__(why or signal.Signals(number).name)
        self.number = number


def is_echo(number: int, now: float, first: Mapping[int, float]) -> bool:
    """Whether a signal repeats an earlier one that was meant once, so that it must not end the groups at
    once.

    Args:
        number: the signal.
        now: when it arrived, in seconds of the monotonic clock.
        first: when each signal arrived first.
    """
    if number not in first:
        return False
    # The kernel and the shell send a SIGHUP each, some time apart.
    return number == signal.SIGHUP or now - first[number] < _ECHO_SEC


class _Signals:
    """The handler of the signals that end the job."""

    def __init__(self) -> None:
        self._first: dict[int, float] = {}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not is_echo(number, now, self._first):
            self._first.setdefault(number, now)
            raise _Terminated(number)


def main(arguments: Sequence[str]) -> int:
    args = _parse(arguments)
    terminate = _Signals()
    signal.signal(signal.SIGINT, terminate)
    signal.signal(signal.SIGTERM, terminate)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, terminate)
    try:
        args.log_dir = _log_folder(args.log_dir, log_name(1, args.lighthouses))
    except OSError as e:
        name = str(args.log_dir or _LOGS)
        print(
            f"torchft run: logs cannot be written to the folder {name!r}: {e.strerror}; choose a folder "
            "with --log-dir",
            file=sys.stderr,
        )
        return 1
    print(f"logs: {args.log_dir}", flush=True)
    try:
        return _run(args)
    except _Terminated as e:
        return 128 + e.number
    except LaunchError as e:
        print(f"\ntorchft run: {e}", file=sys.stderr)
        for log in e.logs:
            print(f"\nthe end of {log}:\n{tail(log)}", file=sys.stderr)
        return e.status
    finally:
        try:
            print(f"logs: {args.log_dir}", flush=True)  # repeated, because the first lines have scrolled away
        except OSError:  # the terminal is closed
            write_no_more()


def _start_keeper() -> None:
    """Starts the keeper of this host, which outlives this process, unless the groups make no snapshots."""
    if os.environ.get("TORCHFT_SNAPSHOTS") == "0":
        return
    try:
        _keeper.start(_keeper.root())
    except OSError as e:
        print(
            f"torchft run: no keeper runs, so snapshots are not shared with other hosts: {e}", file=sys.stderr
        )


def _log_folder(given: Path | None, log: str) -> Path:
    """Makes the folder for the logs: the given one, which may exist, or a new one of this job alone.

    Raises:
        OSError: it cannot be made, or the file ``log`` cannot be written in it.
    """
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        (given / log).touch()
        return given
    usual = folder = Path(_LOGS) / time.strftime("%Y%m%d-%H%M%S")
    usual.parent.mkdir(exist_ok=True)
    jobs = 1
    while True:
        try:
            folder.mkdir()
            return folder
        except FileExistsError:  # another job has begun in the same second
            jobs += 1
            folder = Path(f"{usual}-{jobs}")


def _check_node(refuse: bool, lighthouse: str) -> None:
    """Checks this host, which alone has the groups of this job."""
    status = check(lighthouse, nodes=1)
    if status and refuse:
        raise HostFails(
            f"node {node_name()} is not used (--check refuse): see the lines above", status=status
        )


def _run(args: Any) -> int:
    first, most = args.replicas
    ready = ReadyProcess(str(args.script), {**os.environ, **environment(args.nproc_per_node)})

    def make_group(number: int) -> ReplicaGroup:
        log = args.log_dir / f"group-{number}.log"
        command = [str(args.script), *args.script_args]
        return ReplicaGroup(number, most + args.standby, command, log, args.nproc_per_node, ready=ready)

    options = [
        "--min_replicas",
        str(args.min_replicas),
        "--join_timeout_ms",
        str(round(1000 * args.join_timeout)),
        *(["--max_replicas", str(first)] if args.standby else []),
    ]
    watched = lighthouses(args.log_dir, options, args.lighthouses, args.bind)
    with contextlib.closing(ready), watched as (address, check_lighthouse):
        print(f"lighthouse{'' if args.lighthouses == 1 else 's'}: {address}", flush=True)
        if args.check:
            _check_node(args.check == "refuse", address)
        _start_keeper()
        job = LocalJob(
            make_group, first, most, address, args.kill_every, args.seed, args.min_replicas, args.standby
        )
        control = None
        try:
            try:
                control = Control()
            except OSError as e:
                print(f"torchft run: `torchft scale` cannot reach this job: {e}", file=sys.stderr)
            follower = automatic.follower(job, args.numbers, address) if args.scale else None
            lines = StatusLines()
            while job.tick():
                _show(lines, job)
                check_lighthouse()
                if control is not None:
                    control.look(job)
                if follower is not None:
                    follower.look(time.monotonic(), job.shown)
                job.pause()
            _show(lines, job)
        except _Terminated as e:
            with contextlib.suppress(OSError):  # the terminal may be closed
                print(f"\n{e}: ending the groups (once more, a second later: at once)", file=sys.stderr)
            job.end(args.grace)
            raise
        finally:
            job.kill()
            if control is not None:
                control.close()
        print(f"done: {len(job.members)} groups" + (f", {job.kills} kills" if args.kill_every else ""))
    return 0


def _show(progress: StatusLines, job: LocalJob) -> None:
    try:
        progress.show(job)
    except OSError as e:  # a closed terminal fails at once, and its SIGHUP comes later, or never
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it must not end the groups at once
        raise _Terminated(signal.SIGHUP, f"the output cannot be written ({e.strerror})") from None


def _parse(arguments: Sequence[str]) -> Any:
    parser = Parser(prog="torchft run", description=_ABOUT)
    parser.add_argument(
        "--replicas", type=replicas, default=(2, 2), metavar="N[:MAX]", help="replica groups (2)"
    )
    parser.add_argument(
        "--scale",
        choices=["auto"],
        help="find the best number of groups from N to MAX: each added one brings 60 %% of its share",
    )
    parser.add_argument(
        "--sizes",
        metavar="SIZES",
        help="numbers of groups for it: all, powers_of_two, or a list such as 2/4/8 (all)",
    )
    parser.add_argument(
        "--nproc-per-node", type=positive, default=1, metavar="N", help="ranks of a group (1)"
    )
    parser.add_argument(
        "--min-replicas", type=positive, default=1, metavar="N", help="fewest groups that train (1)"
    )
    parser.add_argument(
        "--standby",
        type=natural,
        default=0,
        metavar="N",
        help="further groups, each ready to take the place of one that fails (0)",
    )
    parser.add_argument(
        "--join-timeout",
        type=duration,
        default=10.0,
        metavar="TIME",
        help="how long to wait for groups that start (10s)",
    )
    parser.add_argument(
        "--kill-every", type=duration, metavar="TIME", help="kill a random group at this interval"
    )
    parser.add_argument("--seed", type=int, help="seed for the choice of the groups to kill")
    parser.add_argument(
        "--lighthouses",
        type=lighthouse_count,
        default=1,
        metavar="N",
        help="lighthouses that agree by Raft, if above 1 (1)",
    )
    parser.add_argument(
        "--check",
        choices=("name", "refuse"),
        metavar="name|refuse",
        help="check this host first, as `torchft doctor --node` does; refuse: a bad one ends the job",
    )
    parser.add_argument(
        "--bind",
        metavar="HOST:PORT",
        help=f"address of the lighthouse (127.0.0.1:{DEFAULT_PORT}, or a free port)",
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="folder for the logs (torchft-logs/ and the time)",
    )
    parser.add_argument("script", type=Path, help="program that each rank runs")
    script_args = parser.add_argument("script_args", nargs="...", metavar="...", help="its arguments")
    # Otherwise older Pythons report the missing script together with its arguments.
    script_args.required = False
    args = parser.parse_args(arguments)
    if not args.script.is_file():
        parser.error(f"script {str(args.script)!r} is no file{_alike(args.script)}")
    first, most = args.replicas
    if args.scale and first == most:
        parser.error(f"--scale auto is not allowed with --replicas {first}; allowed: --replicas N:MAX")
    if args.sizes and not args.scale:
        parser.error(f"--sizes {args.sizes} is not allowed without --scale auto")
    try:
        args.numbers = allowed_numbers(first, most, args.sizes or "all")
    except ValueError as e:
        parser.error(f"--{e}")
    args.replicas = (args.numbers[0], most)
    if args.bind and args.lighthouses > 1:
        parser.error(
            f"--bind {args.bind} is not allowed with --lighthouses {args.lighthouses}, which take free "
            "ports; "
            "allowed: --lighthouses 1"
        )
    if args.min_replicas > args.replicas[0]:
        parser.error(
            f"--min-replicas {args.min_replicas} is not allowed; allowed: at most --replicas "
            f"({args.replicas[0]})"
        )
    try:
        args.grace = grace_from_env().total_seconds()
    except ValueError as e:
        parser.error(str(e))
    return args


def _alike(script: Path) -> str:
    if not script.parent.is_dir():
        return f", and there is no folder {script.parent}"
    return nearest(script.name, [path.name for path in script.parent.glob("*.py")])
