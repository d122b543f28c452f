"""A lighthouse is killed with SIGKILL under a running job, and the job goes on: with it, or with another one."""

from __future__ import annotations

import json
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import Child, Job, free_port, ours_path

HERE = Path(__file__).resolve().parent
MAIN = "from torchft._torchft import lighthouse_main; lighthouse_main()"


class Cluster:
    """Two groups, and lighthouses that can be killed."""

    def __init__(self, job: Job, folder: Path, lighthouses: int) -> None:
        self.job, self.folder = job, folder
        self.ports = [free_port() for _ in range(lighthouses)]
        self.lighthouses = [self.start_lighthouse(i) for i in range(lighthouses)]
        addresses = ",".join(f"http://127.0.0.1:{port}" for port in self.ports)
        self.members = [
            job.python(
                f"member-{i}",
                HERE / "lighthouse_member.py",
                path=ours_path(),
                env={"TORCHFT_LIGHTHOUSE": addresses, "REPLICA_GROUP_ID": str(i)},
            )
            for i in range(2)
        ]

    def start_lighthouse(self, i: int) -> Child:
        options = f"--min_replicas 1 --bind 127.0.0.1:{self.ports[i]} --state_dir {self.folder / str(i)}".split()
        child = self.job.start(f"lighthouse-{i}", [sys.executable, "-c", MAIN, *options], path=ours_path())
        self.wait(lambda: self.answers(i), f"lighthouse {i} listens", 60)
        return child

    def answers(self, i: int) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.ports[i]), timeout=1).close()
        except OSError:
            return False
        return True

    def healthy(self, i: int) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[i]}/status", timeout=10) as response:
            return int(json.load(response)["healthy"])

    def wait(self, until: Callable[[], object], what: str, seconds: float = 60) -> float:
        """Wait, and return how long it took."""
        start = time.monotonic()
        while not until():
            dead = [c for c in self.job.children if c.expected_to_live and c.returncode is not None]
            assert not dead, f"{dead[0].name} ended before: {what}\n{dead[0].log_tail(20)}"
            assert time.monotonic() - start < seconds, f"{seconds:g} s passed before: {what}"
            time.sleep(0.01)
        return time.monotonic() - start

    def steps(self, more: int, members: int | None = None) -> float:
        """Wait until every group has made some more steps, and return how long it took."""
        counts = [len(m.of("step")) for m in self.members]

        def there() -> bool:
            for member, count in zip(self.members, counts, strict=True):
                new = member.of("step")[count:]
                if len([e for e in new if members in (None, e["members"])]) < more:
                    return False
            return True

        return self.wait(there, f"{more} more steps")

    def quorum_ids(self, since: int = 0) -> list[int]:
        return [e["quorum_id"] for e in self.members[0].of("step")[since:]]


@contextmanager
def cluster(folder: Path, lighthouses: int = 1) -> Iterator[Cluster]:
    with Job() as job:
        yield Cluster(job, folder, lighthouses)


@pytest.mark.timeout(240)
def test_a_lighthouse_is_killed_and_started_again_under_a_job(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        c.steps(20, members=2)
        for _ in range(2):
            before = len(c.members[0].of("step"))
            last = max(c.quorum_ids())
            c.lighthouses[0].kill()
            time.sleep(1)
            c.lighthouses[0] = c.start_lighthouse(0)
            took = c.steps(1)
            print(f"the job goes on {took:.2f} s after the lighthouse listens again")
            c.steps(20, members=2)
            after = [q for q in c.quorum_ids(before) if q != last]
            assert after and min(after) > last, "ids go on above"
        for member in c.members:
            ids = [e["quorum_id"] for e in member.of("step")]
            steps = [e["step"] for e in member.of("step")]
            assert ids == sorted(ids) and steps == sorted(steps)


@pytest.mark.timeout(240)
def test_a_second_lighthouse_takes_over_and_the_first_comes_back(tmp_path: Path) -> None:
    with cluster(tmp_path, lighthouses=2) as c:
        c.steps(20, members=2)
        assert c.healthy(0) == 2 and c.healthy(1) == 0
        last = max(c.quorum_ids())
        c.lighthouses[0].kill()
        print(f"the second one has taken over after {c.steps(3):.2f} s")
        c.steps(20, members=2)
        assert max(c.quorum_ids()) > last
        assert c.healthy(1) == 2

        c.lighthouses[0] = c.start_lighthouse(0)
        took = c.wait(lambda: c.healthy(0) == 2, "both are back at the first")
        print(f"both are back at the first after {took:.2f} s")
        c.steps(20, members=2)
        for member in c.members:
            ids = [e["quorum_id"] for e in member.of("step")]
            steps = [e["step"] for e in member.of("step")]
            assert ids == sorted(ids) and steps == sorted(steps)
