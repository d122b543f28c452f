"""Hosts that lose contact while their connections stay open, so that only silence shows it; and distant hosts."""

from __future__ import annotations

import sys
import time

import pytest
from chaos import HEARTBEAT_TIMEOUT_MS, Chaos
from hosts import Hosts
from processes import HERE, START_TIMEOUT_S, Job, free_port, ours_path

from tests.promises import within

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]


def test_a_host_that_is_cut_off_commits_nothing_and_heals_afterwards() -> None:
    """The check of the job's history would find commits that it makes alone, or steps from its outdated weights."""
    with Hosts(2) as hosts, Job() as job:
        chaos = Chaos(job, groups=2, hosts=hosts)
        chaos.start()
        outcome = chaos.cut(1)
        print(outcome)
        assert outcome.seconds > HEARTBEAT_TIMEOUT_MS / 1000 / 2, "only its silence shows the failure"
        assert outcome.lost <= 1
        chaos.cut(0)  # the primary's host
        chaos.finish()


# A member asks no other lighthouse until quorum.BondTime (2.7 s) after its last stamp. Its connection is aborted
# before.
VANISHED_S = 3.5


# go/internal/rpc also tests a host that vanishes, and go/manager a vanished lighthouse of a list.
@pytest.mark.slow
def test_the_first_lighthouse_of_a_list_vanishes_with_its_host() -> None:
    with Hosts(2) as hosts, Job() as job:
        path = ours_path()
        lighthouses = [
            job.start(
                f"lighthouse{host}", [*hosts.command(host), sys.executable, HERE / "lighthouse_host.py"], path=path
            )
            for host in range(2)
        ]
        workers = [
            job.python(
                f"group{number}",
                HERE / "worker.py",
                *(f"--group={number}", f"--seed={number}"),
                path=path,
                env={"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())},
            )
            for number in range(2)
        ]
        job.wait(lambda: all(w.events for w in workers), START_TIMEOUT_S, "all have imported torchft")
        job.wait(lambda: all(h.of("listening") for h in lighthouses), START_TIMEOUT_S, "the lighthouses listen")
        ports = [lighthouse.of("listening")[0]["address"].rsplit(":", 1)[1] for lighthouse in lighthouses]
        addresses = ",".join(f"http://{address}:{port}" for address, port in zip(hosts.addresses, ports))
        for worker in workers:
            worker.send(do="join", lighthouse=addresses)
        job.wait(lambda: all(w.of("ready") for w in workers), START_TIMEOUT_S, "all have their Managers")
        for worker in workers:
            worker.send(do="train")

        def together(after: int) -> bool:
            committed = [
                [e["step"] for e in w.of("step") if e["committed"] and e["participants"] == 2] for w in workers
            ]
            return all(steps and max(steps) > after for steps in committed)

        job.wait(lambda: together(5), START_TIMEOUT_S, "both train together")
        hosts.cut(0)
        began, step = time.monotonic(), max(e["step"] for w in workers for e in w.of("step"))
        job.wait(lambda: together(step + 2), within(VANISHED_S), "they continue at the second lighthouse")
        print(f"{time.monotonic() - began:.1f} s until both committed again")


@pytest.mark.slow  # the test above has hosts; go/sim has late and lost messages
def test_hosts_that_are_far_away() -> None:
    """20 ms in each direction, and 1 % loss: no member fails because of that, and a failure is detected."""
    with Hosts(2, delay_s=0.02, loss=0.01) as hosts, Job() as job:
        # Frames pass through this process, which a busy machine may delay, so silence does not count here.
        chaos = Chaos(job, groups=2, hosts=hosts, lighthouse_options=["--heartbeat_timeout_ms=60000"])
        chaos.start()
        (quorum,) = {e["quorum"] for life in chaos.lives for e in chaos._steps(life)[-1:]}
        for _ in range(10):
            chaos.wait_together()
        steps = [e for life in chaos.lives for e in chaos._steps(life) if e["quorum"] >= quorum]
        assert {e["quorum"] for e in steps} == {quorum}, "a healthy member counted as failed"
        assert all(e["committed"] for e in steps)
        outcome = chaos.kill(1, phase="in bucket 1")
        print(outcome)
        assert outcome.lost <= 1
        chaos.finish()
        assert hosts.links is not None
        print(f"{hosts.links.carried} frames carried, {hosts.links.lost} lost")
        assert hosts.links.lost > 0
