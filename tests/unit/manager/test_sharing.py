from __future__ import annotations

import torch
from torch import nn, optim

from torchft._manager.step.sharing import SharedStep


def optimizers() -> tuple[optim.Optimizer, optim.Optimizer]:
    one, other = (optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0) for _ in range(2))
    return one, other


def ends(sharing: SharedStep, optimizer: optim.Optimizer) -> None:
    """As the Manager after a decision."""
    sharing.ended.append(optimizer)
    sharing.reduced = False


def test_optimizers_that_begin_before_a_reduction_share_a_step() -> None:
    one, other = optimizers()
    sharing = SharedStep()
    assert not sharing.begins(one), "the first one begins the step"
    sharing.begun.append(one)
    assert sharing.begins(other)
    assert not sharing.begins(one), "it begins the step again"
    sharing.begun.append(other)
    ends(sharing, one)
    assert not sharing.begins(other)


def test_what_was_reduced_is_of_those_that_have_begun() -> None:
    one, other = optimizers()
    sharing = SharedStep()
    sharing.begun.append(one)
    sharing.reduced = True
    assert not sharing.begins(other)


def test_a_decision_holds_for_all_optimizers_of_a_step() -> None:
    one, other = optimizers()
    sharing = SharedStep()
    sharing.begun.append(one)
    sharing.begun.append(other)
    sharing.reduced = True
    assert not sharing.ends(one)
    ends(sharing, one)
    assert sharing.ends(other)
    assert not sharing.ends(one), "it steps a second time"
    sharing.reduced = True
    assert not sharing.ends(other), "a gradient was reduced after the vote"


def test_optimizers_that_begin_alone_have_votes_of_their_own() -> None:
    """With groups of upstream each begins a step, and the last of these goes on."""
    one, other = optimizers()
    sharing = SharedStep()
    sharing.begun.append(other)
    ends(sharing, one)
    assert not sharing.ends(other)
