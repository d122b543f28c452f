"""Makes one slot of the parts of a state that several groups have (``shares.py``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import List, NamedTuple, Optional, Tuple

from torchft.checkpointing.snapshots import slots
from torchft.checkpointing.snapshots.slots import PAGE, Header, Index, Region, Slot, SlotError

_AT_ONCE = 1 << 20  # bytes


class Source(NamedTuple):
    """A slot with a part of a state, in this host's memory or that of another one.

    Attributes:
        where: names it.
        nbytes: its size; None: its keeper has compared it with the header.
        read: yields the bytes of the slot from an offset, of a length; always of the same state. It raises a
            SlotError where it cannot.
    """

    where: str
    nbytes: Optional[int]
    read: Callable[[int, int], Iterator[bytes]]


def local(path: Path) -> Source:
    """Returns a slot in this host's memory. SlotError: it is not complete."""
    header = slots.read_header(path)

    def read(offset: int, length: int) -> Iterator[bytes]:
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                while length and (block := file.read(min(length, _AT_ONCE))):
                    yield block
                    length -= len(block)
        except OSError as error:
            raise SlotError(f"{path}: {error.strerror}") from error
        if slots.read_header(path) != header:
            raise SlotError(f"{path} has another state now")

    return Source(str(path), header.nbytes, read)


def gather(
    sources: Sequence[Callable[[], Source]],
    into: Path,
    fits: Callable[[Header], bool],
    moved: Callable[[], None] = lambda: None,
) -> Slot:
    """Makes a slot with all regions of a state. What a source cannot give is taken from the next that has it.

    Args:
        sources: return the slots that have them; the first ones are preferred.
        into: a file that is written for the time of the call, in memory; the slot keeps its memory.
        fits: whether a header is that of the state.
        moved: called as it gets on.

    Raises:
        SlotError: a region is in none of them; the message has the cause of each.
    """
    causes: List[str] = []
    indexes: List[Tuple[Source, Index]] = []
    for opened in sources:
        try:
            source = opened()
            index = _index(source)
            if not fits(index.header):
                raise SlotError(f"{source.where} has step {index.header.step} now")
            if indexes and _layout(index) != _layout(indexes[0][1]):
                raise SlotError(f"{source.where} has another state than {indexes[0][0].where}: sizes differ")
            indexes.append((source, index))
        except SlotError as error:
            causes.append(str(error))
    if not indexes:
        raise SlotError("; ".join(causes) or "there is no source")
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.open(into, flags, 0o600)
        try:
            index = indexes[0][1]
            regions = [_region(file, number, indexes, causes, moved) for number in range(len(index.regions))]
            slots.complete(file, index._replace(regions=regions))
        finally:
            os.close(file)
        return Slot.open(into, moved=moved)
    except OSError as error:
        raise SlotError(f"no room for a copy of other groups: {error.strerror}") from error
    finally:
        with suppress(FileNotFoundError):
            into.unlink()


def _index(source: Source) -> Index:
    def read(offset: int, length: int) -> bytes:
        return b"".join(source.read(offset, length))

    return slots.read_index(source.where, read(0, PAGE), source.nbytes, read)


def _layout(index: Index) -> List[Tuple[int, int]]:
    return [(region.offset, region.length) for region in index.regions]


def _region(
    file: int,
    number: int,
    indexes: List[Tuple[Source, Index]],
    causes: List[str],
    moved: Callable[[], None],
) -> Region:
    """Copies a region from the first source that gives it undamaged."""
    for source, index in indexes:
        region = index.regions[number]
        if region.digests is None:
            continue
        try:
            offset = region.offset
            for block in source.read(offset, slots.padded(region.length)):
                slots.put(file, block, offset)
                offset += len(block)
                moved()
            if slots.fits(region, file):
                return region
            raise SlotError(f"{source.where}: region {number} is damaged")
        except SlotError as error:
            causes.append(str(error))
    raise SlotError("; ".join([*causes, f"no copy has region {number}"]))
