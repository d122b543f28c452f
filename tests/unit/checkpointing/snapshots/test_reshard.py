"""Copies of shards are read by another number of ranks: as a checkpoint in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from tests.unit.checkpointing.snapshots.contents import as_rank
from tests.unit.checkpointing.snapshots.test_disk import part
from torchft import _keeper
from torchft.checkpointing.codec.encoding import Encoded
from torchft.checkpointing.snapshots import slots
from torchft.checkpointing.snapshots.reshard import resharded
from torchft.checkpointing.snapshots.shares import WHOLE, Share
from torchft.checkpointing.snapshots.slots import Header

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # PyTorch 2.7's own writer
]


def copy(
    step: int,
    rank: int,
    ranks: int = 2,
    group: str = "g",
    slot: str = "0",
    rows: int = 7,
    share: Share = WHOLE,
) -> Path:
    """Makes a copy of a shard whose values are those of the step."""
    path = slots.folder_of("job", group, rank) / slot
    path.parent.mkdir(parents=True, exist_ok=True)
    with as_rank(rank, ranks):
        state = {"w": part(torch.arange(float(rows)) + step, init_device_mesh("cpu", (ranks,)), 0)}
        header = Header("job", group, rank, ranks, step, 0, 3, 0.0, share=share)
        for _ in slots.write(path, header, Encoded(state)):
            pass
    return path


def test_the_newest_step_of_which_all_ranks_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_keeper.ROOT_ENV, str(tmp_path))
    said: list[str] = []

    def made(ranks: int = 1, beyond: int = 0) -> list[float]:
        checkpoint = resharded("job", ranks, beyond, said.append)
        if checkpoint is None:
            return []
        read = {"w": torch.zeros(7)}
        dcp.load(read, checkpoint_id=checkpoint, no_dist=True)
        return read["w"].tolist()

    assert made() == []
    copy(5, 0)
    copy(5, 1, group="other")
    copy(6, 0, slot="1")  # a rank is missing
    assert made() == (torch.arange(7.0) + 5).tolist()
    assert made(beyond=5) == [] and made(ranks=2) == []

    damaged = copy(6, 1)
    with open(damaged, "r+b") as file:
        file.seek(slots.PAGE)
        file.write(b"\xff")
    assert made() == (torch.arange(7.0) + 5).tolist()
    assert f"the copies of step 6, of 2 ranks, are not loaded: {damaged}: region 0 is damaged" in said[-1]
    copy(6, 1, group="other", slot="1")
    assert made() == (torch.arange(7.0) + 6).tolist()


def test_parts_of_several_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_keeper.ROOT_ENV, str(tmp_path))
    said: list[str] = []
    for rank in range(2):
        for group in range(3):
            copy(5, rank, group=f"g{group}", rows=40_000, share=Share(group, 3, 2))
    slots.invalidate(slots.folder_of("job", "g0", 0) / "0")  # and each part of the rank is left
    checkpoint = resharded("job", 1, 0, said.append)
    assert checkpoint is not None, said
    read = {"w": torch.zeros(40_000)}
    dcp.load(read, checkpoint_id=checkpoint, no_dist=True)
    assert torch.equal(read["w"], torch.arange(40_000.0) + 5)
    slots.invalidate(slots.folder_of("job", "g2", 0) / "0")
    assert resharded("job", 1, 0, said.append) is None
    assert said[-1] == "the copies of step 5, of 2 ranks, are not loaded: no copy has region 0"
