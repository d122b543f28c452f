"""DistributedOptimizer: the number of passes, and weights compared with one process that trains on the whole
batch.
"""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from torchft._extras import Extras
from torchft.dlrover import DistributedOptimizer
from torchft.dlrover.optimizer import backward_passes

MOST, MICRO = 8, 2
SOON_SEC = 60


@pytest.mark.parametrize(
    ("most", "workers", "passes"), [(8, 8, 1), (8, 4, 2), (8, 2, 4), (8, 1, 8), (6, 3, 2)]
)
def test_passes(most: int, workers: int, passes: int) -> None:
    assert backward_passes(most, workers) == passes


@pytest.mark.parametrize("workers", [3, 5, 6, 7, 9, 0])
def test_a_ratio_that_is_no_integer_is_refused(workers: int) -> None:
    with pytest.raises(
        ValueError, match=rf"MAX_WORKER_NUM / WORKER_NUM = 8 / {workers} is no integer.*1, 2, 4, 8"
    ):
        backward_passes(MOST, workers)


@pytest.mark.parametrize("name", ["WORKER_NUM", "MAX_WORKER_NUM"])
@pytest.mark.parametrize("value", ["", "0", "-1", "two"])
def test_variables(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("WORKER_NUM", "1")
    monkeypatch.setenv("MAX_WORKER_NUM", "8")
    monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match=rf"^{name}='{value}' is not allowed; allowed: a whole number, at least 1"
    ):
        DistributedOptimizer(sgd(make_model()), fixed_global_batch_size=True)


def test_workers_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKER_NUM", "2")
    with pytest.raises(ValueError, match="WORKER_NUM=2: the process group has 1 ranks"):
        DistributedOptimizer(sgd(make_model()))


def make_model() -> nn.Module:
    model = nn.Linear(4, 2).double()
    # Not PyTorch's global generator: replicas that are threads would draw from it, and seed it, at the same
    # time.
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch(step: int) -> torch.Tensor:
    return torch.randn(MOST * MICRO, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (model(inputs) - inputs[:, :2]).square().mean()


def one_process(steps: int) -> dict[str, Any]:
    """Returns the weights after steps of plain SGD, each with the whole batch."""
    model = make_model()
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, batch(step)).backward()
        optimizer.step()
    return dict(model.state_dict())


class Sums:
    """Sums over threads. All threads get the same sum, in any order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._barrier = threading.Barrier(size)
        self._given: list[list[torch.Tensor]] = [[] for _ in range(size)]

    def of(self, rank: int) -> SimpleNamespace:
        """Returns an object with the methods of a process group that a DistributedOptimizer uses."""

        def allreduce(tensors: list[torch.Tensor], opts: object) -> SimpleNamespace:
            self._given[rank].append(tensors[0].clone())
            call = len(self._given[rank]) - 1

            def wait() -> None:
                self._barrier.wait(SOON_SEC)
                tensors[0].copy_(torch.stack([given[call] for given in self._given]).sum(0))

            return SimpleNamespace(wait=wait)

        return SimpleNamespace(size=lambda: self._size, allreduce=allreduce)


def test_weights_with_8_4_2_1_and_4_workers_are_those_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_WORKER_NUM", str(MOST))
    state: tuple[dict[str, Any], dict[str, Any]] = make_model().state_dict(), sgd(make_model()).state_dict()
    for phase, workers in enumerate((8, 4, 2, 1, 4)):
        monkeypatch.setenv("WORKER_NUM", str(workers))
        sums = Sums(workers)

        def work(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
            model = make_model()
            group = cast(ProcessGroup, sums.of(rank))  # noqa: B023
            optimizer = DistributedOptimizer(sgd(model), fixed_global_batch_size=True, process_group=group)
            model.load_state_dict(state[0])  # noqa: B023
            optimizer.load_state_dict(copy.deepcopy(state[1]))  # noqa: B023
            for step in range(100 * phase, 100 * phase + 100):  # noqa: B023
                for inputs in batch(step).split(MICRO)[rank::workers]:  # noqa: B023
                    optimizer.zero_grad()
                    loss(model, inputs).backward()
                    optimizer.step()
            assert optimizer.backward_passes_per_step == MOST // workers  # noqa: B023
            return model.state_dict(), optimizer.state_dict()

        with ThreadPoolExecutor(workers) as threads:
            ends = list(threads.map(work, range(workers)))
        for other in ends:
            torch.testing.assert_close(other[0], ends[0][0], rtol=0, atol=0)
        state = ends[0]
    torch.testing.assert_close(state[0], one_process(500), rtol=1e-9, atol=1e-9)


def test_gradients_are_reduced_in_the_last_pass_only() -> None:
    manager = mock.MagicMock()
    manager.num_participants.return_value = 4
    manager.should_commit.return_value = True
    model = make_model()
    with mock.patch.dict("os.environ", MAX_WORKER_NUM="8"):
        optimizer = DistributedOptimizer(sgd(model), fixed_global_batch_size=True, manager=manager)
        before = model.state_dict()["weight"].clone()
        optimizer.zero_grad()
        loss(model, batch(0)).backward()
        optimizer.step()
        assert not manager.allreduce.called and torch.equal(model.state_dict()["weight"], before)
        optimizer.zero_grad()
        loss(model, batch(0)).backward()
        whole = model.weight.grad.clone()  # type: ignore[union-attr, operator]
        optimizer.step()
    assert manager.start_quorum.call_count == 1 and manager.allreduce.call_count == 2
    torch.testing.assert_close(model.weight.grad, whole / 2)
    assert not torch.equal(model.state_dict()["weight"], before)


@pytest.mark.parametrize("participants", [3])
def test_a_quorum_that_cannot_share_the_passes_is_refused(participants: int) -> None:
    manager = mock.MagicMock()
    manager.num_participants.return_value = participants
    with mock.patch.dict("os.environ", MAX_WORKER_NUM="8"):
        optimizer = DistributedOptimizer(sgd(make_model()), fixed_global_batch_size=True, manager=manager)
        with pytest.raises(ValueError, match="8 / 3 is no integer"):
            optimizer.zero_grad()


def test_a_step_that_is_not_committed_changes_nothing() -> None:
    manager = mock.MagicMock()
    manager.num_participants.return_value = 2
    manager.should_commit.return_value = False
    model = make_model()
    before = model.state_dict()["weight"].clone()
    optimizer = DistributedOptimizer(sgd(model), manager=manager)
    optimizer.zero_grad()
    loss(model, batch(0)).backward()
    optimizer.step()
    assert torch.equal(model.state_dict()["weight"], before)
    with pytest.raises(ValueError, match="closure: step"):
        optimizer.step(closure=lambda: None)


def test_a_job_whose_loader_weights_its_losses_is_refused() -> None:
    manager = mock.MagicMock()
    manager._extras = mock.Mock(spec=Extras, adds_gradients=True)
    with pytest.raises(ValueError, match=r"ElasticDataLoader.*use torchft\.Optimizer"):
        DistributedOptimizer(sgd(make_model()), manager=manager).zero_grad()


def test_hooks_are_those_of_the_wrapped_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKER_NUM", "1")
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer = DistributedOptimizer(sgd)
    stepped: list[object] = []
    optimizer.register_step_post_hook(lambda of, *_: stepped.append(of))
    optimizer.zero_grad()
    optimizer.step()
    assert stepped == [sgd]
