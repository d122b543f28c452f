from __future__ import annotations

import torch
from torch import nn, optim

from torchft._manager.step.sharing import Sharing


def optimizers() -> tuple[optim.Optimizer, optim.Optimizer]:
    one, other = (optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0) for _ in range(2))
    return one, other


def test_optimizers_that_begin_before_a_reduction_share_a_step() -> None:
    one, other = optimizers()
    sharing = Sharing()
    assert not sharing.begins(one, 0), "the first one begins the step"
    sharing.begin(one)
    assert sharing.begins(other, 0)
    assert not sharing.begins(other, 1), "what was reduced is of the first one alone"
    assert not sharing.begins(one, 0), "it begins the step again"
    sharing.begin(other)
    sharing.end(one, 3)
    assert not sharing.begins(other, 0)


def test_a_decision_holds_for_all_optimizers_of_a_step() -> None:
    one, other = optimizers()
    sharing = Sharing()
    sharing.begin(one)
    sharing.begin(other)
    assert not sharing.ends(one, 3)
    sharing.end(one, 3)
    assert sharing.ends(other, 3)
    assert not sharing.ends(other, 4), "a gradient was reduced after the vote"
    assert not sharing.ends(one, 3), "it steps a second time"


def test_optimizers_that_begin_alone_have_votes_of_their_own() -> None:
    """With groups of upstream each begins a step, and the last of these goes on."""
    one, other = optimizers()
    sharing = Sharing()
    sharing.begin(other)
    sharing.end(one, 3)
    assert not sharing.ends(other, 3)
