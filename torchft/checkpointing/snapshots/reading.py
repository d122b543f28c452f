"""Reads slots, of this host and of other ones, whole or with parts of a state (`shares.py`).

A state is put together from all slots that have it, piece by piece: what one cannot give undamaged, the next
one gives. The digest of each piece decides. So it does not matter that a slot is overwritten, or that a
connection breaks, while it is read.
"""

from __future__ import annotations

import http.client
import json
import logging
import mmap
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, List, NamedTuple

import torch

from torchft.checkpointing.client.progress import TransferProgress
from torchft.checkpointing.codec.encoding import decode
from torchft.checkpointing.codec.stream import tensor_memory
from torchft.checkpointing.memory.host import HostMemory
from torchft.checkpointing.snapshots import slots
from torchft.checkpointing.snapshots.shares import WHOLE
from torchft.checkpointing.snapshots.slots import PAGE, Header, Region, Section, SlotError, StateKey

_THREADS = 4  # that read and verify: one copies 1 to 2 GB/s to memory that is used first
_RUN = 64 << 20  # bytes that are read in a row by one of them
_AT_ONCE = 1 << 20  # bytes of a read: between two, the other ranks hear that this one gets on

_log = logging.getLogger(__name__)


class Source(NamedTuple):
    """A slot that can be read.

    Attributes:
        where: names it.
        open: returns its bytes from an offset, of a length: an open file, or an answer of HTTP. OSError,
            SlotError: it cannot.
    """

    where: str
    open: Callable[[int, int], Any]


def local(path: Path) -> Source:
    """Returns a slot in this host's memory, or on its disk."""

    def opened(offset: int, length: int) -> BinaryIO:
        file = open(path, "rb", buffering=0)  # noqa: SIM115  the reader closes it
        file.seek(offset)
        return file

    return Source(str(path), opened)


class Slot(NamedTuple):
    """The state in a slot, all of whose bytes were verified.

    Attributes:
        where: names its places.
        header: its header.
        tree: the structure, decoded from JSON.
        flats: the memory of each region, as flat tensors of bytes in host memory; undefined where it is
            missing.
        regions: the description of each.
    """

    where: str
    header: Header
    tree: Any
    flats: List[torch.Tensor]
    regions: List[Region]

    def state(self) -> Any:
        """Returns the state. Its tensors have the memory of :attr:`flats`.

        Raises:
            CheckpointError: it holds a type that is not allowed; or DTensors, and torch.distributed is not
                initialized.
        """
        return decode(self.tree, self.flats, self.where)


class Index(NamedTuple):
    """The header, the structure and the regions of a slot."""

    source: Source
    header: Header
    tree: Any
    regions: List[Region]


def read_index(source: Source) -> Index:
    """Reads the index of a slot. SlotError: it is not complete, or damaged."""
    where = source.where
    try:
        header = slots.parse_header(where, _bytes(source, 0, PAGE))
        table = _section(source, header.regions, "table of regions")
        structure = _section(source, header.structure, "structure")
        return Index(source, header, json.loads(structure), [Region(*row) for row in json.loads(table)])
    except SlotError:
        raise
    except (OSError, http.client.HTTPException) as error:
        raise SlotError(f"{where}: {_reason(error)}") from None
    except (ValueError, TypeError) as error:
        raise SlotError(f"{where}: its table of regions is of another version: {error!r}") from error


def _section(source: Source, section: Section, what: str) -> bytes:
    text = _bytes(source, section.offset, section.length)
    if zlib.crc32(text) != section.crc:
        raise SlotError(f"{source.where}: its {what} is damaged")
    return text


def _bytes(source: Source, offset: int, length: int) -> bytes:
    into = bytearray(length)
    stream = source.open(offset, length)
    try:
        _fill(stream, memoryview(into), source)
    finally:
        stream.close()
    return bytes(into)


def _fill(
    stream: Any, into: memoryview, source: Source, moved: Callable[[int], None] = lambda count: None
) -> None:
    while into:
        count = stream.readinto(into[:_AT_ONCE])
        if not count:
            raise SlotError(f"{source.where} ended {len(into)} bytes early: it may be written anew")
        into = into[count:]
        moved(count)


def _reason(error: Exception) -> object:
    return getattr(error, "strerror", None) or getattr(error, "reason", None) or error or type(error).__name__


class _Piece(NamedTuple):
    region: int
    number: int  # in the region
    memory: torch.Tensor  # where it is read to

    def offset(self, index: Index) -> int:
        return index.regions[self.region].offset + self.number * slots.PIECE

    def fits(self, index: Index) -> bool:
        digests = index.regions[self.region].digests
        return digests is not None and slots.digest(self.memory) == digests[self.number]


def _pieces(regions: Sequence[Region], flats: Sequence[torch.Tensor]) -> Iterator[_Piece]:
    for region, flat in enumerate(flats):
        for number, memory in enumerate(flat.split(slots.PIECE) if regions[region].length else ()):
            yield _Piece(region, number, memory)


def mapped(path: Path) -> Slot:
    """Opens and verifies a slot of this host without a copy: its regions change when the trainer writes its
    next copy there. So compare the header with that of :func:`slots.read_header` after reading. What a caller
    writes to them does not reach the file. SlotError: it is not complete, or damaged.
    """
    index = read_index(local(path))
    try:
        with open(path, "rb") as file:
            # Copy on write: PyTorch takes no memory that is read-only.
            mapping = mmap.mmap(file.fileno(), index.header.nbytes, access=mmap.ACCESS_COPY)
        flats = [
            torch.empty(region.length, dtype=torch.uint8, device="cpu")
            if region.digests is None or not region.length
            else torch.frombuffer(mapping, dtype=torch.uint8, count=region.length, offset=region.offset)
            for region in index.regions
        ]
    except (OSError, ValueError) as error:  # its trainer writes a smaller one
        raise SlotError(f"{path}: {error}") from error
    for piece in _pieces(index.regions, flats):
        if index.regions[piece.region].digests is not None and not piece.fits(index):
            raise SlotError(f"{path}: region {piece.region} is damaged")
    return Slot(str(path), index.header, index.tree, flats, index.regions)


def read(sources: Sequence[Source], which: StateKey, moved: Callable[[], None] = lambda: None) -> Slot:
    """Reads a state into memory of this process, from all slots that have it, or parts of it.

    Args:
        sources: the slots; the first ones are preferred.
        which: the state.
        moved: called as it gets on, on several threads.

    Raises:
        SlotError: a piece is in none of them; the message has the cause of each.
    """
    causes: List[str] = []
    others = _indexes(sources, which, causes)
    first = next(others, None)
    if first is None:
        raise SlotError("; ".join(causes) or "there is no source")
    memory = HostMemory()
    try:
        flats = [memory.take(region.length) for region in first.regions]
    except (RuntimeError, MemoryError) as error:
        raise SlotError(f"there is no memory for a copy of {first.header.nbytes} bytes: {error}") from error
    progress = TransferProgress(f"reading {first.source.where}", _log)
    progress.expect(sum(region.length for region in first.regions))

    def count(nbytes: int) -> None:
        progress.count(nbytes)
        moved()

    left = list(_pieces(first.regions, flats))
    gave: List[Index] = []  # the slots that have given something
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="torchft_slot") as threads:

        def take(index: Index) -> None:
            nonlocal left
            runs = list(threads.map(partial(_read_run, index, causes, count), _runs(left, index)))
            lacks = [piece for piece in left if index.regions[piece.region].digests is None]
            before, left = len(left), lacks + [piece for failed in runs for piece in failed]
            if len(left) < before:
                gave.append(index)

        for index in chain([first], others):
            take(index)
            if not left:
                break
        for index in gave:  # grows as long as something arrives
            if left:
                take(index)
    if left:
        raise SlotError("; ".join([*dict.fromkeys(causes), f"no copy has region {left[0].region}"]))
    where = ", ".join(dict.fromkeys(index.source.where for index in gave)) or first.source.where
    return Slot(where, first.header._replace(share=WHOLE), first.tree, flats, first.regions)


def _indexes(sources: Sequence[Source], which: StateKey, causes: List[str]) -> Iterator[Index]:
    """Yields the slots that have the state, with the same regions as the first one."""
    first = None
    for source in sources:
        try:
            index = read_index(source)
            if index.header.state != which:
                raise SlotError(f"{source.where} has step {index.header.step} now")
            first = first or index
            if [each.length for each in index.regions] != [each.length for each in first.regions]:
                raise SlotError(f"{source.where} has another state than {first.source.where}: sizes differ")
            yield index
        except SlotError as error:
            causes.append(str(error))


def _runs(pieces: Sequence[_Piece], index: Index) -> List[List[_Piece]]:
    """Divides the pieces that a slot has into runs, each of which lies in a row in it."""
    runs: List[List[_Piece]] = []
    begin = end = -1
    has = [piece for piece in pieces if index.regions[piece.region].digests is not None]
    for piece in sorted(has, key=lambda piece: piece.offset(index)):
        offset, nbytes = piece.offset(index), piece.memory.nbytes
        if not runs or offset != slots.aligned(end) or offset + nbytes - begin > _RUN:
            runs.append([])
            begin = offset
        runs[-1].append(piece)
        end = offset + nbytes
    return runs


def _read_run(
    index: Index, causes: List[str], moved: Callable[[int], None], run: Sequence[_Piece]
) -> List[_Piece]:
    """Reads pieces that lie in a row in a slot. Returns those that did not arrive undamaged."""
    source, failed, left = index.source, [], list(run)
    at, end = run[0].offset(index), run[-1].offset(index) + run[-1].memory.nbytes
    try:
        stream = source.open(at, end - at)
        try:
            while left:
                piece = left[0]
                _fill(stream, memoryview(bytearray(piece.offset(index) - at)), source)
                _fill(stream, tensor_memory(piece.memory), source, moved)
                at = piece.offset(index) + piece.memory.nbytes
                if not piece.fits(index):
                    causes.append(f"{source.where}: region {piece.region} is damaged")
                    failed.append(piece)
                del left[0]
        finally:
            stream.close()
    except SlotError as error:
        causes.append(str(error))
    except (OSError, http.client.HTTPException) as error:
        causes.append(f"{source.where}: {_reason(error)}")
    return failed + left
