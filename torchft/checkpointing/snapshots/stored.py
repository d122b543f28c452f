"""Slots with parts of a state on disks that only their hosts see.

    FOLDER/parts-of-step-S/<group>/rank-<r>     a slot, as it was in memory (``slots.py``)

No host has all of a state there, so none of them can make a checkpoint of it; a restore gathers the parts
from the keepers (``gather.py``). Each file appears by one rename. Whether a step is complete is seen by the
lighthouse alone, which hears from all keepers. Only when it says so are older steps deleted: while it is
away, they wait.

    ROOT/<job>/stored.json                      what the keeper may serve of FOLDER, as this module has found
    ROOT/<job>/complete.json                    the newest step of which all hosts together have all, as the
                                                keeper has heard from the lighthouse
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import List, Optional, Tuple

from torchft import _keeper
from torchft._keeper import quoted
from torchft.checkpointing.snapshots import folders, slots
from torchft.checkpointing.snapshots.slots import Header, SlotError

STORED, COMPLETE = _keeper.TOLD
_NAME = re.compile(r"parts-of-step-(\d+)")
_AT_ONCE = 1 << 20  # bytes
_MOST = 64 << 10  # bytes that the keeper reads of what it is told (go/keeper)


def store(slot: Path, header: Header, folder: Path) -> Path:
    """Copies a slot to a disk, and waits until the disk has it. The caller looks whether the slot was
    overwritten meanwhile, and removes the copy then.

    Args:
        slot: the slot, whose content was verified.
        header: its header.
        folder: of the job's checkpoints.

    Raises:
        OSError: the disk is full, or fails.
    """
    path = folder / f"parts-of-step-{header.step}" / quoted(header.group) / f"rank-{header.group_rank}"
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(slot, "rb") as source, open(new, "xb") as target:
            _copy(source.fileno(), target.fileno(), header.nbytes)
            os.fsync(target.fileno())
        new.rename(path)
    finally:
        new.unlink(missing_ok=True)
    return path


def _copy(source: int, target: int, nbytes: int) -> None:
    """Copies a file; its holes stay holes."""
    os.ftruncate(target, nbytes)
    begin = 0
    while begin < nbytes:
        try:
            begin = os.lseek(source, begin, os.SEEK_DATA)
        except OSError:
            return  # the rest is a hole
        end = os.lseek(source, begin, os.SEEK_HOLE)
        while begin < end:
            block = os.pread(source, min(end - begin, _AT_ONCE), begin)
            if not block:
                return  # its trainer writes a smaller one
            slots.put(target, block, begin)
            begin += len(block)


def found(
    folder: Path, job: str, say: Callable[[str], object] = lambda text: None
) -> List[Tuple[Path, Header]]:
    """Returns the slots of a job in a folder of checkpoints, the newest first.

    Args:
        folder: of the job's checkpoints.
        job: its name.
        say: called with the reason for each slot that cannot be read.

    Raises:
        OSError: the disk fails.
    """
    each: List[Tuple[Path, Header]] = []
    for _, step in _steps(folder):
        for path in sorted(step.glob("*/rank-*")):
            try:
                header = slots.read_header(path)
            except SlotError as error:
                say(f"{error}; it is not loaded")
                continue
            if header.job == job:
                each.append((path, header))
    return sorted(each, key=lambda one: (-one[1].step, -one[1].quorum, one[0]))


def tell(job: Path, kept: Sequence[Tuple[Path, Header]], folder: Path) -> None:
    """Tells the keeper which slots of a folder it may serve.

    Args:
        job: the job's folder in ROOT.
        kept: its slots there, as :func:`found` returns them.
        folder: of its checkpoints.

    Raises:
        OSError: a disk or the memory fails.
    """
    told = []
    for path, header in kept:
        share = None if header.share is None else list(header.share)
        told.append(
            {
                "path": str(path.relative_to(folder)),
                "group": header.group,
                "group_rank": header.group_rank,
                "group_world_size": header.group_world_size,
                "step": header.step,
                "quorum": header.quorum,
                "saved": header.saved,
                "bytes": path.stat().st_blocks * 512,
                "share": share,
            }
        )
    if not told and not (job / STORED).exists():
        return
    new = job / f"{STORED}.{secrets.token_hex(4)}"
    while len(text := json.dumps({"folder": str(folder), "slots": told})) > _MOST:
        told = told[: len(told) * 7 // 8]  # without the oldest: of more, the keeper would read nothing
    new.write_text(text)
    new.replace(job / STORED)


def complete(job: Path) -> Optional[int]:
    """Returns the newest step of which all hosts together have all on disk; None: no lighthouse has said so.
    `job`: the job's folder in ROOT.
    """
    try:
        step = json.loads((job / COMPLETE).read_text())["step"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None


def prune(folder: Path, newest: Optional[int]) -> None:
    """Deletes the parts of steps before the newest complete one, but the newest of these.

    Args:
        folder: of the job's checkpoints.
        newest: the newest step that is complete; None: not known, so nothing is deleted.
    """
    if newest is None:
        return
    for _, old in [each for each in _steps(folder) if each[0] < newest][: -(folders.KEPT - 1)]:
        shutil.rmtree(old, ignore_errors=True)
    folders.prune_begun(folder, newest)


def _steps(folder: Path) -> List[Tuple[int, Path]]:
    return folders.named(folder, _NAME)
