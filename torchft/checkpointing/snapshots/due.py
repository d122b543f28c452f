"""Which states are to be written to disk, and what has become of it.

The trainer marks a slot with a folder (:class:`Due`, in its header). The writer says what it does in
ROOT/<job>/disk.json (:class:`Status`, by folder). So neither waits for the other, nor the trainer for a disk.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Optional

if TYPE_CHECKING:
    from torchft.checkpointing.snapshots.slots import Header

STATUS = "disk.json"
FINISHED = "finished"  # a file beside the slots of a rank: they are removed when what is due is written


class Due(NamedTuple):
    """Where a state is to be written to.

    Attributes:
        folder: of the job's checkpoints, an absolute path.
        key: names this state: equal in all groups that committed the step together, and in no others.
    """

    folder: str
    key: str


class Status(NamedTuple):
    """What a writer does about a folder.

    Attributes:
        written: the step of the newest complete checkpoint that it knows; -1: none.
        writing: the step that it writes; None: none.
        nbytes: written of that so far.
        problem: why it does not get on; None: it does.
        since: when it began to write, or when the problem began, in seconds since 1970.
    """

    written: int = -1
    writing: Optional[int] = None
    nbytes: int = 0
    problem: Optional[str] = None
    since: float = 0.0


def unwritten(header: Header, status: Dict[str, Status]) -> bool:
    """Whether a slot's state is still to be written, so that the slot is not removed."""
    to = header.disk
    return to is not None and header.step > status.get(to.folder, Status()).written


def kept(header: Header, status: Dict[str, Status]) -> bool:
    """Whether the next copy goes to the other slot, because this one is still to be written. While an earlier
    step is written to a slow disk, that one is kept and not the later ones.
    """
    writing = None if header.disk is None else status.get(header.disk.folder, Status()).writing
    return unwritten(header, status) and writing in (None, header.step)


def read_status(job: Path) -> Dict[str, Status]:
    """Returns what the writer does about the folders of a job. `job`: the job's folder in ROOT."""
    try:
        told: Dict[str, Dict[str, Any]] = json.loads((job / STATUS).read_text())
        return {folder: Status(**fields) for folder, fields in told.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # no writer has been here yet, or one of another version


def write_status(job: Path, status: Dict[str, Status]) -> None:
    """Says what the writer does."""
    new = job / f"{STATUS}.new"
    new.write_text(json.dumps({folder: each._asdict() for folder, each in status.items()}))
    os.replace(new, job / STATUS)
