"""The invariants of a job whose processes are killed or stopped: its history is correct, and it leaks
nothing.
"""

from __future__ import annotations

import base64
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from chaos_worker import BUCKETS, RATE, SIZE, SNAPSHOTS, gradient
from processes import Child, Event
from torch.distributed import TCPStore

from torchft.launch import process_tree

ENDS_S = 60.0  # seconds after a trainer's end within which its processes must have ended
# Threads that belong to the process and remain: the timer for futures, and the one that starts others.
OF_THE_PROCESS = {"torchft_timeouts", "torchft_hand_off"}


@dataclass
class Life:
    """A group, from its start to its failure.

    Attributes:
        ranks: a process for each rank; or only torchrun's agent, which starts and restarts the group's only
            rank.
        store: a replacement for the store of torchrun's agent; None if there is an agent.
        era: how often all groups had ended at once before. The next ones go on from a copy, and make some
            steps again.
    """

    group: int
    ranks: list[Child]
    store: TCPStore | None = None
    era: int = 0


class After(NamedTuple):
    """The results of a step.

    Attributes:
        weights: shape [BUCKETS, SIZE].
        batches: committed so far.
    """

    weights: torch.Tensor
    batches: int


def check_history(lives: Sequence[Life], last: int) -> None:
    """Checks all commits of all groups, from step 0 to the one before `last`.

    Each rank communicates with the ranks of the same number in the other groups. In the first step one group
    contributes; all others take over its weights and contribute nothing. Which group that is differs between
    rank numbers.
    """
    for rank in range(len(lives[0].ranks)):
        eras: list[list[tuple[int, Child]]] = [[] for _ in range(max(life.era for life in lives) + 1)]
        for life in lives:
            eras[life.era].append((life.group, life.ranks[rank]))
        _check_rank(eras, last)


def _check_rank(eras: Sequence[Sequence[tuple[int, Child]]], last: int) -> None:
    newest = -1
    after: dict[int, After] = {}  # by step
    for children in eras:
        by_step = _check_era(children)
        first = min(by_step)
        # The steps since the last complete copy are made again, and the one in progress.
        assert 0 <= newest + 1 - first <= SNAPSHOTS + 1, (
            f"all groups ended at step {newest}, and the next ones began with step {first}"
        )
        # The changes of the weights by later steps are lost.
        after = {step: made for step, made in after.items() if step < first}
        _check_weights(children, by_step, after)
        newest = max(by_step)
    assert newest == last - 1, "every step is committed"
    every = [child for children in eras for _, child in children]
    differences = [e["what"] for child in every for e in child.of("differs")]
    assert not differences, f"differences between groups were reported: {differences}"
    # Parameters that never change equal those of the group with whose weights all began.
    states = {e["ballast"] for child in every for e in child.of("finished")}
    assert len(states) == 1, f"a part of the state differs: {states}"


def _check_era(children: Sequence[tuple[int, Child]]) -> dict[int, list[Event]]:
    """Checks in which order the steps of an era were committed, and by whom. Returns the commits by step."""
    commits = [e for _, child in children for e in child.of("step") if e["committed"]]
    by_step: dict[int, list[Event]] = {}
    for e in commits:
        by_step.setdefault(e["step"], []).append(e)
    assert sorted(by_step) == list(range(min(by_step), max(by_step) + 1)), "every step is committed"

    # No step is committed twice: it is committed in one quorum only, and by each rank once.
    for step, events in by_step.items():
        quorums = {e["quorum"] for e in events}
        assert len(quorums) == 1, f"step {step} was committed in the quorums {quorums}"
        assert len({e["weights"] for e in events}) == 1, f"different weights after step {step}"
        assert len({e["participants"] for e in events}) == 1
    for _, child in children:
        steps = [e["step"] for e in child.of("step") if e["committed"]]
        assert steps == sorted(set(steps)), f"{child.name} went back in history: {steps}"

    # No group goes back in history: a step does not begin if a group had committed it already.
    ended = sorted((e["at"], e["step"]) for e in commits)
    newest, i = -1, 0
    for e in sorted(commits, key=lambda e: e["began"]):
        while i < len(ended) and ended[i][0] < e["began"]:
            newest, i = max(newest, ended[i][1]), i + 1
        assert e["step"] > newest, f"step {e['step']} was begun when {newest} was committed"
    return by_step


def _check_weights(
    children: Sequence[tuple[int, Child]], by_step: dict[int, list[Event]], after: dict[int, After]
) -> None:
    """Checks that all weights of an era equal those that one process computes from the participants.

    Args:
        after: what is known of the steps before the era; those of the era are added.
    """
    contributors: dict[tuple[int, int], set[int]] = {}
    for group, child in children:
        for e in child.of("begin"):
            if e["contributes"]:
                contributors.setdefault((e["quorum"], e["step"]), set()).add(group)
    for step in sorted(by_step):
        e = by_step[step][0]
        groups = contributors[e["quorum"], step]
        if step == 0:  # all groups begin with the weights of the one that contributes
            (first,) = groups
            before = After(torch.full((BUCKETS, SIZE), float(first)), 0)
        else:  # in the first step, groups that take over the first weights count in the divisor
            assert len(groups) == e["participants"], (step, groups, e)
            before = after[step - 1]
        weights = before.weights.clone()
        for bucket in range(BUCKETS):
            for group in groups:
                weights[bucket] -= RATE / e["participants"] * gradient(step, group, bucket)
        batches = before.batches + e["participants"]
        found = torch.frombuffer(bytearray(base64.b64decode(e["weights"])), dtype=torch.float32).view_as(
            weights
        )
        assert torch.allclose(found, weights, rtol=1e-3, atol=1e-3), (
            f"after step {step}: {found}, expected: {weights}"
        )
        for event in by_step[step]:
            assert event["batches"] == batches, (
                f"batches_committed after step {step}: {event['batches']}, {batches}"
            )
        after[step] = After(weights, batches)


def check_nothing_left(lives: Sequence[Life], memory_before: set[str], lighthouse: tuple[str, int]) -> None:
    """Checks that no process, port, thread, descriptor or shared memory of an ended job is left.

    Args:
        memory_before: the names in /dev/shm before the job.
        lighthouse: host and port that it listened on.
    """
    for life in lives:
        for child in life.ranks:
            assert child.returncode is not None
            check_ended(child)
    made = set(os.listdir("/dev/shm")) - memory_before
    # torchft-test-…: a folder of tests that run at the same time; torchft-memory-…: of all jobs of the host
    others = ("torchft-test-", "torchft-memory-")
    left = {name for name in made if name.startswith("torchft") and not name.startswith(others)}
    assert not left, f"shared memory is left: {left}"
    with socket.socket() as s:
        # Closed connections of a killed lighthouse remain for a minute, which SO_REUSEADDR permits; a
        # listener would fail this.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(lighthouse)
        s.listen()
    for child in (child for life in lives for child in life.ranks):
        # The trainers' reports: after the last step, and when all of torchft is shut down.
        for end in child.of("finished"):
            assert not end["grown"], (
                f"{child.name} has more than after its first reconfiguration: {end['grown']}"
            )
            again = _reconfigurations(child)
            assert end["compared"] == (again > 1), f"{child.name}: {again} times, compared: {end['compared']}"
        for end in child.of("ended"):
            # PyTorch's own groups keep a port until their pending operations have timed out.
            assert not end["listens"] or end["kind"] == "native", (
                f"{child.name} still listens on the ports {end['listens']}: it has {end['holders']}"
            )
            threads = [
                name for name in end["left"] if name.startswith("torchft") and name not in OF_THE_PROCESS
            ]
            assert not threads, f"threads of {child.name} are left: {threads}"


def _reconfigurations(child: Child) -> int:
    """The number of reconfigurations of a child's last process with as many groups as in its last step."""
    events = list(child.events)
    began = max(i for i, e in enumerate(events) if e.get("event") == "imported")
    steps = [e for e in events[began:] if e.get("event") == "step" and e["committed"]]
    size = len(steps[-1]["groups"])
    return len({e["quorum"] for e in steps if len(e["groups"]) == size} - {steps[0]["quorum"]})


def check_ended(child: Child) -> None:
    """Checks that workers of isolated groups have ended with their trainer and were reaped, and trainers with
    torchrun's agent.
    """
    trainers = {e["pid"] for e in child.of("imported")}
    deadline = time.monotonic() + ENDS_S
    while alive := processes_of({child.pid, *trainers}):
        assert time.monotonic() < deadline, f"processes of {child.name} are left: {alive}"
        time.sleep(0.05)


def processes_of(groups: set[int]) -> list[int]:
    """The running processes of some process groups of the operating system, without zombies."""
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in process_tree.alive(found) if _process_group(pid) in groups]


def _process_group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
