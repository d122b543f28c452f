"""A job of replica groups that train with FSDP2 (hsdp_worker.py), and the check of its weights."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from causes import SILENCE_MS
from hsdp_model import reference
from processes import HERE, START_TIMEOUT_S, Child, Event, Job, free_port, ours_path

# Elements of a part, and the minimum number of parts of a shard of the model.
PART, PARTS = 16, 11


def start(job: Job, lighthouse: str, group: int, shards: int, **options: object) -> list[Child]:
    """Starts the ranks of a group."""
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(shards)}
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
        for rank in range(shards)
    ]


def train(job: Job, children: list[Child]) -> None:
    job.wait(lambda: all(child.of("ready") for child in children), START_TIMEOUT_S, "meshes")
    for child in children:
        child.send(do="train")


def weights(job: Job, children: list[Child]) -> dict[str, torch.Tensor]:
    """Returns the weights that all ranks of all groups end with."""
    job.wait_exit(children, 90)
    ends = [
        {name: torch.tensor(w) for name, w in child.of("finished")[0]["weights"].items()}
        for child in children
    ]
    for end in ends[1:]:
        for name, value in end.items():
            first = ends[0][name]
            assert torch.equal(value, first), (
                f"{name} differs by {(value - first).abs().max()}\n{job.report()}"
            )
    return ends[0]


def committed(child: Child) -> list[Event]:
    return [e for e in child.of("step") if e["committed"]]


def check(
    got: dict[str, torch.Tensor], participants: list[list[int]], shards: int, bf16: object = False
) -> None:
    """Checks that the weights equal those of one process that trains on all the data."""
    # A weight near the middle of two bfloat16 numbers may be rounded to the other one.
    rtol, atol = (1e-2, 1e-2) if bf16 else (1e-4, 1e-5)
    for name, value in reference(0, participants, shards, bool(bf16)).items():
        torch.testing.assert_close(
            got[name], torch.tensor(value), rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def train_together(shards: int, steps: int, **options: object) -> None:
    """Trains two groups from the first step to the last, and checks that the weights equal those of one
    process with all the data.

    Args:
        shards: ranks of a group.
        steps: number of steps.
        options: options for all workers.
    """
    with Job() as job:
        _, lighthouse = job.lighthouse(ours_path(), min_replicas=2, join_timeout_ms=60000)
        children = [child for group in range(2) for child in start(job, lighthouse, group, shards, **options)]
        train(job, children)
        for child in children:
            child.send(do="finish", step=steps)
        got = weights(job, children)
        for child in children:
            assert [e["participants"] for e in committed(child)] == [2] * steps, job.report()
    check(got, [[0, 1]] * steps, shards)


def flip_and_heal(shards: int, flip: int, **options: object) -> None:
    """Flips a bit of one rank's shard. That rank finds it, and its group takes over the other group's
    weights.

    Args:
        shards: ranks of a group.
        flip: the step before which the bit is flipped.
        options: options for all workers.
    """
    compare = 3
    last = flip + 3 * compare
    with Job() as job:
        _, lighthouse = job.lighthouse(ours_path(), min_replicas=2, join_timeout_ms=60000)
        first, second = (
            start(job, lighthouse, group, shards, compare=compare, flip=flip if group else -1, **options)
            for group in range(2)
        )
        train(job, first + second)
        for child in first + second:
            child.send(do="finish", step=last)
        got = weights(job, first + second)
        steps = committed(first[0])
        found = {
            child.name for child in second for e in child.of("step") if "the bits of" in (e["error"] or "")
        }
    assert found == {f"group1-{shards - 1}"}, "the rank whose shard differs"
    assert [e["step"] for e in steps] == list(range(last)), "a step was lost in the other group"
    check(got, [[0, 1] if e["participants"] == 2 else [0] for e in steps], shards)


def _wait_for_end(job: Job, group: list[Child]) -> None:
    for child in group:
        child.expected_to_live = False
    job.wait(lambda: any(child.returncode is not None for child in group), 60, "a group fails")
    for child in group:
        child.kill()


def _wait_for_step(job: Job, child: Child, participants: int, after: int = 0) -> None:
    """Waits for a commit with this number of groups, after the first `after` steps."""
    job.wait(
        lambda: [e for e in child.of("step")[after:] if e["committed"] and e["participants"] == participants],
        60,
        f"a step with {participants} groups",
    )


def join_along(shards: int, fails: bool = False, **options: object) -> None:
    """Lets a second group join, whose ranks take over their shards in parts while the first group does not
    wait.

    Args:
        shards: ranks of a group.
        fails: whether a rank of the second group ends when it has some parts, and the group starts again.
        options: options for all workers.
    """
    with Job() as job:
        _, lighthouse = job.lighthouse(
            ours_path(), min_replicas=1, join_timeout_ms=60000, heartbeat_timeout_ms=SILENCE_MS
        )
        first = start(job, lighthouse, 0, shards, along=PART, **options)
        train(job, first)
        _wait_for_step(job, first[0], 1)
        if fails:
            second = start(job, lighthouse, 1, shards, seed=98, along=PART, fail_at=3 * PART, **options)
            train(job, second)
            _wait_for_end(job, second)
            assert not committed(second[0]), job.report()
            seen = len(first[0].of("step"))
            _wait_for_step(job, first[0], 1, after=seen)
        second = start(job, lighthouse, 1, shards, seed=99, along=PART, **options)
        train(job, second)
        _wait_for_step(job, second[0], 2)
        last = committed(first[0])[-1]["step"] + 5
        for child in first + second:
            child.send(do="finish", step=last)
        got = weights(job, first + second)
        steps = committed(first[0])
        healing = [[e["error"] or "" for e in child.of("step") if not e["committed"]] for child in second]
        lost = [e for e in first[0].of("step") if not e["committed"]]
    assert [e["step"] for e in steps] == list(range(last)), "a step was lost or taken twice"
    assert bool(lost) == fails, lost
    # All ranks end the heal in the same step, even if one had its parts.
    lengths = {len(errors) for errors in healing}
    assert len(lengths) == 1 and min(lengths) >= 3, [[error[:40] for error in each] for each in healing]
    for errors in healing:
        while "waits for its connection" in errors[0]:
            del errors[0]
        here, total = (int(n) for n in re.findall(r"\d+", errors[0])[:2])
        assert here < total >= PART * PARTS, "the first step ends before all parts are here"
        # Empty if the rank had everything, and another rank lacked the rest of the state.
        assert all(error == "" or "elements of the state are here" in error for error in errors), errors
    groups = [[0, 1] if e["participants"] == 2 else [0] for e in steps]
    check(got, groups, shards, options.get("bf16", False))


def kill_and_heal(shards: int, failures: int = 1, **options: object) -> None:
    """Ends a rank of the second group in a backward pass. The first group trains alone until new processes
    have healed.

    Args:
        shards: ranks of a group.
        failures: number of failures.
        options: options for all workers.
    """
    with Job() as job:
        _, lighthouse = job.lighthouse(
            ours_path(), min_replicas=1, join_timeout_ms=60000, heartbeat_timeout_ms=SILENCE_MS
        )
        first = start(job, lighthouse, 0, shards, **options)
        second = start(job, lighthouse, 1, shards, fail_after=3, **options)
        train(job, first + second)
        for failure in range(failures):
            _wait_for_end(job, second)
            seen = len(first[0].of("step"))
            _wait_for_step(job, first[0], 1, after=seen)
            more = {"fail_after": 3} if failure < failures - 1 else {}
            second = start(job, lighthouse, 1, shards, seed=99 + failure, **more, **options)
            train(job, second)
        _wait_for_step(job, second[0], 2)
        last = committed(first[0])[-1]["step"] + 10
        for child in first + second:
            child.send(do="finish", step=last)
        got = weights(job, first + second)
        steps = [committed(child) for child in first]
        lost = [e["step"] for child in first for e in child.of("step") if not e["committed"]]
    assert [e["step"] for e in steps[0]] == list(range(last)), "a step was lost or taken twice"
    assert [e["participants"] for e in steps[0]] == [e["participants"] for e in steps[-1]]
    assert len(lost) >= failures, "no failure was noticed"
    groups = [[0, 1] if e["participants"] == 2 else [0] for e in steps[0]]
    check(got, groups, shards, options.get("bf16", False))
