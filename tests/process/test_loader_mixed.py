"""An upstream group in a job with an ElasticDataLoader is refused by name, in any order of joining."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from loader_model import one_process, plan
from mixed import PHASE_TIMEOUT_S, UPSTREAM_SILENCE_MS, status
from processes import HERE, START_TIMEOUT_S, Child, Job, free_port, ours_path
from upstream import REQUIREMENTS, upstream_path

SAMPLES = 71
STEPS = plan(SAMPLES).batches_per_epoch * plan(SAMPLES).epochs

NAMED = r"the data loader differs: 'ElasticDataLoader' here, 'none' in worker_1"

pytestmark = pytest.mark.timeout(300)


def with_loader(job: Job, lighthouse: str, folder: Path) -> Child:
    of_job = [f"--lighthouse={lighthouse}", f"--samples={SAMPLES}", "--kind=ddp", "--reproducible=0"]
    of_job += ["--bf16=0", "--device=cpu", "--heal=auto", "--audit=0"]
    of_group = [
        "--group=0",
        "--seed=0",
        "--num_workers=0",
        f"--log={folder / 'log'}",
        f"--weights={folder / 'weights'}",
    ]
    return job.python("with-loader", HERE / "loader_worker.py", *of_job, *of_group, path=ours_path())


def upstream_one(job: Job, generation: str) -> Child:
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    path = upstream_path(generation)
    return job.python("upstream", HERE / "worker.py", "--group=1", "--seed=1", path=path, env=env)


def join(job: Job, child: Child, lighthouse: str) -> None:
    child.send(do="join", lighthouse=lighthouse)
    job.wait(lambda: child.of("ready"), START_TIMEOUT_S, "the upstream group has its Manager")
    assert Path(child.of("ready")[0]["torchft"]).parent != ours_path()
    job.wait(lambda: "worker_1:" in status(lighthouse), PHASE_TIMEOUT_S, "the lighthouse knows it")


def waits(lighthouse: str) -> bool:
    """Whether the upstream group has a pending request for a quorum."""
    members = json.loads(status(lighthouse))["members"]
    return any(member["waiting"] for member in members if member["replica_id"].startswith("worker_1:"))


def lighthouse_of(job: Job) -> str:
    options = {"min_replicas": 1, "join_timeout_ms": 30_000, "heartbeat_timeout_ms": UPSTREAM_SILENCE_MS}
    return job.lighthouse(ours_path(), **options)[1]


@pytest.mark.parametrize("generation", ["nightly", pytest.param("stable", marks=pytest.mark.slow)])
def test_an_upstream_group_that_joins_later_is_named_and_does_not_count(
    tmp_path: Path, generation: str
) -> None:
    """It would divide gradients that the loader has weighted already, so steps with it are lost until it
    ends.
    """
    with Job() as job:
        upstream = upstream_one(job, generation)
        lighthouse = lighthouse_of(job)
        ours = with_loader(job, lighthouse, tmp_path)
        job.wait(lambda: ours.of("paused"), START_TIMEOUT_S, "the group with a loader is ready")
        ours.send(until=STEPS // 2)
        job.wait(lambda: len(ours.of("paused")) == 2, PHASE_TIMEOUT_S, "it has trained alone")

        join(job, upstream, lighthouse)
        upstream.send(do="train")
        # From then on no quorum forms without it, so the group with a loader cannot end before it has met it.
        job.wait(lambda: waits(lighthouse), PHASE_TIMEOUT_S, "the upstream group waits for a quorum")
        ours.send(until=STEPS + 1)
        job.wait(lambda: re.search(NAMED, ours.log_tail(1000)), PHASE_TIMEOUT_S, "it is named")

        upstream.kill()
        job.wait_exit([ours], PHASE_TIMEOUT_S)
    ended = torch.load(tmp_path / "weights")
    for name, value in one_process(SAMPLES, reproducible=False).items():
        torch.testing.assert_close(ended["weights"][name], value, rtol=0, atol=1e-9)
    assert len(ended["history"]) == STEPS


# In make test this is covered by test_native_peers_without_a_loader_are_refused_by_name and test_layout.py.
@pytest.mark.slow
@pytest.mark.parametrize("generation", sorted(REQUIREMENTS))
def test_a_group_with_a_loader_that_joins_later_gets_an_error_and_the_upstream_group_continues(
    tmp_path: Path, generation: str
) -> None:
    with Job() as job:
        upstream = upstream_one(job, generation)
        lighthouse = lighthouse_of(job)
        join(job, upstream, lighthouse)
        upstream.send(do="train")
        job.wait(lambda: len(upstream.of("step")) > 3, PHASE_TIMEOUT_S, "the upstream group trains")

        ours = with_loader(job, lighthouse, tmp_path)
        job.wait(lambda: ours.of("paused"), START_TIMEOUT_S, "the group with a loader is ready")
        ours.expected_to_live = False
        ours.send(until=STEPS + 1)
        job.wait(lambda: ours.returncode is not None, PHASE_TIMEOUT_S, "it ends")
        assert ours.returncode == 1
        assert re.search(f"LayoutDiffers: {NAMED}", ours.log_tail(1000)), ours.log_tail(1000)

        seen = len(upstream.of("step"))

        def goes_on() -> bool:
            return sum(e["committed"] and e["participants"] == 1 for e in upstream.of("step")[seen:]) > 3

        job.wait(goes_on, PHASE_TIMEOUT_S, "the upstream group continues alone")
    assert not (tmp_path / "weights").exists()
