"""A job in which a replica group is killed with SIGKILL, the others continue, and the group returns: `make
train`.

Starts a lighthouse and the replica groups, each a separate torchrun of --script, and follows the events that
they write. Kills the last group with all of its processes and restarts it (or, with --kill rank, only its
last rank; torchrun then restarts the group). Checks that all groups end with the same weights. For
train_ddp.py it also counts the samples in the weights, and compares the weights with those of one process
that trains on the same batches. Ends with status 1 if a check or anything else fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import loss_curves
from accounting import Samples, samples
from replica_group import TRAIN_SCRIPT, Group

from torchft.launch.group import environment
from torchft.launch.job import status
from torchft.launch.lighthouse import LaunchError, lighthouses
from torchft.launch.output import tail
from torchft.launch.owned import ReadyProcess

BAR = 24  # characters
# Heartbeats arrive every 100 ms. A group whose last heartbeat is older than the heartbeat timeout counts as
# failed, and the others continue without it.
LIGHTHOUSE_OPTIONS = ["--min_replicas", "1", "--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "2000"]
PHASES = {
    "quorum": "waiting for a quorum",
    "reconfigure": "connecting to its peers",
    "transfer": "fetching the weights",
    "load": "loading them",
}


def main() -> int:
    args = parse_args()
    folder = args.logs or Path(tempfile.mkdtemp(prefix="torchft-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    os.environ.setdefault("TORCHFT_SNAPSHOTS", "0")  # after Ctrl-C it begins anew, and leaves no keeper
    ready = ReadyProcess(str(args.program), {**os.environ, **environment(args.nproc)})
    groups = [
        Group(number, args.groups, folder, args.nproc, args.program, ready)
        for number in range(args.groups + args.standby)
    ]
    options = [*LIGHTHOUSE_OPTIONS, *(["--max_replicas", str(args.groups)] if args.standby else [])]
    try:
        with lighthouses(folder, options, bind="127.0.0.1:0") as (address, _):
            kills = train(args, groups, address)
        proof = prove(args, groups, folder) if args.once else None
        print_table(groups, kills, proof)
        check(groups, proof)
        if args.plot:
            loss_curves.draw(groups, args.plot)
            print(f"the losses are drawn in {args.plot}")
    except LaunchError as error:
        print(f"\nfailed: {error}")
        for log in error.logs:
            print(f"\nthe end of {log}:\n{tail(log)}")
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted; the logs are in {folder}")
        return 130
    finally:
        for group in groups:
            group.kill()
        ready.close()
    if not args.logs:
        shutil.rmtree(folder)
    return 0


def train(args: argparse.Namespace, groups: list[Group], address: str) -> list[float]:
    """Trains to the end, with kills. Returns the wall-clock times of the kills. With a standby, the killed
    group is removed from `groups`.
    """
    train_args = ["--script", args.script, "--steps", str(args.steps), "--device", args.device]
    train_args += args.train_args
    torchrun_args = ["--max_restarts", "1"] if args.kill == "rank" else []
    active, standby = groups[: args.groups], groups[args.groups :]
    for group in active:
        group.start(address, train_args, torchrun_args)
    victim = active[-1]
    kills: list[float] = []
    kill_at = args.kill_at
    progress = Progress(args.steps)
    deadline = time.monotonic() + args.time_limit

    while any(group.status is None for group in groups):
        time.sleep(0.1)
        for group in groups:
            group.follow()
            if group.status:
                raise LaunchError(f"group {group.number} ended with status {group.status}", group.log)
        progress.show(groups)  # includes the events just before a kill
        back = victim.state == "done" or victim.time_to_heal() is not None
        ready = victim.state.startswith("training") and (back or not kills)
        for group in standby if all(group.state.startswith("training") for group in active) else ():
            if group.state == "not started":
                group.start(address, train_args)
            ready = ready and any(member.get("standby") for member in status(address)["members"])
        if ready and time_to_kill([group.step() for group in active], kill_at, args.steps, len(kills)):
            kills.append(time.time())
            kill_at = args.steps if args.kill_every is None else victim.step() + args.kill_every
            if args.kill == "rank":
                victim.kill_rank(args.nproc - 1)
            else:
                victim.kill()
                progress.show(groups)
                if standby:
                    groups.remove(victim)
                    active.remove(victim)
                    victim = standby.pop()
                    victim.takes_over()
                else:
                    victim.start(address, train_args)
            progress.show(groups)
        back = victim.state == "done" or victim.time_to_heal() is not None
        if groups[0].state == "done" and not (kills and back):
            raise LaunchError(f"the run was over before the kill at step {args.kill_at}: raise --steps")
        if time.monotonic() > deadline:
            raise LaunchError(f"not done after {args.time_limit:g} s", *(group.log for group in groups))
    for group in groups:
        group.follow()
    progress.show(groups)
    return kills


def time_to_kill(steps: list[int], kill_at: int, end: int, kills: int) -> bool:
    """Whether all groups have reached the step of the next kill, and will not end before the killed group
    returns.

    All groups end together after at least `end` steps; while a group is missing, they take further steps.
    """
    latest = end - end // 10 if kills else end
    return all(kill_at <= step < latest for step in steps)


@dataclass(frozen=True)
class Proof:
    """The samples that a job of train_ddp.py trained on, and the difference of its weights from
    those of one process.
    """

    samples: Samples
    difference: float
    equal: bool
    reproducible: bool

    def rows(self) -> list[tuple[str, str]]:
        exact = "equal bit for bit" if self.equal else f"{self.difference:.1e}"
        return [
            ("samples trained", str(self.samples.trained)),
            ("samples trained twice", str(self.samples.twice)),
            ("samples missed", str(self.samples.missed)),
            ("weights, relative to one process", exact if self.reproducible else f"{self.difference:.1e}"),
        ]

    def problem(self) -> str | None:
        if self.samples.twice or self.samples.missed:
            return f"samples were trained twice ({self.samples.twice}) or missed ({self.samples.missed})"
        if self.reproducible and not self.equal:
            return f"the weights are not those of one process, bit for bit: {self.difference:.1e}"
        return None


def prove(args: argparse.Namespace, groups: list[Group], folder: Path) -> Proof:
    """Trains on the same batches in one process, and compares."""
    print("training on the same batches in one process", flush=True)
    device = "cpu" if args.device == "late" else args.device
    own = [
        "--steps",
        str(args.steps),
        "--device",
        device,
        *args.train_args,
        "--events",
        str(folder / "events"),
    ]
    command = [sys.executable, str(TRAIN_SCRIPT.with_name("one_process.py")), *own]
    done = subprocess.run(command, capture_output=True, text=True, timeout=args.time_limit)
    if done.returncode:
        raise LaunchError(f"one process could not train on these batches: {done.stderr[-2000:]}")
    one = json.loads(done.stdout.splitlines()[-1])
    files = (folder / "events").glob("*.jsonl")  # also of a group in whose place a standby is
    everybody = [json.loads(line) for file in sorted(files) for line in file.read_text().splitlines()]
    counted = samples(groups[0].events, everybody, one["samples"], one["epochs"])
    return Proof(counted, one["difference"], one["equal"], "--reproducible" in args.train_args)


class Progress:
    """One status line per group: updated in place on a terminal, printed periodically elsewhere."""

    EVERY = 10.0  # seconds between two lines of a group that only continues to train

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._in_place = sys.stdout.isatty()
        self._drawn = False
        self._last: dict[int, tuple[str, float]] = {}  # state and time of each group's last line

    def show(self, groups: list[Group]) -> None:
        if self._in_place:
            up = f"\x1b[{len(groups)}A" if self._drawn else ""
            print(up + "\n".join(f"\x1b[2K{self._line(group)}" for group in groups), flush=True)
            self._drawn = True
            return
        for group in groups:
            state, when = self._last.get(group.number, ("", 0.0))
            if state != group.state or time.monotonic() - when > self.EVERY:
                self._last[group.number] = (group.state, time.monotonic())
                print(self._line(group), flush=True)

    def _line(self, group: Group) -> str:
        step = group.step()
        done = min(BAR, BAR * step // self._steps)
        bar = "#" * done + "." * (BAR - done)
        overtime = (
            "; goes on until all are back"
            if step > self._steps and group.state.startswith("training")
            else ""
        )
        return f"group {group.number} [{bar}] step {step:5d}/{self._steps}  {group.state}{overtime}"


def print_table(groups: list[Group], kills: list[float], proof: Proof | None = None) -> None:
    *survivors, victim = groups
    nothing = [""] * len(survivors)
    killed_at = kills[-1]
    start = None if victim.stands_in else victim.time_to_start()
    healed = "the standby, from the kill to healed" if victim.stands_in else "from its restart to healed"
    joins = (
        victim.started + (start or 0.0),
        victim.started + (victim.time_to_heal() or math.inf),
    )
    rows = [
        ("steps committed", [str(len(group.commits())) for group in groups]),
        ("steps lost", [str(len(group.losses())) for group in groups]),
        (
            "from the kill to the next commit",
            [seconds(group.next_commit(killed_at)) for group in survivors] + ["killed"],
        ),
        (healed, [*nothing, seconds(victim.time_to_heal())]),
        *([] if victim.stands_in else [("  of it until PyTorch was ready", [*nothing, seconds(start)])]),
        *((f"  {what}", [*nothing, seconds(victim.recovery(phase))]) for phase, what in PHASES.items()),
        (
            "longest step while it joins",
            [seconds(max(group.steps_between(*joins), default=None)) for group in survivors],
        ),
        (
            "median step",
            [seconds(statistics.median(group.steps_between(0.0, math.inf))) for group in survivors],
        ),
    ]
    ends = [group.ends()[0] for group in groups]
    if any("bits_per_byte" in end for end in ends):
        rows.append(
            ("bits per byte of held-out text", [f"{end.get('bits_per_byte', 0):.3f}" for end in ends])
        )
    else:
        rows.append(("accuracy on held-out images", [f"{end.get('accuracy', 0):.2%}" for end in ends]))
    if len(kills) > 1:
        rows.insert(2, ("killed, times", [*("0" for _ in survivors), str(len(kills))]))
    print("\n" + " " * 34 + "".join(f"{f'group {group.number}':>12}" for group in groups))
    for name, cells in rows:
        print(f"{name:34}" + "".join(f"{cell:>12}" for cell in cells))
    if proof:
        print()
        for name, cell in proof.rows():
            print(f"{name:34}{cell:>24}")
    print("\nSHA-256 of the weights")
    for group in groups:
        for rank, end in enumerate(group.ends()):
            print(f"group {group.number} rank {rank}  {end.get('sha256')}")


def seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} s"


def check(groups: list[Group], proof: Proof | None = None) -> None:
    """Checks that all ranks of all groups have the same weights, and that the killed group has healed. With a
    proof, also that each sample was trained on once per epoch.
    """
    logs = [group.log for group in groups]
    ends = [end for group in groups for end in group.ends()]
    if any(end["event"] != "end" for end in ends):
        raise LaunchError("a rank did not reach the end", *logs)
    if len({(end["step"], end["sha256"]) for end in ends}) > 1:
        raise LaunchError("the weights differ", *logs)
    if groups[-1].time_to_heal() is None:
        raise LaunchError("the killed group did not heal from another one", groups[-1].log)
    if proof and (problem := proof.problem()):
        raise LaunchError(problem, *logs)
    print("equal")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--script",
        choices=["train_ddp", "train_fsdp", "train_diloco"],
        default="train_ddp",
        help="program that each rank runs; default: %(default)s",
    )
    parser.add_argument("--groups", type=int, default=2, help="replica groups, at least 2")
    parser.add_argument("--nproc", type=int, default=1, help="ranks of a group")
    parser.add_argument(
        "--standby", action="store_true", help="a further group takes the place of the one that is killed"
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument(
        "--kill-at", type=int, help="step after which the last group is killed; a third of --steps"
    )
    parser.add_argument(
        "--kill-every", type=int, help="kill it again this many steps later, once it has returned"
    )
    parser.add_argument(
        "--kill",
        choices=["group", "rank"],
        default="group",
        help="kill the whole last group, or one rank of it",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda", "late"],
        default="cpu",
        help="cuda needs a GPU for every rank; late is the accelerator of the tests (tests/late), for "
        "train_ddp.py",
    )
    parser.add_argument("--time-limit", type=float, default=170, help="seconds")
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep logs and events here (must be new or empty)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses (needs matplotlib)")
    parser.add_argument("--reproducible", action="store_true", help="for train_ddp.py: end equal bit for bit")
    parser.add_argument("train_args", nargs="*", help="after --: further arguments for the script")
    args = parser.parse_args()
    args.program = TRAIN_SCRIPT
    args.once = args.script == "train_ddp"  # its weights are compared with those of one process
    if args.reproducible and not args.once:
        parser.error("--reproducible is for train_ddp.py only")
    if args.reproducible:
        args.train_args.append("--reproducible")
    elif args.once and args.device != "late":
        # Not float32, in which rounding hides the effect of the order of additions.
        args.train_args.append("--double")
    if args.kill_at is None:
        args.kill_at = args.kill_every or args.steps // 3
    if args.device == "late":
        if not args.once:
            parser.error(f"--device late runs train_ddp only, not --script {args.script}")
        args.program = TRAIN_SCRIPT.parents[2] / "tests" / "late" / "train.py"
    if args.groups < 2:
        parser.error(f"--groups must be at least 2, got {args.groups}: someone has to survive")
    if args.standby and (args.kill == "rank" or args.kill_every):
        parser.error("--standby is not allowed with --kill rank and --kill-every")
    if args.nproc < 1:
        parser.error(f"--nproc must be at least 1, got {args.nproc}")
    if not 0 < args.kill_at < args.steps:
        parser.error(f"--kill-at must lie between 0 and --steps ({args.steps}), got {args.kill_at}")
    if args.kill_every is not None and args.kill_every < 1:
        parser.error(f"--kill-every must be at least 1 step, got {args.kill_every}")
    if args.plot and not find_spec("matplotlib"):
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if args.logs and args.logs.is_dir() and any(args.logs.iterdir()):
        parser.error(f"--logs {args.logs} must be new or empty")
    return args


if __name__ == "__main__":
    sys.exit(main())
