"""Copies of a group with another number of ranks, as a checkpoint in memory that any number can read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from torchft.checkpointing.snapshots import gather, slots
from torchft.checkpointing.snapshots.disk import Content
from torchft.checkpointing.snapshots.saving import Save
from torchft.checkpointing.snapshots.slots import Header, Slot, SlotError
from torchft.checkpointing.transport import CheckpointError

_State = Tuple[int, int, int]  # step, quorum, and ranks of a group


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
    states: Dict[_State, Dict[int, List[Path]]] = {}
    for path in sorted(folder.glob("*/rank-*/[01]")):
        with suppress(SlotError):
            header: Header = slots.read_header(path)
            if header.group_world_size != ranks and header.step > beyond:
                slots.check_job(path, lighthouse)
                of = states.setdefault(_state(header), {})
                of.setdefault(header.group_rank, []).append(path)
    for state in sorted(states, reverse=True):
        if len(states[state]) == state[2] and (made := _made(folder, state, states[state], say)) is not None:
            return made
    return None


def _made(
    folder: Path, state: _State, paths: Dict[int, List[Path]], say: Callable[[str], None]
) -> Optional[Path]:
    step, quorum, ranks = state
    within = Path(tempfile.mkdtemp(prefix="resharded-", dir=folder))
    save = Save(within, step, str(quorum), ranks, 1)
    try:
        opened = [_opened(paths[rank], state, rank, within, say) for rank in range(ranks)]
        contents = [Content(slot.tree, slot.flats, rank, str(slot.path)) for rank, slot in enumerate(opened)]
        for rank, content in enumerate(contents):
            save.announce(rank, content)
        for unit in save.missing():
            written = save.write(unit, contents[unit[0]])
            assert written is not None
            save.add(unit, written)
        for slot in opened:
            if slot.path.parent != within and slots.read_header(slot.path) != slot.header:
                raise SlotError(f"{slot.path} has another state now")
        save.complete()
        return within / f"step-{step}"
    except (OSError, SlotError, CheckpointError) as error:
        say(f"the copies of step {step}, of {ranks} ranks, are not loaded: {error}")
        shutil.rmtree(within, ignore_errors=True)
        return None


def _opened(paths: List[Path], state: _State, rank: int, within: Path, say: Callable[[str], None]) -> Slot:
    """Returns one of several copies of a rank: the first one that is not damaged, or one made of parts."""
    parts: List[Path] = []
    for path in paths:
        try:
            slot = Slot.open(path)
        except SlotError as error:
            say(str(error))
            continue
        if _state(slot.header) == state:
            if slot.header.share is None:
                return slot
            parts.append(path)
    if parts:
        sources = [partial(gather.local, path) for path in parts]
        return gather.gather(sources, within / f"rank-{rank}", lambda header: _state(header) == state)
    raise SlotError(f"there is no undamaged copy of rank {rank}")


def _state(header: Header) -> _State:
    return header.step, header.quorum, header.group_world_size
