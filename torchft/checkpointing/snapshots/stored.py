"""Slots with parts of a state on disks that only their hosts see.

    FOLDER/parts-of-step-S/<group>/rank-<r>     a slot, as it was in memory (``slots.py``)

No host has all of a state there, so none of them can make a checkpoint of it; a restore gathers the parts
from the keepers (``reading.py``). Each file appears by one rename. Whether a step is complete is seen by the
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

from torchft._keeper import quoted
from torchft.checkpointing.snapshots import folders, slots
from torchft.checkpointing.snapshots.slots import Header, SlotError

STORED, COMPLETE = "stored.json", "complete.json"
_NAME = re.compile(r"parts-of-step-(\d+)")
_MOST = 200  # slots of which the keeper is told


def store(slot: Path, header: Header, folder: Path, holds: Callable[[], object]) -> Path:
    """Copies a slot to a disk, and waits until the disk has it.

    Args:
        slot: the slot, whose content was verified.
        header: its header.
        folder: of the job's checkpoints.
        holds: called at the end: raises an error if the slot was overwritten meanwhile.

    Raises:
        OSError: the disk is full, or fails.
    """
    path = folder / f"parts-of-step-{header.step}" / quoted(header.group) / f"rank-{header.group_rank}"
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        shutil.copyfile(slot, new)
        with open(new, "rb") as file:
            os.fsync(file.fileno())
        holds()
        new.rename(path)
    finally:
        new.unlink(missing_ok=True)
    return path


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
    names = ("group", "group_rank", "group_world_size", "step", "quorum", "saved", "share")
    told = [
        {
            **{name: getattr(header, name) for name in names},
            "bytes": header.nbytes,
            "path": str(path.relative_to(folder)),
        }
        for path, header in kept[:_MOST]
    ]
    if not told and not (job / STORED).exists():
        return
    new = job / f"{STORED}.{secrets.token_hex(4)}"
    new.write_text(json.dumps({"folder": str(folder), "slots": told}))
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
