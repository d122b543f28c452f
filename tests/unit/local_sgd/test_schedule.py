"""The schedule of the fragments' synchronizations, and the calls to the Manager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.local_sgd.one_group import OneGroup
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.local_sgd.diloco import FragmentDue, due

START, FINISH = FragmentDue(True, False), FragmentDue(False, True)
BOTH, NOTHING = FragmentDue(True, True), FragmentDue(False, False)


@pytest.mark.parametrize(
    ("local_step", "period", "delay", "in_flight", "expected", "why"),
    [
        (1, 4, 0, False, NOTHING, "it is too early"),
        (4, 4, 0, False, BOTH, "no delay: it starts and finishes after the same step"),
        (2, 4, 1, False, NOTHING, "one step before the start"),
        (3, 4, 1, False, START, "a step before the end"),
        (4, 4, 1, True, FINISH, "the delay of one step has passed"),
        (2, 4, 3, True, NOTHING, "in flight, and the delay has not passed"),
        (1, 4, 3, False, START, "the longest delay: it starts after the first step"),
        (4, 4, 1, False, BOTH, "late, because there was no quorum one step earlier"),
        (7, 4, 0, False, BOTH, "late, because there was no quorum for several steps"),
        (1, 1, 0, False, BOTH, "every step"),
    ],
)
def test_due(
    local_step: int, period: int, delay: int, in_flight: bool, expected: FragmentDue, why: str
) -> None:
    assert due(local_step, period, delay, in_flight) == expected, why


def test_two_synchronizations_never_overlap() -> None:
    """Even with the longest allowed delay, a synchronization starts one step after the end of the previous
    one.
    """
    for period in range(1, 6):
        for delay in range(period):
            step, in_flight, log = 0, False, []
            for _ in range(5 * period):
                step += 1
                now = due(step, period, delay, in_flight)
                assert not (now.start and in_flight)
                in_flight = (in_flight or now.start) and not now.finish
                log.append(in_flight)
                if now.finish:
                    step = 0
            assert log == ([False] * (period - delay - 1) + [True] * delay + [False]) * 5


def three_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 1, bias=False))


def train(
    manager: OneGroup, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> list[list[Any]]:
    """Returns the calls of the Manager after each of the steps."""
    calls = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 2)).square().mean().backward()
        optimizer.step()
        calls.append(manager.taken())
    return calls


def reduced(calls: list[Any]) -> list[tuple[int, ...]]:
    return [call[1] for call in calls if call[0] == "allreduce"]


def make(manager: OneGroup, **settings: Any) -> tuple[nn.Sequential, torch.optim.Optimizer, DiLoCo]:
    model = three_layers()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    outer = [torch.optim.SGD(layer.parameters(), lr=0.7, momentum=0.9, nesterov=True) for layer in model]
    return model, inner, DiLoCo(manager, list(model), inner, outer, **settings)  # type: ignore[arg-type]


def test_fragments_take_turns() -> None:
    manager = OneGroup()
    model, inner, diloco = make(manager, sync_every=6)
    with diloco:
        calls = train(manager, model, inner, 12)
    assert [len(c) for c in calls] == [0, 4, 0, 4, 0, 3] * 2
    assert calls[1] == ["quorum", ("allreduce", (3, 2), False), ("allreduce", (3,), False), "vote"]
    assert [reduced(calls[i])[0] for i in (1, 3, 5, 7)] == [(3, 2), (4, 3), (1, 4), (3, 2)]


def test_an_allreduce_is_in_flight_for_the_delay() -> None:
    manager = OneGroup()
    model, inner, diloco = make(manager, sync_every=9, fragment_sync_delay=2)
    with diloco:
        calls = train(manager, model, inner, 9)
    sent = ["quorum", ("allreduce", (3, 2), False), ("allreduce", (3,), False), "finish serving"]
    assert calls[:4] == [sent, [], ["vote"], calls[3]]
    assert [reduced(c) for c in calls[3::3]] == [[(4, 3), (4,)], [(1, 4)]]


def test_a_failed_synchronization_is_retried() -> None:
    manager = OneGroup(committed=lambda vote: vote != 2)
    model, inner, diloco = make(manager, sync_every=3)
    with diloco:
        calls = train(manager, model, inner, 4)
    assert [reduced(c)[0] for c in calls] == [(3, 2), (4, 3), (4, 3), (1, 4)]


def test_after_a_heal_the_received_step_selects_the_fragment() -> None:
    manager = OneGroup()
    model, inner, diloco = make(manager, sync_every=3)
    manager.on_quorum = lambda: setattr(manager, "_step", 5)
    with diloco:
        (calls,) = train(manager, model, inner, 1)
    assert reduced(calls) == [(1, 4)]


def test_without_a_quorum_the_same_fragment_starts_after_the_next_step() -> None:
    manager = OneGroup()
    model, inner, diloco = make(manager, sync_every=6, fragment_sync_delay=1)

    def no_quorum() -> None:
        raise TimeoutError("no quorum within 1 s")

    manager.on_quorum = no_quorum
    with diloco:
        with pytest.raises(TimeoutError, match="no quorum"):
            train(manager, model, inner, 1)
        manager.taken()
        manager.on_quorum = lambda: None
        calls = train(manager, model, inner, 2)
    # Without a delay, because it starts late.
    assert reduced(calls[0]) == [(3, 2), (3,)] and calls[0][-1] == "vote"
    assert reduced(calls[1]) == [(4, 3), (4,)]


def test_a_vote_that_raises_puts_the_global_parameters_back() -> None:
    manager = OneGroup()
    model, inner, diloco = make(manager, sync_every=3)
    before = [p.detach().clone() for p in model.parameters()]

    def too_many_failures(vote: int) -> bool:
        raise RuntimeError("3 steps in a row were not committed")

    manager._committed = too_many_failures
    with diloco, pytest.raises(RuntimeError, match="3 steps in a row"):
        train(manager, model, inner, 1)
    after = list(model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before[:2], after[:2]))
    assert not any(
        torch.equal(a, b) for a, b in zip(before[2:], after[2:])
    )  # the other fragments keep their local values


@pytest.mark.parametrize("delay", [0, 1])
def test_gradients_of_a_synchronized_fragment_are_freed(delay: int) -> None:
    """As in upstream, the gradients of the other fragments are kept."""
    manager = OneGroup()
    model, inner, diloco = make(manager, sync_every=6, fragment_sync_delay=delay)
    with diloco:
        train(manager, model, inner, 2)
    assert [p.grad is None for p in model.parameters()] == [True, True, False, False, False]


class Failing(torch.optim.SGD):
    """An optimizer that runs out of memory in its second step."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        if self.steps == 2:
            raise RuntimeError("out of memory")


def test_state_is_not_read_during_an_inner_step() -> None:
    manager = OneGroup()
    model = three_layers()
    inner = Failing(model.parameters(), lr=0.01)
    outer = torch.optim.SGD(model.parameters(), lr=0.7)
    with DiLoCo(manager, [model], inner, outer, sync_every=9):  # type: ignore[arg-type]
        manager.calls.clear()
        inner.step()
        assert manager.calls == ["disallow", "allow"]
        with pytest.raises(RuntimeError, match="out of memory"):
            inner.step()
        assert manager.calls[-1] == "disallow"
    assert manager.calls[-1] == "allow"


def test_after_the_block_steps_make_no_calls() -> None:
    manager = OneGroup()
    model, inner, diloco = make(manager, sync_every=3)
    with diloco:
        pass
    manager.taken()
    assert train(manager, model, inner, 5) == [[]] * 5
    assert "disallow" not in manager.calls
    with diloco:  # it can be entered again
        assert reduced(train(manager, model, inner, 1)[0]) == [(3, 2), (3,)]
        with pytest.raises(RuntimeError, match="DiLoCo is entered already"), diloco:
            pass


def test_local_sgd_synchronizes_all_parameters() -> None:
    manager = OneGroup()
    model = three_layers()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    with LocalSGD(manager, model, inner, sync_every=3) as local_sgd:  # type: ignore[arg-type]
        calls = train(manager, model, inner, 6)
        assert [len(c) for c in calls] == [0, 0, 7] * 2
        assert calls[2][0] == "quorum" and calls[2][-1] == "vote"
        assert reduced(calls[2]) == [(3, 2), (3,), (4, 3), (4,), (1, 4)]
        train(manager, model, inner, 2)
        local_sgd.sync()  # an explicit call restarts the count
        manager.taken()
        assert [len(c) for c in train(manager, model, inner, 3)] == [0, 0, 7]


@pytest.mark.parametrize("committed", [True, False])
def test_local_sgd_takes_the_average_only_if_it_was_committed(committed: bool) -> None:
    manager = OneGroup(committed=lambda vote: committed, peers=lambda tensor: tensor.fill_(7))
    model = three_layers()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    with LocalSGD(manager, model, inner, sync_every=1):  # type: ignore[arg-type]
        train(manager, model, inner, 1)
    assert all(bool((p == 7).all()) is committed for p in model.parameters())
