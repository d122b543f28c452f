"""A state is put together from slots with parts of it; a damaged or torn part is taken from another slot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.checkpointing.checkpoint_states import assert_same
from torchft import _keeper
from torchft.checkpointing.codec.encoding import Encoded
from torchft.checkpointing.memory.host import HostMemory
from torchft.checkpointing.snapshots import reading, slots
from torchft.checkpointing.snapshots.reading import Slot, Source
from torchft.checkpointing.snapshots.shares import SMALL, Share
from torchft.checkpointing.snapshots.slots import Header, SlotError, StateKey

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


def whole(paths: list[Path], step: int = 7) -> Slot:
    return reading.read([reading.local(path) for path in paths], StateKey(step, 3, 0, 1))


def flip(path: Path, region: int) -> None:
    found = index(path).regions[region]
    data = bytearray(path.read_bytes())
    data[found.offset + found.length // 2] ^= 1
    path.write_bytes(data)


def index(path: Path) -> reading.Index:
    return reading.read_index(reading.local(path))


def test_a_part_takes_the_memory_of_a_part() -> None:
    paths = [keep(group) for group in range(3)]
    large = [4 * size for size in SIZES if 4 * size > SMALL]
    used = [path.stat().st_blocks * 512 for path in paths]
    assert sum(used) <= 2 * sum(large) + 3 * 8 * 4096
    before = paths[0].stat().st_blocks
    keep(0, step=8)
    assert paths[0].stat().st_blocks == before
    keep(0, step=9, parts=2)  # two groups are left
    assert_same(reading.mapped(paths[0]).state(), state(9))
    paths[0] = keep(0, step=10)
    assert paths[0].stat().st_blocks <= before, "the memory of what it does not keep any more is free again"


@pytest.mark.parametrize("lost", range(3))
def test_any_host_may_be_lost(lost: int) -> None:
    paths = [keep(group) for group in range(3)]
    slot = whole([path for path in paths if path != paths[lost]])
    assert_same(slot.state(), state(7))
    assert slot.header.share.whole and slot.header.step == 7


def test_a_part_is_no_state() -> None:
    path = keep(1)
    assert reading.mapped(path).header.share == Share(1, 3, 2) == slots.read_header(path).share
    with pytest.raises(SlotError, match="no copy has region"):
        whole([path])
    with pytest.raises(SlotError, match="there is no source"):
        whole([])


def test_each_damaged_region_is_taken_from_another_slot() -> None:
    for region in range(len(SIZES) - 1):
        paths = [keep(group) for group in range(3)]
        having = [path for path in paths if index(path).regions[region].digests is not None]
        assert len(having) == (3 if 4 * SIZES[region] <= SMALL else 2)
        for path in having[:-1]:
            flip(path, region)
        assert_same(whole(paths).state(), state(7))
        flip(having[-1], region)
        with pytest.raises(SlotError, match=f"g.*: region {region} is damaged.*no copy has region {region}"):
            whole(paths)


def test_torn_slots_and_those_of_another_step_or_state_are_named() -> None:
    paths = [keep(group, parts=4) for group in range(4)]
    slots.invalidate(paths[0])
    assert_same(whole(paths).state(), state(7))
    keep(1, step=9)
    with pytest.raises(SlotError, match=r"g0/rank-0/0: it is not complete.*g1/rank-0/0 has step 9 now"):
        whole(paths)


def test_a_group_with_another_state_is_named() -> None:
    paths = [keep(group, parts=4) for group in range(4)]
    keep(2, parts=4, made={"other": torch.zeros(60_000), "more": torch.zeros(9)})
    assert_same(whole(paths).state(), state(7))
    slots.invalidate(paths[1])
    with pytest.raises(SlotError, match=r"g2/rank-0/0 has another state than .*g0.*: sizes differ"):
        whole(paths)


def test_a_slot_that_is_overwritten_meanwhile_is_not_read() -> None:
    paths = [keep(group) for group in range(3)]
    opened = []

    def opens(offset: int, length: int) -> Any:
        opened.append(offset)
        if len(opened) == 4:  # after page, table and structure
            keep(0, step=9)
        return reading.local(paths[0]).open(offset, length)

    sources = [Source("the first", opens), *map(reading.local, paths[1:])]
    assert_same(reading.read(sources, StateKey(7, 3, 0, 1)).state(), state(7))
    paths[0], opened[:] = keep(0), []
    with pytest.raises(SlotError, match=r"the first: region \d is damaged.*no copy has region"):
        reading.read(sources[:2], StateKey(7, 3, 0, 1))


def test_an_array_is_in_all_groups() -> None:
    """It is not copied as the memory of a tensor, but as one value."""
    made = {"array": np.arange(50_000), "w": torch.ones(50_000)}
    for group in range(3):
        assert_same(reading.mapped(keep(group, made=made)).state()["array"], made["array"])


def test_too_little_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: HostMemory, nbytes: int) -> torch.Tensor:
        raise MemoryError(f"{nbytes} bytes")

    monkeypatch.setattr(HostMemory, "take", full)
    with pytest.raises(SlotError, match=r"there is no memory for a copy of \d+ bytes: 160000 bytes"):
        whole([keep(group) for group in range(3)])
