"""Ranks request quorums through a relay in the process of one rank, and without it when that process has ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import HERE, START_TIMEOUT_S, Child, Job, ours_path
from torch.distributed import TCPStore

from torchft.coordination import LighthouseServer

RANKS = 4


def connections(port: int) -> int:
    """Returns the number of established connections to a port of this host."""
    count = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, _, remote, state = line.split()[:4]
            count += state == "01" and int(remote.rsplit(":", 1)[1], 16) == port  # established
    return count


@pytest.mark.timeout(240)
def test_a_relay_is_killed() -> None:
    lighthouse = LighthouseServer("[::]:0", 1)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    env = {
        "TORCHFT_RANKS_PER_RELAY": "8",
        "TORCHFT_LIGHTHOUSE": lighthouse.address(),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
    }
    with Job() as job:

        def start(name: str, rank: int) -> Child:
            return job.python(name, Path(HERE) / "relay_worker.py", path=ours_path(), env={**env, "RANK": str(rank)})

        def connected(*children: Child) -> None:
            job.wait(lambda: all(child.of("connected") for child in children), START_TIMEOUT_S, "connections")

        def send(step: int, *children: Child) -> None:
            for child in children:
                child.send(step=step)

        def made(steps: int, *children: Child) -> None:
            job.wait(lambda: all(len(child.of("step")) == steps for child in children), 60, f"{steps} steps")
            assert all(event["committed"] for child in children for event in child.of("step"))

        ranks = [start(f"rank{rank}", rank) for rank in range(RANKS)]
        connected(*ranks)
        first, relay, *others = ranks
        port = int(first.of("connected")[0]["manager"].rsplit(":", 1)[1])
        for step in (1, 2):
            send(step, *ranks)
            made(step, *ranks)
        assert connections(port) == 1, "one connection, of the relay: rank 0 is in the server's process"
        send(3, first, *others)
        relay.kill()
        job.wait(lambda: all(child.of("failed") for child in others), 60, "the end of the calls in progress")
        job.wait(lambda: connections(port) == len(others), 60, "each rank has its own connection")
        back = start("back", 1)
        connected(back)
        send(3, back)
        made(3, first, *others)
        made(1, back)
    lighthouse.shutdown()
