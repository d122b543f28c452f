"""Jobs on the test device in real processes, one of which is killed: the others continue, and all groups that
commit a step have the same weights.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
from processes import START_TIMEOUT_S, Child, Job, ours_path

from tests.promises import KILL_S, within

HERE = Path(__file__).parent
PHASE_TIMEOUT_S = 60


def start(job: Job, number: int, life: int, *args: str, env: dict[str, str] | None = None) -> Child:
    return job.python(
        f"group{number}.{life}",
        HERE / "job.py",
        f"--group={number}",
        f"--seed={10 * number + life}",
        *args,
        path=ours_path(),
        env=env,
    )


def join(job: Job, child: Child, lighthouse: str) -> None:
    job.wait(lambda: child.of("imported"), START_TIMEOUT_S, "it has imported torchft")
    child.send(do="join", lighthouse=lighthouse)


def finish(job: Job, *children: Child) -> None:
    """Ends groups that train together, and checks that they end with the same weights."""
    last = max(child.of("step")[-1]["step"] for child in children) + 6
    for child in children:
        child.send(do="finish", step=last)
    job.wait_exit(list(children), PHASE_TIMEOUT_S)
    ends = [(e["step"], e["digest"]) for child in children for e in child.of("finished")]
    assert ends == [(last, ends[0][1])] * len(children)


def check_steps(*children: Child) -> None:
    """Checks that each step has the same weights in all groups that committed it."""
    weights: dict[int, dict[str, str]] = {}
    for child in children:
        for e in child.of("step"):
            if e["committed"]:
                weights.setdefault(e["step"], {})[child.name] = e["digest"][:8]
    assert {step: of for step, of in weights.items() if len(set(of.values())) > 1} == {}


def committed(child: Child, participants: int, after: int = 0) -> list[int]:
    return [
        e["step"]
        for e in child.of("step")
        if e["committed"] and e["participants"] == participants and e["step"] > after
    ]


def run_with_a_kill(
    *args: str, survivor_args: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> list[Child]:
    """Returns the two groups that end the job."""
    with Job() as job, tempfile.TemporaryDirectory() as folder:
        args = (*args, f"--store={folder}/store")
        _, lighthouse = job.lighthouse(
            ours_path(), min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=5000
        )
        survivor, victim, spare = (
            start(job, 0, 0, *args, *survivor_args, env=env),
            start(job, 1, 0, *args, env=env),
            start(job, 1, 1, *args, env=env),
        )
        join(job, survivor, lighthouse)
        join(job, victim, lighthouse)
        job.wait(lambda: len(committed(victim, 2)) >= 3, PHASE_TIMEOUT_S, "both train")
        victim.kill()
        at = survivor.of("step")[-1]["step"]
        job.wait(lambda: len(committed(survivor, 1, at)) >= 2, PHASE_TIMEOUT_S, "one continues alone")
        join(job, spare, lighthouse)
        job.wait(lambda: len(committed(spare, 2)) >= 3, PHASE_TIMEOUT_S, "both train at the end")
        finish(job, survivor, spare)
        check_steps(survivor, victim, spare)
        return [survivor, spare]


@pytest.mark.parametrize(
    "args",
    [
        ("--transport=pg",),
        pytest.param(("--transport=http", "--stalls=2"), marks=pytest.mark.slow),
        pytest.param(("--kind=diloco",), marks=pytest.mark.slow),
        # Seconds each. Of the threads that they run, the unit tests and test_contexts.py have those of
        # torchft.
        pytest.param(("--heal_along", "--stalls=2"), marks=pytest.mark.slow),
        pytest.param(("--transport=pg", "--stalls=2"), marks=pytest.mark.slow),
        pytest.param(("--kind=diloco", "--stalls=2"), marks=pytest.mark.slow),
        pytest.param(("--kind=local_sgd",), marks=pytest.mark.slow),  # DiLoCo's sync is the same, and more
        # Inner steps while a fragment is reduced. test_streaming.py has it without a kill.
        pytest.param(("--kind=streaming",), marks=pytest.mark.slow),
        pytest.param(("--kind=streaming", "--transport=pg"), marks=pytest.mark.slow),
        # The second form of the backend, which revokes, in PyTorch's own group. test_reconfigure.py has its
        # rules.
        pytest.param(("--pg=native", "--transport=pg"), marks=pytest.mark.slow),
        # Each group imports PyTorch a second time, for its workers. test_isolated.py kills a worker.
        pytest.param(("--pg=isolated", "--timeout_s=40"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_group_is_killed_and_comes_back(job_server: None, args: tuple[str, ...]) -> None:
    """A rank has a context on its own device only: each thread of torchft's is on that device when it uses
    one. With --stalls, the deadline of an operation passes in the survivor, too.
    """
    stalls = tuple(arg for arg in args if arg.startswith("--stalls"))
    common = [arg for arg in args if arg not in stalls]
    survivor, healed = run_with_a_kill(*common, "--device=3", survivor_args=stalls)
    assert not stalls or any(not e["committed"] for e in survivor.of("step"))
    for child in (survivor, healed):
        (made_by,) = [e["made_by"] for e in child.of("contexts")]
        assert list(made_by) == ["3"], "\n\n".join(f"device {d}:\n{stack}" for d, stack in made_by.items())


def test_the_monitor_of_the_world_does_not_end_survivors(job_server: None) -> None:
    """The watchdog of the group between the replica groups finds the failure before torchft aborts it."""
    env = {"TORCHFT_FAILURE_BUS": "0", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "0"}
    run_with_a_kill("--world", env=env)


@pytest.mark.parametrize(
    "bus", ["1", pytest.param("0", marks=pytest.mark.slow)], ids=["failure bus", "no failure bus"]
)
def test_a_group_that_fails_in_the_last_bucket_leaves_its_peers_with_the_same_weights(
    job_server: None, bus: str
) -> None:
    """The kernels of both peers are aborted, with different garbage in each, and their works have no
    error.
    """
    # Not torchrun's settings: with those PyTorch ends its workers, so that no peer would be left.
    env = {"TORCHFT_FAILURE_BUS": bus, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCHELASTIC_RUN_ID": "job"}
    with Job() as job:
        _, lighthouse = job.lighthouse(
            ours_path(), min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=5000
        )
        peers = start(job, 0, 0, env=env), start(job, 1, 0, env=env)
        victim = start(job, 2, 0, "--fails=3", env=env)
        victim.expected_to_live = False
        for child in (*peers, victim):
            join(job, child, lighthouse)
        job.wait(lambda: victim.returncode is not None, PHASE_TIMEOUT_S, "it fails")
        at = max(committed(victim, 3))
        job.wait(
            lambda: all(len(committed(peer, 2, at)) >= 2 for peer in peers),
            PHASE_TIMEOUT_S,
            "its peers continue",
        )
        finish(job, *peers)
        check_steps(*peers, victim)


@pytest.mark.slow  # three processes each, and 20 s for the timeout without the bus
@pytest.mark.parametrize("bus", ["1", "0"], ids=["failure bus", "no failure bus"])
def test_the_failure_bus_ends_a_collective_whose_backend_detects_no_failure(
    job_server: None, bus: str
) -> None:
    """Without the bus, the collective would last until its timeout if NCCL has no watchdog, or if its
    connections do not break.
    """
    env = {"TORCHFT_FAILURE_BUS": bus, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    args = ["--timeout_s=20"]
    with Job() as job:
        _, lighthouse = job.lighthouse(
            ours_path(), min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=5000
        )
        peers = start(job, 0, 0, *args, env=env), start(job, 1, 0, *args, env=env)
        victim = start(job, 2, 0, "--fails=3", *args, env=env)
        victim.expected_to_live = False
        for child in (*peers, victim):
            join(job, child, lighthouse)
        job.wait(lambda: victim.returncode is not None, PHASE_TIMEOUT_S, "it fails")
        began = time.monotonic()

        def ended() -> bool:
            at = max(committed(victim, 3))
            return all(any(e["step"] == at and not e["committed"] for e in peer.of("step")) for peer in peers)

        job.wait(ended, PHASE_TIMEOUT_S, "its peers' collectives end")
        took = time.monotonic() - began
        assert (took < within(KILL_S)) == (bus == "1"), f"after {took:.1f} s"
        finish(job, *peers)
        check_steps(*peers, victim)
