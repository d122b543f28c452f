"""Kills and stops real processes at each phase of a step, and checks that the survivors keep the invariants
of the job.

The invariants, checked by chaos.py: the survivors commit within a bound; the weights at a step are equal in
all groups, and equal to those that one process computes; no step is committed twice; no process, port,
thread, descriptor or shared memory is left. One job survives many faults, one after another.
"""

from __future__ import annotations

import base64
import random
import signal
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from causes import CAUSES, SILENCE_MS, check_killed
from chaos import HEARTBEAT_TIMEOUT_MS, PHASES, STOP_BOUND_S, Chaos
from chaos_faults import EJECT, FAULTS, Fault, next_missing, possible_in, table
from chaos_history import Life, check_history
from chaos_worker import BUCKETS, RATE, SIZE, SNAPSHOTS, gradient
from flapping import Flapping
from processes import Child, Job

from tests.promises import KILL_S, within

needs_native = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "reconfigure"), reason="needs PyTorch >= 2.14"
)
# Slow: the threads and processes of these groups have their tests in tests/unit/process_group, and
# test_abort.py stops their peers.
OTHERS = [
    pytest.param("isolated", marks=pytest.mark.slow),
    pytest.param("native", marks=[needs_native, pytest.mark.slow]),
]
# One fault for each way in which survivors detect a failure (the end of the grace period, an error of a
# collective, missing heartbeats) or continue (as the only group, during a heal, with a new lighthouse, from
# copies in memory). Stops come first: after a stop, Gloo may keep an operation until its timeout, and it must
# have ended when the job is checked for leaks.
EACH_KIND = [
    "SIGSTOP in bucket 1",
    "SIGSTOP of the source of a heal",
    "kill -9 before the quorum",
    "kill -9 in bucket 1",
    "kill -9 after the vote",
    "kill -9 of all but one at once",
    "kill -9 of all groups and the lighthouse at once",
    "kill -9 of the source of a heal",
    "kill -9 while it heals",
    "kill -9 of the lighthouse",
]


def run(job: Job, **settings: Any) -> Chaos:
    chaos = Chaos(job, **settings)
    chaos.start()
    return chaos


def check_compared(chaos: Chaos) -> None:
    """Checks that the check for leaks has compared at least one process with its reference
    (chaos_leaks.py).
    """
    ends = [end for life in chaos.lives for child in life.ranks for end in child.of("finished")]
    assert any(end["compared"] for end in ends)


def each_once(groups: int, faults: list[Fault]) -> None:
    """Runs each fault once, with groups of one rank over plain Gloo."""
    rng = random.Random(1)
    outcomes = {}
    with Job() as job:
        chaos = run(job, groups=groups)
        for fault in faults:
            outcomes[fault.name] = fault.do(chaos, rng)
            print(f"{fault.name}: {outcomes[fault.name]}", flush=True)
        chaos.finish()
    check_compared(chaos)
    assert {f.name: outcomes[f.name].lost for f in faults if outcomes[f.name].lost > f.lost} == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fault_of_each_kind() -> None:
    by_name = {fault.name: fault for fault in FAULTS}
    each_once(3, [by_name[name] for name in EACH_KIND])


@pytest.mark.slow(minutes=5)  # the test above has one fault of each kind
@pytest.mark.timeout(1200)
def test_each_fault_once() -> None:
    each_once(4, possible_in(4, 1, torchrun=False))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", OTHERS)
def test_other_process_groups(kind: str) -> None:
    with Job() as job:
        chaos = run(job, kind=kind, groups=2)
        chaos.kill(1, phase="in bucket 1")
        chaos.stop(0, phase="in bucket 0")
        chaos.finish()
    check_compared(chaos)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_rank_of_a_group() -> None:
    """If one rank fails, its group fails, whether or not the rank hosts the manager server. The lighthouse
    evicts a group with a stalled rank, and names that rank.
    """
    with Job() as job:
        chaos = run(job, groups=2, ranks=2, lighthouse_options=EJECT)
        chaos.kill(0, phase="in bucket 1", rank=0)
        chaos.kill(1, phase="in bucket 1", rank=1)
        outcome = chaos.stop(1, phase="in bucket 1", rank=1, bound_s=STOP_BOUND_S + 3)
        assert outcome.seconds > 2.0, (
            "its manager server is alive, so only the lack of progress shows the failure"
        )
        chaos.hang(0)
        chaos.raises(0)
        chaos.finish()
        log = chaos.lighthouse.log_tail(1000)
    assert "a member makes no progress" in log and "rank 1, step" in log


@needs_native
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_of_a_native_group_is_stopped_in_a_collective() -> None:
    """An abort may fail to end a Gloo operation in progress. A rank must stop waiting for that operation
    before its group's vote times out.
    """
    with Job() as job:
        chaos = run(job, kind="native", groups=2, ranks=2, lighthouse_options=EJECT)
        for number in range(8):
            chaos.stop(number % 2, phase="in bucket 2", rank=number // 2 % 2, bound_s=STOP_BOUND_S + 3)
        chaos.finish()


@pytest.mark.slow  # because test_torchft_run kills a group of torchrun, too
@pytest.mark.timeout(300)
@pytest.mark.parametrize("forked", [False, True], ids=["python", "torchft exec"])
def test_groups_of_torchrun(forked: bool) -> None:
    """If a worker fails, its agent restarts it. If an agent fails, its workers end."""
    with Job() as job:
        chaos = run(job, groups=2, torchrun=True, forked=forked, kills_only=True)
        chaos.kill_worker(0, phase="in bucket 1")
        chaos.kill_agent(1)
        chaos.kill_all()
        chaos.finish()
        for life in [*chaos.past, *chaos.lives]:
            assert "an ordinary start" not in life.ranks[0].log_tail(1000)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_flapping_network_is_no_failure() -> None:
    """If a member's connection is cut for less than the grace period, the lighthouse does not declare the
    member failed. On a busy machine a cut may last longer than intended, so the grace period is longer than
    the default here; go/manager tests the default with a fake clock.
    """
    grace = f"--suspect_grace_ms={int(1000 * within(KILL_S))}"
    with Flapping() as proxy, Job() as job:
        chaos = run(job, groups=2, through=proxy, kills_only=True, lighthouse_options=[grace])
        chaos.flap(20)
        assert proxy.broken >= 20 * 2, "the members' connections were cut"
        assert "a member failed" not in chaos.lighthouse.log_tail(1000)
        chaos.finish()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["gloo", *OTHERS])
@pytest.mark.parametrize("groups", [2, 3, 4])
def test_each_phase(kind: str, groups: int) -> None:
    with Job() as job:
        chaos = run(job, kind=kind, groups=groups)
        for number, phase in enumerate(PHASES):
            chaos.kill(number % groups, phase=phase)
        for number, phase in enumerate(PHASES):
            chaos.stop(number % groups, phase=phase)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            chaos.strike_while_healing(0, "target", number)
            if groups > 2:
                chaos.strike_while_healing(1, "source", number)
        if groups > 2:
            chaos.kill(0, 1, phase="in bucket 1")
            chaos.stop(*range(1, groups), phase="in bucket 2")
        if groups > 3:
            chaos.kill(*range(1, groups), phase="in bucket 2")
            chaos.stop(0, 1, phase="in bucket 1")
        chaos.kill_lighthouse()
        chaos.finish()


def test_a_record_goes_on_where_it_ended_and_makes_a_table() -> None:
    """Each fault must be repeated a number of times. The next fault is the one that lacks the largest share
    of them.
    """
    done: dict[str, int] = {}
    for _ in range(len(FAULTS)):
        fault = next_missing(FAULTS, "gloo", done)
        assert fault is not None and fault.name not in done
        done[fault.name] = 1
    assert next_missing(FAULTS[:1], "gloo", {FAULTS[0].name: 49}) is FAULTS[0]
    assert next_missing(FAULTS[:1], "gloo", {FAULTS[0].name: 50}) is None
    assert next_missing(FAULTS[:1], "native", {FAULTS[0].name: 5}) is None
    records: list[dict[str, Any]] = [
        {"fault": FAULTS[0].name, "kind": kind, "seconds": seconds, "lost": lost}
        for kind, seconds, lost in [
            ("gloo", 0.25, 1),
            ("gloo", 0.75, 0),
            ("gloo", 0.5, 0),
            ("native", 2.0, 0),
        ]
    ]
    broken = {"fault": FAULTS[0].name, "kind": "native", "broken": "different weights after step 7"}
    made = table([*records, broken])
    assert made.splitlines()[0].count("held") == 2
    assert made.splitlines()[2] == f"| {FAULTS[0].name} | 3 of 3, 0.50, 0.75, 1 | 1 of 2, 2.00, 2.00, 0 |"
    assert table([broken]).splitlines()[2] == f"| {FAULTS[0].name} | 0 of 1 |"


def test_each_fault_has_a_job_that_it_is_recorded_in() -> None:
    jobs = [(4, 1, False), (2, 2, False), (2, 1, True)]
    recorded = [f.name for job in jobs for f in possible_in(*job, recorded=True)]
    assert sorted(recorded) == sorted(fault.name for fault in FAULTS)
    assert {"kill -9 in bucket 1", "kill -9 of another rank"} <= {f.name for f in possible_in(2, 2, False)}


def lives_of(*eras: range, from_copy: bool = True) -> list[Life]:
    """The events of one group, which committed these steps in each of its lives.

    Args:
        from_copy: whether it goes on with the weights and counts of the step before, or with its last ones.
    """
    lives: list[Life] = []
    after, last = {-1: (torch.zeros(BUCKETS, SIZE), 0)}, -1
    for era, steps in enumerate(eras):
        events: list[dict[str, Any]] = [{"event": "finished", "ballast": "same"}]
        for step in steps:
            weights, batches = after[step - 1 if from_copy and step - 1 in after else last]
            update = torch.stack([gradient(step, 0, bucket) for bucket in range(BUCKETS)])
            after[step] = weights - RATE * update, batches + 1
            last = step
            begun: dict[str, Any] = {"step": step, "quorum": era, "at": step, "began": step}
            events.append({"event": "begin", "contributes": True, **begun})
            done = base64.b64encode(after[step][0].numpy().tobytes()).decode()
            counted = {"committed": True, "participants": 1, "batches": batches + 1, "weights": done}
            events.append({"event": "step", **counted, **begun})
        child = SimpleNamespace(
            name=f"life{era}", of=lambda kind, events=events: [e for e in events if e["event"] == kind]
        )
        lives.append(Life(0, [cast(Child, child)], era=era))
    return lives


def test_steps_that_are_made_again() -> None:
    """After the end of all groups the history goes on from a copy: at most so many steps are lost, and what
    they did counts once.
    """
    check_history(lives_of(range(10), range(10, 15)), 15)
    check_history(lives_of(range(10), range(9 - SNAPSHOTS, 12), range(12, 15)), 15)
    for first in (8 - SNAPSHOTS, 11):
        with pytest.raises(AssertionError, match=f"the next ones began with step {first}"):
            check_history(lives_of(range(10), range(first, 15)), 15)
    with pytest.raises(AssertionError, match="after step 8"):
        check_history(lives_of(range(10), range(8, 15), from_copy=False), 15)


def test_strikes_end_or_stop_the_process() -> None:
    """If a strike with SIGKILL did not end the process, the other tests of this file would pass although no
    process had failed.
    """
    with Job() as job:
        chaos = run(job, groups=1)
        child = chaos.lives[0].ranks[0]
        chaos._strike([child], "before the vote", signal.SIGKILL)
        job.wait(lambda: child.returncode == -signal.SIGKILL, 60, "it has failed")


@pytest.mark.parametrize("heartbeat_timeout_ms", [HEARTBEAT_TIMEOUT_MS, SILENCE_MS])
def test_causes_of_a_kill(heartbeat_timeout_ms: int) -> None:
    def check(members: int, **after: int) -> None:
        before = Counter(dict.fromkeys(CAUSES, 1))
        check_killed(before, before + Counter(after), members, heartbeat_timeout_ms)

    for cause in CAUSES:
        if cause in ("connection", "rank", "unreachable"):
            check(1, **{cause: 1})
        else:
            with pytest.raises(AssertionError, match="1 members were killed, and 0 found"):
                check(1, **{cause: 1})
    with pytest.raises(AssertionError, match="2 members were killed, and 1 found"):
        check(2, connection=1, silent=1)
    assert {"stalled", "parted"} < {*CAUSES}
    for cause in {*CAUSES} - {"connection", "rank", "unreachable", "silent"}:
        with pytest.raises(AssertionError, match="no reason"):
            check(1, **{"connection": 1, cause: 1})
    if heartbeat_timeout_ms == SILENCE_MS:
        with pytest.raises(AssertionError, match="no reason"):
            check(1, connection=1, silent=1)
    else:
        check(1, connection=1, silent=1)
