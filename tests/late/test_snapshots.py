"""Copies of a state on a device: of the values that were queued when the step began, and of no later ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch

from tests.unit.manager.snapshots.one_rank import Rank
from torchft.checkpointing.memory import staging
from torchft.checkpointing.snapshots import slots


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert staging.BLOCK % slots.PIECE == 0, "a block has whole pieces"
    monkeypatch.setattr(staging, "BLOCK", 64 << 10)
    monkeypatch.setattr(slots, "PIECE", 32 << 10)


def state() -> dict[str, torch.Tensor]:
    return {
        "weights": torch.zeros(50_000, device="late"),
        "statistics": torch.zeros(4, device="late"),
        "host": torch.zeros(3),
    }


def restored() -> Rank:
    again = Rank(state(), life=1)
    assert again.restore() == 1, again.said
    return again


def test_a_copy_follows_the_work_before_and_precedes_that_after(late: ModuleType) -> None:
    mine = state()
    rank = Rank(mine, unchanged=[mine["weights"].data_ptr()])
    rank.restore()
    late.delays(46, 100, 2_000)
    mine["weights"].fill_(1)  # the optimizer of the step before
    mine["statistics"].fill_(1)
    mine["host"].fill_(1)
    rank.begin(1)
    mine["statistics"].fill_(2)  # the forward pass
    rank.snapshots.end()
    mine["weights"].fill_(2)  # the optimizer
    late.delays(0, 0, 0)
    assert rank.said == []
    rank.snapshots.close(finished=False)
    again = restored()
    for name, value in again.loaded.items():
        assert value.cpu().eq(1).all(), name
    # Those that the rank has are copied by its own function; others would be on the device.
    assert again.loaded["weights"].device.type == "cpu"


def test_a_copy_does_not_wait_for_the_forward_pass(late: ModuleType) -> None:
    mine = state()
    mine["weights"].fill_(1)
    rank = Rank(mine, unchanged=[mine["weights"].data_ptr()])
    rank.restore()
    torch.accelerator.synchronize()
    rank.begin(1)
    with late.held(torch.accelerator.current_stream()):
        mine["statistics"].fill_(3)  # the forward pass, which is queued and does not run
        with ThreadPoolExecutor(1) as other:
            other.submit(rank.snapshots.end).result(30)
    assert rank.said == []
    rank.snapshots.close(finished=False)
    assert restored().loaded["weights"].eq(1).all()


def test_tensors_that_a_rank_lacks_are_loaded_on_its_device(late: ModuleType) -> None:
    mine = {**state(), "moments": {0: torch.ones(5, device="late")}}
    rank = Rank(mine)
    rank.restore()
    rank.step(1)
    assert rank.said == []
    rank.snapshots.close(finished=False)
    again = Rank({**state(), "moments": {}}, life=1)
    assert again.restore() == 1, again.said
    assert again.loaded["moments"][0].device.type == "late"
    assert again.loaded["moments"][0].tolist() == [1] * 5
