"""A job whose lighthouses are killed or stopped, and restarted."""

from __future__ import annotations

import json
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from processes import Child, Job, free_port, ours_path

HERE = Path(__file__).resolve().parent
MAIN = "from torchft._torchft import lighthouse_main; lighthouse_main()"


class Cluster:
    """Groups that request quorums and vote (`member.py`), and lighthouses that can be killed. Several of them
    are a cluster.
    """

    def __init__(self, job: Job, folder: Path, lighthouses: int, groups: int) -> None:
        self.job, self.folder = job, folder
        self.ports = [free_port() for _ in range(lighthouses)]
        self.addresses = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.lighthouses = [self.start_lighthouse(i) for i in range(lighthouses)]
        self.members = [
            job.python(
                f"member-{i}",
                HERE / "member.py",
                path=ours_path(),
                env={"TORCHFT_LIGHTHOUSE": ",".join(self.addresses), "REPLICA_GROUP_ID": str(i)},
            )
            for i in range(groups)
        ]

    def start_lighthouse(self, i: int) -> Child:
        options = (
            f"--min_replicas 1 --bind 127.0.0.1:{self.ports[i]} --state_dir {self.folder / str(i)}".split()
        )
        options += ["--cluster", ",".join(self.addresses)] if len(self.ports) > 1 else []
        child = self.job.start(f"lighthouse-{i}", [sys.executable, "-c", MAIN, *options], path=ours_path())
        self.wait(lambda: self.answers(i), f"lighthouse {i} listens", 60)
        return child

    def answers(self, i: int) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.ports[i]), timeout=1).close()
        except OSError:
            return False
        return True

    def leader_of(self, i: int) -> int | None:
        """Which lighthouse leads, as this one says; None if it knows none or does not answer."""
        try:
            with urllib.request.urlopen(f"{self.addresses[i]}/cluster", timeout=1) as response:
                return self.addresses.index(json.load(response)["leader"])
        except (OSError, ValueError):
            return None

    def wait(self, until: Callable[[], object], what: str, seconds: float = 60) -> float:
        """Wait for a condition, and return the seconds that it took."""
        start = time.monotonic()
        while not until():
            ended = [c for c in self.job.children if c.expected_to_live and c.returncode is not None]
            assert not ended, f"{ended[0].name} ended before: {what}\n{ended[0].log_tail(20)}"
            assert time.monotonic() - start < seconds, f"{seconds:g} s passed before: {what}"
            time.sleep(0.01)
        return time.monotonic() - start

    def leader(self) -> int:
        """Wait until all lighthouses follow one leader, and return it."""

        def one() -> bool:
            leaders = {self.leader_of(i) for i in range(len(self.ports))}
            return len(leaders) == 1 and leaders != {None}

        self.wait(one, "all lighthouses follow one leader")
        leader = self.leader_of(0)
        assert leader is not None
        return leader

    def steps(self, more: int, members: int | None = None) -> float:
        """Wait until every group has completed some more steps, and return the seconds that it took."""
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
def cluster(folder: Path, lighthouses: int = 1, groups: int = 2) -> Iterator[Cluster]:
    with Job() as job:
        yield Cluster(job, folder, lighthouses, groups)
