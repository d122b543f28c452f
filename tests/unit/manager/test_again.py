"""The gradients that a rank keeps of a loader's step that was not committed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Callable, Optional
from unittest.mock import MagicMock, create_autospec

import pytest
import torch
from torch.distributed import ReduceOp

from tests.unit.manager.test_plan import plan, result
from torchft._agreement import KEEPS, announce
from torchft._manager.observe.log import _ManagerLogger
from torchft._manager.observe.phases import Incident
from torchft._manager.quorum.plan import Plan
from torchft._manager.step.again import Again
from torchft._manager.step.inputs import Inputs
from torchft.data.position import DataPosition
from torchft.work import AnyReduceOp

AT = DataPosition(0, 4)


class Rank:
    """The part of a Manager that keeps the gradients of one rank, without peers."""

    def __init__(self) -> None:
        self.logger: MagicMock = create_autospec(_ManagerLogger, instance=True)
        self.again = Again(True, self.logger)
        self.copies: list[torch.Tensor] = []
        self.step = self.new_step()
        self.votes: list[bool] = []

    def new_step(self, **fields: Any) -> Any:
        values = dict(participating_rank=0, healing=False, undecided=False, plan=self.plan(""))
        values["collectives"] = MagicMock()
        return SimpleNamespace(inputs=Inputs(self.copies), **{**values, **fields})

    def plan(self, text: str, **fields: Any) -> Plan:
        """The plan of a quorum in which this group, the first one, has announced a text."""
        handles = [announce('{"a": 1}', ((KEEPS, each),)) for each in (text, "")]
        values: dict[str, Any] = dict(
            reconfigure_handles=handles, replica_rank=0, max_replica_rank=0, heal=False, committed_quorum_id=5
        )
        return plan(result(**{**values, **fields}))

    def begin(self, units: set[int], at: DataPosition = AT, **fields: int) -> frozenset[int]:
        """Begins an attempt in which the group computes these units. Returns what all groups keep.

        Args:
            units: numbers of units.
            at: position of the loader.
            fields: those of the quorum that differ from this group's.
        """
        text = self.again.announces(self.step, 20, 5)
        self.step = self.new_step(plan=self.plan(text, **fields))
        kept = self.again.begin(self.step, self.step.plan, at)
        self.again.computes(at, units)
        return kept

    def reduce(self, *tensors: torch.Tensor, op: AnyReduceOp = ReduceOp.AVG) -> None:
        for tensor in tensors:
            self.again.keep(self.step, tensor, op, False)

    def retain(
        self, check: Callable[[], None] = lambda: None, others: bool = True, at: int = 20
    ) -> Optional[int]:
        def vote(yes: bool) -> bool:
            self.votes.append(yes)
            return yes and others

        return self.again.retain(self.step, (at, 5), check, vote)

    @property
    def warned(self) -> str:
        return " ".join(call.args[0] for call in self.logger.warn.call_args_list)


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_sums_grow_from_attempt_to_attempt(rank: Rank) -> None:
    assert rank.begin({0, 1}) == frozenset()
    a, b = torch.tensor([1.0, 2.0]), torch.tensor(5.0)
    rank.reduce(a, b)
    assert a.tolist() == [1.0, 2.0]
    a.zero_()  # the reduction failed
    assert rank.retain() == 2
    for attempt, (units, number) in enumerate([({4}, 3), (set[int](), 3), ({7, 8}, 5)], start=1):
        assert rank.begin(units) == rank.again.units
        assert rank.again.attempts == attempt
        a, b = torch.tensor([10.0, 10.0]), torch.tensor(10.0)
        rank.reduce(a, b)
        assert a.tolist() == [1.0 + 10 * attempt, 2.0 + 10 * attempt]
        assert b.item() == 5.0 + 10 * attempt
        assert rank.retain() == number
    assert rank.again.units == {0, 1, 4, 7, 8}
    assert rank.votes == [True] * 4


def test_nothing_is_kept_after_a_commit(rank: Rank) -> None:
    rank.begin({0})
    rank.reduce(torch.ones(1))
    assert rank.retain() == 1
    rank.again.forget()
    assert rank.again.announces(rank.step, 21, 6) == ""
    assert rank.begin({0}) == frozenset()
    tensor = torch.ones(1)
    rank.reduce(tensor)
    assert tensor.item() == 1


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        (lambda rank: None, "nothing was reduced in it"),
        (lambda rank: rank.reduce(torch.ones(2), op=ReduceOp.MAX), "so that attempts do not add up"),
        (lambda rank: rank.step.inputs.refuse("the loop raised"), "the loop raised"),
        (lambda rank: rank.reduce(*[torch.ones(2)] * 2), "the same memory was reduced twice"),
        (lambda rank: rank.reduce(torch.eye(2).to_sparse()), "layout torch.sparse_coo"),
        (lambda rank: setattr(rank.step, "healing", True) or rank.reduce(torch.ones(1)), "did not take part"),
    ],
)
def test_what_a_rank_cannot_keep(rank: Rank, do: Callable[[Rank], None], reason: str) -> None:
    rank.begin({0, 1})
    do(rank)
    assert rank.retain() is None
    assert reason in rank.warned
    assert rank.votes == [False]
    assert rank.begin({0, 1}) == frozenset()


def test_gradients_that_were_not_all_reduced_are_not_kept(rank: Rank) -> None:
    def check() -> None:
        raise RuntimeError("a gradient was not reduced")

    rank.begin({0})
    rank.reduce(torch.ones(1))
    assert rank.retain(check) is None
    assert "a gradient was not reduced" in rank.warned


def test_the_ranks_of_a_group_keep_all_or_none(rank: Rank) -> None:
    rank.begin({0})
    rank.reduce(torch.ones(1))
    assert rank.retain(others=False) is None
    assert rank.votes == [True]
    assert "another rank of the group cannot keep it" in rank.warned
    assert not rank.again.units


def test_a_vote_that_fails_is_raised(rank: Rank) -> None:
    """Another rank of the group may have got its result, and keeps its gradients."""

    def vote(yes: bool) -> bool:
        raise TimeoutError("no answer")

    rank.begin({0})
    rank.reduce(torch.ones(1))
    assert rank.retain() == 1
    rank.begin({1})
    rank.reduce(torch.ones(1))
    with pytest.raises(TimeoutError):
        rank.again.retain(rank.step, (20, 5), lambda: None, vote)
    assert not rank.again.units


@pytest.mark.parametrize("case", ["heals", "the first step", "off"])
def test_a_group_that_does_not_vote(rank: Rank, case: str) -> None:
    rank.begin({0})
    rank.reduce(torch.ones(1))
    rank.again.enabled = case != "off"
    if case == "heals":
        rank.step.plan = rank.plan("", heal=True)
    assert rank.retain(at=0 if case == "the first step" else 20) is None
    assert rank.votes == []


@pytest.mark.parametrize(
    "tensor", [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(1, 2)], ids=repr
)
def test_another_tensor_in_the_place_of_a_kept_one_is_refused(rank: Rank, tensor: torch.Tensor) -> None:
    rank.begin({0})
    rank.reduce(torch.ones(2))
    assert rank.retain() == 1
    rank.begin({1})
    with pytest.raises(
        ValueError, match=r"tensor 0 of this attempt has .* the attempt before reduced one with"
    ):
        rank.reduce(tensor)


def test_more_tensors_than_before_are_refused(rank: Rank) -> None:
    rank.begin({0})
    rank.reduce(torch.ones(2))
    assert rank.retain() == 1
    rank.begin({1})
    with pytest.raises(ValueError, match=r"tensor 1 of this attempt .* reduced no other tensor in its place"):
        rank.reduce(torch.ones(2), torch.ones(2))


def test_fewer_tensors_than_before_are_not_kept(rank: Rank) -> None:
    rank.begin({0})
    rank.reduce(torch.ones(2), torch.ones(3))
    assert rank.retain() == 1
    rank.begin({1})
    rank.reduce(torch.ones(2))
    message = "it reduced 1 tensors, and 2 in the attempt before"
    with pytest.raises(RuntimeError, match=message):
        rank.again.verify(rank.step)  # the step must not be committed
    rank.step.collectives.abort.assert_called_once_with()
    assert rank.retain() is None
    assert message in rank.warned


@pytest.mark.parametrize(
    "other", [dict(max_step=21), dict(committed_quorum_id=6), dict(at=DataPosition(0, 5))], ids=repr
)
def test_gradients_of_other_weights_are_forgotten(rank: Rank, other: dict[str, Any]) -> None:
    """Another group has committed the step, or the loader's position was loaded."""
    rank.begin({0})
    rank.reduce(torch.ones(2))
    assert rank.retain() == 1
    assert rank.begin({0, 1}, **other) == frozenset()
    assert not rank.again.units
    assert "the kept gradients are of other weights" in rank.warned
    tensor = torch.ones(2)
    rank.reduce(tensor)
    assert tensor.tolist() == [1, 1]


@pytest.mark.parametrize(("step", "committed_quorum_id"), [(19, 5), (20, -1)])
def test_gradients_of_weights_that_were_replaced_are_forgotten(
    rank: Rank, step: int, committed_quorum_id: int
) -> None:
    """The Manager's state was loaded, or the group announces an earlier step, so that it heals."""
    rank.begin({0})
    rank.reduce(torch.ones(2))
    assert rank.retain() == 1
    assert rank.again.announces(rank.step, step, committed_quorum_id) == ""
    assert not rank.again.units


def test_an_attempt_that_was_left_without_a_vote_is_not_continued(rank: Rank) -> None:
    """Such as one in which a GradScaler found infinities."""
    rank.begin({0})
    rank.reduce(torch.ones(2))
    assert rank.retain() == 1
    rank.begin({1})
    rank.reduce(torch.ones(2))
    rank.step.undecided = True
    assert rank.begin({0, 1}) == frozenset()


def test_a_quorum_that_was_not_used_forgets_nothing(rank: Rank) -> None:
    rank.begin({0})
    rank.reduce(torch.ones(2))
    assert rank.retain() == 1
    rank.begin({1})
    rank.step.undecided = True
    assert rank.begin({1}) == {0}


def test_others_must_not_count_on_what_is_not_kept(rank: Rank) -> None:
    with pytest.raises(RuntimeError, match="announced gradients that it does not keep any more"):
        rank.again.begin(rank.step, rank.plan("20 5 0.4 0-3"), AT)


def test_a_group_that_keeps_nothing_computes_what_others_miss(rank: Rank) -> None:
    rank.again.enabled = False
    handles = [announce('{"a": 1}', ((KEEPS, each),)) for each in ("", "20 5 0.4 0-3")]
    assert rank.again.begin(rank.step, rank.plan("", reconfigure_handles=handles), AT) == {0, 1, 2, 3}


def test_a_step_of_which_gradients_are_kept_is_not_counted_as_lost() -> None:
    incident = Incident("a peer failed", step=20, quorum_id=5)
    for kept in (True, False, True):
        incident.step_ended(False, kept)
    incident.step_ended(True)
    assert incident.steps_lost == 1 and [*incident.seconds] == ["vote", "next step"]
