"""Several processes write one checkpoint, without messages: by names in its folder.

    .step-S.KEY/              being written; KEY is equal for all groups that committed this step together
        plan-R                what rank R of a group has
        part-R-P              what a process has written of it: part P of n
        R-P-…                 the files of that part
        metadata-CRC          the metadata, when all parts are there
        torchft.json          says which files make the checkpoint
    step-S/                   the checkpoint: the same folder

Each of these names appears by one rename or link of something complete, and the first one counts: so a
process may be killed at any point, and another one, or the next, goes on from what is there.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import secrets
import shutil
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

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
        self.key = key
        self._ranks = ranks
        self._parts = parts
        self._partial = folder / f".step-{step}.{key}"
        self._complete = folder / f"step-{step}"
        self._plans: Optional[List[_Plan]] = None

    def __str__(self) -> str:
        return str(self._complete)

    def done(self) -> bool:
        """Whether the checkpoint is complete, or a newer one makes it superfluous."""
        newest = folders.complete(self.folder)[-1:]
        if newest and newest[0][0] > self.step:
            return True
        return (folders.describe(self._complete) or {}).get("key") == self.key

    def announce(self, rank: int, content: Content) -> None:
        """Says what a rank has. All processes that have the state of the rank say the same; the first counts.
        OSError: the folder cannot be written.
        """
        self._partial.mkdir(parents=True, exist_ok=True)
        self._set_aside()
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
        self,
        unit: Unit,
        content: Content,
        watch: disk.Watch = lambda count: None,
        holds: Callable[[], object] = lambda: None,
    ) -> None:
        """Writes one part of what a rank has, and adds it to the checkpoint, unless that is complete, or
        another process was faster.

        Args:
            unit: the rank, and the part.
            content: of the rank.
            watch: as in :func:`disk.write`.
            holds: called before it is added: raises an error if the content has changed meanwhile.

        Raises:
            OSError: the disk is full, or fails.
            DiskError: the content is not what the rank has announced.
        """
        written = Written([], {})
        added = False
        try:
            share = self._shares()[unit[0]][unit[1]]
            name = f"{unit[0]}-{unit[1]}-{secrets.token_hex(4)}"
            written = disk.write(self._partial, name, share, content, watch)
            holds()
            added = self._put(_name(unit), written)
        except FileNotFoundError:
            if self._partial.exists():
                raise
        finally:
            for name in () if added else written.files:
                (self._partial / name).unlink(missing_ok=True)

    def complete(self) -> None:
        """Makes the checkpoint of the parts, which are all there. Several processes may do so at once.

        Raises:
            DiskError: the parts are not all of the state.
            OSError: the disk is full, or fails.
        """
        try:
            told = folders.describe(self._partial) or self._describe()
            _, crc = told["files"][disk.METADATA]
            with suppress(FileNotFoundError):  # another process has, or an earlier one
                (self._partial / f"metadata-{crc:08x}").rename(self._partial / disk.METADATA)
            disk.sync(self._partial)
            self._partial.rename(self._complete)
        except FileNotFoundError:
            if self._partial.exists():
                raise
            return  # another process has
        disk.sync(self.folder)
        folders.prune(self.folder)

    def _describe(self) -> Dict[str, Any]:
        """Writes the metadata, and which files make the checkpoint. Returns that."""
        written = [Written(*self._read(self._partial / _name(unit))) for unit in self._units()]
        items = [item for of in self._shares() for share in of for item in share]
        own = self._partial / f"metadata.{secrets.token_hex(4)}"
        own.mkdir()
        disk.write_metadata(own, items, [plan.mappings for plan in self._read_plans()], written)
        size, crc = folders.checksum(own / disk.METADATA)
        (own / disk.METADATA).rename(self._partial / f"metadata-{crc:08x}")
        files = {name: found for each in written for name, found in each.files.items()}
        told = {"step": self.step, "key": self.key, "files": {**files, disk.METADATA: (size, crc)}}
        self._put_in(folders.DIGESTS, json.dumps(told, indent=1).encode())
        return folders.describe(self._partial) or told

    def _set_aside(self) -> None:
        """Renames a checkpoint of this step of another history: the job began again from an earlier step, so
        it was not wanted or not good. What a script has written is its user's to delete.

        This is done before anything of the new one is written: at its end, a process that is late could
        rename the new one.
        """
        if not self._complete.exists() or self.done():
            return
        own = (self._complete / folders.DIGESTS).exists()
        name = f".step-{self.step}.old" if own else f"replaced-step-{self.step}"
        old = self.folder / f"{name}-{secrets.token_hex(4)}"
        with suppress(FileNotFoundError):  # another process has
            self._complete.rename(old)
        if own:
            shutil.rmtree(old, ignore_errors=True)

    def _units(self) -> List[Unit]:
        return [(rank, part) for rank in range(self._ranks) for part in range(self._parts)]

    def _shares(self) -> List[List[Items]]:
        plans = self._read_plans()
        return disk.assign([plan.items for plan in plans], self._parts, [plan.parts for plan in plans])

    def _read_plans(self) -> List[_Plan]:
        if self._plans is None:
            paths = [self._partial / f"plan-{rank}" for rank in range(self._ranks)]
            self._plans = [_Plan(*self._read(path)) for path in paths]
        return self._plans

    def _put(self, name: str, value: Tuple[Any, ...]) -> bool:
        """Writes a value under a name of the folder; False if the name is there already."""
        data = pickle.dumps(tuple(value))
        return self._put_in(name, zlib.crc32(data).to_bytes(4, "little") + data)

    def _put_in(self, name: str, data: bytes) -> bool:
        path, whole = self._partial / name, self._partial / f"{name}.{secrets.token_hex(4)}"
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
