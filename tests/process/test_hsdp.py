"""FSDP2 over a mesh of two replica groups with two ranks each, whose replicas come and go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from causes import SILENCE_MS
from hsdp_model import reference
from processes import HERE, START_TIMEOUT_S, Child, Event, Job, free_port, ours_path
from torch.distributed import TCPStore

pytestmark = [
    # PyTorch 2.7's fully_shard asserts an event of an accelerator when it has reduced over the replicas.
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8), reason="PyTorch 2.7 has no HSDP on a CPU"
    ),
    pytest.mark.timeout(300),
]

SHARDS = 2
STEPS = 12


def start(job: Job, lighthouse: str, group: int, **options: int) -> list[Child]:
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(SHARDS)}
    more = [f"--{name}={value}" for name, value in {"seed": 0, **options}.items()]
    return [
        job.python(
            f"group{group}-{rank}",
            Path(HERE) / "hsdp_worker.py",
            f"--group={group}",
            f"--lighthouse={lighthouse}",
            *more,
            path=ours_path(),
            env={**env, "RANK": str(rank)},
        )
        for rank in range(SHARDS)
    ]


def train(job: Job, children: list[Child]) -> None:
    job.wait(lambda: all(child.of("ready") for child in children), START_TIMEOUT_S, "meshes")
    for child in children:
        child.send(do="train")


def weights(job: Job, children: list[Child]) -> dict[str, torch.Tensor]:
    """The weights that all ranks of all groups end with."""
    job.wait_exit(children, 90)
    ends = [{name: torch.tensor(w) for name, w in child.of("finished")[0]["weights"].items()} for child in children]
    for end in ends[1:]:
        for name, value in end.items():
            assert torch.equal(value, ends[0][name]), name
    return ends[0]


def committed(child: Child) -> list[Event]:
    return [e for e in child.of("step") if e["committed"]]


# Slow with gloo: the group that is killed below is one of that kind.
@pytest.mark.parametrize("kind", [pytest.param("gloo", marks=pytest.mark.slow), "native"])
def test_two_groups_of_two_ranks(kind: str) -> None:
    """The same weights as one process that sees all the data."""
    options = {}
    if kind == "native":
        if not hasattr(dist.ProcessGroup, "reconfigure"):
            pytest.skip("needs PyTorch >= 2.14, whose groups can be reconfigured")
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        options["native"] = store.port
    with Job() as job:
        _, lighthouse = job.lighthouse(ours_path(), min_replicas=2, join_timeout_ms=60000)
        children = [child for group in range(2) for child in start(job, lighthouse, group, **options)]
        train(job, children)
        for child in children:
            child.send(do="finish", step=STEPS)
        got = weights(job, children)
        for child in children:
            assert [e["participants"] for e in committed(child)] == [2] * STEPS, job.report()
    check(got, [[0, 1]] * STEPS)


def test_a_group_is_killed_and_comes_back() -> None:
    """One of its ranks dies in a step; the other group trains alone until a new process has healed."""
    with Job() as job:
        _, lighthouse = job.lighthouse(
            ours_path(), min_replicas=1, join_timeout_ms=60000, heartbeat_timeout_ms=SILENCE_MS
        )
        first, second = start(job, lighthouse, 0), start(job, lighthouse, 1, die_at=3)
        train(job, first + second)
        for child in second:
            child.expected_to_live = False
        job.wait(lambda: any(child.returncode is not None for child in second), 60, "a group dies")
        for child in second:
            child.kill()
        job.wait(lambda: [e for e in committed(first[0]) if e["participants"] == 1], 60, "a step of one group")
        again = start(job, lighthouse, 1, seed=99)
        train(job, again)
        job.wait(lambda: [e for e in committed(again[0]) if e["participants"] == 2], 60, "a step of both groups")
        last = committed(first[0])[-1]["step"] + 10
        for child in first + again:
            child.send(do="finish", step=last)
        got = weights(job, first + again)
        steps = [committed(child) for child in first]
    assert [e["step"] for e in steps[0]] == list(range(last)), "a step was lost or taken twice"
    assert [e["participants"] for e in steps[0]] == [e["participants"] for e in steps[1]]
    assert any(not e["committed"] for child in first for e in child.of("step")), "nobody noticed the death"
    check(got, [[0, 1] if e["participants"] == 2 else [0] for e in steps[0]])


def check(got: dict[str, torch.Tensor], participants: list[list[int]]) -> None:
    for name, value in reference(0, participants, SHARDS).items():
        torch.testing.assert_close(
            got[name], torch.tensor(value), rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
