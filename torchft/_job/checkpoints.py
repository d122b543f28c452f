"""Checkpoints of a job: folders in the format of torch.distributed.checkpoint, each complete if it exists."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

KEPT = 3  # the newest ones; the others are deleted
_NAME = re.compile(r"step-(\d+)")
_PARTIAL = re.compile(r"\.step-(\d+)\..*")  # one that is being written, or was when its group failed


class Checkpoints:
    """The checkpoints of a job, which all groups may write to one folder, or each to its own.

    Args:
        folder: where they are, the same for all ranks of a group; None: nowhere.
        every: committed steps between two.
        group: the name of this group.
    """

    def __init__(self, folder: Optional[str | os.PathLike[str]], every: int, group: str) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"checkpoint_every={every!r}: allowed are whole numbers of steps from 1")
        self._folder = None if folder is None else Path(folder)
        self._every = every
        self._group = group

    @property
    def enabled(self) -> bool:
        """Whether there is a folder."""
        return self._folder is not None

    def due(self, step: int) -> bool:
        """Whether the state after this step is to be saved."""
        return self._folder is not None and step % self._every == 0

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Writes the state after a step. All ranks of the group call it."""
        assert self._folder is not None
        complete = self._folder / f"step-{step}"
        partial = self._folder / f".step-{step}.{self._group}"
        with _alone():
            dcp.save(state, checkpoint_id=partial, no_dist=not _several())
        if not _several() or dist.get_rank() == 0:
            try:
                partial.rename(complete)
            except OSError:
                if not complete.exists():  # else another group's, of the same step
                    raise
                shutil.rmtree(partial)
            self._prune()

    def _prune(self) -> None:
        """Deletes all but the newest checkpoints, and what groups that failed have left of earlier ones."""
        oldest = self._steps(_NAME)[-KEPT:][0][0]
        for step, old in [*self._steps(_NAME), *self._steps(_PARTIAL)]:
            if step < oldest:
                shutil.rmtree(old, ignore_errors=True)

    def resume(self, state: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]) -> None:
        """Loads the newest checkpoint, if there is one. All ranks of the group call it.

        Args:
            state: returns the state with the tensors to read into.
            load: loads what was read.

        Raises:
            ValueError: the checkpoint is torn, or of another job.
        """
        newest = self._newest()
        if newest is None:
            return
        read = state()
        try:
            with _alone():
                dcp.load(read, checkpoint_id=newest, no_dist=not _several())
            load(read)
        except (Exception, CheckpointException) as e:
            raise ValueError(
                f"the checkpoint {newest} cannot be loaded: {e}; remove its folder to resume from the one "
                "before"
            ) from e

    def _newest(self) -> Optional[Path]:
        """Returns the checkpoint that rank 0 finds: while a peer saves, another rank may find a later one."""
        if self._folder is None:
            return None
        steps = [step for step, _ in self._steps(_NAME)[-1:]]
        if _several():
            found = [steps]
            dist.broadcast_object_list(found, 0)
            (steps,) = found
        return self._folder / f"step-{steps[0]}" if steps else None

    def _steps(self, name: re.Pattern[str]) -> list[tuple[int, Path]]:
        if self._folder is None or not self._folder.is_dir():
            return []
        found = [(name.fullmatch(each.name), each) for each in self._folder.iterdir()]
        return sorted((int(match[1]), each) for match, each in found if match)


def _several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hides the warning of torch.distributed.checkpoint that a group of one rank has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield
