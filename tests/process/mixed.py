"""A job of two groups that run different torchft packages; `test_mixed_jobs.py` chooses them.

Both start together (init_sync), train together, and each is killed once with SIGKILL and heals from the
other.
"""

from __future__ import annotations

import urllib.request
from collections import Counter
from pathlib import Path

from causes import SILENCE_MS, check_killed, failures
from processes import HERE, START_TIMEOUT_S, Child, Event, Job, free_port, ours_path

PHASE_TIMEOUT_S = 60
STEPS_A_PHASE = 5
UPSTREAM_SILENCE_MS = 1000


class Group:
    """One replica group: the process that trains now, and those that were killed before."""

    def __init__(self, job: Job, number: int, path: Path, options: tuple[str, ...]) -> None:
        self.job, self.number, self.path, self.options = job, number, path, options
        # The process that takes over after the kill is started in advance and has imported torch, which
        # simulates a fast restart.
        self.child, self._spare = self._start(0), self._start(1)

    def _start(self, life: int) -> Child:
        env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        args = [f"--group={self.number}", f"--seed={10 * self.number + life}", *self.options]
        return self.job.python(f"group{self.number}", HERE / "worker.py", *args, path=self.path, env=env)

    def kill_and_replace(self) -> None:
        self.child.kill()
        self.child = self._spare

    def join(self, lighthouse: str) -> None:
        self.child.send(do="join", lighthouse=lighthouse)
        self.job.wait(lambda: self.child.of("ready"), PHASE_TIMEOUT_S, f"group {self.number} has its Manager")
        assert self.child.of("ready")[0]["torchft"] == str(self.path / "torchft")

    def committed(self, participants: int, after: int = 0) -> list[Event]:
        return [
            e
            for e in self.child.of("step")
            if e["committed"] and e["participants"] == participants and e["step"] > after
        ]

    def last_step(self) -> int:
        return max([e["step"] for e in self.child.of("step")], default=0)


def run_mixed_job(
    job: Job, paths: tuple[Path, Path], lighthouse_path: Path, options: tuple[str, ...] = ()
) -> None:
    """Run the whole job with group i from paths[i]; raises AssertionError or JobFailed.

    Args:
        options: options of worker.py, for both groups
    """
    groups = [Group(job, number, path, options) for number, path in enumerate(paths)]
    # Upstream groups keep no connection to the lighthouse, and an upstream lighthouse detects failures by
    # silence only.
    ours_only = {lighthouse_path, *paths} == {ours_path()}
    heartbeat_ms = SILENCE_MS if ours_only else UPSTREAM_SILENCE_MS
    _, lighthouse = job.lighthouse(
        lighthouse_path, min_replicas=1, join_timeout_ms=30_000, heartbeat_timeout_ms=heartbeat_ms
    )
    job.wait(lambda: all(c.events for c in job.children), START_TIMEOUT_S, "all have imported torchft")

    # The lighthouse knows both groups before either requests a quorum, so that the first quorum has both:
    # init_sync.
    for group in groups:
        group.join(lighthouse)
    job.wait(
        lambda: all(f"worker_{i}:" in status(lighthouse) for i in range(2)), PHASE_TIMEOUT_S, "it knows both"
    )
    for group in groups:
        group.child.send(do="train")
    # The weights differ before any heal and training, so equal weights later are due to torchft.
    assert groups[0].child.of("ready")[0]["digest"] != groups[1].child.of("ready")[0]["digest"]
    wait_in_step(job, groups, after=0)
    first = [group.child.of("step")[0] for group in groups]
    assert [e["step"] for e in first] == [1, 1], first
    assert_equal_weights(groups)

    for victim, survivor in (groups, groups[::-1]):
        by_connection = victim.path == lighthouse_path == ours_path()
        before = failures(lighthouse) if by_connection else Counter()
        kill_and_heal(job, lighthouse, victim, survivor)
        if by_connection:
            check_killed(before, failures(lighthouse), 1, heartbeat_ms)
        assert_equal_weights(groups)

    last = max(group.last_step() for group in groups) + 10
    for group in groups:
        group.child.send(do="finish", step=last)
    job.wait_exit([group.child for group in groups], PHASE_TIMEOUT_S)
    assert_equal_weights(groups)
    finals = [next(e for e in group.child.of("step") if e["step"] == last) for group in groups]
    assert finals[0]["digest"] == finals[1]["digest"]
    assert finals[0]["batches"] == finals[1]["batches"]


def status(lighthouse: str) -> str:
    """Returns the status page of any lighthouse, which names the members that it knows."""
    with urllib.request.urlopen(
        f"http://localhost:{lighthouse.rsplit(':', 1)[1]}/status", timeout=20
    ) as response:
        return response.read().decode()


def kill_and_heal(job: Job, lighthouse: str, victim: Group, survivor: Group) -> None:
    """Kills one group with SIGKILL. The other one continues alone, and is the source of the heal."""
    victim.kill_and_replace()
    killed_at = survivor.last_step()
    job.wait(
        lambda: len(survivor.committed(participants=1, after=killed_at)) >= STEPS_A_PHASE,
        PHASE_TIMEOUT_S,
        f"group {survivor.number} continues alone",
    )
    alone_until = survivor.last_step()
    victim.join(lighthouse)
    victim.child.send(do="train")
    wait_in_step(job, [victim, survivor], after=alone_until)
    assert victim.child.of("loaded"), "the restarted group trained without being healed"
    assert victim.committed(participants=2)[0]["step"] > alone_until


def wait_in_step(job: Job, groups: list[Group], after: int) -> None:
    """Wait until every group has committed some steps in which both participated."""
    job.wait(
        lambda: all(len(group.committed(participants=2, after=after)) >= STEPS_A_PHASE for group in groups),
        PHASE_TIMEOUT_S,
        "both groups train together",
    )


def assert_equal_weights(groups: list[Group]) -> None:
    """Checks that both groups had the same weights after every step that both committed."""
    digests = [{e["step"]: e["digest"] for e in group.committed(participants=2)} for group in groups]
    common = sorted(digests[0].keys() & digests[1].keys())
    assert common
    differing = [step for step in common if digests[0][step] != digests[1][step]]
    assert not differing, f"weights differ after steps {differing}"
