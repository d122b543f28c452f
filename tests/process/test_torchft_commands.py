"""`torchft status --watch`, `drain` and `kill` on the command line, with training groups."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from processes import HERE, START_TIMEOUT_S, Child, Job, ours_path

MEMBER = HERE / "member.py"


class Groups:
    def __init__(self, job: Job) -> None:
        self.job = job
        _, self.lighthouse = job.lighthouse(
            ours_path(), min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=2000
        )
        self.members = [self._member(number) for number in range(3)]
        for member in self.members:
            # The group has connected with the others.
            job.wait(
                lambda: [e for e in member.of("step") if e["members"] == 3],  # noqa: B023 (called at once)
                START_TIMEOUT_S,
                "three groups train",
            )

    def _member(self, number: int) -> Child:
        env = {"REPLICA_GROUP_ID": str(number), "TORCHFT_LIGHTHOUSE": self.lighthouse}
        return self.job.python(f"member-{number}", MEMBER, path=ours_path(), env=env)

    def torchft(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "torchft.cli", words[0], "--lighthouse", self.lighthouse, *words[1:]]

    def run(self, *words: str) -> str:
        done = subprocess.run(
            self.torchft(*words), capture_output=True, text=True, timeout=120, env=environment()
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ours_path()), "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def groups() -> Iterator[Groups]:
    with Job() as job:
        yield Groups(job)


def test_watch_drain_and_kill(groups: Groups) -> None:
    """The beginning of a replica id is enough."""
    drained, killed, left = groups.members
    command = groups.torchft("status", "--watch", "100ms")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as watching:
        assert watching.stdout is not None
        # Reading ends with the expected text or at the deadline.
        deadline = threading.Timer(200, watching.kill)
        deadline.start()
        try:
            shown = watching.stdout
            assert next(line for line in shown if "3 groups, step" in line)
            assert [next(shown) for _ in range(5)][-1].split()[1] == "training"

            drained.expected_to_live = False
            assert "has left" in groups.run("drain", "member_0", "--wait", "1m")
            groups.job.wait_exit([drained], 60)
            assert next(line for line in shown if "2 groups, step" in line)

            killed.expected_to_live = False
            assert "asked to end" in groups.run("kill", "member_1")
            groups.job.wait(lambda: killed.returncode is not None, 60, "it ends")
            assert killed.returncode == 1
            assert next(line for line in shown if "1 group, step" in line)
        finally:
            deadline.cancel()
            watching.kill()

    events = groups.run("events")
    assert "drained   member_0" in events and "is to leave at the end of a step" in events, events
    assert "killed    member_1" in events, events
    steps = len(left.of("step"))
    groups.job.wait(lambda: len(left.of("step")) > steps + 5, 60, "the last one continues")
