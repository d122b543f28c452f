"""Starts by fork and a standby, beside starts of Python: a killed group, a killed rank, the first start of
eight ranks, and their memory.

    python python/bench/forks.py [--rounds 5]

Two groups train train_demo.py, the script of `make train`. In each round one is killed with SIGKILL and
restarted at once, by fork and in the ordinary way; or a third group, forked before, takes its place. Or both
have four ranks and train train_fsdp.py; one rank is killed, and torchrun forks the four of its group. Eight
ranks of one group import PyTorch and torchft, and sleep; beside them one process that does so without
torchrun. Processor time is that of torchrun and rank of the group that comes in, from the kill on, and does
not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from common import Spread, markdown_table, rotated, verdict
from replica_group import TRAIN_SCRIPT, Group

from torchft.launch import process_tree
from torchft.launch.exec import NAME_ENV
from torchft.launch.group import ReplicaGroup, environment
from torchft.launch.job import status
from torchft.launch.lighthouse import lighthouses
from torchft.launch.owned import ReadyProcess

RANKS = 8
RANKS_OF_FSDP = 4
GOAL_HEALED_S = {"standby": 0.4, "fork": 0.6}
GOAL_RANK_S = 1.0
GOAL_START = 1.3  # of one import
GOAL_MEMORY = 2.5  # of one idle rank
LIMIT_S = 300
IDLE = """
import os, sys, time
import torch, torchft
torchft.Job
print("idle", os.getpid(), flush=True)
time.sleep(600)
"""
LIGHTHOUSE = ["--min_replicas", "1", "--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "2000"]
WAYS = ("fork", "ordinary")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="torchft-forks-") as folder:
        killed = {way: restarts(way, rounds, Path(folder) / way) for way in ("standby", *WAYS)}
        one_rank = restarts("rank", rounds, Path(folder) / "rank")
        idle = Path(folder) / "idle.py"
        idle.write_text(IDLE)
        starts: dict[str, list[tuple[float, float]]] = {"one": [], **{way: [] for way in WAYS}}
        for number in range(rounds):
            for way in rotated(list(starts), number):
                starts[way].append(first_start(way, idle))
    print(table(killed, one_rank, starts))


def restarts(way: str, rounds: int, folder: Path) -> list[tuple[float, float]]:
    """Seconds from the kill to the commit after the heal, and processor seconds until then, of each round."""
    folder.mkdir()
    ready = None
    ranks = RANKS_OF_FSDP if way == "rank" else 1
    if way != "ordinary":
        ready = ReadyProcess(str(TRAIN_SCRIPT), {**os.environ, **environment(ranks)})
    else:
        os.environ[NAME_ENV] = "none"  # where no ready process listens
    number = 3 if way == "standby" else 2
    groups = [Group(i, number, folder, ranks, ready=ready) for i in range(number)]
    torchrun_args = ["--max_restarts", str(rounds)] if ranks > 1 else []
    found = []
    try:
        with lighthouses(folder, [*LIGHTHOUSE, "--max_replicas", "2"], bind="127.0.0.1:0") as (address, _):
            script = "train_ddp" if ranks == 1 else "train_fsdp"
            args = ["--script", script, "--steps", "1000000", "--device", "cpu"]
            for group in groups:
                group.start(address, args, torchrun_args)
            wait(groups, lambda: sum(len(group.commits()) > 50 for group in groups) == 2)
            for _ in range(rounds):
                time.sleep(8)  # as long as the ready process may import what the first start has imported
                found.append(kill_one(groups, address, args))
                print(f"{way}: healed after {found[-1][0]:.2f} s, {found[-1][1]:.2f} s of processor time")
    finally:
        for group in groups:
            group.kill()
        if ready is not None:
            ready.close()
        os.environ.pop(NAME_ENV, None)
    return found


def kill_one(groups: list[Group], address: str, args: list[str]) -> tuple[float, float]:
    """Kills a group that trains, which is restarted, or one of its ranks. A third group takes its place."""
    back = victim = groups[1]
    if len(groups) == 3:
        wait(groups, lambda: standby(address) is not None)
        back = groups[standby(address) or 0]
        victim = groups[back.number - 1]
    before = 0.0
    if back.nproc > 1:
        before = processor_time([back.pid])
    elif back is not victim:
        before = processor_time(process_tree.tree(back.pid))
    began = time.time()
    if victim.nproc > 1:
        victim.kill_rank(victim.nproc - 1)
    else:
        victim.kill()
        if back is victim:
            back.start(address, args)
    wait([back], lambda: healed(back, began) is not None)
    spent = processor_time(process_tree.tree(back.pid)) - before
    if back is not victim:
        victim.start(address, args)
    return (healed(back, began) or 0.0) - began, spent


def standby(address: str) -> int | None:
    """The number of the group that stands by."""
    ids = [member["replica_id"] for member in status(address)["members"] if member.get("standby")]
    return int(ids[0].split(":")[0].rpartition("_")[2]) if ids else None


def healed(group: Group, killed_at: float) -> float | None:
    """When the group has first committed a step with the others' weights."""
    times = (event["time"] for event in group.commits() if event["healing"] and event["step"] > 1)
    return next((at for at in times if at > killed_at), None)


def wait(groups: list[Group], until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not until():
        for group in groups:
            group.follow()
            if group.status is not None:
                raise RuntimeError(f"group {group.number} ended: {group.log.read_text()[-2000:]}")
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)


def first_start(way: str, script: Path) -> tuple[float, float]:
    """Seconds until all ranks have imported, and the proportional share of memory (PSS) of all in MB."""
    log = script.with_name("log")
    log.unlink(missing_ok=True)
    began = time.monotonic()
    if way == "one":
        process = process_tree.start([sys.executable, "-u", str(script)], log)
        try:
            _lines(log, 1, process.poll)
            return time.monotonic() - began, memory([process.pid])
        finally:
            process_tree.kill_tree(process)
    ready = ReadyProcess(str(script), {**os.environ, **environment(RANKS)}) if way == "fork" else None
    group = ReplicaGroup(0, 1, [str(script)], log, RANKS, ready=ready)
    try:
        group.start("http://127.0.0.1:1", None if ready else {NAME_ENV: "none"})
        ranks = _lines(log, RANKS, lambda: group.status)
        took = time.monotonic() - began
        return took, memory([*ranks, *([ready.pid] if ready else [])])
    finally:
        group.kill()
        if ready is not None:
            ready.close()


def _lines(log: Path, number: int, status: Callable[[], int | None]) -> list[int]:
    deadline = time.monotonic() + LIMIT_S
    while len(found := [line for line in log.read_text().splitlines() if line.startswith("idle ")]) < number:
        if status() is not None or time.monotonic() > deadline:
            raise RuntimeError(log.read_text()[-2000:])
        time.sleep(0.005)
    return [int(line.split()[1]) for line in found]


def memory(pids: list[int]) -> float:
    time.sleep(1)  # until the last rank has finished its start
    found = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            found += int(line.split()[1]) if line.startswith("Pss:") else 0
    return found / 1024


def processor_time(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def table(
    killed: dict[str, list[tuple[float, float]]],
    one_rank: list[tuple[float, float]],
    starts: dict[str, list[tuple[float, float]]],
) -> str:
    rows = []
    seconds, spent = (
        {way: Spread.of(sample[i] for sample in killed[way]) for way in killed} for i in range(2)
    )
    ratio = [mine[0] / other[0] for mine, other in zip(killed["fork"], killed["ordinary"])]
    goals = [f"{seconds[w].text()} {verdict(seconds[w].median <= most)}" for w, most in GOAL_HEALED_S.items()]
    what = f"kill -9 to healed, s (goals <= {', '.join(map(str, GOAL_HEALED_S.values()))})"
    rows.append([what, *goals, seconds["ordinary"].text(), Spread.of(ratio).text()])
    ratio = [mine[1] / other[1] for mine, other in zip(killed["fork"], killed["ordinary"])]
    what = "of it processor time of torchrun and rank, s"
    rows.append([what, *(spent[way].text() for way in killed), Spread.of(ratio).text()])
    rank = Spread.of(took for took, _ in one_rank)
    what = f"kill -9 of one rank of {RANKS_OF_FSDP} to healed, s (goal <= {GOAL_RANK_S})"
    rows.append([what, "", f"{rank.text()} {verdict(rank.median <= GOAL_RANK_S)}", "", ""])
    for i, what, most in (
        (0, "start of eight ranks", GOAL_START),
        (1, "memory of eight ranks and the ready process", GOAL_MEMORY),
    ):
        of_one = {w: [x[i] / one[i] for x, one in zip(starts[w], starts["one"])] for w in WAYS}
        ratio = [mine[i] / other[i] for mine, other in zip(starts["fork"], starts["ordinary"])]
        fork, ordinary = (Spread.of(of_one[way]) for way in WAYS)
        name = f"{what}, times that of one (goal <= {most})"
        cells = [
            "",
            f"{fork.text()} {verdict(fork.median <= most)}",
            ordinary.text(),
            Spread.of(ratio).text(),
        ]
        rows.append([name, *cells])
    return markdown_table(["", "standby", "fork", "ordinary", "fork / ordinary"], rows)


if __name__ == "__main__":
    main()
