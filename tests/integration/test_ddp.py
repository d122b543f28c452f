"""Data parallel training over groups that start at different times."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any, Callable, Iterator
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.integration.cluster import DEADLINE, Cluster, Gate, Rank, results
from torchft._extras import Extras, extras_of
from torchft.ddp import DistributedDataParallel, PureDistributedDataParallel
from torchft.optim import OptimizerWrapper
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroup,
    ProcessGroupBabyGloo,
)

STEPS = 8
JOIN_AT = 3
BATCH = 4
WIDTH = 400  # 640 kB per layer: several buckets


class Model(nn.Module):
    """Layers whose order of registration differs from their order of use."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        if unused:
            self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.middle(F.relu(self.first(x)))))


def batch(step: int, group: int, micro: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * group + micro)
    return torch.randn(BATCH, WIDTH, generator=generator)


def reference(micro_batches: int = 1) -> dict[str, torch.Tensor]:
    """The same training in one plain loop: one group before JOIN_AT, then a step in which the second heals,
    then both.
    """
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        groups = [0, 1] if step > JOIN_AT + 1 else [0]  # group 1 joins in the next step, and heals in it
        optimizer.zero_grad()
        for group in groups:
            for micro in range(micro_batches):
                (model(batch(step, group, micro)).square().mean() / len(groups)).backward()
        optimizer.step()
    return model.state_dict()


class Training:
    """A loop for two groups, the second of which starts when the first is at JOIN_AT."""

    def __init__(
        self, wrap: Callable[[Any, nn.Module], nn.Module], unused: bool = False, micro_batches: int = 1
    ) -> None:
        self.wrap = wrap
        self.unused = unused
        self.micro_batches = micro_batches
        self.join = Gate()
        self.joined = Gate()

    def loop(self, rank: Rank) -> dict[str, torch.Tensor]:
        torch.manual_seed(0 if rank.group == 0 else 99)
        model = Model(self.unused)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        manager = rank.start_manager(
            load_state_dict=lambda s: (
                model.load_state_dict(s["model"]),
                inner.load_state_dict(s["optimizer"]),
            ),
            state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        )
        ddp = self.wrap(manager, model)
        optimizer = OptimizerWrapper(manager, inner)
        if rank.group == 1:
            self.joined.open()
        while manager.current_step() < STEPS:
            step = manager.current_step()
            if rank.group == 0 and step == JOIN_AT:
                self.join.open()
                self.joined.wait()
                # The joining group must be in the next quorum: wait until the lighthouse has its request
                rank.cluster.wait_for_waiters(1)
            optimizer.zero_grad()
            for micro in range(self.micro_batches):
                last = micro == self.micro_batches - 1
                with _sync_only(ddp, last):
                    ddp(batch(step, rank.group, micro)).square().mean().backward()
            optimizer.step()
            assert manager.errored() is None
        assert manager.batches_committed() == JOIN_AT + 2 + 2 * (STEPS - JOIN_AT - 2)
        return {k: v.clone() for k, v in model.state_dict().items()}


def _sync_only(ddp: nn.Module, sync: bool) -> Any:
    return contextlib.nullcontext() if sync else ddp.no_sync()  # type: ignore[operator]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as built:
        yield built


WRAPPERS: dict[str, Callable[[Any, nn.Module], nn.Module]] = {
    "plain": lambda manager, model: DistributedDataParallel(manager, model, bucket_cap_mb=1),
    "one bucket": lambda manager, model: DistributedDataParallel(manager, model, bucket_cap_mb=100),
    "static graph": lambda manager, model: DistributedDataParallel(
        manager, model, bucket_cap_mb=1, static_graph=True
    ),
    "no bucket view": lambda manager, model: DistributedDataParallel(
        manager, model, bucket_cap_mb=1, gradient_as_bucket_view=False
    ),
    "static graph, no bucket view": lambda manager, model: DistributedDataParallel(
        manager, model, bucket_cap_mb=1, static_graph=True, gradient_as_bucket_view=False
    ),
    "pure": PureDistributedDataParallel,
    "upstream": lambda manager, model: upstream(manager, model, bucket_cap_mb=1),
    "upstream, bucket view": lambda manager, model: upstream(
        manager, model, bucket_cap_mb=1, gradient_as_bucket_view=True
    ),
}


def upstream(manager: Any, model: nn.Module, **kwargs: Any) -> nn.Module:
    """PyTorch's own wrapper over a group registered with torch.distributed."""
    group = ManagedProcessGroup(manager).register(f"managed_{next(_names)}")
    # find_unused_parameters: groups that join later must form the same buckets, see torchft.ddp.
    return nn.parallel.DistributedDataParallel(
        model, process_group=group, find_unused_parameters=True, **kwargs
    )


_names = itertools.count()


@pytest.fixture
def world() -> Iterator[None]:
    """Initializes torch.distributed for `register`. All ranks are threads of one process, so they share
    it.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Each kind, and each value of its settings; the other combinations are slow, seconds each.
FEW = {"plain", "static graph, no bucket view", "pure", "upstream, bucket view"}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FEW else pytest.mark.slow) for kind in WRAPPERS]
)
def test_groups_that_start_at_different_times(cluster: Cluster, kind: str) -> None:
    expected = reference()  # before the threads start, because all threads share one random generator
    training = Training(WRAPPERS[kind])
    first = cluster.start(training.loop, group=0)
    cluster.wait(training.join)
    second = cluster.start(training.loop, group=1)
    _assert_equal(expected, *results(first, second))


@pytest.mark.parametrize("kind", ["plain", pytest.param("no bucket view", marks=pytest.mark.slow)])
def test_no_sync(cluster: Cluster, kind: str) -> None:
    expected = reference(micro_batches=2)
    training = Training(WRAPPERS[kind], micro_batches=2)
    first = cluster.start(training.loop, group=0)
    cluster.wait(training.join)
    second = cluster.start(training.loop, group=1)
    _assert_equal(expected, *results(first, second))


def test_unused_parameters(cluster: Cluster) -> None:
    expected = reference()
    training = Training(
        lambda manager, model: DistributedDataParallel(
            manager, model, bucket_cap_mb=1, find_unused_parameters=True
        ),
        unused=True,
    )
    first = cluster.start(training.loop, group=0)
    cluster.wait(training.join)
    second = cluster.start(training.loop, group=1)
    a, b = results(first, second)
    _assert_equal({**expected, **{k: v for k, v in a.items() if k.startswith("unused")}}, a, b)


def test_a_step_with_unused_parameters_that_are_not_searched_is_not_committed(cluster: Cluster) -> None:
    def loop(rank: Rank) -> None:
        model = Model(unused=True)
        manager = rank.start_manager(load_state_dict=lambda s: None, state_dict=dict)
        optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=0.1))
        ddp = DistributedDataParallel(manager, model, bucket_cap_mb=1)
        before = model.first.weight.detach().clone()
        optimizer.zero_grad()
        ddp(batch(0, 0)).square().mean().backward()
        optimizer.step()
        assert manager.current_step() == 0 and torch.equal(model.first.weight, before)
        assert "find_unused_parameters=True" in str(manager.errored())
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
            ddp(batch(0, 0))

    results(cluster.start(loop, group=0))


def _assert_equal(expected: dict[str, torch.Tensor], *states: dict[str, torch.Tensor]) -> None:
    for state in states:
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                state[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
            assert torch.equal(state[name], states[0][name])


class HeldWork:
    """A collective that ends only when the test ends it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[torch.Tensor]:
        return self.future

    def wait(self, *_: Any) -> bool:
        assert self.future.done(), "the hook waited for an allreduce"
        return True


def test_allreduces_overlap_with_backward(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """No allreduce ends before that of the last bucket has begun. Backward still ends, so it does not wait
    for the allreduces one by one.
    """
    held: list[HeldWork] = []

    def loop(rank: Rank) -> None:
        model = Model()
        manager = rank.start_manager(load_state_dict=lambda s: None, state_dict=dict)
        ddp = DistributedDataParallel(manager, model, bucket_cap_mb=1)
        total = sum(p.numel() for p in model.parameters())

        def allreduce(tensor: torch.Tensor) -> HeldWork:
            held.append(HeldWork(tensor))
            if sum(work.tensor.numel() for work in held) == total:
                for work in held:
                    work.future.set_result(work.tensor)
            return held[-1]

        monkeypatch.setattr(manager, "allreduce", allreduce)
        manager.start_quorum()
        ddp(batch(0, 0)).square().mean().backward()
        assert manager.should_commit()

    results(cluster.start(loop, group=0))
    assert len(held) >= 2


def test_process_group_is_the_managers(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="process_group"):
        DistributedDataParallel(object(), Model(), process_group=object())  # type: ignore[arg-type]


@pytest.mark.parametrize("wrap", [DistributedDataParallel, PureDistributedDataParallel])
def test_sparse_gradients(cluster: Cluster, wrap: Callable[[Any, nn.Module], nn.Module]) -> None:
    """They are the mean over the groups, which have different rows."""

    def loop(rank: Rank) -> torch.Tensor:
        model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1, bias=False))
        nn.init.ones_(model[1].weight)  # type: ignore[arg-type]
        manager = rank.start_manager(load_state_dict=lambda s: None, state_dict=dict, init_sync=False)
        ddp = wrap(manager, model)
        rank.cluster.wait_for_healthy(2)
        manager.start_quorum()
        ddp(torch.tensor([1, 3 + rank.group])).sum().backward()
        assert manager.should_commit()
        gradient = model.get_parameter("0.weight").grad
        assert gradient is not None
        return gradient.to_dense()[:, 0]

    for found in results(cluster.start(loop, group=0), cluster.start(loop, group=1)):
        assert found.tolist() == [0, 1, 0, 0.5, 0.5, 0]


def isolated() -> ProcessGroup:
    return ProcessGroupBabyGloo(timeout=DEADLINE)


@pytest.mark.parametrize(
    "make", [isolated, lambda: ErrorSwallowingProcessGroupWrapper(isolated())], ids=["isolated", "wrapped"]
)
def test_sparse_gradients_with_an_isolated_group(make: Callable[[], ProcessGroup]) -> None:
    """A wrapper refuses them at once; where the loop reduces them itself, the step is lost."""

    def loop(rank: Rank) -> None:
        manager = rank.start_manager(load_state_dict=lambda s: None, state_dict=dict)
        model = nn.ModuleDict({"words": nn.Embedding(6, 3, sparse=True), "rest": nn.Linear(3, 3)})
        for wrap in (DistributedDataParallel, PureDistributedDataParallel):
            with pytest.raises(ValueError, match=r"reduces dense tensors only.*words\.weight are sparse"):
                wrap(manager, model)
        if make is not isolated:
            return  # the wrapper swallows errors
        manager.start_quorum()
        gradient = torch.eye(2).to_sparse()
        extras_of(manager).share_buffer(gradient)
        manager.allreduce(gradient).wait()
        assert not manager.should_commit()
        assert "sparse" in str(manager.errored())

    with Cluster(make_pg=lambda group: make()) as cluster:
        results(cluster.start(loop, group=0))


def test_ignored_parameters_may_have_sparse_gradients() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(6, 3, sparse=True), "rest": nn.Linear(3, 3)})
    manager: Any = SimpleNamespace(_extras=create_autospec(Extras, instance=True))
    DistributedDataParallel(manager, model)
    manager._extras.check_sparse.assert_called_once_with(["words.weight"])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["words.weight"])
    manager._extras.check_sparse.reset_mock()
    DistributedDataParallel(manager, model)
    manager._extras.check_sparse.assert_called_once_with([])


@pytest.mark.parametrize(
    ("unused", "dtype", "bucket_cap_mb", "error", "lost"),
    [
        (
            True,
            torch.float32,
            1,
            r"member group_1:.* reduces other tensors than member group_0:.* there nothing",
            0,
        ),
        (
            False,
            torch.float64,
            1,
            r"reduces other tensors than member group_0:.*: here .* float64.*; there .* float32",
            0,
        ),
        (
            False,
            torch.float32,
            100,
            r"call 0 of the step differs: .*allreduce of 481200 x float32 \(AVG\).* group_0:",
            1,
        ),
    ],
    ids=["a larger model", "another dtype", "other buckets"],
)
def test_a_group_that_joins_with_other_reductions_ends(
    cluster: Cluster, unused: bool, dtype: torch.dtype, bucket_cap_mb: int, error: str, lost: int
) -> None:
    """Gloo would end the process of the other group."""
    running, ended = Gate(), Gate()

    def loop(rank: Rank) -> list[bool]:
        model = Model(unused and rank.group == 1).to(dtype if rank.group == 1 else torch.float32)
        manager = rank.start_manager(load_state_dict=model.load_state_dict, state_dict=model.state_dict)
        ddp = DistributedDataParallel(manager, model, bucket_cap_mb=bucket_cap_mb if rank.group == 1 else 1)
        optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=0.1))
        commits = []
        while manager.current_step() < STEPS:
            if rank.group == 0 and manager.current_step() == JOIN_AT:
                running.open()
                if not lost:
                    ended.wait()
                elif all(commits):
                    rank.cluster.wait_for_waiters(1)  # the other one is in this quorum
            before = manager.current_step()
            optimizer.zero_grad()
            ddp(batch(0, rank.group).to(next(model.parameters()).dtype)).square().mean().backward()
            optimizer.step()
            commits.append(manager.current_step() > before)
        return commits

    (older,) = cluster.start(loop, group=0)
    cluster.wait(running)
    (newer,) = cluster.start(loop, group=1)
    newer.add_done_callback(lambda _: ended.open())
    with pytest.raises(ValueError, match=error):
        newer.result(timeout=90)
    cluster.ranks[1].close()
    assert older.result(timeout=90).count(False) == lost


@pytest.mark.parametrize("wrap", [DistributedDataParallel, PureDistributedDataParallel])
@pytest.mark.parametrize(
    "settings",
    [
        {"use_async_quorum": True},
        pytest.param({"use_async_quorum": False}, marks=pytest.mark.slow),
        pytest.param({"use_async_quorum": False, "heal": "in_passing"}, marks=pytest.mark.slow),
    ],
)
def test_zero_grad_after_the_forward_pass(cluster: Cluster, settings: dict[str, Any], wrap: Any) -> None:
    """As in many scripts of PyTorch. Gradients of the weights before a heal do not count."""
    # Whether it counts, whether its weights changed.
    counted: dict[int, list[tuple[bool, bool]]] = {0: [], 1: []}

    def train(rank: Rank) -> list[torch.Tensor]:
        torch.manual_seed(rank.group)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        manager = rank.start_manager(
            load_state_dict=lambda s: model.load_state_dict(s["model"]),
            state_dict=lambda: {"model": model.state_dict()},
            **settings,
        )
        ddp, optimizer = wrap(manager, model), OptimizerWrapper(manager, inner)
        together = 0
        while together < STEPS:
            step = manager.current_step()
            if rank.group == 0 and step == JOIN_AT:
                join.open()
                rank.cluster.wait_for_another()
            with_weights = [p.detach().clone() for p in model.parameters()]
            loss = ddp(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            changed = any(not torch.equal(one, p) for one, p in zip(with_weights, model.parameters()))
            counted[rank.group].append((manager.is_participating(), changed))
            optimizer.step()
            together += manager.num_participants() == 2 and manager.current_step() > step
        return [p.detach().clone() for p in model.parameters()]

    join = Gate()
    first = cluster.start(train, group=0)
    cluster.wait(join)
    ended = results(first, cluster.start(train, group=1))
    assert all(torch.equal(one, other) for one, other in zip(*ended))
    assert counted[1] and (True, True) not in counted[0] + counted[1]
