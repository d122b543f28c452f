"""Several processes write one checkpoint, without messages: by names in its folder.

    .step-S.KEY/              being written; KEY is equal for all groups that committed this step together
        plan-R                what rank R of a group has
        part-R-P              what a process has written of it: part P of n
        R-P-…                 the files of that part
    .step-S.KEY.…/            all parts are there, one process makes the checkpoint of them
    step-S/                   the checkpoint

Each of these names appears by one rename or link of something complete, so a process may be killed at any
point: another one, or the next, goes on from what is there. The first one that writes a part counts.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import secrets
import shutil
import zlib
from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Tuple

from torchft.checkpointing.snapshots import disk, folders
from torchft.checkpointing.snapshots.disk import Content, DiskError, Items, Mappings, Parts, Written

Unit = Tuple[int, int]  # rank, and part of what it has


class _Plan(NamedTuple):
    items: Items
    mappings: Mappings
    parts: Parts


class Save:
    """One checkpoint of a job, as one process sees it.

    Args:
        folder: of the job's checkpoints; it is made if there is none.
        step: of the state.
        key: names the state of this step: equal in all groups that committed it together, and in no others.
        ranks: ranks of a group.
        parts: groups that share the work.
    """

    def __init__(self, folder: Path, step: int, key: str, ranks: int, parts: int) -> None:
        self.folder = folder
        self.step = step
        self._key = key
        self._ranks = ranks
        self._parts = parts
        self._partial = folder / f".step-{step}.{key}"
        self._complete = folder / f"step-{step}"
        self._token = secrets.token_hex(4)
        self.own = f"{self._partial.name}.{self._token}"  # what claimed() returns if it is this process
        self._plans: Optional[List[_Plan]] = None

    def __str__(self) -> str:
        return str(self._complete)

    def done(self) -> bool:
        """Whether the checkpoint is complete, or a newer one makes it superfluous."""
        newest = folders.complete(self.folder)[-1:]
        if newest and newest[0][0] > self.step:
            return True
        return (folders.describe(self._complete) or {}).get("key") == self._key

    def announce(self, rank: int, content: Content) -> None:
        """Says what a rank has. All processes that have the state of the rank say the same; the first counts.
        OSError: the folder cannot be written.
        """
        if self._claims():
            return
        self._partial.mkdir(parents=True, exist_ok=True)
        self._put(f"plan-{rank}", _Plan(content.items, content.mappings, content.parts))

    def silent(self) -> List[int]:
        """Returns the ranks that have not said what they have."""
        return [rank for rank in range(self._ranks) if not (self._partial / f"plan-{rank}").exists()]

    def missing(self) -> List[Unit]:
        """Returns what is not written yet; all ranks have said what they have."""
        return [unit for unit in self._units() if not (self._partial / _name(unit)).exists()]

    def present(self) -> List[Unit]:
        """Returns what is written; all ranks have said what they have."""
        return [unit for unit in self._units() if (self._partial / _name(unit)).exists()]

    def write(
        self, unit: Unit, content: Content, watch: disk.Watch = lambda count: None
    ) -> Optional[Written]:
        """Writes one part of what a rank has, unless the checkpoint is complete. The caller then looks
        whether the content was the state of this step up to the end, and calls :meth:`add` or :meth:`drop`.

        Args:
            unit: the rank, and the part.
            content: of the rank.
            watch: as in :func:`disk.write`.

        Raises:
            OSError: the disk is full, or fails.
            DiskError: the content is not what the rank has announced.
        """
        try:
            share = self._shares(self._partial)[unit[0]][unit[1]]
            name = f"{unit[0]}-{unit[1]}-{secrets.token_hex(4)}"
            return disk.write(self._partial, name, share, content, watch)
        except FileNotFoundError:
            if self._partial.exists():
                raise
            return None

    def add(self, unit: Unit, written: Written) -> None:
        """Adds what was written to the checkpoint, unless another process was faster."""
        try:
            if not self._put(_name(unit), written):
                self.drop(written)
        except FileNotFoundError:
            if self._partial.exists():
                raise

    def drop(self, written: Written) -> None:
        """Deletes what was written."""
        for name in written.files:
            (self._partial / name).unlink(missing_ok=True)

    def claimed(self) -> Optional[str]:
        """Returns who makes a checkpoint of the parts: a name that changes with the process; None: nobody."""
        return next(iter(self._claims()), None)

    def complete(self, instead: Optional[str] = None) -> bool:
        """Makes the checkpoint of the parts, which are all there.

        Args:
            instead: what :meth:`claimed` has returned for so long that its process must have ended.

        Returns:
            False if another process does so.

        Raises:
            DiskError: the parts are not all of the state.
            OSError: the disk is full, or fails.
        """
        mine = self.folder / self.own
        if instead != self.own:
            try:
                (self._partial if instead is None else self.folder / instead).rename(mine)
            except FileNotFoundError:
                return False
        try:
            self._finish(mine)
        except FileNotFoundError:
            if mine.exists():
                raise
            return False  # another process took it for ended
        except DiskError:
            mine.rename(self._partial)  # a damaged part is written again
            raise
        return True

    def _finish(self, mine: Path) -> None:
        if folders.describe(mine) is None:
            shares = self._shares(mine)
            written = [Written(*self._read(mine / _name(unit))) for unit in self._units()]
            files = disk.finish(
                mine,
                (share for of in shares for share in of),
                [p.mappings for p in self._read_plans(mine)],
                written,
            )
            told = {"step": self.step, "key": self._key, "files": files}
            self._put_in(mine / folders.DIGESTS, json.dumps(told, indent=1).encode())
        kept = {folders.DIGESTS, *(folders.describe(mine) or {})["files"]}
        for each in list(mine.iterdir()):
            if each.name not in kept:
                each.unlink()
        disk.sync(mine)
        try:
            mine.rename(self._complete)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            # Of another history: the job began again from an earlier step, so it was not wanted or not good.
            # What a script has written is its user's to delete.
            own = (self._complete / folders.DIGESTS).exists()
            name = f".step-{self.step}.old" if own else f"replaced-step-{self.step}"
            old = self.folder / f"{name}-{self._token}"
            self._complete.rename(old)
            mine.rename(self._complete)
            if own:
                shutil.rmtree(old, ignore_errors=True)
        disk.sync(self.folder)
        folders.prune(self.folder)

    def _claims(self) -> List[str]:
        begin = f"{self._partial.name}."
        return [each.name for each in self.folder.glob(".step-*") if each.name.startswith(begin)]

    def _units(self) -> List[Unit]:
        return [(rank, part) for rank in range(self._ranks) for part in range(self._parts)]

    def _shares(self, at: Path) -> List[List[Items]]:
        plans = self._read_plans(at)
        return disk.assign([plan.items for plan in plans], self._parts, [plan.parts for plan in plans])

    def _read_plans(self, at: Path) -> List[_Plan]:
        if self._plans is None:
            self._plans = [_Plan(*self._read(at / f"plan-{rank}")) for rank in range(self._ranks)]
        return self._plans

    def _put(self, name: str, value: Tuple[Any, ...]) -> bool:
        """Writes a value under a name of the folder; False if the name is there already."""
        data = pickle.dumps(tuple(value))
        return self._put_in(self._partial / name, zlib.crc32(data).to_bytes(4, "little") + data)

    def _put_in(self, path: Path, data: bytes) -> bool:
        whole = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            with open(whole, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(whole, path)
            except OSError as error:
                if error.errno == errno.EEXIST or path.exists():
                    return False
                if error.errno == errno.ENOENT:
                    raise
                whole.rename(path)  # a file system without links; two processes at once write the same
        finally:
            whole.unlink(missing_ok=True)
        return True

    def _read(self, path: Path) -> Tuple[Any, ...]:
        data = path.read_bytes()
        if zlib.crc32(data[4:]).to_bytes(4, "little") != data[:4]:
            path.unlink(missing_ok=True)  # it is written again
            raise DiskError(f"{path} is damaged; it is written again")
        return pickle.loads(data[4:])


def _name(unit: Unit) -> str:
    return f"part-{unit[0]}-{unit[1]}"
