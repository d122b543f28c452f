"""Checkpoints of a job: folders in the format of torch.distributed.checkpoint, each complete if it exists.

Trainers do not write them. They mark the copy in shared memory of a step that is due
(checkpointing/snapshots/due.py), and the writer of the host makes the checkpoint of it
(checkpointing/snapshots/writer.py). Where there is no such copy, or no keeper that starts a writer, the ranks
of one group write the checkpoint themselves, and wait for the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from torchft import _keeper
from torchft.checkpointing.codec.encoding import Encoded
from torchft.checkpointing.codec.stream import storage_bytes
from torchft.checkpointing.snapshots import folders, slots
from torchft.checkpointing.snapshots.disk import Content
from torchft.checkpointing.snapshots.due import Due
from torchft.checkpointing.snapshots.folders import Damage
from torchft.checkpointing.snapshots.reshard import resharded
from torchft.checkpointing.snapshots.saving import Save
from torchft.checkpointing.snapshots.slots import SlotError
from torchft.checkpointing.transport import CheckpointError

if TYPE_CHECKING:
    from torchft.manager import Manager

_PEERS_SEC = 60.0  # for which a rank that writes itself waits to hear what the others have
_POLL_SEC = 0.02

_log = logging.getLogger("torchft.job")


def check_every(every: Any) -> None:
    """Raises a ValueError unless this is a number of steps between two checkpoints."""
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"checkpoint_every={every!r}: allowed are whole numbers of steps from 1")


class Checkpoints:
    """The checkpoints of a job, which all groups may write to one folder, or each to its own.

    Args:
        folder: where they are, the same for all ranks of a group; None: nowhere.
        every: committed steps between two.
    """

    def __init__(self, folder: Optional[str | os.PathLike[str]], every: int, manager: Manager) -> None:
        self._folder = None if folder is None else Path(os.path.abspath(folder))
        self._every = every
        self._manager = manager
        manager._snapshots.folder = self._folder

    def check_state(self, averages_weights: bool) -> None:
        """Raises a ValueError if a checkpoint would lack a part of the state."""
        if averages_weights and self._folder is not None:
            raise ValueError(
                "checkpoint_dir: with LocalSGD or DiLoCo a checkpoint needs the outer optimizers, too; save "
                "it by hand, as docs/local_sgd.md says"
            )

    # Saving

    def save(self, state: Callable[[], dict[str, Any]], last: bool = False) -> None:
        """Has the state after a committed step written, if that is due. All ranks call it after each
        committed step, before the next one begins.

        Args:
            state: returns the state; called only if this rank writes it.
            last: whether no step follows. Then it is due: a group that returns after the end resumes from it.
        """
        manager, snapshots = self._manager, self._manager._snapshots
        step, part = manager.current_step(), manager.participating_rank()
        # A copy that failed, for lack of memory for example, is made up for by the next step.
        owed, snapshots.mark = snapshots.owed, None
        if self._folder is None or part is None or not (owed or last or step % self._every == 0):
            return
        to = Due(str(self._folder), self._key())
        if snapshots.works and _keeper_runs():
            snapshots.mark = step, to
        elif part == 0:
            self._write(step, to, state())

    def end(self) -> None:
        """Makes the copy that is due after the last step, which no step follows."""
        if self._manager._snapshots.owed:
            self._manager._snapshots.begin(self._manager._position)
            self._manager._snapshots.end()

    def _key(self) -> str:
        """Names the state of this step: the groups that have committed it together, and their quorum."""
        manager = self._manager
        told = json.dumps([manager._quorum_id, sorted(manager._current.peers)]).encode()
        return hashlib.blake2b(told, digest_size=8).hexdigest()

    def _write(self, step: int, to: Due, state: dict[str, Any]) -> None:
        """Writes what this rank has of a checkpoint, and completes it if all other ranks have."""
        settings = self._manager._settings
        rank = settings.group_rank
        try:
            encoded = Encoded(state)
            flats = [storage_bytes(storage) for storage in encoded.storages]
            content = Content(json.loads(encoded.structure), flats, rank, f"the state of rank {rank}")
            parts = self._manager.num_participants()
            save = Save(Path(to.folder), step, to.key, settings.group_world_size, parts)
            if save.done():
                return
            save.announce(rank, content)
            until = time.monotonic() + _PEERS_SEC
            while (silent := save.silent()) and not save.done():
                if time.monotonic() > until:
                    raise CheckpointError(f"nothing was said by ranks {silent} for {_PEERS_SEC:g} s")
                time.sleep(_POLL_SEC)
            for part in range(parts):
                save.write((rank, part), content)
            if not save.done() and not save.missing():
                save.complete()
        except (OSError, CheckpointError) as error:
            _log.warning(f"{to.folder}/step-{step} was not written: {error}; the job trains on without it")

    # Resuming

    def resume(self, state: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]) -> None:
        """Loads the newest state, if there is one: a checkpoint; or with the first step, unless a group has a
        later state, a copy in memory. All ranks of the group call it.

        Args:
            state: returns the state with the tensors to read into.
            load: loads what was read.

        Raises:
            ValueError: all checkpoints are damaged, or the newest is of another job.
        """
        damaged: dict[Path, Damage] = {}
        while not self._load_newest(damaged, state, load):
            pass
        if not _several() or dist.get_rank() == 0:
            for checkpoint, found in damaged.items():
                is_so = "is damaged" if found.content else "cannot be read"
                _log.warning(
                    f"the checkpoint {checkpoint} {is_so}, so an older state was loaded: {found.text}"
                )
                # without digests it is its user's, who may be writing it
                if found.content and (checkpoint / folders.DIGESTS).exists():
                    folders.set_aside(checkpoint)

    def _load_newest(
        self,
        damaged: dict[Path, Damage],
        state: Callable[[], dict[str, Any]],
        load: Callable[[dict[str, Any]], None],
    ) -> bool:
        """Loads the newest state, if there is one. Returns False if it is a checkpoint that is damaged."""
        newest = self._newest(damaged)
        # Of a step that both have, the copy is loaded: that is faster.
        beyond = -1 if newest is None else _step(newest) - 1
        # If the copy cannot be loaded after all, none is found, and the next in the list is loaded.
        again = partial(self.resume, state, load)
        if self._manager._begin_with_copy(beyond, again) or self._load_resharded(beyond, state, load):
            return True
        if newest is None:
            if damaged:
                told = "; ".join(f"{checkpoint}: {found.text}" for checkpoint, found in damaged.items())
                raise ValueError(
                    f"no checkpoint can be loaded: {told}; remove these folders to begin without"
                )
            return True
        if (found := _damage(newest) or _load(newest, state, load)) is not None:
            damaged[newest] = found
            return False
        _tell(f"goes on from step {_step(newest)}, of the checkpoint {newest}")
        return True

    def _load_resharded(
        self, beyond: int, state: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]
    ) -> bool:
        """Loads the copies of a group that had another number of ranks, if they are on the host of all."""
        snapshots, ranks = self._manager._snapshots, self._manager._settings.group_world_size
        if not (snapshots.on and _all(snapshots.works)):  # a rank may have no slots
            return False
        beyond, made = max(beyond, self._manager.current_step()), None
        if not _several() or dist.get_rank() == 0:
            with contextlib.suppress(SlotError):
                lighthouse = self._manager._settings.lighthouse_addr or ""
                made = resharded(slots.job_name(), ranks, beyond, _log.warning, lighthouse)
        names = _of_rank_0([] if made is None else [str(made)])
        if not names:
            return False
        checkpoint = Path(names[0])
        try:
            if not _all(checkpoint.is_dir()):
                _log.warning(
                    f"the copies of another number of ranks in {checkpoint} are not on the host of all"
                )
                return False
            if (failed := _load(checkpoint, state, load)) is not None:
                # what was read is in the model
                raise ValueError(f"the copies of another number of ranks cannot be read: {failed.text}")
            _tell(f"goes on from step {_step(checkpoint)}, of which other ranks left copies")
            return True
        finally:
            _all(True)  # have read it
            shutil.rmtree(checkpoint.parent, ignore_errors=True)

    def _newest(self, damaged: Container[Path]) -> Optional[Path]:
        """Returns the checkpoint that rank 0 finds: while a peer saves, another rank may find a later one."""
        if self._folder is None:
            return None
        found = [path for _, path in folders.complete(self._folder) if path not in damaged]
        names = _of_rank_0([path.name for path in found[-1:]])
        return self._folder / names[0] if names else None


def _tell(text: str) -> None:
    """Logs a line that a user should see, once a group."""
    _log.log(logging.INFO if _several() and dist.get_rank() else logging.WARNING, text)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _load(
    checkpoint: Path, state: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]
) -> Optional[Damage]:
    """Loads a checkpoint. Returns an error of the disk, the same in all ranks."""
    read = state()
    try:
        with _alone():
            dcp.load(read, checkpoint_id=checkpoint, no_dist=not _several())
        load(read)
        return None
    except (Exception, CheckpointException) as e:
        failures = [Damage.of(error) for error, _ in getattr(e, "failures", {}).values()]
        if failures and not any(failure.content for failure in failures):
            return failures[0]
        raise ValueError(
            f"the checkpoint {checkpoint} cannot be loaded: {e}; remove its folder to resume from the one "
            "before"
        ) from e


def _damage(checkpoint: Path) -> Optional[Damage]:
    """Says what is damaged in a checkpoint. Each rank of the group reads its share of the files."""
    if not _several():
        return folders.damage(checkpoint)
    found: list[Optional[Damage]] = [None] * dist.get_world_size()
    dist.all_gather_object(found, folders.damage(checkpoint, dist.get_rank(), dist.get_world_size()))
    return max((each for each in found if each is not None), key=lambda each: each.content, default=None)


def _of_rank_0(names: list[str]) -> list[str]:
    if not _several():
        return names
    found = [names]
    dist.broadcast_object_list(found, 0)
    return found[0]


def _all(each: bool) -> bool:
    """Whether this is so in all ranks of the group."""
    if not _several():
        return each
    found = [each] * dist.get_world_size()
    dist.all_gather_object(found, each)
    return all(found)


def _keeper_runs() -> bool:
    """Whether a keeper of this host runs, which starts the writer."""
    try:
        return _keeper.running(slots.root())
    except (OSError, SlotError):
        return False


def _several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hides the warning of torch.distributed.checkpoint that a group of one rank has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield
