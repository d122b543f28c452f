"""Slots: copies of ranks' states in shared memory, as files that outlive the process.

    ROOT/<job>/<group>/rank-<r>/{0,1}     two slots of a rank; one is complete while the other is written
    ROOT/<job>/<group>/rank-<r>/lock      held by the trainer of that rank while it lives

ROOT is TORCHFT_SNAPSHOT_MEMORY, or /dev/shm/torchft-<uid>. Names are quoted as in a URL. A slot:

    0      magic, length and CRC of the header, the header as JSON, zeros: one page of 4096 bytes
    4096   the regions of tensors' memory, each padded with zeros to a multiple of 64 bytes
           the structure (JSON of `codec/encoding.py`)
           the table of regions (JSON): for each its offset, length, the digests of its pieces of 16 MiB, and
           its device in the trainer

Where a group keeps a part of its state alone (`shares.py`), the others' regions are holes, which take no
memory, and have null instead of digests.

The page is zeroed before anything is written, and is written last, so a slot is complete only with it. Every
byte of a slot is covered by a check: header, structure and table by a CRC, regions with their padding by
digests.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple, Union

import torch

from torchft import _keeper
from torchft._keeper import quoted
from torchft._security import JOB_ENV
from torchft.checkpointing.codec.digest import digest_bytes
from torchft.checkpointing.codec.encoding import Encoded, Replace, decode
from torchft.checkpointing.codec.stream import storage_bytes, tensor_memory
from torchft.checkpointing.memory.host import HostMemory
from torchft.checkpointing.memory.staging import StreamCopies, copies_for
from torchft.checkpointing.snapshots.shares import Share, deal

SLOTS = ("0", "1")

MAGIC = b"TFTSLOT1"
PAGE = 4096
PIECE = 16 << 20  # bytes with a digest of their own
_ALIGNED = 64
_THREADS = 4  # that read and verify a large slot: one copies 1 to 2 GB/s to memory that is used first
_LARGE = 64 << 20  # bytes
_TRIES, _TRY_SEC = 10, 0.05  # for the lock of a rank
_LEAD = struct.Struct("<8sII")  # magic, length and CRC of the header
_held: Set[int] = set()  # files whose locks this process holds
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


class SlotError(RuntimeError):
    """A slot cannot be written, or holds no complete state; the message names the slot and the cause."""


class Header(NamedTuple):
    """The header of a slot.

    Attributes:
        job, group: names of the job and of the group, without the group's UUID.
        group_rank, group_world_size: which rank's state it is, of how many.
        step: the step of the state.
        batches: batches committed until then.
        quorum: the quorum in which the step was committed.
        saved: when the copy was complete, in seconds since 1970.
        nbytes: size of the whole file.
        structure, regions: offset, length and CRC of the structure and of the table of regions.
        disk: where this state is to be written to as well: folder, every, part, parts; None: nowhere.
        share: what of the state is in the slot; None: all.
    """

    job: str
    group: str
    group_rank: int
    group_world_size: int
    step: int
    batches: int
    quorum: int
    saved: float
    disk: Optional[Dict[str, Any]] = None
    share: Optional[Share] = None
    nbytes: int = 0
    structure: Tuple[int, int, int] = (0, 0, 0)
    regions: Tuple[int, int, int] = (0, 0, 0)


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
    """Removes the slots of a rank, its folder, and the folders of group and job if they are empty then."""
    with suppress(OSError):
        for name in (*SLOTS, "lock"):
            (folder / name).unlink(missing_ok=True)
        group, job = folder.parents[:2]
        folder.rmdir()
        group.rmdir()
        if not any(each.is_dir() for each in job.iterdir()):
            for name in (_keeper.SETTINGS, *_keeper.TOLD):
                (job / name).unlink(missing_ok=True)
        job.rmdir()


def read_header(path: Path) -> Header:
    """Returns a slot's header, or SlotError if incomplete. Regions and structure may still be damaged."""
    try:
        with open(path, "rb") as file:
            return _header(path, file.read(PAGE), os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise SlotError(f"{path}: {error.strerror}") from error


def read_structure(path: Path) -> Any:
    """Returns the structure of a slot, decoded from JSON. Regions may still be damaged. SlotError: it is not
    complete, or header or structure are damaged.
    """
    try:
        with open(path, "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            return json.loads(
                read_index(path, file.read(PAGE), nbytes, partial(_pread, file.fileno())).structure
            )
    except OSError as error:
        raise SlotError(f"{path}: {error.strerror}") from error


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


def _header(path: Union[Path, str], page: bytes, nbytes: Optional[int]) -> Header:
    if len(page) < PAGE or not any(page):
        raise SlotError(f"{path}: it is not complete, its writer has ended before")
    magic, length, crc = _LEAD.unpack_from(page)
    text, rest = page[_LEAD.size : _LEAD.size + length], page[_LEAD.size + length :]
    if magic != MAGIC:
        raise SlotError(
            f"{path}: it begins with {magic!r} instead of {MAGIC!r}; another version may have made it"
        )
    if len(text) != length or zlib.crc32(text) != crc or any(rest):
        raise SlotError(f"{path}: its header is damaged")
    try:
        fields = json.loads(text)
        fields.setdefault("share", None)  # as written before there were parts
        header = Header(**{name: fields[name] for name in Header._fields})
        # JSON has lists
        header = header._replace(
            structure=_section(header.structure),
            regions=_section(header.regions),
            share=None if header.share is None else Share(*header.share),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise SlotError(f"{path}: its header is of another version: {error!r}") from error
    if nbytes not in (None, header.nbytes):
        raise SlotError(f"{path}: it has {nbytes} bytes, its header says {header.nbytes}")
    return header


def _section(values: Sequence[int]) -> Tuple[int, int, int]:
    offset, length, crc = values
    return offset, length, crc


class Region(NamedTuple):
    """A row of the table of regions.

    Attributes:
        offset, length: in the slot, in bytes.
        digests: of its pieces; None: the slot lacks it.
        device: in the trainer, such as "cpu".
    """

    offset: int
    length: int
    digests: Optional[List[str]]
    device: str


class Index(NamedTuple):
    """The description in a slot."""

    header: Header
    structure: bytes
    regions: List[Region]


def read_index(
    where: Union[Path, str], page: bytes, nbytes: Optional[int], read: Callable[[int, int], bytes]
) -> Index:
    """Returns what a slot says of itself.

    Args:
        where: names it in errors.
        page: its first page.
        nbytes: its size; None: it was compared already.
        read: returns a number of its bytes from an offset.

    Raises:
        SlotError: it is not complete, or damaged.
    """
    header = _header(where, page, nbytes)
    sections = []
    for (offset, length, crc), what in (
        (header.regions, "table of regions"),
        (header.structure, "structure"),
    ):
        section = read(offset, length)
        if len(section) != length or zlib.crc32(section) != crc:
            raise SlotError(f"{where}: its {what} is damaged")
        sections.append(section)
    try:
        return Index(header, sections[1], [Region(*row) for row in json.loads(sections[0])])
    except (ValueError, TypeError) as error:
        raise SlotError(f"{where}: its table of regions is of another version: {error!r}") from error


class Slot:
    """A complete slot, all of whose bytes were verified.

    Attributes:
        path: the file.
        header: its header.
        tree: the structure, decoded from JSON.
        flats: the memory of each region, as flat tensors of bytes in host memory. Those that the slot lacks
            have zeros.
        devices: the device of each region in the trainer, such as "cpu".
    """

    def __init__(
        self, path: Path, header: Header, tree: Any, flats: List[torch.Tensor], devices: List[str]
    ) -> None:
        self.path = path
        self.header = header
        self.tree = tree
        self.flats = flats
        self.devices = devices

    @classmethod
    def open(cls, path: Path, copy: bool = False, moved: Callable[[], None] = lambda: None) -> Slot:
        """Opens and verifies a slot.

        Args:
            path: the file.
            moved: called as it gets on, on several threads.
            copy: whether the regions are copied to memory of this process. Otherwise they are views of the
                file, and change when the trainer writes its next copy there: after reading, compare the
                header with that of :func:`read_header`. What a caller writes to them does not reach the file.

        Raises:
            SlotError: it is not complete, or damaged.
        """
        try:
            with open(path, "rb") as file:
                nbytes = os.fstat(file.fileno()).st_size
                index = read_index(path, file.read(PAGE), nbytes, partial(_pread, file.fileno()))
                tree = json.loads(index.structure)
                read = _copied(file.fileno(), moved) if copy else _mapped(file.fileno(), nbytes)
                flats = _regions(path, read, index, nbytes, moved)
                devices = [region.device for region in index.regions]
        except SlotError:
            raise
        except OSError as error:
            raise SlotError(f"{path}: {error.strerror}") from error
        except (ValueError, TypeError, MemoryError) as error:
            raise SlotError(f"{path}: it cannot be read: {error!r}") from error
        return cls(path, index.header, tree, flats, devices)

    def state(self, replace: Optional[Replace] = None) -> Any:
        """Returns the state. Its tensors have the memory of :attr:`flats`, unless ``replace`` gives others,
        as in `codec/encoding.decode`.

        Raises:
            CheckpointError: it holds a type that is not allowed; or DTensors, and torch.distributed is not
                initialized.
            SlotError: the slot has a part of it alone.
        """
        if self.header.share is not None:
            raise SlotError(f"{self.path} has a part of a state: {self.header.share}")
        return decode(self.tree, self.flats, str(self.path), replace)


# Given offset and length, returns the bytes of a region as a flat tensor, and its padding.
_Read = Callable[[int, int], Tuple[torch.Tensor, bytes]]


def _pread(file: int, offset: int, length: int) -> bytes:
    return os.pread(file, length, offset)


def _mapped(file: int, nbytes: int) -> _Read:
    # Copy on write: PyTorch takes no memory that is read-only.
    mapping = mmap.mmap(file, nbytes, access=mmap.ACCESS_COPY)

    def read(offset: int, length: int) -> Tuple[torch.Tensor, bytes]:
        end = offset + length
        flat = torch.frombuffer(mapping, dtype=torch.uint8, count=length, offset=offset)
        return flat, mapping[end : end + -length % _ALIGNED]

    return read


def _copied(file: int, moved: Callable[[], None] = lambda: None) -> _Read:
    memory, lock = HostMemory(), threading.Lock()

    def read(offset: int, length: int) -> Tuple[torch.Tensor, bytes]:
        with lock:
            flat, done = memory.take(length), 0
        into = tensor_memory(flat)
        while done < length:
            count = os.preadv(file, [into[done : done + PIECE]], offset + done)
            if count == 0:
                raise ValueError(f"it ends at {offset + done}")
            done += count
            moved()
        return flat, os.pread(file, -length % _ALIGNED, offset + length)

    return read


def _regions(
    path: Path, read: _Read, index: Index, nbytes: int, moved: Callable[[], None]
) -> List[torch.Tensor]:
    in_parts = index.header.share is not None

    def one(number: int) -> torch.Tensor:
        region = index.regions[number]
        if not region.length:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        flat, padding = read(region.offset, region.length)
        if not (in_parts and region.digests is None) and not _undamaged(region, flat, padding):
            raise SlotError(f"{path}: region {number} is damaged")
        moved()
        return flat

    if nbytes < _LARGE:
        return [one(number) for number in range(len(index.regions))]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="torchft_slot") as threads:
        return list(threads.map(one, range(len(index.regions))))


def _undamaged(region: Region, flat: torch.Tensor, padding: bytes) -> bool:
    return [_digest(piece) for piece in flat.split(PIECE)] == region.digests and not any(padding)


def fits(region: Region, file: int) -> bool:
    """Whether a file has the bytes of a region."""
    if not region.length:
        return True
    return _undamaged(region, *_copied(file)(region.offset, region.length))


def padded(length: int) -> int:
    """Returns the bytes that a region takes in a slot."""
    return length + -length % _ALIGNED


def _digest(piece: torch.Tensor) -> str:
    return f"{int(digest_bytes(piece).item()) & (1 << 64) - 1:016x}"


def pick(headers: Sequence[Optional[Header]], kept: Callable[[Header], bool] = lambda header: False) -> int:
    """Chooses the slot for the next copy: one that is not complete, else the older one, but none that is kept
    while there is another.

    Args:
        headers: of the slots; None: it is not complete.
        kept: whether a slot's state is still to be written elsewhere.
    """

    def worth(number: int) -> Tuple[bool, float, int]:
        header = headers[number]
        return (False, 0.0, 0) if header is None else (kept(header), header.saved, header.step)

    return min(range(len(headers)), key=worth)


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
    share = header.share
    parts = [None] * len(flats) if share is None else deal([flat.numel() for flat in flats], share.parts)
    held = [share is None or share.has(part) for part in parts]
    devices = {flat.device for flat, has in zip(flats, held) if has}
    copies = {device: kind(device) for device in devices if (kind := copies_for(device.type)) is not None}
    sources = [_Source(flat, copies.get(flat.device), has) for flat, has in zip(flats, held)]
    return _written(path, header, encoded, sources, holds)


class _Source(NamedTuple):
    flat: torch.Tensor  # a region
    copies: Optional[StreamCopies]  # how it is read on a device
    has: bool  # whether it is written


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
    if header.share is not None and _share(file) != header.share:
        os.ftruncate(file, 0)  # else the holes have memory
    put(file, bytes(PAGE), 0)
    yield PAGE
    table, offset = [], PAGE
    for flat, copies, has in sources:
        region = Region(offset, flat.numel(), [] if has else None, str(flat.device))
        table.append(region)
        if region.digests is not None:
            for piece in _pieces(flat, copies):
                put(file, tensor_memory(piece), offset)
                region.digests.append(_digest(piece))
                offset += piece.numel()
                yield piece.numel()
            put(file, bytes(-flat.numel() % _ALIGNED), offset)
        offset = region.offset + padded(region.length)
    yield from _end(file, header, encoded.structure, table, offset, holds)


def complete(file: int, index: Index) -> None:
    """Makes a slot of a file that has all regions. OSError: there is no room."""
    end = max((region.offset + padded(region.length) for region in index.regions), default=PAGE)
    for _ in _end(file, index.header._replace(share=None), index.structure, index.regions, end):
        pass


def _share(file: int) -> Optional[Share]:
    try:
        return _header("", os.pread(file, PAGE, 0), os.fstat(file).st_size).share
    except SlotError:
        return None


def _end(
    file: int,
    header: Header,
    structure: bytes,
    table: Sequence[Region],
    offset: int,
    holds: Callable[[], bool] = lambda: True,
) -> Iterator[int]:
    """Writes what follows the regions, and the header."""
    sections = []
    for section in (structure, json.dumps(table, separators=(",", ":")).encode()):
        put(file, section, offset)
        sections.append((offset, len(section), zlib.crc32(section)))
        offset += len(section)
        yield len(section)
    os.ftruncate(file, offset)
    header = header._replace(saved=time.time(), nbytes=offset, structure=sections[0], regions=sections[1])
    text = json.dumps(header._asdict(), separators=(",", ":")).encode()
    if _LEAD.size + len(text) > PAGE:
        raise SlotError(f"the header of a slot takes {len(text)} bytes, and at most {PAGE - _LEAD.size} fit")
    if not holds():
        return
    put(file, (_LEAD.pack(MAGIC, len(text), zlib.crc32(text)) + text).ljust(PAGE, b"\0"), 0)
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


def put(file: int, data: Union[bytes, memoryview], offset: int) -> None:
    """Writes all of the data to a file. OSError: there is no room."""
    view = memoryview(data)
    while len(view):
        done = os.pwrite(file, view, offset)
        view, offset = view[done:], offset + done
