"""A job whose processes are killed and stopped, one fault after the other, and what must hold all the same.

`make chaos` runs `python tests/process/chaos.py`: faults at random for as long as one likes, which a seed replays.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from chaos_worker import BUCKETS, RATE, gradient
from processes import HERE, START_TIMEOUT_S, Child, Event, Job, free_port, ours_path
from torch.distributed import TCPStore

from torchft.launch import process_tree

PHASES = [
    "before the quorum",
    "in the quorum",
    *(f"in bucket {bucket}" for bucket in range(BUCKETS)),
    "before the vote",
    "after the vote",
]
HEARTBEAT_TIMEOUT_S = 3.0
# Generous: a machine may be busy. What it takes on a quiet one is in docs/failures.md.
KILL_BOUND_S = 15.0
STOP_BOUND_S = HEARTBEAT_TIMEOUT_S + 15.0
HEAL_BOUND_S = 90.0
ENDS_S = 10.0  # after a trainer's end, until the workers of its isolated group have ended too


def processes_of(group: int) -> list[int]:
    """The processes of a process group that run. One that only waits to be reaped does not."""
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in process_tree.alive(found) if _process_group(pid) == group]


def _process_group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


@dataclass
class Life:
    """A group, from its start to its death: a process for each rank, and the store that torchrun's agent would host."""

    group: int
    ranks: list[Child]
    store: TCPStore
    struck: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a fault cost those who lived on."""

    seconds: float  # from the fault to the last survivor's next commit without the victims
    lost: int  # steps, of the survivor that lost most


@dataclass
class Chaos:
    """A job of `groups` groups of `ranks` ranks. Close it with `finish`, which checks what must hold."""

    job: Job
    kind: str = "gloo"
    groups: int = 2
    ranks: int = 1
    lighthouse_options: Sequence[str] = ()
    lives: list[Life] = field(default_factory=list)
    past: list[Life] = field(default_factory=list)
    spares: list[Life] = field(default_factory=list)

    def start(self) -> None:
        self.port = free_port()
        self.shared = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.memory_before = set(os.listdir("/dev/shm"))
        self.lighthouse = self._start_lighthouse()
        self.lives = [self._spawn(group) for group in range(self.groups)]
        for life in self.lives:
            self._join(life)
        self.wait_together()

    # Faults

    def kill(self, *victims: int, phase: str = "in bucket 1", rank: int = 0) -> Outcome:
        """SIGKILL for a rank of each victim at a phase; its siblings end as torchrun ends them. Then all come back."""
        for victim in victims:
            self._prepare(victim)  # so that its start is not part of what is measured
        survivors = [life for life in self.lives if life.group not in victims]
        at, quorum = self._strike([self.lives[v].ranks[rank] for v in victims], phase, signal.SIGKILL)
        for victim in victims:
            for child in self.lives[victim].ranks:
                child.kill()
            self.lives[victim].struck = True
        outcome = self._after(survivors, victims, at, quorum, KILL_BOUND_S)
        self._replace(victims)
        return outcome

    def stop(self, victim: int, phase: str = "in bucket 1", rank: int = 0, bound_s: float = STOP_BOUND_S) -> Outcome:
        """SIGSTOP at a phase, and SIGCONT when the others have gone on: it finds out, heals and is with them again."""
        life = self.lives[victim]
        survivors = [other for other in self.lives if other is not life]
        at, quorum = self._strike([life.ranks[rank]], phase, signal.SIGSTOP)
        try:
            outcome = self._after(survivors, [victim], at, quorum, bound_s)
        finally:
            os.kill(life.ranks[rank].pid, signal.SIGCONT)
        self.wait_together()
        return outcome

    def kill_while_healing(self, victim: int, whom: str) -> None:
        """`victim` is killed and comes back; during its heal the source dies (whom="source"), or it dies again."""
        self._prepare(victim)
        self._prepare(victim)
        sources = [life for life in self.lives if life.group != victim]
        for child in self.lives[victim].ranks:
            child.kill()
        spare = self._take_spare(victim)
        if whom == "target":
            struck = [spare.ranks[0]]
            spare.ranks[0].expected_to_live = False
        else:
            struck = [life.ranks[0] for life in sources]
            for life in sources:
                self._prepare(life.group)
        for child in struck:
            child.send(do="strike", phase="heals" if whom == "target" else "heals another", signal=signal.SIGKILL)
            child.expected_to_live = False
        self.lives[victim] = spare
        self._join(spare)
        self.job.wait(lambda: any(c.of("striking") for c in struck), HEAL_BOUND_S, f"the {whom} of a heal dies")
        dead = [c for c in struck if c.of("striking")]
        for life in list(self.lives):
            for child in life.ranks:
                if child in dead:
                    self.job.wait(lambda c=child: c.returncode is not None, 10, f"{child.name} is dead")
                    for sibling in life.ranks:
                        sibling.kill()
                    self._replace([life.group])
                elif child in struck:  # another source served; this one must not die in some later heal
                    child.expected_to_live = True
                    child.send(do="strike", phase="never", signal=signal.SIGKILL)
        self.wait_together()

    def kill_lighthouse(self) -> None:
        """The groups wait, and go on where they were with the next one at the same address."""
        self.lighthouse.kill()
        before = self._commits()
        time.sleep(0.5)
        self.lighthouse = self._start_lighthouse()
        self.job.wait(lambda: self._commits() >= before + 5, HEAL_BOUND_S, "the groups go on with the next lighthouse")
        self.wait_together()

    def stop_lighthouse(self, seconds: float) -> None:
        """It hears nobody meanwhile, and blames nobody for it."""
        quorum = max(e["quorum"] for e in self._steps(self.lives[0]))
        os.kill(self.lighthouse.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self.lighthouse.pid, signal.SIGCONT)
        before = self._commits()
        self.job.wait(lambda: self._commits() >= before + 5, HEAL_BOUND_S, "the groups go on after the stop")
        quorums = {e["quorum"] for life in self.lives for e in self._steps(life)[-2:]}
        assert quorums == {quorum}, f"a lighthouse that stood still took members for dead: {quorums}, before: {quorum}"

    # Waiting

    def wait_together(self) -> None:
        """Waits until all groups have committed a new step with all of them."""
        seen = {child: len(child.of("step")) for child in self._children()}

        def together(child: Child) -> bool:
            return any(e["committed"] and e["participants"] == self.groups for e in child.of("step")[seen[child] :])

        self.job.wait(lambda: all(together(c) for c in self._children()), HEAL_BOUND_S, "all groups train together")

    # The end

    def finish(self) -> None:
        """Ends the job, and checks all of its history."""
        last = max(e["step"] for life in self.lives for e in self._steps(life)) + 10
        for child in self._children():
            child.send(do="finish", step=last)
        self.job.wait_exit(self._children(), HEAL_BOUND_S)
        for life in self.spares:
            for child in life.ranks:
                child.kill()
        self.lighthouse.kill()
        self.check_history(last)
        self.check_nothing_left()

    def check_history(self, last: int) -> None:
        lives = [*self.past, *self.lives]
        commits = [(life, e) for life in lives for child in life.ranks for e in child.of("step") if e["committed"]]
        by_step: dict[int, list[Event]] = {}
        for _, e in commits:
            by_step.setdefault(e["step"], []).append(e)
        assert sorted(by_step) == list(range(last)), "every step is committed"

        # No step is committed twice: in one quorum only, and by each rank once.
        for step, events in by_step.items():
            quorums = {e["quorum"] for e in events}
            assert len(quorums) == 1, f"step {step} was committed in the quorums {quorums}"
            assert len({e["digest"] for e in events}) == 1, f"different weights after step {step}"
            assert len({e["participants"] for e in events}) == 1
        for life in lives:
            for child in life.ranks:
                steps = [e["step"] for e in child.of("step") if e["committed"]]
                assert steps == sorted(set(steps)), f"{child.name} went back in history: {steps}"

        # No commit goes back in history: a step that is committed already is not begun again.
        ended = sorted((e["at"], e["step"]) for _, e in commits)
        newest, i = -1, 0
        for _, e in sorted(commits, key=lambda pair: pair[1]["began"]):
            while i < len(ended) and ended[i][0] < e["began"]:
                newest, i = max(newest, ended[i][1]), i + 1
            assert e["step"] > newest, f"step {e['step']} was begun when {newest} was committed"

        # What one process computes from who took part.
        contributors: dict[tuple[int, int], set[int]] = {}
        for life in lives:
            for e in life.ranks[0].of("begin"):
                if e["contributes"]:
                    contributors.setdefault((e["quorum"], e["step"]), set()).add(life.group)
        weights, batches = [0.0] * BUCKETS, 0  # group 0 is the primary of the first quorum
        for step in range(last):
            e = by_step[step][0]
            groups = contributors[e["quorum"], step]
            if step > 0:  # in the first step groups that take over the first weights count in the divisor
                assert len(groups) == e["participants"], (step, groups, e)
            for bucket in range(BUCKETS):
                total = sum(gradient(step, group, bucket)[0].item() for group in groups)
                weights[bucket] -= RATE * total / e["participants"]
            batches += e["participants"]
            for found, expected in zip(e["weights"], weights, strict=True):
                assert abs(found - expected) < 1e-3 * (1 + abs(expected)), f"weights after step {step}: {e}, {weights}"
            for event in by_step[step]:
                assert event["batches"] == batches, (
                    f"batches_committed after step {step}: {event['batches']}, {batches}"
                )

    def check_nothing_left(self) -> None:
        for life in [*self.past, *self.lives, *self.spares]:
            for child in life.ranks:
                assert child.returncode is not None
                # A worker of an isolated group ends with its trainer, and is reaped by whoever inherits it.
                deadline = time.monotonic() + ENDS_S
                while alive := processes_of(child.pid):
                    assert time.monotonic() < deadline, f"processes of {child.name} are left: {alive}"
                    time.sleep(0.05)
        left = {name for name in set(os.listdir("/dev/shm")) - self.memory_before if name.startswith("torchft")}
        assert not left, f"shared memory is left: {left}"
        with socket.socket() as s:
            s.bind(("127.0.0.1", self.port))  # the lighthouse's
        for life in self.lives:
            for child in life.ranks:
                end = child.of("finished")[-1]
                assert end["descriptors"] < 200, f"{child.name} has {end['descriptors']} open descriptors"
                threads = end["threads"]
                assert len(threads) < 25 and threads.count("torchft_connect") == 0, (
                    f"threads of {child.name}: {threads}"
                )

    # Parts

    def _start_lighthouse(self) -> Child:
        argv: list[str | Path] = [
            sys.executable,
            HERE / "chaos_lighthouse.py",
            f"--bind=127.0.0.1:{self.port}",
            "--min_replicas=1",
            f"--heartbeat_timeout_ms={int(1000 * HEARTBEAT_TIMEOUT_S)}",
            "--state_dir=",
            *self.lighthouse_options,
        ]
        child = self.job.start("lighthouse", argv, path=ours_path())
        self.job.wait(lambda: _listens(self.port), START_TIMEOUT_S, "the lighthouse listens")
        return child

    def _spawn(self, group: int) -> Life:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        number = sum(life.group == group for life in [*self.past, *self.lives, *self.spares])
        ranks = [
            self.job.python(
                f"group{group}.{rank}-life{number}",
                HERE / "chaos_worker.py",
                f"--group={group}",
                f"--kind={self.kind}",
                path=ours_path(),
                env={
                    "RANK": str(rank),
                    "WORLD_SIZE": str(self.ranks),
                    "MASTER_ADDR": "localhost",
                    "MASTER_PORT": str(store.port),
                    "SHARED_STORE": str(self.shared.port),
                },
            )
            for rank in range(self.ranks)
        ]
        return Life(group, ranks, store)

    def _prepare(self, group: int) -> None:
        life = self._spawn(group)
        self.spares.append(life)
        self._wait_imported(life)

    def _take_spare(self, group: int) -> Life:
        spare = next(life for life in self.spares if life.group == group)
        self.spares.remove(spare)
        old = self.lives[group]
        self.past.append(old)
        return spare

    def _replace(self, groups: Sequence[int]) -> None:
        for group in groups:
            self.lives[group] = self._take_spare(group)
            self._join(self.lives[group])
        self.wait_together()

    def _wait_imported(self, life: Life) -> None:
        self.job.wait(lambda: all(c.of("imported") for c in life.ranks), START_TIMEOUT_S, "torch is imported")

    def _join(self, life: Life) -> None:
        self._wait_imported(life)
        for child in life.ranks:
            child.send(do="join", lighthouse=f"http://127.0.0.1:{self.port}")

    def _strike(self, victims: Sequence[Child], phase: str, number: int) -> tuple[float, int]:
        """Returns when the last one was struck, and in which quorum the job was."""
        before = {child: len(child.of("striking")) for child in victims}
        for child in victims:
            child.expected_to_live = number != signal.SIGKILL
            child.send(do="strike", phase=phase, signal=number)
        self.job.wait(
            lambda: all(len(c.of("striking")) > before[c] for c in victims), HEAL_BOUND_S, f"a strike {phase}"
        )
        quorum = max(e["quorum"] for life in self.lives for c in life.ranks for e in c.of("step"))
        return max(c.of("striking")[-1]["at"] for c in victims), quorum

    def _after(
        self, survivors: Sequence[Life], victims: Sequence[int], at: float, quorum: int, bound_s: float
    ) -> Outcome:
        def alone(child: Child) -> Event | None:
            for e in child.of("step"):
                if e["at"] > at and e["committed"] and not set(victims) & set(e["groups"]):
                    return e
            return None

        children = [child for life in survivors for child in life.ranks]
        self.job.wait(lambda: all(alone(c) for c in children), bound_s, f"the survivors go on without {victims}")
        ends = [alone(child) for child in children]
        seconds = max(e["at"] for e in ends if e) - at if ends else 0.0
        lost = [
            sum(not e["committed"] and e["at"] > at and e["at"] < end["at"] for e in child.of("step"))
            for child, end in zip(children, ends, strict=True)
            if end
        ]
        return Outcome(seconds, max(lost, default=0))

    def _children(self) -> list[Child]:
        return [child for life in self.lives for child in life.ranks]

    def _steps(self, life: Life) -> list[Event]:
        return life.ranks[0].of("step")

    def _commits(self) -> int:
        return sum(e["committed"] for child in self._children() for e in child.of("step"))


def _listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def random_fault(chaos: Chaos, rng: random.Random) -> str:
    """Does one fault, and says what it was and what it cost."""
    kind = rng.choices(
        ["kill", "stop", "two", "all but one", "source", "target", "lighthouse"], weights=[10, 4, 2, 2, 1, 1, 1]
    )[0]
    victims = rng.sample(range(chaos.groups), chaos.groups)
    phase, rank = rng.choice(PHASES), rng.randrange(chaos.ranks)
    if kind == "kill" or (kind == "two" and chaos.groups < 3):
        return f"kill -9 {phase}, rank {rank}: {chaos.kill(victims[0], phase=phase, rank=rank)}"
    if kind == "stop":
        return f"SIGSTOP {phase}: {chaos.stop(victims[0], phase=phase)}"
    if kind in ("two", "all but one"):
        count = 2 if kind == "two" else chaos.groups - 1
        return f"kill -9 of {count} {phase}: {chaos.kill(*victims[:count], phase=phase)}"
    if kind == "lighthouse":
        chaos.kill_lighthouse()
    else:
        chaos.kill_while_healing(victims[0], kind)
    return f"{kind} killed"


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill and stop the processes of a job, until a rule breaks.")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="of the choices; default: random")
    parser.add_argument("--faults", type=int, help="how many, and no longer than --minutes")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kind", choices=["gloo", "isolated", "native"], default="gloo")
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--only", choices=["kill", "stop"], help="only faults of this kind, of one group")
    args = parser.parse_args()
    again = f"chaos.py --seed={args.seed} --kind={args.kind} --groups={args.groups} --ranks={args.ranks}"
    print(f"to replay: {again}", flush=True)
    rng = random.Random(args.seed)
    began = time.monotonic()
    outcomes: list[Outcome] = []
    with Job() as job:
        chaos = Chaos(job, kind=args.kind, groups=args.groups, ranks=args.ranks)
        try:
            chaos.start()
            for number in range(args.faults or sys.maxsize):
                if time.monotonic() - began > 60 * args.minutes:
                    break
                if args.only:
                    do: Any = chaos.kill if args.only == "kill" else chaos.stop
                    outcomes.append(do(rng.randrange(args.groups), phase=rng.choice(PHASES)))
                    said = str(outcomes[-1])
                else:
                    said = random_fault(chaos, rng)
                print(f"[{time.monotonic() - began:7.1f} s] {number + 1}: {said}", flush=True)
            chaos.finish()
        except BaseException:
            print(f"broken; to replay: {again}\n{job.report()}", file=sys.stderr, flush=True)
            raise
    if outcomes:
        seconds = sorted(o.seconds for o in outcomes)
        print(
            f"{len(seconds)} faults: median {seconds[len(seconds) // 2]:.3f} s, largest {seconds[-1]:.3f} s; "
            f"steps lost: at most {max(o.lost for o in outcomes)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
