"""Decisions whether a step is replayed, and the inputs that are kept for a replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Optional

import pytest
import torch
from torch.distributed import ReduceOp
from torch.optim import SGD

from tests.unit.manager.conftest import Fixture
from tests.unit.manager.test_plan import plan, result
from torchft._agreement import HEALS, announce
from torchft._manager.step.errors import _peers_fault
from torchft._manager.step.inputs import Inputs
from torchft._manager.step.replay import MOST_REPLAYS, Replay
from torchft._torchft import QuorumResult
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupDummy


@pytest.mark.parametrize(
    ("replays", "kept", "refused", "reason"),
    [
        (0, 1, None, None),
        (MOST_REPLAYS - 1, 1, None, None),
        (MOST_REPLAYS, 1, None, f"it was reduced again {MOST_REPLAYS} times"),
        (0, 0, None, "nothing was reduced in it"),
        (0, 1, "the loop raised", "the loop raised"),
        (MOST_REPLAYS, 0, "the loop raised", "the loop raised"),  # the first reason
    ],
)
def test_which_attempts_can_be_replayed(
    replays: int, kept: int, refused: Optional[str], reason: Optional[str]
) -> None:
    inputs = Inputs([])
    reduced(inputs, *(torch.ones(1) for _ in range(kept)))
    if refused is not None:
        inputs.refuse(refused)
    assert Replay(True).why_not(inputs, replays) == reason


@pytest.mark.parametrize(
    ("quorum", "reason"),
    [
        (dict(heal=False, max_replica_rank=1, replay=True), None),
        (dict(heal=True), "others are ahead, at step 20, and this group takes over their state"),
        (dict(heal=False, max_replica_rank=1), "not all groups replay steps"),
    ],
)
def test_whether_a_quorum_permits_a_replay(quorum: dict[str, Any], reason: Optional[str]) -> None:
    found = plan(result(**quorum)).why_recomputed
    assert (found or "").startswith(reason or "") and (found is None) == (reason is None)


def test_a_group_that_may_not_heal_does_not_replay_behind_the_others() -> None:
    assert plan(result(), allow_heal=False).why_recomputed == "others are ahead, at step 20"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(), True),
        (TimeoutError(), True),
        (ConnectionResetError(), True),
        (EOFError(), True),
        (ValueError(), False),
        (TypeError(), False),
        (NotImplementedError(), False),
    ],
)
def test_whose_fault_an_error_is(error: Exception, expected: bool) -> None:
    assert _peers_fault(error) is expected


def reduced(inputs: Inputs, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        kept = inputs.keep(tensor, ReduceOp.SUM)
        assert kept is not None
        tensor.mul_(2).add_(1)
        kept.settle()


def test_inputs_come_back_in_their_order() -> None:
    inputs = Inputs([])
    first, second = torch.arange(6.0).view(2, 3).t(), torch.tensor(7)
    reduced(inputs, first, second)
    assert inputs.changed() is None
    assert [kept.tensor for kept in inputs.restore()] == [first, second]
    assert torch.equal(first, torch.arange(6.0).view(2, 3).t())
    assert second == 7


def test_the_memory_of_the_copies_serves_all_steps() -> None:
    copies: list[torch.Tensor] = []
    inputs = Inputs(copies)
    tensors = [torch.ones(5), torch.ones(2, 2)]
    reduced(inputs, *tensors)
    before = [kept.copy.data_ptr() for kept in inputs.restore()]
    inputs.forget()
    assert len(inputs) == 0
    inputs = Inputs(copies)
    reduced(inputs, *tensors)
    assert [kept.copy.data_ptr() for kept in inputs.restore()] == before
    inputs = Inputs(copies)
    reduced(inputs, torch.ones(5, dtype=torch.float64))  # replaced by another one
    assert inputs.restore()[0].copy.dtype == torch.float64


def test_a_result_that_was_changed_is_noticed() -> None:
    inputs = Inputs([])
    tensor = torch.ones(4)
    reduced(inputs, tensor)
    tensor.view(2, 2)[0].clamp_(max=0.5)  # through a view, as gradients are views of a bucket
    assert "shape (4,) was changed after it was reduced" in str(inputs.changed())


@pytest.mark.parametrize(
    ("pick", "twice"),
    [
        (lambda t: (t[:4], t[4:]), False),
        (lambda t: (t[:5], t[4:]), True),
        (lambda t: (t, t), True),
        (lambda t: (t[:0], t), False),
    ],
)
def test_memory_that_is_reduced_twice(pick: Callable[[torch.Tensor], Any], twice: bool) -> None:
    inputs = Inputs([])
    reduced(inputs, *pick(torch.ones(8)))
    assert (inputs.twice() is not None) is twice


def test_gradients_in_other_memory() -> None:
    inputs = Inputs([])
    bucket = torch.ones(8)
    reduced(inputs, bucket)
    assert inputs.elsewhere([bucket[2:4].view(2, 1)]) is None
    assert "shape (3,) is not in the memory that was reduced" in str(
        inputs.elsewhere([bucket, torch.ones(3)])
    )


def test_inputs_that_cannot_be_replayed_are_not_kept() -> None:
    inputs = Inputs([])
    inputs.refuse("no")
    inputs.refuse("later")
    assert inputs.keep(torch.ones(1), ReduceOp.SUM) is None
    assert inputs.refused == "no"
    inputs.forget()
    assert inputs.keep(torch.ones(2).to_sparse(), ReduceOp.SUM) is None
    assert "layout torch.sparse_coo" in str(inputs.refused)


def lose(manager: Manager) -> None:
    manager.start_quorum()
    manager.allreduce(torch.ones(2)).wait()
    manager._errors.of_collective(RuntimeError("a peer failed"))


def test_a_step_is_lost_after_so_many_replays(
    fixture: Fixture, make_quorum: Callable[..., QuorumResult]
) -> None:
    manager = fixture.manager(replay_failed_step=True, max_retries=1)
    fixture.client._quorum.return_value = make_quorum(replay=True)
    sent: list[int] = []
    fixture.client._quorum.side_effect = lambda **asked: (
        sent.append(asked["commit_failures"]),
        make_quorum(replay=True, quorum_id=len(sent)),
    )[1]
    steps: list[tuple[int, bool, int]] = []
    manager.register_commit_hook(
        lambda step, committed, participants: steps.append((step, committed, participants))
    )
    manager._reduce_inputs = lambda _: manager._errors.of_collective(RuntimeError("again"))  # type: ignore
    lose(manager)
    assert not manager.should_commit()
    assert sent == [0, 1, 2, 3, 4, 5], "each attempt needs a new quorum"
    assert steps == [(0, False, 2)]
    assert manager._commit_failures == 1, "one step was lost, with any number of attempts"


def test_without_replay_a_rank_votes_once_and_keeps_nothing(fixture: Fixture) -> None:
    manager = fixture.manager()
    lose(manager)
    assert not manager.should_commit()
    assert fixture.votes() == [False]
    assert manager._replay.copies == []


def test_no_rank_replays_alone(fixture: Fixture, make_quorum: Callable[..., QuorumResult]) -> None:
    manager = fixture.manager(replay_failed_step=True)
    fixture.client._quorum.return_value = make_quorum(replay=True)
    fixture.client.should_commit.side_effect = lambda rank, step, vote, timeout: False
    lose(manager)
    assert not manager.should_commit()
    assert fixture.votes() == [False, True], "it could, and another rank could not"
    assert fixture.client._quorum.call_count == 1


def test_without_a_quorum_the_step_is_lost(
    fixture: Fixture, make_quorum: Callable[..., QuorumResult]
) -> None:
    manager = fixture.manager(replay_failed_step=True)
    fixture.client._quorum.side_effect = [make_quorum(replay=True), TimeoutError("no quorum")]
    lose(manager)
    assert not manager.should_commit()
    fixture.client._quorum.side_effect = [make_quorum(replay=True)]
    manager.start_quorum()
    manager.wait_quorum()


@pytest.mark.parametrize(("allow_heal", "quorums"), [(True, 2), (False, 3)])
def test_the_quorum_of_an_impossible_replay_is_used_by_the_next_step(
    fixture: Fixture, make_quorum: Callable[..., QuorumResult], allow_heal: bool, quorums: int
) -> None:
    manager = fixture.manager(replay_failed_step=True)
    fixture.client._quorum.return_value = make_quorum(replay=True)
    lose(manager)
    fixture.client._quorum.return_value = make_quorum(replay=False, quorum_id=2)
    assert not manager.should_commit()
    manager.start_quorum(allow_heal=allow_heal)  # unless the next step's request differs
    manager.wait_quorum()
    assert fixture.client._quorum.call_count == quorums


def test_optimizers_share_the_step_that_a_replay_began(
    fixture: Fixture, make_quorum: Callable[..., QuorumResult]
) -> None:
    handles = [
        announce(pg.get_reconfigure_handle(), ((HEALS, "1"),)) for pg in (ProcessGroupDummy(0, 1), fixture.pg)
    ]
    manager = fixture.manager(replay_failed_step=True)
    manager.load_state_dict({"step": 1, "batches_committed": 1})
    both = [OptimizerWrapper(manager, SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)) for _ in range(2)]
    quorum = make_quorum(max_step=1, replay=True, reconfigure_handles=handles)
    for quorum_id in (1, 2):
        fixture.client._quorum.return_value = replace(quorum, quorum_id=quorum_id, replay=quorum_id == 1)
        for optimizer in both:
            optimizer.zero_grad()
        manager.allreduce(torch.ones(2)).wait()
        if quorum_id == 1:
            manager._errors.of_collective(RuntimeError("a peer failed"))
            fixture.client._quorum.return_value = replace(quorum, quorum_id=2, replay=False)
        for optimizer in both:
            optimizer.step()
    assert fixture.client._quorum.call_count == 2
    assert manager.current_step() == 2


def test_an_average_of_local_sgd_is_not_reduced_again(
    fixture: Fixture, make_quorum: Callable[..., QuorumResult]
) -> None:
    manager = fixture.manager(replay_failed_step=True)
    fixture.client._quorum.return_value = make_quorum(replay=True)
    manager.register_layout("LocalSGD", ["a"])
    lose(manager)
    refused = manager._current.inputs.refused
    assert refused is not None and refused.startswith("with LocalSGD and DiLoCo")
    assert not manager.should_commit()
    assert fixture.client._quorum.call_count == 1


def test_the_environment_switches_it_on(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_REPLAY_FAILED_STEP", "1")
    assert fixture.manager()._replay.enabled
    assert not fixture.manager(replay_failed_step=False)._replay.enabled
    monkeypatch.setenv("TORCHFT_REPLAY_FAILED_STEP", "yes")
    with pytest.raises(ValueError, match="TORCHFT_REPLAY_FAILED_STEP='yes': allowed are 0"):
        fixture.manager()
