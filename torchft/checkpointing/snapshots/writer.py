"""Writes states that are due for disk from slots to checkpoints. The keeper of a host starts it:

    python -m torchft.checkpointing.snapshots.writer ROOT

The keeper gives it the lowest priority; it is alone for ROOT. It ends with its parent, or when no slot has
named a folder for a while. Each folder has a thread of its own, because a disk may hang; the main thread goes
on to say so (`due.Status`, and its log on stderr).
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Set, Tuple

import torch

from torchft.checkpointing.snapshots import folders, reading, slots, stored
from torchft.checkpointing.snapshots.disk import Content, DiskError
from torchft.checkpointing.snapshots.due import FINISHED, Due, Status, read_status, unwritten, write_status
from torchft.checkpointing.snapshots.saving import Save, Unit
from torchft.checkpointing.snapshots.shares import missing as missing_parts
from torchft.checkpointing.snapshots.slots import Header, SlotError
from torchft.checkpointing.transport import CheckpointError

OTHERS = 30.0  # seconds after which this process says what others have not done
# Seconds after which this process writes the parts of groups that have not, beside three times what its own
# have taken: those of a group that was killed before its copy never come.
LATE = 5.0
_LOOK = 0.5  # seconds between two looks at the slots
_POLL = 0.05  # seconds between two looks for the parts of others
_RETRY = 10.0  # seconds after an error of the disk
_IDLE = 10.0  # seconds without a slot that names a folder, after which the process ends

_log = logging.getLogger("torchft.snapshots.writer")


class Found(NamedTuple):
    """A slot with a state that is to be written."""

    path: Path
    header: Header
    due: Due


class _Changed(Exception):
    """The trainer has begun to write another state to the slot."""


class FolderWriter:
    """Writes the checkpoints of one folder, on a thread of its own.

    Args:
        folder: of the checkpoints.
        others: seconds to wait for others.
        late: seconds to wait for parts that this process has too, beside three times what its own have taken;
            at most `others`.
        retry: seconds to wait after an error.
    """

    def __init__(
        self, folder: Path, others: float = OTHERS, retry: float = _RETRY, late: float = LATE
    ) -> None:
        self._folder = folder
        self._others = others
        self._late = late
        self._retry = retry
        self._found: List[Found] = []
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._contents: Dict[Path, Tuple[Header, Content]] = {}
        self._damaged: Dict[Path, Header] = {}
        self._save: Optional[Save] = None  # the newest one
        self._written: Optional[Save] = None  # the last one that ended
        self._status = Status()
        self._moved = time.monotonic()  # when the disk answered last
        self._asked = False  # whether it is to answer
        self._alone = False  # whether no other host writes to the folder, though this one has parts alone
        threading.Thread(target=self._run, name=f"checkpoints in {folder}", daemon=True).start()

    def look(self, found: List[Found]) -> None:
        """Says which slots there are now."""
        self._found = found
        self._wake.set()

    def end(self) -> None:
        """Ends the thread when the disk answers."""
        self._ended.set()
        self._wake.set()

    def status(self) -> Status:
        """Returns what this does, from any thread."""
        silent = time.monotonic() - self._moved
        if self._asked and silent > self._others:
            problem = f"{self._folder}: the disk has not answered for {silent:.0f} s"
            return self._status._replace(problem=problem)
        return self._status

    def _run(self) -> None:
        while not self._ended.is_set():
            self._wake.wait()
            self._wake.clear()
            self._asked, self._moved, problem = True, time.monotonic(), None
            try:
                self._pass()
            except (OSError, DiskError, CheckpointError, SlotError) as error:
                problem = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
            except _Changed:
                pass
            except Exception as error:  # also one of PyTorch's writer, which must not end the thread
                _log.exception("%s: it cannot be written", self._save or self._folder)
                problem = f"{type(error).__name__}: {error}"
            self._asked = False
            if problem is not None:
                self._trouble(f"{self._save or self._folder}: {problem}")
                self._ended.wait(self._retry)

    def _trouble(self, problem: str) -> None:
        if problem != self._status.problem:
            _log.warning("%s; the job trains on, and this is tried again every %g s", problem, self._retry)
            self._status = self._status._replace(problem=problem, writing=None, since=time.time())
        self._status = self._status._replace(writing=None)

    def _pass(self) -> None:
        """Writes the newest state that is due. DiskError, OSError: it could not be completed."""
        found = [each for each in self._found if self._damaged.get(each.path) != each.header]
        if not found:
            return
        newest = max(found, key=lambda each: (each.header.step, each.header.saved))
        header, key = newest.header, newest.due.key
        save = self._save
        if save is None or (save.step, save.key) != (header.step, key):
            save = Save(self._folder, header.step, key, header.group_world_size, header.share.parts)
            self._save = save
            self._contents.clear()
        if save is self._written:
            return
        if complete := folders.complete(self._folder):
            self._status = self._status._replace(written=complete[-1][0])
        if not save.done():
            if self._status.problem is None:  # else a newer step is kept, and taken as soon as there is one
                self._status = self._status._replace(writing=save.step, nbytes=0, since=time.time())
            begun = time.monotonic()
            self._write(
                save, [each for each in found if (each.header.step, each.due.key) == (save.step, key)]
            )
            if self._ended.is_set():
                return
            _log.info("%s: written after %.1f s", save, time.monotonic() - begun)
        self._contents.clear()
        self._written = save
        self._status = Status(written=max(save.step, self._status.written), since=time.time())

    def _write(self, save: Save, found: Sequence[Found]) -> None:
        """Writes what is missing of a checkpoint, and completes it."""
        own: Dict[Unit, Found] = {}
        ranks: Dict[int, List[Found]] = {}
        for each in found:
            own.setdefault((each.header.group_rank, each.header.share.part), each)
            ranks.setdefault(each.header.group_rank, []).append(each)
        in_parts = any(missing_parts([each.header.share for each in of]) for of in ranks.values())
        if self._alone and in_parts:
            self._store(found)
            return
        self._announce(save, ranks)
        waited, took = _Stopwatch(), 0.0
        written: Set[Unit] = set()  # by this process

        def write(unit: Unit, each: Found) -> None:
            save.write(unit, self._content(each), self._touch, partial(self._check, each))
            written.add(unit)

        while not self._ended.wait(_POLL) and not save.done():
            self._touch(0)
            if silent := save.silent():
                if waited.since(silent) > self._others:
                    raise DiskError(
                        f"nothing was said by ranks {silent} for {self._others:g} s: their hosts have "
                        "failed, or do not see the folder"
                    )
            elif not (missing := save.missing()):
                save.complete()
            elif mine := [unit for unit in missing if unit in own]:
                began = time.monotonic()
                for unit in mine:
                    write(unit, own[unit])
                took += time.monotonic() - began
            elif waited.since(missing) > min(self._others, self._late + 3 * took):
                others = [
                    (unit, each)
                    for unit in missing
                    for each in ranks.get(unit[0], [])
                    if each.header.share.has(unit[1])
                ]
                if others:
                    write(*others[0])
                elif waited.since(missing) > self._others and in_parts:
                    self._alone = written.issuperset(save.present())
                    self._store(found)
                    return
                elif waited.since(missing) > self._others:
                    raise DiskError(
                        f"no host has written part {missing[0]} (rank, part) for {self._others:g} s"
                    )

    def _store(self, found: Sequence[Found]) -> None:
        """Puts the slots into the folder: no host that writes to it has the other parts of the state, so no
        checkpoint can be made of them here.
        """
        for each in found:
            self._content(each)  # verifies it
            stored.store(each.path, each.header, self._folder, partial(self._check, each))
            self._touch(each.header.nbytes)
        for job, name in {(each.path.parents[2], each.header.job) for each in found}:
            stored.prune(self._folder, stored.complete(job))
            stored.tell(job, stored.found(self._folder, name), self._folder)

    def _announce(self, save: Save, ranks: Dict[int, List[Found]]) -> None:
        for rank, (each, *_) in ranks.items():
            if rank in save.silent():
                content = self._content(each)
                self._check(each)
                save.announce(rank, content)

    def _content(self, each: Found) -> Content:
        known = self._contents.get(each.path)
        if known is not None and known[0] == each.header:
            return known[1]
        try:
            slot = reading.mapped(each.path)
        except SlotError as error:
            self._check(each)
            self._damaged[each.path] = each.header
            raise DiskError(f"{error}; it is not written") from None
        if slot.header != each.header:
            raise _Changed
        header, parts = slot.header, [region.part for region in slot.regions]
        content = Content(slot.tree, slot.flats, header.group_rank, slot.where, header.share, parts)
        self._check(each)
        self._contents[each.path] = slot.header, content
        return content

    def _check(self, each: Found) -> None:
        """Raises an error if a slot does not have the state any more."""
        try:
            if slots.read_header(each.path) == each.header:
                return
        except SlotError:
            pass
        self._contents.pop(each.path, None)
        raise _Changed

    def _touch(self, count: int) -> None:
        self._moved = time.monotonic()
        self._status = self._status._replace(nbytes=self._status.nbytes + count)


class _Stopwatch:
    """How long something is as it is."""

    def __init__(self) -> None:
        self._what: object = None
        self._since = 0.0

    def since(self, what: object) -> float:
        """Returns the seconds since this value was given for the first time in a row."""
        if what != self._what:
            self._what, self._since = what, time.monotonic()
        return time.monotonic() - self._since


class Writer:
    """All folders of the slots of a host.

    Args:
        root: the folder of all slots.
        make: makes the writer of a folder.
    """

    def __init__(self, root: Path, make: Callable[[Path], FolderWriter] = FolderWriter) -> None:
        self._root = root
        self._make = make
        self._folders: Dict[str, FolderWriter] = {}

    def look(self) -> bool:
        """Looks at all slots, and says what it does about them. Returns whether any names a folder."""
        jobs = {job: _found(job) for job in self._root.iterdir() if job.is_dir()}
        by_folder: Dict[str, List[Found]] = {}
        for found in jobs.values():
            for each in found:
                by_folder.setdefault(each.due.folder, []).append(each)
        for folder in by_folder:
            if folder not in self._folders:
                self._folders[folder] = self._make(Path(folder))
        for folder, writer in self._folders.items():
            writer.look(by_folder.get(folder, []))
        for job, found in jobs.items():
            self._tell(job, {each.due.folder for each in found})
        return bool(by_folder)

    def _tell(self, job: Path, names: Set[str]) -> None:
        status = {folder: self._folders[folder].status() for folder in names}
        if status and status != read_status(job):
            write_status(job, status)
        for mark in job.glob(f"*/rank-*/{FINISHED}"):
            told = read_status(job)
            lock = slots.hold(mark.parent)
            if lock is None:
                continue  # the next trainer has begun, and removes the mark
            if not any(unwritten(each.header, told) for each in _due(mark.parent)):
                mark.unlink(missing_ok=True)
                slots.remove(mark.parent)
            slots.let_go(lock)
        if not any(job.glob("*/rank-*")):
            with suppress(OSError):
                slots.remove_job(job)

    def end(self) -> None:
        """Ends all threads that a disk answers."""
        for writer in self._folders.values():
            writer.end()


def _found(job: Path) -> List[Found]:
    return [each for folder in sorted(job.glob("*/rank-*")) for each in _due(folder)]


def _due(folder: Path) -> List[Found]:
    """The slots of a rank that are to be written."""
    return [
        Found(path, header, header.disk)
        for path, header in slots.headers(folder)
        if header is not None and header.disk is not None
    ]


def main(arguments: Sequence[str]) -> int:
    """Writes until the parent ends, or nothing is left to be written."""
    if len(arguments) != 1:
        print("usage: python -m torchft.checkpointing.snapshots.writer ROOT", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    root, parent = Path(arguments[0]), os.getppid()
    with open(root / "writer.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"{root} has a writer already", file=sys.stderr)
            return 0
        torch.set_num_threads(1)  # the keeper has given it the lowest priority
        writer, idle = Writer(root), time.monotonic()
        while os.getppid() == parent and time.monotonic() - idle < _IDLE:
            if writer.look():
                idle = time.monotonic()
            time.sleep(_LOOK)
        writer.end()
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a thread may wait for a disk that never answers
