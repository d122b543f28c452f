"""A peer that stops in the middle of a collective, and the effect of an abort: real processes, all kinds of
groups.

docs/internals/benchmarks.md has exact figures. Without the abort, all waits would last ten minutes.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from processes import START_TIMEOUT_S, Child, Job, ours_path
from torch.distributed import TCPStore

from tests.promises import ABORT_S, LEAVE_PYTHON_S, NEW_PEERS_S, within

PEER = Path(__file__).resolve().parent / "abort_peer.py"
ANSWER_S = 60
# The operation's own timeout is 600 s.
EXIT_S = within(LEAVE_PYTHON_S)

# The last three wrap the first one, and forward an abort to it.
KINDS = [
    *("native", pytest.param("managed", marks=pytest.mark.slow)),
    pytest.param("gloo", marks=pytest.mark.slow),  # eight seconds
    # Its workers have this in tests/unit/process_group/isolated, and in the test below.
    pytest.param("isolated", marks=pytest.mark.slow),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("error_swallowing", "fake", "wrapper")),
]
# In these groups a wait for an allreduce raises no error.
SWALLOWING = {"error_swallowing"}

pytestmark = pytest.mark.timeout(300)
_meetings = itertools.count()


class Ranks:
    """Three ranks of a group, each in a process."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.children = [self._start() for _ in range(3)]
        self._wait_for_imports()

    def _start(self) -> Child:
        return self.job.python("rank", PEER, path=ours_path())

    def _wait_for_imports(self) -> None:
        self.job.wait(
            lambda: all(child.of("imported") for child in self.children), START_TIMEOUT_S, "torch is imported"
        )

    def replace(self, ended: Child) -> None:
        self.children[self.children.index(ended)] = self._start()
        self._wait_for_imports()

    def meeting(self) -> str:
        return f"localhost:{self.store.port}/abort/{next(_meetings)}"

    def do(
        self, children: list[Child], do: str, each: list[dict[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        before = [len(child.of(do)) for child in children]
        for i, child in enumerate(children):
            child.send(do=do, **(each[i] if each else {}))
        self.job.wait(
            lambda: all(len(child.of(do)) > n for child, n in zip(children, before)),
            ANSWER_S,
            f"{do} is done",
        )
        return [child.of(do)[-1] for child in children]

    def make(self, kind: str) -> str:
        where = self.meeting()
        each = [{"kind": kind, "where": where, "rank": i, "n": 3} for i in range(3)]
        assert [answer["sum"] for answer in self.do(self.children, "make", each)] == [3.0] * 3
        return where


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Job() as job:
        yield Ranks(job)


def needs(kind: str) -> None:
    if kind == "native" and not hasattr(dist.ProcessGroup, "reconfigure"):
        pytest.skip("needs PyTorch >= 2.14, whose groups can be reconfigured")


@pytest.mark.parametrize("kind", KINDS)
def test_no_wait_for_a_stopped_peer_after_an_abort(ranks: Ranks, kind: str) -> None:
    needs(kind)
    where = ranks.make(kind)
    survivor, stopped, other = ranks.children
    ranks.do(ranks.children, "train")
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        ranks.do([survivor], "stuck")
        (aborted,) = ranks.do([survivor], "abort")
        assert aborted["ms"] < 1000 * within(ABORT_S)
        (mine,) = ranks.do([survivor], "ended")
        took = {name: end["at"] - aborted["began"] for name, end in mine["ends"].items()}
        print(f"{kind}: abort {aborted['ms']:.1f} ms; ms until the waits returned:", end=" ")
        print({name: round(1000 * seconds, 1) for name, seconds in took.items()})
        assert mine["running"] == []
        assert set(took) == {"train", "allreduce", "large allreduce", "barrier", "recv", "future"}
        assert max(took.values()) < within(ABORT_S)
        for name, end in mine["ends"].items():
            if kind not in SWALLOWING or name not in ("allreduce", "large allreduce", "future"):
                assert end["error"] is not None, name

        (theirs,) = ranks.do([other], "ended")
        end = theirs["ends"]["train"]
        print(f"{kind}: the other peer noticed after {1000 * (end['at'] - aborted['began']):.0f} ms")
        assert end["error"] is not None
        # This rank waits only for the stopped peer, but its connection to the aborting rank breaks.
        assert end["at"] - aborted["began"] < within(ABORT_S)

        # Nothing waits for operations in flight.
        again = [{"where": where, "rank": i, "n": 2} for i in range(2)]
        answers = ranks.do([survivor, other], "connect", again)
        assert [answer["sum"] for answer in answers] == [2.0, 2.0]
        print(f"{kind}: connected again after {max(answer['ms'] for answer in answers):.1f} ms")
        # An isolated group may have to start a process.
        bound_s = START_TIMEOUT_S if kind == "isolated" else within(NEW_PEERS_S)
        assert max(answer["ms"] for answer in answers) < 1000 * bound_s
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    (late,) = ranks.do([stopped], "ended")
    assert late["running"] == [] and late["ends"]["train"]["error"] is not None
    ranks.do(ranks.children, "shutdown")


@pytest.mark.parametrize(
    ("kind", "drop"),
    [
        ("gloo", True),
        *(pytest.param(kind, False, marks=pytest.mark.slow) for kind in ("gloo", "native", "isolated")),
    ],
)
def test_a_process_ends_at_once_with_an_operation_in_flight(ranks: Ranks, kind: str, drop: bool) -> None:
    """Without an abort, as after an exception in the training loop."""
    needs(kind)
    ranks.make(kind)
    leaver, stopped, other = ranks.children
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        ranks.do([leaver], "leave", [{"drop": drop}])
        leaver.expected_to_live = False
        ranks.job.wait(lambda: leaver.returncode is not None, EXIT_S, "the process ends")
        # At exit the interpreter ends a thread that waits in an operation of PyTorch's own group. The
        # thread's stack has C++ frames, and C++ sometimes aborts the process then.
        assert leaver.returncode in ((0, -signal.SIGABRT) if kind == "native" else (0,)), ranks.job.report()
        print(f"{kind}: the process ended after {time.monotonic() - began:.2f} s")
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    ranks.replace(leaver)
    ranks.do([stopped, other], "shutdown")
