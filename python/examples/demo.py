"""A job that loses a replica group to SIGKILL in mid-run, goes on, and gets it back: `make train`.

Starts a lighthouse and the replica groups, each its own torchrun, follows the events they write,
kills the last group with everything below it, starts it again, and checks that all groups end with
the same weights. Ends with status 1 when they do not, or when anything else goes wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import processes

TRAIN_SCRIPT = Path(os.environ.get("TS") or Path(__file__).resolve().parents[2] / "train_ddp.py")
WIDTH = 24  # of a progress bar, in characters


class DemoError(Exception):
    """What went wrong, and the log that says more."""

    def __init__(self, message: str, *logs: Path) -> None:
        super().__init__(message)
        self.logs = logs


@dataclass
class Group:
    """One replica group: its torchrun, and what its events say."""

    number: int
    folder: Path
    nproc: int
    process: subprocess.Popen[bytes] | None = None
    state: str = "starting"
    started: float = 0.0  # wall clock of the last start
    step: int = 0
    loss: float = float("nan")
    events: list[dict[str, Any]] = field(default_factory=list)  # of rank 0
    _offset: int = 0

    @property
    def log(self) -> Path:
        return self.folder / f"group-{self.number}.log"

    def events_file(self, rank: int) -> Path:
        return self.folder / "events" / f"group-{self.number}-rank-{rank}.jsonl"

    def start(self, lighthouse: str, groups: int, train_args: list[str]) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(self.nproc)]
        command += [str(TRAIN_SCRIPT), "--events", str(self.folder / "events"), *train_args]
        env = {
            "REPLICA_GROUP_ID": str(self.number),
            "NUM_REPLICA_GROUPS": str(groups),
            "TORCHFT_LIGHTHOUSE": lighthouse,
        }
        self.started = time.time()
        self.process = processes.start(command, self.log, env)

    def follow(self) -> None:
        """Reads what was written since the last call."""
        path = self.events_file(rank=0)
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    break
                self._offset += len(line)
                try:
                    event = json.loads(line)
                except ValueError:  # half a line of a killed process, and one of its successor
                    continue
                self.events.append(event)
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] == "commit":
            if self.state == "starting again":
                self.state = "healed" if event["healing"] else "training (did not heal)"
            elif self.state == "starting":
                self.state = "training"
            self.step, self.loss = event["step"], event["loss"]
        elif event["event"] == "end":
            self.state = "ended"

    def count(self, kind: str) -> int:
        return sum(event["event"] == kind for event in self.events)

    def ends(self) -> list[dict[str, Any]]:
        """The last event of every rank."""
        files = [self.events_file(rank) for rank in range(self.nproc)]
        return [json.loads(file.read_text().splitlines()[-1]) for file in files]


class Progress:
    """One line per group, updated in place on a terminal, printed now and then elsewhere."""

    EVERY = 10.0  # seconds between two lines of a group that only trains on

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._in_place = sys.stdout.isatty()
        self._drawn = False
        self._last: dict[int, tuple[str, float]] = {}  # state and time of the last line of a group

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
        done = min(WIDTH, WIDTH * group.step // self._steps)
        bar = "#" * done + "." * (WIDTH - done)
        loss = f"loss {group.loss:.4f}" if group.step else " " * 11
        return f"group {group.number} [{bar}] step {group.step:5d}/{self._steps}  {loss}  {group.state}"


def main() -> int:
    args = parse_args()
    folder = args.logs or Path(tempfile.mkdtemp(prefix="torchft-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    groups = [Group(number, folder, args.nproc) for number in range(args.groups)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        address = start_lighthouse(folder, started)
        killed_at = run(args, groups, address)
        print_table(groups, groups[-1], killed_at)
        check(groups)
    except DemoError as error:
        print(f"\nfailed: {error}")
        for log in error.logs:
            print(f"\nthe end of {log}:")
            print(*log.read_text(errors="replace").splitlines()[-20:], sep="\n")
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted; the logs are in {folder}")
        return 130
    finally:
        for process in started + [group.process for group in groups if group.process]:
            processes.kill_tree(process)
    if not args.logs:
        shutil.rmtree(folder)
    return 0


def start_lighthouse(folder: Path, started: list[subprocess.Popen[bytes]]) -> str:
    command = shutil.which("torchft_lighthouse", path=str(Path(sys.executable).parent)) or shutil.which(
        "torchft_lighthouse"
    )
    if command is None:
        raise DemoError(f"there is no torchft_lighthouse beside {sys.executable}: run `pip install -e .`")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # A group counts as dead when its heartbeats (every 100 ms) stay away this long. Short, for a
    # demo on one machine: survivors wait for it.
    options = ["--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "2000"]
    log = folder / "lighthouse.log"
    process = processes.start([command, "--min_replicas", "1", "--bind", f"127.0.0.1:{port}", *options], log, {})
    started.append(process)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return f"http://127.0.0.1:{port}"
        except OSError:
            time.sleep(0.05)
    raise DemoError("the lighthouse did not start", log)


def run(args: argparse.Namespace, groups: list[Group], lighthouse: str) -> float:
    """Trains to the end with one kill on the way. Returns when that was, by the wall clock."""
    train_args = ["--steps", str(args.steps), "--device", args.device]
    # At the end the others wait this many steps for the killed group: as many as the time limit allows.
    train_args += ["--overtime", "1000000", *args.train_args]
    for group in groups:
        group.start(lighthouse, len(groups), train_args)
    victim, killed_at = groups[-1], 0.0
    progress = Progress(args.steps)
    deadline = time.monotonic() + args.time_limit

    while any(group.process.poll() is None for group in groups):
        for group in groups:
            group.follow()
            if group.process.poll():
                raise DemoError(f"group {group.number} ended with status {group.process.returncode}", group.log)
        if not killed_at and all(group.step >= args.kill_at for group in groups):
            killed_at = time.time()
            processes.kill_tree(victim.process)
            victim.follow()  # what it still wrote belongs to its first life
            victim.state = "killed"
            progress.show(groups)
            victim.start(lighthouse, len(groups), train_args)
            victim.state = "starting again"
        progress.show(groups)
        if time.monotonic() > deadline:
            raise DemoError(f"not done after {args.time_limit:.0f} s", *(group.log for group in groups))
        time.sleep(0.2)
    for group in groups:
        group.follow()
    progress.show(groups)
    return killed_at


def print_table(groups: list[Group], victim: Group, killed_at: float) -> None:
    survivors = [group for group in groups if group is not victim]
    commits = {group.number: next_commit(group, killed_at, len(groups)) for group in survivors}
    rows: list[tuple[str, list[str]]] = [
        ("steps committed", [str(group.count("commit")) for group in groups]),
        ("steps lost", [str(group.count("lost")) for group in groups]),
        ("from the kill to the next commit", [seconds(commits.get(group.number)) for group in groups]),
        ("from its restart to healed", [seconds(time_to_heal(group)) for group in groups]),
        ("accuracy on held-out images", [f"{group.ends()[0]['accuracy']:.2%}" for group in groups]),
    ]
    print("\n" + " " * 34 + "".join(f"{f'group {group.number}':>12}" for group in groups))
    for name, cells in rows:
        print(f"{name:34}" + "".join(f"{cell:>12}" for cell in cells))
    print("\nSHA-256 of the weights")
    for group in groups:
        for rank, end in enumerate(group.ends()):
            print(f"group {group.number} rank {rank}  {end['sha256']}")


def next_commit(survivor: Group, killed_at: float, groups: int) -> float | None:
    """Seconds from the kill to the first step without the victim.

    A step that was all but done when the kill came may still commit right after it: not counted.
    """
    for event in survivor.events:
        if event["event"] == "commit" and event["time"] > killed_at and event["participants"] < groups:
            return event["time"] - killed_at
    return None


def time_to_heal(group: Group) -> float | None:
    """Seconds from the restart (with the start of Python and PyTorch) to the first step with the others' weights."""
    for event in group.events:
        if event["event"] == "commit" and event["time"] > group.started and event["healing"] and event["step"] > 1:
            return event["time"] - group.started
    return None


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def check(groups: list[Group]) -> None:
    """All ranks of all groups must hold the same weights, and the killed group must have healed."""
    logs = [group.log for group in groups]
    ends = [end for group in groups for end in group.ends()]
    if any(end["event"] != "end" for end in ends):
        raise DemoError("a rank did not reach the end", *logs)
    if len({(end["step"], end["sha256"]) for end in ends}) > 1:
        raise DemoError("the weights differ", *logs)
    if time_to_heal(groups[-1]) is None:
        raise DemoError("the killed group did not heal", groups[-1].log)
    print("equal")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2, help="replica groups, at least 2")
    parser.add_argument("--nproc", type=int, default=1, help="ranks of a group")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--kill-at", type=int, help="step after which the last group is killed (a third of --steps)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda needs a GPU for every rank")
    parser.add_argument("--time-limit", type=float, default=170, help="seconds")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep logs and events here")
    parser.add_argument("train_args", nargs="*", help="after --: further arguments of train_ddp.py")
    args = parser.parse_args()
    args.kill_at = args.kill_at or args.steps // 3
    if args.groups < 2:
        parser.error(f"--groups must be at least 2, got {args.groups}: someone has to survive")
    if args.nproc < 1:
        parser.error(f"--nproc must be at least 1, got {args.nproc}")
    if not 0 < args.kill_at < args.steps:
        parser.error(f"--kill-at must lie between 0 and --steps ({args.steps}), got {args.kill_at}")
    return args


if __name__ == "__main__":
    sys.exit(main())
