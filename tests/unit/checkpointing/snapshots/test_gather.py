"""A state is put together from slots with parts of it; a damaged or torn part is taken from another slot."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpointing.checkpoint_states import assert_same
from torchft import _keeper
from torchft.checkpointing.codec.encoding import Encoded
from torchft.checkpointing.snapshots import gather, slots
from torchft.checkpointing.snapshots.shares import SMALL, Share
from torchft.checkpointing.snapshots.slots import Header, Slot, SlotError

SIZES = (40_000, 30_000, 3, 50_000, 20_000, 0)  # elements of 4 bytes; of the third all groups have a copy


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_keeper.ROOT_ENV, str(tmp_path / "memory"))
    monkeypatch.setattr(slots, "PIECE", 4096)  # regions of several pieces


def state(step: int) -> dict[str, Any]:
    return {
        "model": {str(i): torch.arange(size, dtype=torch.float32) + step for i, size in enumerate(SIZES)},
        "step": step,
    }


def keep(group: int, step: int = 7, parts: int = 3, copies: int = 2, made: Any = None) -> Path:
    """The slot of a group."""
    path = slots.folder_of("job", f"g{group}", 0) / "0"
    path.parent.mkdir(parents=True, exist_ok=True)
    header = Header("job", f"g{group}", 0, 1, step, 0, 3, 0.0, share=Share.of(group, parts, copies))
    for _ in slots.write(path, header, Encoded(state(step) if made is None else made)):
        pass
    return path


def whole(paths: list[Path], tmp_path: Path, step: int = 7) -> Slot:
    into = tmp_path / "into"
    try:
        sources: list[Callable[[], gather.Source]] = [partial(gather.local, path) for path in paths]
        return gather.gather(sources, into, lambda header: header.step == step)
    finally:
        assert not into.exists()


def flip(path: Path, region: int) -> None:
    found = index(path).regions[region]
    data = bytearray(path.read_bytes())
    data[found.offset + found.length // 2] ^= 1
    path.write_bytes(data)


def index(path: Path) -> slots.Index:
    data = path.read_bytes()
    return slots.read_index(path, data[: slots.PAGE], len(data), lambda at, length: data[at : at + length])


def test_a_part_takes_the_memory_of_a_part(tmp_path: Path) -> None:
    paths = [keep(group) for group in range(3)]
    large = [4 * size for size in SIZES if 4 * size > SMALL]
    used = [path.stat().st_blocks * 512 for path in paths]
    assert sum(used) <= 2 * sum(large) + 3 * 8 * 4096
    before = paths[0].stat().st_blocks
    keep(0, step=8)
    assert paths[0].stat().st_blocks == before
    keep(0, step=9, parts=2)  # two groups are left
    assert_same(Slot.open(paths[0]).state(), state(9))
    paths[0] = keep(0, step=10)
    assert paths[0].stat().st_blocks <= before, "the memory of what it does not keep any more is free again"


@pytest.mark.parametrize("lost", range(3))
def test_any_host_may_be_lost(lost: int, tmp_path: Path) -> None:
    paths = [keep(group) for group in range(3)]
    slot = whole([path for path in paths if path != paths[lost]], tmp_path)
    assert_same(slot.state(), state(7))
    assert slot.header.share is None and slot.header.step == 7


def test_a_part_is_no_state(tmp_path: Path) -> None:
    path = keep(1)
    slot = Slot.open(path)
    assert slot.header.share == Share(1, 3, 2) == slots.read_header(path).share
    with pytest.raises(SlotError, match="has a part of a state"):
        slot.state()
    with pytest.raises(SlotError, match="no copy has region"):
        whole([path], tmp_path)
    with pytest.raises(SlotError, match="there is no source"):
        whole([], tmp_path)


def test_each_damaged_region_is_taken_from_another_slot(tmp_path: Path) -> None:
    for region in range(len(SIZES) - 1):
        paths = [keep(group) for group in range(3)]
        having = [path for path in paths if index(path).regions[region].digests is not None]
        assert len(having) == (3 if 4 * SIZES[region] <= SMALL else 2)
        for path in having[:-1]:
            flip(path, region)
        assert_same(whole(paths, tmp_path).state(), state(7))
        flip(having[-1], region)
        with pytest.raises(SlotError, match=f"g.*: region {region} is damaged.*no copy has region {region}"):
            whole(paths, tmp_path)


def test_torn_slots_and_those_of_another_step_or_state_are_named(tmp_path: Path) -> None:
    paths = [keep(group, parts=4) for group in range(4)]
    slots.invalidate(paths[0])
    assert_same(whole(paths, tmp_path).state(), state(7))
    keep(1, step=9)
    with pytest.raises(SlotError, match=r"g0/rank-0/0: it is not complete.*g1/rank-0/0 has step 9 now"):
        whole(paths, tmp_path)


def test_a_group_with_another_state_is_named(tmp_path: Path) -> None:
    paths = [keep(group, parts=4) for group in range(4)]
    keep(2, parts=4, made={"other": torch.zeros(60_000), "more": torch.zeros(9)})
    assert_same(whole(paths, tmp_path).state(), state(7))
    slots.invalidate(paths[1])
    with pytest.raises(SlotError, match=r"g2/rank-0/0 has another state than .*g0.*: sizes differ"):
        whole(paths, tmp_path)


def test_a_slot_that_is_overwritten_meanwhile_is_not_read(tmp_path: Path) -> None:
    paths = [keep(group) for group in range(3)]
    source = gather.local(paths[0])
    keep(0, step=9)
    with pytest.raises(SlotError, match="has another state now"):
        list(source.read(0, slots.PAGE))


def test_no_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [keep(group) for group in range(3)]
    monkeypatch.setattr(os, "O_NOFOLLOW", 0)
    (tmp_path / "into").symlink_to("/dev/full")
    with pytest.raises(SlotError, match="no room for a copy of other groups: No space left on device"):
        gather.gather([partial(gather.local, path) for path in paths], tmp_path / "into", lambda header: True)
