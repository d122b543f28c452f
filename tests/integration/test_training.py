"""A small training loop with a real lighthouse, and all kinds of events in a job."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Callable, Iterator, Optional

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore

from tests.integration.cluster import DEADLINE, Cluster, Gate, Rank, results
from tests.promises import ABORT_S, KILL_S, within
from torchft._manager.quorum.rounds import Round
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.client import sources
from torchft.checkpointing.pg_transport import PGTransport
from torchft.checkpointing.source import server
from torchft.coordination import LighthouseServer
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo
from torchft.process_group._gloo import reaper

STEPS = 10


@dataclass
class Loop:
    """Trains a vector by ``weights += average of (group + 1)``, and records the steps of each rank."""

    steps: int = STEPS
    start_with: int = 1  # number of groups that must be healthy before the first step
    settings: dict[str, Any] = field(default_factory=dict)
    # Called at the start of each step, by (group, step, incarnation)
    events: dict[tuple[int, int, int], Callable[[Rank], None]] = field(default_factory=dict)
    lives: Counter[tuple[int, int]] = field(default_factory=Counter)  # by group and rank: its starts
    load: Optional[Callable[[int, torch.Tensor, dict[str, Any]], None]] = None
    history: dict[tuple[int, int], list[tuple[int, bool, int]]] = field(default_factory=dict)
    errors: dict[int, list[str]] = field(default_factory=dict)
    # The step at which each round of the loop began.
    begun: dict[int, list[int]] = field(default_factory=dict)

    def __call__(self, rank: Rank) -> list[float]:
        life = self.lives[rank.group, rank.rank]
        self.lives[rank.group, rank.rank] += 1
        weights = torch.full((4,), float(rank.group))  # differ until init_sync

        def load(state: dict[str, Any]) -> None:
            if self.load is not None:
                self.load(rank.group, weights, state)
            weights.copy_(state["weights"])

        manager = rank.start_manager(
            load_state_dict=load, state_dict=lambda: {"weights": weights}, **self.settings
        )
        log = self.history.setdefault((rank.group, rank.rank), [])
        manager.register_commit_hook(lambda *decision: log.append(decision))
        rank.cluster.wait_for_healthy(self.start_with if life == 0 else 1)
        while manager.current_step() < self.steps:
            self.begun.setdefault(rank.group, []).append(manager.current_step())
            event = self.events.get((rank.group, manager.current_step(), life))
            if event is not None:
                event(rank)
                if rank.crashed:
                    return []
            manager.start_quorum()
            gradient = torch.full((4,), float(rank.group + 1))
            manager.allreduce(gradient).wait()
            if manager.should_commit():
                weights += gradient
            elif (error := manager.errored()) is not None:
                self.errors.setdefault(rank.group, []).append(str(error.original_exception))
        return weights.tolist()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as built:
        yield built


@pytest.mark.parametrize("joining", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_up_to_date_groups_are_additional_sources(monkeypatch: pytest.MonkeyPatch, joining: int) -> None:
    """Each group that joins later is assigned one of two sources, and both serve a part of the state."""
    monkeypatch.setattr(sources, "_HELP_AFTER", 0.0)
    served: dict[int, int] = {}
    await_end = server._Handler._await_end

    def note(self: Any, grant: Any) -> None:
        try:
            await_end(self, grant)
        finally:
            served[self.server.server_port] = grant.served

    monkeypatch.setattr(server._Handler, "_await_end", note)
    transports: list[HTTPTransport[Any]] = []

    def train(rank: Rank) -> int:
        weights = torch.full((2 << 20,), 1.0)
        # slow enough for the additional source to serve its share
        transports.append(HTTPTransport(DEADLINE, 0, bandwidth_limit=16 << 20))
        manager = rank.start_manager(
            load_state_dict=lambda state: weights.copy_(state["w"]),
            state_dict=lambda: {"w": weights},
            checkpoint_transport=transports[-1],
        )
        rank.cluster.wait_for_healthy(2)
        while manager.current_step() < 6:
            if manager.current_step() == 3:
                later.open()
                rank.cluster.wait_for_healthy(2 + joining)
            manager.start_quorum()
            gradient = torch.ones(2 << 20)
            manager.allreduce(gradient).wait()
            if manager.should_commit():
                weights += gradient
        assert rank.group < 2 or manager.recovery_seconds()["transfer"] > 0
        return int(weights.sum())

    later = Gate()
    # On a busy machine a quorum may be late, and groups must not continue without the others.
    with Cluster(min_replicas=2, join_timeout_ms=30_000, heartbeat_timeout_ms=10_000) as cluster:
        first = [cluster.start(train, group=group) for group in range(2)]
        cluster.wait(later)
        sums = results(*first, *(cluster.start(train, group=2 + i) for i in range(joining)))
    assert len(set(sums)) == 1
    ports = [transport._server.server_port for transport in transports[:2]]
    assert all(served.get(port, 0) > 0 for port in ports), "both served a part"


def test_init_sync_makes_groups_equal() -> None:
    with Cluster(min_replicas=3) as cluster:
        loop = Loop()
        a, b, c = results(*(cluster.start(loop, group=group) for group in range(3)))
    assert a == b == c
    # step 0: the gradient of the group whose weights all take over, divided by three; then the average of 1,
    # 2 and 3
    assert loop.history[0, 0] == [(step, True, 3) for step in range(STEPS)]


def test_without_init_sync_all_groups_participate_from_the_start() -> None:
    with Cluster(min_replicas=2) as cluster:
        a, b = results(
            *(cluster.start(Loop(settings={"init_sync": False}), group=group) for group in range(2))
        )
    assert a == [STEPS * 1.5] * 4 and b == [1 + STEPS * 1.5] * 4


@pytest.mark.parametrize("use_async_quorum", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_crash_and_heal(use_async_quorum: bool, world_size: int) -> None:
    restart = Gate()
    with Cluster() as cluster:

        def crash(rank: Rank) -> None:
            rank.crash()
            restart.open()

        loop = Loop(start_with=2, settings={"use_async_quorum": use_async_quorum})
        loop.events[1, 3, 0] = crash
        loop.events[0, 6, 0] = lambda rank: cluster.wait_for_another()  # the restarted group
        first = cluster.start(loop, group=0, world_size=world_size)
        second = cluster.start(loop, group=1, world_size=world_size)
        cluster.wait(restart)
        results(second)
        third = cluster.start(loop, group=1, world_size=world_size)
        ends = results(first, third)
    for rank in range(world_size):
        assert ends[rank] == ends[world_size + rank]
        lost = [step for step, committed, _ in loop.history[0, rank] if not committed]
        assert len(lost) <= 1, f"the survivor lost steps {lost}"
    if world_size == 1:
        # The second incarnation of group 1 begins at the survivor's step, not at 0
        assert [step for step, _, _ in loop.history[1, 0]][3] >= 3


@pytest.mark.parametrize("settings", [{}, {"use_async_quorum": False}])
def test_the_first_quorum_comes_before_the_first_forward_pass(
    cluster: Cluster, settings: dict[str, Any]
) -> None:
    known: dict[int, bool] = {}

    def train(rank: Rank) -> list[float]:
        weights = nn.Parameter(torch.full((4,), float(rank.group)))
        manager = rank.start_manager(
            load_state_dict=lambda state: weights.data.copy_(state["weights"]),
            state_dict=lambda: {"weights": weights.data},
            **settings,
        )
        optimizer = OptimizerWrapper(manager, torch.optim.SGD([weights], lr=1.0))
        while manager.current_step() < 3 * STEPS:
            if rank.group == 0 and manager.current_step() == 3:
                later.open()
                rank.cluster.wait_for_another()
            optimizer.zero_grad()
            if rank.group not in known:  # the forward pass would be here
                assert manager._round is not None
                known[rank.group] = manager._round._answered.is_set()
            weights.grad = torch.ones(4)
            manager.allreduce(weights.grad).wait()
            optimizer.step()
        return weights.tolist()

    later = Gate()
    first = cluster.start(train, group=0)
    cluster.wait(later)
    one, other = results(first, cluster.start(train, group=1))
    assert known == {0: True, 1: True} and one == other


@pytest.mark.parametrize("kind", [pytest.param("sync", marks=pytest.mark.slow), "async", "along", "pg"])
def test_the_functions_of_the_state_run_on_the_training_thread(kind: str) -> None:
    """Groups heal at step 0, and in a later step. FSDP2's state_dict, for one, works on no other thread."""
    threads: dict[str, set[threading.Thread]] = {"read": set(), "load": set(), "train": set()}

    def train(rank: Rank) -> list[float]:
        weights = nn.Parameter(torch.full((4,), float(rank.group)))
        buffer = torch.tensor([float(rank.group)])

        def read() -> dict[str, Any]:
            threads["read"].add(threading.current_thread())
            where.append((rank.group, asked[rank.group]))
            return {"weights": weights.data, "buffer": buffer}

        def load(state: dict[str, Any]) -> None:
            threads["load"].add(threading.current_thread())
            weights.data.copy_(state["weights"])
            buffer.copy_(state["buffer"])

        settings: dict[str, Any] = {"use_async_quorum": kind != "sync", "heal_along": kind == "along"}
        if kind == "pg":
            settings["checkpoint_transport"] = PGTransport(rank.pg, DEADLINE, torch.device("cpu"))
        manager = rank.start_manager(load_state_dict=load, state_dict=read, **settings)
        optimizer = OptimizerWrapper(manager, torch.optim.SGD([weights], lr=1.0))
        threads["train"].add(threading.current_thread())
        rank.cluster.wait_for_healthy(2 if rank.group < 2 else 1)
        last: Optional[int] = None  # some steps after the one in which all three count
        while last is None or manager.current_step() < last:
            if rank.group == 0 and manager.current_step() == 3:
                later.open()
                rank.cluster.wait_for_healthy(3)
            asked[rank.group] = True
            optimizer.zero_grad()
            asked[rank.group] = False
            weights.grad = torch.full((4,), float(rank.group))
            manager.allreduce(weights.grad).wait()
            before = manager.current_step()
            optimizer.step()
            if last is None and manager.current_step() > before and manager.num_participants() == 3:
                last = manager.current_step() + STEPS
        return [*weights.tolist(), buffer.item()]

    later, asked, where = Gate(), {}, []
    with Cluster(min_replicas=2) as cluster:
        first = [cluster.start(train, group=group) for group in range(2)]
        cluster.wait(later)
        ended = results(*first, cluster.start(train, group=2))
    assert ended[0] == ended[1] == ended[2]
    assert threads["read"] and threads["load"]
    assert threads["read"] | threads["load"] <= threads["train"]
    sources = {group for group, _ in where}
    assert {group for group, at_boundary in where if at_boundary} == sources, (
        "the state was read within a step"
    )


def test_two_ranks_a_group_commit_together() -> None:
    with Cluster(min_replicas=2) as cluster:
        loop = Loop()
        ends = results(*(cluster.start(loop, group=group, world_size=2) for group in range(2)))
    # At step 0, rank 0 of all groups took over group 0's weights, and rank 1 those of group 1: the sources
    # alternate
    assert ends[0] == ends[2] and ends[1] == ends[3] and ends[0] != ends[1]


def test_a_rank_that_votes_no_costs_the_other_group_at_most_a_step() -> None:
    """The other group learns it in this step or, since the quorum stands, in the next one."""
    with Cluster(min_replicas=2) as cluster:

        def spoil(rank: Rank) -> None:
            if rank.rank == 1 and not spoiled.is_set():
                spoiled.set()
                assert rank.manager is not None
                original = rank.manager.should_commit

                def no(timeout: Any = None) -> bool:
                    rank.manager.should_commit = original  # type: ignore[method-assign,union-attr]
                    rank.manager._errors.lose(RuntimeError("bad gradient"))  # type: ignore[union-attr]
                    return original(timeout)

                rank.manager.should_commit = no  # type: ignore[method-assign]

        spoiled = threading.Event()
        loop = Loop()
        loop.events[1, 4, 0] = spoil
        ends = results(*(cluster.start(loop, group=group, world_size=2) for group in range(2)))
    assert ends[0] == ends[2] and ends[1] == ends[3]
    for rank in range(2):
        assert (4, False, 2) in loop.history[1, rank]
        assert [step for step, committed, _ in loop.history[0, rank] if not committed] in ([], [4], [5])


def test_a_load_that_fails_affects_only_the_healing_group(cluster: Cluster) -> None:
    """The group that cannot load reports an error and does not commit. The source continues, and the
    next heal succeeds.
    """
    attempts: list[int] = []

    def load(group: int, weights: torch.Tensor, state: dict[str, Any]) -> None:
        if group == 1:
            attempts.append(1)
            if len(attempts) == 1:
                raise ValueError("size mismatch for layer.weight")

    loop = Loop(load=load)
    started = Gate()
    loop.events[0, 3, 0] = lambda rank: (started.open(), cluster.wait_for_waiters(1))[0]  # type: ignore[assignment]
    first = cluster.start(loop, group=0)
    cluster.wait(started)
    a, b = results(first, cluster.start(loop, group=1))
    assert a == b
    assert len(attempts) == 2
    assert loop.errors == {1: ["size mismatch for layer.weight"]}
    assert loop.history[1, 0][0] == (4, False, 1)  # the first step that group 0 had not begun
    assert loop.begun[1][:2] == [0, 0]  # after the failure it is still at the step of its own weights
    assert [committed for _, committed, _ in loop.history[0, 0]] == [True] * STEPS


def test_many_survivors_do_not_wait_for_the_join_timeout() -> None:
    """Only the neighbors of a failed group see its connection break. Their abort breaks the
    connections of the others.
    """
    with Cluster(join_timeout_ms=60_000) as cluster:
        loop = Loop(start_with=4)
        committed: dict[int, float] = {}
        crashed: list[float] = []

        def crash(rank: Rank) -> None:
            assert rank.manager is not None
            # The other groups enter the collective of this step and wait for this one.
            rank.manager.start_quorum()
            rank.manager.wait_quorum()
            time.sleep(0.2)
            crashed.append(time.monotonic())
            rank.crash()

        loop.events[3, 4, 0] = crash
        for group in range(3):
            loop.events[group, 6, 0] = lambda rank: committed.setdefault(rank.group, time.monotonic())
        ends = results(*(cluster.start(loop, group=group) for group in range(4)))
    assert ends[0] == ends[1] == ends[2]
    for group in range(3):
        # Both the timeout of the collective and the join timeout are longer.
        assert committed[group] - crashed[0] < within(KILL_S)
        assert (5, True, 3) in loop.history[group, 0]


def test_a_reported_error_does_not_delay_the_peers() -> None:
    with Cluster(min_replicas=2) as cluster:
        loop, spoiled = Loop(), threading.Event()

        def spoil(rank: Rank) -> None:
            if spoiled.is_set():
                return
            spoiled.set()
            assert rank.manager is not None
            start = rank.manager.start_quorum

            def start_and_report(*args: Any, **kwargs: Any) -> None:
                rank.manager.start_quorum = start  # type: ignore[method-assign,union-attr]
                start(*args, **kwargs)
                rank.manager.report_error(RuntimeError("bad batch"))  # type: ignore[union-attr]

            rank.manager.start_quorum = start_and_report  # type: ignore[method-assign]

        loop.events[1, 4, 0] = spoil
        started = time.monotonic()
        a, b = results(*(cluster.start(loop, group=group) for group in range(2)))
        took = time.monotonic() - started
    # the other group has begun the step in the quorum that stands, or knew of the error before
    assert a == b and loop.errors[1] == ["bad batch"] and len(loop.errors.get(0, [])) <= 1
    assert took < DEADLINE.total_seconds() / 2


@pytest.mark.parametrize("votes", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("in_mid_step", [True, False])
def test_a_rank_that_skips_a_batch_and_says_so_ends_the_step_at_once(votes: bool, in_mid_step: bool) -> None:
    """The other groups are in the backward pass then, and wait for its gradients. The lighthouse would look
    for such a rank after five seconds.
    """
    waits, reported = Gate(), [0.0]

    def loop(rank: Rank) -> list[tuple[int, bool, int]]:
        manager = rank.start_manager(init_sync=False)
        rank.cluster.wait_for_healthy(3)
        history, skipped = [], False
        while manager.current_step() < 6:
            manager.start_quorum()
            manager.allreduce(torch.ones(4)).wait()
            if manager.current_step() == 3 and not skipped:
                skipped = True
                if rank.group == 1:
                    if in_mid_step:
                        manager.allreduce(torch.ones(4)).wait()
                    waits.wait()
                    reported[0] = time.monotonic()
                    manager.report_error(ValueError("the loss is not finite"))
                    if not votes:
                        continue
                else:
                    work = manager.allreduce(torch.ones(4))
                    if in_mid_step:
                        work.wait()
                        work = manager.allreduce(torch.ones(4))
                    waits.open()
                    work.wait()
                    assert manager.errored() is not None and time.monotonic() - reported[0] < within(ABORT_S)
            history.append((manager.current_step(), manager.should_commit(), manager.num_participants()))
        return history

    with Cluster(min_replicas=3) as cluster:
        ends = results(*(cluster.start(loop, group=group) for group in range(3)))
    lost = [(3, False, 3)]
    after = [(step, True, 3) for step in range(3, 6)]
    before = [(step, True, 3) for step in range(3)]
    assert ends == [before + (lost if votes or group != 1 else []) + after for group in range(3)]


def test_a_step_that_is_begun_again_is_lost_for_all_groups() -> None:
    """Its collectives would meet later ones of the other group: those of the next one, and of the next
    step.
    """

    def loop(rank: Rank) -> list[tuple[int, Optional[bool], list[float]]]:
        manager = rank.start_manager(init_sync=False)
        rank.cluster.wait_for_healthy(2)
        history: list[tuple[int, Optional[bool], list[float]]] = []
        again = False
        while manager.current_step() < 6:
            manager.start_quorum()
            step = manager.current_step()
            means: list[float] = []
            for value in (step + 0.25, step + 0.5):
                tensor = torch.full((4,), value)
                manager.allreduce(tensor).wait()
                means.append(tensor[0].item())
                if step == 3 and rank.group == 1 and not again:
                    again = True
                    history.append((step, None, means))
                    break
            else:
                history.append((step, manager.should_commit(), means))
        return history

    with Cluster(min_replicas=2) as cluster:
        ends = results(*(cluster.start(loop, group=group) for group in range(2)))
    committed = [(step, True, [step + 0.25, step + 0.5]) for step in range(6)]
    for end, lost in zip(ends, (False, None)):
        assert [attempt[:2] for attempt in end if not attempt[1]] == [(3, lost)]
        assert [attempt for attempt in end if attempt[1]] == committed


def test_late_peer_does_not_write_into_the_next_step() -> None:
    """Group 0 aborts a collective and continues with the same memory. Group 1, which is late, must lose the
    step.
    """
    late, ended = Gate(), Gate()

    def loop(rank: Rank) -> list[Any]:
        manager = rank.start_manager(load_state_dict=lambda s: None, state_dict=dict)
        rank.cluster.wait_for_healthy(2)
        buffer = torch.zeros(4)
        while manager.current_step() < 1:
            manager.start_quorum()
            manager.allreduce(buffer).wait()
            manager.should_commit()
        manager.start_quorum()
        manager.wait_quorum()
        if rank.group == 1:
            late.wait()
        else:
            manager._timeout = timedelta(seconds=1)  # of this collective only, which the other group delays
        work = manager.allreduce(buffer.fill_(rank.group + 1))
        succeeded = work.wait()
        committed = manager.should_commit(timeout=DEADLINE)
        if rank.group == 0:
            buffer.fill_(7)  # the next step's gradient
            late.open()
            ended.wait()
        else:
            ended.open()
        return [succeeded, committed, buffer.tolist()]

    with Cluster(min_replicas=2) as cluster:
        early_result, late_result = results(*(cluster.start(loop, group=group) for group in range(2)))
    assert early_result == [False, False, [7.0] * 4]
    assert not late_result[1]


def test_job_outlives_its_lighthouse() -> None:
    """A restart of the lighthouse takes time, but the job continues in the same quorum."""
    with Cluster(min_replicas=2) as cluster:
        port = int(cluster.lighthouse.address().rsplit(":", 1)[1])
        ids: dict[str, set[int]] = {"before": set(), "after": set()}

        def restart(rank: Rank) -> None:
            assert rank.manager is not None
            ids["before"].add(rank.manager._quorum_id)
            cluster.lighthouse.shutdown()
            cluster.lighthouse = LighthouseServer(bind=f"[::]:{port}", min_replicas=2, join_timeout_ms=30_000)

        def note(rank: Rank) -> None:
            assert rank.manager is not None
            ids["after"].add(rank.manager._quorum_id)

        loop = Loop()
        loop.events[0, 4, 0] = restart
        loop.events[0, 8, 0] = note
        a, b = results(*(cluster.start(loop, group=group) for group in range(2)))
    assert a == b
    assert all(committed for log in loop.history.values() for _, committed, _ in log)
    assert ids["before"] == ids["after"], "all members came back, so they need not connect again"


def test_ranks_that_disagree_on_the_world_size(cluster: Cluster) -> None:
    def loop(rank: Rank) -> None:
        rank.world_size = 2 if rank.rank == 0 else 3
        manager = rank.start_manager(
            load_state_dict=lambda s: None, state_dict=dict, quorum_timeout=timedelta(seconds=5)
        )
        manager.start_quorum()
        manager.wait_quorum()

    futures = cluster.start(loop, group=0, world_size=2)
    wrong = futures[1].exception(timeout=60)
    assert isinstance(wrong, RuntimeError) and re.search(r"3.*2|2.*3", str(wrong)) and "world" in str(wrong)
    assert isinstance(futures[0].exception(timeout=60), (RuntimeError, TimeoutError))


def manager_of(lighthouse_addr: str) -> Manager:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse_addr,
        connect_timeout=timedelta(seconds=1),
    )


def test_a_missing_lighthouse() -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RuntimeError, match=rf"http://localhost:{port}.*1s"):
        manager_of(f"http://localhost:{port}")


def test_address_without_scheme() -> None:
    with pytest.raises(RuntimeError, match=r"localhost:1.*http://"):
        manager_of("localhost:1")


NATIVE = hasattr(dist.ProcessGroup, "reconfigure")


@pytest.mark.skipif(not NATIVE, reason="native groups that can be reconfigured came with PyTorch 2.14")
def test_native_groups() -> None:
    """PyTorch's own groups, which stay the same objects through a crash and a heal."""

    # Native Gloo groups meet in a store that all of them share.
    master = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def make(group: int) -> Any:
        store = TCPStore("localhost", master.port, is_master=False, wait_for_workers=False)
        backend = dist.ProcessGroupGloo(store, group, 2, timeout=DEADLINE, enable_reconfigure=True)
        pg = dist.ProcessGroup(store, group, 2)
        pg._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        return pg

    restart = Gate()

    def crash(rank: Rank) -> None:
        rank.crash()
        restart.open()

    with Cluster(make_pg=make) as cluster:
        loop = Loop(start_with=2)
        loop.events[1, 3, 0] = crash
        loop.events[0, 6, 0] = lambda rank: cluster.wait_for_another()
        first = cluster.start(loop, group=0)
        second = cluster.start(loop, group=1)
        cluster.wait(restart)
        results(second)
        a, b = results(first, cluster.start(loop, group=1))
    assert a == b


def test_shutdown_ends_a_quorum_that_waits(cluster: Cluster) -> None:
    """The other rank of the group never requests a quorum. Shutting down does not wait for the quorum's
    timeout.
    """

    def loop(rank: Rank) -> None:
        manager = rank.start_manager(load_state_dict=lambda s: None, state_dict=dict)
        if rank.rank == 0:
            return
        begin, asked = manager._rounds.begin, Gate()  # type: ignore[union-attr]

        def begun(*request: Any) -> Round:
            round = begin(*request)
            asked.open()
            return round

        manager._rounds.begin = begun  # type: ignore[method-assign, union-attr]
        other = threading.Thread(target=lambda: (asked.wait(), manager.shutdown()))
        other.start()
        manager.start_quorum()  # waits for the answer
        with pytest.raises((RuntimeError, TimeoutError)):
            manager.wait_quorum()
        other.join()

    started = time.monotonic()
    results(cluster.start(loop, group=0, world_size=2))
    assert time.monotonic() - started < DEADLINE.total_seconds() / 2


def test_shutdown_leaves_nothing() -> None:
    # Gloo operations of other tests may still sleep until their timeout, if their group failed and they were
    # not woken.
    assert reaper.drain(timeout_sec=60)
    before = {thread.name for thread in threading.enumerate()}
    with Cluster(min_replicas=2) as cluster:
        results(*(cluster.start(Loop(steps=2), group=group) for group in range(2)))
    assert reaper.drain(timeout_sec=10)
    deadline = time.monotonic() + 10  # a thread that looks after cut connections ends within a second
    while left := {t.name for t in threading.enumerate()} - before - {"torchft_timeouts", "torchft_hand_off"}:
        assert time.monotonic() < deadline, f"threads that outlived their Manager: {left}"
        time.sleep(0.02)
