"""Copies of a group with another number of ranks, as a checkpoint in memory that any number can read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from torchft.checkpointing.snapshots import reading, slots
from torchft.checkpointing.snapshots.disk import Content
from torchft.checkpointing.snapshots.saving import Save
from torchft.checkpointing.snapshots.slots import SlotError, StateKey
from torchft.checkpointing.transport import CheckpointError

_Copies = Dict[int, List[Path]]  # the slots of each rank of a group, that have a step or parts of it


def resharded(
    job: str, ranks: int, beyond: int, say: Callable[[str], None], lighthouse: Optional[str] = None
) -> Optional[Path]:
    """Makes a checkpoint of the newest step of which this host has the copies of all ranks of a group that
    had another number of ranks.

    Args:
        job: name of the job.
        ranks: ranks of a group now.
        beyond: only a later step.
        say: called with the reason for what is not read.
        lighthouse: of the job, as in :func:`slots.hold`.

    Returns:
        The checkpoint, which the caller removes with the folder that it is in; None: there is no such step.

    Raises:
        SlotError: as in :func:`slots.root`.
    """
    folder = slots.root() / slots.quoted(job)
    found: Dict[Tuple[int, int, int], _Copies] = {}  # by step, quorum, and ranks of a group
    for path in sorted(folder.glob("*/rank-*/[01]")):
        with suppress(SlotError):
            step, quorum, rank, of = slots.read_header(path).state
            if of != ranks and step > beyond:
                slots.check_job(path, lighthouse)
                found.setdefault((step, quorum, of), {}).setdefault(rank, []).append(path)
    for (step, quorum, of), paths in sorted(found.items(), reverse=True):
        if len(paths) == of and (made := _made(folder, step, quorum, paths, say)) is not None:
            return made
    return None


def _made(folder: Path, step: int, quorum: int, paths: _Copies, say: Callable[[str], None]) -> Optional[Path]:
    ranks = len(paths)
    within = Path(tempfile.mkdtemp(prefix="resharded-", dir=folder))
    save = Save(within, step, str(quorum), ranks, 1)
    try:
        contents = []
        for rank in range(ranks):
            sources = [reading.local(path) for path in paths[rank]]
            slot = reading.read(sources, StateKey(step, quorum, rank, ranks))
            contents.append(Content(slot.tree, slot.flats, rank, slot.where))
            save.announce(rank, contents[rank])
        for unit in save.missing():
            save.write(unit, contents[unit[0]])
        save.complete()
        return within / f"step-{step}"
    except (OSError, SlotError, CheckpointError) as error:
        say(f"the copies of step {step}, of {ranks} ranks, are not loaded: {error}")
        shutil.rmtree(within, ignore_errors=True)
        return None
