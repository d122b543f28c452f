"""Jobs over PyTorch's own default group: in real processes, since a process has only one such group."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from causes import SILENCE_MS
from hsdp_model import reference
from processes import HERE, START_TIMEOUT_S, Child, Event, Job, free_port, ours_path
from torch.distributed import TCPStore

pytestmark = [
    pytest.mark.skipif(
        not hasattr(dist.ProcessGroup, "reconfigure"),
        reason="needs PyTorch >= 2.14, whose groups can be reconfigured",
    ),
    pytest.mark.timeout(300),
]


class Groups:
    """The groups of a job, and the store that native Gloo groups share."""

    def __init__(self, job: Job, timeout_s: int = 20, heartbeat_timeout_ms: int = SILENCE_MS) -> None:
        self.job = job
        self.timeout_s = timeout_s
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        _, self.lighthouse = job.lighthouse(
            ours_path(), min_replicas=1, heartbeat_timeout_ms=heartbeat_timeout_ms
        )

    def start(self, *groups: int) -> list[Child]:
        children = [self._spawn(group) for group in groups]
        self._wait(children, "imported")
        for child in children:
            child.send(do="join", lighthouse=self.lighthouse)
        self._wait(children, "ready")
        for child in children:
            child.send(do="train")
        return children

    def wait_step(self, children: list[Child], participants: int) -> int:
        """Waits until each group has committed a new step with this number of groups, and has checked
        collectives. Returns the last step.
        """
        seen = {child: len(child.of("step")) for child in children}

        def new(child: Child) -> list[Event]:
            steps = child.of("step")[seen[child] :]
            return [
                e
                for e in steps
                if e["committed"] and e["participants"] == participants == (e["members"] or None)
            ]

        self.job.wait(lambda: all(new(child) for child in children), 60, f"steps of {participants} groups")
        return max(new(child)[-1]["step"] for child in children)

    def finish(self, children: list[Child]) -> list[Event]:
        last = max(e["step"] for child in children for e in child.of("step")) + 10
        for child in children:
            child.send(do="finish", step=last)
        self.job.wait_exit(children, 60)
        ends = [child.of("finished")[0] for child in children]
        assert {e["step"] for e in ends} == {last}
        return ends

    def _spawn(self, group: int) -> Child:
        env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
        script = Path(HERE) / "native_worker.py"
        options = [f"--group={group}", f"--store={self.store.port}", f"--timeout_s={self.timeout_s}"]
        return self.job.python(f"group{group}", script, *options, path=ours_path(), env=env)

    def _wait(self, children: list[Child], event: str) -> None:
        self.job.wait(lambda: all(child.of(event) for child in children), START_TIMEOUT_S, event)


@pytest.mark.slow
def test_three_two_three_groups() -> None:
    """One group is killed and returns as a new process, which changes the ranks of the others."""
    with Job() as job:
        groups = Groups(job)
        first, second, third = groups.start(0, 1, 2)
        groups.wait_step([first, second, third], 3)
        assert sorted(child.of("step")[-1]["rank"] for child in (first, second, third)) == [0, 1, 2]

        first.kill()
        groups.wait_step([second, third], 2)
        assert sorted(child.of("step")[-1]["rank"] for child in (second, third)) == [0, 1]

        (again,) = groups.start(0)
        groups.wait_step([again, second, third], 3)
        ends = groups.finish([again, second, third])
        assert len({e["digest"] for e in ends}) == 1
        for child in (second, third):
            assert all(e["same"] for e in child.of("step")), "the default group was replaced"
            print(
                f"{child.name}: reconfigured in "
                f"{[round(t, 1) for t in child.of('step')[-1]['reconfigured_ms']]} ms"
            )


@pytest.mark.slow  # test_abort has a native group with a stopped peer
def test_a_peer_that_is_stopped_in_a_collective() -> None:
    """Its connections stay open: operations end at their timeout, and later ones do not wait for them."""
    with Job() as job:
        groups = Groups(job, timeout_s=4, heartbeat_timeout_ms=1000)
        first, second, third = groups.start(0, 1, 2)
        groups.wait_step([first, second, third], 3)
        first.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        groups.wait_step([second, third], 2)
        print(
            f"committed {time.monotonic() - started:.2f} s after a peer stopped; the groups' timeout is 4 s"
        )
        first.kill()
        ends = groups.finish([second, third])
        assert len({e["digest"] for e in ends}) == 1


@pytest.mark.slow  # test_hsdp has FSDP, and native groups between the replicas
def test_fsdp_shards_over_the_default_group() -> None:
    """The weights equal those of one process that trains on all data, also after an abort and a
    reconfiguration.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with Job() as job:
        ranks = [
            job.python(
                f"rank{rank}",
                Path(HERE) / "fsdp_worker.py",
                *(f"--rank={rank}", f"--store={store.port}", "--steps=6"),
                path=ours_path(),
            )
            for rank in range(2)
        ]
        job.wait_exit(ranks, START_TIMEOUT_S)
        ends = [child.of("finished")[0]["weights"] for child in ranks]
    assert ends[0] == ends[1]
    for name, value in reference(0, [[0]] * 6, shards=2).items():
        torch.testing.assert_close(torch.tensor(ends[0][name]), torch.tensor(value), rtol=1e-4, atol=1e-5)
