"""LocalSGD and DiLoCo of real groups; all numbers are compared with the papers' algorithms
(`local_sgd_papers.py`).
"""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import numpy as np
import pytest
import torch
from torch import nn

from tests.bounded import often
from tests.integration import local_sgd_papers as papers
from tests.integration.cluster import Cluster, Gate, Rank, results
from tests.integration.local_sgd_papers import Attempt, Settings, batch, two_layers
from torchft.ddp import DistributedDataParallel
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager

SIZES = [3, 4, 5, 4, 2]  # sizes of the layers of the largest model


def start_parameters(fragments: int) -> papers.Parameters:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((SIZES[i + 1], SIZES[i])) * 0.5 for i in range(fragments)]


class Model(nn.Module):
    """The papers' model in PyTorch, in double precision; each layer is a fragment."""

    def __init__(self, fragments: int) -> None:
        super().__init__()
        start = start_parameters(fragments)
        self.layers = nn.ModuleList([nn.Linear(w.shape[1], w.shape[0], bias=False).double() for w in start])
        for layer, w in zip(self.layers, start):
            layer.weight = nn.Parameter(torch.from_numpy(w.copy()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def numbers(self) -> papers.Parameters:
        return [layer.weight.detach().numpy().copy() for layer in self.layers]


class Killed(Exception):
    """Ends the loop of a group that has closed all connections, as if its machine had lost power."""


@dataclass
class Ran:
    """A group's final state, and the outcome of its rounds."""

    local: papers.Parameters
    theta: papers.Parameters
    rounds: list[tuple[int, bool, int]]  # step, committed, participants
    killed: bool


@dataclass
class Training:
    """The loop of each group.

    Attributes:
        fault: called with (rank, where, attempt) before and after the calls to the Manager in a round; raises
            Killed in a group that is to fail. `where` is "quorum", "send", "sent", "vote", "voted" or
            "inner".
    """

    settings: Settings
    rounds: int
    options: dict[str, Any] = field(default_factory=dict)
    start_with: int = 1
    fault: Callable[[Rank, str, int], None] = lambda rank, where, attempt: None
    local_sgd: bool = False

    def __call__(self, rank: Rank) -> Ran:
        s = self.settings
        model = Model(s.fragments)
        inner = torch.optim.SGD(model.parameters(), lr=s.inner_lr)
        manager = rank.start_manager(
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            use_async_quorum=False,
        )
        log: list[tuple[int, bool, int]] = []
        manager.register_commit_hook(lambda *decision: log.append(decision))
        attempt = self._watch(rank, manager, log)
        algorithm, theta = self._algorithm(manager, model, inner)
        rank.cluster.wait_for_healthy(self.start_with)
        killed, seen, k = False, 0, 0
        with algorithm:
            while manager.current_step() < self.rounds:
                if len(log) != seen:
                    seen, k = len(log), 0
                x, target = batch(rank.group, manager.current_step(), k, SIZES[0], SIZES[s.fragments])
                inner.zero_grad()
                (model(torch.from_numpy(x)) - torch.from_numpy(target)).square().mean().backward()
                k += 1
                try:
                    self.fault(rank, "inner", attempt())
                    inner.step()
                except Killed:
                    killed = True
                    rank.crash()
                    break
        return Ran(model.numbers(), theta(), log, killed)

    def _algorithm(
        self, manager: Manager, model: Model, inner: torch.optim.Optimizer
    ) -> tuple[Any, Callable[[], papers.Parameters]]:
        s = self.settings
        if self.local_sgd:
            return LocalSGD(manager, model, inner, s.period), model.numbers
        outer = [
            torch.optim.SGD(layer.parameters(), lr=s.outer_lr, momentum=s.momentum, nesterov=s.momentum > 0)
            for layer in model.layers
        ]
        diloco = DiLoCo(
            manager,
            list(model.layers),
            inner,
            outer,
            sync_every=s.period * s.fragments,
            fragment_sync_delay=s.delay,
            fragment_update_alpha=s.alpha,
            **self.options,
        )

        def theta() -> papers.Parameters:
            return [f.state_dict()["original_parameters"]["weight"].numpy().copy() for f in diloco._fragments]

        return diloco, theta

    def _watch(self, rank: Rank, manager: Manager, log: list[Any]) -> Callable[[], int]:
        """Calls `fault` around the Manager's calls. Returns the number of this group's present round."""

        def around(name: str, before: str, after: Optional[str]) -> None:
            original = getattr(manager, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                number = len(log)
                self.fault(rank, before, number)
                result = original(*args, **kwargs)
                if after is not None:
                    self.fault(rank, after, number)
                return result

            setattr(manager, name, call)

        around("start_quorum", "quorum", None)
        around("allreduce", "send", "sent")
        around("should_commit", "vote", "voted")
        return lambda: len(log)


def assert_same(found: papers.Parameters, expected: papers.Parameters) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11, err_msg=f"fragment {i}")


def assert_ends(ran: Ran, group: int, reference: papers.DiLoCo) -> None:
    assert_same(ran.theta, reference.theta)
    assert_same(ran.local, reference.local[group])


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (Settings(fragments=1, period=5), {}),
        (Settings(fragments=2, period=4, delay=1), {"use_bucketization": True}),
        (Settings(fragments=4, period=3, delay=1, alpha=0.25), {}),
        (
            Settings(fragments=3, period=2, delay=1, alpha=1.0),
            {"use_bucketization": True, "bucket_cap_mb": 1},
        ),
        # The slow ones differ from those above in numbers only;
        # test_a_group_fails_in_each_phase_of_a_sync_and_returns has a delay of more than one step.
        *(
            pytest.param(settings, {}, marks=pytest.mark.slow)
            for settings in (
                Settings(fragments=1, period=1, momentum=0.0, outer_lr=1.0),
                Settings(fragments=3, period=3, delay=2),
                Settings(fragments=2, period=6, delay=5, alpha=0.5, outer_lr=0.4),
            )
        ),
    ],
    ids=str,
)
def test_diloco_equals_the_papers(settings: Settings, options: dict[str, Any]) -> None:
    """Two groups over hundreds of inner steps. Both have the same global parameters, and their own local
    ones.
    """
    rounds = max(40, -(-200 // settings.period))
    with Cluster(min_replicas=2) as cluster:
        loop = Training(settings, rounds, options)
        ran = results(*(cluster.start(loop, group=group) for group in range(2)))
    reference = papers.DiLoCo(settings, start_parameters(settings.fragments), [0, 1], two_layers)
    assert all(r.rounds == [(i, True, 2) for i in range(rounds)] for r in ran)
    # In the first quorum all groups take over the state of the first one
    reference.attempt(Attempt(senders=(0, 1), joining={1: 0}))
    for _ in range(rounds - 1):
        reference.attempt(Attempt(senders=(0, 1)))
    for group in range(2):
        assert_ends(ran[group], group, reference)


def test_the_reference_moves_against_the_gradient() -> None:
    """Checks the sign in the papers' algorithm by hand: one worker whose loss is theta^2 / 2, two rounds."""
    settings = Settings(fragments=1, period=1, inner_lr=0.1, outer_lr=0.5, momentum=0.9)
    reference = papers.DiLoCo(settings, [np.ones((1, 1))], [0], lambda worker, t, inner, theta: [theta[0]])
    reference.attempt(Attempt(senders=(0,)))
    # inner step: 1 -> 0.9; outer gradient 0.1, velocity 0.1: 1 - 0.5 * (0.1 + 0.9 * 0.1)
    assert reference.theta[0].item() == pytest.approx(0.905)
    reference.attempt(Attempt(senders=(0,)))
    # outer gradient 0.0905, velocity 0.1805: 0.905 - 0.5 * (0.0905 + 0.16245)
    assert reference.theta[0].item() == pytest.approx(0.778525)


@pytest.mark.parametrize("period", [1, 4])
def test_local_sgd_equals_the_paper(period: int) -> None:
    settings = Settings(fragments=3, period=period)
    rounds = max(20, often(200) // period)
    with Cluster(min_replicas=2) as cluster:
        loop = Training(settings, rounds, local_sgd=True)
        ran = results(*(cluster.start(loop, group=group) for group in range(2)))
    first = first_round_of_copies(settings)
    expected = papers.local_sgd(first, [0, 1], shifted(1), rounds - 1, period, settings.inner_lr)
    for r in ran:
        assert r.rounds == [(i, True, 2) for i in range(rounds)]
        assert_same(r.local, expected)


def first_round_of_copies(settings: Settings) -> papers.Parameters:
    """Before the first average all groups take over group 0's parameters (init_sync), so it averages group
    0's change only.
    """
    start = start_parameters(settings.fragments)
    return papers.local_sgd(start, [0], two_layers, 1, settings.period, settings.inner_lr)


def shifted(rounds: int) -> papers.Gradient:
    return lambda worker, t, inner, theta: two_layers(worker, t + rounds, inner, theta)


# Failures


@dataclass
class Kill:
    """Group 1 fails at a given point of a round, and returns after group 0 has done some rounds alone."""

    where: str
    attempt: int
    back_at: int  # round of group 0
    failed_group: Gate = field(default_factory=Gate)
    back: Gate = field(default_factory=Gate)
    asked: threading.Event = field(default_factory=threading.Event)

    def __call__(self, rank: Rank, where: str, attempt: int) -> None:
        if rank.group == 1 and not self.asked.is_set() and (where, attempt) == (self.where, self.attempt):
            self.asked.set()
            raise Killed
        if (
            rank.group == 0
            and where == "quorum"
            and self.failed_group._event.is_set()
            and attempt == self.back_at
        ):
            self.back.open()
            rank.cluster.wait_for_waiters(1)  # so that the restarted group is in this quorum


def run_with_kill(settings: Settings, kill: Kill, rounds: int) -> tuple[Ran, Ran, Ran]:
    """Returns the results of group 0 and of both incarnations of group 1."""
    loop = Training(settings, rounds, start_with=2, fault=kill)
    again = Training(settings, rounds)
    with Cluster() as cluster:
        first: list[Future[Ran]] = cluster.start(loop, group=0)
        second = cluster.start(loop, group=1)
        (failed_group,) = results(second)
        assert failed_group.killed
        kill.failed_group.open()
        kill.back.wait()  # not cluster.wait, because a loop has ended already
        survivor, healed = results(first, cluster.start(again, group=1))
    return survivor, failed_group, healed


def replay(settings: Settings, survivor: Ran, kill: Kill) -> papers.DiLoCo:
    """Runs the reference algorithm, given the rounds that group 0 committed and their numbers of groups."""
    reference = papers.DiLoCo(settings, start_parameters(settings.fragments), [0, 1], two_layers)
    for number, (_, committed, participants) in enumerate(survivor.rounds):
        fails = number == kill.attempt
        together = participants == 2 and committed
        joins = {1: 0} if number == 0 or (together and 1 not in reference.local) else {}
        reference.attempt(
            Attempt(
                senders=(0, 1) if together else (0,),
                committed=committed,
                joining=joins,
                failed=(1,) if fails else (),
            )
        )
    return reference


PHASES = [
    ("inner", 0),  # in its inner steps: the next quorum forms without it
    ("quorum", 0),
    ("send", 1),  # in the quorum, but never sends: the others lose this round
    ("sent", None),  # its data may or may not have been sent completely
    ("vote", None),
    ("voted", 0),
]


# A sync has the same phases without a delay. All but one are slow then; the phases with a delay cover them.
@pytest.mark.parametrize(
    ("where", "lost", "delay"),
    [
        *((*phase, 2) for phase in PHASES),
        ("send", 1, 0),
        *(pytest.param(*phase, 0, marks=pytest.mark.slow) for phase in PHASES if phase[0] != "send"),
    ],
)
def test_a_group_fails_in_each_phase_of_a_sync_and_returns(
    where: str, lost: Optional[int], delay: int
) -> None:
    settings = Settings(fragments=2, period=3, delay=delay, alpha=0.25 if delay else 0.0)
    kill = Kill(where, attempt=5, back_at=10)
    survivor, failed_group, healed = run_with_kill(settings, kill, rounds=20)
    failed = [number for number, (_, committed, _) in enumerate(survivor.rounds) if not committed]
    assert set(failed) <= {5}, f"rounds {failed} were lost, the group failed in round 5"
    assert lost is None or len(failed) == lost
    assert [participants for _, _, participants in survivor.rounds[:5]] == [2] * 5
    assert survivor.rounds[10:][0][2] == 2 and {p for _, _, p in survivor.rounds[6:10]} == {1}
    reference = replay(settings, survivor, kill)
    assert_ends(survivor, 0, reference)
    assert_ends(healed, 1, reference)
    # The failed group had the same global parameters as the others after its last round
    assert [r[:2] for r in failed_group.rounds] == [(i, True) for i in range(len(failed_group.rounds))]


@pytest.mark.parametrize("delay", [0, 1])
def test_a_group_joins_in_the_middle(delay: int) -> None:
    """The third group receives fragments, backups and the outer momentum. From then on the reference
    has three workers.
    """
    settings = Settings(fragments=3, period=2, delay=delay, alpha=0.5 if delay else 0.0)
    ready, join_at, rounds = Gate(), 7, 20

    def fault(rank: Rank, where: str, attempt: int) -> None:
        if where == "quorum" and attempt == join_at and rank.group == 0:
            ready.open()
            rank.cluster.wait_for_waiters(2)  # group 1, which is in this round already, and the new one
        if where == "quorum" and attempt == join_at and rank.group == 1:
            ready.wait()

    with Cluster(min_replicas=2, join_timeout_ms=60_000) as cluster:  # no quorum without group 0
        loop = Training(settings, rounds, start_with=2, fault=fault)
        first = [cluster.start(loop, group=group) for group in range(2)]
        cluster.wait(ready)
        ran = results(*first, cluster.start(Training(settings, rounds), group=2))
    assert [p for _, _, p in ran[0].rounds] == [2] * join_at + [3] * (rounds - join_at)
    # The quorum chooses the source of the new group
    for source in (0, 1):
        reference = papers.DiLoCo(settings, start_parameters(settings.fragments), [0, 1], two_layers)
        for number in range(rounds):
            senders = (0, 1) if number < join_at else (0, 1, 2)
            joining = {1: 0} if number == 0 else {2: source} if number == join_at else {}
            reference.attempt(Attempt(senders=senders, joining=joining))
        if np.allclose(reference.theta[0], ran[0].theta[0], rtol=0, atol=1e-11):
            break
    for group in range(3):
        assert_ends(ran[group], group, reference)


def test_one_group_is_a_synchronization_ahead_when_another_fails() -> None:
    """Two synchronizations are in progress: group 0 has voted for one and requests the next, group 1 fails
    before its vote.
    """
    settings = Settings(fragments=2, period=2, delay=1)
    ahead = Gate()

    @dataclass
    class Ahead(Kill):
        def __call__(self, rank: Rank, where: str, attempt: int) -> None:
            if rank.group == 0 and where == "quorum" and attempt == 6:
                ahead.open()
            if rank.group == 1 and not self.asked.is_set() and (where, attempt) == ("vote", 5):
                ahead.wait()
            super().__call__(rank, where, attempt)

    kill = Ahead("vote", attempt=5, back_at=10)
    survivor, failed_group, healed = run_with_kill(settings, kill, rounds=16)
    # Round 5 was complete for group 0.
    assert [committed for _, committed, _ in survivor.rounds] == [True] * 16
    assert len(failed_group.rounds) == 5
    reference = replay(settings, survivor, kill)
    assert_ends(survivor, 0, reference)
    assert_ends(healed, 1, reference)


@pytest.mark.parametrize("delay", [0, 2])
def test_a_round_that_one_group_votes_against_is_lost_for_that_group_only(delay: int) -> None:
    """It votes no after the average was complete, so it is behind and heals."""
    settings = Settings(fragments=2, period=3, delay=delay)
    spoiled = threading.Event()

    def fault(rank: Rank, where: str, attempt: int) -> None:
        if rank.group == 1 and where == "vote" and attempt == 4 and not spoiled.is_set():
            spoiled.set()
            assert rank.manager is not None
            rank.manager._end_collectives()
            rank.manager._errors.keep(RuntimeError("bad batch"))

    with Cluster(min_replicas=2) as cluster:
        loop = Training(settings, 12, start_with=2, fault=fault)
        a, b = results(*(cluster.start(loop, group=group) for group in range(2)))
    assert [committed for _, committed, _ in a.rounds] == [True] * 12
    assert (4, False, 2) in b.rounds
    reference = papers.DiLoCo(settings, start_parameters(settings.fragments), [0, 1], two_layers)
    for number in range(12):
        # in round 5 group 1 is behind, and begins as a copy of group 0
        reference.attempt(Attempt(senders=(0, 1), joining={1: 0} if number in (0, 5) else {}))
    assert_ends(a, 0, reference)
    assert_ends(b, 1, reference)


def test_groups_with_other_models_get_an_error_before_tensors_are_sent() -> None:
    """The lighthouse refuses the group that joins a running job. The running group loses no step."""
    running, refused = Gate(), Gate()

    def fault(rank: Rank, where: str, attempt: int) -> None:
        if where == "quorum" and attempt == 3:
            running.open()
            refused.wait()

    with Cluster() as cluster:
        first = cluster.start(Training(Settings(fragments=2, period=2), 12, fault=fault), group=0)
        cluster.wait(running)
        (other,) = cluster.start(Training(Settings(fragments=3, period=2), 12), group=1)
        error = other.exception(timeout=60)
        refused.open()
        cluster.ranks[1].close()
        (ran,) = results(first)
    assert isinstance(error, ValueError)
    assert re.search("member group_1:.* reduces other tensors than member group_0:", str(error))
    assert "here model_fragments[2]: weight float64[4, 5]" in str(error)
    assert all(committed for _, committed, _ in ran.rounds)


def metric(manager: Manager, name: str) -> float:
    """Returns a counter from /metrics of the group's manager server."""
    assert manager._manager is not None
    with urllib.request.urlopen(f"{manager._manager.address()}/metrics", timeout=10) as response:
        text = response.read().decode()
    (found,) = re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)
    return float(found)


@pytest.mark.parametrize("diloco", [False, True])
def test_an_average_with_nan_is_counted_in_the_metrics_of_every_group(diloco: bool) -> None:
    """One group spoils the second of three synchronizations with NaN. All groups use the average, and report
    it.
    """
    looked = threading.Barrier(2)

    def train(rank: Rank) -> list[float]:
        model = nn.Linear(2, 1, bias=False)
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        manager = rank.start_manager(
            load_state_dict=model.load_state_dict, state_dict=model.state_dict, use_async_quorum=False
        )
        rank.cluster.wait_for_healthy(2)
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        algorithm = (
            DiLoCo(manager, [model], inner, outer, 1) if diloco else LocalSGD(manager, model, inner, 1)
        )
        seen = []
        with algorithm:
            for sync in range(3):
                model.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                with torch.no_grad():
                    model.weight.fill_(float("nan") if sync == 1 and rank.group == 1 else 1.0)
                inner.step()
                assert manager.current_step() == sync + 1
                seen.append(algorithm.nonfinite_syncs)
        deadline = time.monotonic() + 30  # counters are reported asynchronously
        while (
            metric(manager, "torchft_manager_nonfinite_syncs_total") < seen[-1]
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        looked.wait(60)  # keeps both servers running until both have been read
        return [*seen, metric(manager, "torchft_manager_nonfinite_syncs_total")]

    with Cluster(min_replicas=2) as cluster:
        ran = results(cluster.start(train, group=0), cluster.start(train, group=1))
    # A NaN in DiLoCo's parameters persists, because the next average is computed from differences to them.
    assert ran == [[0, 1, 2, 2.0]] * 2 if diloco else [[0, 1, 1, 1.0]] * 2


@pytest.mark.parametrize("averages", [0, 1])
@pytest.mark.parametrize("diloco", [False, True])
def test_a_model_whose_gradients_are_reduced_in_each_step_is_refused(diloco: bool, averages: int) -> None:
    def train(rank: Rank) -> None:
        net = nn.Linear(2, 1)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        manager = rank.start_manager(
            load_state_dict=net.load_state_dict, state_dict=net.state_dict, use_async_quorum=False
        )
        model = DistributedDataParallel(manager, net)
        outer = torch.optim.SGD(net.parameters(), lr=1.0)
        algorithm = DiLoCo(manager, [net], inner, outer, 1) if diloco else LocalSGD(manager, net, inner, 1)
        with algorithm:
            for _ in range(averages):
                inner.step()
            assert manager.current_step() == averages
            with pytest.raises(RuntimeError, match="backward: no step has begun"):
                model(torch.ones(1, 2)).sum().backward()

    with Cluster() as cluster:
        results(cluster.start(train, group=0))


@pytest.mark.parametrize("use_async_quorum", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_first_average_is_that_of_equal_weights(use_async_quorum: bool) -> None:
    """All groups but one heal before it."""

    def train(rank: Rank) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, rank.group + 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        manager = rank.start_manager(
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            use_async_quorum=use_async_quorum,
        )
        rank.cluster.wait_for_healthy(3)
        seen = []
        with LocalSGD(manager, model, inner, sync_every=1):
            for _ in range(2):
                model.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                inner.step()
                seen.append(model.weight.item())
        assert manager.current_step() == 2
        return seen

    with Cluster(min_replicas=3) as cluster:
        ran = results(*(cluster.start(train, group=group) for group in range(3)))
    assert ran == [ran[0]] * 3 and ran[0] in ([1.0, 1.0], [2.0, 2.0], [3.0, 3.0])


@pytest.mark.parametrize("use_async_quorum", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_heal_that_fails_is_in_no_average(use_async_quorum: bool) -> None:
    """A group that could not load its state sends zeros: the others would get smaller weights."""

    def train(rank: Rank) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 4.0)
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        loads = 0

        def load(state: dict[str, Any]) -> None:
            nonlocal loads
            loads += 1
            if loads == 1:
                raise OSError("a file is missing")
            model.load_state_dict(state)

        manager = rank.start_manager(
            load_state_dict=load, state_dict=model.state_dict, use_async_quorum=use_async_quorum
        )
        rank.cluster.wait_for_healthy(3)
        seen = []
        with LocalSGD(manager, model, inner, sync_every=1):
            while manager.current_step() < 2:
                model.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                inner.step()
                seen.append(model.weight.item())
        return [*seen, float(loads)]

    with Cluster(min_replicas=3) as cluster:
        ran = results(*(cluster.start(train, group=group) for group in range(3)))
    assert [set(seen) for *seen, _ in ran] == [{4.0}] * 3
    assert sorted(loads for *_, loads in ran) == [0.0, 2.0, 2.0]
