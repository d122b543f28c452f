"""Slots: copies of ranks' states in shared memory, as files that outlive the process.

    ROOT/<job>/<group>/rank-<r>/{0,1}     two slots of a rank; one is complete while the other is written
    ROOT/<job>/<group>/rank-<r>/lock      held by the trainer of that rank while it lives

ROOT is TORCHFT_SNAPSHOT_MEMORY, or /dev/shm/torchft-<uid>. Names are quoted as in a URL. A slot:

    0      magic, length and CRC of the header, the header as JSON, zeros: one page of 4096 bytes
    4096   the regions of tensors' memory, each at a multiple of 64 bytes
           the structure (JSON of `codec/encoding.py`)
           the table of regions (JSON, :class:`Region`)

Where a group keeps a part of its state alone (`shares.py`), the slot lacks the others' regions.

The page is zeroed before anything is written, and is written last, so a slot is complete only with it. All
that is read of a slot is covered by a check: header, structure and table by a CRC, regions by the digests of
their pieces of 16 MiB (`reading.py`).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import List, NamedTuple, Optional, Set, Tuple, Union

import torch

from torchft import _keeper
from torchft._keeper import quoted
from torchft._security import JOB_ENV
from torchft.checkpointing.codec.digest import digest_bytes
from torchft.checkpointing.codec.encoding import Encoded
from torchft.checkpointing.codec.layout import plain_node, tensor_nodes
from torchft.checkpointing.codec.stream import storage_bytes, tensor_memory
from torchft.checkpointing.memory.staging import StreamCopies, copies_for
from torchft.checkpointing.snapshots.due import Due
from torchft.checkpointing.snapshots.shares import WHOLE, Share, deal

SLOTS = ("0", "1")

MAGIC = b"TFTSLOT1"
PAGE = 4096
PIECE = 16 << 20  # bytes with a digest of their own
_ALIGNED = 64
_TRIES, _TRY_SEC = 10, 0.05  # for the lock of a rank
_LEAD = struct.Struct("<8sII")  # magic, length and CRC of the header
_held: Set[int] = set()  # files whose locks this process holds
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


class SlotError(RuntimeError):
    """A slot cannot be written, or holds no complete state; the message names the slot and the cause."""


class Section(NamedTuple):
    """Where the structure, or the table of regions, is in a slot: in bytes, and its CRC."""

    offset: int = 0
    length: int = 0
    crc: int = 0


class Header(NamedTuple):
    """The header of a slot.

    Attributes:
        job, group: names of the job and of the group, without the group's UUID.
        group_rank, group_world_size: which rank's state it is, of how many.
        step: the step of the state.
        batches: batches committed until then.
        quorum: the quorum in which the step was committed.
        saved: when the copy was complete, in seconds since 1970.
        disk: where this state is to be written to as well; None: nowhere.
        share: what of the state is in the slot.
        nbytes: size of the whole file.
        structure, regions: the sections with the structure, and with the table of regions.
    """

    job: str
    group: str
    group_rank: int
    group_world_size: int
    step: int
    batches: int
    quorum: int
    saved: float
    disk: Optional[Due] = None
    share: Share = WHOLE
    nbytes: int = 0
    structure: Section = Section()
    regions: Section = Section()

    @property
    def state(self) -> StateKey:
        """Which state of which rank it is, the same in all groups."""
        return StateKey(self.step, self.quorum, self.group_rank, self.group_world_size)


class StateKey(NamedTuple):
    """The state of a rank after a step of one history of the job."""

    step: int
    quorum: int
    group_rank: int
    group_world_size: int


class Region(NamedTuple):
    """A row of the table of regions.

    Attributes:
        offset, length: in the slot, in bytes.
        part: of the state, which it belongs to; None: all groups have it.
        digests: of its pieces; None: the slot lacks it.
        device: in the trainer, such as "cpu".
    """

    offset: int
    length: int
    part: Optional[int]
    digests: Optional[List[str]]
    device: str


def root() -> Path:
    """Returns the folder of all slots of this user, and makes it. SlotError: it cannot be made, or another
    user owns it or may write to it.
    """
    try:
        return _keeper.root()
    except OSError as error:
        raise SlotError(str(error)) from error


def job_name() -> str:
    """Returns the name of the job: TORCHFT_JOB_ID, or one made of the script, its arguments and the working
    folder.
    """
    if given := os.environ.get(JOB_ENV):
        return given
    told = json.dumps([os.getcwd(), sys.argv]).encode()
    return f"{Path(sys.argv[0]).stem or 'python'}-{hashlib.blake2b(told, digest_size=4).hexdigest()}"


def folder_of(job: str, group: str, rank: int) -> Path:
    """Returns the folder of a rank's slots. It need not exist. SlotError: as in :func:`root`."""
    return root() / quoted(job) / quoted(group) / f"rank-{rank}"


def hold(folder: Path, owner: str = "") -> Optional[int]:
    """Makes the folder of a rank, and locks it for this process until its end, or until :func:`let_go` is
    called with the returned file. Processes that it forks do not hold the lock. Returns None if another
    process, or another part of this one, has locked it.

    Args:
        folder: of the rank.
        owner: names the job that runs, by its lighthouse: see :func:`owner`.

    Raises:
        SlotError: the folder cannot be made.
    """
    for _ in range(_TRIES):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # the folder of an earlier job of this name is being removed
            time.sleep(_TRY_SEC)
            continue
        except OSError as error:
            raise SlotError(f"{folder}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A keeper that removes an old job holds the lock for a moment, and then the file is another one.
            if os.path.samestat(os.fstat(file), os.stat(folder / "lock")):
                _held.add(file)
                with suppress(OSError):  # there may be no room
                    os.ftruncate(file, 0)
                    os.pwrite(file, owner.encode(), 0)
                return file
        except OSError:
            pass
        os.close(file)
        time.sleep(_TRY_SEC)
    return None


def owner(folder: Path) -> Optional[str]:
    """Returns what the process has said that holds the slots of a rank; None: none does. Two jobs at one time
    can have one name, and must not take over states of each other.
    """
    with suppress(OSError):
        return _keeper.holder(folder / "lock")
    return None


def let_go(file: int) -> None:
    """Gives up a lock that :func:`hold` has returned."""
    _held.discard(file)
    os.close(file)


def _let_go_in_child() -> None:
    # Workers of a DataLoader outlive a trainer that is killed for some seconds. With its lock they would keep
    # the next trainer from its slots.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go_in_child)


def remove(folder: Path) -> None:
    """Removes the slots of a rank, its folder, and the folders of group and job if no rank is left."""
    with suppress(OSError):
        for name in (*SLOTS, "lock"):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
        folder.parent.rmdir()
        remove_job(folder.parents[1])


def remove_job(job: Path) -> None:
    """Removes the folder of a job in which no group has a folder any more. OSError: one has."""
    if not any(each.is_dir() for each in job.iterdir()):
        for each in job.iterdir():
            each.unlink(missing_ok=True)
    job.rmdir()


def read_header(path: Path) -> Header:
    """Returns a slot's header, or SlotError if incomplete. What follows it may still be damaged."""
    try:
        with open(path, "rb") as file:
            return parse_header(path, file.read(PAGE))
    except OSError as error:
        raise SlotError(f"{path}: {error.strerror}") from error


def headers(folder: Path) -> List[Tuple[Path, Optional[Header]]]:
    """Returns the slots of a rank, with None for the header of one that is not complete."""
    found: List[Tuple[Path, Optional[Header]]] = []
    for name in SLOTS:
        try:
            found.append((folder / name, read_header(folder / name)))
        except SlotError:
            found.append((folder / name, None))
    return found


def found(
    job: str, group: str, rank: int, say: Callable[[str], None], lighthouse: Optional[str] = None
) -> List[Tuple[Path, Header]]:
    """Returns the slots of a rank of any group of a job in this host's memory, the newest first; of several
    of one step, those of the rank's own group come first. Their regions are not verified.

    Args:
        job, group, rank: of the rank that would restore one.
        say: called with the reason for each slot that has no complete header, or is of another job.
        lighthouse: of the job, as in :func:`hold`; None: also the slots of another job that lives.

    Raises:
        SlotError: as in :func:`root`.
    """
    own = folder_of(job, group, rank)
    slots = []
    for path in sorted(own.parent.parent.glob(f"*/rank-{rank}/[01]")):
        try:
            check_job(path, lighthouse)
            slots.append((path, read_header(path)))
        except SlotError as error:
            say(str(error))
    return sorted(slots, key=lambda slot: (-slot[1].step, -slot[1].quorum, slot[0].parent != own))


def check_job(path: Path, lighthouse: Optional[str]) -> None:
    """Raises a SlotError if a slot is of a job that lives and has another lighthouse."""
    other = None if lighthouse is None else owner(path.parent)
    if other is not None and other != lighthouse:
        raise SlotError(
            f"{path}: it is of another job, which lives, with the lighthouse {other or '?'}; give each job "
            f"on a host its own {JOB_ENV}"
        )


def parse_header(where: Union[Path, str], page: bytes) -> Header:
    """Returns the header in the first page of a slot, or SlotError. ``where`` names the slot."""
    if len(page) < PAGE or not any(page):
        raise SlotError(f"{where}: it is not complete, its writer has ended before")
    magic, length, crc = _LEAD.unpack_from(page)
    text, rest = page[_LEAD.size : _LEAD.size + length], page[_LEAD.size + length :]
    if magic != MAGIC:
        raise SlotError(
            f"{where}: it begins with {magic!r} instead of {MAGIC!r}; another version may have made it"
        )
    if len(text) != length or zlib.crc32(text) != crc or any(rest):
        raise SlotError(f"{where}: its header is damaged")
    try:
        fields = json.loads(text)
        header = Header(**{name: fields[name] for name in Header._fields})
        return header._replace(
            disk=None if header.disk is None else Due(**fields["disk"]),
            share=Share(*header.share),
            structure=Section(*header.structure),
            regions=Section(*header.regions),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise SlotError(f"{where}: its header is of another version: {error!r}") from error


def pick(
    found: Sequence[Tuple[Path, Optional[Header]]], kept: Callable[[Header], bool] = lambda header: False
) -> Path:
    """Chooses the slot for the next copy: one that is not complete, else the older one, but none that is kept
    while there is another.

    Args:
        found: as :func:`headers` returns them.
        kept: whether a slot's state is still to be written elsewhere.
    """

    def worth(slot: Tuple[Path, Optional[Header]]) -> Tuple[bool, float, int]:
        header = slot[1]
        return (False, 0.0, 0) if header is None else (kept(header), header.saved, header.step)

    return min(found, key=worth)[0]


def invalidate(path: Path) -> None:
    """Makes a slot incomplete. SlotError: it cannot be written."""
    try:
        with open(path, "r+b") as file:
            file.write(bytes(PAGE))
    except OSError as error:
        raise SlotError(f"{path}: {error.strerror}") from error


def write(
    path: Path, header: Header, encoded: Encoded, holds: Callable[[], bool] = lambda: True
) -> Iterator[int]:
    """Writes a state to a slot, one piece for each item that is taken from the returned iterator: the number
    of bytes written. Only after the last one is the slot complete.

    Args:
        path: the slot; what it held is lost with the first item.
        header: without sizes and sections; ``saved`` is set at the end.
        encoded: the state, of which the share in the header is written. Its tensors must not change until the
            end. Those on devices are copied on a side stream, behind the work that is queued on the current
            stream at this call.
        holds: returns whether they have not, before the last piece. If they have, the slot stays incomplete.

    Raises:
        SlotError: from the iterator: there is no room, or the header is too large. The slot is not complete
            then.
    """
    flats = [storage_bytes(storage) for storage in encoded.storages]
    parts = _parts(encoded, [flat.numel() for flat in flats], header.share)
    has = [header.share.has(part) for part in parts]
    devices = {flat.device for flat, kept in zip(flats, has) if kept}
    copies = {device: kind(device) for device in devices if (kind := copies_for(device.type)) is not None}
    sources = [
        _Source(flat, part, kept, copies.get(flat.device)) for flat, part, kept in zip(flats, parts, has)
    ]
    return _written(path, header, encoded, sources, holds)


def _parts(encoded: Encoded, sizes: List[int], share: Share) -> Sequence[Optional[int]]:
    """The part of each region. All groups have what is not the memory of a tensor: it is read as a whole."""
    if share.whole:
        return [None] * len(sizes)
    tensors = {plain_node(node)[1] for node in tensor_nodes(json.loads(encoded.structure)).values()}
    return deal(sizes, share.parts, frozenset(range(len(sizes))) - tensors)


class _Source(NamedTuple):
    flat: torch.Tensor  # a region
    part: Optional[int]
    has: bool  # whether it is written
    copies: Optional[StreamCopies]  # how it is read on a device


def _written(
    path: Path, header: Header, encoded: Encoded, sources: Sequence[_Source], holds: Callable[[], bool]
) -> Iterator[int]:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield from _write(file, header, encoded, sources, holds)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in _FULL:
            with suppress(OSError):
                os.truncate(path, 0)  # others have use for the room
            nbytes = PAGE + len(encoded.structure) + sum(each.flat.numel() for each in sources if each.has)
            raise SlotError(f"{path}: no room for a copy of {nbytes} bytes: {error.strerror}") from error
        raise SlotError(f"{path}: {error.strerror}") from error


def _write(
    file: int, header: Header, encoded: Encoded, sources: Sequence[_Source], holds: Callable[[], bool]
) -> Iterator[int]:
    _put(file, bytes(PAGE), 0)
    yield PAGE
    table, offset = [], PAGE
    for flat, part, has, copies in sources:
        region = Region(offset, flat.numel(), part, [] if has else None, str(flat.device))
        table.append(region)
        if region.digests is not None:
            for piece in _pieces(flat, copies):
                _put(file, tensor_memory(piece), offset)
                region.digests.append(digest(piece))
                offset += piece.numel()
                yield piece.numel()
            offset = aligned(offset)
    sections = []
    for text in (encoded.structure, json.dumps(table, separators=(",", ":")).encode()):
        _put(file, text, offset)
        sections.append(Section(offset, len(text), zlib.crc32(text)))
        offset += len(text)
        yield len(text)
    os.ftruncate(file, offset)
    header = header._replace(saved=time.time(), nbytes=offset, structure=sections[0], regions=sections[1])
    fields = {**header._asdict(), "disk": None if header.disk is None else header.disk._asdict()}
    text = json.dumps(fields, separators=(",", ":")).encode()
    if _LEAD.size + len(text) > PAGE:
        raise SlotError(f"the header of a slot takes {len(text)} bytes, and at most {PAGE - _LEAD.size} fit")
    if not holds():
        return
    _put(file, (_LEAD.pack(MAGIC, len(text), zlib.crc32(text)) + text).ljust(PAGE, b"\0"), 0)
    yield PAGE


def _pieces(flat: torch.Tensor, copies: Optional[StreamCopies]) -> Iterator[torch.Tensor]:
    """Yields the pieces of a region in host memory, each valid until the next."""
    if flat.numel() == 0:
        return
    if copies is None:  # in host memory, or on a device of a type whose copies wait on the host
        yield from (piece.cpu() for piece in flat.split(PIECE))
        return
    for block in copies.in_blocks(flat):  # of a multiple of 16 MiB, but the last
        yield from block.split(PIECE)


def aligned(offset: int) -> int:
    """Returns where the next region begins after one that ends at an offset."""
    return offset + -offset % _ALIGNED


def digest(piece: torch.Tensor) -> str:
    """Returns the digest of a piece of a region."""
    return f"{int(digest_bytes(piece).item()) & (1 << 64) - 1:016x}"


def _put(file: int, data: Union[bytes, memoryview], offset: int) -> None:
    """Writes all of the data to a file. OSError: there is no room."""
    view = memoryview(data)
    while len(view):
        done = os.pwrite(file, view, offset)
        view, offset = view[done:], offset + done
