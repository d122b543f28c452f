"""A saved state of another model is found before anything of it is loaded."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from torchft.checkpointing.codec.encoding import Encoded
from torchft.checkpointing.snapshots.fits import misfit


def against(saved: Any, own: Any) -> str | None:
    return misfit(json.loads(Encoded(saved).structure), own)


def trained(model: nn.Module, steps: int = 1) -> dict[str, Any]:
    adam = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        adam.step()
    return {"model": model.state_dict(), "adam": adam.state_dict(), "step": steps, "scale": torch.ones(1)}


def test_a_new_optimizer_has_no_state_yet() -> None:
    saved = trained(nn.Linear(2, 3))
    assert against(saved, trained(nn.Linear(2, 3), steps=0)) is None
    assert against(saved, trained(nn.Linear(2, 3), steps=2)) is None


def test_another_kind_of_value_in_place_of_a_tensor() -> None:
    saved = trained(nn.Linear(2, 3))
    assert against(saved, {**trained(nn.Linear(2, 3), 0), "scale": None}) is None


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (nn.Linear(2, 4), r"['model']['weight'] is float32 [3, 2] there and float32 [4, 2] in this group"),
        (nn.Linear(2, 3).double(), r"['model']['weight'] is float32 [3, 2] there and float64 [3, 2] in this"),
        (nn.Linear(2, 3, bias=False), r"it has ['model']['bias'], and the state of this group has not"),
        (nn.Sequential(nn.Linear(2, 3)), r"it has no tensor ['model']['0.weight'], and the state of this"),
    ],
)
def test_another_model(own: nn.Module, why: str) -> None:
    found = against(trained(nn.Linear(2, 3)), trained(own, steps=0))
    assert found is not None and why in found


def test_more_values_without_tensors_change_nothing() -> None:
    assert against({"a": torch.ones(2), "b": 3}, {"a": torch.ones(2)}) is None
    assert against({"a": torch.ones(2), "b": [torch.ones(1)]}, {"a": torch.ones(2), "b": []}) is None
    assert against({"a": torch.ones(2), "b": {"c": torch.ones(1)}}, {"a": torch.ones(2)}) == (
        "it has ['b'], and the state of this group has not"
    )
