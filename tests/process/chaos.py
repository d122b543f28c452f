"""A job whose processes are killed and stopped, one fault after another, and the checks of its invariants.

The faults and `make chaos` are in chaos_faults.py.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from causes import SILENCE_MS, check_killed, check_silenced, failures
from chaos_history import Life, check_ended, check_history, check_nothing_left
from chaos_worker import BUCKETS, SNAPSHOTS
from flapping import Flapping
from hosts import Hosts
from processes import HERE, START_TIMEOUT_S, Child, Event, Job, free_port, ours_path
from torch.distributed import TCPStore

from tests.promises import KILL_S, within
from torchft._lighthouse_http import HttpLighthouse
from torchft._manager.settings import BAD_NODE_STATUS, STOPPED_STATUS
from torchft.launch import exec as launch
from torchft.launch import process_tree

# PyTorch's TCPStore asks the name server for the name of every peer. In a new quorum a lost answer would cost
# 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

PHASES = [
    "before the quorum",
    "in the quorum",
    *(f"in bucket {bucket}" for bucket in range(BUCKETS)),
    "before the vote",
    "after the vote",
]
# Heartbeat timeout of jobs in which processes are stopped or cut off.
HEARTBEAT_TIMEOUT_MS = 3000
KILL_BOUND_S = within(KILL_S)
STOP_BOUND_S = HEARTBEAT_TIMEOUT_MS / 1000 + KILL_BOUND_S
# Timeout of waits that include the start of processes, for which nothing is promised.
HEAL_BOUND_S = 90.0


@dataclass(frozen=True)
class Outcome:
    """The effect of a fault on the survivors."""

    seconds: float  # from the fault to the last survivor's next commit without the victims
    lost: int  # number of steps, of the survivor that lost most; without survivors those made again
    phases: dict[str, float] = field(default_factory=dict)  # report of a survivor that noticed an error


@dataclass
class Chaos:
    """A job of `groups` groups of `ranks` ranks. Close it with `finish`, which checks its invariants.

    With `torchrun`, each group has one rank, which torchrun's agent starts and restarts, with `forked` by
    `torchft exec`. `kills_only` is for
    jobs in which no process is stopped or cut off, so that no failure may be detected by silence.
    """

    job: Job
    kind: str = "gloo"
    groups: int = 2
    ranks: int = 1
    torchrun: bool = False
    forked: bool = False
    kills_only: bool = False
    lighthouse_options: Sequence[str] = ()
    through: Flapping | None = None  # a proxy between the groups and the lighthouse
    options: Sequence[str] = ()  # options of each worker
    hosts: Hosts | None = None  # one for each group or for each rank; the lighthouse runs on this machine
    lives: list[Life] = field(default_factory=list)
    past: list[Life] = field(default_factory=list)
    spares: list[Life] = field(default_factory=list)
    era: int = 0  # how often all groups have ended at once

    @property
    def heartbeat_timeout_ms(self) -> int:
        return SILENCE_MS if self.kills_only else HEARTBEAT_TIMEOUT_MS

    def start(self) -> None:
        self.port = free_port()
        if self.through is not None:
            self.through.port = self.port
        self.shared = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.memory_before = set(os.listdir("/dev/shm"))
        self.lighthouse = self._start_lighthouse()
        self.lives = [self._spawn(group) for group in range(self.groups)]
        for life in self.lives:
            self._join(life)
        self.wait_together()

    # Faults

    def kill(self, *victims: int, phase: str = "in bucket 1", rank: int = 0) -> Outcome:
        """Sends SIGKILL to a rank of each victim at a phase, and ends the other ranks of the group, as
        torchrun would. Then all are restarted.
        """
        for victim in victims:
            self._prepare(victim)  # started in advance, so that the start is not measured
        before = self._failures()
        at = self._strike([self.lives[v].ranks[rank] for v in victims], phase, signal.SIGKILL)
        for victim in victims:
            for child in self.lives[victim].ranks:
                child.kill()
        outcome = self._after(self._others(*victims), victims, at, KILL_BOUND_S)
        self._check_killed(before, len(victims))
        self._replace(victims)
        return outcome

    def kill_all(self, phase: str = "in bucket 1", lighthouse: bool = False) -> Outcome:
        """Sends SIGKILL to all trainers and agents at once, and to the lighthouse if wanted, when a rank of
        the first group is at a phase. Then all are restarted, and go on from the copies in memory.
        """
        self._prepare_all()
        before, children = self._failures(), self._children()
        at = self._strike([self.lives[0].ranks[0]], phase, signal.SIGKILL)
        victims = [*children, *([self.lighthouse] if lighthouse else [])]
        for child in victims:
            child.send_signal(signal.SIGKILL)
            if self.torchrun and child is not self.lighthouse:
                os.kill(child.of("imported")[-1]["pid"], signal.SIGKILL)
        for child in victims:
            child.kill()
        for child in children:
            check_ended(child)
        if lighthouse:
            self.lighthouse = self._start_lighthouse()
        else:
            self._wait_killed(before, self.groups)
        return self._begin_anew(at)

    def poison(self) -> Outcome:
        """Lets all groups end by the same exception in one step. The job stops: all but the first group end
        with the status for that. Then all are restarted, as after kill_all.
        """
        self._prepare_all()
        children, step = self._children(), self._reached() + 50
        for child in children:
            child.expected_to_live = False
            child.send(do="strike", phase="before the vote", signal=signal.SIGRTMIN, step=step)
        self.job.wait(
            lambda: all(child.returncode is not None for child in children), HEAL_BOUND_S, "the job stops"
        )
        at = time.monotonic()
        ended = Counter(child.returncode for child in children)
        assert ended.keys() <= {1, STOPPED_STATUS} and ended[1] <= self.ranks, ended
        assert "an exception of the script" in self._status()["stopped"]
        self.lighthouse.kill()
        self.lighthouse = self._start_lighthouse()
        return self._begin_anew(at)

    def _prepare_all(self) -> None:
        for group in range(self.groups):
            self._prepare(group)
        # An earlier fault may have spoilt the last copy.
        reached = self._reached() + 2 * SNAPSHOTS
        self.job.wait(lambda: self._reached() > reached, HEAL_BOUND_S, "copies are made")

    def _begin_anew(self, at: float) -> Outcome:
        reached = self._reached()
        self.era += 1
        self._replace(range(self.groups))
        first = [next(e for e in c.of("step") if e["committed"]) for c in self._children()]
        again = reached + 1 - min(e["step"] for e in first)
        return Outcome(max(e["at"] for e in first) - at, max(again, 0))

    def kill_worker(self, victim: int, phase: str = "in bucket 1") -> Outcome:
        """Sends SIGKILL to the rank of a group at a phase. torchrun's agent restarts it."""
        agent = self.lives[victim].ranks[0]
        lives = len(agent.of("imported"))
        before = self._failures()
        at = self._strike([agent], phase, signal.SIGKILL)
        outcome = self._after(self._others(victim), [victim], at, KILL_BOUND_S)
        self._check_killed(before, 1)
        self.job.wait(
            lambda: len(agent.of("imported")) > lives, START_TIMEOUT_S, "the agent starts the worker again"
        )
        self._join(self.lives[victim])
        self.wait_together()
        return outcome

    def kill_agent(self, victim: int) -> Outcome:
        """Sends SIGKILL to torchrun's agent only. Its worker ends with it, and then the group is
        restarted.
        """
        self._prepare(victim)
        agent = self.lives[victim].ranks[0]
        before = self._failures()
        at = time.monotonic()
        agent.expected_to_live = False
        os.kill(agent.pid, signal.SIGKILL)
        outcome = self._after(self._others(victim), [victim], at, KILL_BOUND_S)
        self._check_killed(before, 1)
        check_ended(agent)
        self._replace([victim])
        return outcome

    def stop(
        self, *victims: int, phase: str = "in bucket 1", rank: int = 0, bound_s: float = STOP_BOUND_S
    ) -> Outcome:
        """Sends SIGSTOP at a phase, and SIGCONT when the others have continued. The victims notice that, and
        heal.
        """
        children = [self.lives[victim].ranks[rank] for victim in victims]
        self._expect_ends(victims if rank else ())
        before = self._failures()
        at = self._strike(children, phase, signal.SIGSTOP)
        try:
            outcome = self._after(self._others(*victims), victims, at, bound_s)
            check_silenced(before, self._failures(), len(victims))
        finally:
            for child in children:
                os.kill(child.pid, signal.SIGCONT)
        self._end(victims if rank else ())
        self.wait_together()
        return outcome

    def _expect_ends(self, victims: Sequence[int]) -> None:
        """Prepares for the end of groups: a group ends if another rank than its first is silent for 5 s."""
        for victim in victims:
            self._prepare(victim)
            for child in self.lives[victim].ranks:
                child.expected_to_live = False

    def _end(self, victims: Sequence[int]) -> None:
        for victim in victims:
            for child in self.lives[victim].ranks:
                child.kill()
        if victims:
            self._replace(victims)

    def raises(self, victim: int, phase: str = "before the vote") -> Outcome:
        """Lets a rank end by an exception at a phase, and replaces its group. One exception stops no job."""
        self._prepare(victim)
        before, ranks = self._failures(), self.lives[victim].ranks
        at = self._strike([ranks[0]], phase, signal.SIGRTMIN)
        outcome = self._after(self._others(victim), [victim], at, KILL_BOUND_S)
        assert "ValueError: an exception of the script" in ranks[0].log_tail(1000)
        self.job.wait(lambda: ranks[0].returncode is not None, KILL_BOUND_S, "the rank ends")
        assert ranks[0].returncode == 1
        for child in ranks[1:]:
            child.kill()
        self._check_killed(before, 1)
        self._replace([victim])
        return outcome

    def hang(self, victim: int, phase: str = "before the vote", rank: int = 1) -> Outcome:
        """Lets the training thread of a rank hang at a phase, and replaces its group when the others have
        continued. All of its ranks write their stacks. Only with limits for stalled groups (EJECT).
        """
        self._prepare(victim)
        before, ranks = self._failures(), self.lives[victim].ranks
        at = self._strike([ranks[rank]], phase, signal.SIGUSR2)
        outcome = self._after(self._others(victim), [victim], at, STOP_BOUND_S + 3.0)
        stalled = self._failures()["stalled"] - before["stalled"]
        assert stalled == 1, f"{stalled} groups were evicted, and one hangs"
        for child in ranks:
            self._wait_for_log(child, "this group is stalled")
        self._wait_for_log(ranks[rank], "in hang_here")
        for child in ranks:
            child.kill()
        self._replace([victim])
        return outcome

    def slow(self, victim: int) -> Outcome:
        """Lets a group work longer in each step, until the lighthouse names it. It is named no more when it
        is as fast as the others, and no group fails.
        """
        before, at = self._failures(), time.monotonic()
        self._work(victim, 6.0)
        self.job.wait(lambda: self._is_slow(victim), HEAL_BOUND_S, f"group {victim} is named")
        named = time.monotonic() - at
        self._work(victim, 1.0)
        self.job.wait(lambda: not self._is_slow(victim), HEAL_BOUND_S, f"group {victim} is as fast again")
        assert self._failures() == before
        return Outcome(named, 0)

    def _work(self, group: int, slower: float) -> None:
        for child in self.lives[group].ranks:
            child.send(do="work", slower=slower)

    def _is_slow(self, group: int) -> bool:
        return "straggler" in self._member(group)

    def scale(self, victim: int) -> Outcome:
        """Takes a group away and adds it again, as a scaler does. It leaves between two steps."""
        self._prepare(victim)
        before, ranks = self._failures(), self.lives[victim].ranks
        for child in ranks:
            child.expected_to_live = False
        at = time.monotonic()
        self._http().ask("drain", replica_id=self._member(victim)["replica_id"])
        outcome = self._after(self._others(victim), [victim], at, STOP_BOUND_S)
        self.job.wait_exit(ranks, HEAL_BOUND_S)
        assert self._failures() == before
        self._replace([victim])
        return outcome

    def crash_check(self) -> Outcome:
        """Sends SIGKILL to the process that checks a host, as if a driver had crashed it. The host is bad
        then, which the lighthouse shows.
        """
        argv = [sys.executable, "-m", "torchft.cli", "doctor", "--node", "--nodes", "1"]
        command = [*argv, "--lighthouse", self._http().addresses[0]]
        node = f"checked-{time.monotonic_ns()}"
        at, env = time.monotonic(), {"TORCHFT_NODE_NAME": node, "TORCHFT_JOB_ID": "default"}
        doctor = self.job.start(node, command, path=ours_path(), env=env)
        doctor.expected_to_live = False
        self.job.wait(lambda: len(process_tree.tree(doctor.pid)) > 1, HEAL_BOUND_S, "the check runs")
        for pid in process_tree.tree(doctor.pid)[1:]:
            os.kill(pid, signal.SIGKILL)
        self.job.wait(lambda: doctor.returncode is not None, HEAL_BOUND_S, "the check ends")
        assert doctor.returncode == BAD_NODE_STATUS
        assert any(f"node {node} should not train" in event["reason"] for event in self._status()["notices"])
        return Outcome(time.monotonic() - at, 0)

    def _http(self) -> HttpLighthouse:
        return HttpLighthouse(f"http://{self._address()}:{self.port}", "default")

    def _status(self) -> dict[str, Any]:
        return self._http().get("/status")

    def _member(self, group: int) -> dict[str, Any]:
        """The lighthouse's status of the live group with this number."""
        (found,) = (
            member
            for member in self._status()["members"]
            if member["healthy"] and member["replica_id"].startswith(f"chaos_{group}:")
        )
        return found

    def _wait_for_log(self, child: Child, text: str) -> None:
        self.job.wait(lambda: text in child.log_tail(1000), KILL_BOUND_S, f"{child.name} logs {text!r}")

    def cut(self, victim: int, rank: int = 0, bound_s: float = STOP_BOUND_S) -> Outcome:
        """Cuts the network of a rank's host without closing connections, and restores it when the other
        groups have continued.
        """
        assert self.hosts is not None
        host = self._host(victim, rank)
        self._expect_ends([victim] if rank else ())
        before = self._failures()
        at = time.monotonic()
        self.hosts.cut(host)
        try:
            outcome = self._after(self._others(victim), [victim], at, bound_s)
            check_silenced(before, self._failures(), 1)
        finally:
            self.hosts.heal(host)
        self._end([victim] if rank else ())
        self.wait_together()
        return outcome

    def strike_while_healing(self, victim: int, role: str, number: int = signal.SIGKILL) -> Outcome:
        """Kills and restarts `victim`. During its heal, strikes its source (`role="source"`) or the target
        itself ("target").

        Another source must remain, so this fault needs more than two groups.
        """
        self._prepare(victim)
        self._prepare(victim)
        others = self._others(victim)
        failed = self._failures()
        for child in self.lives[victim].ranks:
            child.kill()
        back = self._take_spare(victim)
        self.lives[victim] = back
        # The first group that is up to date serves the first healing group.
        life = back if role == "target" else others[0]
        if role == "source":
            self._prepare(life.group)
        child = life.ranks[0]
        before, armed = len(child.of("striking")), len(child.of("armed"))
        child.expected_to_live = number != signal.SIGKILL
        child.send(do="strike", phase="heals" if role == "target" else "heals another", signal=number)
        if role == "source":  # it reads commands between two steps, and the heal takes one step
            self.job.wait(
                lambda: len(child.of("armed")) > armed, HEAL_BOUND_S, "the source reads the command"
            )
        self._join(back)
        self.job.wait(
            lambda: len(child.of("striking")) > before, HEAL_BOUND_S, f"a strike at the {role} of a heal"
        )
        at = child.of("striking")[-1]["at"]
        if number == signal.SIGKILL:
            for sibling in life.ranks:
                sibling.kill()
        bound_s = KILL_BOUND_S if number == signal.SIGKILL else STOP_BOUND_S
        try:
            outcome = self._after([other for other in others if other is not life], [life.group], at, bound_s)
            if number == signal.SIGKILL:
                self._check_killed(failed, 2)
            else:
                check_silenced(failed, self._failures(), 1)
        finally:
            if number != signal.SIGKILL:
                os.kill(child.pid, signal.SIGCONT)
        if number == signal.SIGKILL:
            self._replace([life.group])
        self.wait_together()
        return outcome

    def kill_lighthouse(self) -> Outcome:
        """Kills the lighthouse. The groups wait, and continue with the next one at the same address."""
        at = time.monotonic()
        self.lighthouse.kill()
        time.sleep(0.5)
        self.lighthouse = self._start_lighthouse()
        outcome = self._after(self.lives, [], at, HEAL_BOUND_S)
        self.wait_together()
        return outcome

    def stop_lighthouse(self, seconds: float) -> Outcome:
        """Stops the lighthouse. It receives nothing in that time, and must not count that as failures of
        members.
        """
        quorum = max(e["quorum"] for e in self._steps(self.lives[0]))
        at = time.monotonic()
        os.kill(self.lighthouse.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self.lighthouse.pid, signal.SIGCONT)
        before = self._commits()
        self.job.wait(
            lambda: self._commits() >= before + 5, HEAL_BOUND_S, "the groups continue after the stop"
        )
        quorums = {e["quorum"] for life in self.lives for e in self._steps(life)[-2:]}
        assert quorums == {quorum}, (
            f"a stopped lighthouse counted members as failed: {quorums}, before: {quorum}"
        )
        return self._after(self.lives, [], at, HEAL_BOUND_S)

    def flap(self, cuts: int) -> None:
        """Interrupts the network of the lighthouse repeatedly, once per second. No member may be evicted for
        that.
        """
        assert self.through is not None
        (quorum,) = {e["quorum"] for life in self.lives for e in self._steps(life)[-1:]}
        seen = {child: len(child.of("step")) for child in self._children()}
        self.through.flap(cuts)
        self.wait_together()
        events = [e for child in self._children() for e in child.of("step")[seen[child] :]]
        assert {e["quorum"] for e in events} == {quorum}, f"somebody was evicted\n{self.job.report()}"
        assert all(e["committed"] and e["participants"] == self.groups for e in events)

    # Waiting

    def wait_together(self) -> None:
        """Waits until all groups have committed a new step with all of them."""
        seen = {child: len(child.of("step")) for child in self._children()}

        def together(child: Child) -> bool:
            return any(
                e["committed"] and e["participants"] == self.groups for e in child.of("step")[seen[child] :]
            )

        self.job.wait(
            lambda: all(together(c) for c in self._children()), HEAL_BOUND_S, "all groups train together"
        )

    # The end

    def finish(self) -> None:
        """Ends the job, and checks all of its history."""
        last = max(e["step"] for life in self.lives for e in self._steps(life)) + 10
        for child in self._children():
            child.send(do="finish", step=last)
        self.job.wait_exit(self._children(), 2 * HEAL_BOUND_S)
        for life in self.spares:
            for child in life.ranks:
                child.kill()
        self.lighthouse.kill()
        memory = Path(os.environ["TORCHFT_SNAPSHOT_MEMORY"])
        left = [path.name for path in memory.iterdir() if path.is_dir()]
        assert not left, f"a job that has ended leaves copies: {left}"
        check_history([*self.past, *self.lives], last)
        check_nothing_left(
            [*self.past, *self.lives, *self.spares], self.memory_before, (self._address(), self.port)
        )

    # Parts

    def _host(self, group: int, rank: int) -> int:
        """The number of a rank's host: rank 0 of each group has one, and the other ranks have the next."""
        assert self.hosts is not None
        return (group + self.groups * rank) % self.hosts.count

    def _address(self) -> str:
        """The address of the lighthouse and the stores, as the groups see it."""
        return self.hosts.address if self.hosts else "127.0.0.1"

    def _failures(self) -> Counter[str]:
        return failures(f"{self._address()}:{self.port}")

    def _check_killed(self, before: Counter[str], members: int) -> None:
        check_killed(before, self._failures(), members, self.heartbeat_timeout_ms)

    def _wait_killed(self, before: Counter[str], members: int) -> None:
        """Waits until the lighthouse has found members that nobody survived."""
        self.job.wait(
            lambda: (self._failures() - before).total() >= members, KILL_BOUND_S, "the lighthouse finds them"
        )
        self._check_killed(before, members)

    def _start_lighthouse(self) -> Child:
        argv: list[str | Path] = [
            sys.executable,
            HERE / "chaos_lighthouse.py",
            f"--bind={self._address()}:{self.port}",
            "--min_replicas=1",
            f"--heartbeat_timeout_ms={self.heartbeat_timeout_ms}",
            "--state_dir=",
            *self.lighthouse_options,
        ]
        child = self.job.start("lighthouse", argv, path=ours_path())
        self.job.wait(lambda: _listens(self._address(), self.port), START_TIMEOUT_S, "the lighthouse listens")
        return child

    def _spawn(self, group: int) -> Life:
        number = sum(life.group == group for life in [*self.past, *self.lives, *self.spares])
        worker = [HERE / "chaos_worker.py", f"--group={group}", f"--kind={self.kind}", *self.options]
        if self.hosts is not None:
            worker.append("--snapshots=0")  # its keeper would stay in the namespace of a host
        if self.torchrun:
            agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
            by_fork = ["--no-python", sys.executable, "-I", "-S", launch.__file__] if self.forked else []
            command = [*agent, "--max_restarts=1000", *by_fork, *worker]
            env = {"SHARED_STORE": str(self.shared.port), "TORCHFT_JOB_ID": "default"}
            return Life(
                group, [self.job.start(f"group{group}-life{number}", command, path=ours_path(), env=env)]
            )
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        env = {
            "WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": self._address(),
            "MASTER_PORT": str(store.port),
            "SHARED_STORE": str(self.shared.port),
            "TORCHFT_JOB_ID": "default",
            # Otherwise Gloo would use the address of the host's name, which these hosts share.
            **({"GLOO_SOCKET_IFNAME": "eth0"} if self.hosts else {}),
        }
        names = [f"group{group}.{rank}-life{number}" for rank in range(self.ranks)]
        return Life(
            group,
            [self._start(group, i, n, worker, {**env, "RANK": str(i)}) for i, n in enumerate(names)],
            store,
        )

    def _start(
        self, group: int, rank: int, name: str, worker: Sequence[str | Path], env: dict[str, str]
    ) -> Child:
        if self.hosts is None:
            script, *args = worker
            return self.job.python(name, Path(script), *args, path=ours_path(), env=env)
        command = [*self.hosts.command(self._host(group, rank)), sys.executable, *worker]
        return self.job.start(name, command, path=ours_path(), env=env)

    def _prepare(self, group: int) -> None:
        life = self._spawn(group)
        self.spares.append(life)
        self._wait_imported(life)

    def _take_spare(self, group: int) -> Life:
        spare = next(life for life in self.spares if life.group == group)
        self.spares.remove(spare)
        spare.era = self.era
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
        address = self.through.address if self.through else f"{self._address()}:{self.port}"
        for child in life.ranks:
            child.send(do="join", lighthouse=f"http://{address}")

    def _strike(self, victims: Sequence[Child], phase: str, number: int) -> float:
        """Returns when the last rank was struck."""
        before = {child: len(child.of("striking")) for child in victims}
        for child in victims:
            # Torchrun's agent itself is no victim.
            child.expected_to_live = number not in (signal.SIGKILL, signal.SIGRTMIN) or self.torchrun
            child.send(do="strike", phase=phase, signal=number)
        self.job.wait(
            lambda: all(len(c.of("striking")) > before[c] for c in victims), HEAL_BOUND_S, f"a strike {phase}"
        )
        return max(c.of("striking")[-1]["at"] for c in victims)

    def _after(self, survivors: Sequence[Life], victims: Sequence[int], at: float, bound_s: float) -> Outcome:
        def alone(child: Child) -> Event | None:
            for e in child.of("step"):
                # without victims, a step that began before the fault proves nothing
                since = e["at"] if victims else e["began"]
                if since > at and e["committed"] and not set(victims) & set(e["groups"]):
                    return e
            return None

        children = [child for life in survivors for child in life.ranks]
        self.job.wait(
            lambda: all(alone(c) for c in children), bound_s, f"the survivors continue without {victims}"
        )
        ends = [alone(child) for child in children]
        seconds = max(e["at"] for e in ends if e) - at if ends else 0.0
        lost = [
            sum(not e["committed"] and e["at"] > at and e["at"] < end["at"] for e in child.of("step"))
            for child, end in zip(children, ends, strict=True)
            if end
        ]
        notices = [e for child in children for e in child.of("failure") if e["received"] > at]
        phases = (
            {
                name.removesuffix("_seconds"): round(s, 3)
                for name, s in notices[-1].items()
                if name.endswith("_seconds")
            }
            if notices
            else {}
        )
        return Outcome(seconds, max(lost, default=0), phases)

    def _others(self, *victims: int) -> list[Life]:
        return [life for life in self.lives if life.group not in victims]

    def _children(self) -> list[Child]:
        return [child for life in self.lives for child in life.ranks]

    def _steps(self, life: Life) -> list[Event]:
        return life.ranks[0].of("step")

    def _reached(self) -> int:
        """The newest step that a group has told of."""
        return max(e["step"] for life in self.lives for e in self._steps(life) if e["committed"])

    def _commits(self) -> int:
        return sum(e["committed"] for child in self._children() for e in child.of("step"))


def _listens(host: str, port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex((host, port)) == 0
