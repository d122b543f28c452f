"""Two ranks, each in a separate process: collectives, a killed peer, an abort, new peers.

Before NCCL 2.30, its kinds need two devices; Gloo's ranks share one.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Iterator

import pytest
import torch
from processes import START_TIMEOUT_S, Child, Job, ours_path
from torch.distributed import TCPStore

from tests.gpu import two_ranks
from tests.gpu.device import settled_mb, wait_until
from tests.gpu.rank import TIMEOUT
from tests.promises import ABORT_S, within

RANK = Path(__file__).resolve().parent / "rank.py"
ANSWER_S = 90
TWO = pytest.mark.nccl_ranks(2)
KINDS = [
    "gloo",
    "isolated gloo",
    pytest.param("nccl", marks=TWO),
    pytest.param("isolated nccl", marks=TWO),
]
_meetings = itertools.count()

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("fork_server")]


class Ranks:
    """Two processes, each with a rank of a group, on different devices if there are two."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.job = Job()
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def __enter__(self) -> Ranks:
        self.children = [self._start(i) for i in range(2)]
        self._wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.job.__exit__(kind, value, trace)

    def _start(self, i: int) -> Child:
        device = i % max(1, torch.cuda.device_count())
        return self.job.python(f"rank{i}", RANK, self.kind, device, path=ours_path())

    def _wait(self) -> None:
        self.job.wait(
            lambda: all(child.of("imported") for child in self.children), START_TIMEOUT_S, "ranks start"
        )

    def replace(self, i: int) -> None:
        self.children[i] = self._start(i)
        self._wait()

    def do(self, ranks: list[int], do: str, each: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        children = [self.children[i] for i in ranks]
        before = [len(child.of(do)) for child in children]
        for i, child in enumerate(children):
            child.send(do=do, **(each[i] if each else {}))
        self.job.wait(
            lambda: all(len(child.of(do)) > n for child, n in zip(children, before)),
            ANSWER_S,
            f"{do} is done",
        )
        return [child.of(do)[-1] for child in children]

    def connect(self, ranks: list[int]) -> None:
        """Connects the ranks with each other, in this order, and compares the results of a reduction."""
        where, n = f"localhost:{self.store.port}/ranks/{next(_meetings)}", len(ranks)
        answers = self.do(ranks, "connect", [{"where": where, "rank": i, "n": n} for i in range(n)])
        assert [answer["sum"] for answer in answers] == [[n * (n + 1) / 2]] * n
        print(f"{self.kind}: {n} peers after {max(answer['ms'] for answer in answers):.0f} ms")


@pytest.fixture(scope="module", params=KINDS)
def ranks(request: pytest.FixtureRequest, fork_server: None) -> Iterator[Ranks]:
    with Ranks(request.param) as ranks:
        yield ranks


def test_collectives_are_ordered_behind_the_stream(ranks: Ranks) -> None:
    ranks.connect([0, 1])
    answers = ranks.do([0, 1], "collectives", [{"rank": 0}, {"rank": 1}])
    for rank, got in enumerate(answers):
        assert got["broadcast"] == [2] * 4
        assert got["allgather"] == [[1], [2]]
        assert got["maximum"] == [2] * 4
        if "nccl" in ranks.kind:
            assert got["allgather_into_tensor_coalesced"] == [1] * 4 + [2] * 4
            for name in ("reduce_scatter", "reduce_scatter_tensor_coalesced"):
                assert got[name] == [[3, 7][rank]] * 4, name
            assert got["alltoall_base"] == [[1.0] * 4 + [2.0] * 4, [3.0] * 4 + [4.0] * 4][rank]
            assert rank == 0 or got["recv"] == [7] * 4


def test_a_quantized_allreduce(ranks: Ranks) -> None:
    ranks.connect([0, 1])
    answers = ranks.do([0, 1], "quantized", [{"rank": 0}, {"rank": 1}])
    assert [answer["sum"] for answer in answers] == [[3.0], [3.0]]


def test_a_state_goes_from_one_rank_to_the_other(ranks: Ranks) -> None:
    """PGTransport over the group; `tests/late/test_transports.py` does the same on the test accelerator."""
    ranks.connect([0, 1])
    _, received = ranks.do([0, 1], "heal", [{"rank": 0}, {"rank": 1}])
    two_ranks.check({name: received[name] for name in ("values", "elsewhere", "step")})


def test_a_peer_is_killed_in_the_middle(ranks: Ranks) -> None:
    """The peer is killed while its device is busy. The survivor gets an error, continues alone, and then with
    another process as its peer.
    """
    ranks.connect([0, 1])
    ranks.do([0, 1], "begin", [{}, {"busy_s": 20.0}])
    killed = time.monotonic()
    ranks.children[1].kill()
    (end,) = ranks.do([0], "ended")
    assert not end["running"] and end["error"] is not None
    seconds = end["at"] - killed
    print(f"{ranks.kind}: the survivor has its error after {seconds:.2f} s: {end['error']}")
    # NCCL does not notice the kill, so the operation ends at its deadline.
    assert seconds < within(ABORT_S) + (TIMEOUT.total_seconds() if "nccl" in ranks.kind else 0)
    assert ranks.do([0], "usable")[0]["sum"] == 4
    ranks.connect([0])
    ranks.replace(1)
    ranks.connect([0, 1])


def test_an_abort_ends_the_wait_for_a_peer(ranks: Ranks) -> None:
    ranks.connect([0, 1])
    for _ in range(3):
        ranks.do([0], "begin")
        time.sleep(0.3)  # until the device waits for the peer, too
        (aborted,) = ranks.do([0], "abort")
        assert aborted["ms"] < 1000 * within(ABORT_S)
        (end,) = ranks.do([0], "ended")
        assert not end["running"] and end["error"] is not None
        print(
            f"{ranks.kind}: abort {aborted['ms']:.1f} ms, the wait ended after "
            f"{end['at'] - aborted['began']:.3f} s"
        )
        assert end["at"] - aborted["began"] < within(ABORT_S)
        assert ranks.do([0], "usable")[0]["sum"] == 4
        ranks.connect([0, 1])


def test_peers_join_and_leave(ranks: Ranks) -> None:
    """Ten reconfigurations, in both orders of the ranks and alone, leave the used device memory unchanged."""
    for order in ([0, 1], [1, 0], [0], [1], [0, 1]):
        ranks.connect(order)
    before = settled_mb()
    for _ in range(5):
        ranks.connect([1, 0])
        ranks.connect([0, 1])
    wait_until(lambda: settled_mb() < before + 64)  # workers of the previous peers end in the background


def test_a_rank_reduces_while_it_connects_with_another_one(ranks: Ranks) -> None:
    if "isolated" in ranks.kind:
        pytest.skip("its worker has one group; with heal_along all groups connect at once then")
    ranks.connect([0])
    for _ in range(3):
        where = f"localhost:{ranks.store.port}/beside/{next(_meetings)}"
        answers = ranks.do([0, 1], "connect_standby", [{"where": where, "rank": i, "n": 2} for i in range(2)])
        assert [answer["sum"] for answer in answers] == [[3.0], [3.0]]
        assert answers[0]["steps"] > 10
        print(f"{ranks.kind}: {answers[0]}")
        ranks.connect([0])
    ranks.connect([0, 1])
